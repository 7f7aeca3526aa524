"""From a trained state to a signed head and the blobs that it names. Knows no trainer and no network.

Each version is published whole, as an anchor. A head is signed once: whoever publishes it again sends the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from echo_node.weights.state import State, chunk_hashes, layout_of, pieces, write_safetensors
from protocol import (
    ZERO,
    ChunkTable,
    Frame,
    Identity,
    Opened,
    Roster,
    Route,
    WeightsHead,
    blob_id,
    encode,
    merkle_root,
    open_sealed,
    seal,
)

ANCHOR_CODEC = "safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """A head with everything that a follower will ask for."""

    head: Opened[WeightsHead]
    blobs: dict[bytes, bytes]


class Publisher:
    """Signs one chain of heads. `luck` gives 32 random bytes for each."""

    def __init__(self, identity: Identity, run: bytes, *, luck: Callable[[], bytes]) -> None:
        self._identity = identity
        self._run = run
        self._luck = luck
        self.tip: Opened[WeightsHead] | None = None

    def publish(self, state: State, *, step: int, roster: Roster, groups: Sequence[bytes]) -> Publication:
        """The next version: these weights, trained on these groups, to be sampled by this roster."""
        hashes = chunk_hashes(state)
        anchor = write_safetensors(state)
        frames = pieces(anchor, len(hashes))
        rows = [Frame(blob_id(f), len(f), after) for f, after in zip(frames, hashes, strict=True)]
        table = encode(ChunkTable.of(ANCHOR_CODEC, rows))
        members = encode(roster)
        tip = self.tip
        head = WeightsHead(
            groups=merkle_root(sorted(groups)),
            layout=blob_id(encode(layout_of(state))),
            luck=self._luck(),
            previous=tip.id if tip else ZERO,
            root=merkle_root(hashes),
            roster=blob_id(members),
            routes=(Route(base=None, codec=ANCHOR_CODEC, size=len(anchor), table=blob_id(table)),),
            step=step,
            term=1,
            version=tip.message.version + 1 if tip else 0,
        )
        self.tip = open_sealed(seal(head, self._identity, self._run), WeightsHead, self._run)
        return Publication(self.tip, {blob_id(data): data for data in (*frames, table, members)})
