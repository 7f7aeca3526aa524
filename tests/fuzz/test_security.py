"""SECURITY.md names code, targets and tests that exist, and every stream, topic and target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol import topics
from tests.fuzz.targets import everywhere
from tests.fuzz.test_targets import resolve

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
ENTRIES = TEXT.split("## Entry points")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in ENTRIES.splitlines()
    if line.startswith("| ") and not line.startswith("| way in")
]
TARGETS = everywhere()


def test_there_are_rows_and_each_is_whole():
    assert len(ROWS) > 50
    for row in ROWS:
        assert len(row) == 6, row
        assert all(row), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_way_in_exists_in_code_and_is_fuzzed(row):
    code, target = row[1].strip("`"), row[2].strip("`")
    resolve(code)
    assert target in TARGETS


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT))))
def test_a_test_that_is_named_exists(named):
    file, _, test = named.partition("::")
    written = (ROOT / file).read_text()
    assert not test or re.search(rf"def {test}\(", written)


def test_every_target_stream_and_topic_has_a_row():
    assert {row[2].strip("`") for row in ROWS} == set(TARGETS)
    for stream in topics.STREAMS:
        assert f"`{stream}`" in ENTRIES, stream
    first = " ".join(row[0] for row in ROWS)
    for cargo in topics.CARGOES:
        assert cargo in first, cargo


def test_the_code_of_a_row_is_what_its_target_feeds_or_is_fed_through_it():
    shared = {"served", "deliver"}  # several ways in that one target chooses among
    for row in ROWS:
        code, target = row[1].strip("`"), row[2].strip("`")
        assert target in shared or TARGETS[target][1].entry == code
