"""Messages whose fields are each in their bounds and contradict one another, by the rules of
SPEC.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol import ShownGrant, Span, Stretch, TrajectoryGroup, limits
from protocol.blob import BlobRead, BulkAsk, Slice
from protocol.digest import ZERO
from protocol.election import Ballot
from protocol.join import Member
from protocol.manifest import ModelFile
from protocol.receipt import Refusal
from protocol.tokens import pack_ids
from protocol.weights import Route, TensorEntry

from .examples import (
    CREDIT_STATEMENT,
    GRANT,
    GRANTS_ANSWER,
    GROUPS_QUESTION,
    HEAD,
    HEAD_ZERO,
    INVENTORY,
    INVENTORY_ACK,
    LAYOUT,
    MANIFEST,
    MANIFEST_WITH_ADAPTER,
    MANIFEST_WITH_CODE,
    PEERS_ANSWER,
    RECEIPT,
    ROLLOUT_REQUEST,
    ROSTER,
    SAMPLER,
    SMALL_GROUP,
    STRANGER,
    TABLE,
    TRAINER,
    VERIFIER,
    VOTE_ANSWER,
    VOTE_REFUSAL,
    completion,
    name,
)


def _in(message: Any, path: str, **changes: Any) -> Any:
    """A copy of a message with fields of one of its parts changed."""
    part, _, rest = path.partition(".")
    if not part:
        return dataclasses.replace(message, **changes)
    return dataclasses.replace(message, **{part: _in(getattr(message, part), rest, **changes)})


_ADAPTER = MANIFEST_WITH_ADAPTER.model.adapter
_WHEELS = MANIFEST_WITH_CODE.contract.wheel or ()


def _head(**changes: Any) -> Any:
    return dataclasses.replace(HEAD, **changes)


def _group(**changes: Any) -> Any:
    return dataclasses.replace(SMALL_GROUP, **changes)


_ENVIRONMENT, _LATER = SMALL_GROUP.spans[1]
_ANCHOR = HEAD_ZERO.routes[0]
_FRAMES = [TABLE.frames[i : i + 32] for i in range(0, 96, 32)]

_OWN = SMALL_GROUP.spans[0]
_REPLIES = TrajectoryGroup.of(
    prompt=[1],
    completions=[
        completion(
            4,
            9,
            (Stretch(0, 4, 0), Stretch(4, 5, None), Stretch(5, 6, 0), Stretch(6, 7, None), Stretch(7, 9, 0)),
            ends=("turn", "length", "end"),
        )
    ],
    engine="torch/f32",
    heads=SMALL_GROUP.heads[:1],
    slot=0,
    vocabulary=151_936,
)
"""A completion of three turns."""


def _second(*spans: Span) -> Any:
    """The small group with other spans of its second completion."""
    return _group(spans=(_OWN, spans))


CONTRADICTIONS: dict[str, Any] = {
    # peers
    "peers out of order": dataclasses.replace(PEERS_ANSWER, peers=PEERS_ANSWER.peers[::-1]),
    "one peer told twice": dataclasses.replace(PEERS_ANSWER, peers=PEERS_ANSWER.peers[:1] * 2),
    # trajectory
    "columns of different lengths": _group(rewards=(0.5,)),
    "fewer finish reasons than completions": _group(finish=("end",)),
    "a prompt with a byte too many": _group(prompt=SMALL_GROUP.prompt + b"\0"),
    "a prompt with unused bits that are not zero": _group(
        prompt=pack_ids([1], 151_936)[:2] + b"\x80", prompt_length=1
    ),
    "tokens with a byte too few": _group(tokens=SMALL_GROUP.tokens[:-1]),
    "log-probabilities for fewer tokens": _group(logprobs=SMALL_GROUP.logprobs[:-3]),
    "one head named twice": _group(heads=(SMALL_GROUP.heads[0],) * 2),
    "a head under which nothing was drawn": _group(heads=(*SMALL_GROUP.heads, name("unused"))),
    "a span under a head that is not named": _group(heads=SMALL_GROUP.heads[:1]),
    "spans of a completion that is not there": _group(spans=(*SMALL_GROUP.spans, ())),
    "a span beyond its completion": _second(_ENVIRONMENT, dataclasses.replace(_LATER, length=5)),
    "spans out of order": dataclasses.replace(_REPLIES, spans=((Span(6, 1, None), Span(4, 1, None)),)),
    "spans that overlap": _second(_ENVIRONMENT, dataclasses.replace(_LATER, start=4, length=5)),
    "two spans that are one": _second(_ENVIRONMENT, Span(5, 2, 1), Span(7, 2, 1)),
    "log-probabilities on the environment's tokens": _second(Span(2, 3, None), _LATER),
    "tokens under an older head than before": _second(_ENVIRONMENT, dataclasses.replace(_LATER, length=3)),
    "fewer ends of turns than turns": dataclasses.replace(_REPLIES, ends=(("turn", "end"),)),
    "ends of turns of another completion": _group(ends=(*(SMALL_GROUP.ends or ()), ("turn",))),
    "an environment in a run that has none": _group(ends=None),
    "a finish that only an environment gives": dataclasses.replace(
        TrajectoryGroup.of(
            prompt=[1],
            completions=[completion(4, 3)],
            engine="torch/f32",
            heads=SMALL_GROUP.heads[:1],
            slot=0,
            vocabulary=151_936,
        ),
        finish=("done",),
    ),
    "a turn after the end": dataclasses.replace(_REPLIES, ends=(("turn", "end", "end"),)),
    "an end that the last turn has not": dataclasses.replace(_REPLIES, ends=(("turn", "turn", "turn"),)),
    "a completion that ends with the environment": dataclasses.replace(
        _REPLIES,
        ends=(("turn", "end"),),
        logprobs=_REPLIES.logprobs[:-6] + bytes(6),
        spans=((Span(7, 2, None),),),
    ),
    "a completion that begins with the environment": dataclasses.replace(
        _REPLIES,
        ends=(("turn", "end"),),
        logprobs=bytes(6) + _REPLIES.logprobs[6:],
        spans=((Span(0, 2, None),),),
    ),
    # manifest
    "model files out of order": _in(MANIFEST, "model", files=MANIFEST.model.files[::-1]),
    "one model file twice": _in(MANIFEST, "model", files=(ModelFile(ZERO, "a", 1), ModelFile(ZERO, "a", 2))),
    "an end token outside the vocabulary": _in(MANIFEST, "model", end_tokens=(151_936,)),
    "end tokens out of order": _in(MANIFEST, "model", end_tokens=(2, 1)),
    "engine classes out of order": _in(MANIFEST, "", engines=MANIFEST.engines[::-1]),
    "one trainer twice": _in(MANIFEST, "", trainers=(*MANIFEST.trainers, TRAINER.public)),
    "one verifier twice": _in(MANIFEST, "", verifiers=(VERIFIER.public,) * 2),
    "an elector from outside": _in(MANIFEST, "terms", electors=(STRANGER.public,)),
    "electors out of order": _in(MANIFEST, "terms", electors=MANIFEST.terms.electors[::-1]),
    "a quorum of more verifiers than there are": _in(MANIFEST, "verification", policy="quorum", quorum=2),
    "a lease of less than two heartbeats": _in(MANIFEST, "terms", lease_ms=29_999),
    "a data set that is held out whole": _in(
        MANIFEST, "", data=(dataclasses.replace(MANIFEST.data[0], held_out=1_000),)
    ),
    "wheels out of order": _in(MANIFEST_WITH_CODE, "contract", wheel=_WHEELS[::-1]),
    "one wheel twice": _in(MANIFEST_WITH_CODE, "contract", wheel=_WHEELS[:1] * 2),
    "wheels of too many bytes": _in(
        MANIFEST_WITH_CODE,
        "contract",
        wheel=(_WHEELS[0], dataclasses.replace(_WHEELS[1], size=limits.CODE_BYTES)),
    ),
    "an end of turns that ends nothing": _in(MANIFEST_WITH_CODE, "turns", end=7),
    "more tokens of a turn than in all": _in(MANIFEST_WITH_CODE, "turns", tokens=257),
    "more tokens of the environment than in all": _in(MANIFEST_WITH_CODE, "turns", environment=257),
    "replies that nobody can check, of anybody": dataclasses.replace(
        _in(MANIFEST_WITH_CODE, "contract", pure=False),
        turns=dataclasses.replace(MANIFEST_WITH_CODE.turns, samplers=()),
    ),
    "adapter targets out of order": _in(
        MANIFEST_WITH_ADAPTER,
        "model",
        adapter=dataclasses.replace(_ADAPTER, targets=("v_proj", "q_proj")),
    ),
    "one adapter target twice": _in(
        MANIFEST_WITH_ADAPTER,
        "model",
        adapter=dataclasses.replace(_ADAPTER, targets=("q_proj", "q_proj")),
    ),
    "more tokens than the context holds": _in(MANIFEST, "sampling", max_prompt=3841),
    # join, receipt
    "members out of order": dataclasses.replace(ROSTER, members=ROSTER.members[::-1]),
    "one member twice": dataclasses.replace(ROSTER, members=(Member(SAMPLER.public, "torch/f32", ZERO),) * 2),
    "an announcement answered twice": dataclasses.replace(RECEIPT, announced=RECEIPT.accepted[:32]),
    "reasons out of order": dataclasses.replace(RECEIPT, refused=RECEIPT.refused[::-1]),
    "one group accepted and refused": dataclasses.replace(
        RECEIPT, refused=(Refusal("stale", RECEIPT.accepted[:32]),)
    ),
    # inventory
    "one group listed twice": dataclasses.replace(INVENTORY, groups=INVENTORY.groups[:32] * 2),
    "one group drawn twice": dataclasses.replace(INVENTORY_ACK, drawn=INVENTORY_ACK.drawn * 2),
    "a group lacking that was drawn": dataclasses.replace(INVENTORY_ACK, drawn=INVENTORY_ACK.lacking),
    "one group lacking twice": dataclasses.replace(INVENTORY_ACK, lacking=INVENTORY_ACK.lacking * 2),
    "one group asked for twice": dataclasses.replace(GROUPS_QUESTION, groups=GROUPS_QUESTION.groups[:32] * 2),
    # credit
    "reasons of a statement out of order": dataclasses.replace(
        CREDIT_STATEMENT, refused=CREDIT_STATEMENT.refused[::-1]
    ),
    "one reason of a statement twice": dataclasses.replace(
        CREDIT_STATEMENT, refused=CREDIT_STATEMENT.refused[:1] * 2
    ),
    "an account since a time that is yet to come": dataclasses.replace(
        CREDIT_STATEMENT, since_ms=CREDIT_STATEMENT.at_ms + 1
    ),
    "verified tokens of no group": dataclasses.replace(CREDIT_STATEMENT, verified=0),
    # rollout_request
    "a taken slot that was not asked for": dataclasses.replace(ROLLOUT_REQUEST, taken=(0, 16)),
    "a request for slots that were all taken": dataclasses.replace(ROLLOUT_REQUEST, count=2, taken=(0, 1)),
    # weights
    "version 1 that follows nothing": _head(previous=ZERO),
    "version 0 that follows something": dataclasses.replace(HEAD_ZERO, previous=name("something")),
    "version 0 in term 2": dataclasses.replace(HEAD_ZERO, term=2),
    "version 0 at step 1": dataclasses.replace(HEAD_ZERO, step=1),
    "version 0 without an anchor": dataclasses.replace(
        HEAD_ZERO, routes=(dataclasses.replace(_ANCHOR, base=name("base")),)
    ),
    "two routes from one base": _head(routes=(Route(None, "raw", 1, ZERO), Route(None, "raw", 2, ZERO))),
    "columns of a table of different lengths": dataclasses.replace(TABLE, after=TABLE.after[:-32]),
    "a frame that is too large": dataclasses.replace(TABLE, sizes=b"\x01\x00\x01\x01" + TABLE.sizes[4:]),
    "a frame with a size and no hash": dataclasses.replace(TABLE, frames=bytes(32) + TABLE.frames[32:]),
    "a frame with a hash and no size": dataclasses.replace(TABLE, sizes=bytes(4) + TABLE.sizes[4:]),
    "tensors out of order": dataclasses.replace(LAYOUT, tensors=LAYOUT.tensors[::-1]),
    "one tensor twice": dataclasses.replace(
        LAYOUT, tensors=(TensorEntry("a", "bf16", ()), TensorEntry("a", "f32", ()))
    ),
    "ballots out of order": dataclasses.replace(GRANT, ballots=GRANT.ballots[::-1]),
    "one elector's ballot twice": dataclasses.replace(
        GRANT, ballots=(Ballot(VERIFIER.public, bytes(64)), Ballot(VERIFIER.public, bytes(64)))
    ),
    # terms
    "a vote that is given and refused": dataclasses.replace(VOTE_ANSWER, refusal="voted"),
    "a vote that is neither given nor refused": dataclasses.replace(VOTE_REFUSAL, refusal=None),
    "grants out of order": dataclasses.replace(
        GRANTS_ANSWER, grants=(ShownGrant(_in(GRANT, "vote", term=3), ()), ShownGrant(GRANT, ()))
    ),
    "a grant that is shown with its ballots out of order": dataclasses.replace(
        GRANTS_ANSWER, grants=(ShownGrant(dataclasses.replace(GRANT, ballots=GRANT.ballots[::-1]), ()),)
    ),
    "grants with too many heads together": dataclasses.replace(
        GRANTS_ANSWER, grants=(ShownGrant(GRANT, (b"h",) * limits.CHAIN_HEADS), ShownGrant(GRANT, (b"h",)))
    ),
    # blob
    "a read of more than a stream carries": BlobRead((Slice(ZERO, 0, 1 << 22), Slice(ZERO, 0, 1))),
    "an ask for more than the door gives": BulkAsk((Slice(ZERO, 0, 1 << 30), Slice(ZERO, 0, 1))),
}
