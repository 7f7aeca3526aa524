"""The demo as people would run it: a seed, a trainer, a verifier and samplers, each `echo-node join` in a process of its own.

They meet on the loopback, keep their state in one folder, and have keys that the demo's seed decides. It starts them, reads
what they say, and ends them; it does none of their work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import trio

from echo_node import embedded
from echo_node.config import DemoConfig
from echo_node.demo.children import Child, end_all, node
from echo_node.demo.member import CHEAT
from echo_node.demo.standing import Member
from echo_node.engine.kinds import check_class
from echo_node.errors import ConfigError, EngineError, StoreError, boundary
from echo_node.metrics import Records
from echo_node.records import read_records
from echo_node.run import read_model
from echo_node.runfile import RunFile, SamplingTable, SyncTable, VerificationTable, new_run, write_run
from echo_node.state import prepared
from protocol import Identity, derive, open_manifest

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
SEED_SECONDS: Final = 60.0
FIRST_STEP_SECONDS: Final = 240.0
STEP_SECONDS: Final = 120.0
"""Without a step for so long, something is wrong."""
END_SECONDS: Final = 6.0
"""For everybody to end in order."""
LOOK_SECONDS: Final = 0.5
UNVOUCHED: Final = 0.1
"""In a swarm with cheats: the part of a batch that no verifier has vouched for, or that the trainer looks at itself."""
CHEATS: Final = {"cheat-1": "luck", "cheat-2": "answers"}
"""By name, how each cheats."""


class SwarmDemo:
    """A demo of processes that runs or has run. Views read it; `folder` is where everybody's state is."""

    def __init__(
        self, config: DemoConfig, records: Records, folder: Path, *, page: int | None = None
    ) -> None:
        """`page` is the port of the trainer's page, 0 for any; without one there is no page."""
        self.config = config
        self._page_port = page
        self.page = ""
        """Where the trainer's page is, once it is there."""
        self.records = records
        self.folder = folder
        self.members: list[Member] = []
        self.model_bytes = sum(len(tensor.data) for tensor in read_model(embedded.folder()).values())
        self.failure: str = ""
        """Why it came to nothing, in words."""
        self.last_words: list[str] = []
        self._children: dict[str, Child] = {}
        self._run = folder / "run"
        self._run_id = b""
        self._news = trio.Event()
        self._began = time.monotonic()
        self._took: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began if self._took is None else self._took

    @property
    def tokens_per_second(self) -> float:
        """What all samplers generate together."""
        return sum(member.tokens_per_second for member in self.members if member.role == "sampler")

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def prepare(self) -> None:
        """The run, and everybody's key. What cannot be is an error here, before anything is started."""
        trainer, verifier = self._make_key("trainer"), self._make_key("verifier")
        config = self.config
        told = RunFile(
            name="demo: reverse five digits",
            trainers=[trainer.peer_id],
            verifiers=[verifier.peer_id],
            engines=[] if config.engine == "auto" else [config.engine],
            sampling=SamplingTable(group_size=config.group_size, temperature=config.temperature),
            sync=SyncTable(mode=config.mode, staleness=config.staleness, in_flight=config.in_flight),
            verification=self._verification(),
            algorithm={"batch_groups": config.batch_groups, **config.algorithm},
        )
        sealed = new_run(told, trainer, nonce=self._bytes("nonce"))
        opened = open_manifest(sealed)
        for engine in self._engines():
            check_class(engine)
        self._run_id = opened.id
        write_run(self._run, told, sealed)

    def _verification(self) -> VerificationTable:
        """A trainer that asks looks itself, so that no step waits for a verdict; else verifiers vouch while groups wait."""
        if not self.config.hostile:
            return VerificationTable()
        policy: Literal["self", "sampled"] = "self" if self.config.mode == "sequential" else "sampled"
        return VerificationTable(policy=policy, share=UNVOUCHED)

    async def play(self) -> None:
        """Let the swarm take its steps. Afterwards no process is left, whatever ended it."""
        async with trio.open_nursery() as nursery:
            try:
                await self._play(nursery)
            finally:
                self._took = self.seconds
                await end_all(list(self._children.values()), END_SECONDS)
                with trio.CancelScope(shield=True):
                    await self._read_records()
            nursery.cancel_scope.cancel()

    def kill(self) -> None:
        """End every process at once."""
        for child in self._children.values():
            child.kill()

    async def _play(self, nursery: trio.Nursery) -> None:
        seed = self._start(nursery, "seed", "bootstrap")
        with trio.move_on_after(SEED_SECONDS):
            while not seed.addresses and not self.failure:
                await self._news.wait()
        if not seed.addresses:
            self._fail("seed", "it did not open its door in time")
            return
        engines = self._engines()
        cheats = CHEATS if self.config.hostile else {}
        met = ("--seed", seed.addresses[0], str(self._run))
        slots = ("--slots", str(max(1, self.config.batch_groups // len(engines))))
        trainer = self._start(
            nursery,
            "trainer",
            "trainer",
            *("--steps", str(self.config.steps), "--first-samplers", str(len(engines) + len(cheats))),
            *(() if self._page_port is None else ("--page", str(self._page_port))),
            *met,
        )
        for number, engine in enumerate(engines, 1):
            name = f"sampler-{number}"
            self._start(nursery, name, "sampler", "--engine", engine, *slots, *met, engine=engine)
        self._start(nursery, "verifier", "verifier", *met)
        for name, way in cheats.items():
            self._start(nursery, name, "sampler", "--way", way, *slots, *met, cheat=way)
        await self._until_done(trainer)

    async def _until_done(self, trainer: Member) -> None:
        """Read steps as they come, until all are there or nothing comes any more."""
        while self._goes_on(trainer):
            known = trainer.steps
            with trio.move_on_after(STEP_SECONDS if known else FIRST_STEP_SECONDS) as waiting:
                while trainer.steps == known and self._goes_on(trainer):
                    await self._news.wait()
            if waiting.cancelled_caught:
                self._fail("trainer", "it has taken no step for a long time")
            await self._read_records()
            await trio.sleep(LOOK_SECONDS)

    def _goes_on(self, trainer: Member) -> bool:
        return not trainer.finished and not self.failure

    async def _read_records(self) -> None:
        """What the trainer has written of its steps, each once."""
        trainer = next((member for member in self.members if member.role == "trainer"), None)
        if trainer is None or not trainer.steps:
            return
        last = self.records.steps[-1].number if self.records.steps else 0
        file = self.folder / "trainer" / "runs" / self._run_id.hex() / "records.sqlite"
        for record in await trio.to_thread.run_sync(partial(read_records, file, after=last)):
            self.records.add(record)

    # Processes

    def _start(
        self, nursery: trio.Nursery, name: str, role: str, *words: str, engine: str = "", cheat: str = ""
    ) -> Member:
        key = self._make_key(name)
        member = Member(name, role, key.public, key.peer_id, engine=engine, cheat=cheat)
        command = [CHEAT] if cheat else ["join", "--role", role, "--threads", "1", "--json"]
        places = ("--listen", LOOPBACK, "--state", str(self.folder / name))

        def heard(event: Mapping[str, Any]) -> None:
            member.hear(event)
            if event["event"] == "page":
                self.page = str(event["url"])
            self._tell()

        child = Child(name, node([*command, *places, *words]), self.folder / f"{name}.log", heard)
        self.members.append(member)
        self._children[name] = child
        nursery.start_soon(self._listen, child, member)
        return member

    async def _listen(self, child: Child, member: Member) -> None:
        await child.listen()
        with trio.move_on_after(END_SECONDS):
            await child.ended()
        if not member.finished:
            self._fail(child.name, child.how_it_ended())
        self._tell()

    def _fail(self, name: str, how: str) -> None:
        """The first failure counts: others follow from it."""
        if not self.failure and self._took is None:
            self.failure = f"The {name} failed: {how}."
            self.last_words = self._children[name].last_words()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    # What the seed decides

    def _engines(self) -> Sequence[str]:
        """Of each sampler: torch and llama.cpp in turn, where both are installed."""
        if self.config.engine != "auto":
            return [self.config.engine] * self.config.samplers
        kinds = ["torch/f32"]
        try:
            check_class("llama/f16")
        except EngineError:
            pass
        else:
            kinds.append("llama/f16")
        return [kinds[number % len(kinds)] for number in range(self.config.samplers)]

    def _make_key(self, name: str) -> Identity:
        """The key of a node, in its folder."""
        seed = derive("demo", self.config.seed.to_bytes(8), f"identity of {name}".encode())
        place = self.folder / name
        with boundary(StoreError, f"making {place}"):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (place / "key").exists():
                descriptor = os.open(place / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(seed)
        return prepared(place).identity()

    def _bytes(self, name: str) -> bytes:
        """Bytes that only the seed and the name decide."""
        return derive("demo", self.config.seed.to_bytes(8), name.encode())


def check_together(config: DemoConfig) -> None:
    """Wishes that do not go together."""
    if config.hostile and config.in_memory:
        raise ConfigError("in memory nobody verifies", advice="leave out --in-memory to see cheats caught")
