"""Everything in a store, read again and checked against everything else; what is wrong, in words. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from echo_node.errors import EchoError
from echo_node.weights import parallel
from echo_node.weights.held import HeldState
from echo_node.weights.journal import Head, Journal
from echo_node.weights.routes import Step
from echo_node.weights.storefolder import StoreFolder
from echo_node.weights.truth import Truth


def problems(truth: Truth, place: StoreFolder, held: HeldState) -> list[str]:
    """What is wrong with a store that nobody changes meanwhile."""
    return [
        *_of_chain(truth, place),
        *_of_blobs(truth),
        *(problem for head in truth.journal.follower.heads for problem in _of_tables(truth, head)),
        *_of_state(truth, place, held),
    ]


def _of_chain(truth: Truth, place: StoreFolder) -> Iterator[str]:
    """Every head and grant again: signatures, and the rules by which they follow one another."""
    follower = truth.journal.follower
    try:
        again = Journal(place.heads, follower.rules, follower.floor, durable=False)
    except EchoError as error:
        yield str(error)
        return
    if again.follower != follower:
        yield "the chain on disk is not the one in memory"


def _of_blobs(truth: Truth) -> Iterator[str]:
    def check(blob: bytes) -> str | None:
        try:
            right = truth.blobs.is_right(blob)
        except EchoError as error:
            return str(error)
        return (
            None
            if right
            else f"{blob.hex()} is damaged: its bytes have another hash (join again, and it is fetched)"
        )

    found = parallel.each(check, [blob for blob, _ in truth.blobs.all()])
    yield from (problem for problem in found if problem)


def _of_tables(truth: Truth, head: Head) -> Iterator[str]:
    """Tables whose frames are all here have to lead to the head's root."""
    for route in head.message.routes:
        try:
            if truth.is_whole(route):
                truth.passage(Step(head, route))
        except EchoError as error:
            yield str(error)


def _of_state(truth: Truth, place: StoreFolder, held: HeldState) -> Iterator[str]:
    """The state that is held: its root, the pointer to it, and that it can be built again."""
    current = place.current()
    if current != (held.head.id if held.head else None):
        yield "the pointer names another version than the one that is held"
    if held.head is None:
        return
    name = f"version {held.head.message.version}"
    if wrong := held.wrong():
        yield f"the state on disk is not that of {name} in {len(wrong)} chunks"
    try:
        passages = truth.passages(truth.way(held.head.id))
        parallel.each(lambda chunk: truth.build(passages, chunk) is None, truth.flat.chunks)
    except EchoError as error:
        yield f"{name} cannot be built again: {error}"
