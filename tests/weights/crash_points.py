"""Processes that publish or advance until they are killed: `python -m tests.weights.crash_points
publish FOLDER KILLS SEED`.

Each life is a fork that works on the store and ends by SIGKILL: at a random moment, or at one of
its touches of the disk, in the middle of a write too. After each, the store is opened and held
against what was promised.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from echo_node.storage import files
from protocol import limits
from tests.weights.stores import bits, follow, held, opened, publish, publisher, weights

ROOT = Path(__file__).parents[2]
TOUCHES = ("write_at", "rename", "sync", "unlink", "open_file", "allocate")
VERSIONS = 14


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(touch: int) -> None:
    """End this process at one of its touches of the disk; a write gets half-way."""
    left = [touch]

    def deadly(name, real):
        def act(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                if name == "write_at":
                    handle, offset, data = args
                    real(handle, offset, memoryview(data)[: len(data) // 2])
                die()
            return real(*args, **options)

        return act

    for name in TOUCHES:
        setattr(files, name, deadly(name, getattr(files, name)))


def publish_for_ever(folder, promise, luck) -> None:
    with opened(folder) as store:
        if again := publisher(store).resume():
            promise(again.head.id)
        while True:
            (made,) = publish(store, 1)
            promise(made.head.id)
            if luck.random() < 0.3:
                anchors = [head.id for head in store.follower.heads if head.message.anchor]
                store.prune(versions=luck.randint(1, 5), settled=luck.choice(anchors))


def follow_for_ever(folder, promise, luck) -> None:
    with opened(folder.parent / "leader", durable=False) as leader, opened(folder) as store:
        while True:
            version = store.tip.message.version if store.tip else -1
            if version == VERSIONS - 1:
                return
            follow(leader, store, min(version + luck.randint(1, 4), VERSIONS - 1))
            promise(store.tip.id)


def live_and_die(work, folder, luck) -> tuple[list[bytes], bool]:
    """What one life promised, and whether it was killed."""
    reading, writing = os.pipe()
    touch, seconds = luck.randint(1, 150), luck.uniform(0, 0.15)
    by_touch, seed = luck.random() < 0.6, luck.random()
    child = os.fork()
    if child == 0:
        os.close(reading)
        if by_touch:
            die_at(touch)
        work(folder, lambda head: os.write(writing, head), random.Random(seed))
        os._exit(0)
    os.close(writing)
    if not by_touch:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a life ended with an error, and not by being killed")
    return [told[at : at + 32] for at in range(0, len(told), 32)], os.WIFSIGNALED(status)


def check(folder, promised, seen) -> int:
    """The store holds one whole version, the newest that was promised or a later one, and one head
    for each version.
    """
    with opened(folder) as store:
        assert store.verify() == []
        for head in store.follower.heads:
            assert seen.setdefault(head.message.version, head.id) == head.id, "two heads for one version"
        ids = [head.id for head in store.follower.heads]
        assert set(promised) <= set(ids), "a head that was promised is gone"
        if store.tip is None:
            assert not promised
            return -1
        if promised:
            assert ids.index(store.tip.id) >= ids.index(promised[-1]), "a version that was promised is gone"
        version = store.tip.message.version
        assert held(store) == bits(weights(version)), "another state under that version"
        assert not list(folder.glob("other-*"))
        return version


def main(what: str, folder: Path, kills: int, seed: int) -> None:
    limits.CHUNK_ELEMENTS = 64
    luck, seen, done, lives = random.Random(seed), {}, 0, 0
    furthest = -1
    if what == "advance":
        with opened(folder.parent / "leader", durable=False) as leader:
            publish(leader, VERSIONS)
    work = {"publish": publish_for_ever, "advance": follow_for_ever}[what]
    while done < kills:
        promised, killed = live_and_die(work, folder, luck)
        done, lives = done + killed, lives + 1
        reached = check(folder, promised, seen)
        furthest = max(furthest, reached)
        if what == "advance" and reached == VERSIONS - 1:
            shutil.rmtree(folder)
    with opened(folder) as store:
        (made,) = publish(store, 1) if what == "publish" else (None,)
        assert what != "publish" or store.tip == made.head
    sys.stdout.write(f"{done} kills, {lives} lives, version {furthest}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
