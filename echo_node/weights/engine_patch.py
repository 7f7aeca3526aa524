"""Elements that an engine must change to reach a version, with their new values.

The positions come from the frames, the values from the new state, a chunk at a time. An element
that ended as it began may be named; where there is no chain of deltas all are; none is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Change
from echo_node.errors import StoreError
from echo_node.weights.chain_log import Head
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.route_reader import read_table
from echo_node.weights.version_archive import VersionArchive
from protocol import DELTA_CODEC, Frame, Route
from protocol.delta import decode_positions


def changes(
    archive: VersionArchive, state: memoryview, since: bytes, head: Head, granule: int = 1
) -> Iterator[Change]:
    """Iterate over the changes from head `since` to `head`, whose state is in `state`.

    The state must not change meanwhile. Elements come in whole runs of `granule`, counted from the
    first of their tensor.
    """
    flat = archive.flat
    steps = _deltas(archive, since, head)
    tables = None if steps is None else [(route, _frames(archive, route)) for route in steps]
    for chunk in flat.chunks:
        positions = None if tables is None else _positions(archive, tables, chunk)
        yield from _split(flat, state, chunk, positions, granule)


def _deltas(archive: VersionArchive, since: bytes, head: Head) -> list[Route] | None:
    """Return the delta routes between two heads; None if each way has an anchor."""
    try:
        way = archive.way(head.id, held={since})
    except StoreError:
        return None
    routes = [step.route for step in way]
    return None if any(route.base is None for route in routes) else routes


def _frames(archive: VersionArchive, route: Route) -> list[Frame]:
    table = read_table(archive.blobs, route)
    if (
        table is None
    ):  # it was there when the way was planned, and went since: pruning waits for nobody who reads
        raise StoreError("a table of changes is gone", advice="take the whole state")
    return list(table)


def _positions(
    archive: VersionArchive, tables: Sequence[tuple[Route, list[Frame]]], chunk: Chunk
) -> NDArray[np.int64] | None:
    """Return a chunk's elements that frames change; None if a frame holds it whole."""
    found: list[NDArray[np.uint32]] = []
    for route, frames in tables:
        frame = frames[chunk.index]
        if frame.size and not (route.codec == DELTA_CODEC and chunk.narrow):
            return None
        if frame.size:
            found.append(decode_positions(archive.blobs.read(frame.blob), chunk.elements))
    if len(found) == 1:
        return found[0].astype(np.int64)
    is_changed = np.zeros(chunk.elements, bool)  # many times faster than sorting, dense or sparse
    for positions in found:
        is_changed[positions] = True
    return np.flatnonzero(is_changed)


def _split(
    flat: FlatLayout, state: memoryview, chunk: Chunk, positions: NDArray[np.int64] | None, granule: int
) -> Iterator[Change]:
    """Split the elements of a chunk by tensor."""
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
    """Return the runs of a tensor with these elements; the last may be shorter."""
    if granule == 1:
        return positions
    runs = positions // granule
    runs = runs[np.concatenate(([True], runs[1:] != runs[:-1]))]
    within = (runs[:, None] * granule + np.arange(granule)).ravel()
    return within[within < elements]
