"""Dashboard: live page and Prometheus metrics of this node, on loopback only.

Everything shown comes from the node's snapshot. Its libraries are the extra `page`, and are
imported when the page is served.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

import trio

from echo_node.errors import ConfigError
from echo_node.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

PORT: Final = 8420
"""Default TCP port of the page."""
_NEEDED: Final = ("starlette", "hypercorn", "prometheus_client")


def free_port() -> int | None:
    """Return the default port, 0 (any) if taken, None without the extra `page`."""
    if any(find_spec(name) is None for name in _NEEDED):
        return None
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return 0 if probe.connect_ex(("127.0.0.1", PORT)) == 0 else PORT


class Control(Protocol):
    """Actions of the page's buttons, for a visitor with the token."""

    def pause(self) -> None:
        """Begin no new work until `resume`."""

    def resume(self) -> None:
        """Resume work."""


async def serve_page(
    board: Snapshot,
    *,
    port: int = PORT,
    token: str | None = None,
    control: Control | None = None,
    task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; `started` gets the address.

    Without a token it is read-only.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the page needs {', '.join(missing)}",
            advice="pip install 'echo-node[page]', or leave the page out with --no-page",
        )
    from echo_node.dashboard.app import Permissions  # noqa: PLC0415 - the extra may be missing
    from echo_node.dashboard.server import serve  # noqa: PLC0415

    await serve(board, Permissions(token, control), port, task_status=task_status)


__all__ = ["PORT", "Control", "free_port", "serve_page"]
