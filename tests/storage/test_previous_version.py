"""A state folder that the version before wrote still opens; its run speaks MAJOR 1, and is refused.

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
from echo_node.errors import ConfigError
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.outbox.outbox import open_outbox
from echo_node.storage import state_dir
from echo_node.telemetry.step_db import StepDb, read_records
from echo_node.trainer.checkpoint import newest_checkpoint
from echo_node.trainer.journal import open_journal
from echo_node.weights.store_metadata import read_metadata
from protocol import Envelope
from protocol.errors import WrongMajorError

ARCHIVE = Path(__file__).parent / "fixtures" / "previous_version.tar.gz"


@pytest.fixture
def facts(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return json.loads((tmp_path / "facts.json").read_text())


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


def test_the_address_book(tmp_path, facts, caplog):
    book = AddressBook(tmp_path / "state" / "peers.sqlite")
    assert {entry.public: entry.addresses for entry in book} == {
        bytes.fromhex(facts["ann"]): ("/ip4/10.0.0.1/tcp/4001",),
        bytes.fromhex(facts["bob"]): ("/ip4/10.0.0.2/tcp/4001",),
    }
    book.close()
    assert not caplog.records, "the book was set aside"


def test_a_run_of_another_major_version_is_refused_in_words(folder):
    """Its weights are whole, and nobody speaks of them any more."""
    with pytest.raises(ConfigError, match=r"version 1, this node speaks 2"):
        read_metadata(folder / "weights")


async def test_the_journal_of_training_opens_and_its_groups_are_of_another_major_version(facts, run, folder):
    async with open_journal(folder / "journal.sqlite", run) as journal:
        assert await journal.last_number() == 4
        groups = {group: "drawn" for batch in groups_of(facts) for group in batch}
        assert await journal.states() == groups
        for sealed in await journal.joins():
            with pytest.raises(WrongMajorError):
                Envelope.parse(sealed)
        (finding,) = await journal.findings()
        assert (finding.group, finding.verifier, finding.result) == (
            groups_of(facts)[0][0],
            bytes.fromhex(facts["bob"]),
            "honest",
        )


def test_the_records_of_steps_to_read_and_to_go_on(facts, folder):
    steps = read_records(folder / "records.sqlite")
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert [[group.id for group in step.groups] for step in steps] == groups_of(facts)
    file = StepDb(folder / "records.sqlite")
    file.write(steps[-1])
    file.close()
    assert read_records(folder / "records.sqlite") == steps


def test_the_ledger(facts, run, folder):
    for name in ("ann", "bob"):
        key = bytes.fromhex(facts[name])
        credit = read_credit(folder / "ledger.sqlite", key, run)
        assert [credit.admitted, dict(credit.refused)] == facts["credit"][name]
        with Ledger(folder / "ledger.sqlite") as ledger:
            assert ledger.credit(key, run) == credit
            assert ledger.state(groups_of(facts)[0][0]) == ("refused", "stale")


async def test_the_outbox(facts, folder):
    async with open_outbox(folder / "outbox.sqlite") as outbox:
        (refused,) = await outbox.refusals()
        assert ([refused.id.hex()], refused.reason) == (facts["outbox"]["refused"], "stale")


def test_the_checkpoints(folder):
    assert newest_checkpoint(folder / "checkpoints").step == 4


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
