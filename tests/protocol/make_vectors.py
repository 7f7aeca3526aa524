"""Write `protocol/vectors/*.json`: golden bytes for everything on the wire. `python -m
tests.protocol.make_vectors [--anew]`

Vectors only grow: a case that stands in a file is kept as it is, and the program fails if today's
code would write it differently. What is new is added at the end of its list. While a major version
is not released yet, `--anew` writes all of them as today's code does, except those of MAJOR 1.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protocol import (
    Envelope,
    Equivocation,
    Follower,
    Link,
    Manifest,
    Opened,
    ProtocolError,
    Refusal,
    Rules,
    TermGrant,
    canonical,
    decode,
    decode_delta,
    decode_raw,
    encode,
    limits,
    open_sealed,
    read_batch,
    sampling,
    seal,
    topics,
    verdict,
    wire,
    write_batch,
)
from protocol.delta import write_columns
from protocol.digest import ZERO, blob_id, derive, merkle_root
from protocol.errors import ChainError
from protocol.identity import check_key, peer_id, public_key_of
from protocol.tokens import bits_for, pack_ids, pack_logprobs, unpack_logprobs

from .contradictions import CONTRADICTIONS
from .examples import (
    BARE_TYPES,
    LINK,
    MANIFEST_WITH_ADAPTER,
    MANIFEST_WITH_CODE,
    MESSAGES,
    OPENED_MANIFEST,
    RUN,
    SAMPLER,
    SEALED_GROUP,
    SEALED_TYPES,
    STANDBY,
    STRANGER,
    TRAINER,
    VERDICT,
    VERIFIER,
    VOTE_ANSWER,
    name,
)
from .frames import (
    body,
    bombs,
    faulty_bodies,
    faulty_zstd,
    header,
    hexed,
    patterns,
    plain_frame,
    repeated,
    stories,
)
from .idl import edges, located
from .loose import loose_bytes, loose_seal
from .mutations import changed, malformed, spell, structural, tree_of
from .scenarios import TURNS, ZERO_HEAD, after, grant, line, opened

FOLDER = Path(__file__).parents[2] / "protocol" / "vectors"

Case = dict[str, Any]


def plain(value: Any) -> Any:
    """A canonical value in the notation of SPEC.md's section on vectors."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, float):
        return {"f64": struct.pack(">d", value).hex()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > limits.SAFE_INTEGER:
        return {"int": str(value)}
    if isinstance(value, Mapping):
        return {"map": {key: plain(inner) for key, inner in value.items()}}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def refusal(attempt: Callable[[], object]) -> str:
    """The reason for which something is refused."""
    try:
        attempt()
    except ProtocolError as error:
        return error.reason
    raise SystemExit("a case that should be refused was accepted")


def canonical_cases() -> dict[str, list[Case]]:
    values: dict[str, Any] = {
        "nil": None,
        "booleans": [True, False],
        "integers at the edges of their forms": [
            *(0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1),
            *(-1, -32, -33, -128, -129, -32_768, -32_769, -(2**31), -(2**31) - 1, -(2**63)),
        ],
        "floats": [0.0, 1.0, -1.5, 0.1, 1e300, 5e-324, -1e-9],
        "text": ["", "a", "é", "日本", "😀", "x" * 31, "x" * 32, "x" * 255, "x" * 256],
        "bytes": [b"", b"\x00", b"\xff" * 255, b"\x01" * 256],
        "arrays": [[], [[]], list(range(15)), list(range(16))],
        "maps": {"": 1, "A": {}, "a": {"b": []}, "aa": None, "b": 0, "é": 2, "\uffff": 3, "😀": 4},
        "a map of 16": {f"{index:02}": index for index in range(16)},
        "the deepest nesting": _nested(limits.DEPTH),
        "the longest key": {"k" * limits.KEY_BYTES: True},
    }
    invalid: dict[str, bytes] = {
        "nothing": b"",
        "an array that ends early": bytes.fromhex("9201"),
        "a string that ends early": bytes.fromhex("a361"),
        "bytes that end early": bytes.fromhex("c40201"),
        "a float that ends early": bytes.fromhex("cb00"),
        "two values": bytes.fromhex("0102"),
        "the unused type": bytes.fromhex("c1"),
        "float32": bytes.fromhex("ca3f800000"),
        "a timestamp": bytes.fromhex("d6ff00000000"),
        "ext 8": bytes.fromhex("c70101ff"),
        "ext 16": bytes.fromhex("c8000101ff"),
        "ext 32": bytes.fromhex("c90000000101ff"),
        "fixext 1": bytes.fromhex("d401ff"),
        "NaN": bytes.fromhex("cb7ff8000000000000"),
        "NaN with a payload": bytes.fromhex("cbfff0000000000001"),
        "infinity": bytes.fromhex("cb7ff0000000000000"),
        "minus infinity": bytes.fromhex("cbfff0000000000000"),
        "minus zero": bytes.fromhex("cb8000000000000000"),
        **{
            f"a longer form, {data}": bytes.fromhex(data)
            for data in (
                *("cc7f", "cd00ff", "ce0000ffff", "cf00000000ffffffff"),
                *("d000", "d0e0", "d1ff80", "d2ffff8000", "d3ffffffff80000000", "d3000000000000ffff"),
                *("d90161", "da001f" + "61" * 31, "db00000001" + "61", "c5000101", "c60000000101"),
                *("dc000101", "dd0000000101", "de0001a16101", "df00000001a16101"),
            )
        },
        "an integer as key": bytes.fromhex("810102"),
        "bytes as key": bytes.fromhex("81c4016102"),
        "keys out of order": bytes.fromhex("82a16201a16102"),
        "one key twice": bytes.fromhex("82a16101a16102"),
        "keys in the order of UTF-16": bytes.fromhex("82a4f09f988001a3efbfbf02"),
        "a key that is too long": bytes.fromhex("81d941" + "6b" * 65 + "c0"),
        "half a surrogate pair": bytes.fromhex("a3eda080"),
        "an overlong form": bytes.fromhex("a2c080"),
        "a lone continuation byte": bytes.fromhex("a180"),
        "nesting that is too deep": _nested_bytes(limits.DEPTH + 1),
        "too many items": b"\xdc" + (limits.ITEMS + 1).to_bytes(2) + bytes(limits.ITEMS + 1),
        "too many items in maps": b"\xde" + (8193).to_bytes(2) + b"".join(_pairs(8193)),
        "more items announced than there are": bytes.fromhex("ddffffffff00"),
        "more pairs announced than there are": bytes.fromhex("dfffffffffa100"),
        "more bytes announced than there are": bytes.fromhex("c6ffffffff00"),
    }
    return {
        "valid": [
            {"name": what, "value": plain(v), "bytes": canonical.encode(v).hex()}
            for what, v in values.items()
        ],
        "invalid": [
            {"name": what, "bytes": data.hex(), "error": refusal(lambda data=data: canonical.decode(data))}
            for what, data in invalid.items()
        ],
    }


def _nested(depth: int) -> Any:
    return [] if depth == 1 else [_nested(depth - 1)]


def _nested_bytes(depth: int) -> bytes:
    return b"\x91" * (depth - 1) + b"\x90"


def _pairs(count: int) -> list[bytes]:
    return [b"\xa4" + f"{index:04}".encode() + b"\xc0" for index in range(count)]


def digest_cases() -> dict[str, list[Case]]:
    inputs = [b"", b"a", bytes(range(256)) * 5]
    names = ["leaf", "node", "root", "beacon", "slot", "role", "link", "lot", *sorted(SEALED_TYPES)]
    leaves = [[name(f"leaf {index}") for index in range(count)] for count in (0, 1, 2, 3, 4, 5, 8, 13)]
    return {
        "derive": [
            {
                "name": f"{kind}, {len(data)} bytes",
                "text": kind,
                "input": data.hex(),
                "digest": derive(kind, data).hex(),
            }
            for kind in names
            for data in inputs
        ],
        "blob": [{"name": f"{len(d)} bytes", "input": d.hex(), "digest": blob_id(d).hex()} for d in inputs],
        "merkle": [
            {"name": f"{len(row)} leaves", "leaves": [x.hex() for x in row], "root": merkle_root(row).hex()}
            for row in leaves
        ],
    }


def identity_cases() -> dict[str, list[Case]]:
    prime = 2**255 - 19
    order_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
    bad = {
        "the neutral element": 1,
        "order 2": prime - 1,
        "order 4": 0,
        "order 4, other sign": 1 << 255,
        "order 8": order_8,
        "order 8, other sign": order_8 | 1 << 255,
        "order 8, other point": 55188659117513257062467267217118295137698188065244968500265048394206261417927,
        "y = p": prime,
        "y = p + 1": prime + 1,
        "the largest y": 2**255 - 1,
    }
    keys = {what: number.to_bytes(32, "little") for what, number in bad.items()}
    keys |= {"a byte too few": SAMPLER.public[:-1], "a byte too many": SAMPLER.public + b"\0"}
    good = SAMPLER.peer_id
    ids = {
        "empty": "",
        "a character too few": good[:-1],
        "a character too many": good + "1",
        "a character that base58 has not": good[:-1] + "0",
        "another multihash": "Qm" + good[2:],
        "an RSA key": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "the number beyond": "z" * 52,
        "another key type": "13" + good[2:],
        "a key of small order": peer_id(bytes(32)),
    }
    for key in keys.values():
        refusal(lambda key=key: check_key(key))
    for text in ids.values():
        refusal(lambda text=text: public_key_of(text))
    people = {
        "trainer": TRAINER,
        "standby": STANDBY,
        "verifier": VERIFIER,
        "sampler": SAMPLER,
        "stranger": STRANGER,
    }
    return {
        "valid": [
            {
                "name": who,
                "seed": key.seed.hex(),
                "public": key.public.hex(),
                "peer_id": key.peer_id,
                "message": who.encode().hex(),
                "signature": key.sign(who.encode()).hex(),
            }
            for who, key in people.items()
        ],
        "bad_keys": [{"name": what, "key": key.hex()} for what, key in keys.items()],
        "bad_peer_ids": [{"name": what, "peer_id": text} for what, text in ids.items()],
        "bad_signatures": [
            {
                "name": "one that holds only up to a point of small order",
                "public": SAMPLER.public.hex(),
                "message": b"mixed order".hex(),
                "signature": "e9b2fe981587efae6478f48ba1fa60cec6126d0e26dde72a0a24f640dcd783e5"
                "b0ccdb153201c39e40e6f09ffb8d6622d21fcf07d07095c06c40eb0660eaf900",
            },
            {
                "name": "one over another message",
                "public": SAMPLER.public.hex(),
                "message": b"another".hex(),
                "signature": SAMPLER.sign(b"message").hex(),
            },
        ],
    }


def topics_cases() -> dict[str, list[Case]]:
    run, blob = RUN.hex(), name("a blob")
    return {
        "topics": [
            {"name": cargo, "run": run, "cargo": cargo, "topic": topics.topic(RUN, cargo)}
            for cargo in topics.CARGOES
        ],
        "roles": [
            {"name": role, "run": run, "role": role, "key": topics.role_key(RUN, role).hex()}
            for role in topics.ROLES
        ],
        "blobs": [{"name": "a blob", "blob": blob.hex(), "key": topics.blob_key(blob).hex()}],
    }


def tokens_cases() -> dict[str, list[Case]]:
    random = np.random.default_rng(11)
    columns = [
        ([0], 1),
        ([1, 0, 1], 2),
        (list(range(16)), 16),
        ([1, 2, 3, 151_935], 151_936),
        ([2**24 - 1, 0], 2**24),
    ]
    columns += [(random.integers(0, size, 37).tolist(), size) for size in (3, 17, 256, 257, 49_152, 65_537)]
    values = [
        [-0.0, 0.0],
        [-0.5, -70.0],
        [-64.0 + 2**-18, -64.0, -1e300],
        [-(2.0**-19), -3 * 2.0**-19, -1e-12],
    ]
    values.append((-random.exponential(3.0, 9)).tolist())
    return {
        "ids": [
            {
                "name": f"{len(ids)} ids of a vocabulary of {size}",
                "ids": ids,
                "vocabulary": size,
                "bits": bits_for(size),
                "packed": pack_ids(ids, size).hex(),
            }
            for ids, size in columns
        ],
        "logprobs": [
            {
                "name": f"column {index}",
                "values": plain(column),
                "packed": pack_logprobs(column).hex(),
                "read": plain(unpack_logprobs(pack_logprobs(column)).tolist()),
            }
            for index, column in enumerate(values)
        ],
    }


def sampling_cases() -> dict[str, list[Case]]:
    streams = []
    for slot, head in ((0, name("a head")), (1, name("a head")), (2**53 - 1, name("another head"))):
        key = sampling.slot_key(RUN, head, SAMPLER.public, slot)
        streams.append(
            {
                "name": f"slot {slot}",
                "run": RUN.hex(),
                "head": head.hex(),
                "sampler": SAMPLER.public.hex(),
                "slot": slot,
                "beacon": sampling.beacon(head).hex(),
                "slot_key": key.hex(),
                "prompt_key": sampling.prompt_key(key).hex(),
                "uniforms": [
                    {"completion": j, "start": t, "values": plain(sampling.uniforms(key, j, 5, t).tolist())}
                    for j, t in ((0, 0), (0, 3), (7, 0), (255, 131_000))
                ],
            }
        )
    random = np.random.default_rng(5)
    draws, replays = [], []
    for index in range(12):
        row = random.dirichlet(np.full(7, 0.5))
        u = float(random.integers(0, 2**53)) * 2.0**-53
        token = int(sampling.draw(row[None], [u])[0])
        draws.append(
            {"name": f"draw {index}", "probabilities": plain(row.tolist()), "u": plain(u), "token": token}
        )
        claimed = int(random.integers(0, 7))
        found = sampling.replay(row[None], [claimed], [u])
        replays.append(
            {
                "name": f"replay {index}",
                "probabilities": plain(row.tolist()),
                "token": claimed,
                "u": plain(u),
                "d": plain(float(found.d[0])),
                "z": plain(float(found.z[0])),
            }
        )
    far = sampling.replay(np.array([[0.0, 1.0]]), [0], [0.5])
    replays.append(
        {
            "name": "a token that could not be drawn",
            "probabilities": plain([0.0, 1.0]),
            "token": 0,
            "u": plain(0.5),
            "d": plain(float(far.d[0])),
            "z": plain(float(far.z[0])),
        }
    )
    at_edges = [
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.5, 3),
        ([0.5, 0.5, 0.0], 1 - 2.0**-53, 1),
    ]
    for row, u, token in at_edges:
        if int(sampling.draw(np.array([row]), [u])[0]) != token:
            raise SystemExit("a draw at an edge went elsewhere")
        draws.append({"name": f"edge {u}", "probabilities": plain(row), "u": plain(u), "token": token})
    lots = [
        {
            "name": f"rate {rate}",
            "draw": VERDICT.draw.hex(),
            "rate": plain(rate),
            "drawn": verdict.drawn(VERDICT.draw, rate),
        }
        for rate in (0.0, 0.1, 0.5, 0.9, 1.0)
    ]
    return {"streams": streams, "draws": draws, "replays": replays, "lots": lots}


def envelope_cases() -> dict[str, list[Case]]:
    valid = []
    for kind, (message, who, run) in SEALED_TYPES.items():
        sealed = seal(message, who, run)
        parts = Envelope.parse(sealed)
        valid.append(
            {
                "name": kind,
                "sealed": sealed.hex(),
                "kind": kind,
                "run": run.hex(),
                "signer": who.public.hex(),
                "body": parts.body.hex(),
                "id": parts.id.hex(),
            }
        )
    join, _, _ = SEALED_TYPES["join"]
    body = encode(join)
    good = seal(join, SAMPLER, RUN)
    parts = canonical.decode(good)
    other_run = name("another run")

    def spoiled(index: int, value: Any) -> bytes:
        return canonical.pack([value if index == at else part for at, part in enumerate(parts)])

    flipped = bytes([parts[5][0] ^ 1]) + parts[5][1:]
    high_s = (
        int.from_bytes(parts[5][32:], "little") + 2**252 + 27742317777372353535851937790883648493
    ).to_bytes(32, "little")
    cases: dict[str, tuple[bytes, str, bytes, bytes | None]] = {
        "another major version": (
            loose_seal(body, "join", SAMPLER, RUN, major=limits.MAJOR + 1),
            "join",
            RUN,
            None,
        ),
        "another major version of another shape": (
            canonical.pack([limits.MAJOR + 1, "whatever"]),
            "join",
            RUN,
            None,
        ),
        "another kind": (good, "heartbeat", RUN, None),
        "a kind that was changed": (spoiled(1, "vote"), "vote", RUN, None),
        "a body of one kind sealed as another": (
            loose_seal(body, "heartbeat", SAMPLER, RUN),
            "heartbeat",
            RUN,
            None,
        ),
        "another run": (good, "join", other_run, None),
        "a run that was changed": (spoiled(2, other_run), "join", other_run, None),
        "another signer than expected": (good, "join", RUN, STRANGER.public),
        "a signer that was changed": (spoiled(3, STRANGER.public), "join", RUN, None),
        "a signer of small order": (spoiled(3, b"\1" + bytes(31)), "join", RUN, None),
        "a signer of 31 bytes": (spoiled(3, bytes(31)), "join", RUN, None),
        "a changed body": (spoiled(4, encode(join).replace(b"laptop", b"lapdog")), "join", RUN, None),
        "a changed signature": (spoiled(5, flipped), "join", RUN, None),
        "a signature with S beyond the order": (spoiled(5, parts[5][:32] + high_s), "join", RUN, None),
        "a signature of 63 bytes": (spoiled(5, parts[5][:-1]), "join", RUN, None),
        "a run of 33 bytes": (spoiled(2, RUN + b"\0"), "join", RUN, None),
        "a kind that is no slug": (spoiled(1, "Join"), "join", RUN, None),
        "five parts": (canonical.pack(parts[:5]), "join", RUN, None),
        "seven parts": (canonical.pack([*parts, None]), "join", RUN, None),
        "a map": (canonical.pack({"major": 1}), "join", RUN, None),
        "an empty array": (b"\x90", "join", RUN, None),
        "a major version that is no integer": (spoiled(0, "1"), "join", RUN, None),
        "a body that is text": (spoiled(4, "text"), "join", RUN, None),
        "a body that is not canonical": (loose_seal(b"\xcc\x01", "join", SAMPLER, RUN), "join", RUN, None),
        "bytes behind the seal": (good + b"\xc0", "join", RUN, None),
        "cut short": (good[:-1], "join", RUN, None),
    }
    types = {kind: type(message) for kind, (message, _, _) in SEALED_TYPES.items()}
    invalid = []
    for what, (sealed, kind, run, signer) in cases.items():
        error = refusal(lambda s=sealed, k=kind, r=run, w=signer: open_sealed(s, types[k], r, signer=w))
        case = {"name": what, "sealed": sealed.hex(), "kind": kind, "run": run.hex(), "error": error}
        invalid.append(case | ({"signer": signer.hex()} if signer else {}))
    return {"valid": valid, "invalid": invalid}


def major1_cases() -> dict[str, list[Case]]:
    """Return the sealed messages of MAJOR 1 as they stand: nobody can write them any more."""
    return {"invalid": json.loads((FOLDER / "major1.json").read_text())["invalid"]}


def batch_cases() -> dict[str, list[Case]]:
    one, two = SEALED_GROUP, seal(VERDICT, VERIFIER, RUN)
    invalid = {
        "no message": b"\x90",
        "a map": b"\x80",
        "a message that is no bytes": b"\x91\xc0",
        "too many messages": canonical.pack([b"\xc0"] * 513),
        "one message cut short": canonical.pack([one, two[:-1]]),
        "too many bytes": canonical.pack([one] * (limits.GOSSIP_BYTES // len(one) + 1)),
    }
    return {
        "valid": [
            {
                "name": f"{len(row)} messages",
                "bytes": write_batch(row).hex(),
                "sealed": [item.hex() for item in row],
            }
            for row in ([one], [one, two], [two] * 5)
        ],
        "invalid": [
            {"name": what, "bytes": data.hex(), "error": refusal(lambda data=data: read_batch(data))}
            for what, data in invalid.items()
        ],
    }


def _with_special_character() -> str:
    """A link whose text has one of the two characters in which the alphabets differ."""
    links = (str(dataclasses.replace(LINK, version=version)) for version in itertools.count())
    return next(text for text in links if "-" in text or "_" in text)


def link_cases() -> dict[str, list[Case]]:
    good = str(LINK)
    swapped = good[:50] + ("A" if good[50] != "A" else "B") + good[51:]
    invalid = {
        "empty": "",
        "another scheme": good.replace("echo:", "magnet:"),
        "nothing behind the scheme": "echo:",
        "a character lost": good[:60] + good[61:],
        "a character changed": swapped,
        "the end lost": good[:-8],
        "a character that base64url has not": good[:-1] + "!",
        "padded": good + "=",
        "the other base64": _with_special_character().replace("-", "+").replace("_", "/"),
        "too long": "echo:" + "A" * 5000,
        "only the checksum is wrong": _link_text("echo:", wrong_checksum=True),
        "only the scheme is wrong": _link_text("ecko:"),
    }
    return {
        "valid": [
            {"name": "a link", "link": good, "value": plain(wire.of(Link).dump(LINK))},
            {
                "name": "white space around it",
                "link": f"  {good}\n",
                "value": plain(wire.of(Link).dump(LINK)),
            },
        ],
        "invalid": [
            {"name": what, "link": text, "error": refusal(lambda text=text: Link.parse(text))}
            for what, text in invalid.items()
        ],
    }


def _link_text(scheme: str, *, wrong_checksum: bool = False) -> str:
    data = encode(LINK)
    checksum = derive("link", data)[:4]
    checksum = bytes([checksum[0] ^ 1]) + checksum[1:] if wrong_checksum else checksum
    return scheme + base64.urlsafe_b64encode(data + checksum).rstrip(b"=").decode()


def messages_cases() -> dict[str, list[Case]]:
    valid, invalid = [], []
    extras = {
        "manifest": [MANIFEST_WITH_CODE, MANIFEST_WITH_ADAPTER],
        "head": [ZERO_HEAD.message],
        "vote-answer": [VOTE_ANSWER],
    }
    for kind, example in MESSAGES.items():
        record = type(example).__name__
        for index, message in enumerate([example, *extras.get(kind, [])]):
            data = encode(message)
            value = plain(canonical.decode(data))
            valid.append({"name": f"{kind} {index}", "record": record, "value": value, "bytes": data.hex()})
        for mutation in (*malformed(example), *structural(example)):
            case = {"name": f"{kind}: {mutation.name}", "record": record, "bytes": mutation.data.hex()}
            invalid.append(case | {"error": refusal(lambda m=mutation, e=example: decode(type(e), m.data))})
        invalid += _limit_cases(kind, example)
    invalid += _limit_cases("manifest with code", MANIFEST_WITH_CODE)
    invalid += _limit_cases("manifest with an adapter", MANIFEST_WITH_ADAPTER)
    join, receipt = MESSAGES["join"], MESSAGES["receipt"]
    too_much = {
        "a join of too many bytes": (join, canonical.pack({"agent": "x" * limits.SMALL_BYTES})),
        "a receipt of too many items": (receipt, canonical.pack([None] * (limits.ITEMS + 1))),
        "a roster with a key of small order": (
            MESSAGES["roster"],
            canonical.pack({"members": [[bytes(32), "torch/f32", bytes(32)]]}),
        ),
        "a receipt for 769 groups": (receipt, loose_bytes(_many_ids(receipt))),
    }
    for what, (message, data) in too_much.items():
        error = refusal(lambda data=data, message=message: decode(type(message), data))
        invalid.append({"name": what, "record": type(message).__name__, "bytes": data.hex(), "error": error})
    for what, message in CONTRADICTIONS.items():
        data = loose_bytes(message)
        error = refusal(lambda data=data, message=message: decode(type(message), data))
        invalid.append({"name": what, "record": type(message).__name__, "bytes": data.hex(), "error": error})
    return {"valid": valid, "invalid": invalid}


def _many_ids(receipt: Any) -> Any:
    ids = [name(f"group {index}") for index in range(limits.RECEIPT_IDS + 1)]
    return dataclasses.replace(receipt, accepted=b"".join(ids[1:]), refused=(Refusal("stale", ids[0]),))


def _limit_cases(kind: str, example: Any) -> list[Case]:
    """Each field one beyond its limit, where that takes few bytes."""
    tree = tree_of(example)
    cases = []
    for path, notation in located(type(example).__name__, tree):
        for index, value in enumerate(edges(notation).beyond):
            data = canonical.pack(canonical.order(changed(tree, path, lambda _, value=value: value)))
            if len(data) < min(4096, type(example).LIMIT):
                error = refusal(lambda data=data: decode(type(example), data))
                what = f"{kind}: beyond the limit of {spell(path)}, {index}"
                cases.append(
                    {"name": what, "record": type(example).__name__, "bytes": data.hex(), "error": error}
                )
    return cases


def chain_cases() -> dict[str, list[Case]]:
    zero, one, two, three = line(3)
    two_b = after(one, "b")
    three_b = after(two_b, "b")
    base_two = grant(two.id)
    first = after(two, signer=STANDBY, term=2)
    by_trainer = grant(two.id, TRAINER, voters=(TRAINER, VERIFIER))
    stories: dict[str, tuple[Link | None, list[Any]]] = {
        "a chain grows, with repeats and gaps": (None, [one, zero, zero, two, one, three, two, three]),
        "heads that do not belong": (
            None,
            [
                zero,
                after(zero, signer=VERIFIER),
                after(zero, layout=name("another layout")),
                after(zero, signer=STANDBY),
                after(zero, term=2),
                after(zero, version=5),
                one,
                after(one, step=0),
                after(one, step=1),
            ],
        ),
        "another version 0": (None, [after(zero), _other_zero(), zero]),
        "one version told twice": (None, [zero, one, two, three, two_b, after(three), grant(one.id), two]),
        "a successor that denies what was told": (None, [zero, one, two, three_b, three]),
        "proof from elsewhere": (None, [zero, one, two, three, (two, two_b), (one, two), grant(two.id)]),
        "a new term from the tip": (
            None,
            [zero, one, two, base_two, three, after(two, signer=STANDBY, term=2), first],
        ),
        "a new term from an older head": (None, [zero, one, two, three, base_two, first, after(first)]),
        "a first head without an anchor": (
            None,
            [zero, one, two, base_two, after(two, signer=STANDBY, term=2, routes=_delta(two))],
        ),
        "a new term on another branch": (
            None,
            [
                *(zero, one, two, two_b, grant(two_b.id), (grant(three_b.id), [three_b])),
                (grant(three_b.id), [two_b, three_b]),
                after(three_b, signer=STANDBY, term=2),
            ],
        ),
        "grants that are none": (
            None,
            [
                *(
                    zero,
                    one,
                    two,
                    grant(two.id, voters=(VERIFIER,)),
                    grant(two.id, voters=(VERIFIER, STRANGER)),
                ),
                *(
                    grant(two.id, VERIFIER),
                    grant(two.id, term=3),
                    grant(name("nowhere")),
                    _forged_grant(two.id),
                ),
                *(base_two, base_two, grant(two.id, TRAINER, 3, (TRAINER, STANDBY))),
            ],
        ),
        "two grants for one term": (
            None,
            [
                *(zero, one, two, base_two, first, by_trainer, after(first)),
                *(
                    grant(two.id, TRAINER, 3),
                    grant(two.id, TRAINER, 3, (TRAINER, STANDBY)),
                    after(two, signer=TRAINER, term=3),
                ),
            ],
        ),
        "a head beside the base of its term": (
            None,
            [zero, one, two, base_two, after(one, signer=STANDBY, term=2, version=3)],
        ),
        "heads of another run": (None, [zero, after(zero, run=name("another run")), one]),
        "a grant to a liar": (
            None,
            [zero, one, after(zero, "twin"), grant(zero.id, TRAINER, voters=(STANDBY, VERIFIER))],
        ),
        "branches that are none": (
            None,
            [
                *(zero, one),
                (grant(name("x")), [two]),
                *((grant(head.id), [head]) for head in (after(one, version=3), after(one, step=0))),
                *((grant(head.id), [head]) for head in (after(one, term=2), after(one, signer=STANDBY))),
                (grant(three.id), [two, two_b, three]),
                (grant(three.id), [one, two, three]),
            ],
        ),
        "a term that was slept through": (
            None,
            [
                *(zero, one, two, base_two, grant(after(first).id, TRAINER, 3)),
                (grant(after(first).id, TRAINER, 3), [first, after(first)]),
            ],
        ),
        "a newcomer with a link": (_link(two), [zero, three, two, one, three, three_b]),
        "a newcomer with a link into a later term": (_link(first), [three, first, after(first)]),
    }
    told = [_told(what, link, events) for what, (link, events) in stories.items()]
    return {"scenarios": [*told, _told("two trainers that take turns", None, _turns(), TURNS)]}


def _turns() -> list[Any]:
    """Each term is the other's to take, by its own vote alone."""
    run = TURNS.id

    def granted(base: Any, leader: Any, term: int, *voters: Any) -> TermGrant:
        return grant(base.id, leader, term, voters or (leader,), run)

    zero = opened(ZERO_HEAD.message, run=run)
    one = after(zero, run=run)
    two = after(one, signer=STANDBY, run=run, term=2)
    three = after(two, signer=TRAINER, run=run, term=3)
    return [
        *(zero, one, granted(one, TRAINER, 2), granted(one, STANDBY, 2, TRAINER, STANDBY)),
        *(granted(one, TRAINER, 2, STANDBY), granted(one, STANDBY, 2), two),
        *(granted(two, STANDBY, 3), granted(two, TRAINER, 3), three, after(two, signer=STANDBY, run=run)),
        *(granted(three, STANDBY, 4), granted(two, STANDBY, 4), granted(two, TRAINER, 5)),
    ]


def _other_zero() -> Any:
    from .scenarios import HEAD_ZERO, dataclasses

    return opened(dataclasses.replace(HEAD_ZERO, root=name("other weights")))


def _delta(base: Any) -> Any:
    return after(base).message.routes


def _forged_grant(base: bytes) -> TermGrant:
    honest = grant(base)
    return TermGrant(honest.ballots, type(honest.vote)(base, TRAINER.public, 2))


def _link(head: Any) -> Link:
    return Link((), head.id, RUN, head.message.term, head.message.version)


def _told(
    what: str, link: Link | None, events: list[Any], manifest: Opened[Manifest] = OPENED_MANIFEST
) -> Case:
    state = Follower.newcomer(Rules.of(manifest), (link.term, link.version, link.head) if link else None)
    told = []
    for event in events:
        rule = None
        case: Case
        try:
            if isinstance(event, TermGrant) or (isinstance(event, tuple) and isinstance(event[0], TermGrant)):
                given, branch = event if isinstance(event, tuple) else (event, [])
                case = {"grant": encode(given).hex(), "branch": [head.sealed.hex() for head in branch]}
                state = state.grant(given, branch)
            elif isinstance(event, tuple):
                case = {"proof": [head.sealed.hex() for head in event]}
                state = state.convict(Equivocation(*event))
            else:
                case = {"head": event.sealed.hex()}
                state = state.accept(event)
        except ChainError as error:
            rule = error.rule
        except ProtocolError as error:
            rule = error.reason
        told.append(
            case
            | {
                "rule": rule,
                "term": state.term,
                "tip": state.tip.id.hex() if state.tip else None,
                "holding": state.holding,
                "revoked": sorted(key.hex() for key in state.revoked),
            }
        )
    scenario = {"name": what, "manifest": manifest.sealed.hex()} | ({"link": str(link)} if link else {})
    return scenario | {"events": told}


def zstd_cases() -> dict[str, list[Case]]:
    good = bytes(range(40))
    valid = {
        "one byte": (b"a", plain_frame(b"a")),
        "forty bytes": (good, plain_frame(good)),
        "a size of two bytes": (bytes(300), header(300, width=2) + repeated(0, 300)),
        "a window of 8 MiB": (good, header(40, window=13 << 3) + plain_frame(good)[9:]),
    }
    invalid = faulty_zstd(good) | {
        "one byte more than the chunk has": plain_frame(bytes(41)),
        "one byte less than the chunk has": plain_frame(bytes(39)),
        "far more than the chunk has": header(131_072) + repeated(0, 131_072),
    }
    return {
        "valid": [
            {
                "name": what,
                "size": len(chunk),
                "frame": frame.hex(),
                "chunk": decode_raw(frame, len(chunk)).hex(),
            }
            for what, (chunk, frame) in valid.items()
        ],
        "invalid": [
            {
                "name": what,
                "size": 40,
                "frame": frame.hex(),
                "error": refusal(lambda frame=frame: decode_raw(frame, 40)),
            }
            for what, frame in invalid.items()
        ],
    }


def delta_cases() -> dict[str, list[Case]]:
    valid = []
    for what, story in stories().items():
        columns = b"".join(write_columns(story.base, story.new))
        frame = story.frame or plain_frame(columns)
        read = decode_delta(frame, story.base)
        case = {"name": what, "frame": frame.hex(), "body": columns.hex(), "base": hexed(story.base)}
        valid.append(case | {"positions": read.positions.tolist(), "values": hexed(read.values)})
    few = patterns("003c013c023c033c043c053c063c073c")
    zstd = faulty_zstd(body(b"\2", b"\2")) | bombs()
    invalid = {what: (few, frame) for what, frame in zstd.items()}
    invalid |= {what: (base, plain_frame(data)) for what, (base, data) in faulty_bodies().items()}
    return {
        "valid": valid,
        "invalid": [
            {
                "name": what,
                "base": hexed(base),
                "frame": frame.hex(),
                "error": refusal(lambda base=base, frame=frame: decode_delta(frame, base)),
            }
            for what, (base, frame) in invalid.items()
        ],
    }


FILES: dict[str, tuple[str, Callable[[], dict[str, list[Case]]]]] = {
    "canonical": ("One byte form per value.", canonical_cases),
    "digest": ("Names for bytes.", digest_cases),
    "identity": ("Keys and peer ids.", identity_cases),
    "topics": ("The names under which nodes meet.", topics_cases),
    "tokens": ("Token ids and log-probabilities in few bytes.", tokens_cases),
    "sampling": ("Keys of slots, uniform numbers, draws and distances.", sampling_cases),
    "envelope": ("Sealed messages.", envelope_cases),
    "major1": ("Sealed messages of MAJOR 1, which is another version of the wire.", major1_cases),
    "batch": ("Several sealed messages in one.", batch_cases),
    "link": ("Links to runs.", link_cases),
    "messages": ("Every record that travels.", messages_cases),
    "chain": ("What may follow what.", chain_cases),
    "zstd": ("One zstd frame, and chunks in it as they are.", zstd_cases),
    "delta": ("What changed in a chunk of 16-bit patterns.", delta_cases),
}


def make() -> dict[str, dict[str, Any]]:
    """All vectors as today's code writes them."""
    return {file: {"about": about} | cases() for file, (about, cases) in FILES.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    changed = []
    for file, fresh in make().items():
        path = FOLDER / f"{file}.json"
        known = json.loads(path.read_text()) if path.exists() and "--anew" not in sys.argv else {}
        for cases, rows in fresh.items():
            if cases == "about":
                continue
            new = {row["name"]: row for row in rows}
            old = {row["name"]: row for row in known.get(cases, [])}
            changed += [f"{file}.{cases}: {what}" for what in old if new.get(what, old[what]) != old[what]]
            fresh[cases] = [*old.values(), *(row for what, row in new.items() if what not in old)]
        path.write_text(json.dumps(fresh, indent=1, ensure_ascii=True) + "\n")
    if changed:
        sys.exit(
            "these cases would be written differently today; the wire has changed:\n  " + "\n  ".join(changed)
        )


if __name__ == "__main__":
    main()


__all__ = ["BARE_TYPES", "FOLDER", "ZERO", "make", "plain"]
