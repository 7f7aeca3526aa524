"""From a state to a head: a chain that links up, blobs that are what the head says, signatures that say it once."""

from __future__ import annotations

import pytest

from echo_node.weights.publish import ANCHOR_CODEC
from echo_node.weights.state import chunk_hashes, layout_of, read_safetensors, root_of
from protocol import ZERO, ChunkTable, Follower, ProtocolError, Roster, blob_id, decode, encode, merkle_root
from protocol import limits as wire_limits
from tests.crafting import SAMPLERS, roster
from tests.weights.chains import LEADER, NOBODY, RUN, publish, publisher, rules, state


def test_versions_follow_one_another_and_a_follower_takes_them_all():
    made = publish(4)
    follower = Follower.newcomer(rules())
    for publication in made:
        follower = follower.accept(publication.head)
    heads = [publication.head for publication in made]
    assert [head.message.version for head in heads] == [0, 1, 2, 3]
    assert [head.message.previous for head in heads] == [ZERO, *(head.id for head in heads[:-1])]
    assert {(head.signer, head.run) for head in heads} == {(LEADER.public, RUN)}
    assert follower.tip == heads[-1]


def test_every_blob_that_the_head_leads_to_is_there_under_its_name(monkeypatch):
    monkeypatch.setattr(wire_limits, "CHUNK_ELEMENTS", 5)
    made = publisher().publish(state(), step=0, roster=roster(*SAMPLERS), groups=())
    head, blobs = made.head.message, made.blobs
    assert all(blob_id(data) == name for name, data in blobs.items())
    (route,) = head.routes
    table = decode(ChunkTable, blobs[route.table])
    frames = list(table)
    assert len(frames) == 6, "one for each chunk of 5 of the 28 elements"
    assert [frame.after for frame in frames] == chunk_hashes(state())
    assert [frame.size for frame in frames] == [len(blobs[frame.blob]) for frame in frames]
    anchor = b"".join(blobs[frame.blob] for frame in frames)
    assert (route.base, route.codec, table.codec, route.size) == (
        None,
        ANCHOR_CODEC,
        ANCHOR_CODEC,
        len(anchor),
    )
    assert read_safetensors(anchor) == dict(sorted(state().items()))
    assert (head.root, head.layout) == (root_of(state()), blob_id(encode(layout_of(state()))))
    assert decode(Roster, blobs[head.roster]) == roster(*SAMPLERS)


def test_a_head_commits_to_its_groups_whatever_their_order():
    ids = [bytes([n]) * 32 for n in (3, 1, 2)]
    one, two = (
        publisher().publish(state(), step=0, roster=NOBODY, groups=order) for order in (ids, ids[::-1])
    )
    assert one.head.sealed == two.head.sealed
    assert one.head.message.groups == merkle_root(sorted(ids))


def test_the_same_state_with_the_same_luck_is_the_same_head_and_other_luck_another():
    assert [made.head.id for made in publish(3)] == [made.head.id for made in publish(3)]
    by = publisher()
    by._luck = lambda: b"l" * 32
    assert publish(1, by)[0].head.id != publish(1)[0].head.id


def test_a_publication_that_cannot_be_signed_leaves_the_chain_where_it_was():
    by = publisher()
    with pytest.raises(ProtocolError, match="step 0 of term 1"):
        by.publish(state(), step=7, roster=NOBODY, groups=())
    assert by.tip is None
    first = by.publish(state(), step=0, roster=NOBODY, groups=())
    with pytest.raises(ProtocolError):
        by.publish(state(), step=-1, roster=NOBODY, groups=())
    assert by.tip == first.head
