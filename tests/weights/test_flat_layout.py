"""Where everything lies: the same cuts as those of a state in memory, for any layout and any size
of chunks.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.tensors import chunks, layout_of
from protocol import limits
from tests.weights.anchor_bytes import write_safetensors
from tests.weights.chains import SIZES, tensor

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
states = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(\.[a-z]{1,3}){0,1}", fullmatch=True),
    st.builds(lambda dtype, shape: tensor(dtype, *shape), st.sampled_from(sorted(SIZES)), shapes),
    min_size=1,
    max_size=6,
)


def with_chunks_of(elements, work):
    before, limits.CHUNK_ELEMENTS = limits.CHUNK_ELEMENTS, elements
    try:
        return work()
    finally:
        limits.CHUNK_ELEMENTS = before


@given(states, st.integers(1, 40))
def test_chunks_are_cut_as_in_memory_and_their_stretches_fill_them(state, elements):
    flat, cut = with_chunks_of(elements, lambda: (FlatLayout(layout_of(state)), list(chunks(state))))
    source = FlatSource(flat, state)
    assert [source.chunk(chunk).tobytes() for chunk in flat.chunks] == cut
    assert flat.size == sum(map(len, cut))
    for chunk, data in zip(flat.chunks, cut, strict=True):
        stretches = list(flat.stretches(chunk))
        assert chunk.narrow == all(each.tensor.width == 2 for each in stretches)
        joined = b""
        for each in stretches:
            assert each.at == len(joined)
            start, width = each.first * each.tensor.width, each.tensor.width
            joined += state[each.tensor.name].data[start : start + each.elements * width]
        assert joined == data


@given(states, st.integers(1, 40), st.data())
def test_any_stretch_of_the_flat_state_and_of_its_file_is_read_by_place(state, elements, data):
    flat = with_chunks_of(elements, lambda: FlatLayout(layout_of(state)))
    source, file = FlatSource(flat, state), write_safetensors(state)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(file))] * 2)))
    assert source.anchor(start, end).tobytes() == file[start:end]
    pieces = [source.anchor(a, b).tobytes() for a, b in itertools.pairwise(flat.anchor_cuts())]
    assert b"".join(pieces) == file
    assert len(pieces) == len(flat.chunks)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, flat.size)] * 2)))
    assert source.read(start, end - start).tobytes() == file[len(flat.header) :][start:end]
