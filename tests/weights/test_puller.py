"""Following the chain: nothing is taken that was not proven, whoever sends it, and what was held
stays.
"""

from __future__ import annotations

import dataclasses

import pytest
import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.memory import MemorySwarm
from echo_node.weights.errors import UnprovenError
from echo_node.weights.publisher import Publication, Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import ZERO, ChunkTable, Frame, Roster, Route, blob_id, canonical, decode, encode, limits
from protocol.election import TermGrant, TermVote, cast
from tests.crafting import SAMPLERS, roster
from tests.weights import stores
from tests.weights.chains import LEADER, publish, publisher, state, tensor, told_otherwise
from tests.weights.keys import FOLLOWER, NOBODY, RUN, STRANGER, counting, rules_of
from tests.weights.stores import bits, files, held
from tests.weights.swarms import QUICK, following, offering

OTHER_TYPES = {**state(), "a.scale": tensor("bf16")}


def over(made: Publication, table: bytes) -> Publication:
    """The same head over another table."""
    route = Route(None, "safetensors", made.head.message.anchor.size, blob_id(table))
    return told_otherwise(Publication(made.head, {**made.blobs, blob_id(table): table}), routes=(route,))


def table_of(made: Publication) -> ChunkTable:
    return decode(ChunkTable, made.blobs[made.head.message.anchor.table])


async def refused(puller, made: Publication, *, kind=UnprovenError) -> Exception:
    """Pulling a head fails, and the store is as it was, but for blobs that are what their names
    say.
    """
    await puller.chain.take_head(made.head.sealed)
    before, tip = disk(puller), puller.held
    with pytest.raises(kind) as caught:
        await puller.pull(made.head.id)
    assert puller.held == tip
    assert disk(puller) == before
    return caught.value


def disk(puller) -> dict[str, bytes]:
    kept = files(puller.store._place._folder)
    return {name: data for name, data in kept.items() if not name.startswith("blobs/")}


# What arrives


async def test_a_state_of_one_chunk_and_of_many_arrives_as_it_was(monkeypatch):
    for elements in (100, 28, 5, 1):
        monkeypatch.setattr(limits, "CHUNK_ELEMENTS", elements)
        (made,) = publish(1)
        async with following(made) as puller:
            await puller.chain.take_head(made.head.sealed)
            assert await puller.pull() == made.head
            assert held(puller.store) == bits(state())
            assert puller.store.verify() == []


async def test_the_newest_or_a_named_version_is_pulled_and_an_older_one_is_built_beside_it():
    made = publish(5)
    async with following(*made) as puller:
        await puller.chain.ask(LEADER.public)
        assert await puller.pull(made[2].head.id) == made[2].head
        assert held(puller.store) == bits(state(2))
        assert await puller.pull() == made[4].head
        assert held(puller.store) == bits(state(4))
        with pytest.raises(StoreError, match="version 4 is held, which follows version 2"):
            await puller.pull(made[2].head.id)
        assert await puller.use(made[2].head, lambda old: bits(old.state)) == bits(state(2))
        assert await puller.use(made[4].head, lambda now: bits(now.state)) == bits(state(4))
        assert puller.held == made[4].head


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_head_that_a_grant_leaves_while_it_is_fetched_is_an_error_and_what_was_held_stays(
    steps, monkeypatch
):
    made = publish(steps + 1)
    async with following(*made) as puller:
        await puller.chain.ask(LEADER.public)
        await puller.pull(made[0].head.id)
        heads = puller.store.follower.heads
        walk = puller.store.walk

        def granted_meanwhile(way, **options):
            monkeypatch.setattr(type(puller.store.follower), "heads", heads[:1])
            walk(way, **options)

        monkeypatch.setattr(puller.store, "walk", granted_meanwhile)
        with pytest.raises(PeerError, match=f"version {steps} was left by a grant"):
            await puller.pull(made[-1].head.id)
        assert puller.held == made[0].head


async def test_a_new_terms_version_is_fetched_though_a_later_one_of_the_old_term_is_held(tmp_path):
    """A leader may die with versions that its successor never had: whoever has them goes back to
    where the grant begins.
    """
    two = dataclasses.replace(
        rules_of(stores.weights(0)), trainers=(LEADER.public, STRANGER.public), electors=(LEADER.public,)
    )
    with (
        WeightsStore.open(tmp_path / "leader", two, stores.LAYOUT, durable=False) as leader,
        WeightsStore.open(tmp_path / "follower", two, stores.LAYOUT, durable=False) as store,
    ):
        first = stores.publish(leader, 4)
        vote = TermVote(base=first[1].head.id, leader=STRANGER.public, term=2)
        grant = TermGrant((cast(vote, LEADER, RUN),), vote)
        async with MemorySwarm() as swarm, offering(swarm.join, leader), swarm.join(FOLLOWER) as network:
            puller = Puller(network, store, blobs=BlobClient(network, settings=QUICK), named=(LEADER.public,))
            for made in first:
                store.keep_head(made.head)
            await puller.pull(first[3].head.id)
            leader.keep_grant(grant)
            store.keep_grant(grant)
            by = Publisher(leader, STRANGER, luck=counting(50))
            head = by.publish(stores.weights(9), step=9, roster=NOBODY, groups=()).head
            store.keep_head(head)
            assert head.message.version < puller.held.message.version
            assert await puller.use(head, lambda now: bits(now.state)) == bits(stores.weights(9))


async def test_before_any_head_was_heard_nothing_can_be_pulled():
    async with following() as puller:
        with pytest.raises(PeerError, match="no head of the chain"):
            await puller.pull()
        with pytest.raises(PeerError, match="not heard of"):
            await puller.pull(b"?" * 32)


async def test_the_roster_is_that_of_the_head_or_none():
    made = publisher().publish(state(), step=0, roster=roster(*SAMPLERS), groups=())
    async with following(made) as puller:
        head = await puller.chain.take_head(made.head.sealed)
        assert await puller.roster(head) == roster(*SAMPLERS)
        assert await puller.roster(head) == roster(*SAMPLERS), "it is kept, for others too"

    other = encode(roster(SAMPLERS[0]))
    async with following(made, blobs={made.head.message.roster: other}) as puller:
        with pytest.raises(PeerError, match="cannot be had"):
            await puller.roster(await puller.chain.take_head(made.head.sealed))


async def test_progress_is_told_in_bytes_and_words(monkeypatch):
    from echo_node.weights import puller as pull

    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 5)
    monkeypatch.setattr(pull, "SMALL_BYTES", 0)
    made = publish(2)
    told = []
    async with following(*made) as puller:
        puller._on_progress = told.append
        await puller.chain.ask(LEADER.public)
        await puller.pull()
        assert puller.pulls.versions == 1
        assert puller.pulls.bytes >= made[1].head.message.anchor.size
    fetching = [now for now in told if now.what == "fetching"]
    assert fetching[-1].done == fetching[-1].total > 0
    assert {now.what for now in told} == {"tables", "fetching", "applying"}
    assert str(fetching[-1]).startswith("version 1: fetching")


# Senders that lie


async def test_other_bytes_under_a_blobs_name_are_refused_and_their_sender_scored():
    (made,) = publish(1)
    frame = next(iter(table_of(made))).blob
    async with following(made, blobs={frame: made.blobs[frame][:-1] + b"?"}) as puller:
        error = await refused(puller, made, kind=PeerError)
        assert "no way to version 0" in str(error)
        assert puller._network.scores() == {LEADER.public: {"wrong-blob": 1}}


async def test_a_frame_longer_than_the_table_says_is_not_read():
    (made,) = publish(1)
    frame = next(iter(table_of(made))).blob
    async with following(made, blobs={frame: made.blobs[frame] + b"x"}) as puller:
        await refused(puller, made, kind=PeerError)
        assert puller._blobs.sources.faults()[LEADER.public]["wrong-size"] >= 1


async def test_a_leader_that_never_sends_the_blob_costs_a_deadline_and_no_more(autojump_clock):
    (made,) = publish(1)

    async def silent(_peer, _asked):
        await trio.sleep_forever()

    async with following(made, blobs=silent) as puller:
        await refused(puller, made, kind=PeerError)
        assert "stalled" in puller._blobs.sources.faults()[LEADER.public]
    assert autojump_clock.current_time() <= 3 * DownloadSettings().stall_cap


# Heads that lie: the signer's fault


@pytest.mark.parametrize("size", [limits.FRAME_BYTES + 1, 2**32 - 1])
async def test_a_table_that_announces_an_oversized_frame_is_refused_before_the_frame_is_asked_for(size):
    (made,) = publish(1)
    table = table_of(made)
    columns = {"after": table.after, "codec": table.codec, "frames": table.frames}
    lied = over(made, canonical.encode({**columns, "sizes": size.to_bytes(4, "little")}))
    async with following(lied) as puller:
        error = await refused(puller, lied)
        assert error.reason == "inconsistent"
        assert "a frame of more than" in str(error)
        got = puller._blobs.sources.of(LEADER.public).received
        assert got == len(lied.blobs[lied.head.message.anchor.table])
        assert puller._network.scores() == {LEADER.public: {"inconsistent": 1}}


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda frames: [Frame(each.blob, each.size, b"?" * 32) for each in frames], "wrong-root"),
        (lambda frames: [frames[0], *frames[1:-1][::-1], frames[-1]], "wrong-root"),
        (lambda frames: frames[:-1], "wrong-table"),
        (lambda frames: [*frames, frames[-1]], "wrong-table"),
        (lambda frames: [Frame(each.blob, each.size + 1, each.after) for each in frames], "wrong-table"),
        (lambda frames: [Frame(each.blob, each.size - 1, each.after) for each in frames], "wrong-table"),
        (lambda frames: [Frame(ZERO, 0, each.after) for each in frames], "wrong-table"),
        (
            lambda frames: [
                Frame(one.blob, one.size, two.after)
                for one, two in zip([frames[1], frames[0], *frames[2:]], frames, strict=True)
            ],
            "wrong-layout",
        ),
    ],
    ids=["after", "order", "one-too-few", "one-too-many", "longer", "shorter", "unchanged", "swapped"],
)
async def test_a_table_that_lies_gives_no_weights_and_is_its_signers_fault(lie, why, monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 5)
    (made,) = publish(1)
    lied = over(made, encode(ChunkTable.of("safetensors", lie(list(table_of(made))))))
    async with following(lied) as puller:
        error = await refused(puller, lied)
        assert error.reason == why
        assert puller._network.scores() == {LEADER.public: {why: 1}}
        assert puller.pulls.refused == {why: 1}
        with pytest.raises(UnprovenError):
            await puller.pull()
        assert puller._network.scores() == {LEADER.public: {why: 1}}, "it is known, and not tried again"


async def test_a_table_of_another_codec_than_its_route_is_refused():
    (made,) = publish(1)
    lied = over(made, encode(ChunkTable.of("gap8-ulp8-zstd1", list(table_of(made)))))
    async with following(lied) as puller:
        assert (await refused(puller, lied)).reason == "wrong-table"


@pytest.mark.parametrize(
    "weights",
    [
        OTHER_TYPES,
        {**state(), "d": tensor("f32", 1)},
        {"a.scale": tensor("f32"), "b.weight": tensor("bf16", 5, 3), "c.bias": tensor("f32", 2, 3, 2)},
    ],
    ids=["types", "names", "shapes"],
)
async def test_weights_of_another_layout_are_refused_though_every_hash_is_right(weights):
    honest = publish(1)[0].head.message
    made = publisher().publish(weights, step=0, roster=Roster(()), groups=())
    lied = told_otherwise(made, layout=honest.layout, root=honest.root)
    async with following(lied) as puller:
        assert (await refused(puller, lied)).reason in {"wrong-layout", "wrong-root", "too-large"}


async def test_weights_that_are_not_those_of_the_heads_root_are_refused_and_the_last_good_ones_held():
    first, second = publish(2)
    lied = told_otherwise(second, root=first.head.message.root)
    async with following(first, lied) as puller:
        await puller.chain.take_head(first.head.sealed)
        await puller.pull()
        assert (await refused(puller, lied)).reason == "wrong-root"
        assert held(puller.store) == bits(state(0))
        assert puller.store.verify() == []


async def test_where_the_newest_version_lies_the_last_good_one_is_held():
    made = publish(4)
    lied = told_otherwise(made[3], root=made[0].head.message.root)
    async with following(*made[:3], lied) as puller:
        await puller.chain.ask(LEADER.public)
        with pytest.raises(UnprovenError) as caught:
            await puller.pull()
        assert caught.value.reason == "wrong-root"
        assert puller.held == made[2].head
        assert held(puller.store) == bits(state(2))


@pytest.mark.parametrize("size", [10**9, 2**53 - 1])
async def test_a_route_of_an_absurd_size_is_refused_before_a_byte_is_fetched(size):
    first, second = publish(2)
    table = second.head.message.anchor.table
    lied = told_otherwise(
        second,
        routes=(
            Route(None, "safetensors", size, table),
            Route(first.head.id, "gap8-ulp8-zstd1", size, b"t" * 32),
        ),
    )
    async with following(first, lied) as puller:
        await puller.chain.take_head(first.head.sealed)
        await puller.pull()
        got = puller._blobs.sources.of(LEADER.public).received
        assert (await refused(puller, lied)).reason == "too-large"
        assert puller._blobs.sources.of(LEADER.public).received == got


async def test_bytes_that_are_no_weights_at_all_are_the_signers_fault():
    (made,) = publish(1)
    (frame,) = table_of(made)
    junk = b"?" * frame.size
    data = encode(ChunkTable.of("safetensors", [Frame(blob_id(junk), len(junk), frame.after)]))
    lied = over(Publication(made.head, {blob_id(junk): junk}), data)
    async with following(lied) as puller:
        assert (await refused(puller, lied)).reason == "wrong-layout"


async def test_a_head_in_a_codec_that_nobody_here_reads_is_refused_by_name():
    first, second = publish(2)
    frames = list(table_of(second))
    data = encode(ChunkTable.of("zip", frames))
    route = Route(None, "zip", sum(frame.size for frame in frames), blob_id(data))
    strange = told_otherwise(Publication(second.head, {**second.blobs, blob_id(data): data}), routes=(route,))
    async with following(first, strange) as puller:
        await puller.chain.take_head(first.head.sealed)
        await puller.pull()
        assert (await refused(puller, strange)).reason == "unknown-codec"


async def test_a_zip_bomb_in_a_delta_is_refused_and_the_old_state_held():
    from protocol import zstd

    first, second = publish(2)
    bomb = zstd.pack_columns((bytes(50_000_000),))
    after = next(iter(table_of(second))).after
    data = encode(ChunkTable.of("gap8-ulp8-zstd1", [Frame(blob_id(bomb), len(bomb), after)]))
    route = Route(first.head.id, "gap8-ulp8-zstd1", len(bomb), blob_id(data))
    lied = told_otherwise(
        Publication(second.head, {blob_id(bomb): bomb, blob_id(data): data}), routes=(route,)
    )
    async with following(first, lied) as puller:
        await puller.chain.take_head(first.head.sealed)
        await puller.pull()
        assert (await refused(puller, lied)).reason in {"bad-frame", "too-large"}
        assert held(puller.store) == bits(state(0))


# Another way


async def test_where_the_delta_lies_the_anchor_is_taken():
    first, second = publish(2)
    anchor = second.head.message.anchor
    honest = next(route for route in second.head.message.routes if route.base)
    lie = encode(ChunkTable.of(honest.codec, [Frame(ZERO, 0, frame.after) for frame in table_of(second)]))
    lied = told_otherwise(
        Publication(second.head, {**second.blobs, blob_id(lie): lie}),
        routes=(Route(first.head.id, honest.codec, 0, blob_id(lie)), anchor),
    )
    async with following(first, lied) as puller:
        await puller.chain.ask(LEADER.public)
        await puller.pull(first.head.id)
        await puller.pull()
        assert held(puller.store) == bits(state(1))
        assert puller._network.scores() == {LEADER.public: {"wrong-after-hash": 1}}


async def test_where_nobody_has_the_frames_of_the_delta_another_way_is_planned():
    first, second = publish(2)
    delta = next(route for route in second.head.message.routes if route.base)
    for lost in ("table", "frames"):
        gone = (
            {delta.table}
            if lost == "table"
            else {frame.blob for frame in decode(ChunkTable, second.blobs[delta.table]) if frame.size}
        )
        rest = Publication(
            second.head, {blob: data for blob, data in second.blobs.items() if blob not in gone}
        )
        async with following(first, rest) as puller:
            await puller.chain.ask(LEADER.public)
            await puller.pull(first.head.id)
            await puller.pull()
            assert held(puller.store) == bits(state(1))
            assert puller._network.scores() == {}, "to have let go of a frame is no fault"
