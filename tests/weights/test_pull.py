"""Following the chain: nothing is handed on that was not proven, whoever sends it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.net.base import RequestError
from echo_node.weights import heads as heads_room
from echo_node.weights.publish import Publication
from echo_node.weights.pull import FETCH_SECONDS
from echo_node.weights.store import WrongBlobError
from protocol import (
    ZERO,
    ChainError,
    ChunkTable,
    Frame,
    ProtocolError,
    Roster,
    Route,
    blob_id,
    canonical,
    decode,
    encode,
    limits,
)
from protocol.errors import BadSignatureError, InconsistentError, WrongKindError, WrongRunError
from tests.crafting import SAMPLERS, forged, roster
from tests.weights.chains import (
    LEADER,
    RUN,
    STRANGER,
    following,
    publish,
    publisher,
    state,
    tensor,
    told_otherwise,
)

OTHER_TYPES = {**state(), "a.scale": tensor("bf16")}


def over(made: Publication, table: bytes) -> Publication:
    """The same head over another table."""
    route = Route(None, "safetensors", made.head.message.routes[0].size, blob_id(table))
    return told_otherwise(Publication(made.head, {**made.blobs, blob_id(table): table}), routes=(route,))


def table_of(made: Publication) -> ChunkTable:
    return decode(ChunkTable, made.blobs[made.head.message.routes[0].table])


# The weights


async def test_a_state_of_one_chunk_and_of_many_arrives_as_it_was(monkeypatch):
    for elements in (100, 28, 5, 1):
        monkeypatch.setattr(limits, "CHUNK_ELEMENTS", elements)
        (made,) = publish(1)
        async with following(made) as puller:
            head = puller.hear(made.head.sealed)
            assert await puller.state(head) == dict(sorted(state().items()))


async def test_other_bytes_under_a_blobs_name_are_refused():
    (made,) = publish(1)
    frame = next(iter(table_of(made))).blob

    async def liar(_peer, asked):
        data = made.blobs[asked]
        return data[:-1] + b"?" if asked == frame else data

    async with following(made, blobs=liar) as puller:
        with pytest.raises(WrongBlobError):
            await puller.state(puller.hear(made.head.sealed))


async def test_a_frame_longer_than_the_table_says_is_not_read():
    (made,) = publish(1)
    frame = next(iter(table_of(made))).blob

    async def flood(_peer, asked):
        return made.blobs[asked] + b"x" if asked == frame else made.blobs[asked]

    async with following(made, blobs=flood) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.state(puller.hear(made.head.sealed))
    assert caught.value.reason == "too-large"


@pytest.mark.parametrize("size", [limits.FRAME_BYTES + 1, 2**32 - 1])
async def test_a_table_that_announces_an_oversized_frame_is_refused_before_the_frame_is_asked_for(size):
    (made,) = publish(1)
    table = table_of(made)
    columns = {"after": table.after, "codec": table.codec, "frames": table.frames}
    lied = over(made, canonical.encode({**columns, "sizes": size.to_bytes(4, "little")}))
    asked = []

    async def serve(_peer, blob):
        asked.append(blob)
        return lied.blobs[blob]

    async with following(lied, blobs=serve) as puller:
        with pytest.raises(InconsistentError, match="a frame of more than"):
            await puller.state(puller.hear(lied.head.sealed))
    assert asked == [lied.head.message.routes[0].table]


@pytest.mark.parametrize(
    "lie",
    [
        lambda frames: [Frame(frame.blob, frame.size, b"?" * 32) for frame in frames],
        lambda frames: [frames[0], *frames[1:-1][::-1], frames[-1]],
        lambda frames: frames[:-1],
        lambda frames: [*frames, frames[-1]],
        lambda frames: [Frame(frame.blob, frame.size + 1, frame.after) for frame in frames],
        lambda frames: [Frame(frame.blob, frame.size - 1, frame.after) for frame in frames],
        lambda frames: [Frame(ZERO, 0, frame.after) for frame in frames],
    ],
    ids=["after", "order", "one-too-few", "one-too-many", "longer", "shorter", "unchanged"],
)
async def test_a_table_that_lies_gives_no_weights(lie, monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 5)
    (made,) = publish(1)
    lied = over(made, encode(ChunkTable.of("safetensors", lie(list(table_of(made))))))
    async with following(lied) as puller:
        with pytest.raises(PeerError):
            await puller.state(puller.hear(lied.head.sealed))


async def test_a_table_of_another_codec_than_its_route_is_refused():
    (made,) = publish(1)
    lied = over(made, encode(ChunkTable.of("gap8-ulp8-zstd1", list(table_of(made)))))
    async with following(lied) as puller:
        with pytest.raises(PeerError):
            await puller.state(puller.hear(lied.head.sealed))


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
        with pytest.raises(PeerError, match="another layout"):
            await puller.state(puller.hear(lied.head.sealed))


async def test_weights_that_are_not_those_of_the_heads_root_are_refused():
    first, second = publish(2)
    lied = told_otherwise(second, root=first.head.message.root)
    async with following(first, lied) as puller:
        puller.hear(first.head.sealed)
        with pytest.raises(PeerError, match="not the head's"):
            await puller.state(puller.hear(lied.head.sealed))


async def test_bytes_that_are_no_weights_at_all_are_the_peers_fault():
    (made,) = publish(1)
    junk = b"no tensors in here"
    (frame,) = table_of(made)
    table = ChunkTable.of("safetensors", [Frame(blob_id(junk), len(junk), frame.after)])
    data = encode(table)
    route = Route(None, "safetensors", len(junk), blob_id(data))
    lied = told_otherwise(Publication(made.head, {blob_id(data): data, blob_id(junk): junk}), routes=(route,))
    async with following(lied) as puller:
        with pytest.raises(PeerError, match="safetensors"):
            await puller.state(puller.hear(lied.head.sealed))


async def test_a_head_without_an_anchor_that_can_be_read_is_said_so():
    first, second = publish(2)
    table = second.head.message.routes[0].table
    strange = told_otherwise(second, routes=(Route(None, "zip", 1, table),))
    delta = told_otherwise(second, routes=(Route(first.head.id, "gap8-ulp8-zstd1", 1, table),))
    for head in (strange, delta):
        async with following(first, head) as puller:
            puller.hear(first.head.sealed)
            with pytest.raises(PeerError, match="no anchor that this node can read"):
                await puller.state(puller.hear(head.head.sealed))


async def test_a_leader_that_never_sends_the_blob_costs_a_deadline_and_no_more(autojump_clock):
    (made,) = publish(1)

    async def silent(_peer, _asked):
        await trio.sleep_forever()

    async with following(made, blobs=silent) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.state(puller.hear(made.head.sealed))
    assert caught.value.reason == "deadline"
    assert autojump_clock.current_time() <= FETCH_SECONDS + 1


async def test_the_roster_is_that_of_the_head_or_none():
    made = publisher().publish(state(), step=0, roster=roster(*SAMPLERS), groups=())
    async with following(made) as puller:
        assert await puller.roster(puller.hear(made.head.sealed)) == roster(*SAMPLERS)

    async def liar(_peer, _asked):
        return encode(roster(SAMPLERS[0]))

    async with following(made, blobs=liar) as puller:
        with pytest.raises(WrongBlobError):
            await puller.roster(puller.hear(made.head.sealed))


# The heads


async def test_a_head_that_the_rules_refuse_changes_nothing():
    first, second = publish(2)
    other_root = publisher().publish(state(9), step=0, roster=Roster(()), groups=()).head
    other_layout = publisher().publish(OTHER_TYPES, step=0, roster=Roster(()), groups=()).head
    by_stranger = publish(1, publisher(STRANGER))[0].head
    of_another_run = publish(1, publisher(run=b"q" * 32))[0].head
    async with following() as puller:
        for sealed, kind, rule in [
            (by_stranger.sealed, ChainError, "not-trainer"),
            (second.head.sealed, ChainError, "gap"),
            (other_root.sealed, ChainError, "wrong-root"),
            (other_layout.sealed, ChainError, "wrong-layout"),
            (of_another_run.sealed, WrongRunError, None),
            (forged(first.head.sealed), BadSignatureError, None),
            (first.head.sealed[:-1], ProtocolError, None),
            (b"", ProtocolError, None),
        ]:
            with pytest.raises(kind) as caught:
                puller.hear(sealed)
            assert getattr(caught.value, "rule", None) == rule
            assert puller.tip is None
        puller.hear(first.head.sealed)
        puller.hear(first.head.sealed)
        assert puller.follower.heads == (first.head,)


async def test_another_kind_of_message_by_the_leader_is_no_head():
    from protocol import Join, seal

    join = seal(Join(agent="a", engine="torch/f32", head=ZERO, name=""), LEADER, RUN)
    async with following() as puller:
        with pytest.raises(WrongKindError):
            puller.hear(join)


async def test_whoever_waits_for_a_head_is_woken_by_it_and_by_no_other():
    chain = [made.head for made in publish(3)]
    found = []

    async def wait(puller):
        found.append(await puller.wait_for(chain[1].id))

    async with following() as puller, trio.open_nursery() as nursery:
        nursery.start_soon(wait, puller)
        for head, seen in zip(chain, ([], [chain[1]], [chain[1]]), strict=True):
            puller.hear(head.sealed)
            await trio.testing.wait_all_tasks_blocked()
            assert found == seen
        assert await puller.wait_for(chain[0].id) == chain[0], "what was heard before is found at once"
        assert puller.find(b"?" * 32) is None


async def test_waiting_for_something_newer_gives_the_tip():
    chain = [made.head for made in publish(3)]
    async with following() as puller, trio.open_nursery() as nursery:
        for head in chain[:2]:
            puller.hear(head.sealed)
        assert await puller.wait_for_newer(None) == chain[1]
        assert await puller.wait_for_newer(chain[0].id) == chain[1]
        newer = []

        async def wait():
            newer.append(await puller.wait_for_newer(chain[1].id))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        puller.hear(chain[1].sealed)
        await trio.testing.wait_all_tasks_blocked()
        assert newer == []
        puller.hear(chain[2].sealed)
        await trio.testing.wait_all_tasks_blocked()
        assert newer == [chain[2]]


# Catching up


async def test_catching_up_goes_on_over_many_answers(monkeypatch):
    monkeypatch.setattr(heads_room, "MOST_HEADS", 3)
    made = publish(8)
    async with following(*made) as puller:
        await puller.catch_up(LEADER.public)
        assert puller.follower.heads == tuple(each.head for each in made)


async def test_catching_up_from_the_middle_asks_only_for_the_rest():
    made = publish(5)
    asked = []
    server = heads_room.HeadServer([each.head for each in made])

    async def chain(peer, newest):
        asked.append(newest)
        return await server.serve(peer, newest)

    async with following(chain=chain) as puller:
        for each in made[:2]:
            puller.hear(each.head.sealed)
        await puller.catch_up(LEADER.public)
        assert puller.tip == made[-1].head
    assert asked == [made[1].head.id, made[4].head.id]


async def test_a_peer_that_has_nothing_leaves_everything_as_it_was():
    async with following() as puller:
        await puller.catch_up(LEADER.public)
        assert puller.tip is None


async def test_a_peer_that_repeats_itself_for_ever_is_asked_twice_and_no_more():
    made = publish(3)
    asked = []

    async def again(_peer, newest):
        asked.append(newest)
        return canonical.encode([each.head.sealed for each in made])

    async with following(chain=again) as puller:
        await puller.catch_up(LEADER.public)
        assert puller.tip == made[-1].head
    assert len(asked) == 2


@pytest.mark.parametrize(
    "answer",
    [b"", b"garbage", canonical.encode([b"garbage"]), canonical.encode({}), canonical.encode([b""] * 300)],
)
async def test_a_peer_that_sends_garbage_is_left_with_an_error_and_no_change(answer):
    async def garbage(_peer, _newest):
        return answer

    async with following(chain=garbage) as puller:
        with pytest.raises(ProtocolError):
            await puller.catch_up(LEADER.public)
        assert puller.tip is None


async def test_what_was_good_before_the_garbage_is_kept():
    made = publish(3)

    async def half(_peer, _newest):
        return canonical.encode([made[0].head.sealed, made[1].head.sealed, b"garbage"])

    async with following(chain=half) as puller:
        with pytest.raises(ProtocolError):
            await puller.catch_up(LEADER.public)
        assert puller.tip == made[1].head


async def test_a_peer_that_skips_a_head_or_turns_them_round_is_not_followed():
    made = publish(3)
    for order in ((0, 2), (2, 1, 0)):

        async def skipping(_peer, _newest, order=order):
            return canonical.encode([made[n].head.sealed for n in order])

        async with following(chain=skipping) as puller:
            with pytest.raises(ChainError) as caught:
                await puller.catch_up(LEADER.public)
            assert caught.value.rule == "gap"


async def test_an_answer_longer_than_any_honest_one_is_not_read():
    async def endless(_peer, _newest):
        return b"x" * (heads_room.ANSWER_BYTES + 1)

    async with following(chain=endless) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.catch_up(LEADER.public)
    assert caught.value.reason == "too-large"


async def test_a_peer_that_never_answers_costs_one_deadline(autojump_clock):
    async def silent(_peer, _newest):
        await trio.sleep_forever()

    async with following(chain=silent) as puller:
        with pytest.raises(RequestError) as caught:
            await puller.catch_up(LEADER.public)
    assert caught.value.reason == "deadline"
    assert autojump_clock.current_time() <= FETCH_SECONDS + 1


async def test_a_leader_that_tells_two_stories_is_caught_and_nothing_follows():
    first, second = publish(2)
    another = told_otherwise(second, luck=b"?" * 32)
    async with following() as puller:
        puller.hear(first.head.sealed)
        puller.hear(second.head.sealed)
        puller.hear(another.head.sealed)
        assert puller.follower.holding
        assert puller.tip == first.head
        with pytest.raises(ChainError):
            puller.hear(second.head.sealed)
