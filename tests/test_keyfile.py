"""A node's key on disk."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest

from echo_node.errors import StoreError
from echo_node.keyfile import load_or_create


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
    code = f"from echo_node.keyfile import load_or_create as l; print(l(__import__('pathlib').Path({str(tmp_path / 'key')!r})).peer_id)"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({child.communicate(timeout=60)[0] for child in children}) == 1
