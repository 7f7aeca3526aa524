"""The canonical state: anchors that anybody's library opens, always the same bytes, and hashes over
every element.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.models.safetensors_file import MappedTensor, map_tensors
from echo_node.runs.run import read_model
from echo_node.weights.flat_layout import cuts
from echo_node.weights.tensors import (
    chunk_hashes,
    chunks,
    from_mapped,
    layout_of,
    root_of,
)
from protocol import ProtocolError, blob_id, decode, encode, limits, merkle_root
from protocol.weights import Layout
from tests.weights.anchor_bytes import read_safetensors, write_safetensors
from tests.weights.chains import SIZES, state, tensor

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
states = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9_-]{1,8}(\.[A-Za-z0-9_-]{1,8}){0,2}", fullmatch=True),
    st.builds(lambda dtype, shape: tensor(dtype, *shape), st.sampled_from(sorted(SIZES)), shapes),
    min_size=1,
    max_size=6,
)


def flat(of) -> bytes:
    return b"".join(bytes(of[name].data) for name in sorted(of))


@given(states)
def test_an_anchor_gives_back_the_tensors_that_went_in(given_state):
    assert read_safetensors(write_safetensors(given_state)) == dict(sorted(given_state.items()))


@given(states)
def test_the_library_of_safetensors_reads_the_same_bits_types_and_shapes(given_state):
    """Tensors of 2 and 4 bytes an element stand in the order of their names, so some do not start
    at a multiple of 4.
    """
    opened = safetensors.torch.load(write_safetensors(given_state))
    assert opened.keys() == given_state.keys()
    for name, told in given_state.items():
        assert (opened[name].dtype, tuple(opened[name].shape)) == (TORCH[told.dtype], told.shape)
        assert opened[name].reshape(-1).view(torch.uint8).numpy().tobytes() == told.data


def test_scalars_and_tensors_without_elements_survive(tmp_path):
    odd = {"none": tensor("bf16", 0, 3), "one": tensor("f32"), "zero": tensor("f16", 2, 0)}
    file = tmp_path / "model.safetensors"
    file.write_bytes(write_safetensors(odd))
    opened = safetensors.torch.load_file(file)
    assert {name: tuple(one.shape) for name, one in opened.items()} == {
        "none": (0, 3),
        "one": (),
        "zero": (2, 0),
    }
    assert opened["one"].numpy().tobytes() == odd["one"].data


def test_an_anchor_is_the_same_bytes_whatever_the_order_and_the_day():
    forward, backward = state(), dict(reversed(state().items()))
    assert write_safetensors(forward) == write_safetensors(backward)
    two = {"b": TensorBytes("bf16", (2,), b"wxyz"), "a": TensorBytes("f32", (), b"1234")}
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}'
    )
    padding = b" " * (-len(header) % 8)
    assert write_safetensors(two) == (
        len(header + padding).to_bytes(8, "little") + header + padding + b"1234" + b"wxyz"
    ), "another form would split the swarm: two nodes, two hashes"


def test_a_view_into_a_larger_buffer_is_as_good_as_bytes():
    whole = state()
    views = {
        name: TensorBytes(one.dtype, one.shape, memoryview(b"x" + one.data + b"y")[1:-1])
        for name, one in whole.items()
    }
    assert write_safetensors(views) == write_safetensors(whole)
    assert root_of(views) == root_of(whole)


def test_transformers_opens_a_folder_whose_weights_we_wrote(tmp_path):
    from transformers import AutoModelForCausalLM

    shutil.copytree(embedded.folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(write_safetensors(read_model(embedded.folder())))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(embedded.folder(), local_files_only=True).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        write_safetensors({"a": tensor("f32", 4)})[:-1],
        write_safetensors({"a": tensor("f32", 4)}) + b"more",
        write_safetensors({"a": tensor("f32", 4)}).replace(b"[4]", b"[5]"),
        write_safetensors({"a": tensor("f32", 4)}).replace(b"[0,16]", b"[9,16]"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, junk):
    (tmp_path / "model.safetensors").write_bytes(junk)
    with pytest.raises(ConfigError, match="safetensors"):
        map_tensors(tmp_path / "model.safetensors")


def test_a_type_that_the_chain_does_not_carry_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="'a' has the type 'I64'"):
        from_mapped({"a": MappedTensor("I64", (2,), bytes(16))})


@pytest.mark.parametrize("elements", [1, 2, 3, 7, 13, 27, 28, 29])
def test_chunks_are_cut_by_elements_wherever_tensors_end(monkeypatch, elements):
    """28 elements: one of 4 bytes, 15 of 2 bytes, 12 of 4 bytes."""
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", elements)
    whole, cut = state(), list(chunks(state()))
    assert b"".join(cut) == flat(whole)
    sizes = [4] + [2] * 15 + [4] * 12
    assert [len(chunk) for chunk in cut] == [
        sum(sizes[at : at + elements]) for at in range(0, len(sizes), elements)
    ]


def test_the_root_is_the_merkle_root_over_the_hashes_of_the_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 5)
    data = flat(state())
    by_hand = [data[0:12], data[12:22], data[22:32], *(data[at : at + 20] for at in range(34, 82, 20))]
    by_hand[3:] = [data[32:34] + data[34:50], data[50:70], data[70:82]]
    assert chunk_hashes(state()) == [blob_id(chunk) for chunk in by_hand]
    assert root_of(state()) == merkle_root([blob_id(chunk) for chunk in by_hand])


def test_a_single_bit_anywhere_gives_another_root_and_one_other_chunk(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 5)
    before = chunk_hashes(state())
    for name in state():
        for at in range(len(state()[name].data)):
            other = state()
            data = bytearray(other[name].data)
            data[at] ^= 1
            other[name] = TensorBytes(other[name].dtype, other[name].shape, bytes(data))
            assert sum(a != b for a, b in zip(before, chunk_hashes(other), strict=True)) == 1


def test_the_embedded_model_has_the_root_of_one_chunk():
    model = read_model(embedded.folder())
    assert root_of(model) == merkle_root([blob_id(flat(model))])


def test_a_layout_is_sorted_and_reads_back_whatever_order_the_state_had():
    layout = layout_of(dict(reversed(state().items())))
    assert [entry.name for entry in layout.tensors] == ["a.scale", "b.weight", "c.bias"]
    assert decode(Layout, encode(layout)) == layout
    assert layout == layout_of(state(seed=9)), "values are no part of it"
    assert layout != layout_of({**state(), "a.scale": tensor("f32", 1)})


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_the_pieces_of_an_anchor_are_the_whole_and_differ_by_one_byte_at_most(size, count):
    borders = cuts(size, count)
    assert (borders[0], borders[-1], len(borders)) == (0, size, count + 1)
    assert np.ptp(np.diff(borders)) <= 1


def test_a_tensor_cannot_have_the_name_that_anchors_have_for_themselves():
    with pytest.raises(ProtocolError, match="__metadata__"):
        write_safetensors({"__metadata__": tensor("f32", 1)})
