"""Any honest message of each type, for property tests. Plain fields follow the notation of
SPEC.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
from hypothesis import strategies as st

from protocol import (
    ChunkTable,
    Completion,
    CreditRefusal,
    CreditStatement,
    Delivery,
    Frame,
    GrantsAnswer,
    GrantsQuestion,
    GroupReference,
    GroupsQuestion,
    HeadsAnswer,
    HeadsQuestion,
    Heartbeat,
    Identity,
    Inventory,
    InventoryAck,
    Join,
    Layout,
    Link,
    Manifest,
    Member,
    PeerPlace,
    PeersAnswer,
    PeersQuestion,
    Receipt,
    Refusal,
    RolloutRequest,
    Roster,
    Route,
    ShownGrant,
    SlotAnnouncement,
    Stretch,
    TermGrant,
    TermVote,
    TrajectoryGroup,
    Verdict,
    VoteAnswer,
    VoteQuestion,
    WeightsHead,
    canonical,
    limits,
    wire,
)
from protocol.blob import BlobHoldings, BlobRead, BlobWants, BulkAsk, BulkOffer, Slice
from protocol.digest import ZERO
from protocol.election import Ballot
from protocol.trajectory import FINISHED
from protocol.weights import TensorEntry

from .idl import NAMED, definitions

KEYS = tuple(Identity(bytes([index]) * 32).public for index in range(12))
_TEXT = st.characters(exclude_categories=("Cc", "Cs", "Cf", "Zl", "Zp"))

digests = st.binary(min_size=32, max_size=32)
counters = st.one_of(st.integers(0, 100), st.integers(0, limits.SAFE_INTEGER))
terms = st.integers(1, limits.SAFE_INTEGER)
slugs = st.from_regex(r"[a-z][a-z0-9]{0,9}(-[a-z0-9]{1,9}){0,2}", fullmatch=True)
engines = st.from_regex(r"[a-z0-9]{1,12}/[a-z0-9_]{1,12}", fullmatch=True)

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=40),
        st.binary(max_size=300),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=20),
        st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=10), inner, max_size=20),
    ),
    max_leaves=40,
)
"""Any value that the wire can carry."""

exts = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8), st.integers(0, 9), max_size=4
)


def unique_keys(least: int, most: int) -> st.SearchStrategy[tuple[bytes, ...]]:
    return st.lists(st.sampled_from(KEYS), min_size=least, max_size=most, unique=True).map(tuple)


def notation(text: str) -> st.SearchStrategy[Any]:
    """Any canonical value of a field's notation."""
    if text.endswith(" ?"):
        return st.none() | notation(text.removesuffix(" ?"))
    if text == "key":
        return st.sampled_from(KEYS)
    if text == "bool":
        return st.booleans()
    if text.startswith("map "):
        return exts
    if text.startswith('"'):
        return st.sampled_from(re.findall(r'"(\w+)"', text))
    if match := re.fullmatch(r"\[(.+)\] (\d+)\.\.(\d+)( ascending)?", text):
        items = st.lists(
            notation(match[1]), min_size=int(match[2]), max_size=min(int(match[3]), 4), unique=bool(match[4])
        )
        return items.map(sorted) if match[4] else items
    text = NAMED.get(text, text)
    if match := re.fullmatch(r"match /(.+)/ \.\.(\d+)", text):
        most = int(match[2])
        return st.from_regex(match[1], fullmatch=True, alphabet=st.characters(max_codepoint=126)).filter(
            lambda found: len(found) <= most
        )
    if match := re.fullmatch(r"(uint|float|text|bytes) (-?[\d.]+?)\.\.(-?[\d.]+)( step (\d+))?", text):
        return _ranges(match[1], match[2], match[3], int(match[5] or 1))
    return tree(text)


def _ranges(kind: str, low: str, high: str, step: int) -> st.SearchStrategy[Any]:
    if kind == "uint":
        return st.integers(int(low), int(high)) | st.sampled_from((int(low), int(high)))
    if kind == "float":
        return st.floats(float(low), float(high)).map(lambda number: number + 0.0)
    least, most = int(low), min(int(high), int(low) + 64)
    if kind == "text":
        return st.text(_TEXT, max_size=most).filter(lambda found: least <= len(found.encode()) <= int(high))
    return st.integers(least // step, most // step).flatmap(
        lambda n: st.binary(min_size=n * step, max_size=n * step)
    )


def tree(name: str) -> st.SearchStrategy[Any]:
    """Any canonical value of a definition of SPEC.md whose fields are independent."""
    definition = definitions()[name]
    fields = {field: notation(text) for field, text in definition.fields.items()}
    return st.tuples(*fields.values()).map(list) if definition.row else st.fixed_dictionaries(fields)


def independent(cls: type) -> st.SearchStrategy[Any]:
    return tree(cls.__name__).map(wire.of(cls).load)


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    vocabulary = draw(st.integers(1, 300) | st.integers(1, 2**24))
    ids = st.integers(0, vocabulary - 1)
    count = draw(st.integers(1, 4))
    switches = draw(st.integers(0, 2))
    completions = [draw(_completions(ids, switches if index == 0 else 0)) for index in range(count)]
    used = {stretch.head for completion in completions for stretch in completion.stretches} - {None}
    heads = draw(st.lists(digests, min_size=max(used | {0}) + 1, max_size=max(used | {0}) + 1, unique=True))
    if draw(st.booleans()) and all(
        len(each.ends or ()) == 1 for each in completions
    ):  # of a run without turns
        completions = [
            dataclasses.replace(each, ends=None, finish="end" if each.finish == "end" else "length")
            for each in completions
        ]
    if draw(st.booleans()):  # of a run without claims
        completions = [dataclasses.replace(each, reward=None) for each in completions]
    return TrajectoryGroup.of(
        prompt=draw(st.lists(ids, min_size=1, max_size=20)),
        completions=completions,
        engine=draw(engines),
        heads=tuple(heads),
        slot=draw(counters),
        vocabulary=vocabulary,
    )


@st.composite
def _completions(draw: st.DrawFn, ids: st.SearchStrategy[int], switches: int) -> Completion:
    stretches: list[Stretch] = []
    at = 0
    for head in range(switches + 1):
        owners = (head, None, head) if head == switches else (head, None)
        for owner in owners[: draw(st.sampled_from((1, len(owners))))]:
            length = draw(st.integers(1, 12))
            stretches.append(Stretch(at, at + length, owner))
            at += length
    turns = 1 + sum(stretch.head is None for stretch in stretches)
    finish = draw(st.sampled_from(FINISHED))
    last = "end" if finish == "end" else draw(st.sampled_from(("length", "turn")))
    logprobs = -np.array(draw(st.lists(st.floats(0, 80), min_size=at, max_size=at)))
    for stretch in stretches:
        if stretch.head is None:
            logprobs[stretch.start : stretch.end] = 0.0
    return Completion(
        ids=np.array(draw(st.lists(ids, min_size=at, max_size=at))),
        logprobs=logprobs,
        finish=finish,
        reward=draw(st.floats(-1e6, 1e6)) + 0.0,
        stretches=tuple(stretches),
        ends=(*(draw(st.sampled_from(("length", "turn"))) for _ in range(turns - 1)), last),
    )


@st.composite
def rollout_requests(draw: st.DrawFn) -> RolloutRequest:
    count = draw(st.integers(1, limits.BATCH))
    taken = draw(st.sets(st.integers(0, count - 1), max_size=min(count - 1, 40)))
    return RolloutRequest(
        count=count, first=draw(counters), head=draw(digests), taken=tuple(sorted(taken)), ext=draw(exts)
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    told = draw(tree("Manifest"))
    trainers, verifiers = draw(unique_keys(1, 3)), draw(unique_keys(0, 3))
    told["trainers"], told["verifiers"] = list(trainers), list(verifiers)
    told["terms"]["electors"] = sorted({*trainers, *verifiers})
    told["terms"]["lease_ms"] = 2 * told["terms"]["heartbeat_ms"]
    told["verification"]["quorum"] = max(1, len(verifiers))
    told["verification"]["policy"] = draw(
        st.sampled_from(("self", "sampled", "quorum") if verifiers else ("self",))
    )
    told["engines"] = sorted(
        {item["engine"]: item for item in told["engines"]}.values(), key=lambda item: item["engine"]
    )
    model = told["model"]
    model["files"] = sorted(
        {item["name"]: item for item in model["files"]}.values(), key=lambda item: item["name"]
    )
    model["vocab_size"] = draw(st.integers(model["end_tokens"][-1] + 1, 1 << 24))
    if model["adapter"] is not None:
        model["adapter"]["targets"] = sorted(set(model["adapter"]["targets"]))
    pin = told["contract"]
    if pin["wheel"] is not None:
        named = {each["name"]: {**each, "size": draw(st.integers(1, 2**20))} for each in pin["wheel"]}
        pin["wheel"] = [named[each] for each in sorted(named)]
    if (turns := told["turns"]) is not None:
        turns["end"] = draw(st.sampled_from(model["end_tokens"]))
        most = told["sampling"]["max_tokens"]
        turns["tokens"], turns["environment"] = draw(st.integers(1, most)), draw(st.integers(1, most))
        pin["pure"] = pin["pure"] or not turns["samplers"]
    for each in told["data"]:
        each["held_out"] = draw(st.integers(0, each["rows"] - 1))
    model["context"] = told["sampling"]["max_prompt"] + told["sampling"]["max_tokens"]
    loaded: Manifest = wire.of(Manifest).load(told)
    return loaded


@st.composite
def heads(draw: st.DrawFn) -> WeightsHead:
    version = draw(counters)
    bases = draw(st.lists(st.none() | digests, min_size=1, max_size=4, unique=True))
    routes = [
        Route(base, draw(slugs), draw(counters), draw(digests)) for base in (bases if version else [None])
    ]
    return WeightsHead(
        **{field: draw(digests) for field in ("groups", "layout", "luck", "root", "roster")},
        previous=draw(digests.filter(any)) if version else ZERO,
        routes=tuple(routes),
        step=draw(counters) if version else 0,
        term=draw(terms) if version else 1,
        version=version,
        ext=draw(exts),
    )


@st.composite
def tables(draw: st.DrawFn) -> ChunkTable:
    frames = st.builds(Frame, digests.filter(any), st.integers(1, limits.FRAME_BYTES), digests)
    unchanged = digests.map(lambda after: Frame(ZERO, 0, after))
    return ChunkTable.of(draw(slugs), draw(st.lists(frames | unchanged, min_size=1, max_size=9)))


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    ids = draw(st.lists(digests, max_size=12, unique=True))
    reasons = sorted(draw(st.sets(slugs, max_size=min(3, len(ids)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=len(reasons), max_size=len(reasons))))
    parts = [ids[a:b] for a, b in itertools.pairwise((0, *cuts, len(ids)))]
    refused = [Refusal(reason, b"".join(part)) for reason, part in zip(reasons, parts, strict=False) if part]
    return Receipt(
        accepted=b"".join(parts[-1]),
        announced=b"".join(
            draw(st.lists(digests, max_size=3, unique=True).filter(lambda a: not {*a} & {*ids}))
        ),
        head=draw(digests),
        rate=draw(st.none() | st.floats(0, 1e6).map(lambda rate: rate + 0.0)),
        refused=tuple(refused),
        term=draw(terms),
        version=draw(counters),
        ext=draw(exts),
    )


def id_lists(least: int) -> st.SearchStrategy[bytes]:
    """Different ids in a row."""
    return st.lists(digests, min_size=least, max_size=12, unique=True).map(b"".join)


@st.composite
def acknowledgements(draw: st.DrawFn) -> InventoryAck:
    ids = draw(st.lists(digests, max_size=12, unique=True))
    cut = draw(st.integers(0, len(ids)))
    return InventoryAck(b"".join(ids[:cut]), draw(digests), b"".join(ids[cut:]), draw(exts))


@st.composite
def statements(draw: st.DrawFn) -> CreditStatement:
    since, at = sorted((draw(counters), draw(counters)))
    verified = draw(counters)
    return CreditStatement(
        at_ms=at,
        condemned=draw(counters),
        learnt=draw(counters),
        refused=tuple(
            CreditRefusal(reason, draw(st.integers(1, 2**53 - 1)))
            for reason in sorted(draw(st.sets(slugs, max_size=4)))
        ),
        sampler=draw(st.sampled_from(KEYS)),
        since_ms=since,
        tokens=draw(counters) if verified else 0,
        verified=verified,
        ext=draw(exts),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = draw(
        st.sets(
            st.from_regex(r"[A-Za-z0-9_-]{1,8}(\.[A-Za-z0-9_-]{1,8}){0,3}", fullmatch=True),
            min_size=1,
            max_size=6,
        )
    )
    shapes = st.lists(st.integers(1, 2**40), max_size=4).map(tuple)
    return Layout(
        tuple(
            TensorEntry(name, draw(st.sampled_from(("bf16", "f16", "f32"))), draw(shapes))
            for name in sorted(names)
        )
    )


@st.composite
def grants(draw: st.DrawFn) -> TermGrant:
    vote = TermVote(
        base=draw(digests), leader=draw(st.sampled_from(KEYS)), term=draw(st.integers(2, 2**53 - 1))
    )
    electors = sorted(draw(unique_keys(1, 5)))
    return TermGrant(tuple(Ballot(key, draw(st.binary(min_size=64, max_size=64))) for key in electors), vote)


@st.composite
def shown_grants(draw: st.DrawFn) -> GrantsAnswer:
    branches = st.lists(st.binary(min_size=1, max_size=64), max_size=4).map(tuple)
    shown = draw(st.lists(st.builds(ShownGrant, grants(), branches), max_size=4))
    return GrantsAnswer(tuple(sorted(shown, key=lambda each: each.grant.vote.term)))


vote_answers = st.builds(VoteAnswer, slugs, st.none()) | st.builds(
    VoteAnswer, st.none(), st.binary(min_size=64, max_size=64)
)


@st.composite
def slices(draw: st.DrawFn, most: int) -> tuple[Slice, ...]:
    """Slices that have together at most so many bytes."""
    count = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, most // count), min_size=count, max_size=count))
    return tuple(Slice(draw(digests), draw(counters), length) for length in lengths)


rosters = unique_keys(0, 8).flatmap(
    lambda keys: st.tuples(*(st.builds(Member, st.just(key), engines, digests) for key in sorted(keys))).map(
        Roster
    )
)

peer_lists = unique_keys(0, 8).flatmap(
    lambda keys: st.tuples(
        *(
            st.builds(
                PeerPlace,
                st.just(key),
                st.lists(notation("address"), min_size=1, max_size=3).map(tuple),
            )
            for key in sorted(keys)
        )
    ).map(PeersAnswer)
)

ANY: dict[str, st.SearchStrategy[Any]] = {
    "manifest": manifests(),
    "group": groups(),
    "group-reference": independent(GroupReference),
    "join": independent(Join),
    "heartbeat": independent(Heartbeat),
    "receipt": receipts(),
    "verdict": independent(Verdict),
    "inventory": st.builds(Inventory, groups=id_lists(1), head=digests, number=terms, term=terms, ext=exts),
    "inventory-ack": acknowledgements(),
    "credit-statement": statements(),
    "head": heads(),
    "vote": independent(TermVote),
    "rollout-request": rollout_requests(),
    "slot-announcement": independent(SlotAnnouncement),
    "roster": rosters,
    "chunk-table": tables(),
    "layout": layouts(),
    "grant": grants(),
    "link": independent(Link),
    "peers-question": independent(PeersQuestion),
    "peers-answer": peer_lists,
    "delivery": independent(Delivery),
    "blob-wants": independent(BlobWants),
    "blob-holdings": independent(BlobHoldings),
    "blob-read": slices(limits.READ_BYTES).map(BlobRead),
    "bulk-ask": slices(limits.BULK_BYTES).map(BulkAsk),
    "bulk-offer": independent(BulkOffer),
    "groups-question": st.builds(GroupsQuestion, groups=id_lists(1), run=digests),
    "heads-question": independent(HeadsQuestion),
    "heads-answer": independent(HeadsAnswer),
    "vote-question": independent(VoteQuestion),
    "vote-answer": vote_answers,
    "grants-question": independent(GrantsQuestion),
    "grants-answer": shown_grants(),
}

__all__ = ["ANY", "canonical", "values"]
