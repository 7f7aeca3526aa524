"""Demo of processes: seed, trainer, verifier and samplers.

Each is an `echo-node join`. They connect over loopback and keep their state in one folder; their
keys follow from the demo's seed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal

import trio

from echo_node.config import DemoConfig
from echo_node.demo import CHEAT
from echo_node.demo.held_out import HeldOut, first_answers, last_answers
from echo_node.demo.node_status import NodeStatus
from echo_node.demo.subprocesses import Child, end_all, node_command
from echo_node.demo.task import task_of
from echo_node.engine.engine_classes import check_class
from echo_node.errors import ConfigError, EngineError, StoreError, boundary
from echo_node.runs.run import read_model
from echo_node.runs.spec import (
    RunSpec,
    SamplingTable,
    SyncTable,
    VerificationTable,
    model_folder,
    new_run,
    write_run,
)
from echo_node.runtime.threads import run_stoppable
from echo_node.storage.state_dir import prepared
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import read_records
from protocol import Identity, derive, open_manifest

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
SEED_SECONDS: Final = 60.0
"""Seconds for the seed to listen."""
FIRST_STEP_SECONDS: Final = 240.0
"""Seconds until the first step, after which the demo fails."""
STEP_SECONDS: Final = 120.0
"""Seconds between two steps, after which the demo fails."""
END_SECONDS: Final = 6.0
"""Seconds for all processes to end after SIGTERM."""
LOOK_SECONDS: Final = 0.5
"""Seconds between two readings of the step database."""
UNVOUCHED: Final = 0.1
"""With cheats, or where the verifier looks: share of a batch without a verdict, or share that the
trainer checks itself."""
CHEATS: Final = {"cheat-1": "luck", "cheat-2": "answers"}
"""Way of cheating by the sampler's name."""


class SwarmDemo:
    """A demo of processes, running or ended.

    `folder` holds the state of all nodes; `page` is the port of the trainer's page, 0 for any, or
    None for no page.
    """

    def __init__(
        self, config: DemoConfig, records: Records, folder: Path, *, page: int | None = None
    ) -> None:
        self.config = config
        self.task = task_of(config)
        self._page_port = page
        self.page = ""
        """Address of the trainer's page, once it is served."""
        self.records = records
        self.folder = folder
        self.members: list[NodeStatus] = []
        self.first: HeldOut | None = None
        """Answers to held-out prompts before the first step, where the task has such prompts."""
        self.last: HeldOut | None = None
        """Answers of the last version to the same prompts."""
        self.failure: str = ""
        """Why the demo failed, as a sentence; empty if it did not."""
        self.last_words: list[str] = []
        """Last log lines of the process that failed."""
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
        """Tokens per second of all samplers together."""
        return sum(member.tokens_per_second for member in self.members if member.role == "sampler")

    @cached_property
    def model_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in read_model(model_folder(self.task.model)).values())

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def prepare(self) -> None:
        """Make the run and all keys; errors come here, before anything is started."""
        trainer, verifier = self._make_key("trainer"), self._make_key("verifier")
        config, task = self.config, self.task
        spec = RunSpec(
            name=f"demo: {task.skill}",
            model=task.model,
            contract=task.contract,
            params=dict(task.params),
            trainers=[trainer.peer_id],
            verifiers=[verifier.peer_id],
            engines=[] if config.engine == "auto" else [config.engine],
            sampling=SamplingTable(
                group_size=config.group_size,
                max_tokens=task.max_tokens,
                temperature=config.temperature,
                stop=list(task.stop),
            ),
            sync=SyncTable(mode=config.mode, staleness=config.staleness, in_flight=config.in_flight),
            verification=self._verification(),
            evaluation=task.evaluation,
            algorithm={"batch_groups": config.batch_groups, **config.algorithm},
        )
        # Episodes must be replayable by all; the purity test finds the demo's environment so.
        made = new_run(spec, trainer, nonce=self._bytes("nonce"), pure=config.task is not None)
        opened = open_manifest(made.sealed)
        for engine in self._engines():
            check_class(engine)
        self._run_id = opened.id
        write_run(self._run, made)

    def _verification(self) -> VerificationTable:
        """Return the verification policy of the demo's run.

        A sequential trainer checks groups itself, so that it waits for no verdict. In asynchronous
        mode verdicts arrive while groups wait in the replay buffer.
        """
        if not self.config.hostile and not (self.task.verifier_looks and self.config.mode == "async"):
            return VerificationTable()
        policy: Literal["self", "sampled"] = "self" if self.config.mode == "sequential" else "sampled"
        return VerificationTable(policy=policy, share=UNVOUCHED)

    async def play(self) -> None:
        """Run the demo to its end; no process is left afterwards, whatever ended it."""
        if self.task.held_out:
            self.first = await run_stoppable(
                lambda stop: first_answers(self._run, self.task.held_out, self._engines()[-1], stop)
            )
        async with trio.open_nursery() as nursery:
            try:
                await self._play(nursery)
            finally:
                self._took = self.seconds
                await end_all(list(self._children.values()), END_SECONDS)
                with trio.CancelScope(shield=True):
                    await self._read_records()
            nursery.cancel_scope.cancel()
        if self.task.held_out and not self.failure:
            store = self.folder / "trainer" / "runs" / self._run_id.hex() / "weights"
            self.last = await run_stoppable(
                lambda stop: last_answers(self._run, store, self.task.held_out, self._engines()[-1], stop)
            )

    def kill(self) -> None:
        """Kill every process."""
        for child in self._children.values():
            child.kill()

    async def _play(self, nursery: trio.Nursery) -> None:
        seed = self._start(nursery, "seed", "bootstrap")
        with trio.move_on_after(SEED_SECONDS):
            while not seed.addresses and not self.failure:
                await self._news.wait()
        if not seed.addresses:
            self._fail("seed", f"it did not listen within {SEED_SECONDS:.0f} s")
            return
        engines = self._engines()
        cheats = CHEATS if self.config.hostile else {}
        joining = ("--seed", seed.addresses[0], str(self._run))
        slots = ("--slots", str(max(1, self.config.batch_groups // len(engines))))
        trainer = self._start(
            nursery,
            "trainer",
            "trainer",
            *("--steps", str(self.config.steps), "--first-samplers", str(len(engines) + len(cheats))),
            *(() if self._page_port is None else ("--page", str(self._page_port))),
            *joining,
        )
        for number, engine in enumerate(engines, 1):
            name = f"sampler-{number}"
            self._start(nursery, name, "sampler", "--engine", engine, *slots, *joining, engine=engine)
        self._start(nursery, "verifier", "verifier", *joining)
        for name, way in cheats.items():
            self._start(nursery, name, "sampler", "--way", way, *slots, *joining, cheat=way)
        await self._wait_for_steps(trainer)

    async def _wait_for_steps(self, trainer: NodeStatus) -> None:
        """Read steps until the trainer has finished, or fail after a time without one."""
        while self._is_running(trainer):
            known = trainer.steps
            with trio.move_on_after(STEP_SECONDS if known else FIRST_STEP_SECONDS) as waiting:
                while trainer.steps == known and self._is_running(trainer):
                    await self._news.wait()
            if waiting.cancelled_caught:
                limit = STEP_SECONDS if known else FIRST_STEP_SECONDS
                self._fail("trainer", f"it took no step within {limit:.0f} s")
            await self._read_records()
            await trio.sleep(LOOK_SECONDS)

    def _is_running(self, trainer: NodeStatus) -> bool:
        return not trainer.finished and not self.failure

    async def _read_records(self) -> None:
        """Read new step records from the trainer's database."""
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
    ) -> NodeStatus:
        key = self._make_key(name)
        member = NodeStatus(name, role, key.public, key.peer_id, engine=engine, cheat=cheat)
        # The demo's run is its own, with a built-in contract: a system without a jail may show it.
        join = ["join", "--role", role, "--threads", "1", "--json", "--unsafe-no-jail"]
        command = [CHEAT] if cheat else join
        options = ("--listen", LOOPBACK, "--state", str(self.folder / name))

        def on_event(event: Mapping[str, Any]) -> None:
            member.update(event)
            if event["event"] == "page":
                self.page = str(event["url"])
            self._notify()

        arguments = [*command, *options, *words]
        child = Child(name, node_command(arguments), self.folder / f"{name}.log", on_event)
        self.members.append(member)
        self._children[name] = child
        nursery.start_soon(self._listen, child, member)
        return member

    async def _listen(self, child: Child, member: NodeStatus) -> None:
        await child.listen()
        with trio.move_on_after(END_SECONDS):
            await child.ended()
        if not member.finished:
            self._fail(child.name, child.how_it_ended())
        self._notify()

    def _fail(self, name: str, how: str) -> None:
        """Record the first failure: others follow from it."""
        if not self.failure and self._took is None:
            self.failure = f"The {name} failed: {how}."
            self.last_words = self._children[name].last_words()
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    # Keys and engines, by the seed

    def _engines(self) -> Sequence[str]:
        """Return the engine class per sampler: torch and llama.cpp in turn, if there."""
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
        """Write a node's key into its folder, unless it is there, and return its identity."""
        seed = derive("demo", self.config.seed.to_bytes(8), f"identity of {name}".encode())
        folder = self.folder / name
        with boundary(StoreError, f"making {folder}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (folder / "key").exists():
                descriptor = os.open(folder / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(seed)
        return prepared(folder).identity()

    def _bytes(self, name: str) -> bytes:
        """Derive bytes from the seed and a name."""
        return derive("demo", self.config.seed.to_bytes(8), name.encode())


def check_together(config: DemoConfig) -> None:
    """Refuse options that exclude each other."""
    if config.task is not None and (config.model != "embedded" or config.hostile or config.in_memory):
        raise ConfigError(
            f"--task {config.task} has a model of its own, and goes with neither --hostile nor --in-memory",
            advice="leave out the other flags",
        )
    if config.model != "embedded" and (config.hostile or config.in_memory):
        raise ConfigError(
            f"--hostile and --in-memory go with the embedded model, not with {config.model}",
            advice="leave out --model, or leave out the other flag",
        )
    if config.hostile and config.in_memory:
        raise ConfigError(
            "the in-memory demo has no verifier", advice="leave out --in-memory to see cheats caught"
        )
