"""SPEC.md keeps its word: each MUST names a test that exists, each number is the code's."""

import ast
import re
from pathlib import Path

from protocol import errors, limits, receipt, topics

from .idl import SPEC

TEXT = SPEC.read_text()
TESTS = Path(__file__).parents[1]


def known_tests() -> set[str]:
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return found


def sentences() -> list[str]:
    """The text without code blocks, cut where a bracket with tests closes or a paragraph ends."""
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    return re.split(r"(?<=\])|\n\n|\n(?=[-|#]|\d+\. )", prose)


def test_every_must_names_the_test_that_holds_it():
    promises = [
        piece
        for piece in sentences()
        if re.search(r"\bMUST\b", piece.replace("**MUST**", "").replace("each MUST", ""))
    ]
    assert len(promises) > 20
    for promise in promises:
        assert re.search(r"\[test_\w+\]", promise), promise.strip()


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"\[(test_\w+)\]", TEXT))
    assert len(named) > 40
    assert named <= known_tests()


def test_every_reason_stands_in_the_spec():
    leaves = [
        thing for thing in vars(errors).values() if isinstance(thing, type) and not thing.__subclasses__()
    ]
    for leaf in leaves:
        assert f"`{leaf.reason}`" in TEXT, leaf.__name__


def test_the_limits_are_the_codes():
    table = dict(re.findall(r"^\| ([A-Z]+) \| (\d+) \|", TEXT, re.MULTILINE))
    code = {
        "MAJOR": limits.MAJOR,
        "DEPTH": limits.DEPTH,
        "ITEMS": limits.ITEMS,
        "KEY": limits.KEY_BYTES,
        "SAFE": limits.SAFE_INTEGER,
        "GOSSIP": limits.GOSSIP_BYTES,
        "GROUP": limits.GROUP_BYTES,
        "ENVELOPE": limits.ENVELOPE_BYTES,
    }
    assert {name: int(value) for name, value in table.items()} == code
    assert f"1 to {limits.BATCH} byte strings" in TEXT
    assert f"at most {limits.RECEIPT_IDS} ids" in TEXT
    assert f"chunks of {limits.CHUNK_ELEMENTS:,} elements" in TEXT
    assert f"more than {limits.FRAME_BYTES:,} bytes" in TEXT
    assert f"a window of at most {limits.WINDOW_BYTES:,} bytes" in TEXT


def test_the_sections_are_the_files():
    files = {path.stem for path in (TESTS.parent / "protocol").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"^## (\w+)", TEXT, re.MULTILINE)) == files | {"differences", "vectors"}


def test_names_and_reasons_are_the_codes():
    for stream in topics.STREAMS:
        assert f"`{stream}`" in TEXT
    for reason in receipt.REASONS:
        assert f"`{reason}`" in TEXT
    for role in topics.ROLES:
        assert f"`{role}`" in TEXT
