"""A node's key on disk, and the folder that it lies in."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest

from echo_node.errors import StoreError
from echo_node.identity.keyfile import load_or_create, restore
from echo_node.storage.state_dir import is_in_use, migrate, opened, prepared
from protocol import Identity


def test_a_key_is_made_once_and_then_kept(tmp_path):
    first = load_or_create(tmp_path / "deep" / "key")
    assert load_or_create(tmp_path / "deep" / "key").public == first.public
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["key"]


def test_only_its_owner_reads_it(tmp_path):
    load_or_create(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_key_is_never_replaced(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(StoreError, match="restore it from a copy"):
        load_or_create(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content


def test_processes_that_start_together_agree_on_one_key(tmp_path):
    code = f"from echo_node.identity.keyfile import load_or_create as l; print(l(__import__('pathlib').Path({str(tmp_path / 'key')!r})).peer_id)"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({child.communicate(timeout=60)[0] for child in children}) == 1


def test_a_key_that_others_can_read_is_said_to_be_so(tmp_path):
    load_or_create(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        load_or_create(tmp_path / "key")
    (tmp_path / "key").chmod(0o600)
    load_or_create(tmp_path / "key")


def test_a_key_that_is_put_back_leaves_no_draft_and_loses_no_other(tmp_path):
    key, first, second, third = tmp_path / "key", *(Identity(letter * 32) for letter in (b"1", b"2", b"3"))
    assert restore(key, first, replace=False) is None
    assert restore(key, first, replace=False) is None, "it is there already"
    with pytest.raises(StoreError, match="another key already"):
        restore(key, second, replace=False)
    old = [restore(key, second, replace=True), restore(key, third, replace=True)]
    assert [file.read_bytes() for file in (*old, key)] == [each.seed for each in (first, second, third)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_of_an_older_format_is_brought_on_a_step_at_a_time(tmp_path):
    done = []

    def step(number):
        def bring(path):
            assert (path / "format").read_text() == f"{number}\n", "the mark follows the work"
            done.append(number)

        return bring

    prepared(tmp_path)
    migrate(tmp_path, {1: step(1), 2: step(2), 3: step(3)}, newest=4)
    assert done == [1, 2, 3]
    migrate(tmp_path, {}, newest=4)
    assert (tmp_path / "format").read_text() == "4\n"


def test_a_step_that_was_cut_off_is_made_again(tmp_path):
    def break_off(path):
        (path / "half").touch()
        raise OSError("the disk is full")

    prepared(tmp_path)
    with pytest.raises(StoreError, match="from the format 2 to 3: OSError: the disk is full"):
        migrate(tmp_path, {1: lambda _: None, 2: break_off}, newest=3)
    assert (tmp_path / "format").read_text() == "2\n"
    migrate(tmp_path, {2: lambda path: (path / "half").rename(path / "whole")}, newest=3)
    assert (tmp_path / "whole").exists()
    assert (tmp_path / "format").read_text() == "3\n"


@pytest.mark.parametrize("told", ["2", "0", "-1", "one", "\n", "9" * 5000])
def test_a_format_that_is_not_ours_is_left_alone(tmp_path, told):
    (tmp_path / "format").write_text(told)
    for look in (prepared, lambda path: opened(path).__enter__()):
        with pytest.raises(StoreError, match="run the echo-node that wrote it"):
            look(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["format"]


def test_a_mark_that_a_full_disk_left_empty_is_written_again(tmp_path):
    (tmp_path / "format").touch()
    identity = prepared(tmp_path).identity()
    (tmp_path / "format").write_text("")
    assert prepared(tmp_path).identity().peer_id == identity.peer_id
    assert (tmp_path / "format").read_text() == "1\n"
    (tmp_path / "format").write_text("")
    (tmp_path / "novel.txt").touch()
    with pytest.raises(StoreError, match="holds something else"):
        prepared(tmp_path)


def test_who_only_looks_keeps_nobody_out(tmp_path):
    assert not is_in_use(tmp_path / "nowhere")
    with opened(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)
    assert not (tmp_path / "nowhere").exists()
