"""The one opener of SQLite files: marks, the table of migrations, and who may read."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from echo_node.errors import StoreError
from echo_node.storage.sqlite import (
    DatabaseSpec,
    UnusableFileError,
    open_database,
    open_reader,
    open_sqlite,
)

FIRST = DatabaseSpec(name="notes", mark=0x1234, migrations={0: ("CREATE TABLE notes (text)",)})


def shout(connection):
    connection.execute("UPDATE notes SET text = upper(text)")


NEWEST = replace(
    FIRST,
    migrations={**FIRST.migrations, 1: ("ALTER TABLE notes ADD COLUMN at INTEGER",), 2: shout},
)


def write(path, spec, text="one"):
    with closing(open_database(path, spec)) as file:
        file.execute("INSERT INTO notes (text) VALUES (?)", (text,))


def marks(path):
    with closing(sqlite3.connect(path)) as file:
        return [file.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")]


def test_a_new_file_has_the_mark_and_the_newest_version(tmp_path):
    open_database(tmp_path / "n", NEWEST).close()
    assert marks(tmp_path / "n") == [0x1234, 3]


def test_a_file_of_an_earlier_version_is_brought_forward_a_step_at_a_time(tmp_path):
    write(tmp_path / "n", FIRST)
    assert marks(tmp_path / "n") == [0x1234, 1]
    with closing(open_database(tmp_path / "n", NEWEST)) as file:
        assert file.execute("SELECT text, at FROM notes").fetchall() == [("ONE", None)]
    assert marks(tmp_path / "n") == [0x1234, 3]
    write(tmp_path / "n", NEWEST, "two")
    with open_reader(tmp_path / "n", NEWEST) as file:
        assert file.execute("SELECT text FROM notes").fetchall() == [("ONE",), ("two",)], "not run twice"


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path):
    write(tmp_path / "n", FIRST)
    broken = replace(NEWEST, migrations={**NEWEST.migrations, 2: ("UPDATE nowhere SET x = 1",)})
    with pytest.raises(StoreError, match="opening the notes"):
        open_database(tmp_path / "n", broken)
    assert marks(tmp_path / "n") == [0x1234, 1]
    with closing(open_database(tmp_path / "n", FIRST)) as file:
        assert file.execute("SELECT * FROM notes").fetchall() == [("one",)]


@pytest.mark.parametrize("version", [-1, 0, 4])
def test_a_version_that_no_migration_leads_from_is_refused_and_left_alone(tmp_path, version):
    write(tmp_path / "n", NEWEST)
    with closing(sqlite3.connect(tmp_path / "n")) as file:
        file.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(UnusableFileError, match=f"has version {version}, this program writes 3"):
        open_database(tmp_path / "n", NEWEST)
    assert marks(tmp_path / "n") == [0x1234, version]


def test_a_reader_neither_migrates_nor_writes(tmp_path):
    write(tmp_path / "n", FIRST)
    before = (tmp_path / "n").read_bytes()
    with pytest.raises(UnusableFileError, match="has version 1"), open_reader(tmp_path / "n", NEWEST):
        pass
    with open_reader(tmp_path / "n", FIRST) as file:
        assert file.execute("SELECT * FROM notes").fetchall() == [("one",)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            file.execute("DELETE FROM notes")
    assert (tmp_path / "n").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["n"]


def test_a_reader_sees_a_file_that_is_being_written(tmp_path):
    with closing(open_database(tmp_path / "n", FIRST)) as writer:
        writer.execute("INSERT INTO notes VALUES ('one')")
        with open_reader(tmp_path / "n", FIRST, live=True) as file:
            assert file.execute("SELECT * FROM notes").fetchall() == [("one",)]


def test_additions_run_at_each_opening(tmp_path):
    runs = []
    spec = replace(FIRST, additions=lambda file: runs.append(file.in_transaction))
    for _ in range(2):
        open_database(tmp_path / "n", spec).close()
    assert runs == [True, True]
    assert marks(tmp_path / "n") == [0x1234, 1]


def test_a_file_that_may_be_lost_says_why_it_may_be_moved_away(tmp_path):
    write(tmp_path / "n", FIRST)
    for spec, advice in (
        (replace(FIRST, mark=7), "give this node a folder of its own"),
        (
            replace(FIRST, mark=7, expendable="nobody needs it"),
            "give this node a folder of its own, or move the file away: nobody needs it",
        ),
    ):
        with pytest.raises(UnusableFileError) as caught:
            open_database(tmp_path / "n", spec)
        assert caught.value.advice == advice


async def test_an_exclusive_file_is_in_use_while_it_is_open(tmp_path):
    spec = replace(FIRST, exclusive=True, busy_seconds=0.01)
    async with open_sqlite(tmp_path / "n", spec):
        with pytest.raises(StoreError, match="in use by another process"):
            open_database(tmp_path / "n", spec)
        with (
            pytest.raises(StoreError, match="in use by another process"),
            open_reader(tmp_path / "n", spec),
        ):
            pass
    open_database(tmp_path / "n", spec).close()
