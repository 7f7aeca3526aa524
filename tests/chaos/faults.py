"""Faults of a running swarm: a context for each kind, entered when it starts, left when it heals.

However it is left, the fault is undone.
"""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import psutil
import trio

from tests.chaos.disks import damage
from tests.chaos.nemesis import HOSTILE_NODE, Fault
from tests.chaos.swarm import PORT, Heard, Member, Swarm, environment
from tests.chaos.weather import Rule
from tests.swarm.processes import ROOT

HOSTILE_PROGRAM: Final = "tests.chaos.hostile"
HOSTILE_STOP_SECONDS: Final = 10.0
LEADER_SECONDS: Final = 60.0
"""In which somebody should lead, whatever else goes wrong."""
FOUND_OUT_SECONDS: Final = 60.0


class Faults:
    """Everything that can be done to one swarm; `done` counts by kind what was."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._line = swarm.line
        self.done: Counter[str] = Counter()
        self._one_hostile = trio.Lock()

    @asynccontextmanager
    async def do(self, fault: Fault) -> AsyncIterator[None]:
        """One fault, from its beginning to its healing."""
        way = "hostile" if fault.kind.startswith("hostile_") else fault.kind
        node = fault.targets[0] if len(fault.targets) == 1 else None
        targets = {} if node else {"targets": list(fault.targets)}
        self._line.note("fault", node, kind=fault.kind, **targets, **fault.details)
        self.done[fault.kind] += 1
        async with getattr(self, f"_{way}")(fault):
            yield
        self._line.note("heal", node, kind=fault.kind, **targets)

    def _member(self, fault: Fault) -> Member:
        return self._swarm.members[fault.targets[0]]

    # Processes

    @asynccontextmanager
    async def _kill(self, fault: Fault) -> AsyncIterator[None]:
        member = self._member(fault)
        try:
            await _kill(member, whole=fault.details["whole"])
            yield
        finally:
            member.want(running=True)

    @asynccontextmanager
    async def _failover(self, fault: Fault) -> AsyncIterator[None]:
        """Whoever leads is killed, and started again no sooner than another one leads."""
        member = await self._leader() or self._member(fault)
        self._line.note("falls", member.name)
        try:
            await _kill(member, whole=fault.details["whole"])
            yield
            heir = await self._leader(but=member)
            self._line.note("leads", heir.name if heir else None)
        finally:
            member.want(running=True)

    async def _leader(self, but: Member | None = None) -> Member | None:
        """Who leads, waited for: other faults may keep anybody from it for a while."""
        with trio.move_on_after(LEADER_SECONDS):
            while (found := self._swarm.leader(but=but)) is None:  # noqa: ASYNC110 - it is told once a second
                await trio.sleep(0.5)
            return found
        return None

    @asynccontextmanager
    async def _stop(self, fault: Fault) -> AsyncIterator[None]:
        stopped = self._member(fault).tree()
        for process in stopped:
            _signal(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(stopped):
                _signal(process, signal.SIGCONT)

    # The network

    @asynccontextmanager
    async def _raining(self, *rules: Rule) -> AsyncIterator[None]:
        weather = self._swarm.world.weather
        numbers = [weather.add(rule) for rule in rules]
        try:
            yield
        finally:
            for number in numbers:
                weather.remove(number)

    def _numbers(self, names) -> tuple[int, ...]:
        return tuple(self._swarm.world.numbers[name] for name in names)

    def _sides(self, fault: Fault) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those who are hit, and all others."""
        others = [name for name in self._swarm.world.numbers if name not in fault.targets]
        return self._numbers(fault.targets), self._numbers(others)

    @asynccontextmanager
    async def _halves(self, fault: Fault) -> AsyncIterator[None]:
        one, other = self._sides(fault)
        async with self._raining(Rule(one, other, drop=1.0), Rule(other, one, drop=1.0)):
            yield

    @asynccontextmanager
    async def _one_way(self, fault: Fault) -> AsyncIterator[None]:
        to = self._numbers(fault.details["to"])
        async with self._raining(Rule(self._numbers(fault.targets), to, drop=1.0)):
            yield

    @asynccontextmanager
    async def _flapping(self, fault: Fault) -> AsyncIterator[None]:
        one, other = self._sides(fault)

        async def flap() -> None:
            while True:
                async with self._raining(Rule(one, other, drop=1.0), Rule(other, one, drop=1.0)):
                    await trio.sleep(fault.details["period"])
                await trio.sleep(fault.details["period"])

        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(flap)
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _latency(self, fault: Fault) -> AsyncIterator[None]:
        all_ = self._numbers(fault.targets)
        async with self._raining(
            Rule(all_, all_, delay=fault.details["delay"], jitter=fault.details["jitter"])
        ):
            yield

    @asynccontextmanager
    async def _loss(self, fault: Fault) -> AsyncIterator[None]:
        all_ = self._numbers(fault.targets)
        async with self._raining(Rule(all_, all_, drop=fault.details["share"])):
            yield

    @asynccontextmanager
    async def _reorder(self, fault: Fault) -> AsyncIterator[None]:
        all_ = self._numbers(fault.targets)
        async with self._raining(Rule(all_, all_, delay=0.005, overtaken=fault.details["share"])):
            yield

    # Disk and clock

    @asynccontextmanager
    async def _full_disk(self, fault: Fault) -> AsyncIterator[None]:
        member = self._member(fault)
        with member.excused():
            taken = member.disk.fill()
            self._line.note("filled", member.name, bytes=taken)
            try:
                yield
            finally:
                member.disk.free()

    @asynccontextmanager
    async def _slow_disk(self, fault: Fault) -> AsyncIterator[None]:
        clock = self._member(fault).clock
        clock.slow(sync=fault.details["sync"], write=fault.details["write"])
        try:
            yield
        finally:
            clock.slow()

    @asynccontextmanager
    async def _clock(self, fault: Fault) -> AsyncIterator[None]:
        clock = self._member(fault).clock
        clock.jump(fault.details["jump"])
        try:
            yield
        finally:
            clock.jump(0)

    @asynccontextmanager
    async def _corrupt(self, fault: Fault) -> AsyncIterator[None]:
        member, details = self._member(fault), fault.details
        with member.excused():
            await _kill(member, whole=True)
            done = damage(member.state, details["files"], details["how"], random.Random(details["luck"]))
            if done is not None:
                member.damage = done
                file = str(done.path.relative_to(member.state))
                self._line.note(
                    "damage", member.name, file=file, how=done.how, bytes=len(done.before[done.path])
                )
            member.want(running=True)
            yield

    # A hostile peer

    @asynccontextmanager
    async def _hostile(self, fault: Fault) -> AsyncIterator[None]:
        """Run one hostile peer at a time, since it has one address.

        The time counts from when it begins, which may be a while after its start.
        """
        async with self._one_hostile:
            heard = await self._start_hostile(fault.kind.removeprefix("hostile_"))
            process = heard.process
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(heard.read)
                    self._line.note("began", HOSTILE_NODE, **await heard.said("began"))
                    yield
                    if fault.kind == "hostile_make_up":
                        await _until_found_out(heard)
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
                    with trio.move_on_after(HOSTILE_STOP_SECONDS):
                        await process.wait()
                    if process.poll() is None:
                        process.kill()
            finally:
                await heard.reap()
        self._line.note("exit", HOSTILE_NODE, code=process.returncode, said=heard.events[-1:])

    async def _start_hostile(self, kind: str) -> Heard:
        """Start it with a new key each time: whoever saw the last one has muted that key."""
        swarm, machine = self._swarm, self._swarm.world.machines[HOSTILE_NODE]
        folder = swarm.place / "nodes" / HOSTILE_NODE
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", HOSTILE_PROGRAM, kind, "--run", str(swarm.run)),
            *("--state", tempfile.mkdtemp(prefix="state-", dir=folder)),
            *("--listen", f"/ip4/{machine.address}/tcp/{PORT}"),
            *("--seed", swarm.of_role("bootstrap")[0].address),
        ]
        with (folder / "stderr").open("ab") as wrote:
            process = await trio.lowlevel.open_process(
                machine.command(*command),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=wrote,
                start_new_session=True,  # Ctrl-C is for the harness alone
                env=environment(folder / "tmp"),
            )
        return Heard(HOSTILE_NODE, process, folder / "stderr", folder / "events.jsonl", self._line)


async def _until_found_out(cheat: Heard) -> None:
    """Wait until a verifier has condemned one of its groups.

    The wait is bounded, since other faults may keep all verifiers from it.
    """
    with trio.move_on_after(FOUND_OUT_SECONDS):
        await cheat.until(lambda told: "condemned" in told.last("did"), within=math.inf)


async def _kill(member: Member, *, whole: bool) -> None:
    """Kill as the kernel does when memory runs out, or a whole machine as when power fails."""
    member.want(running=False)
    if member.process is not None:
        member.process.killed = True
    for process in member.tree()[: None if whole else 1]:
        _signal(process, signal.SIGKILL)
    if member.process is not None:
        await member.process.process.wait()


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
