"""A state folder that the version before wrote still opens, with all that is in it.

`fixtures/make_previous_version.py.txt` made it: a trainer learnt four steps of a tiny model.
What was in it then is in `facts.json` beside it.
"""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from echo_node.credit.ledger import Ledger
from echo_node.credit.offline import read_credit
from echo_node.election.elector import VoteLog
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.outbox.outbox import open_outbox
from echo_node.storage import state_dir
from echo_node.telemetry.step_db import StepDb, read_records
from echo_node.trainer.checkpoint import newest_checkpoint
from echo_node.trainer.journal import open_journal, read_trained
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import read_metadata
from protocol import Envelope, Join, TrajectoryGroup, merkle_root
from tests.crafting import SAMPLERS, TRAINER

ARCHIVE = Path(__file__).parent / "fixtures" / "previous_version.tar.gz"
ANN, BOB = (sampler.public for sampler in SAMPLERS[:2])


@pytest.fixture
def facts(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [bytes.fromhex(facts[name]) for name in ("ann", "bob", "trainer")] == [ANN, BOB, TRAINER.public]
    return facts


@pytest.fixture
def run(facts):
    return bytes.fromhex(facts["run"])


@pytest.fixture
def folder(tmp_path, facts):
    return tmp_path / "state" / "runs" / facts["run"]


def groups_of(facts):
    return [[bytes.fromhex(group) for group in batch] for batch in facts["batches"]]


def test_the_folder_its_key_and_the_mark_of_its_backup(tmp_path, facts, run, folder):
    with state_dir.opened(tmp_path / "state") as state:
        assert state.identity().peer_id == facts["peer_id"]
        assert state.is_backed_up
        assert state.run(run) == folder
    left = {str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*")}
    assert left >= set(facts["files"])


@pytest.mark.usefixtures("facts")
def test_the_address_book(tmp_path, caplog):
    book = AddressBook(tmp_path / "state" / "peers.sqlite")
    assert {entry.public: entry.addresses for entry in book} == {
        ANN: ("/ip4/10.0.0.1/tcp/4001",),
        BOB: ("/ip4/10.0.0.2/tcp/4001",),
    }
    book.close()
    assert not caplog.records, "the book was set aside"


def test_the_weights_and_every_version_of_them(facts, run, folder):
    manifest, rules, layout = read_metadata(folder / "weights")
    assert (manifest.id, rules.run) == (run, run)
    with WeightsStore.open(folder / "weights", rules, layout) as store:
        assert [head.id.hex() for head in store.follower.heads] == facts["heads"]
        assert store.verify() == []
        states = []
        for head in store.follower.heads:
            with store.materialise(head.id) as view:
                states.append(b"".join(bytes(tensor.data) for tensor in view.state.values()))
        assert len(set(states)) == 5
        with store.lease() as view:
            assert view.head.id.hex() == facts["heads"][-1]
            assert b"".join(bytes(tensor.data) for tensor in view.state.values()) == states[-1]
        committed = [head.message.groups for head in store.follower.heads[1:]]
    assert committed == [merkle_root(sorted(batch)) for batch in groups_of(facts)]


async def test_the_journal_of_training(facts, run, folder):
    batches = groups_of(facts)
    assert [
        [group.id for group in read_trained(folder / "journal.sqlite", n + 1)] for n in range(4)
    ] == batches
    async with open_journal(folder / "journal.sqlite", run) as journal:
        assert await journal.last_number() == 4
        kept = await journal.batches()
        assert [[group.id for group in batch.groups] for batch in kept] == batches
        assert all(group.rewards is not None for batch in kept for group in batch.groups)
        assert await journal.states() == {group: "drawn" for batch in batches for group in batch}
        joins = [Envelope.parse(sealed) for sealed in await journal.joins()]
        assert {join.signer for join in joins} == {ANN, BOB}
        assert {join.claim(Join, run).engine for join in joins} == {"torch/f32"}
        (finding,) = await journal.findings()
        assert (finding.group, finding.verifier, finding.result) == (batches[0][0], BOB, "honest")
        assert (await journal.sums(ANN)).learnt + (await journal.sums(BOB)).learnt == 16


def test_the_records_of_steps_to_read_and_to_go_on(facts, folder):
    steps = read_records(folder / "records.sqlite")
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert [[group.id for group in step.groups] for step in steps] == groups_of(facts)
    file = StepDb(folder / "records.sqlite")
    file.write(steps[-1])
    file.close()
    assert read_records(folder / "records.sqlite") == steps


def test_the_ledger(facts, run, folder):
    for name, key in (("ann", ANN), ("bob", BOB)):
        credit = read_credit(folder / "ledger.sqlite", key, run)
        assert [credit.admitted, dict(credit.refused)] == facts["credit"][name]
        with Ledger(folder / "ledger.sqlite") as ledger:
            assert ledger.credit(key, run) == credit
            assert ledger.state(groups_of(facts)[0][0]) == ("refused", "stale")


async def test_the_outbox(facts, run, folder):
    expected = facts["outbox"]
    async with open_outbox(folder / "outbox.sqlite") as outbox:
        (pending,) = [bytes.fromhex(each) for each in expected["pending"]]
        (item,) = await outbox.read([pending])
        assert (item.id, item.topic) == (pending, expected["topic"])
        assert Envelope.parse(item.data).claim(TrajectoryGroup, run).token_count > 0
        (refused,) = await outbox.refusals()
        assert ([refused.id.hex()], refused.reason) == (expected["refused"], "stale")


def test_the_votes_and_the_checkpoints(facts, run, folder):
    asked = VoteLog(folder / "votes", TRAINER, run).asked(2)
    assert (asked.base.hex(), asked.leader) == (facts["heads"][-1], TRAINER.public)
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint.step == 4


def test_marks_of_databases_stay_as_they_are(tmp_path, folder):
    """Today's programs leave what yesterday's can open."""

    def marks():
        found = {}
        for path in sorted((tmp_path / "state").rglob("*.sqlite")):
            with closing(sqlite3.connect(path)) as file:
                found[path.name] = tuple(
                    file.execute(f"PRAGMA {each}").fetchone()[0]
                    for each in ("application_id", "user_version")
                )
        return found

    before = marks()
    AddressBook(tmp_path / "state" / "peers.sqlite").close()
    Ledger(folder / "ledger.sqlite").close()
    StepDb(folder / "records.sqlite").close()
    assert marks() == before
    assert before == {
        "journal.sqlite": (0x4563_544A, 1),
        "ledger.sqlite": (0x4563_4C45, 1),
        "outbox.sqlite": (0x4563_4F42, 1),
        "peers.sqlite": (0, 1),
        "records.sqlite": (0x4563_5245, 1),
    }
