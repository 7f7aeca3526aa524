"""Blocking client of a node's control socket, for commands."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from echo_node.control.socket import connect
from echo_node.errors import StoreError
from echo_node.storage.state_dir import is_in_use
from echo_node.telemetry.snapshot import FORMAT

Question: TypeAlias = Literal["status", "watch", "pause", "resume", "leave"]
SECONDS: Final = 30.0
"""Seconds of silence after which a node is reported as unresponsive; a watched node sends
something every ten."""
ANSWER_BYTES: Final = 16 * 2**20
"""Bytes of one answer."""
END_SECONDS: Final = 90.0
"""Seconds for a node to end after `leave`."""
_LOOK_SECONDS: Final = 0.05
"""Seconds between two checks whether it has ended."""


class NobodyRunsError(StoreError):
    """No node runs on the folder."""


def ask(folder: Path, question: Question, *, seconds: float = SECONDS, **more: int) -> dict[str, Any]:
    """Return the node's first answer: its snapshot, or what it has done."""
    with closing(answers(folder, question, seconds=seconds, **more)) as stream:
        return next(stream)


def answers(
    folder: Path, question: Question, *, seconds: float = SECONDS, **more: int
) -> Generator[dict[str, Any]]:
    """Yield the node's answers until it ends or the caller stops."""
    with _talking(folder, seconds) as lines:
        lines.write(json.dumps({"ask": question, **more}).encode() + b"\n")
        lines.flush()
        count = 0
        for line in _lines(lines):
            yield _read(folder, line)
            count += 1
        if not count:
            raise StoreError(
                f"the node on {folder} closed the connection",
                advice="it may be ending: try again in a moment",
            )


def wait_until_ended(folder: Path, *, seconds: float = END_SECONDS) -> None:
    """Wait until no node runs on the folder; a `StoreError` if that takes too long."""
    until = time.monotonic() + seconds
    while is_in_use(folder):
        if time.monotonic() > until:
            raise StoreError(
                f"the node on {folder} still runs after {seconds:.0f} s",
                advice="look at its log; end its process if it hangs",
            )
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _talking(folder: Path, seconds: float) -> Iterator[BufferedRWPair]:
    try:
        with connect(folder, seconds) as connection, connection.makefile("rwb") as lines:
            yield lines
    except TimeoutError:
        raise StoreError(
            f"the node on {folder} does not answer within {seconds:.0f} s",
            advice="look at its log; end its process if it hangs",
        ) from None
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        if is_in_use(folder):
            raise StoreError(
                f"the node on {folder} does not listen yet", advice="try again in a moment"
            ) from None
        raise NobodyRunsError(
            f"no node runs on {folder}", advice="start one with echo-node join, or give its folder by --state"
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        raise StoreError(
            f"the node on {folder} closed the connection", advice="it may be ending: try again"
        ) from None
    except OSError as error:
        raise StoreError(
            f"talking to the node on {folder}: {error}", advice="is it another user's?"
        ) from None


def _lines(lines: BufferedRWPair) -> Iterator[bytes]:
    while line := lines.readline(ANSWER_BYTES):
        if not line.endswith(b"\n"):
            return  # cut off: the node ended while it was writing
        yield line


def _read(folder: Path, line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    content = answer.get("snapshot", answer) if isinstance(answer, dict) else None
    if not isinstance(content, dict) or not answer.keys() & {"snapshot", "done", "error"}:
        raise StoreError(
            f"the program that listens on {folder} is not a node", advice="give the node's folder by --state"
        )
    if (error := answer.get("error")) is not None:
        raise StoreError(f"the node on {folder} refuses: {error}", advice="try again in a moment")
    if "snapshot" in answer and content.get("format") != FORMAT:
        raise StoreError(
            f"the node on {folder} is another version of echo-node",
            advice="use the program that runs it, or restart the node with this one",
        )
    return content
