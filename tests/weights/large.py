"""A large state, published and followed by processes of their own that say how much memory they
took.

`python -m tests.weights.large publish|follow FOLDER MEGABYTES` prints the most bytes that it held
and the seconds it took.
"""

from __future__ import annotations

import json
import mmap
import re
import sys
import time
from pathlib import Path

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from protocol import Layout, Rules, blob_id, encode, limits, merkle_root
from protocol.weights import TensorEntry
from tests.weights.keys import LEADER, NOBODY, RUN, counting
from tests.weights.stores import follow

MIB = 1024 * 1024
ROW = 1024


def make(path: Path, megabytes: int) -> None:
    """Numbers in a file, a piece at a time, so that this process holds none of them."""
    luck = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(
                (luck.standard_normal(MIB // 2, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
            )


def touch(path: Path, share: float = 0.01) -> None:
    """Let one element in a hundred step by one."""
    luck = np.random.default_rng(1)
    whole = np.memmap(path, "<u2", "r+")
    for start in range(0, whole.size, MIB):
        piece = whole[start : start + MIB]
        piece[luck.random(piece.size) < share] += 1


def layout(megabytes: int) -> Layout:
    rows = megabytes * MIB // 2 // ROW
    cut = rows // 3
    return Layout((TensorEntry("a", "bf16", (cut, ROW)), TensorEntry("b", "bf16", (rows - cut, ROW))))


def rules(path: Path, megabytes: int) -> Rules:
    with path.open("rb") as file:
        hashes = []
        while data := file.read(2 * limits.CHUNK_ELEMENTS):
            hashes.append(blob_id(data))
    root = merkle_root(hashes)
    return Rules(RUN, blob_id(encode(layout(megabytes))), root, (LEADER.public,), (LEADER.public,))


def state(path: Path, megabytes: int):
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at, found = 0, {}
    for entry in layout(megabytes).tensors:
        size = 2 * int(np.prod(entry.shape))
        found[entry.name] = TensorBytes("bf16", entry.shape, data[at : at + size])
        at += size
    return found


def main(what: str, folder: Path, megabytes: int) -> None:
    weights, told = folder / "weights", layout(megabytes)
    if what == "publish":
        make(weights, megabytes)
        run = rules(weights, megabytes)
        (folder / "root").write_bytes(run.root)
        with WeightsStore.open(folder / "leader", run, told, durable=False) as store:
            by = Publisher(store, LEADER, luck=counting())
            by.publish(state(weights, megabytes), step=0, roster=NOBODY, groups=())
            touch(weights)
            start = time.perf_counter()
            by.publish(state(weights, megabytes), step=1, roster=NOBODY, groups=())
        took = [time.perf_counter() - start]
    else:
        run = Rules(
            RUN, blob_id(encode(told)), (folder / "root").read_bytes(), (LEADER.public,), (LEADER.public,)
        )
        took = []
        with (
            WeightsStore.open(folder / "leader", run, told, durable=False) as leader,
            WeightsStore.open(folder / "store", run, told) as store,
        ):
            for version in (0, 1):
                start = time.perf_counter()
                follow(leader, store, version)
                took.append(time.perf_counter() - start)
            assert store.tip == leader.tip
    most = most_resident()
    sys.stdout.write(json.dumps({"most": most, "took": took}) + "\n")


def most_resident() -> int:
    """The most bytes that this program held. `getrusage` would count those of whoever forked it,
    too.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
