"""From a state to a head: a chain that links up, blobs that are what the head says, signatures that
say it once.
"""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import safetensors.torch

from echo_node.engine.base import TensorBytes
from echo_node.errors import DefectError, StoreError
from echo_node.models import embedded
from echo_node.runs.run import read_model
from echo_node.weights.publisher import ANCHOR_CODEC, Cadence, Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import chunk_hashes, layout_of, root_of
from protocol import (
    DELTA_CODEC,
    ZERO,
    ChainError,
    ChunkTable,
    Follower,
    ProtocolError,
    Roster,
    TermGrant,
    TermVote,
    blob_id,
    decode,
    encode,
    merkle_root,
)
from protocol import limits as wire_limits
from protocol.election import cast
from tests.crafting import SAMPLERS, roster
from tests.weights import stores
from tests.weights.anchor_bytes import read_safetensors
from tests.weights.chains import publish, publisher, rules, state
from tests.weights.keys import LEADER, NOBODY, RUN, STRANGER, counting, rules_of
from tests.weights.stores import bits, follow, held, opened, weights


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
    by.luck = lambda: b"l" * 32
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


# Which routes there are


def bases(made) -> list[list[int | None]]:
    """The versions that each version can be reached from; None: from nothing."""
    versions = {each.head.id: each.head.message.version for each in made}
    return [[versions.get(route.base) for route in each.head.message.routes] for each in made]


def test_every_version_has_a_delta_and_every_eighth_a_squash(tmp_path):
    with opened(tmp_path, durable=False) as store:
        made = stores.publish(store, 20, Cadence(anchor_share=1e9))
    squashes = {8: [7, 0], 16: [15, 8]}
    assert bases(made) == [[None], *(squashes.get(version, [version - 1]) for version in range(1, 20))]


def test_an_anchor_comes_when_the_deltas_outweigh_half_of_one(tmp_path):
    with opened(tmp_path, durable=False) as store:
        made = stores.publish(store, 20, Cadence())
        weight = 0
        for each in made[1:]:
            delta = each.head.message.routes[0]
            assert delta.codec == DELTA_CODEC
            weight += delta.size
            due = weight > store.flat.anchor_size / 2
            assert due == (each.head.message.anchor is not None)
            weight = 0 if due else weight
    assert sum(each.head.message.anchor is not None for each in made) > 2


def test_a_squash_whose_base_is_gone_is_left_out(tmp_path):
    with opened(tmp_path, durable=False) as store:
        stores.publish(store, 7, stores.Cadence(squash_every=8, anchor_share=-1))
        store.prune(versions=2, settled=store.tip.id)
        made = stores.publish(store, 2)
        assert [len(each.head.message.routes) for each in made] == [1, 1]
        assert store.verify() == []


def test_a_delta_of_a_model_is_small_and_gives_its_bits(tmp_path):
    """One element in a hundred moves by one unit in the last place."""
    count = 1_000_000
    luck = np.random.default_rng(0)
    patterns = luck.integers(0, 2**16, count).astype("<u2")

    def model():
        return {"w": TensorBytes("bf16", (count,), patterns.tobytes())}

    first = model()
    with WeightsStore.open(tmp_path, rules_of(first), layout_of(first), durable=False) as store:
        by = Publisher(store, LEADER, luck=counting())
        by.publish(first, step=0, roster=NOBODY, groups=())
        patterns[luck.choice(count, count // 100, replace=False)] += 1
        made = by.publish(model(), step=1, roster=NOBODY, groups=())
        (route,) = made.head.message.routes
        assert route.size < 2 * count / 100
        assert held(store) == bits(model())


def test_a_head_that_brings_only_a_roster_has_no_bytes_of_weights(tmp_path):
    with opened(tmp_path, durable=False) as store:
        by = stores.publisher(store)
        by.publish(weights(0), step=0, roster=NOBODY, groups=())
        made = by.publish(weights(0), step=0, roster=roster(*SAMPLERS), groups=())
        (route,) = made.head.message.routes
        assert (route.size, len(made.blobs)) == (0, 2), "a table and a roster"


def test_a_state_of_another_layout_is_our_own_mistake_and_signs_nothing(tmp_path):
    with opened(tmp_path, durable=False) as store:
        stores.publish(store, 1)
        wrong = weights(1) | {"b.weight": TensorBytes("bf16", (1,), b"xx")}
        for bad in (wrong, {"b.weight": weights(1)["b.weight"]}, weights(1) | {"z": wrong["b.weight"]}):
            with pytest.raises(DefectError, match="another layout"):
                stores.publisher(store).publish(bad, step=1, roster=NOBODY, groups=())
        assert store.tip.message.version == 0


def test_version_0_is_the_manifests_or_nothing(tmp_path):
    with opened(tmp_path, durable=False) as store:
        with pytest.raises(ChainError) as caught:
            stores.publisher(store).publish(weights(1), step=0, roster=NOBODY, groups=())
        assert caught.value.rule == "wrong-root"
        assert (store.tip, store.follower.tip) == (None, None)
        stores.publish(store, 2)


def test_transformers_opens_the_frames_of_an_anchor_as_they_are(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(wire_limits, "CHUNK_ELEMENTS", 50_000)
    model = read_model(embedded.folder())
    with WeightsStore.temporary(rules_of(model), layout_of(model)) as store:
        made = Publisher(store, LEADER, luck=counting()).publish(model, step=0, roster=NOBODY, groups=())
        table = decode(ChunkTable, store.blobs.read(made.head.message.anchor.table))
        data = b"".join(store.blobs.read(frame.blob) for frame in table)
    assert len(table) > 4
    shutil.copytree(embedded.folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(data)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    theirs = safetensors.torch.load_file(embedded.folder() / "model.safetensors")
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


# Starting again


def test_a_publisher_that_starts_again_sends_what_it_signed(tmp_path):
    with opened(tmp_path) as store:
        last = stores.publish(store, 3)[-1]
    with opened(tmp_path) as store:
        again = stores.publisher(store, start=1000).resume()
        assert again == last
        (after,) = stores.publish(store, 1)
        assert after.head.message.previous == last.head.id


def test_a_crash_between_a_head_and_its_state_is_made_good(tmp_path, monkeypatch):
    with opened(tmp_path) as store:
        stores.publish(store, 2)
        monkeypatch.setattr(
            store, "swap", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            stores.publish(store, 1)
        assert (store.tip.message.version, store.follower.tip.message.version) == (1, 2)
    with opened(tmp_path) as store:
        kept = store.follower.tip
        assert store.tip.message.version == 1
        again = stores.publisher(store, start=1000).resume()
        assert again.head == kept == store.tip
        assert held(store) == bits(weights(2))
        assert store.verify() == []


def test_nothing_was_signed_and_so_nothing_is_sent_again(tmp_path):
    with opened(tmp_path) as store:
        assert stores.publisher(store).resume() is None


def test_a_publisher_that_does_not_hold_the_newest_version_signs_nothing(tmp_path):
    with opened(tmp_path / "leader", durable=False) as leader, opened(tmp_path / "store") as store:
        stores.publish(leader, 3)
        follow(leader, store, 1)
        store.keep_head(leader.tip)
        with pytest.raises(StoreError, match="cannot be built"):
            stores.publisher(store).publish(weights(3), step=3, roster=NOBODY, groups=())
        assert store.follower.tip == leader.tip


def test_whoever_does_not_lead_signs_nothing_that_counts(tmp_path):
    with opened(tmp_path, durable=False) as store:
        by = Publisher(store, STRANGER, luck=counting())
        with pytest.raises(ChainError) as caught:
            by.publish(weights(0), step=0, roster=NOBODY, groups=())
        assert caught.value.rule == "not-trainer"
        assert store.follower.heads == ()


# Terms


def granted(store, leader, base) -> TermGrant:
    vote = TermVote(base=base.id, leader=leader.public, term=store.follower.term + 1)
    return TermGrant((cast(vote, LEADER, RUN),), vote)


def test_a_new_terms_first_head_has_an_anchor_and_goes_on_from_the_grants_base(tmp_path):
    two = dataclasses.replace(rules_of(weights(0)), trainers=(LEADER.public, STRANGER.public))
    with WeightsStore.open(tmp_path, two, stores.LAYOUT) as store:
        first = stores.publish(store, 4, Cadence(anchor_share=1e9))
        store.keep_grant(granted(store, STRANGER, first[1].head))
        assert store.tip == first[3].head, "of a branch that was left"
        by = Publisher(store, STRANGER, luck=counting(50), cadence=Cadence(anchor_share=1e9))
        made = by.publish(weights(9), step=9, roster=NOBODY, groups=())
        told = made.head.message
        assert (told.term, told.version, told.previous) == (2, 2, first[1].head.id)
        assert told.anchor is not None
        assert held(store) == bits(weights(9))
        then = by.publish(weights(10), step=10, roster=NOBODY, groups=())
        assert then.head.message.anchor is None
    with WeightsStore.open(tmp_path, two, stores.LAYOUT) as store:
        assert store.follower.term == 2
        assert store.tip == then.head
        assert store.verify() == []
        assert held(store) == bits(weights(10))
