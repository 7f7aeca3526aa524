"""What is held for others: the newest names and not one more, in memory or in files, and nothing beside."""

from __future__ import annotations

import pytest

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs import shelf as room
from echo_node.net.blobs.shelf import InFile, Shelf
from protocol import ProtocolError, blob_id
from protocol.blob import Slice
from tests.net.holding import some_bytes


def blobs(*texts: bytes) -> dict[bytes, bytes]:
    return {blob_id(text): text for text in texts}


def whole(data: bytes) -> tuple[Slice, ...]:
    return (Slice(blob_id(data), 0, len(data)),)


def test_only_the_newest_names_are_held():
    shelf = Shelf(names=3)
    for n in range(100):
        shelf.keep(b"head %d" % n, blobs(b"frame %d" % n, b"table %d" % n))
    assert [n for n in range(100) if shelf.size(blob_id(b"frame %d" % n))] == [97, 98, 99]


def test_a_blob_that_several_names_share_goes_with_the_last_of_them():
    shelf = Shelf(names=2)
    shelf.keep(b"one", blobs(b"roster", b"frame 1"))
    shelf.keep(b"two", blobs(b"roster", b"frame 2"))
    shelf.keep(b"three", blobs(b"frame 3"))
    assert shelf.size(blob_id(b"frame 1")) is None
    assert shelf.read(whole(b"roster")) == b"roster"
    shelf.let_go(b"two")
    assert shelf.size(blob_id(b"roster")) is None


def test_keeping_one_name_twice_takes_no_second_place():
    shelf = Shelf(names=2)
    shelf.keep(b"one", blobs(b"a"))
    for _ in range(5):
        shelf.keep(b"two", blobs(b"b"))
    assert shelf.read(whole(b"a")) == b"a"


def test_memory_is_bounded_and_the_oldest_name_makes_room():
    shelf = Shelf(memory_bytes=10)
    shelf.keep(b"one", blobs(b"123456"))
    shelf.keep(b"two", blobs(b"abcd"))
    assert shelf.size(blob_id(b"123456")) == 6
    shelf.keep(b"three", blobs(b"xyz"))
    assert shelf.size(blob_id(b"123456")) is None
    assert shelf.size(blob_id(b"abcd")) == 4
    with pytest.raises(DefectError, match="room for 10"):
        shelf.keep(b"four", blobs(b"12345678901"))
    assert shelf.size(blob_id(b"xyz")) == 3


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
    shelf = Shelf(names=1)
    shelf.keep(b"one", blobs(b"gone"))
    shelf.keep(b"two", blobs(b"here"))
    assert shelf.check((Slice(blob_id(b"here"), 1, 3),)) == 3
    with pytest.raises(ProtocolError):
        shelf.check((Slice(blob_id(b"here"), 0, 4), asked))


def test_slices_of_memory_files_and_stretches_of_files_come_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "WINDOW", 1000)
    data = some_bytes(10_500)
    path = tmp_path / "anchor"
    path.write_bytes(data)
    part = data[2_000:7_000]
    shelf = Shelf()
    shelf.keep(
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
    assert shelf.check(asked) == 3_715
    assert shelf.read(asked) == part[10:3_220] + b"mall" + data[9_999:]
    assert max(len(window) for window in shelf.windows(asked)) == 1000


def test_a_file_that_shrank_is_our_own_fault_and_ends_the_answer(tmp_path):
    path = tmp_path / "anchor"
    path.write_bytes(b"1234567890")
    shelf = Shelf()
    shelf.keep(b"name", {bytes(32): InFile(path, 10)})
    path.write_bytes(b"12345")
    with pytest.raises(StoreError, match="shorter"):
        shelf.read((Slice(bytes(32), 0, 10),))
    path.unlink()
    with pytest.raises(StoreError, match="anchor"):
        shelf.read((Slice(bytes(32), 0, 10),))
