"""One node: an identity, a place in a swarm, and a role in a run. Here the rooms are put together, and nowhere else.

A node knows how to get onto a network (`join`, such as a swarm's own method) and owns every task of its role: leaving
`sample` or `train` ends them all.
"""

from __future__ import annotations

import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

from echo_node import __version__
from echo_node.admission import Admitted
from echo_node.allowance import EVERYTHING, Allowance
from echo_node.attesting import attest, into_ledger
from echo_node.engine.base import Engine
from echo_node.engine.kinds import EngineSpec, best_class
from echo_node.engine.worker import WorkerEngine
from echo_node.errors import ConfigError
from echo_node.introducing import introduce
from echo_node.ledger import Entry, Ledger
from echo_node.metrics import Rate, Records
from echo_node.net.base import Mute, Network
from echo_node.net.meeting.company import SEVERAL, Company
from echo_node.net.outbox.outbox import Outbox, open_outbox
from echo_node.net.throttle import Throttle, Uplink
from echo_node.pausing import Gate
from echo_node.records import RecordsFile, read_records
from echo_node.run import Run, read_model
from echo_node.sampler.crediting import open_crediting
from echo_node.sampler.loop import SamplerLoop
from echo_node.terms.voting import VoteBox
from echo_node.terms.watching import Watch
from echo_node.threads import run_abandonable
from echo_node.verifier.loop import VerifierLoop
from echo_node.verifier.twice import Twice
from echo_node.weights.handing import Handing
from echo_node.weights.opening import open_store
from echo_node.weights.papers import write_papers
from echo_node.weights.publish import Publisher
from echo_node.weights.pull import Puller
from echo_node.weights.state import layout_of
from echo_node.weights.store import WeightsStore
from echo_node.writers import open_writer
from protocol import Identity, Manifest, Opened, Verdict, peer_id, topics

if TYPE_CHECKING:
    from echo_node.trainer.ranks import Ranks
    from echo_node.trainer.step import TrainStep

MOST_ROWS: Final = 128
"""Completions that an engine draws at once."""
OPEN: Final = "open"
"""A file in a trainer's folder of a run: while it is there, anybody may find the run."""
MOST_PEERS: Final = 500
"""That a picture of the swarm has."""
Joining = Callable[[Identity], AbstractAsyncContextManager[Network]]


class Node:
    """A peer of a run. `luck` gives the random bytes of heads, for a trainer.

    With a `folder`, what the node holds is there, and it goes on from it after a restart; without one it is gone afterwards.
    `spread` is how a trainer that asks shares out a batch: evenly, which repeats exactly, or by the speed that it measures.
    While the `gate` is closed, its role begins nothing. `ranks` are the processes that a trainer computes in, if it is not this one.
    """

    def __init__(
        self,
        run: Run,
        identity: Identity,
        join: Joining,
        *,
        luck: Callable[[], bytes] = lambda: secrets.token_bytes(32),
        folder: Path | None = None,
        spread: Literal["even", "speed"] = "even",
        gate: Gate | None = None,
        allowance: Allowance = EVERYTHING,
        ranks: Ranks | None = None,
    ) -> None:
        self._run = run
        self._identity = identity
        self._join = join
        self._luck = luck
        self._folder = folder
        self._spread = spread
        self._gate = gate or Gate()
        self._allowance = allowance
        self._ranks = ranks
        self._uplink = Uplink(allowance.up)
        self._downlink = Throttle(allowance.down)
        self.tokens = Rate()
        """Tokens generated or admitted, by the second."""
        self.verdicts: Counter[str] = Counter()
        """What groups were found to be, for a verifier."""
        self.status: Callable[[], Mapping[str, Any]] = dict
        """How it goes, in plain numbers; nothing before the role has begun."""
        self.unheard: Callable[[], Mapping[bytes, Mute]] = dict
        """Peers that the network hears and the role does not, for now."""
        self._role = "peer"
        self._members: Callable[[], Mapping[bytes, Mapping[str, Any]]] = dict
        """The samplers that this node knows of, with what it knows of them."""

    def swarm(self, network: Network) -> list[dict[str, Any]]:
        """Whom this node knows of the run: itself, who is named in the manifest, its samplers, and who is connected."""
        told, members, connected, mutes = self._run.told, self._members(), network.peers(), network.mutes()
        roles = dict.fromkeys(members, "sampler") | {self._identity.public: self._role}
        roles |= dict.fromkeys(told.verifiers, "verifier") | dict.fromkeys(told.trainers, "trainer")
        return [
            {
                "peer_id": peer_id(key),
                "role": roles.get(key, "peer"),
                "me": key == self._identity.public,
                "connected": key in connected or key == self._identity.public,
                "muted": ", ".join(sorted(mutes[key].reasons)) if key in mutes else None,
                **members.get(key, {}),
            }
            for key in sorted({self._identity.public, *roles, *connected, *mutes})[:MOST_PEERS]
        ]

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def told(self) -> Manifest:
        """What the run's manifest says."""
        return self._run.told

    async def sample(
        self,
        *,
        slots_per_call: int = 16,
        engine: Engine | None = None,
        engine_class: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Be a sampler until cancelled. Without an engine one is started in a process of its own: of the class that is
        named, or the best that the run allows.
        """
        self._role = "sampler"
        chosen_class = engine_class or (self.best_class() if engine is None else "")
        async with (
            self._worker(chosen_class, slots_per_call * self._run.told.sampling.group_size, threads)
            if engine is None
            else nullcontext(engine) as chosen,
            self._join(self._identity) as network,
            self._store(network) as store,
            self._outbox() as outbox,
            open_crediting(self._folder, self._run, self._identity) as crediting,
        ):
            puller = self._puller(network, store)
            watch = Watch(network, puller.hearing, self._run.told.terms)
            loop = SamplerLoop(
                self._run,
                network,
                self._identity,
                chosen,
                puller,
                outbox,
                slots_per_call=slots_per_call,
                agent=f"echo-node/{__version__}",
                lease=watch.lease,
                gate=self._gate,
                crediting=crediting,
            )
            self.tokens = loop.tokens
            self.status = lambda: {**loop.status(), "clock": watch.clock}
            async with watch.work(), self._company(network, "sampler", needed=("trainer", "verifier")):
                await loop.work()

    async def verify(
        self, *, engine: Engine | None = None, threads: int | None = None, ledger: Ledger | None = None
    ) -> None:
        """Be a verifier until cancelled: the run must name this node's key as one. Without an engine, torch in float32 is started.

        What was found is written down in the ledger.
        """
        if self._identity.public not in self._run.told.verifiers:
            raise ConfigError("this key is none of the run's verifiers", advice="its author must name it")
        async with (
            self._worker("torch/f32", self._run.told.sampling.group_size, threads)
            if engine is None
            else nullcontext(engine) as judge,
            self._join(self._identity) as network,
            self._store(network) as store,
        ):

            def note(admitted: Admitted, verdict: Opened[Verdict]) -> None:
                head = store.find(admitted.group.message.heads[0])
                if ledger is not None and head is not None:
                    ledger.verdict(verdict, Entry.of(admitted.group, head.message.version))

            puller = self._puller(network, store)
            loop = VerifierLoop(
                self._run,
                network,
                self._identity,
                judge,
                puller,
                told=note,
                gate=self._gate,
                condemned=self._condemned,
            )
            self.verdicts = loop.results
            with tempfile.TemporaryDirectory(prefix="echo-votes-") as passing:
                box = VoteBox((self._folder or Path(passing)) / "votes", self._identity, self._run.id)
                watch = Watch(network, puller.hearing, self._run.told.terms, box=box, held=lambda: store.tip)
                self.status = lambda: {
                    "version": _version_of(store),
                    "verdicts": dict(sorted(loop.results.items())),
                    "paused": list(self._gate.reasons),
                    "clock": watch.clock,
                }
                attesting = (
                    nullcontext()
                    if ledger is None
                    else attest(
                        network,
                        self._identity,
                        self._run.id,
                        into_ledger(ledger, network.public, self._run.id),
                    )
                )
                with attesting:
                    async with watch.work(), self._company(network, "verifier", needed=("trainer",)):
                        await loop.work()

    async def train(
        self,
        steps: int,
        *,
        records: Records,
        first_samplers: int = 1,
        threads: int = 1,
        folder: Path | None = None,
        checkpoint_every: int | None = None,
        writers: Iterable[str] = (),
        promote: bool = False,
        early: bool = False,
        linger: float = 0.0,
    ) -> None:
        """Be a trainer of the run, until it has had so many steps in all: lead it, or stand by until nobody else does.

        Where too few electors are named for that to happen by itself, `promote` is the operator's word for it.

        With a folder (the node's own, if no other is given) weights, journal, checkpoints and records are there, and a trainer
        that is started on it again goes on where the one before ended, however that was. `writers` are names of `echo_node.writers`,
        `early` and `linger` those of `TrainerLoop.work`.
        """
        from echo_node.trainer.journal import open_journal  # noqa: PLC0415
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415 - it needs torch, which a sampler may lack
        from echo_node.trainer.resuming import CHECKPOINT_EVERY  # noqa: PLC0415
        from echo_node.trainer.spreading import BySpeed  # noqa: PLC0415
        from echo_node.trainer.standby import Standby  # noqa: PLC0415
        from echo_node.trainer.verdicts import VerdictPolicy  # noqa: PLC0415

        layout = layout_of(read_model(self._run.folder))
        async with AsyncExitStack() as stack:
            place = folder or self._folder
            kept = place is not None
            if place is None:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-trainer-")))
            else:
                await trio.to_thread.run_sync(write_papers, place / "weights", self._run.manifest, layout)
            store = stack.enter_context(
                WeightsStore.open(place / "weights", self._run.rules, layout)
                if kept
                else WeightsStore.temporary(self._run.rules, layout)
            )
            journal = await stack.enter_async_context(
                open_journal(place / "journal.sqlite" if kept else None, self._run.id)
            )
            if kept:
                records.recall(read_records(place / "records.sqlite"))
                stack.enter_context(records.writing_to(RecordsFile(place / "records.sqlite")))
            for name in writers:
                writer = open_writer(name, self._run.id.hex()[:16], place)
                stack.enter_context(records.writing_to(writer))
            network = await stack.enter_async_context(self._join(self._identity))
            standby = Standby(
                self._run,
                network,
                self._identity,
                store,
                place,
                journal,
                uplink=self._uplink,
                downlink=self._downlink,
            )
            self.status = lambda: {
                "version": _version_of(store),
                "held": store.tip.message.version if store.tip else None,  # from which it could go on
                "leading": False,
                "clock": standby.clock,
            }
            if promote:
                standby.promote()

            async def lead() -> None:
                async with self._step(threads) as step, self._own_look(store, threads) as look:
                    loop = TrainerLoop(
                        self._run,
                        network,
                        self._identity,
                        step=step,
                        publisher=Publisher(store, self._identity, luck=self._luck),
                        records=records,
                        journal=journal,
                        policy=VerdictPolicy(self._run, self._identity, check=look),
                        checkpoints=place / "checkpoints" if kept else None,
                        checkpoint_every=checkpoint_every or CHECKPOINT_EVERY,
                        spread=BySpeed() if self._spread == "speed" else None,
                        gate=self._gate,
                        uplink=self._uplink,
                    )
                    self.tokens = loop.tokens
                    self.status = lambda: {**loop.status(), "leading": True}
                    self.unheard = loop.unheard
                    self._members = loop.members
                    await loop.work(steps, first_samplers=first_samplers, early=early, linger=linger)

            stack.enter_context(attest(network, self._identity, self._run.id, journal.sums))
            await stack.enter_async_context(self._company(network, "trainer", needed=("trainer", "verifier")))
            await standby.take_turns(lead)

    @asynccontextmanager
    async def _step(self, threads: int) -> AsyncGenerator[TrainStep]:
        """The policy in training. Under torchrun it is spread over the ranks, of which this is the first."""
        from echo_node.trainer.ranks import Ranks  # noqa: PLC0415 - it needs torch, which a sampler may lack
        from echo_node.trainer.settings import training_settings  # noqa: PLC0415

        settings = training_settings(self._run.told).step
        opening = (self._ranks or Ranks()).open_step(
            self._run.folder, settings, threads=threads, device=self._allowance.device
        )
        step = await run_abandonable(opening.__enter__)
        with ExitStack() as stack:
            stack.push(opening.__exit__)  # it sees how the block ended, as if it had been entered here
            yield step

    @asynccontextmanager
    async def _own_look(
        self, store: WeightsStore, threads: int
    ) -> AsyncGenerator[Callable[[Admitted], str | None] | None]:
        """How the trainer looks at groups itself, where the run says that it does: by a verifier's judge."""
        told = self._run.told.verification
        if told.policy != "self" or told.share <= 0:
            yield None
            return
        async with self._worker("torch/f32", 1, threads) as engine:
            judge = Twice(self._run, Handing(store, engine), self._condemned)

            def look(admitted: Admitted) -> str | None:
                finding = judge.judge(admitted)
                breach = finding.breach if finding else None
                return breach.reason if breach and breach.sure else None

            yield look

    @property
    def _condemned(self) -> Path | None:
        """Where it is kept what was found of dishonest groups."""
        return self._folder / "condemned" if self._folder else None

    @asynccontextmanager
    async def _store(self, network: Network) -> AsyncGenerator[WeightsStore]:
        """The weights that this node follows."""
        folder = self._folder / "weights" if self._folder else None
        async with open_store(
            folder, self._run.rules, network, model=self._run.folder, manifest=self._run.manifest
        ) as store:
            yield store

    def _puller(self, network: Network, store: WeightsStore) -> Puller:
        """Weights in and out, no faster than is allowed."""
        return Puller(
            network,
            store,
            uplink=self._uplink,
            downlink=self._downlink,
            files=self._run.files(),
            versions=self._run.told.sync.staleness + 2,
        )

    @asynccontextmanager
    async def _outbox(self) -> AsyncGenerator[Outbox]:
        """What must arrive."""
        with tempfile.TemporaryDirectory(prefix="echo-outbox-") as passing:
            async with open_outbox((self._folder or Path(passing)) / "outbox.sqlite") as outbox:
                yield outbox

    def best_class(self) -> str:
        """The fastest engine of this machine that the run allows."""
        return best_class({tolerance.engine for tolerance in self._run.told.engines}, self._allowance.device)

    @asynccontextmanager
    async def _company(self, network: Network, role: str, needed: Iterable[str]) -> AsyncGenerator[None]:
        """Be found in a role, introduce newcomers, and keep a way to those that it works with, as long as the block lasts."""
        keys = {topics.role_key(self._run.id, each): SEVERAL for each in needed}
        company = Company(network, announced=[topics.role_key(self._run.id, role)], needed=keys)

        def is_open() -> bool:
            return role == "trainer" and self._folder is not None and (self._folder / OPEN).exists()

        async with introduce(network, self._run.manifest, is_open), trio.open_nursery() as nursery:
            nursery.start_soon(company.keep)
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _worker(
        self, engine_class: str, completions: int, threads: int | None
    ) -> AsyncGenerator[Engine]:
        """An engine in a process of its own, for as long as the block lasts."""
        rows = max(1, min(MOST_ROWS, completions))
        spec = EngineSpec(
            engine_class, self._run.folder, device=self._allowance.device, rows=rows, threads=threads
        )
        engine = WorkerEngine(spec, memory_bytes=self._allowance.memory)
        try:
            await run_abandonable(engine.start)
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(engine.close)


def _version_of(store: WeightsStore) -> int | None:
    tip = store.follower.tip
    return tip.message.version if tip else None
