"""The second check before a sampler is condemned, and the evidence files of both checks."""

from __future__ import annotations

import base64
import dataclasses
import json
import os

import pytest

from benchmarks.forgers import FORGERS
from benchmarks.forgers_stage import Stage
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.runtime.reputation import CLASS_IN_DOUBT, NEWCOMER
from echo_node.verifier import evidence_files
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.recheck import Recheck
from echo_node.verifier.replay_check import Finding
from echo_node.verifier.tolerance import Breach
from echo_node.weights.engine_sync import EngineSync
from tests.weights.stores import bits, opened, publish, weights


@pytest.fixture(scope="module")
def stage():
    made = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1, engine_class="torch/f32")
    yield made
    made.close()


class Held:
    """The stage's weights; with `wrong`, those of another head, until they are loaded afresh."""

    def __init__(self, stage, *, wrong=False):
        self._stage, self._wrong = stage, wrong
        self._engine = make_engine(EngineSpec("torch/f32", stage.folder, "cpu", 1, 1))
        self.put_in = 0

    def at(self, head_id):
        if self._engine.loaded != head_id:
            stage = self._stage
            self._engine.load(head_id, stage.older if self._wrong else stage.weights[head_id])
        return self._engine

    def afresh(self, head_id):
        self.put_in += 1
        self._engine.load(head_id, self._stage.weights[head_id])
        return self._engine


def honest(stage, slot):
    return stage.admit(stage.group(slot, stage.draws(slot)))


def test_the_first_narrow_breach_of_a_proven_sampler_is_undecided_and_later_ones_are_not(stage, caplog):
    recheck, group = Recheck(stage.run, Held(stage)), honest(stage, 1)
    narrow = Breach("luck-not-its-own", "by little", over=1.2)
    assert recheck.review(group, narrow, 0.0) == narrow, "of a newcomer"
    for _ in range(NEWCOMER):
        assert recheck.review(group, None, 1.0) is None
    found = recheck.review(group, narrow, 2.0)
    assert (found.reason, found.sure) == (CLASS_IN_DOUBT, False)
    assert "breached the tolerance of torch/f32 by little (1.20 times the bound)" in caplog.text
    assert recheck.review(group, narrow, 3.0) == narrow
    for _ in range(NEWCOMER):
        recheck.review(group, None, 4.0)
    plain = Breach("wrong-reward", "no matter of bounds")
    assert recheck.review(group, plain, 5.0) == plain


def test_the_trainers_own_look_leaves_a_narrow_breach_undecided(stage, monkeypatch):
    recheck, group = Recheck(stage.run, Held(stage)), honest(stage, 1)
    for _ in range(NEWCOMER):
        assert recheck.result_of(group) is None
    finding = Finding(Breach("luck-not-its-own", "by little", over=1.2), Evidence(), None)
    monkeypatch.setattr(recheck, "check", lambda _: finding)
    assert recheck.result_of(group) == CLASS_IN_DOUBT
    assert recheck.result_of(group) == "luck-not-its-own"


def test_the_honest_are_not_condemned_for_weights_under_a_wrong_name(stage, tmp_path, caplog):
    held = Held(stage, wrong=True)
    recheck = Recheck(stage.run, held, tmp_path)
    # What a slot draws follows from the manifest: some groups are the same under both weights.
    slot = next(slot for slot in range(1, 32) if recheck._first.check(honest(stage, slot)).breach)
    assert recheck.check(honest(stage, slot)).breach is None
    assert (recheck.mistaken, held.put_in) == (1, 1)
    assert "a defect of this node" in caplog.text
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert not record["dishonest"]
    assert record["reason"]
    assert record["first"]["gap_mean"] > 100 * record["second"]["gap_mean"], "it shows whose fault it was"
    assert recheck.check(honest(stage, slot + 1)).breach is None
    assert held.put_in == 1, "an honest group costs no second look"


def test_what_two_looks_condemn_can_be_looked_at_again_from_its_file(stage, tmp_path):
    held = Held(stage)
    recheck = Recheck(stage.run, held, tmp_path)
    group = stage.admit(FORGERS["own luck"](stage, 3))
    finding = recheck.check(group)
    assert finding.breach.sure
    assert (recheck.mistaken, held.put_in) == (0, 1)
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert record["dishonest"]
    assert (record["reason"], record["what"]) == (finding.breach.reason, finding.breach.what)
    assert (record["engine"], record["heads"]) == ("torch/f32", [stage.head.id.hex()])
    assert record["band"]["d_mean"] == 1e-5
    looked_at = sum(len(piece["d"]) for piece in record["pieces"])
    assert looked_at >= finding.evidence.tokens
    assert max(max(piece["d"]) for piece in record["pieces"]) >= finding.evidence.d_most
    again = stage.admit(base64.b64decode(record["sealed"], validate=True))
    assert again.id == group.id
    assert stage.find(again).breach.reason == finding.breach.reason


def test_a_false_reward_takes_no_second_look_and_is_kept(stage, tmp_path):
    held = Held(stage)
    assert Recheck(stage.run, held, tmp_path).check(stage.admit(FORGERS["false reward"](stage, 4))).breach
    assert held.put_in == 0
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_crowd_of_cheats_fills_no_disk_and_a_full_disk_stops_no_verifier(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_files, "MOST_FILES", 2)
    recheck = Recheck(stage.run, Held(stage), tmp_path / "kept")
    group = stage.admit(FORGERS["own luck"](stage, 5))
    finding = recheck.check(group)
    for number in range(4):
        other = dataclasses.replace(group, id=bytes([number]) * 32)
        recheck.save(other, finding)
        os.utime(tmp_path / "kept" / f"{other.id.hex()}.json", (number, number))
    assert len(list((tmp_path / "kept").iterdir())) == 2
    (tmp_path / "file").write_text("in the way")
    assert Recheck(stage.run, Held(stage), tmp_path / "file").check(group).breach == finding.breach
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_engine_that_says_it_has_the_weights_gets_all_of_them_when_they_are_wanted_afresh(tmp_path):
    class Sure:
        loaded, state = None, None

        def load(self, head_id, state):
            self.loaded, self.state = head_id, bits(state)

    engine = Sure()
    with opened(tmp_path / "store", durable=False) as store:
        made = publish(store, 3)
        handing = EngineSync(store, engine)
        engine.loaded = made[1].head.id
        assert handing.at(made[1].head.id) is engine
        assert engine.state is None
        handing.afresh(made[1].head.id)
    assert engine.loaded == made[1].head.id
    assert engine.state == bits(weights(1))
