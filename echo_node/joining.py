"""A node on the real network, from a person's word to its end: the state locked, the swarm joined, the run found and opened,
the role done, and what happens told as events, one after the other.

It puts rooms together that do the work, and does none of it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import trio
from rich.console import Console

from echo_node import fetching, program, state
from echo_node.allowance import EVERYTHING, Allowance
from echo_node.arriving import arrive
from echo_node.control.serving import NodeHand, under_control
from echo_node.engine.kinds import AUTO, best_class, check_device, device_of
from echo_node.engine.machine import free_cores
from echo_node.errors import ConfigError
from echo_node.events import Events, ToldSteps, tell_if_alone, tell_mutes, tell_progress
from echo_node.ledger import Ledger
from echo_node.metrics import Records
from echo_node.net.libp2p import Libp2pNetwork, SwarmSettings, join_swarm
from echo_node.node import Node
from echo_node.pausing import Gate
from echo_node.picking import pick
from echo_node.run import Run, read_model
from echo_node.runfile import model_folder, open_run
from echo_node.seeking import Choose, Sought, meant, seek
from echo_node.state import StateFolder, backup_reminder
from echo_node.threads import run_abandonable
from echo_node.weights.state import layout_of
from protocol import Identity, Manifest, Opened, peer_id

if TYPE_CHECKING:
    from echo_node.trainer.ranks import Ranks

Role: TypeAlias = Literal["sampler", "trainer", "verifier", "bootstrap"]
ROLES: Final[tuple[Role, ...]] = ("sampler", "trainer", "verifier", "bootstrap")
DISK: Final = "disk"
DISK_SECONDS: Final = 30.0
"""Between two looks at how much the state takes."""
DRAIN_SECONDS: Final = 10.0
"""For delivering what is made; what is not delivered then is on disk, and goes out at the next start."""
LINGER_SECONDS: Final = 3.0
"""In which others can take the last version of a trainer that is done."""
WITHOUT_END: Final = 1_000_000_000
"""Steps of a trainer that is not told how many to take."""


def _first(runs: Any) -> Opened[Manifest]:
    return runs[0]  # type: ignore[no-any-return]


def _agree(_manifest: Opened[Manifest]) -> bool:
    return True


def _leave_it(_place: StateFolder) -> None:
    return


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person asks for when a node joins. `run` is what `echo_node.seeking` reads; a bootstrap needs none.

    `page` is the port of the page, 0 for any that is free, none for no page. `agree` is asked whether to work for a run
    that was found on the network, and `choose` which of several; a node whose key is new calls `offer_backup`.
    """

    role: Role
    state: Path
    run: str | None = None
    model: str | None = None
    seeds: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    lan: bool = False
    engine: str | None = None
    threads: int | None = None
    slots: int | None = None
    steps: int | None = None
    first_samplers: int = 1
    promote: bool = False
    allowance: Allowance = EVERYTHING
    battery: bool = True
    page: int | None = None
    page_token: bool = False
    agree: Callable[[Opened[Manifest]], bool] = _agree
    choose: Choose = _first
    offer_backup: Callable[[StateFolder], None] = _leave_it


def join(wishes: Wishes, events: Events, ranks: Ranks | None = None) -> None:
    """Take part until the work is done or somebody says stop. What cannot be is an `EchoError`.

    `ranks` are the processes that a trainer computes in, if it is not this one alone.
    """
    with state.opened(wishes.state) as place:
        session = _Session(wishes, place, events, ranks)
        if wishes.role == "bootstrap":
            session.start()
            trio.run(session.seed)
            return
        found = meant(wishes.run, session.identity)
        if isinstance(found, Sought):
            session.check_that_somebody_can_be_asked(found)
            session.start()
            trio.run(session.take_part, found)
            return
        with closing(open_run(found, wishes.model)) as run:
            session.check(run.told)
            session.start(run)
            trio.run(session.take_part, run)


class _Session:
    """One node, from its start to its end."""

    def __init__(self, wishes: Wishes, place: StateFolder, events: Events, ranks: Ranks | None) -> None:
        self._wishes = wishes
        self._ranks = ranks
        self._place = place
        self._events = events
        self._gate = Gate(events.tell)
        self._node: Node | None = None
        self._network: Libp2pNetwork | None = None
        self._is_new = not place.key.exists()
        self.identity = place.identity()

    def check(self, told: Manifest) -> None:
        """What can be known before anything is done."""
        role, engine = self._wishes.role, self._wishes.engine
        named = {"trainer": told.trainers, "verifier": told.verifiers}.get(role)
        if named is not None and self.identity.public not in named:
            others = f", or --state must be the folder of one of the {len(named)} that are" if named else ""
            raise ConfigError(
                f"the key {self.identity.peer_id} is none of the run's {role}s",
                advice=f"its author must name it{others}",
            )
        allowed = [tolerance.engine for tolerance in told.engines]
        if engine is not None and engine not in allowed:
            raise ConfigError(
                f"this run does not take groups of the engine class {engine}",
                advice=f"take one of {', '.join(allowed)}",
            )
        device = self._wishes.allowance.device
        check_device(device)
        if role == "sampler" and device not in {AUTO, "cpu"}:
            chosen = engine or best_class(allowed, device)
            if device_of(chosen, device) != device:
                raise ConfigError(
                    f"engines of the class {chosen} compute on the CPU, not on {device}",
                    advice="leave out --device, or take an --engine of torch if the run allows one",
                )

    def check_that_somebody_can_be_asked(self, sought: Sought) -> None:
        if self._wishes.seeds or sought.seeds or self._wishes.lan or self._place.book.exists():
            return
        what = "a run is missing" if sought.id is None else "that run has to be asked for"
        raise ConfigError(
            f"{what}, and nobody is known who could be asked",
            advice="give a link, a run's folder or its manifest's file, or a node to ask by --seed",
        )

    def start(self, run: Run | None = None) -> None:
        wishes = self._wishes
        of: Mapping[str, str] = {"run": run.id.hex(), "name": run.told.name} if run else {}
        self._events.tell(
            "started",
            f"{wishes.role}{f' of {run.told.name}' if run else ''}: this node is {self.identity.peer_id}, "
            f"its state is in {wishes.state}",
            role=wishes.role,
            peer_id=self.identity.peer_id,
            state=str(wishes.state),
            **of,
        )
        if self._is_new:
            wishes.offer_backup(self._place)

    async def seed(self) -> None:
        """Be a node that others meet at."""
        async with self._at_home(self._settings().of_a_seed()) as network:
            await tell_mutes(network.mutes, self._events)
        self._events.tell("stopped", "stopped", finished=False)

    async def take_part(self, what: Run | Sought) -> None:
        """Do the role in a run, which is open already or has to be found first."""
        finished = False
        seeds = what.told.seeds if isinstance(what, Run) else what.seeds
        async with self._at_home(self._settings(*seeds)) as network:
            if isinstance(what, Run):
                await self._work(what, network)
            else:
                run = await self._find(what, network)
                with closing(run):
                    await self._work(run, network)
            finished = True
        self._events.tell("stopped", "the steps are done" if finished else "stopped", finished=finished)

    # A place in the swarm

    def _settings(self, *seeds: str) -> SwarmSettings:
        wishes = self._wishes
        return SwarmSettings(
            listen=wishes.listen,
            seeds=tuple(dict.fromkeys((*wishes.seeds, *seeds))),
            book=self._place.book,
            lan=wishes.lan,
            announce=wishes.announce,
        )

    @asynccontextmanager
    async def _at_home(self, settings: SwarmSettings) -> AsyncGenerator[Libp2pNetwork]:
        """Joined to the swarm, and within a person's reach: by signals, the control socket, and the page if it is wanted."""
        wishes, board = self._wishes, self._events.board
        async with (
            under_control(
                wishes.state,
                board,
                self._gate,
                waiting=self._waiting,
                drain=DRAIN_SECONDS,
                battery=wishes.battery,
            ) as hand,
            program.until_told_to_stop(first=None if wishes.role == "bootstrap" else hand.leave),
            self._page(hand),
            join_swarm(self.identity, settings) as network,
        ):
            self._network = network
            found = network.addresses
            words = f"others reach it at {', '.join(found) or 'no address yet'}"
            self._events.tell("listening", words, addresses=found)
            if not self._events.as_json and (reminder := backup_reminder(self._place)) is not None:
                self._events.aside(reminder)
            yield network

    def _waiting(self) -> int:
        """Groups that are made and not yet delivered; or a step that is taken and not yet published."""
        if self._node is None or self._network is None:
            return 0
        if self._wishes.role != "sampler":
            return int(self._node.status().get("learning", False))
        somebody = self._network.peers() & {*self._node.told.trainers}
        return int(self._node.status().get("waiting", 0)) if somebody else 0

    @asynccontextmanager
    async def _page(self, hand: NodeHand) -> AsyncGenerator[None]:
        wishes = self._wishes
        if wishes.page is None:
            yield
            return
        from echo_node.dashboard import serve_page  # noqa: PLC0415 - an extra

        token = secrets.token_urlsafe(16) if wishes.page_token else None
        serve = partial(serve_page, self._events.board, port=wishes.page, token=token, control=hand)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(serve)
            self._events.tell("page", f"the page is at {url}", url=url)
            if token:  # for this terminal alone: the page shows every event to whoever looks
                self._events.aside(f"with buttons it is at {url}#token={token}")
            yield
            nursery.cancel_scope.cancel()

    # The run

    async def _find(self, sought: Sought, network: Libp2pNetwork) -> Run:
        """A run that peers know of: its manifest, a person's word, and what else it takes to work in it."""
        wishes, tell = self._wishes, self._events.tell
        tell("seeking", "looking for the run among peers")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_if_alone, network, self._events)
            manifest = await seek(network, sought, wishes.choose)
            nursery.cancel_scope.cancel()
        self.check(manifest.message)
        if not await run_abandonable(partial(wishes.agree, manifest)):
            raise ConfigError("the run was not agreed to", advice="nothing was fetched and nothing was run")
        folder = self._place.run(manifest.id)
        if wishes.model is None:
            with fetching.shown(self._events, Console(stderr=True)) as tell_fetching:
                model = await arrive(
                    network,
                    manifest,
                    folder,
                    link=sought.link,
                    allowance=wishes.allowance,
                    tell=tell_fetching,
                )
        else:
            model = await trio.to_thread.run_sync(model_folder, wishes.model)
        run = await trio.to_thread.run_sync(Run.open, manifest.sealed, model)
        tell(
            "found",
            f"run {run.told.name}, by {peer_id(manifest.signer)}",
            run=run.id.hex(),
            name=run.told.name,
        )
        return run

    async def _watch_disk(self) -> None:
        """Pause while the state takes more than is allowed."""
        allowed = self._wishes.allowance.disk
        while allowed is not None:
            taken = await run_abandonable(self._place.size)
            (self._gate.close if taken > allowed else self._gate.open)(DISK)
            await trio.sleep(DISK_SECONDS)

    async def _work(self, run: Run, network: Libp2pNetwork) -> None:
        folder = self._place.run(run.id)
        self._events.board.describe_run(_in_short(run))

        def here(_identity: Identity) -> AbstractAsyncContextManager[Libp2pNetwork]:
            return nullcontext(network)

        self._node = node = Node(
            run,
            self.identity,
            here,
            folder=folder,
            spread="speed",
            gate=self._gate,
            allowance=self._wishes.allowance,
            ranks=self._ranks,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_progress, node, network, self._events)
            nursery.start_soon(tell_mutes, lambda: {**node.unheard(), **network.mutes()}, self._events)
            nursery.start_soon(self._watch_disk)
            await self._do_role(node, run, folder)
            nursery.cancel_scope.cancel()

    async def _do_role(self, node: Node, run: Run, folder: Path) -> None:
        wishes = self._wishes
        if wishes.role == "trainer":
            await node.train(
                wishes.steps or WITHOUT_END,
                records=Records(writers=[ToldSteps(self._events)]),
                first_samplers=wishes.first_samplers,
                threads=wishes.threads or 1,
                promote=wishes.promote,
                early=True,
                linger=LINGER_SECONDS,
            )
        elif wishes.role == "verifier":
            with Ledger(folder / "ledger.sqlite") as ledger:
                await node.verify(threads=wishes.threads, ledger=ledger)
        else:
            picked = await run_abandonable(partial(pick, run, wishes.allowance, wishes.engine, wishes.slots))
            engine, slots, threads = picked.engine_class, picked.slots, wishes.threads or free_cores()
            device = device_of(engine, wishes.allowance.device)
            self._events.tell(
                "engine",
                f"it samples with {engine} (device {device}, {threads} threads, {slots} groups at a time): {picked.why}",
                engine=engine,
                device=device,
                threads=threads,
                slots=slots,
            )
            await node.sample(slots_per_call=slots, engine_class=engine, threads=wishes.threads)


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
