"""Check that seeds can be reached, and whether this machine can be dialled.

A short connection under a temporary key: a node may be running under the own one. Only the given
seeds are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from echo_node.doctor.finding import Finding, lacking, point, well, wrong
from echo_node.errors import EchoError, PeerError
from echo_node.net.discovery.seeds import Seed, parse_seeds, resolve
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity

SECONDS: Final = 20.0
"""Seconds for the whole check."""
_LOOK_SECONDS: Final = 0.1
"""Seconds between two looks at the connections."""
_SEED_FIX: Final = (
    "is it up, is its address right, and does the firewall let TCP out? Else give another by --seed"
)


def look(seeds: Sequence[str], *, seconds: float = SECONDS) -> list[Finding]:
    """Check the seeds; an address that cannot be parsed is a `ConfigError`."""
    if not seeds:
        says = "not checked: no seed is known"
        return [lacking("network", "reach", says, "give one: echo-node doctor --seed /ip4/…/tcp/…/p2p/…")]
    parsed = parse_seeds(seeds)
    try:
        return trio.run(_visit, parsed, seconds)
    except EchoError as error:
        return [wrong("network", "reach", error.what, error.advice or _SEED_FIX)]
    except BaseExceptionGroup as group:
        explained, unexplained = group.split(EchoError)
        if explained is None or unexplained is not None:
            raise
        return [wrong("network", "reach", str(_first(explained)), _SEED_FIX)]


async def _visit(seeds: Sequence[Seed], seconds: float) -> list[Finding]:
    problems: dict[str, str] = {}
    met: set[str] = set()
    says, is_public = "", None
    with trio.move_on_after(seconds):
        places = await _resolved(seeds, problems)
        settings = SwarmSettings(seeds=tuple(seed.text for seed in seeds), relay=False, bulk=False)
        async with join_swarm(Identity.generate(), settings) as network:
            with trio.move_on_after(seconds * 0.9):
                while True:
                    met |= {text for text, keys in places.items() if keys & network.peers()}
                    says, is_public = network.reachability.one_line(), _is_public(network)
                    if len(met) + len(problems) >= len(seeds) and (is_public is not None or not met):
                        break
                    await trio.sleep(_LOOK_SECONDS)
    points = [_seed(seed.text, problems, met) for seed in seeds]
    if not met:
        fix = "fix the findings on the seeds first"
        return [*points, wrong("network", "reach", "not known: no seed answered", fix)]
    fix = "sampling works as it is; to be dialled, forward a TCP port to this machine and name it by --listen"
    return [*points, point("network", "reach", fine=is_public or None, says=says, fix=fix)]


async def _resolved(seeds: Sequence[Seed], problems: dict[str, str]) -> dict[str, set[bytes]]:
    """Return the keys of each seed; names that do not resolve are added to `problems`."""
    found: dict[str, set[bytes]] = {}

    async def look_up(seed: Seed) -> None:
        try:
            found[seed.text] = {place.public for place in await resolve(seed)}
        except PeerError as error:
            problems[seed.text] = error.what

    async with trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(look_up, seed)
    return found


def _seed(text: str, problems: dict[str, str], met: set[str]) -> Finding:
    if text in met:
        return well("network", text, "answered")
    fine = None if met else False
    return Finding("network", text, fine, problems.get(text, "did not answer"), _SEED_FIX)


def _is_public(network: Libp2pNetwork) -> bool | None:
    state = network.reachability.state
    return None if state == "unknown" else state == "public"


def _first(group: BaseExceptionGroup[EchoError]) -> EchoError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
