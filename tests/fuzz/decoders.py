"""Mutated vectors and random bytes for every decoder of the wire, without a fuzzer.

Whatever comes in, only a `ProtocolError` may come out, memory stays within bounds, and what does
decode encodes to the same bytes. A failure prints the decoder and the input in hexadecimal, and the
seed that repeats it.
"""

from __future__ import annotations

import functools
import json
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from libp2p.peer.id import ID
from multiaddr import Multiaddr

import protocol
from echo_node.net.dht.wire import Kind, read_kad, write_kad
from echo_node.net.gossip.wire import Control, Published, read_frame, take_frames, write_frame
from protocol import Link, ProtocolError, canonical, decode, encode, open_sealed, read_batch
from protocol.delta import read_body, write_columns
from protocol.election import TermGrant
from protocol.envelope import Envelope
from protocol.identity import check_key, public_key_of
from protocol.weights import ChunkTable
from tests.protocol.examples import MESSAGES, RUN, SEALED_TYPES

VECTORS = Path(protocol.__file__).parent / "vectors"
EDGES = [
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**16,
    2**24,
    2**32,
    2**53 - 1,
    2**53,
    2**63,
    2**64 - 1,
    1e308,
    5e-324,
    "",
    b"",
]

CHUNK = np.arange(0x3C00, 0x3C00 + 1200, dtype=np.uint16)
"""What deltas are read against."""

NEAR = {
    ID(bytes([n]) * 38): (Multiaddr(f"/ip4/10.0.0.{n}/tcp/4001"), Multiaddr("/dns4/x.example/tcp/1"))
    for n in (1, 2)
}
DHT = [write_kad(kind, b"\x1e\x20" + bytes(32), NEAR, NEAR) for kind in get_args(Kind)]
"""One message of each kind."""
GOSSIP = [
    write_frame(subscriptions=[("one", True), ("two", False)], published=[Published("one", b"said")] * 2),
    write_frame(control=Control(["one"], [("two", 60)], [("one", [bytes(32), b"x"])], [bytes(32)] * 3)),
]
"""Frames that hold something of everything."""

Decoder = Callable[[bytes], object]


def decoders() -> dict[str, Decoder]:
    """Everything that takes bytes from a peer, by name."""
    found: dict[str, Decoder] = {
        "canonical": _canonical,
        "envelope": Envelope.parse,
        "batch": read_batch,
        "link text": lambda data: Link.parse(data.decode("latin-1")),
        "peer id": lambda data: public_key_of(data.decode("latin-1")),
        "key": check_key,
        "delta": lambda data: protocol.decode_delta(data, CHUNK),
        "delta body": _delta_body,
        "raw frame": lambda data: protocol.decode_raw(data, 40),
        "gossip frame": read_frame,
        "gossip stream": lambda data: take_frames(bytearray(data)),
        "dht message": read_kad,
    }
    for kind, message in MESSAGES.items():
        found[kind] = functools.partial(_message, type(message))
    for kind, (message, _, run) in SEALED_TYPES.items():
        found[f"sealed {kind}"] = functools.partial(open_sealed, kind=type(message), run=run)
    return found


def _canonical(data: bytes) -> object:
    value = canonical.decode(data)
    if canonical.encode(value) != data:
        raise AssertionError("a value with two byte forms")
    return value


def _delta_body(data: bytes) -> object:
    delta = read_body(data, CHUNK)
    new = CHUNK.copy()
    delta.write(new)
    if b"".join(write_columns(CHUNK, new)) != data:
        raise AssertionError("a change with two bodies")
    return delta


def _message(cls: type, data: bytes) -> object:
    message: Any = decode(cls, data)
    if encode(message) != data:
        raise AssertionError("a message with two byte forms")
    if isinstance(message, protocol.TrajectoryGroup):
        message.prompt_ids()
        message.completions()
    elif isinstance(message, ChunkTable):
        list(message)
    elif isinstance(message, TermGrant):
        message.verify(RUN)
    return message


def seeds() -> dict[str, list[bytes]]:
    """What to start from, for each decoder: the vectors that are meant for it."""
    vectors = {path.stem: json.loads(path.read_text()) for path in sorted(VECTORS.glob("*.json"))}
    by_record = {type(message).__name__: kind for kind, message in MESSAGES.items()}
    found: dict[str, list[bytes]] = {name: [] for name in decoders()}
    for case in (*vectors["messages"]["valid"] * 20, *vectors["messages"]["invalid"]):
        found[by_record[case["record"]]].append(bytes.fromhex(case["bytes"]))
    for case in vectors["envelope"]["valid"]:
        found[f"sealed {case['kind']}"].append(bytes.fromhex(case["sealed"]))
        found["envelope"].append(bytes.fromhex(case["sealed"]))
    for file in ("canonical", "batch"):
        found[file] += [
            bytes.fromhex(case["bytes"]) for part in ("valid", "invalid") for case in vectors[file][part]
        ]
    found["link text"] += [
        case["link"].encode() for part in ("valid", "invalid") for case in vectors["link"][part]
    ]
    found["peer id"] += [case["peer_id"].encode() for case in vectors["identity"]["valid"]]
    for case in (*vectors["delta"]["valid"], *vectors["delta"]["invalid"]):
        found["delta"].append(bytes.fromhex(case["frame"]))
    found["delta body"] += [bytes.fromhex(case["body"]) for case in vectors["delta"]["valid"]]
    found["raw frame"] += [
        bytes.fromhex(case["frame"]) for part in ("valid", "invalid") for case in vectors["zstd"][part]
    ]
    found["key"] += [bytes.fromhex(case["key"]) for case in vectors["identity"]["bad_keys"]]
    found["key"] += [bytes.fromhex(case["public"]) for case in vectors["identity"]["valid"]]
    found["gossip stream"] += GOSSIP
    found["gossip frame"] += [body for each in GOSSIP for body in take_frames(bytearray(each))]
    found["dht message"] += DHT
    return {name: [data for data in starts if len(data) < 20_000] for name, starts in found.items()}


class Mutator:
    """Inputs of three sorts: noise, vectors with changed bytes, and vectors with changed values."""

    def __init__(self, seed: int, starts: dict[str, list[bytes]] | None = None) -> None:
        self.rng = random.Random(seed)
        self.seeds = seeds() if starts is None else starts
        self.corpus = [data for each in self.seeds.values() for data in each]

    def changed(self, data: bytes) -> bytes:
        """Other bytes, or another value."""
        return self._bytes(bytearray(data)) if self.rng.random() < 0.4 else self._value(data)

    def inputs(self) -> Iterator[tuple[str, bytes]]:
        """Return a decoder's name and its input.

        Mostly changed vectors of its own, now and then another's or noise.
        """
        names = sorted(self.seeds)
        while True:
            name = self.rng.choice(names)
            draw = self.rng.random()
            start = self.rng.choice(self.seeds[name] if draw < 0.9 else self.corpus)
            if draw > 0.97:
                yield name, self.rng.randbytes(self.rng.randrange(200))
            else:
                yield name, self.changed(start)

    def _bytes(self, data: bytearray) -> bytes:
        rng = self.rng
        for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(7):
                case 0 if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
                case 1 if data:
                    data[at % len(data)] = rng.randrange(256)
                case 2:
                    del data[at : at + rng.randrange(1, 9)]
                case 3:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 4:
                    other = rng.choice(self.corpus)
                    cut = rng.randrange(len(other) + 1)
                    data[at:] = other[cut:]
                case 5:
                    data[at : at + 4] = rng.choice(
                        (b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\xdd\xff\xff\xff\xff")
                    )
                case _:
                    data[at:at] = data[at : at + rng.randrange(1, 65)] * rng.randrange(1, 9)
        return bytes(data)

    def _value(self, data: bytes) -> bytes:
        """Change one value of a vector and encode it canonically, past the first check."""
        try:
            tree = canonical.decode(data)
        except ProtocolError:
            return self._bytes(bytearray(data))
        for _ in range(self.rng.choice((1, 1, 2))):
            tree = self._changed(tree)
        try:
            return canonical.encode(tree)
        except ProtocolError:
            return data[: self.rng.randrange(len(data) + 1)]

    def _changed(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.85:
            key = rng.choice(list(value))
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and value and rng.random() < 0.85:
            at = rng.randrange(len(value))
            return [*value[:at], self._changed(value[at]), *value[at + 1 :]]
        if isinstance(value, bytes) and value and rng.random() < 0.7:
            return self._value(value) if rng.random() < 0.5 else self._bytes(bytearray(value))
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
            return value + rng.choice((-1, 1, 8, -8))
        return rng.choice(
            [*EDGES, None, True, [], {}, value, [value], [value] * 9, {"x": value}, "x" * 70, bytes(32)]
        )


def fuzz(
    inputs: int, seed: int, *, seconds: float = 1e9, memory: bool = False, say: Any = None
) -> Counter[str]:
    """Give each input to one decoder, and count what came of it."""
    known = decoders()
    mutator = Mutator(seed)
    outcomes: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    for index, (name, data) in zip(range(inputs), mutator.inputs(), strict=False):
        if memory:
            tracemalloc.start()
        try:
            known[name](data)
            outcomes["accepted"] += 1
        except ProtocolError as error:
            outcomes[error.reason] += 1
            if len(str(error)) > 400:
                raise SystemExit(
                    f"an error of {len(str(error))} characters from {name}: {data.hex()}"
                ) from error
        except BaseException as error:
            raise SystemExit(f"{name}, seed {seed}, input {index}: {error!r}\n{data.hex()}") from error
        finally:
            if memory:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        if memory and peak > 2**20 + 70 * len(data):
            raise SystemExit(f"{name} took {peak} bytes for {len(data)}: {data.hex()}")
        if index % 5000 == 0 and ((say and say(index, outcomes)) or time.monotonic() > ends):
            break
    return outcomes
