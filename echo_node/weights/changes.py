"""What an engine has to change to be at a version: elements of tensors and their new values, a chunk at a time.

Where they changed is read from the frames; what they became, from the new state. It may name elements that ended as
they began, and where there is no chain of deltas it names all of them; it never leaves one out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Change
from echo_node.errors import StoreError
from echo_node.weights.flat import Chunk, FlatLayout
from echo_node.weights.journal import Head
from echo_node.weights.passage import read_table
from echo_node.weights.truth import Truth
from protocol import DELTA_CODEC, Frame, Route
from protocol.delta import decode_positions


def changes(truth: Truth, state: memoryview, since: bytes, head: Head, granule: int = 1) -> Iterator[Change]:
    """From the state of head `since` to that of `head`, which lies in `state` and must not change meanwhile.

    Elements come in whole runs of `granule`, counted from the first of their tensor.
    """
    flat = truth.flat
    steps = _deltas(truth, since, head)
    tables = None if steps is None else [(route, _frames(truth, route)) for route in steps]
    for chunk in flat.chunks:
        positions = None if tables is None else _positions(truth, tables, chunk)
        yield from _split(flat, state, chunk, positions, granule)


def _deltas(truth: Truth, since: bytes, head: Head) -> list[Route] | None:
    """The routes from one head to the other; none, if every way goes through an anchor."""
    try:
        way = truth.way(head.id, held={since})
    except StoreError:
        return None
    routes = [step.route for step in way]
    return None if any(route.base is None for route in routes) else routes


def _frames(truth: Truth, route: Route) -> list[Frame]:
    table = read_table(truth.blobs, route)
    if (
        table is None
    ):  # it was there when the way was planned, and went since: pruning waits for nobody who reads
        raise StoreError("a table of changes is gone", advice="take the whole state")
    return list(table)


def _positions(
    truth: Truth, tables: Sequence[tuple[Route, list[Frame]]], chunk: Chunk
) -> NDArray[np.int64] | None:
    """The elements of a chunk that some frame changes; none, if a frame holds the chunk whole."""
    found: list[NDArray[np.uint32]] = []
    for route, frames in tables:
        frame = frames[chunk.index]
        if frame.size and not (route.codec == DELTA_CODEC and chunk.narrow):
            return None
        if frame.size:
            found.append(decode_positions(truth.blobs.read(frame.blob), chunk.elements))
    if len(found) == 1:
        return found[0].astype(np.int64)
    is_changed = np.zeros(chunk.elements, bool)  # many times faster than sorting, dense or sparse
    for positions in found:
        is_changed[positions] = True
    return np.flatnonzero(is_changed)


def _split(
    flat: FlatLayout, state: memoryview, chunk: Chunk, positions: NDArray[np.int64] | None, granule: int
) -> Iterator[Change]:
    """The elements of a chunk, by tensor."""
    first = 0
    for stretch in flat.stretches(chunk):
        tensor = stretch.tensor
        if positions is None:
            within = np.arange(stretch.first, stretch.first + stretch.elements, dtype=np.int64)
        else:
            low, high = np.searchsorted(positions, (first, first + stretch.elements))
            within = positions[low:high] - first + stretch.first
        first += stretch.elements
        if within.size:
            within = _whole(within, granule, tensor.elements)
            kind = np.dtype("<u2" if tensor.width == 2 else "<u4")
            whole = np.frombuffer(state, kind, tensor.elements, tensor.offset)
            yield Change(tensor.name, within, whole[within])


def _whole(positions: NDArray[np.int64], granule: int, elements: int) -> NDArray[np.int64]:
    """The runs of a tensor that these elements lie in, a run of the tensor's end perhaps shorter."""
    if granule == 1:
        return positions
    runs = positions // granule
    runs = runs[np.concatenate(([True], runs[1:] != runs[:-1]))]
    within = (runs[:, None] * granule + np.arange(granule)).ravel()
    return within[within < elements]
