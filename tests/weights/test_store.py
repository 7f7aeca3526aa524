"""Blobs for whoever asks: the newest few publications and not one more."""

from __future__ import annotations

import pytest

from echo_node.weights.store import BlobStore, WrongBlobError, check_blob
from protocol import ProtocolError, blob_id


def blobs(*texts: bytes) -> dict[bytes, bytes]:
    return {blob_id(text): text for text in texts}


def test_only_the_newest_publications_are_held():
    store = BlobStore(publications=3)
    for n in range(100):
        store.keep(b"head %d" % n, blobs(b"frame %d" % n, b"table %d" % n))
    held = [n for n in range(100) if store.get(blob_id(b"frame %d" % n))]
    assert held == [97, 98, 99]
    assert len(store._publications) == 3


def test_a_blob_that_several_publications_share_goes_with_the_last_of_them():
    store = BlobStore(publications=2)
    store.keep(b"one", blobs(b"roster", b"frame 1"))
    store.keep(b"two", blobs(b"roster", b"frame 2"))
    store.keep(b"three", blobs(b"frame 3"))
    assert store.get(blob_id(b"frame 1")) is None
    assert store.get(blob_id(b"roster")) == b"roster"
    store.keep(b"four", blobs(b"frame 4"))
    assert store.get(blob_id(b"roster")) is None


def test_keeping_one_head_twice_takes_no_second_place():
    store = BlobStore(publications=2)
    store.keep(b"one", blobs(b"a"))
    for _ in range(5):
        store.keep(b"two", blobs(b"b"))
    assert store.get(blob_id(b"a")) == b"a"


@pytest.mark.parametrize("asked", [b"", b"short", bytes(32), blob_id(b"gone")])
async def test_asking_for_what_is_not_held_is_refused(asked):
    store = BlobStore(publications=1)
    store.keep(b"one", blobs(b"gone"))
    store.keep(b"two", blobs(b"here"))
    assert await store.serve(b"p" * 32, blob_id(b"here")) == b"here"
    with pytest.raises(ProtocolError, match="does not hold"):
        await store.serve(b"p" * 32, asked)


def test_other_bytes_than_those_asked_for_are_refused_by_a_name_of_their_own():
    assert check_blob(blob_id(b"right"), b"right") == b"right"
    with pytest.raises(WrongBlobError) as caught:
        check_blob(blob_id(b"right"), b"wrong")
    assert caught.value.reason == "wrong-blob"
