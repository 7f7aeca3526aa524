"""Run and JSON-lines protocol shared by the processes of the load benchmark.

Its buffer is as wide as the wire allows, and its trainer is paused: it takes groups in for good,
and learns nothing. So what is measured is admission and nothing after it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from echo_node.contract import load
from echo_node.models import embedded
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import ENGINES, Run, draft
from protocol import Identity, derive
from protocol.manifest import Sampling, Sync

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
ENGINE: Final = "torch/f32"
BATCH: Final = 4096
STALENESS: Final = 8
ROOM: Final = (STALENESS + 1) * BATCH
"""Groups that the buffer of this run holds."""
BURST: Final = 16
"""Groups that a sampler's engine makes in one call, which go out together."""
UNANSWERED: Final = 4 * BURST
"""Groups of one sampler that no receipt has named yet; as many as a sampler of ours would have."""

Obey = Callable[..., Awaitable[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Orders:
    """Orders of a process, read from the first line of its standard input."""

    folder: str = ""
    seeds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Number of samplers in this process."""
    samplers: int = 0
    """Number of samplers in the whole swarm."""


def identity(name: str) -> Identity:
    return Identity(derive("load", name.encode()))


def sealed_manifest() -> bytes:
    trainer = identity("trainer")
    return draft(
        name="load",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={"batch_groups": BATCH},
        sampling_=Sampling(group_size=8, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=STALENESS),
        author=trainer,
        trainers=[trainer.public],
        engines=[each for each in ENGINES if each.engine == ENGINE],
        nonce=bytes(32),
    )


def open_run(*, jailed: bool) -> Run:
    """Open the run, with the contract jailed for the trainer; samplers need none."""
    run = Run.open(sealed_manifest(), embedded.folder(), jailed=jailed)
    assert training_settings(run.manifest).batch_groups == BATCH
    return run


def swarm_settings(seeds: tuple[str, ...]) -> SwarmSettings:
    return SwarmSettings(listen=(LOOPBACK,), seeds=seeds, connections=300)


async def obey(commands: dict[str, Obey]) -> None:
    """Do what lines say, one after the other, and answer each by one, until there are no more."""
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        order = json.loads(line)
        say(await commands[order.pop("do")](**order))


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def read_orders() -> Orders:
    given = json.loads(sys.argv[1])
    return Orders(
        given.get("folder", ""),
        tuple(given.get("seeds", ())),
        tuple(given.get("names", ())),
        given.get("samplers", 0),
    )
