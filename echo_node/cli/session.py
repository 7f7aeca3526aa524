"""One node on the real network: lock the state, join the swarm, run the role."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console

from echo_node.cli import progress
from echo_node.cli.code_consent import check_code_consent
from echo_node.cli.join_options import JoinOptions, check_manifest
from echo_node.contract.code_folder import WHEELS
from echo_node.control.server import NodeControl, under_control
from echo_node.credit.ledger import Ledger
from echo_node.engine.engine_classes import device_of
from echo_node.engine.host_resources import free_cores
from echo_node.errors import ConfigError
from echo_node.models.folder import map_folder
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.node import Node
from echo_node.runs.dataset import FILE as DATA_FILE
from echo_node.runs.engine_selection import select_engine
from echo_node.runs.model_download import download_data_and_code, download_run
from echo_node.runs.resolve import ResolvedRun, fetch_manifest, resolve_run
from echo_node.runs.run import Run
from echo_node.runs.spec import model_folder, open_run, read_manifest
from echo_node.runs.tolerance_report import describe_tolerances, far_wider
from echo_node.runtime import exit_codes
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import watch_disk
from echo_node.runtime.threads import run_abandonable
from echo_node.storage import state_dir as state
from echo_node.storage.state_dir import StateDir, backup_reminder
from echo_node.telemetry.events import Events, StepEvents, report_mutes, report_progress, warn_if_alone
from echo_node.telemetry.metrics import Records
from protocol import Identity, Manifest, peer_id

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks

DRAIN_SECONDS: Final = 10.0
"""Time to deliver finished groups when leaving; the rest stays on disk for the next start."""
LINGER_SECONDS: Final = 3.0
"""Time for others to fetch the last version of a trainer that is done."""
WITHOUT_END: Final = 1_000_000_000
"""Steps of a trainer without --steps."""


def join(options: JoinOptions, events: Events, ranks: Ranks | None = None) -> None:
    """Take part until the steps are done or a signal comes.

    Raise an `EchoError` on failure. `ranks` are the processes that a trainer computes in, if it is
    not this one alone.
    """
    with state.opened(options.state) as place:
        session = _Session(options, place, events, ranks)
        if options.role == "bootstrap":
            session.start()
            trio.run(session.seed)
            return
        found = resolve_run(options.run, session.identity)
        if isinstance(found, ResolvedRun):
            session.check_reachable(found)
            session.start()
            trio.run(session.take_part, found)
            return
        manifest = read_manifest(found)
        check_code_consent(place, manifest, options.allow_code, unsafe=options.unsafe)
        with closing(open_run(found, options.model, require=options.require)) as run:
            check_manifest(options, session.identity, run.manifest)
            session.start(run)
            trio.run(session.take_part, run)


class _Session:
    """One node, from its start to its end."""

    def __init__(self, options: JoinOptions, place: StateDir, events: Events, ranks: Ranks | None) -> None:
        self._options = options
        self._ranks = ranks
        self._place = place
        self._events = events
        self._gate = PauseGate(events.emit)
        self._node: Node | None = None
        self._network: Libp2pNetwork | None = None
        self._key_is_new = not place.key.exists()
        self.identity = place.identity()

    def check_reachable(self, wanted: ResolvedRun) -> None:
        if self._options.seeds or wanted.seeds or self._options.lan or self._place.book.exists():
            return
        what = "no run was given" if wanted.id is None else "the run's manifest is not on this machine"
        raise ConfigError(
            f"{what}, and no peer is known to ask for it",
            advice="give a link, a run's folder or its manifest's file, or a peer with --seed",
        )

    def start(self, run: Run | None = None) -> None:
        options = self._options
        of: Mapping[str, str] = {"run": run.id.hex(), "name": run.manifest.name} if run else {}
        self._events.emit(
            "started",
            f"{options.role}{f' of {run.manifest.name}' if run else ''}: this node is {self.identity.peer_id}, "
            f"its state is in {options.state}",
            role=options.role,
            peer_id=self.identity.peer_id,
            state=str(options.state),
            **of,
        )
        if run is not None:
            self._report_tolerances(run.manifest)
            self._report_jail(run)
        if self._key_is_new:
            options.offer_backup(self._place)

    async def seed(self) -> None:
        """Run a bootstrap node, at which others meet."""
        async with self._online(self._settings().for_seed()) as network:
            await report_mutes(network.mutes, self._events)
        self._events.emit("stopped", "stopped", finished=False)

    async def take_part(self, source: Run | ResolvedRun) -> None:
        """Run the role in a run that is open, or that is fetched from peers first."""
        finished = False
        seeds = source.manifest.seeds if isinstance(source, Run) else source.seeds
        async with self._online(self._settings(*seeds)) as network:
            if isinstance(source, Run):
                await self._work(source, network)
            else:
                run = await self._fetch_run(source, network)
                with closing(run):
                    await self._work(run, network)
            finished = True
        self._events.emit("stopped", "the steps are done" if finished else "stopped", finished=finished)

    # The swarm

    def _settings(self, *seeds: str) -> SwarmSettings:
        options = self._options
        return SwarmSettings(
            listen=options.listen,
            seeds=options.seeds,
            run_seeds=seeds,
            book=self._place.book,
            lan=options.lan,
            announce=options.announce,
            bulk_port=options.bulk_port,
        )

    @asynccontextmanager
    async def _online(self, settings: SwarmSettings) -> AsyncGenerator[Libp2pNetwork]:
        """Join the swarm, with signals, the control socket and, if asked for, the page."""
        options, board = self._options, self._events.board
        async with (
            under_control(
                options.state,
                board,
                self._gate,
                waiting=self._waiting,
                drain=DRAIN_SECONDS,
                battery=options.battery,
            ) as control,
            exit_codes.until_stop_signal(first=None if options.role == "bootstrap" else control.leave),
            self._page(control),
            join_swarm(self.identity, settings) as network,
        ):
            self._network = network
            found = network.addresses
            words = f"reachable at {', '.join(found) or 'no address yet'}"
            bulk = network.bulk.port if network.bulk else None
            if bulk is not None:
                words = f"{words}; large blobs at port {bulk}"
            self._events.emit("listening", words, addresses=found, bulk_port=bulk)
            if not self._events.as_json and (reminder := backup_reminder(self._place)) is not None:
                self._events.aside(reminder)
            yield network

    def _waiting(self) -> int:
        """Count undelivered groups of a sampler, or an unpublished step of a trainer."""
        if self._node is None or self._network is None:
            return 0
        if self._options.role != "sampler":
            return int(self._node.status().get("learning", False))
        reachable = self._network.peers() & {*self._node.manifest.trainers}
        return int(self._node.status().get("waiting", 0)) if reachable else 0

    @asynccontextmanager
    async def _page(self, control: NodeControl) -> AsyncGenerator[None]:
        options = self._options
        if options.page is None:
            yield
            return
        from echo_node.dashboard import serve_page

        token = secrets.token_urlsafe(16) if options.page_token else None
        serve = partial(serve_page, self._events.board, port=options.page, token=token, control=control)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(serve)
            self._events.emit("page", f"page at {url}", url=url)
            if token:  # never as an event: the page shows those to every visitor
                self._events.aside(f"page with buttons at {url}#token={token}")
            yield
            nursery.cancel_scope.cancel()

    # The run

    async def _fetch_run(self, wanted: ResolvedRun, network: Libp2pNetwork) -> Run:
        """Get a run from peers: its manifest, the person's consent, its model and weights."""
        options, emit = self._options, self._events.emit
        emit("seeking", "asking peers for the run")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(warn_if_alone, network, self._events)
            manifest = await fetch_manifest(network, wanted, options.choose)
            nursery.cancel_scope.cancel()
        check_manifest(options, self.identity, manifest.message)
        self._report_tolerances(manifest.message)
        if not await run_abandonable(partial(options.agree, manifest)):
            raise ConfigError("no consent to this run", advice="nothing was fetched and nothing was run")
        await run_abandonable(
            partial(check_code_consent, self._place, manifest, options.allow_code, unsafe=options.unsafe)
        )
        folder = self._place.run(manifest.id)
        if options.model is None:
            with progress.shown(self._events, Console(stderr=True)) as on_progress:
                model = await download_run(
                    network,
                    manifest,
                    folder,
                    link=wanted.link,
                    allowance=options.allowance,
                    on_progress=on_progress,
                )
        else:
            model = await trio.to_thread.run_sync(model_folder, options.model)
            await download_data_and_code(network, manifest.message, folder, allowance=options.allowance)
        opening = partial(
            Run.open,
            manifest.sealed,
            model,
            require=options.require,
            data=folder / DATA_FILE,
            wheels=folder / WHEELS,
        )
        run = await trio.to_thread.run_sync(opening)
        emit(
            "found",
            f"run {run.manifest.name}, by {peer_id(manifest.signer)}",
            run=run.id.hex(),
            name=run.manifest.name,
        )
        await trio.to_thread.run_sync(self._report_jail, run)
        return run

    async def _work(self, run: Run, network: Libp2pNetwork) -> None:
        folder = self._place.run(run.id)
        self._events.board.describe_run(_summary(run))

        def joined(_identity: Identity) -> AbstractAsyncContextManager[Libp2pNetwork]:
            return nullcontext(network)

        self._node = node = Node(
            run,
            self.identity,
            joined,
            folder=folder,
            spread="speed",
            gate=self._gate,
            allowance=self._options.allowance,
            ranks=self._ranks,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report_progress, node, network, self._events)
            nursery.start_soon(report_mutes, lambda: node.mutes(network), self._events)
            nursery.start_soon(watch_disk, self._gate, self._place.size, self._options.allowance)
            await self._do_role(node, run, folder)
            nursery.cancel_scope.cancel()

    def _report_tolerances(self, manifest: Manifest) -> None:
        """Emit the run's engine tolerances beside the known ones, and which are far wider."""
        wider = far_wider(manifest.engines)
        warning = (
            f". Far wider than known: {', '.join(wider)}; in such bands verifiers may take a cheat for honest"
        )
        self._events.emit(
            "tolerances",
            f"engine tolerances: {describe_tolerances(manifest.engines)}{warning if wider else ''}",
            engines=[asdict(each) for each in manifest.engines],
            far_wider=wider,
        )

    def _report_jail(self, run: Run) -> None:
        """Emit the isolation layers that hold for the run's contract.

        Those that do not hold are named with the reason.
        """
        layers = run.jail()
        holds = [layer.name for layer in layers if layer.active]
        lacks = {layer.name: layer.why_not for layer in layers if not layer.active}
        without = "; not active: " + ", ".join(f"{name} ({why})" for name, why in lacks.items())
        self._events.emit(
            "jail",
            f"the contract runs behind {', '.join(holds) or 'no layer'}{without if lacks else ''}",
            active=holds,
            missing=lacks,
        )

    async def _do_role(self, node: Node, run: Run, folder: Path) -> None:
        options = self._options
        if options.role == "trainer":
            await node.train(
                options.steps or WITHOUT_END,
                records=Records(writers=[StepEvents(self._events)]),
                first_samplers=options.first_samplers,
                threads=options.threads or 1,
                promote=options.promote,
                writers=options.log,
                early=True,
                linger=LINGER_SECONDS,
            )
        elif options.role == "verifier":
            with Ledger(folder / "ledger.sqlite") as ledger:
                await node.verify(threads=options.threads, ledger=ledger)
        else:
            choice = await run_abandonable(
                partial(select_engine, run, options.allowance, options.engine, options.slots)
            )
            engine, slots, threads = choice.engine_class, choice.slots, options.threads or free_cores()
            device = device_of(engine, options.allowance.device)
            self._events.emit(
                "engine",
                f"sampling with {engine} (device {device}, {threads} threads, {slots} groups at a time): {choice.why}",
                engine=engine,
                device=device,
                threads=threads,
                slots=slots,
            )
            await node.sample(slots_per_call=slots, engine_class=engine, threads=options.threads)


def _summary(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "id": run.id.hex(),
        "name": manifest.name,
        "author": peer_id(run.sealed_manifest.signer),
        "contract": f"{manifest.contract.name} {manifest.contract.version}",
        "mode": "sequential" if manifest.sync.async_from is None else "async",
        "staleness": manifest.sync.staleness,
        "group_size": manifest.sampling.group_size,
        "model_bytes": 2 * sum(math.prod(tensor.shape) for tensor in map_folder(run.folder).values()),
    }
