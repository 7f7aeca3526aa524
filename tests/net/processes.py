"""Nodes as real processes, for tests and benchmarks: started, asked, stopped within deadlines.

What a process wrote to stderr stands in the error of whoever waited for it in vain. It knows
nothing of what is asked; the commands are the methods of `process_node.Node`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from protocol import Identity
from tests.net import process_node
from tests.net.process_node import Talk

ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.net.process_node", "tests.protocol.examples"])
START_SECONDS = 60.0
"""In which a process must have greeted: thirty of them start at once on two cores."""
ANSWER_SECONDS = 20.0
END_SECONDS = 10.0
STDERR_BYTES = 20_000


class ProcessError(AssertionError):
    """A process of ours died, fell silent or refused. Its stderr is part of the text."""


class Place:
    """One node in one process."""

    def __init__(self, process, index, public, addresses):
        self.process = process
        self.index = index
        self.public = public
        self.addresses = addresses

    async def ask(self, do, *, within=ANSWER_SECONDS, **what):
        """The answer to one command."""
        return await self.process.ask(self.index, do, within, what)

    async def until(self, do, holds, *, within=ANSWER_SECONDS, **what):
        """Ask again and again until the answer will do."""
        answer = None
        with trio.move_on_after(within):
            while not holds(answer := await self.ask(do, **what)):  # noqa: ASYNC110 -- it is in another process
                await trio.sleep(0.05)
            return answer
        raise self.process.failure(f"{do} did not come true within {within:g} s: {answer!r}")


class NodeProcess:
    """A process with one node or several."""

    def __init__(self, child, connection, stderr):
        self._child = child
        self._talk = Talk(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))
        self._stderr = stderr
        self._number = 0
        self._waiting = {}
        self._greeting = trio.Event()
        self.places = []
        self.seconds = 0.0
        """From the start of the nodes, imports done, to the greeting."""

    @property
    def pid(self):
        return self._child.pid

    @property
    def code(self):
        """With which it ended; None while it runs."""
        return self._child.poll() if isinstance(self._child, subprocess.Popen) else self._child.exitcode

    def signal(self, number):
        if self.code is None:
            os.kill(self.pid, number)

    async def ask(self, node, do, within, what):
        self._number += 1
        number = self._number
        give, take = trio.open_memory_channel(1)
        self._waiting[number] = give
        try:
            with trio.fail_after(within):
                await self._talk.say({"number": number, "node": node, "do": do, **what})
                said = await take.receive()
        except (trio.TooSlowError, trio.EndOfChannel, trio.BrokenResourceError) as error:
            raise self.failure(f"no answer to {do}: {error!r}") from error
        finally:
            self._waiting.pop(number, None)
        if "refused" in said:
            raise self.failure(f"{do} was refused: {said}")
        return said["answer"]

    async def greeted(self):
        with trio.move_on_after(START_SECONDS):
            await self._greeting.wait()
        if not self.places:
            raise self.failure(f"no greeting, and at most {START_SECONDS:g} s to wait for one")

    async def read(self):
        """Hand out what the process says, until it ends."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for said in self._talk.lines():
                if "nodes" in said:
                    self.seconds = said["seconds"]
                    self.places = [Place(self, index, **each) for index, each in enumerate(said["nodes"])]
                    self._greeting.set()
                elif give := self._waiting.get(said["number"]):
                    give.send_nowait(said)
        self._greeting.set()
        for give in self._waiting.values():
            give.close()

    def failure(self, text):
        wrote = (
            self._stderr.read_bytes()[-STDERR_BYTES:].decode(errors="replace")
            if self._stderr.exists()
            else ""
        )
        return ProcessError(f"{text}; process {self.pid}, return code {self.code}, stderr:\n{wrote}")

    async def end(self):
        """Let it end by itself; kill it if it does not. Raises if it did not end well."""
        killed = self.code is not None
        with trio.CancelScope(shield=True):
            self.signal(signal.SIGCONT)
            await self._talk.close()
            with trio.move_on_after(END_SECONDS):
                await self._gone()
            if self.code is None:
                await self.reap()
                raise self.failure(f"it did not end within {END_SECONDS:g} s")
        if self.code and not killed:
            raise self.failure("it ended with an error")

    async def reap(self):
        """Whatever happened, the process is gone afterwards."""
        with trio.CancelScope(shield=True):
            self.signal(signal.SIGKILL)
            await self._talk.close()
            await self._gone()

    async def _gone(self):
        while self.code is None:  # noqa: ASYNC110 -- the end of another process
            await trio.sleep(0.02)


@asynccontextmanager
async def start_process(identities, seeds=()):
    """A process that begins with nothing but a command line, as a person would start it."""
    async with _house(_start) as start:
        process = await start(identities, seeds)
        await process.greeted()
        yield process


@asynccontextmanager
async def start_nodes(count, *, per_process=1):
    """Start nodes that have the first one as their seed.

    The first process is up before the others start.
    """
    identities = [Identity(n.to_bytes(2) * 16) for n in range(1, count + 1)]
    async with _house(_fork) as start:
        processes = [await start(identities[:per_process], ())]
        await processes[0].greeted()
        seed = processes[0].places[0].addresses[0]
        processes += [
            await start(identities[n : n + per_process], [seed])
            for n in range(per_process, count, per_process)
        ]
        for process in processes[1:]:
            await process.greeted()
        yield [place for process in processes for place in process.places]


@asynccontextmanager
async def _house(begin):
    """Starts processes. They end with the context, by themselves or not."""
    started = []
    with tempfile.TemporaryDirectory() as folder:

        async def start(identities, seeds):
            settings = {"keys": [each.seed.hex() for each in identities], "seeds": list(seeds)}
            stderr = Path(folder, f"{len(started)}")
            ours, theirs = socket.socketpair()
            with theirs:
                child = await trio.to_thread.run_sync(begin, theirs, settings, stderr)
            started.append(NodeProcess(child, ours, stderr))
            nursery.start_soon(started[-1].read)
            return started[-1]

        try:
            async with trio.open_nursery() as nursery:
                yield start
                async with trio.open_nursery() as ending:
                    for process in started:
                        ending.start_soon(process.end)
        except BaseExceptionGroup as group:
            raise _only(group) from None
        finally:
            for process in started:
                await process.reap()


def _start(theirs, settings, stderr):
    fd = theirs.fileno()
    command = [sys.executable, "-m", "tests.net.process_node", str(fd), json.dumps(settings), str(stderr)]
    return subprocess.Popen(command, cwd=ROOT, pass_fds=[fd], stdin=subprocess.DEVNULL)


def _fork(theirs, settings, stderr):
    """Fork from a process that has done the imports, which take seconds for every node."""
    child = FORKS.Process(target=process_node.main, args=(theirs, settings, str(stderr)), daemon=True)
    child.start()
    return child


def _only(group):
    """The one error in a group of one."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group
