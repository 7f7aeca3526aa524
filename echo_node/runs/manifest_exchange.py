"""Serve a run's manifest to newcomers, and find manifests and open runs.

A manifest proves itself, by its hash and its author's signature; whether to trust its author is
for people to decide.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, RequestError
from protocol import ZERO, Manifest, Opened, ProtocolError, limits, open_manifest, topics

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0
AT_ONCE: Final = 32
"""Peers that are asked concurrently."""
FIND_SECONDS: Final = 60.0
"""Time limit for finding a peer that knows a run."""
PAUSE: Final = 1.0
SEVERAL: Final = 16
"""Most trainers of open runs that are asked."""
OPEN_SECONDS: Final = 5.0
"""Seconds between two checks whether the run is open."""
_MOST: Final = limits.MANIFEST_BYTES + limits.ENVELOPE_BYTES
_ROLES: Final = ("trainer", "verifier", "sampler")


@asynccontextmanager
async def serve_manifest(
    network: Network, manifest: Opened[Manifest], is_open: Callable[[], bool] = lambda: False
) -> AsyncGenerator[None]:
    """Serve the manifest to peers that ask for it by its id.

    While `is_open`, also to those that ask for any run.
    """

    async def answer(_peer: bytes, asked: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if asked == manifest.id or (asked == ZERO and is_open()):
            return manifest.sealed
        raise PeerError("this node does not work in that run")

    with network.serve(topics.MANIFEST_STREAM, answer, most=len(ZERO)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_announce_when_open, network, is_open)
            yield
            nursery.cancel_scope.cancel()


async def _announce_when_open(network: Network, is_open: Callable[[], bool]) -> None:
    """Announce the run in the DHT once it is open.

    An announcement expires by itself, and a peer that follows an old one is refused.
    """
    while not is_open():  # noqa: ASYNC110 - a person opens it, in another process
        await trio.sleep(OPEN_SECONDS)
    try:
        await network.provide(topics.role_key(ZERO, "trainer"))
    except PeerError as error:
        log.warning("open run not announced: %s", error)


async def find_manifest(network: Network, run: bytes) -> Opened[Manifest]:
    """Return the manifest of a run from the first peer that has it."""
    try:
        with trio.fail_after(FIND_SECONDS):
            return await _look_for(network, run)
    except trio.TooSlowError:
        met = len(network.peers())
        raise PeerError(
            f"nobody who could be reached knows the run {run.hex()} ({met} peers were met)",
            advice="does its trainer run? a newer link, or another --seed, may lead to it",
        ) from None


async def _look_for(network: Network, run: bytes) -> Opened[Manifest]:
    liars: set[bytes] = set()
    while True:
        for manifest in await _ask_all(network, await _near(network, run), run, liars, enough=1):
            return manifest
        await trio.sleep(PAUSE)


async def open_runs(network: Network) -> list[Opened[Manifest]]:
    """Return the open runs whose trainers are found in time, sorted by name."""
    key = topics.role_key(ZERO, "trainer")
    found: list[Opened[Manifest]] = []
    liars: set[bytes] = set()
    with trio.move_on_after(FIND_SECONDS):
        while not found:
            found = await _ask_all(network, await network.find(key, SEVERAL), ZERO, liars)
            if not found:  # seeds may not have been reached yet
                await trio.sleep(PAUSE)
    return sorted({each.id: each for each in found}.values(), key=lambda each: (each.message.name, each.id))


async def _ask_all(
    network: Network, peers: Collection[bytes], run: bytes, liars: set[bytes], *, enough: int = SEVERAL
) -> list[Opened[Manifest]]:
    """Ask several peers concurrently; drop those that answered falsely."""
    found: list[Opened[Manifest]] = []
    async with trio.open_nursery() as nursery:

        async def ask(peer: bytes) -> None:
            if (manifest := await _ask(network, peer, run, liars)) is not None:
                found.append(manifest)
                if len(found) >= enough:
                    nursery.cancel_scope.cancel()

        for peer in [peer for peer in peers if peer not in liars][:AT_ONCE]:
            nursery.start_soon(ask, peer)
    return found


async def _near(network: Network, run: bytes) -> Collection[bytes]:
    """Return peers that announce a role in the run, then the other connected ones."""
    found: dict[bytes, None] = {}
    for role in _ROLES:
        found.update(dict.fromkeys(await network.find(topics.role_key(run, role), 4, deadline=ASK_SECONDS)))
        if found:
            break
    return [*found, *sorted(network.peers() - found.keys())]


async def _ask(network: Network, peer: bytes, run: bytes, liars: set[bytes]) -> Opened[Manifest] | None:
    try:
        sealed = await network.request(peer, topics.MANIFEST_STREAM, run, deadline=ASK_SECONDS, most=_MOST)
        found = open_manifest(sealed)
    except RequestError as error:
        log.debug("no manifest: %s", error)
        return None
    except ProtocolError as error:
        network.score(peer, error.reason)
        liars.add(peer)
        return None
    wrong = found.id != run if run != ZERO else peer not in found.message.trainers
    if wrong:
        network.score(peer, "wrong-run")
        liars.add(peer)
        return None
    return found
