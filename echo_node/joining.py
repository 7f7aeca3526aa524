"""A node on the real network, from a person's word to its end: the run is opened, the state locked, the swarm joined, the
role done, and what happens is told as events, one after the other.

It puts rooms together that do the work, and does none of it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import trio

from echo_node import program, state
from echo_node.board import Board
from echo_node.errors import ConfigError
from echo_node.ledger import Ledger
from echo_node.metrics import Records, StepRecord
from echo_node.net.libp2p import Libp2pNetwork, SwarmSettings, join_swarm
from echo_node.node import Node
from echo_node.run import Run, read_model
from echo_node.runfile import open_run
from echo_node.state import StateFolder
from echo_node.weights.state import layout_of
from protocol import Identity, peer_id

Role: TypeAlias = Literal["sampler", "trainer", "verifier", "bootstrap"]
ROLES: Final[tuple[Role, ...]] = ("sampler", "trainer", "verifier", "bootstrap")
SEED_CONNECTIONS: Final = 600
PROGRESS_SECONDS: Final = 1.0
"""Between two looks at how it goes."""
WORDS_EVERY: Final = 10
"""So many looks are one line for a person."""
ALONE: Final = 15
"""Looks without a single peer, after which a person should hear of it."""
WITHOUT_END: Final = 1_000_000_000
"""Steps of a trainer that is not told how many to take."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person asks for when a node joins. `run` is a run's folder or its manifest's file; a bootstrap needs none."""

    role: Role
    state: Path
    run: Path | None = None
    model: str | None = None
    seeds: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    lan: bool = False
    engine: str | None = None
    threads: int | None = None
    slots: int = 16
    steps: int | None = None
    first_samplers: int = 1
    promote: bool = False


@dataclass(frozen=True, slots=True)
class Events:
    """What happens, for whoever reads it: one JSON object a line, or words. The board keeps it."""

    as_json: bool
    write: Callable[[str], None] = field(repr=False)
    board: Board = field(default_factory=Board, repr=False)

    def tell(self, event: str, words: str, **more: Any) -> None:
        """An event in words and, beside them, its figures. Without words it is for programs alone."""
        self.board.hear(event, words, more)
        if self.as_json:
            self.write(json.dumps({"event": event, "at": round(time.time(), 3), **more}))
        elif words:
            self.write(words)


@dataclass(frozen=True, slots=True)
class ToldSteps:
    """A writer of records that tells each step as an event."""

    events: Events

    def write(self, record: StepRecord) -> None:
        ages = {str(age): count for age, count in sorted(record.staleness.items())}
        self.events.tell(
            "step",
            f"step {record.step}: reward {record.reward:.3f}, version {record.version}",
            step=record.step,
            version=record.version,
            head=record.head.hex(),
            reward=record.reward,
            spread=record.spread,
            loss=record.loss,
            tokens=record.tokens,
            bytes_in=record.bytes_in,
            bytes_out=record.bytes_out,
            dropped=record.dropped,
            staleness=ages,
            samplers={peer_id(key): count for key, count in sorted(record.by_sampler.items())},
            heads=sorted({group.head.hex() for group in record.groups}),
            waited_seconds=round(record.waited_seconds, 3),
            step_seconds=round(record.step_seconds, 3),
        )

    def close(self) -> None:
        return


class Place:
    """This node's place in the swarm, once it has one."""

    def __init__(self, settings: SwarmSettings, events: Events) -> None:
        self._settings = settings
        self._events = events
        self.network: Libp2pNetwork | None = None

    @asynccontextmanager
    async def take(self, identity: Identity) -> AsyncGenerator[Libp2pNetwork]:
        async with join_swarm(identity, self._settings) as network:
            self.network = network
            found = network.addresses
            words = f"others reach it at {', '.join(found) or 'no address yet'}"
            self._events.tell("listening", words, addresses=found)
            yield network


def join(wishes: Wishes, events: Events) -> None:
    """Take part until the work is done or somebody says stop. What cannot be is an `EchoError`."""
    with state.opened(wishes.state) as place:
        identity = place.identity()
        if wishes.role == "bootstrap":
            settings = _settings(wishes, place, connections=SEED_CONNECTIONS, public=True)
            _started(events, wishes, identity, {})
            trio.run(partial(_seed, identity, settings, events))
            return
        if wishes.run is None:
            raise ConfigError("a run is missing", advice="give a run's folder or its manifest's file")
        with closing(open_run(wishes.run, wishes.model)) as run:
            _check(wishes, run, identity)
            settings = _settings(wishes, place, seeds=(*wishes.seeds, *run.told.seeds))
            _started(events, wishes, identity, {"run": run.id.hex(), "name": run.told.name})
            events.board.describe_run(_in_short(run))
            trio.run(partial(_take_part, wishes, run, identity, settings, place.run(run.id), events))


def _settings(
    wishes: Wishes, place: StateFolder, *, seeds: tuple[str, ...] | None = None, **more: Any
) -> SwarmSettings:
    return SwarmSettings(
        listen=wishes.listen,
        seeds=wishes.seeds if seeds is None else tuple(dict.fromkeys(seeds)),
        book=place.book,
        lan=wishes.lan,
        announce=wishes.announce,
        **more,
    )


def _check(wishes: Wishes, run: Run, identity: Identity) -> None:
    """What can be known before anything is started."""
    named = {"trainer": run.told.trainers, "verifier": run.told.verifiers}.get(wishes.role)
    if named is not None and identity.public not in named:
        raise ConfigError(
            f"the key {identity.peer_id} is none of the run's {wishes.role}s",
            advice=f"its author must name it, or --state must be the folder of one of {len(named)} that are named",
        )
    allowed = [tolerance.engine for tolerance in run.told.engines]
    if wishes.engine is not None and wishes.engine not in allowed:
        raise ConfigError(
            f"this run does not take groups of the engine class {wishes.engine}",
            advice=f"take one of {', '.join(allowed)}",
        )


def _in_short(run: Run) -> dict[str, Any]:
    told = run.told
    return {
        "id": run.id.hex(),
        "name": told.name,
        "author": peer_id(run.manifest.signer),
        "contract": f"{told.contract.name} {told.contract.version}",
        "mode": "sequential" if told.sync.async_from is None else "async",
        "staleness": told.sync.staleness,
        "group_size": told.sampling.group_size,
        "model_bytes": 2
        * sum(math.prod(tensor.shape) for tensor in layout_of(read_model(run.folder)).tensors),
    }


def _started(events: Events, wishes: Wishes, identity: Identity, run: Mapping[str, str]) -> None:
    of = f" of {run['name']}" if run else ""
    events.tell(
        "started",
        f"{wishes.role}{of}: this node is {identity.peer_id}, its state is in {wishes.state}",
        role=wishes.role,
        peer_id=identity.peer_id,
        state=str(wishes.state),
        **run,
    )


async def _seed(identity: Identity, settings: SwarmSettings, events: Events) -> None:
    async with program.until_told_to_stop(), Place(settings, events).take(identity):
        await _sit()
    events.tell("stopped", "stopped", finished=False)


async def _sit() -> None:
    await trio.sleep_forever()


async def _take_part(
    wishes: Wishes, run: Run, identity: Identity, settings: SwarmSettings, folder: Path, events: Events
) -> None:
    place = Place(settings, events)
    node = Node(run, identity, place.take, folder=folder, spread="speed")
    finished = False
    async with program.until_told_to_stop(), trio.open_nursery() as nursery:
        nursery.start_soon(_tell_progress, node, place, events)
        await _work(wishes, node, folder, events)
        finished = True
        nursery.cancel_scope.cancel()
    events.tell("stopped", "the steps are done" if finished else "stopped", finished=finished)


async def _work(wishes: Wishes, node: Node, folder: Path, events: Events) -> None:
    if wishes.role == "trainer":
        await node.train(
            wishes.steps or WITHOUT_END,
            records=Records(writers=[ToldSteps(events)]),
            first_samplers=wishes.first_samplers,
            threads=wishes.threads or 1,
            promote=wishes.promote,
        )
    elif wishes.role == "verifier":
        with Ledger(folder / "ledger.sqlite") as ledger:
            await node.verify(threads=wishes.threads, ledger=ledger)
    else:
        await node.sample(slots_per_call=wishes.slots, engine_class=wishes.engine, threads=wishes.threads)


async def _tell_progress(node: Node, place: Place, events: Events) -> None:
    """Say how it goes whenever that has changed, and once that this node has joined. People hear of it less often."""
    before: dict[str, Any] = {}
    joined = False
    alone = 0
    for second in itertools.count(1):
        await trio.sleep(PROGRESS_SECONDS)
        if place.network is None:
            continue
        now = {"peers": len(place.network.peers()), **node.status()}
        events.board.describe_swarm(node.swarm(place.network), place.network.reach.one_line())
        alone = 0 if now["peers"] else alone + 1
        if alone == ALONE:
            events.tell(
                "alone", "nobody can be reached: does a seed of the run's swarm run? give it by --seed"
            )
        if now.get("joined") and not joined:
            joined = True
            events.tell("joined", "this node is in the roster, and samples", version=now["version"])
        if now != before:
            events.tell("progress", _in_words(now) if second % WORDS_EVERY == 0 else "", **now)
        before = now


def _in_words(now: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in now.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{inner} {name}" for name, inner in value.items()) + ")" if value else "none"
    return str(value)
