"""Many steps taken as one: each chunk goes through all of them in memory, and is written once. Fetches nothing.

A way may begin with an anchor that is older than what is held, because it lies on disk and so costs nothing. Taken step by
step, the store would stand at that older version for a while, and a crash would leave it there.
"""

from __future__ import annotations

from echo_node.errors import DefectError
from echo_node.weights.flat import Chunk
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.routes import Step, Way
from echo_node.weights.scratch import Bytes
from echo_node.weights.store import WeightsStore
from echo_node.weights.truth import OffChainError


def take_way(store: WeightsStore, way: Way, lied: list[Step]) -> None:
    """Go to the head at the end of a way whose blobs are all here, or stay. `lied` is told whose step was refused. Blocks."""
    if len(way) == 1:
        store.advance(way[0].head, way[0].route)
        return
    head = way[-1].head
    if all(head.id != known.id for known in reversed(store.follower.heads)):
        raise OffChainError
    with store.turn():
        passages = [store.truth.passage(step) for step in way]
        base_id = way[0].route.base
        if base_id is not None and (store.tip is None or store.tip.id != base_id):
            raise UnprovenError("wrong-base", f"version {head.message.version} is reached from another state")

        def build(chunk: Chunk, at: Bytes) -> Bytes:
            made: Bytes | None = None if base_id is None else at
            for step, passage in zip(way, passages, strict=True):
                try:
                    made = passage.build(chunk, made)
                except UnprovenError:
                    lied.append(step)
                    raise
            if made is None:
                raise DefectError("a way without a step")
            return made

        store.swap(head, passages[-1].after, build)
