"""The person's end: one question to the node that runs on a folder, and its answers. Blocking, for commands.

What cannot be is an error in words. It knows neither what a node does nor how answers are shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from echo_node.board import FORMAT
from echo_node.control.place import called
from echo_node.errors import StoreError
from echo_node.state import is_in_use

Question: TypeAlias = Literal["status", "watch", "pause", "resume", "leave"]
SECONDS: Final = 30.0
"""Of silence, after which the node is said not to answer. One who is watched says something every ten."""
ANSWER_BYTES: Final = 16 * 2**20
END_SECONDS: Final = 90.0
"""For a node to end that was asked to."""
_LOOK_SECONDS: Final = 0.05


class NobodyRunsError(StoreError):
    """No node runs on the folder."""


def ask(folder: Path, question: Question, *, seconds: float = SECONDS, **more: int) -> dict[str, Any]:
    """The node's answer: a snapshot of its board, or what it has done."""
    with closing(answers(folder, question, seconds=seconds, **more)) as said:
        return next(said)


def answers(
    folder: Path, question: Question, *, seconds: float = SECONDS, **more: int
) -> Generator[dict[str, Any]]:
    """All that the node says to this, until it ends or the caller has enough."""
    with _talking(folder, seconds) as lines:
        lines.write(json.dumps({"ask": question, **more}).encode() + b"\n")
        lines.flush()
        told = 0
        for line in _lines(lines):
            yield _read(folder, line)
            told += 1
        if not told:
            raise StoreError(
                f"the node on {folder} hung up", advice="it may be ending: try again in a moment"
            )


def wait_until_ended(folder: Path, *, seconds: float = END_SECONDS) -> None:
    """Until no node runs on the folder. It fails in words if that takes too long."""
    until = time.monotonic() + seconds
    while is_in_use(folder):
        if time.monotonic() > until:
            raise StoreError(
                f"the node on {folder} still runs after {seconds:.0f} s",
                advice="look at what it says; end its process if it hangs",
            )
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _talking(folder: Path, seconds: float) -> Iterator[BufferedRWPair]:
    try:
        with called(folder, seconds) as connection, connection.makefile("rwb") as lines:
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
        raise StoreError(f"the node on {folder} hung up", advice="it may be ending: try again") from None
    except OSError as error:
        raise StoreError(
            f"talking to the node on {folder}: {error}", advice="is it another user's?"
        ) from None


def _lines(lines: BufferedRWPair) -> Iterator[bytes]:
    while line := lines.readline(ANSWER_BYTES):
        if not line.endswith(b"\n"):
            return  # it was cut off: the node has ended in the middle of it
        yield line


def _read(folder: Path, line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    said = answer.get("snapshot", answer) if isinstance(answer, dict) else None
    if not isinstance(said, dict) or not answer.keys() & {"snapshot", "done", "error"}:
        raise StoreError(f"what listens on {folder} is no node", advice="give its folder by --state")
    if (error := answer.get("error")) is not None:
        raise StoreError(f"the node on {folder} declines: {error}", advice="try again in a moment")
    if "snapshot" in answer and said.get("format") != FORMAT:
        raise StoreError(
            f"the node on {folder} is another version of echo-node",
            advice="ask it with the program that runs it, or start it again with this one",
        )
    return said
