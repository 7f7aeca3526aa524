"""The nodes of a chaos run: `echo-node join --json` on a machine, disk and clock of their own.

A node that ends is started again, as a service manager does. Its events are written down with the
time at which they were read.

A node may end by itself only while a fault excuses it, and only in words.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import trio

from echo_node.runs.spec import RunSpec, new_run, write_run
from echo_node.storage.state_dir import prepared
from tests.chaos.clock import Clock
from tests.chaos.disks import Damage, Disk
from tests.chaos.timeline import Timeline
from tests.chaos.world import OWNER, World
from tests.net.namespaces import Machine
from tests.swarm.processes import ROOT, NodeProcess

PORT: Final = 4001
RESTART_SECONDS: Final = 2.0
"""Between the end of a node and its next start."""
GRACE_SECONDS: Final = 20.0
"""In which a fault that is over still excuses an end."""
STOP_SECONDS: Final = 60.0
READ_SECONDS: Final = 5.0
"""Seconds to read the last output of a node that has ended.

A process that it left behind may hold its standard output.
"""
KEPT_EVENTS: Final = 400
"""Events of a node that are kept in memory; all of them are in its file."""
TRACEBACK: Final = "Traceback (most recent call last)"
ONE_THREAD: Final = ("--threads", "1")
STALENESS: Final = 4
LEASE_SECONDS: Final = 12.0
RUN: Final[dict[str, Any]] = {
    "algorithm": {"batch_groups": 16},
    "sampling": {"group_size": 4},
    "sync": {"mode": "async", "staleness": STALENESS},
    "terms": {"heartbeat_ms": 1_000, "lease_ms": int(1_000 * LEASE_SECONDS)},
}


@dataclass(frozen=True)
class Part:
    """What one node is for."""

    name: str
    role: str
    engine: str | None = None

    def words(self) -> tuple[str, ...]:
        if self.role == "bootstrap":
            return ("--role", "bootstrap")
        if self.engine is None:
            return ("--role", self.role, *ONE_THREAD)
        return ("--role", self.role, "--engine", self.engine, "--slots", "4", *ONE_THREAD)


TORCH, LLAMA = "torch/f32", "llama/f16"
SMALL: Final = (
    Part("seed1", "bootstrap"),
    Part("trainer", "trainer"),
    Part("standby", "trainer"),
    Part("verifier1", "verifier"),
    Part("llama1", "sampler", LLAMA),
    Part("torch1", "sampler", TORCH),
)
WHOLE: Final = (
    *(SMALL[0], Part("seed2", "bootstrap"), *SMALL[1:4], Part("verifier2", "verifier"), *SMALL[4:]),
    Part("llama2", "sampler", LLAMA),
    Part("torch2", "sampler", TORCH),
)


@dataclass(frozen=True)
class Failing:
    """Something that must not be, seen by the harness itself."""

    invariant: str
    node: str | None
    text: str


class Heard(NodeProcess):
    """One start of a node, whose every event goes to a file."""

    def __init__(self, name: str, process: trio.Process, stderr: Path, events: Path, line: Timeline) -> None:
        super().__init__(name, process, stderr)
        self._events_file = events
        self._line = line
        self._written = 0
        self.damage: Damage | None = None
        """What was done to its state before it was started."""

    @property
    def refuses_its_state(self) -> bool:
        """Whether damage to its state has kept it from working so far.

        It may be among peers before it reads its state.
        """
        return self.damage is not None and not any("version" in each for each in self.all("progress"))

    def _notify(self) -> None:
        fresh = self.events[self._written :]
        if fresh:
            at = self._line.now
            with self._events_file.open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({**each, "wall": each.get("at"), "at": at}) + "\n" for each in fresh
                )
        if len(self.events) > 2 * KEPT_EVENTS:
            del self.events[:-KEPT_EVENTS]
        self._written = len(self.events)
        super()._notify()


@dataclass
class Member:
    """One node, over all its starts."""

    part: Part
    machine: Machine
    folder: Path
    disk: Disk
    clock: Clock
    peer_id: str
    process: Heard | None = None
    wanted: bool = False
    changed: trio.Event = field(default_factory=trio.Event)
    excuses: int = 0
    """Faults on it that may end it."""
    excused_until: float = 0.0
    damage: Damage | None = None
    """Of its state, for the next start to find."""

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def state(self) -> Path:
        return self.disk.path

    @property
    def address(self) -> str:
        return f"/ip4/{self.machine.address}/tcp/{PORT}/p2p/{self.peer_id}"

    def want(self, *, running: bool) -> None:
        self.wanted = running
        self.changed.set()
        self.changed = trio.Event()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """While this lasts, and a little longer, it may end by itself, if it says why."""
        self.excuses += 1
        try:
            yield
        finally:
            self.excuses -= 1
            self.excused_until = trio.current_time() + GRACE_SECONDS

    @property
    def is_excused(self) -> bool:
        return self.excuses > 0 or trio.current_time() < self.excused_until

    def last(self, event: str) -> dict[str, Any]:
        return self.process.last(event) if self.process else {}

    def tree(self) -> list[psutil.Process]:
        """Its processes, the node itself first."""
        if self.process is None or self.process.process.poll() is not None:
            return []
        with suppress(psutil.Error):
            first = psutil.Process(self.process.process.pid)
            return [first, *first.children(recursive=True)]
        return []


class Swarm:
    """All nodes of one run."""

    def __init__(self, place: Path, world: World, parts: Sequence[Part], shim: Path, line: Timeline) -> None:
        self.place = place
        self.world = world
        self.line = line
        self.run = place / "run"
        self.failings: list[Failing] = []
        self.members: dict[str, Member] = {}
        for part in parts:
            folder = place / "nodes" / part.name
            folder.mkdir(parents=True)
            (folder / "tmp").mkdir()
            disk = Disk(folder / "state")
            identity = prepared(disk.path).identity()
            clock = Clock(shim, folder / "page")
            self.members[part.name] = Member(
                part, world.machines[part.name], folder, disk, clock, identity.peer_id
            )
        self._make_run()

    def of_role(self, *roles: str) -> list[Member]:
        return [each for each in self.members.values() if each.part.role in roles]

    def leader(self, *, but: Member | None = None) -> Member | None:
        """Who says that it leads; of several, who is at the newest version."""
        leading = [
            each
            for each in self.of_role("trainer")
            if each is not but and each.last("progress").get("leading")
        ]
        return max(leading, key=lambda each: each.last("progress").get("version") or 0, default=None)

    @property
    def head_version(self) -> int:
        """The newest version that any node has told of."""
        return max((each.last("progress").get("version") or 0 for each in self.members.values()), default=0)

    def _make_run(self) -> None:
        trainers = self.of_role("trainer")
        author = prepared(trainers[0].state).identity()
        told = RunSpec(
            name="a swarm under fire",
            trainers=[each.peer_id for each in trainers],
            verifiers=[each.peer_id for each in self.of_role("verifier")],
            **RUN,
        )
        write_run(self.run, new_run(told, author))

    async def keep(self, member: Member) -> None:
        """Start a node whenever it is wanted and does not run, until cancelled."""
        try:
            while True:
                while not member.wanted:
                    await member.changed.wait()
                began = (
                    (member.folder / "stderr").stat().st_size if (member.folder / "stderr").exists() else 0
                )
                async with trio.open_nursery() as nursery:
                    await self._start(member, nursery)
                    code = await member.process.process.wait()
                    nursery.cancel_scope.deadline = trio.current_time() + READ_SECONDS
                self._look_at_end(member, code, began)
                if member.wanted:
                    await trio.sleep(RESTART_SECONDS)
        finally:
            if member.process is not None:
                await member.process.reap()

    async def _start(self, member: Member, nursery: trio.Nursery) -> None:
        with (member.folder / "stderr").open("ab") as wrote:
            process = await trio.lowlevel.open_process(
                member.machine.command(*self._command(member)),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=wrote,
                start_new_session=True,  # Ctrl-C is for the harness alone
                env=environment(member.folder / "tmp") | member.clock.environment,
            )
        files = member.folder / "stderr", member.folder / "events.jsonl"
        member.process = Heard(member.name, process, *files, self.line)
        member.process.damage, member.damage = member.damage, None
        nursery.start_soon(member.process.read)
        self.line.note("start", member.name, pid=process.pid)

    def _command(self, member: Member) -> list[str]:
        seeds = [each.address for each in self.of_role("bootstrap") if each is not member]
        return [
            *(sys.executable, "-m", "echo_node", "join", *member.part.words(), "--json"),
            *("--listen", f"/ip4/{member.machine.address}/tcp/{PORT}", "--state", str(member.state)),
            *(word for seed in seeds for word in ("--seed", seed)),
            *(() if member.part.role == "bootstrap" else (str(self.run),)),
        ]

    def _look_at_end(self, member: Member, code: int, began: int) -> None:
        """Whether a node may have ended as it did."""
        with (member.folder / "stderr").open("rb") as file:
            file.seek(began)
            said = file.read().decode(errors="replace").strip()
        told = said.splitlines()[-1][:400] if said else ""
        asked = member.process.killed or not member.wanted
        refused = not asked and member.process.refuses_its_state
        self.line.note("exit", member.name, code=code, asked=asked, said="" if code <= 0 else told)
        if TRACEBACK in said and code > 0:
            self.fail("ends-in-words", member.name, f"it ended with {code} and a traceback: {said[-2000:]}")
        elif not asked and not ((member.is_excused or refused) and code in {1, 2} and told):
            self.fail("stays", member.name, f"nobody ended it, and it ended with {code}: {told}")
        if refused and (damage := member.process.damage) is not None:  # as a person does who is told of it
            damage.undo()
            self.line.note("restore", member.name, file=str(damage.path.relative_to(member.state)))

    def fail(self, invariant: str, node: str | None, text: str) -> None:
        self.failings.append(Failing(invariant, node, text))
        self.line.note("failing", node, invariant=invariant, text=text[-300:])

    async def stop(self) -> None:
        """End all in good order: whoever works first, the seeds last."""
        for roles in (("sampler",), ("verifier",), ("trainer",), ("bootstrap",)):
            async with trio.open_nursery() as nursery:
                for member in self.of_role(*roles):
                    nursery.start_soon(self._stop_one, member)

    async def _stop_one(self, member: Member) -> None:
        member.want(running=False)
        started = member.process
        if started is None or started.process.poll() is not None:
            return
        started.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(STOP_SECONDS):
            await started.process.wait()
        if started.process.returncode != 0:
            code = started.process.returncode
            self.fail(
                "stops", member.name, f"asked to end, it did not end well: {code} after {STOP_SECONDS} s"
            )
            await started.reap()

    def close(self) -> None:
        for member in self.members.values():
            member.clock.close()
            member.disk.close()


def environment(temporary: Path) -> dict[str, str]:
    """What every process of a run is started with."""
    return os.environ | {
        "OMP_WAIT_POLICY": "passive",
        "TMPDIR": str(temporary),
        OWNER: str(os.getpid()),
    }
