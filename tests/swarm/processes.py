"""A swarm of `echo-node join` processes on loopback, each with a state folder.

A process prints its events as JSON lines; a test waits for those it needs, within a deadline. The
error of a timeout includes the process's stderr. All processes end with the context.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from echo_node.runs.spec import RunSpec, new_run, read_manifest, write_run
from echo_node.storage.state_dir import prepared

ROOT = Path(__file__).parents[2]
START_SECONDS = 100.0
END_SECONDS = 20.0
STDERR_BYTES = 20_000
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class ProcessError(AssertionError):
    """A process died, stalled or failed at its end; the text includes its stderr."""


class NodeProcess:
    """One `echo-node join`."""

    def __init__(self, name: str, process: trio.Process, stderr: Path) -> None:
        self.name = name
        self.process = process
        self.events: list[dict] = []
        self.killed = False
        self._stderr = stderr
        self._news = trio.Event()
        self._silent = False

    @property
    def peer_id(self) -> str:
        return self.first("started")["peer_id"]

    def all(self, event: str) -> list[dict]:
        return [each for each in self.events if each["event"] == event]

    def first(self, event: str) -> dict:
        return self.all(event)[0]

    def last(self, event: str) -> dict:
        """The newest of its kind; nothing is known before the first."""
        return (self.all(event) or [{}])[-1]

    async def read(self) -> None:
        """Keep what the process says, until it ends."""
        rest = b""
        async for chunk in self.process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            self.events += [json.loads(line) for line in lines]
            self._notify()
        self._silent = True
        self._notify()

    async def until(self, holds, *, within: float = START_SECONDS) -> None:
        """Until it has said something that will do."""
        with trio.move_on_after(within):
            while not holds(self):
                if self._silent:
                    raise self.failure("it ended too soon")
                await self._news.wait()
            return
        raise self.failure(f"what it should have said did not come within {within:g} s")

    async def said(self, event: str, *, within: float = START_SECONDS) -> dict:
        """The first event of this kind."""
        await self.until(lambda node: node.all(event), within=within)
        return self.first(event)

    async def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self.killed = True
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> None:
        """Ask it to end, as systemd would, unless it is done, and hold it to that."""
        if self.process.poll() is None and not self.all("stopped"):
            self.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(END_SECONDS):
            await self.process.wait()
        if self.process.returncode != 0:
            raise self.failure(f"it did not end well within {END_SECONDS:g} s")

    async def reap(self) -> None:
        """Whatever happened, the process is gone afterwards."""
        with trio.CancelScope(shield=True):
            if self.process.poll() is None:
                self.process.kill()
            await self.process.wait()

    def failure(self, text: str) -> ProcessError:
        wrote = self._stderr.read_bytes()[-STDERR_BYTES:].decode(errors="replace")
        last = "\n".join(map(str, self.events[-5:]))
        return ProcessError(
            f"{self.name}: {text}; return code {self.process.poll()}, last said:\n{last}\nstderr:\n{wrote}"
        )

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()


class Swarm:
    """Starts nodes of one run. The seed is there first."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._address = ""
        self.run = folder / "run"
        self.nodes: list[NodeProcess] = []

    def make_run(self, heirs=(), verifiers=("verifier",), **told) -> None:
        """A run of the embedded model whose trainers and verifiers are the nodes of these names."""
        keys = {name: prepared(self._folder / name).identity() for name in ("trainer", *verifiers, *heirs)}
        file = RunSpec(
            name="a swarm of processes",
            trainers=[keys[name].peer_id for name in ("trainer", *heirs)],
            verifiers=[keys[name].peer_id for name in verifiers],
            **told,
        )
        write_run(self.run, new_run(file, keys["trainer"], out=self.run))

    def folder_of(self, name: str) -> Path:
        """Where a node keeps what it holds of the run."""
        return prepared(self._folder / name).run(read_manifest(self.run).id)

    def state_of(self, name: str) -> Path:
        return self._folder / name

    def stderr_of(self, name: str) -> Path:
        """What all starts of a node wrote there."""
        return self._folder / f"{name}.stderr"

    async def start_seed(self) -> NodeProcess:
        seed = await self.start("seed", "--role", "bootstrap")
        self._address = (await seed.said("listening"))["addresses"][0]
        return seed

    async def start(self, name: str, *words: str, fork=None) -> NodeProcess:
        """Start a node on the state folder of its name: the same node, if it was there before.

        With `fork`, from a `hatchery`, it need not import what is loaded already.
        """
        arguments = [
            *("join", *words, "--json", "--listen", LOOPBACK, "--state", str(self.state_of(name))),
            *(("--seed", self._address) if self._address else ()),
            *((str(self.run),) if self._address and self.run else ()),
        ]
        stderr = self.stderr_of(name)
        with stderr.open("ab") as wrote:
            process = (
                await fork(arguments, wrote)
                if fork
                else await trio.lowlevel.open_process(
                    [sys.executable, "-m", "echo_node", *arguments],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=wrote,
                    env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                )
            )
        node = NodeProcess(name, process, stderr)
        self.nodes.append(node)
        self._nursery.start_soon(node.read)
        return node


@asynccontextmanager
async def swarm_in(folder: Path, make=None, **told):
    """A swarm with a run and a seed; at the end every running node is stopped, and must exit 0.

    `make` seals a run into the folder that it is given, in place of one of the embedded model.
    """
    try:
        async with trio.open_nursery() as nursery:
            swarm = Swarm(folder, nursery)
            try:
                make(swarm.run) if make else swarm.make_run(**told)
                await swarm.start_seed()
                yield swarm
                async with trio.open_nursery() as stopping:
                    for node in swarm.nodes:
                        if not node.killed:
                            stopping.start_soon(node.stop)
            finally:
                for node in swarm.nodes:
                    await node.reap()
    except BaseExceptionGroup as group:
        raise _only(group) from None


def _only(group):
    """The one error in a group of one."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group
