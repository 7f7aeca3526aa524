"""The registry of served blobs: what is held, what goes first, and how files are read."""

from __future__ import annotations

import pytest

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs import blob_registry as room
from echo_node.net.blobs.blob_registry import BlobRegistry, InFile
from protocol import ProtocolError, blob_id
from protocol.blob import Slice
from tests.net.blob_nodes import some_bytes


def blobs(*texts: bytes) -> dict[bytes, bytes]:
    return {blob_id(text): text for text in texts}


def assembly(data: bytes) -> tuple[Slice, ...]:
    return (Slice(blob_id(data), 0, len(data)),)


def test_only_the_newest_names_are_held():
    registry = BlobRegistry(names=3)
    for n in range(100):
        registry.keep(b"head %d" % n, blobs(b"frame %d" % n, b"table %d" % n))
    assert [n for n in range(100) if registry.size(blob_id(b"frame %d" % n))] == [97, 98, 99]


def test_a_blob_that_several_names_share_goes_with_the_last_of_them():
    registry = BlobRegistry(names=2)
    registry.keep(b"one", blobs(b"roster", b"frame 1"))
    registry.keep(b"two", blobs(b"roster", b"frame 2"))
    registry.keep(b"three", blobs(b"frame 3"))
    assert registry.size(blob_id(b"frame 1")) is None
    assert registry.read(assembly(b"roster")) == b"roster"
    registry.remove(b"two")
    assert registry.size(blob_id(b"roster")) is None


def test_keeping_one_name_twice_takes_no_second_place():
    registry = BlobRegistry(names=2)
    registry.keep(b"one", blobs(b"a"))
    for _ in range(5):
        registry.keep(b"two", blobs(b"b"))
    assert registry.read(assembly(b"a")) == b"a"


def test_memory_is_bounded_and_the_oldest_name_makes_room():
    registry = BlobRegistry(memory_bytes=10)
    registry.keep(b"one", blobs(b"123456"))
    registry.keep(b"two", blobs(b"abcd"))
    assert registry.size(blob_id(b"123456")) == 6
    registry.keep(b"three", blobs(b"xyz"))
    assert registry.size(blob_id(b"123456")) is None
    assert registry.size(blob_id(b"abcd")) == 4
    with pytest.raises(DefectError, match="room for 10"):
        registry.keep(b"four", blobs(b"12345678901"))
    assert registry.size(blob_id(b"xyz")) == 3


@pytest.mark.parametrize(
    "asked",
    [
        Slice(blob_id(b"gone"), 0, 1),
        Slice(bytes(32), 0, 1),
        Slice(blob_id(b"here"), 0, 5),
        Slice(blob_id(b"here"), 4, 1),
        Slice(blob_id(b"here"), 2**53 - 1, 1),
    ],
)
def test_what_is_not_held_or_beyond_an_end_is_refused(asked):
    registry = BlobRegistry(names=1)
    registry.keep(b"one", blobs(b"gone"))
    registry.keep(b"two", blobs(b"here"))
    assert registry.check((Slice(blob_id(b"here"), 1, 3),)) == 3
    with pytest.raises(ProtocolError):
        registry.check((Slice(blob_id(b"here"), 0, 4), asked))


def test_slices_of_memory_files_and_stretches_of_files_come_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "WINDOW", 1000)
    data = some_bytes(10_500)
    path = tmp_path / "anchor"
    path.write_bytes(data)
    part = data[2_000:7_000]
    registry = BlobRegistry()
    registry.keep(
        b"name",
        {
            blob_id(data): InFile(path, len(data)),
            blob_id(part): InFile(path, len(part), 2_000),
            blob_id(b"small"): b"small",
        },
    )
    asked = (
        Slice(blob_id(part), 10, 3_210),
        Slice(blob_id(b"small"), 1, 4),
        Slice(blob_id(data), 9_999, 501),
    )
    assert registry.check(asked) == 3_715
    assert registry.read(asked) == part[10:3_220] + b"mall" + data[9_999:]
    assert max(len(window) for window in registry.windows(asked)) == 1000


def test_a_file_that_shrank_is_our_own_fault_and_ends_the_answer(tmp_path):
    path = tmp_path / "anchor"
    path.write_bytes(b"1234567890")
    registry = BlobRegistry()
    registry.keep(b"name", {bytes(32): InFile(path, 10)})
    path.write_bytes(b"12345")
    with pytest.raises(StoreError, match="truncated"):
        registry.read((Slice(bytes(32), 0, 10),))
    path.unlink()
    with pytest.raises(StoreError, match="anchor"):
        registry.read((Slice(bytes(32), 0, 10),))
