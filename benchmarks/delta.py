"""Weights codec on a real training step: bytes and speed against other layouts.

`ratio` is the whole state in bf16 over everything that a follower fetches: frames, their table and
the sealed head. Speeds are in bytes of the state, on one thread. Applying is done in place, to and
fro between the two states, with every check; verified, each chunk is first built and hashed beside
the state, and written only if the hash is right.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import PAIRS, interleaved, median_ratio, median_times
from benchmarks.sparse_layouts import pulse_bytes, trl_bytes, xor_bytes
from benchmarks.training_diff import Patterns, TrainingDiff, training_diff
from protocol import (
    DELTA_CODEC,
    ZERO,
    ChunkTable,
    Frame,
    Identity,
    Route,
    WeightsHead,
    blob_id,
    decode_delta,
    encode,
    encode_delta,
    merkle_root,
    seal,
)
from protocol.limits import CHUNK_ELEMENTS

SHARE = 0.01


def _places(state: Patterns) -> list[slice]:
    return [slice(start, start + CHUNK_ELEMENTS) for start in range(0, state.size, CHUNK_ELEMENTS)]


def _frames(base: Patterns, new: Patterns) -> list[bytes]:
    return [encode_delta(base[place], new[place]) for place in _places(base)]


def _hash(chunk: Patterns) -> bytes:
    return blob_id(chunk.view(np.uint8).data)  # type: ignore[arg-type] # any buffer will do


@dataclasses.dataclass(frozen=True)
class Way:
    """A delta between two states: frames of its chunks, and their after-hashes."""

    frames: list[bytes]
    after: list[bytes]

    @classmethod
    def between(cls, base: Patterns, new: Patterns) -> Way:
        return cls(_frames(base, new), [_hash(new[place]) for place in _places(new)])

    def wire_bytes(self) -> int:
        """Frames, table and sealed head."""
        rows = [
            Frame(blob_id(frame) if frame else ZERO, len(frame), after)
            for frame, after in zip(self.frames, self.after, strict=True)
        ]
        table = encode(ChunkTable.of(DELTA_CODEC, rows))
        size = sum(map(len, self.frames))
        some = blob_id(b"any digest will do")
        head = WeightsHead(
            groups=some,
            layout=some,
            luck=some,
            previous=some,
            root=merkle_root(self.after),
            roster=some,
            routes=(Route(base=some, codec=DELTA_CODEC, size=size, table=blob_id(table)),),
            step=1000,
            term=1,
            version=1000,
        )
        return size + len(table) + len(seal(head, Identity.generate(), some))


class ToAndFro:
    """One state that is led from one version to the other and back, by deltas."""

    def __init__(self, diff: TrainingDiff) -> None:
        self._ways = [Way.between(diff.before, diff.after), Way.between(diff.after, diff.before)]
        self._ends = [diff.after, diff.before]
        self._state = diff.before.copy()
        self._places = _places(self._state)
        self._scratch = np.empty(CHUNK_ELEMENTS, np.uint16)

    def _turn(self, change: Callable[[Patterns, bytes, bytes], None]) -> None:
        way = self._ways[0]
        for place, frame, after in zip(self._places, way.frames, way.after, strict=True):
            change(self._state[place], frame, after)
        self._ways.reverse()
        self._ends.reverse()

    def apply(self) -> None:
        self._turn(lambda chunk, frame, _: decode_delta(frame, chunk).write(chunk))

    def apply_verified(self) -> None:
        self._turn(self._change_verified)

    def _change_verified(self, chunk: Patterns, frame: bytes, after: bytes) -> None:
        delta = decode_delta(frame, chunk)
        built = self._scratch[: chunk.size]
        np.copyto(built, chunk)
        delta.write(built)
        assert _hash(built) == after
        delta.write(chunk)

    def is_right(self) -> bool:
        return np.array_equal(self._state, self._ends[1])


def main() -> None:
    real = training_diff()
    thin = real.thinned(SHARE)
    full = 2 * real.before.size
    table = Table(
        title=f"One step of {real.before.size / 1e6:.1f} M weights: full bf16 over bytes on the wire"
    )
    for column in ("changed", "ours", "PULSE's COO", "XOR", "int32 + bf16", "MB, ours"):
        table.add_column(column, justify="right")
    sizes = {}
    for diff in (thin, real):
        ours = Way.between(diff.before, diff.after).wire_bytes()
        others = [pulse_bytes(diff), xor_bytes(diff), trl_bytes(diff)]
        sizes[diff.share] = (ours, *others)
        ratios = [f"{full / size:.1f}" for size in (ours, *others)]
        table.add_row(f"{diff.share:.2%}", *ratios, f"{ours / 1e6:.2f}")
    Console().print(table)

    walk = ToAndFro(thin)
    copy = np.empty_like(thin.before)
    walk.apply_verified()
    np.copyto(copy, thin.before)

    def memcpy() -> None:
        for place in _places(copy):
            np.copyto(copy[place], thin.before[place])

    rows = {
        "encode / XOR + zstd-1": interleaved(
            lambda: _frames(thin.before, thin.after), lambda: xor_bytes(thin), 1
        ),
        "apply / memcpy": interleaved(walk.apply, memcpy, 1),
        "apply, verified / memcpy": interleaved(walk.apply_verified, memcpy, 1),
    }
    assert walk.is_right(), "after all these turns the state is still one of the two"
    speeds = Table(title=f"At {thin.share:.0%} changed, one thread; medians of {PAIRS} pairs")
    for column in ("", "ours GB/s", "peer GB/s", "ours over peer"):
        speeds.add_column(column, justify="right" if column else "left")
    for what, pairs in rows.items():
        mine, other = median_times(pairs)
        speeds.add_row(
            what, f"{full / mine / 1e9:.2f}", f"{full / other / 1e9:.2f}", f"{median_ratio(pairs):.2f}"
        )
    Console().print(speeds)

    def speed(what: str) -> float:
        return round(full / median_times(rows[what])[0] / 1e9, 2)

    ours, pulse, xor, _ = sizes[thin.share]
    print(
        json.dumps(
            {
                "ratio_at_1pct": round(full / ours, 1),
                "over_pulse": round(pulse / ours, 2),
                "over_xor": round(xor / ours, 2),
                "encode_gb_s": speed("encode / XOR + zstd-1"),
                "apply_gb_s": speed("apply / memcpy"),
                "apply_over_memcpy": round(median_ratio(rows["apply / memcpy"]), 2),
                "apply_verified_gb_s": speed("apply, verified / memcpy"),
                "real_step_ratio": round(full / sizes[real.share][0], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
