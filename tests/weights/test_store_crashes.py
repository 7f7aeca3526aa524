"""Whatever ends in the middle, a process or a disk: the old version or the new one, proven, and the
chain goes on.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from echo_node.errors import StoreError
from echo_node.storage import files
from protocol import limits
from tests.weights.crash_points import ROOT
from tests.weights.disk_faults import failing
from tests.weights.stores import bits, follow, held, opened, publish, publisher, weights


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 64)


def kill(what, folder, kills, seed):
    command = [
        sys.executable,
        "-m",
        "tests.weights.crash_points",
        what,
        str(folder / "store"),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout
    return done.stdout


@pytest.mark.parametrize("what", ["publish", "advance"])
def test_a_process_that_is_killed_at_any_moment_leaves_a_whole_version(what, tmp_path):
    kill(what, tmp_path, 50, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["publish", "advance"])
def test_a_process_that_is_killed_two_hundred_times_leaves_a_whole_version_each_time(what, tmp_path):
    kill(what, tmp_path, 200, seed=2)


# A disk that fails


@pytest.fixture
def few_chunks(monkeypatch):
    """Every kind of touch, and not too many."""
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 200)


def error_of(work, *args) -> str:
    """What the disk did, in words."""
    try:
        work(*args)
    except StoreError as error:
        return str(error)
    return ""


FAILURES = [(errno.EIO, False), (errno.ENOSPC, True)]


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize(("code", "for_ever"), FAILURES, ids=["io-error", "full"])
def test_publishing_on_a_disk_that_fails_anywhere_loses_nothing_and_tells_no_two_stories(
    tmp_path, code, for_ever
):
    """At every touch of the disk once; each time the chain goes on, in the same process and in the
    next.
    """
    with opened(tmp_path) as store:
        publish(store, 3)
    seen, touch, failed = {}, 0, 1
    while failed:
        touch += 1
        with opened(tmp_path) as store:
            with failing(touch, code, for_ever=for_ever) as failures:
                said = error_of(publish, store, 1)
            failed = len(failures)
            assert bool(said) == bool(failed), "a failure is heard of"
            assert not said or os.strerror(code) in said
            publisher(store).resume()
            publish(store, 1)
        with opened(tmp_path) as store:
            assert store.verify() == []
            again = publisher(store).resume()
            assert again.head == store.tip == store.follower.tip
            version = store.tip.message.version
            assert held(store) == bits(weights(version))
            for head in store.follower.heads:
                assert seen.setdefault(head.message.version, head.id) == head.id
            anchors = [head.id for head in store.follower.heads if head.message.anchor]
            store.prune(versions=3, settled=anchors[-1])
    assert touch > 25


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.parametrize(("code", "for_ever"), FAILURES, ids=["io-error", "full"])
def test_advancing_on_a_disk_that_fails_anywhere_holds_the_old_version_or_the_new(tmp_path, code, for_ever):
    with opened(tmp_path / "leader", durable=False) as leader:
        publish(leader, 3)
        touch, failed = 0, 1
        while failed:
            touch += 1
            folder = tmp_path / f"store-{touch}"
            with opened(folder) as store:
                follow(leader, store, 1)
                with failing(touch, code, for_ever=for_ever) as failures:
                    said = error_of(follow, leader, store, 2)
                failed = len(failures)
                assert bool(said) == bool(failed), "a failure is heard of"
                assert not said or os.strerror(code) in said
                assert held(store) == bits(weights(store.tip.message.version)), "mended in the same process"
                assert store.verify() == []
            with opened(folder) as store:
                assert store.verify() == []
                assert held(store) == bits(weights(store.tip.message.version))
                assert store.tip.message.version in {1, 2}
                follow(leader, store, 2)
                assert held(store) == bits(weights(2))
    assert touch > 25


def test_a_scratch_that_cannot_be_mended_now_is_mended_before_it_is_used(tmp_path):
    with opened(tmp_path / "leader", durable=False) as leader, opened(tmp_path / "store") as store:
        publish(leader, 3)
        follow(leader, store, 1)
        real, count = store._held.state_file.write, [0]

        def write(chunk, data):
            count[0] += 1
            if count[0] > 4:
                raise StoreError("no more")
            real(chunk, data)

        store._held.state_file.write = write
        with pytest.raises(StoreError, match="no more"):
            follow(leader, store, 2)
        assert store._held.torn
        with pytest.raises(StoreError, match="no more"):
            held(store)
        store._held.state_file.write = real
        assert held(store) == bits(weights(1))
        assert store.verify() == []


@contextmanager
def file_limit(size):
    """No file may grow beyond so many bytes: what a quota does, by the kernel itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_real_limit_on_files_is_said_and_leaves_the_old_version(tmp_path):
    with opened(tmp_path / "store") as store:
        publish(store, 2)
        before = held(store)
        with file_limit(300), pytest.raises(StoreError, match="see whether there is room"):
            publish(store, 1)
        assert held(store) == before
        publish(store, 1)
        assert store.verify() == []
    with file_limit(1000), pytest.raises(StoreError, match="opening state"), opened(tmp_path / "another"):
        pass


@pytest.mark.usefixtures("few_chunks")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_real_full_disk_is_said_and_the_chain_goes_on_when_there_is_room(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount")
    try:
        with opened(place / "store") as store:
            with pytest.raises(StoreError, match="No space left"):
                publish(store, 200)
            tip = store.tip
            assert held(store) == bits(weights(tip.message.version))
        with opened(place / "store") as store:
            assert store.verify() == []
            assert store.tip.message.version >= tip.message.version > 2
            anchors = [head.id for head in store.follower.heads if head.message.anchor]
            assert store.prune(versions=3, settled=anchors[-1]) > 0
            publisher(store).resume()
            publish(store, 2)
            assert store.verify() == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_everything_is_synced_before_a_head_counts_and_the_head_before_its_state(tmp_path, monkeypatch):
    """What a power cut would leave cannot be tried here; the order of the syncs can be looked
    at.
    """
    log = []
    real_sync, real_rename = files.sync, files.rename

    def sync(handle):
        target = Path(f"/proc/self/fd/{handle}").readlink()
        log.append(("sync", os.path.relpath(target, tmp_path)))
        real_sync(handle)

    def rename(source, target):
        log.append(("rename", os.path.relpath(source, tmp_path), os.path.relpath(target, tmp_path)))
        real_rename(source, target)

    with opened(tmp_path) as store:
        publish(store, 1)
        monkeypatch.setattr(files, "sync", sync)
        monkeypatch.setattr(files, "rename", rename)
        publish(store, 1)
    renames = [entry for entry in log if entry[0] == "rename"]
    for entry in renames:
        assert log.index(("sync", entry[1])) < log.index(entry), "synced before it appears"
    head = next(i for i, e in enumerate(log) if e[0] == "rename" and e[2].startswith("heads/"))
    blobs = [i for i, e in enumerate(log) if e[0] == "rename" and e[2].startswith("blobs/")]
    assert max(blobs) < log.index(("sync", "blobs")) < head
    assert head < log.index(("sync", "heads")) < next(i for i, e in enumerate(log) if e[-1] == "current")


def test_a_folder_that_nobody_needs_afterwards_is_never_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "sync", None)
    with opened(tmp_path, durable=False) as store:
        publish(store, 9)
        assert store.verify() == []


# Much


def large(folder, megabytes) -> list[dict]:
    told = []
    for what in ("publish", "follow"):
        command = [sys.executable, "-m", "tests.weights.large", what, str(folder), str(megabytes)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    return told


def test_a_state_is_taken_over_without_being_held_in_memory(tmp_path):
    _, followed = large(tmp_path, 256)
    assert followed["most"] < 256 * 1024**2, "the whole process, numpy and all, takes less than the state"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_gigabytes_are_taken_over_in_less_than_six_hundred_megabytes(tmp_path):
    _, followed = large(tmp_path, 2048)
    assert followed["most"] < 600 * 1000**2
