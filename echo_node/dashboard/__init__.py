"""One page about this node, live, and its figures for Prometheus: on this machine's loopback and nowhere else.

Everything shown is the board's snapshot. It knows nothing of networks, engines or weights, and starts nothing but a server
in the nursery of whoever calls. What it needs is an extra, `page`, and is imported when somebody serves.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

import trio

from echo_node.board import Board
from echo_node.errors import ConfigError

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

PORT: Final = 8420
_NEEDED: Final = ("starlette", "hypercorn", "prometheus_client")


def free_port() -> int | None:
    """The usual port, 0 (any) where another page has it, none where the extra is missing."""
    if any(find_spec(name) is None for name in _NEEDED):
        return None
    with socket.socket() as tried:
        tried.settimeout(1.0)
        return 0 if tried.connect_ex(("127.0.0.1", PORT)) == 0 else PORT


class Control(Protocol):
    """What the page may ask of the node, when whoever looks at it has the token."""

    def pause(self) -> None:
        """Take no new work until told to."""

    def resume(self) -> None:
        """Take work again."""


async def serve_page(
    board: Board,
    *,
    port: int = PORT,
    token: str | None = None,
    control: Control | None = None,
    task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; the value of `started` is the address. Without a token the page can only be looked at."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the page needs {', '.join(missing)}",
            advice="pip install 'echo-node[page]', or leave the page out with --no-page",
        )
    from echo_node.dashboard.app import Powers  # noqa: PLC0415 - the extra may be missing
    from echo_node.dashboard.serving import serve  # noqa: PLC0415

    await serve(board, Powers(token, control), port, task_status=task_status)


__all__ = ["PORT", "Control", "free_port", "serve_page"]
