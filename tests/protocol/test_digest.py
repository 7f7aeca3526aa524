"""Names for bytes."""

import ast
from pathlib import Path

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import protocol
from protocol.digest import blob_id, context, derive, merkle_root

from .examples import SEALED_TYPES

leaves = st.lists(st.binary(max_size=40), max_size=20)


def contexts_in_the_code() -> list[str]:
    """Every literal that is passed to `derive` or `context` anywhere in the wire."""
    found = []
    for path in Path(protocol.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"derive", "context"}:
                found += [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    return found


def test_no_two_kinds_of_thing_share_a_context():
    names = contexts_in_the_code()
    assert {"beacon", "slot", "leaf", "node", "root", "role", "link", "lot", "draw"} <= set(names)
    assert not set(names) & set(SEALED_TYPES)
    assert sorted(set(names)) == sorted({*names})
    assert len({name: names.count(name) for name in names if name != "draw"}) == len({*names} - {"draw"})
    assert derive("leaf", b"x") != derive("node", b"x") != blob_id(b"x")


def test_the_hash_is_blake3_in_derive_key_mode():
    assert derive("leaf", b"ab", b"c") == blake3(b"abc", derive_key_context="echo/leaf/2").digest()
    assert context("leaf") == "echo/leaf/2"
    assert blob_id(b"abc") == blake3(b"abc").digest()


def root_by_recursion(names: list[bytes]) -> bytes:
    """The same tree, told from the top: the left part is the largest power of two below the number
    of leaves.
    """
    if len(names) == 1:
        return names[0]
    cut = 1 << (len(names) - 1).bit_length() - 1
    return derive("node", root_by_recursion(names[:cut]), root_by_recursion(names[cut:]))


@given(leaves)
def test_a_merkle_root_is_the_tree_of_the_spec(data):
    top = root_by_recursion([derive("leaf", leaf) for leaf in data]) if data else b""
    assert merkle_root(data) == derive("root", len(data).to_bytes(8), top)


@given(leaves.filter(bool), st.data())
def test_a_merkle_root_commits_to_every_leaf_and_their_number(data, choose):
    root = merkle_root(data)
    index = choose.draw(st.integers(0, len(data) - 1))
    assert merkle_root([*data[:index], data[index] + b"!", *data[index + 1 :]]) != root
    assert merkle_root(data[:-1]) != root
    assert merkle_root([*data, data[-1]]) != root
    if data[0] != data[-1]:
        assert merkle_root(data[::-1]) != root
