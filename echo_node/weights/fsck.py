"""Check a store: read everything again and list the problems. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from echo_node.errors import EchoError
from echo_node.weights import parallel
from echo_node.weights.active_version import ActiveVersion
from echo_node.weights.chain_log import ChainLog, Head
from echo_node.weights.route_graph import Step
from echo_node.weights.store_layout import StoreLayout
from echo_node.weights.version_archive import VersionArchive


def problems(archive: VersionArchive, place: StoreLayout, held: ActiveVersion) -> list[str]:
    """Return the problems of a store that nobody changes meanwhile."""
    return [
        *_of_chain(archive, place),
        *_of_blobs(archive),
        *(problem for head in archive.journal.follower.heads for problem in _of_tables(archive, head)),
        *_of_state(archive, place, held),
    ]


def _of_chain(archive: VersionArchive, place: StoreLayout) -> Iterator[str]:
    """Check every head and grant again: signatures and the rules of the chain."""
    follower = archive.journal.follower
    try:
        again = ChainLog(place.heads, follower.rules, follower.floor, durable=False)
    except EchoError as error:
        yield str(error)
        return
    if again.follower != follower:
        yield "the chain on disk is not the one in memory"


def _of_blobs(archive: VersionArchive) -> Iterator[str]:
    def check(blob: bytes) -> str | None:
        try:
            right = archive.blobs.is_right(blob)
        except EchoError as error:
            return str(error)
        return (
            None
            if right
            else f"{blob.hex()} is damaged: its bytes have another hash (join again, and it is fetched)"
        )

    found = parallel.each(check, [blob for blob, _ in archive.blobs.all()])
    yield from (problem for problem in found if problem)


def _of_tables(archive: VersionArchive, head: Head) -> Iterator[str]:
    """Check that tables with all frames here lead to the head's root."""
    for route in head.message.routes:
        try:
            if archive.is_whole(route):
                archive.reader(Step(head, route))
        except EchoError as error:
            yield str(error)


def _of_state(archive: VersionArchive, place: StoreLayout, held: ActiveVersion) -> Iterator[str]:
    """Check the active version: its root, the pointer, and that it can be rebuilt."""
    current = place.current()
    if current != (held.head.id if held.head else None):
        yield "the pointer names another version than the one that is held"
    if held.head is None:
        return
    name = f"version {held.head.message.version}"
    if wrong := held.wrong():
        yield f"the state on disk is not that of {name} in {len(wrong)} chunks"
    try:
        readers = archive.readers(archive.way(held.head.id))
        parallel.each(lambda chunk: archive.build(readers, chunk) is None, archive.flat.chunks)
    except EchoError as error:
        yield f"{name} cannot be built again: {error}"
