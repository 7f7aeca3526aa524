"""One call of an engine's process, from the caller's side: numbered messages.

A call ends with `done` or `failed` and leaves a clean pipe. The other side is `worker.main`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from echo_node.engine.worker.process import EngineProcess
from echo_node.errors import EngineError
from echo_node.runtime.ipc import Message, MessageError, PipeError, field


class RpcCall:
    """One call, from its first message to its last.

    A process that has sent nothing yet may be silent for `first_seconds`.
    """

    def __init__(
        self, process: EngineProcess, number: int, silent_seconds: float, *, first_seconds: float = 0.0
    ) -> None:
        self._process = process
        self._number = number
        self._silent_seconds = silent_seconds
        self._first_seconds = max(first_seconds, silent_seconds)
        self._waiting_since: float | None = None
        self.outcome: Message | None = None
        """The message that ended it."""

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message of this call."""
        message = {"kind": kind, "call": self._number, **fields}
        try:
            self._process.pipe.send(message, silent_seconds=self._silent_seconds)
        except MessageError as error:
            raise EngineError(error.what) from error

    def hear(self, seconds: float | None = None) -> Message | None:
        """Return the next message of this call, or None; raise if the process is silent."""
        pipe, until = self._process.pipe, None if seconds is None else time.monotonic() + seconds
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        while True:
            now = time.monotonic()
            allowed = self._silent_seconds if pipe.received_any else self._first_seconds
            silent_at = max(self._waiting_since, pipe.last_received) + allowed
            if now >= silent_at:
                raise PipeError(f"it has been silent for {allowed:g} seconds")
            if until is not None and now >= until:
                return None
            message = pipe.receive((silent_at if until is None else min(silent_at, until)) - now)
            if message is None:
                continue
            if message["kind"] == "beat":
                self._process.memory_seen = field(message, "memory", int)
            elif field(message, "call", int) == self._number:
                self._waiting_since = None  # whoever called may take a while before the next
                if message["kind"] in {"done", "failed"}:
                    self.outcome = message
                return message

    def expect(self, *kinds: str) -> Message:
        """Return the next message of these kinds; raise the error of a failed call."""
        message = self.hear()
        while message is None:
            message = self.hear()
        self.check(message)
        if message["kind"] not in kinds:
            raise PipeError(f"it sent {message['kind']!r} instead of {' or '.join(kinds)}")
        return message

    def check(self, message: Message) -> None:
        """Raise what the other side says went wrong."""
        if message["kind"] == "failed":
            raise EngineError(field(message, "what", str), advice=field(message, "advice", str))

    def send_all(self, kind: str, items: Iterable[Message]) -> None:
        """Send messages of a kind, and the word that they are over."""
        for item in items:
            self.say(kind, **item)
        self.say("over")

    def settle(self) -> None:
        """End the call and leave a clean pipe; raise if that takes too long."""
        until = time.monotonic() + self._silent_seconds
        if self.outcome is None:
            self.say("end")
        while self.outcome is None:
            if time.monotonic() >= until:
                raise PipeError(f"it did not stop within {self._silent_seconds:g} seconds")
            self.hear(until - time.monotonic())
