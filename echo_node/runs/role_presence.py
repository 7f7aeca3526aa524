"""Presence of a role: announce it, serve the manifest, connect to others."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from echo_node.net.base import Network
from echo_node.net.discovery.role_peers import SEVERAL, RolePeers
from echo_node.runs.manifest_exchange import serve_manifest
from echo_node.runs.run import Run
from protocol import topics

OPEN: Final = "open"
"""File in a trainer's folder of a run; while it exists, the run is listed as open."""


@asynccontextmanager
async def present_as(
    role: str, run: Run, network: Network, *, needed: Iterable[str], folder: Path | None
) -> AsyncGenerator[None]:
    """Announce a role in the DHT for the block; stay connected to needed roles.

    Trainers and verifiers of the run always have a place among this node's connections. A trainer
    lists the run for strangers while the file `OPEN` is in `folder`.
    """
    keys = {topics.role_key(run.id, each): SEVERAL for each in needed}
    role_peers = RolePeers(network, announced=[topics.role_key(run.id, role)], needed=keys)
    for key in {*run.manifest.trainers, *run.manifest.verifiers}:
        network.protect(key, math.inf)

    def is_open() -> bool:
        return role == "trainer" and folder is not None and (folder / OPEN).exists()

    async with serve_manifest(network, run.sealed_manifest, is_open), trio.open_nursery() as nursery:
        nursery.start_soon(role_peers.run)
        yield
        nursery.cancel_scope.cancel()
