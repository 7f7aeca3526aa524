"""Blame for wrong bytes: only peers that sent some are named, in any mixture of sources."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs.assembly import BlobAssembly, WrongBytesError
from echo_node.net.blobs.partial_blob import FilePartialBlob, MemoryPartialBlob, SmallFilePartialBlob, held_in
from echo_node.net.blobs.piece_scheduler import PIECE_BYTES, Piece, PieceScheduler, cut, joined
from protocol import blob_id, limits
from protocol.blob import Slice
from tests.net.blob_nodes import MIB, flipped, some_bytes

DATA = some_bytes(5 * MIB + 17)
BLOB = blob_id(DATA)
PEERS = (b"1" * 32, b"2" * 32, b"3" * 32, b"4" * 32)


def put_together(versions: dict[bytes, bytes], givers: list[bytes], partial=None) -> BlobAssembly:
    """A whole whose pieces come from these givers, each of whom has a version of the blob."""
    assembly = BlobAssembly(BLOB, len(DATA), partial or MemoryPartialBlob(len(DATA)))
    for piece, giver in zip(assembly.pieces, givers, strict=True):
        data = versions[giver][piece.offset : piece.offset + piece.length]
        assembly.credit(piece, assembly.accept(piece, data), giver)
    return assembly


def check_source(assembly: BlobAssembly, peer: bytes, version: bytes):
    check = assembly.check_source()
    for piece in assembly.not_from(peer):
        check.accept(piece, version[piece.offset : piece.offset + piece.length])
    return check.conclude()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whoever_vouches_and_in_whatever_order_only_liars_are_named(data):
    bad = {
        peer: data.draw(st.sets(st.integers(0, 5), min_size=1))
        for peer in data.draw(st.sets(st.sampled_from(PEERS), max_size=3))
    }
    versions = {}
    for peer in PEERS:
        version = bytearray(DATA)
        for number in bad.get(peer, ()):
            version[number * PIECE_BYTES] ^= 1 + PEERS.index(peer)
        versions[peer] = bytes(version)
    givers = data.draw(st.lists(st.sampled_from(PEERS), min_size=6, max_size=6))
    assembly = put_together(versions, givers)
    named = set()
    right = assembly.finish()
    for peer in data.draw(st.permutations(PEERS)):
        if assembly.final:
            break
        liars = check_source(assembly, peer, versions[peer])
        named |= {peer} if liars is None else liars
    assert assembly.final
    assert assembly.partial.data == DATA
    assert named <= set(bad)
    guilty = {giver for number, giver in enumerate(givers) if number in bad.get(giver, ())}
    assert right == (not guilty)
    assert guilty <= named


def test_a_small_blob_is_proven_as_it_arrives():
    small = some_bytes(1000)
    assembly = BlobAssembly(blob_id(small), len(small), MemoryPartialBlob(len(small)))
    (piece,) = assembly.pieces
    with pytest.raises(WrongBytesError):
        assembly.accept(piece, flipped(small, 100))
    assert assembly.accept(piece, small) == blob_id(small)
    assert assembly.accept(piece, small) is None, "a second copy is of no use"


def test_what_a_liar_gave_is_missing_again():
    assembly = put_together({PEERS[0]: DATA, PEERS[1]: flipped(DATA)}, [*PEERS[:2]] * 3)
    gone = assembly.discard(PEERS[1])
    assert gone == assembly.missing() == assembly.pieces[1::2]
    for piece in gone:
        data = DATA[piece.offset : piece.offset + piece.length]
        assembly.credit(piece, assembly.accept(piece, data), PEERS[0])
    assert assembly.finish()


def test_the_same_holds_on_disk_and_nothing_stands_under_the_name_before_it_is_right(tmp_path):
    versions = {PEERS[0]: DATA, PEERS[1]: flipped(DATA)}
    partial = FilePartialBlob(tmp_path, BLOB, len(DATA))
    assembly = put_together(versions, [*PEERS[:2]] * 3, partial)
    assert not assembly.finish()
    assert not partial.final.exists()
    assert check_source(assembly, PEERS[1], versions[PEERS[1]]) is None
    assert not partial.final.exists()
    assert check_source(assembly, PEERS[0], DATA) == {PEERS[1]}
    partial.close()
    assert [path.name for path in tmp_path.iterdir()] == [BLOB.hex()]
    assert partial.final.read_bytes() == DATA
    assert held_in(tmp_path, BLOB) == partial.final


def test_a_draft_on_disk_is_taken_up_again_and_believed_only_as_far_as_it_hashes(tmp_path):
    first = FilePartialBlob(tmp_path, BLOB, len(DATA))
    assembly = BlobAssembly(BLOB, len(DATA), first)
    for piece in assembly.pieces[:4]:
        assembly.accept(piece, DATA[piece.offset : piece.offset + piece.length])
    with pytest.raises(StoreError, match="another download"):
        FilePartialBlob(tmp_path, BLOB, len(DATA))
    first.close()
    with (tmp_path / f"{BLOB.hex()}.part").open("r+b") as file:
        file.seek(MIB + 5)
        file.write(b"torn")
    with (tmp_path / f"{BLOB.hex()}.pieces").open("ab") as file:
        file.write(b"half an entry")
    for _ in range(2):
        second = FilePartialBlob(tmp_path, BLOB, len(DATA))
        resumed = BlobAssembly(BLOB, len(DATA), second)
        assert resumed.resume() == 3 * MIB
        assert resumed.missing() == [resumed.pieces[1], *resumed.pieces[4:]]
        second.close()
    third = FilePartialBlob(tmp_path, BLOB, len(DATA) - 1)
    assert third.present() == {}, "a draft of another size is another draft"
    third.close()


def test_a_file_of_the_right_name_and_wrong_bytes_is_no_blob(tmp_path):
    (tmp_path / BLOB.hex()).write_bytes(flipped(DATA))
    assert held_in(tmp_path, BLOB) is None
    assert list(tmp_path.iterdir()) == []
    small = SmallFilePartialBlob(tmp_path, blob_id(b"small"), 5)
    with pytest.raises(DefectError):
        small.write(0, b"wrong", blob_id(b"wrong"))
    small.write(0, b"small", blob_id(b"small"))
    assert small.finish(blob_id(b"small"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"small"]


def test_a_folder_that_cannot_be_written_is_the_disks_fault(tmp_path):
    with pytest.raises(StoreError, match="writing into nowhere"):
        FilePartialBlob(tmp_path / "nowhere", BLOB, 10)
    with pytest.raises(StoreError, match="writing"):
        SmallFilePartialBlob(tmp_path / "nowhere", blob_id(b"x"), 1).write(0, b"x", blob_id(b"x"))


# The board


def test_pieces_cover_a_blob_and_neighbours_are_asked_for_together():
    for size in (0, 1, limits.READ_BYTES, limits.READ_BYTES + 1, 7 * MIB):
        pieces = cut(BLOB, size)
        assert sum(piece.length for piece in pieces) == size
        assert joined(pieces) == ([Slice(BLOB, 0, size)] if size else [])
    assert len(cut(BLOB, limits.READ_BYTES)) == 1
    assert len(joined([Piece(BLOB, 0, 5), Piece(BLOB, 6, 1), Piece(PEERS[0], 7, 1)])) == 3


def scheduler(pieces: int = 12) -> PieceScheduler:
    made = PieceScheduler(random.Random(1))
    made.add(cut(BLOB, pieces * MIB))
    return made


def test_pieces_go_out_once_in_shuffled_runs_and_at_least_one_at_a_time():
    made = scheduler(64)
    assert made.take(PEERS[0], {PEERS[1]}, 10 * MIB) == []
    taken = []
    while more := made.take(PEERS[0], {BLOB}, 4 * MIB):
        assert len(joined(more)) == 1, "a run of neighbours"
        taken += more
    assert sorted(taken, key=lambda piece: piece.offset) == cut(BLOB, 64 * MIB)
    assert taken != sorted(taken, key=lambda piece: piece.offset)
    assert len(scheduler(9).take(PEERS[0], {BLOB}, 1)) == 1


def test_the_last_pieces_are_asked_of_a_second_source_and_no_third():
    made = scheduler(8)
    first = made.take(PEERS[0], {BLOB}, 8 * MIB)
    assert made.take(PEERS[1], {BLOB}, MIB) == []
    assert made.take_again(PEERS[0], {BLOB}, 8 * MIB) == [], "not of the same source"
    assert made.take_again(PEERS[1], {BLOB}, 2 * MIB) == first[:2], "the longest under way first"
    assert made.take_again(PEERS[2], {BLOB}, 8 * MIB) == first[2:]
    assert made.take_again(PEERS[3], {BLOB}, 8 * MIB) == []
    assert made.asked_again == 8
    assert made.done(first[0])
    assert not made.done(first[0]), "the second copy"
    made.put_back(PEERS[0], first)
    assert made.take(PEERS[3], {BLOB}, 8 * MIB) == [], "the second source still has them in hand"
    made.put_back(PEERS[1], first)
    assert made.take(PEERS[3], {BLOB}, 8 * MIB) == [first[1]]
    assert made.left_bytes == 7 * MIB
    assert not made.empty
