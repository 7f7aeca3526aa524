"""`echo-node weights provenance`: groups of a version, checked against its head."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest
import trio
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.errors import ConfigError, StoreError
from echo_node.trainer.journal import open_journal
from protocol import Envelope, TrajectoryGroup, peer_id
from tests.trainer.crash_points import ANN, BOB, RUN, Recording, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provenance")
    _, source = trio.run(train, folder / "run", Recording, 3)
    return folder / "run", source.batches


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs" / "one")
    return tmp_path / "runs" / "one"


def ask(*words):
    return CliRunner().invoke(app, ["weights", "provenance", *map(str, words)], catch_exceptions=True)


def test_every_group_is_listed_with_its_sampler_slot_and_policy(folder, trained):
    asked = ask(3, "--folder", folder, "--json")
    assert asked.exit_code == 0
    rows = [json.loads(line) for line in asked.stdout.splitlines()]
    third = [Envelope.parse(sealed) for sealed in trained[1][2]]
    assert [row["group"] for row in rows] == [each.id.hex() for each in third]
    assert [row["sampler"] for row in rows] == [peer_id(each.signer) for each in third]
    assert {row["sampler"] for row in rows} == {peer_id(ANN.public), peer_id(BOB.public)}
    for row, each in zip(rows, third, strict=True):
        message = each.claim(TrajectoryGroup, RUN.id)
        assert (row["slot"], row["head"]) == (message.slot, message.heads[0].hex())
    assert [row["step"] for row in rows] == [2, 2, 2, 2]


def test_people_get_a_table_and_a_sentence(folder):
    asked = ask(2, "--folder", folder)
    assert asked.exit_code == 0
    assert "4 groups: what the head of version 2 commits to" in asked.stdout


def test_version_0_was_trained_on_nothing(folder):
    asked = ask(0, "--folder", folder)
    assert "0 groups" in asked.stdout
    assert asked.exit_code == 0


def test_a_journal_that_says_something_else_than_the_head_is_found_out(folder):
    with sqlite3.connect(folder / "journal.sqlite") as file:
        file.execute("DELETE FROM groups WHERE batch = 3 AND place = 0")
    file.close()
    asked = ask(3, "--folder", folder, "--json")
    assert asked.exit_code == 1
    assert "not the groups that the head of version 3 commits to" in asked.stderr
    assert ask(2, "--folder", folder).exit_code == 0


async def test_while_a_trainer_runs_the_records_answer(folder):
    async with open_journal(folder / "journal.sqlite", RUN.id):
        asked = ask(3, "--folder", folder, "--json")
        assert asked.exit_code == 0
        assert len(asked.stdout.splitlines()) == 4
        (folder / "records.sqlite").unlink()
        assert isinstance(ask(3, "--folder", folder).exception, StoreError)


def test_a_version_that_is_not_there_is_named(folder):
    failed = ask(99, "--folder", folder).exception
    assert isinstance(failed, StoreError)
    assert "the newest is 3" in str(failed)


def test_the_only_run_of_this_node_need_not_be_named(folder, monkeypatch):
    home = folder.parents[1]
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    (home / "echo-node").symlink_to(home)
    assert ask(3).exit_code == 0
    shutil.copytree(folder, folder.with_name("two"))
    failed = ask(3).exception
    assert isinstance(failed, ConfigError)
    assert "--folder" in failed.advice
