"""One whole version, always: what a head proves is taken over, everything else is refused by name
and changes nothing.
"""
# ruff: noqa: ARG005 - each lie takes what it needs of what it is given

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading

import numpy as np
import pytest
import zstandard

from echo_node.errors import DefectError, StoreError
from echo_node.weights import store as store_module
from echo_node.weights.errors import UnprovenError
from echo_node.weights.publisher import Cadence
from echo_node.weights.route_graph import Step
from echo_node.weights.route_reader import RouteReader, hash_of
from echo_node.weights.store import WeightsStore
from protocol import (
    DELTA_CODEC,
    RAW_CODEC,
    ZERO,
    ChainError,
    ChunkTable,
    Frame,
    ProtocolError,
    Route,
    WeightsHead,
    blob_id,
    decode,
    encode,
    encode_raw,
    limits,
    merkle_root,
    open_sealed,
    seal,
)
from protocol.weights import Layout, TensorEntry
from tests.weights.anchor_bytes import read_safetensors, write_safetensors
from tests.weights.crash_points import ROOT
from tests.weights.keys import LEADER, NOBODY, RUN, rules_of
from tests.weights.stores import (
    LAYOUT,
    bits,
    files,
    follow,
    hand_over,
    held,
    opened,
    publish,
    publisher,
    weights,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 64)


@pytest.fixture
def leader(tmp_path):
    with opened(tmp_path / "leader", durable=False) as store:
        yield store


@pytest.fixture
def store(tmp_path):
    with opened(tmp_path / "store", durable=False) as made:
        yield made


def route_of(head, base=...):
    return next(r for r in head.message.routes if base is ... or r.base == base)


def delta_of(head):
    return route_of(head, head.message.previous)


# Following


@pytest.mark.parametrize("at_once", [True, False])
def test_every_version_is_held_as_it_was_by_every_kind_of_route(leader, store, at_once):
    made = publish(leader, 14)
    assert {route.codec for each in made for route in each.head.message.routes} == {
        "safetensors",
        DELTA_CODEC,
    }
    for version in (0, 1, 2, 6, 10, 13):
        follow(leader, store, version, at_once=at_once)
        assert store.tip == made[version].head
        assert held(store) == bits(weights(version))
    assert store.verify() == []
    assert leader.verify() == []


def test_a_restart_holds_the_same_version_and_trusts_what_was_closed_in_order(leader, tmp_path, monkeypatch):
    publish(leader, 4)
    with opened(tmp_path / "store") as store:
        follow(leader, store, 3)
        before = held(store)
    monkeypatch.setattr("echo_node.weights.active_version.ActiveVersion.wrong", None)
    with opened(tmp_path / "store") as store:
        assert held(store) == before == bits(weights(3))
        assert [head.message.version for head in store.follower.heads] == [0, 1, 2, 3]


def test_a_raw_route_leads_from_nothing_and_from_a_base(leader, store):
    """The wire has it, though this program writes it only for chunks that are not of 16 bits."""
    publish(leader, 2)
    first, second = leader.follower.heads
    follow(leader, store, 0)
    frames = []
    with leader.lease() as lease:
        whole = b"".join(bytes(lease.state[name].data) for name in sorted(lease.state))
    for chunk in leader.flat.chunks:
        data = whole[chunk.offset : chunk.offset + chunk.size]
        frame = encode_raw(data)
        frames.append(Frame(store.blobs.put(frame), len(frame), blob_id(data)))
    table = store.blobs.put(encode(ChunkTable.of(RAW_CODEC, frames)))
    size = sum(frame.size for frame in frames)
    routes = tuple(Route(base, RAW_CODEC, size, table) for base in (None, first.id))
    head = told(second, routes=routes)
    store.keep_head(head)
    store.advance(head, routes[1])
    assert held(store) == bits(weights(1))
    store.advance(head, routes[0])
    assert store.verify() == []


def test_what_is_there_already_is_not_written_again(leader, store, monkeypatch):
    publish(leader, 2)
    follow(leader, store, 0)
    first = store.tip
    monkeypatch.setattr(store._held.state_file, "write", None)
    store.advance(first, route_of(first))
    assert store.tip == first

    written = []
    monkeypatch.setattr(store._held.state_file, "write", lambda chunk, _data: written.append(chunk.index))
    hand_over(leader, store, delta_of(leader.tip))
    store.keep_head(leader.tip)
    store.advance(leader.tip, delta_of(leader.tip))
    frames = list(table_of(leader, delta_of(leader.tip)))
    assert sorted(written) == [index for index, frame in enumerate(frames) if frame.size]


def test_a_head_with_the_same_weights_is_a_base_as_good_as_the_other(leader, store):
    """A head that only brings a roster: whoever is at one of the two is at both."""
    by = publisher(leader)
    for version, step in ((0, 0), (0, 0), (1, 1)):
        by.publish(weights(version), step=step, roster=NOBODY, groups=())
    follow(leader, store, 0)
    for head in leader.follower.heads:
        store.keep_head(head)
    last = leader.tip
    hand_over(leader, store, delta_of(last))
    store.advance(last, delta_of(last))
    assert (store.tip, held(store)) == (last, bits(weights(1)))


def test_a_way_whose_steps_do_not_join_is_not_gone(leader, store):
    made = publish(leader, 4, Cadence(anchor_share=1e9))
    follow(leader, store, 0)
    for each in made:
        store.keep_head(each.head)
        hand_over(leader, store, route_of(each.head))
    heads = [each.head for each in made]
    for order in ((2,), (1, 3), (2, 1), (0, 2)):
        with pytest.raises(UnprovenError, match="starts from another state"):
            store.walk(tuple(Step(heads[n], route_of(heads[n])) for n in order))
    store.walk(())
    assert store.tip == heads[0]
    store.walk(tuple(Step(heads[n], route_of(heads[n])) for n in (1, 2, 3)))
    assert held(store) == bits(weights(3))


def test_only_a_head_of_the_chain_can_be_held(leader, store):
    publish(leader, 2)
    head = leader.follower.heads[0]
    hand_over(leader, store, route_of(head))
    with pytest.raises(DefectError, match="only a head of the chain"):
        store.advance(head, route_of(head))
    assert store.tip is None


def test_heads_that_the_rules_refuse_are_not_kept(leader, store, tmp_path):
    publish(leader, 2)
    first, second = leader.follower.heads
    with pytest.raises(ChainError) as caught:
        store.keep_head(second)
    assert caught.value.rule == "gap"
    assert list((tmp_path / "store" / "heads").iterdir()) == []
    assert store.keep_head(first)
    assert not store.keep_head(first)


# What is refused


def told(head, **changes):
    message = dataclasses.replace(head.message, **changes)
    return open_sealed(seal(message, LEADER, RUN), WeightsHead, RUN)


def table_of(store, route):
    return decode(ChunkTable, store.blobs.read(route.table))


def lying(store, head, route, codec=None, root=None, size=None, base=..., frames=None):
    """A head over another table, signed by the leader all the same, and its only route."""
    frames = frames or list(table_of(store, route))
    table = store.blobs.put(encode(ChunkTable.of(codec or route.codec, frames)))
    size = sum(frame.size for frame in frames) if size is None else size
    lie = Route(route.base if base is ... else base, codec or route.codec, size, table)
    return told(head, routes=(lie,), root=root or merkle_root([frame.after for frame in frames])), lie


def swapped(frames, index, **changes):
    return [dataclasses.replace(f, **changes) if i == index else f for i, f in enumerate(frames)]


BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 24))
"""A frame that says how much it holds, and that is too much."""


LIES = {
    "a frame of another chunk": (
        lambda s, f: {"frames": swapped(f, 5, blob=f[6].blob, size=f[6].size)},
        {"wrong-after-hash", "truncated", "out-of-range", "not-canonical", "inconsistent", "too-large"},
    ),
    "another after-hash": (
        lambda s, f: {"frames": swapped(f, 5, after=b"?" * 32)},
        {"wrong-after-hash"},
    ),
    "no frame where something changes": (
        lambda s, f: {"frames": swapped(f, 5, blob=ZERO, size=0)},
        {"wrong-after-hash"},
    ),
    "another root": (lambda s, f: {"root": b"?" * 32}, {"wrong-root"}),
    "another size": (lambda s, f: {"size": 1}, {"wrong-table"}),
    "an absurd size": (lambda s, f: {"size": limits.SAFE_INTEGER}, {"wrong-table"}),
    "too few chunks": (lambda s, f: {"frames": f[:-1]}, {"wrong-layout"}),
    "too many chunks": (lambda s, f: {"frames": [*f, f[0]]}, {"wrong-layout"}),
    "another codec": (lambda s, f: {"codec": RAW_CODEC}, {"inconsistent", "too-large"}),
    "a codec that nobody knows": (lambda s, f: {"codec": "zip"}, {"unknown-codec"}),
    "a delta from nothing": (lambda s, f: {"base": None}, {"wrong-base"}),
    "an anchor from a base": (lambda s, f: {"codec": "safetensors"}, {"wrong-base"}),
    "another base": (lambda s, f: {"base": b"?" * 32}, {"wrong-base"}),
    "a zip bomb": (
        lambda s, f: {"frames": swapped(f, 5, blob=s.blobs.put(BOMB), size=len(BOMB))},
        {"too-large"},
    ),
    "no zstd": (
        lambda s, f: {"frames": swapped(f, 5, blob=s.blobs.put(b"no zstd"), size=7)},
        {"bad-frame"},
    ),
    "a frame that is not here": (
        lambda s, f: {"frames": swapped(f, 5, blob=b"?" * 32, size=9)},
        {"missing-blob"},
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_under_the_leaders_own_signature_is_refused_by_name(leader, store, name):
    publish(leader, 2)
    follow(leader, store, 0)
    second = leader.follower.heads[1]
    hand_over(leader, store, delta_of(second))
    make, reasons = LIES[name]
    frames = list(table_of(store, delta_of(second)))
    head, route = lying(store, second, delta_of(second), **make(store, frames))
    store.keep_head(head)
    before, pointer = held(store), store._place.current()
    with pytest.raises(UnprovenError) as caught:
        store.advance(head, route)
    assert caught.value.reason in reasons
    assert (held(store), store._place.current()) == (before, pointer)
    assert before == bits(weights(0))
    assert (
        store.verify() == [] or caught.value.reason in {"wrong-root", "wrong-table", "wrong-layout"} | reasons
    )


def anchor_bytes(store, route):
    return b"".join(store.blobs.read(frame.blob) for frame in table_of(store, route) if frame.size)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "wrong-layout"),
        (lambda data: data + b"x", "wrong-layout"),
        (lambda data: data.replace(b'"BF16"', b'"BF61"'), "wrong-layout"),
        (lambda data: data.replace(b"b.weight", b"../../x/"), "wrong-layout"),
        (lambda data: bytes(8) + data[8:], "wrong-layout"),
        (lambda data: data[:-3] + b"???", "wrong-after-hash"),
        (lambda data: write_safetensors(dict(reversed(weights(3).items()))), "wrong-after-hash"),
    ],
    ids=["short", "long", "types", "path", "length", "values", "other-weights"],
)
def test_an_anchor_is_the_layouts_own_header_and_the_heads_own_state(leader, store, change, reason):
    publish(leader, 1)
    head = leader.tip
    frames = list(table_of(leader, route_of(head)))
    data = change(anchor_bytes(leader, route_of(head)))
    assert len(data) < limits.FRAME_BYTES
    one = Frame(store.blobs.put(data), len(data), frames[0].after)
    others = [Frame(ZERO, 0, frame.after) for frame in frames[1:]]
    lie, route = lying(store, head, route_of(head), frames=[one, *others])
    store.keep_head(lie)
    with pytest.raises(UnprovenError) as caught:
        store.advance(lie, route)
    assert caught.value.reason == reason
    assert store.tip is None


def test_a_layout_that_is_not_the_manifests_or_cannot_be_is_refused(tmp_path):
    with (
        pytest.raises(UnprovenError) as caught,
        WeightsStore.open(tmp_path, rules_of(weights(0)), Layout((LAYOUT.tensors[0],))),
    ):
        pass
    assert caught.value.reason == "wrong-layout"
    for entries in (
        (TensorEntry("a", "bf16", (2**40, 2**40)),),
        (TensorEntry("__metadata__", "bf16", (2,)),),
    ):
        layout = Layout(entries)
        rules = dataclasses.replace(rules_of(weights(0)), layout=blob_id(encode(layout)))
        with pytest.raises(ProtocolError), WeightsStore.open(tmp_path, rules, layout):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frames", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_frames_are_refused_or_caught_by_the_hash(leader, monkeypatch, frames):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 4096)
    publish(leader, 2)
    head = leader.tip
    step = Step(head, delta_of(head))
    passage = RouteReader(leader.flat, leader.blobs, step, table_of(leader, step.route))
    chunk = next(chunk for chunk in leader.flat.chunks if chunk.narrow)
    frame = leader.blobs.read(passage._frames[chunk.index].blob)
    with leader.materialise(head.message.previous) as before:
        base = np.frombuffer(before._flat_state, np.uint8)[chunk.offset : chunk.offset + chunk.size].copy()
    luck = np.random.default_rng(0)
    sent = [frame]
    monkeypatch.setattr(passage, "_blobs", type("Sent", (), {"read": staticmethod(lambda _: bytes(sent[0]))}))
    assert hash_of(passage.build(chunk, base.copy())) == passage.after[chunk.index]
    reasons = {}
    for places, bit in zip(
        luck.integers(0, len(frame), (frames, 2)), luck.integers(0, 256, frames), strict=True
    ):
        sent[0] = mutated = bytearray(frame)
        mutated[places[0]] ^= int(bit)
        if bit % 5 == 0:
            mutated = sent[0] = mutated[: places[1]]
        try:
            made = passage.build(chunk, base.copy())
        except UnprovenError as error:
            reasons[error.reason] = reasons.get(error.reason, 0) + 1
        else:
            assert hash_of(made) == passage.after[chunk.index]
    assert {"bad-frame", "wrong-after-hash"} <= reasons.keys()


# The scratch


def test_a_torn_scratch_is_built_again_from_the_truth(leader, tmp_path):
    publish(leader, 6)
    folder = tmp_path / "store"
    with opened(folder) as store:
        follow(leader, store, 5)
    luck = np.random.default_rng(0)
    for _ in range(20):
        (folder / "state.whole").unlink()
        state = bytearray((folder / "state").read_bytes())
        start = int(luck.integers(len(state)))
        state[start : start + 100] = luck.bytes(len(state[start : start + 100]))
        (folder / "state").write_bytes(state)
        with opened(folder) as store:
            assert held(store) == bits(weights(5))
            assert store.verify() == []
    (folder / "state").unlink()
    with opened(folder) as store:
        assert held(store) == bits(weights(5))


def test_bytes_that_rot_in_the_scratch_are_found_before_they_are_built_upon(leader, store, tmp_path):
    publish(leader, 3)
    follow(leader, store, 1)
    with (tmp_path / "store" / "state").open("r+b") as file:
        file.seek(300)
        file.write(b"rotten")
    assert store.verify() == ["the state on disk is not that of version 1 in 1 chunks"]
    follow(leader, store, 2)
    assert held(store) == bits(weights(2))


def test_a_blob_that_rots_is_named_and_nothing_is_built_from_it(leader, store, tmp_path):
    publish(leader, 3)
    follow(leader, store, 1)
    last = leader.tip
    hand_over(leader, store, delta_of(last))
    store.keep_head(last)
    frame = next(frame for frame in table_of(store, delta_of(last)) if frame.size)
    path = tmp_path / "store" / "blobs" / frame.blob.hex()
    path.write_bytes(bytes(frame.size))
    with pytest.raises(StoreError, match=f"{path.name} is damaged"):
        store.advance(last, delta_of(last))
    assert held(store) == bits(weights(1))
    assert not path.exists(), "so that it is fetched again"
    assert store.missing(delta_of(last)) == [(frame.blob, frame.size)]
    hand_over(leader, store, delta_of(last))
    store.advance(last, delta_of(last))
    assert held(store) == bits(weights(2))


def test_looking_for_rot_names_it(leader, store, tmp_path):
    publish(leader, 2)
    follow(leader, store, 1)
    path = tmp_path / "store" / "blobs" / delta_of(leader.tip).table.hex()
    path.write_bytes(b"rotten")
    assert any(path.name in problem for problem in store.verify())


@pytest.mark.parametrize("part", ["table", "frame"])
def test_a_store_opens_though_what_leads_to_its_version_rots(part, leader, tmp_path):
    publish(leader, 3)
    folder = tmp_path / "follower"
    with opened(folder) as store:
        follow(leader, store, 1)
        routes = store.tip.message.routes
        frames = [frame.blob for route in routes for frame in table_of(store, route) if frame.size]
    for blob in [route.table for route in routes] if part == "table" else frames:
        path = folder / "blobs" / blob.hex()
        path.write_bytes(bytes(path.stat().st_size))
    (folder / "state.whole").unlink()  # so that all of it is built again
    with opened(folder) as store:
        follow(leader, store, 2)
        assert held(store) == bits(weights(2))


def test_a_store_whose_blobs_are_gone_starts_with_nothing_and_is_filled_again(leader, tmp_path):
    publish(leader, 3)
    folder = tmp_path / "store"
    with opened(folder) as store:
        follow(leader, store, 2)
    for path in (folder / "blobs").iterdir():
        path.unlink()
    (folder / "state.whole").unlink()
    with opened(folder) as store:
        assert store.tip is None
        with pytest.raises(StoreError, match="no version of the weights"), store.lease():
            pass
        follow(leader, store, 2)
        assert held(store) == bits(weights(2))


def test_what_a_process_left_half_done_is_removed_and_what_a_download_can_go_on_from_stays(leader, tmp_path):
    publish(leader, 1)
    folder = tmp_path / "store"
    with opened(folder) as store:
        follow(leader, store, 0)
        blob = next(store.blobs.all())[0].hex()
    other = "ab" * 32
    for name in (
        f"{other}.12345678.part",
        f"{other}.12345678.beside",
        f"{other}.other",
        f"{blob}.part",
        f"{blob}.pieces",
    ):
        (folder / "blobs" / name).write_bytes(b"half")
    for name in (f"{other}.part", f"{other}.pieces", "somebody-else"):
        (folder / "blobs" / name).write_bytes(b"half")
    for name in ("current.12345678.beside", "other-12345678", "heads/000000000001.12345678.beside"):
        (folder / name).write_bytes(b"half")
    with opened(folder) as store:
        left = {path.name for path in folder.rglob("*") if path.is_file() and len(path.name) != 64}
        assert left == {
            "lock",
            "current",
            "state",
            "state.whole",
            "000000000000",
            f"{other}.part",
            f"{other}.pieces",
            "somebody-else",
        }
        assert store.verify() == []


# Others


@pytest.mark.parametrize(
    ("pointer", "says"),
    [("ab" * 32, "holds a version that its own chain does not know"), ("no hex", "names no head")],
)
def test_a_pointer_to_an_unknown_version_is_refused_and_left_as_it_is(leader, tmp_path, pointer, says):
    publish(leader, 2)
    with opened(tmp_path / "own") as store:
        follow(leader, store, 1)
    (tmp_path / "own" / "current").write_text(f"{pointer}\n")
    before = files(tmp_path / "own")
    with pytest.raises(StoreError, match=says) as caught, opened(tmp_path / "own"):
        pass
    assert "move" in caught.value.advice
    assert files(tmp_path / "own") == before


def test_a_second_process_is_told_that_the_store_is_in_use(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from echo_node.errors import StoreError\n"
        "from tests.weights.stores import opened\n"
        "try:\n"
        "    with opened(Path(sys.argv[1])): print('opened')\n"
        "except StoreError as error: print(error)\n"
    )

    def another():
        command = [sys.executable, "-c", code, str(tmp_path / "store")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    with opened(tmp_path / "store"):
        assert "is in use by another process" in another()
    limits.CHUNK_ELEMENTS = 4 * 1024 * 1024  # the other process has the real ones
    assert another() == "opened\n"


def test_who_reads_sees_one_version_while_others_are_applied(leader, store):
    publish(leader, 14)
    follow(leader, store, 0)
    wrong, done = [], threading.Event()

    def read():
        while not done.is_set():
            with store.lease() as lease:
                if bits(lease.state) != bits(weights(lease.head.message.version)):
                    wrong.append(lease.head)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 14):
        follow(leader, store, version)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_nobody_waits_for_ever_for_a_lease(leader, store):
    publish(leader, 2)
    follow(leader, store, 0)
    head = leader.tip
    hand_over(leader, store, delta_of(head))
    store.keep_head(head)
    with store.lease(), pytest.raises(StoreError, match="still being read"):
        store.advance(head, delta_of(head), deadline=0.05)
    with (
        store._leases.writing(1),
        pytest.raises(StoreError, match="still being written"),
        store.lease(deadline=0.05),
    ):
        pass
    store.advance(head, delta_of(head), deadline=0.05)
    assert held(store) == bits(weights(1))


def test_views_end_with_their_lease(leader):
    publish(leader, 1)
    with leader.lease() as lease:
        view = lease.state["b.weight"].data
        with pytest.raises(TypeError):
            view[0] = 1
    with pytest.raises(ValueError, match="released"):
        bytes(view)


# What changed, and other versions


def changed(before, lease, since):
    """An engine that writes what it is told into what it has."""
    mine = {
        name: np.frombuffer(data, "<u4" if kind == "f32" else "<u2").copy()
        for name, (kind, _, data) in before.items()
    }
    told = 0
    for change in lease.changes(since):
        assert (np.diff(change.positions) > 0).all()
        mine[change.tensor][change.positions] = change.values
        told += change.positions.size
    return {name: (*before[name][:2], values.tobytes()) for name, values in mine.items()}, told


@pytest.mark.parametrize("since", range(13))
def test_an_engine_at_any_version_is_told_what_to_change(leader, since):
    made = publish(leader, 14)
    with leader.lease() as lease:
        after, told = changed(bits(weights(since)), lease, made[since].head.id)
    assert after == bits(weights(13))
    if since >= 12:
        narrow = sum(chunk.elements for chunk in leader.flat.chunks if chunk.narrow)
        assert told < leader.flat.elements - narrow // 2, "elements, and not chunks"


def test_an_engine_at_an_unknown_version_is_told_everything(leader):
    publish(leader, 3)
    with leader.lease() as lease:
        after, told = changed(bits(weights(1)), lease, b"?" * 32)
    assert after == bits(weights(2))
    assert told == leader.flat.elements


def test_any_version_that_is_here_can_be_had_beside_the_one_that_is_held(leader, store, tmp_path):
    made = publish(leader, 14)
    for version, each in enumerate(made):
        with leader.materialise(each.head.id) as other:
            assert other.head == each.head
            assert bits(other.state) == bits(weights(version))
            assert len(list((tmp_path / "leader").glob("other-*"))) == 1
    assert not list((tmp_path / "leader").glob("other-*"))
    follow(leader, store, 3)
    for head in leader.follower.heads[4:]:
        store.keep_head(head)
    hand_over(leader, store, delta_of(made[4].head))
    with store.materialise(made[4].head.id) as newer:
        assert bits(newer.state) == bits(weights(4))
    with pytest.raises(StoreError, match="cannot be built"), store.materialise(made[9].head.id):
        pass
    with pytest.raises(StoreError, match="does not know"), store.materialise(b"?" * 32):
        pass
    assert not list((tmp_path / "store").glob("other-*"))
    assert held(store) == bits(weights(3))


# Room


def test_old_blobs_go_only_once_others_hold_a_newer_anchor(leader):
    made = publish(leader, 30)
    anchors = [each.head for each in made if each.head.message.anchor]
    assert len(anchors) > 3
    before = sum(size for _, size in leader.blobs.all())
    assert leader.prune(versions=5, settled=None) == 0
    assert leader.prune(versions=5, settled=b"?" * 32) == 0
    assert leader.prune(versions=5, settled=anchors[0].id) == 0
    freed = leader.prune(versions=5, settled=anchors[-1].id)
    after = sum(size for _, size in leader.blobs.all())
    assert freed == before - after > before // 2
    for version in range(25, 30):
        with leader.materialise(made[version].head.id) as other:
            assert bits(other.state) == bits(weights(version))
    assert leader.verify() == []
    publish(leader, 3)
    assert leader.verify() == []


def test_a_store_that_is_pruned_stays_as_small_as_it_is(leader):
    sizes = []
    for _ in range(40):
        (made,) = publish(leader, 1)
        anchors = [head for head in leader.follower.heads if head.message.anchor]
        leader.prune(versions=5, settled=anchors[-1].id)
        sizes.append(sum(size for _, size in leader.blobs.all()))
        assert set(leader.held_of(made.head)) >= {made.head.message.roster}
    assert max(sizes[20:]) <= 1.2 * max(sizes[:20])
    assert leader.verify() == []


def test_blobs_of_a_version_that_is_being_built_stay_until_it_is_built(leader, monkeypatch):
    """A trainer looks at old groups while it publishes: pruning ended it."""
    made = publish(leader, 30)
    anchor = [each.head for each in made if each.head.message.anchor][-1]
    building, go_on, pruned = threading.Event(), threading.Event(), threading.Event()
    readers = leader.archive.readers

    def slowly(way):
        building.set()
        assert go_on.wait(60)
        return readers(way)

    def prune():
        leader.prune(versions=2, settled=anchor.id)
        pruned.set()

    monkeypatch.setattr(leader.archive, "readers", slowly)
    states = []

    def build():
        with leader.materialise(made[3].head.id) as other:
            states.append(bits(other.state))

    threads = [threading.Thread(target=build), threading.Thread(target=prune)]
    threads[0].start()
    assert building.wait(60)
    with monkeypatch.context() as hurried:
        hurried.setattr(store_module, "PRUNE_SECONDS", 0.05)
        assert leader.prune(versions=2, settled=anchor.id) == 0, "it prunes the next time"
    threads[1].start()
    assert not pruned.wait(0.2)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert states == [bits(weights(3))]
    assert pruned.is_set()
    assert not leader.archive.can_build(made[3].head.id)


def test_a_table_that_is_looked_at_while_it_goes_does_not_count_as_whole(leader, monkeypatch):
    made = publish(leader, 30)
    route = made[3].head.message.routes[0]
    anchor = [each.head for each in made if each.head.message.anchor][-1]
    every, looks = leader.blobs.all, []

    def looked_at_meanwhile():
        looks.append(threading.Thread(target=leader.archive.is_whole, args=(route,)))
        looks[0].start()
        looks[0].join(0.2)  # without the lock it ends here, and finds the files
        return every()

    monkeypatch.setattr(leader.blobs, "all", looked_at_meanwhile)
    assert leader.prune(versions=2, settled=anchor.id) > 0
    looks[0].join(60)
    assert not leader.archive.is_whole(route)


def test_an_anchor_opens_as_a_safetensors_file(leader):
    publish(leader, 1)
    data = anchor_bytes(leader, route_of(leader.tip))
    assert data == write_safetensors(weights(0))
    assert read_safetensors(data) == dict(sorted(weights(0).items()))


def test_nothing_else_lies_in_the_folder(leader, store, tmp_path):
    publish(leader, 3)
    follow(leader, store, 2)
    names = {name.split("/")[0] for name in files(tmp_path / "store")}
    assert names == {"blobs", "heads", "current", "state"}
