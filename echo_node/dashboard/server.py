"""HTTP server of the page: Hypercorn connections on loopback.

They run in the caller's nursery. Hypercorn shields its sends from cancellation, so a browser that
has stopped reading would keep the node from ending. Connections are therefore wrapped here: sends
have a deadline, their number is bounded, and they are closed when the page ends. A failure ends one
connection only.
"""

from __future__ import annotations

import errno
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.trio import tcp_server
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState, LifespanState

from echo_node.dashboard.aggregates import Aggregates
from echo_node.dashboard.app import Permissions, application
from echo_node.dashboard.origin_guard import OriginGuard
from echo_node.dashboard.sse import Listeners
from echo_node.dashboard.view import View
from echo_node.errors import ConfigError, DefectError, boundary
from echo_node.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

HOST: Final = "127.0.0.1"
MOST_CONNECTIONS: Final = 64
"""Concurrent connections."""
IDLE_SECONDS: Final = 5
"""Seconds without a request after which a connection is closed."""
SEND_SECONDS: Final = 20.0
"""Seconds for a reader to take what was sent; a browser reconnects by itself."""
LAST_SECONDS: Final = 1.0
"""Seconds for cleanup once nothing more can be sent."""
_log = logging.getLogger(__name__)


class Connection:
    """Stream wrapper for Hypercorn with deadlines on every send."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        self._sending = trio.Lock()
        """Hypercorn sends EOF while an answer is being sent, which a trio stream refuses."""
        self.scope = trio.CancelScope()
        """Scope of the connection's tasks: Hypercorn waits for ever on a reader that has gone."""

    async def send_all(self, data: bytes) -> None:
        try:
            with trio.move_on_after(SEND_SECONDS) as deadline:
                async with self._sending:
                    await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end_soon()
            raise
        if deadline.cancelled_caught:
            self.close()
            self._end_soon()
            raise trio.BrokenResourceError("the reader has stopped reading")

    async def receive_some(self, most: int) -> bytes:
        return await self._stream.receive_some(most)

    async def send_eof(self) -> None:
        async with self._sending:
            await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        """Close at once, even during a send."""
        self.socket.close()

    def _end_soon(self) -> None:
        self.scope.deadline = min(self.scope.deadline, trio.current_time() + LAST_SECONDS)


class _Http1(ProtocolWrapper):
    """HTTP/1.1 only: a stream of HTTP/2 would outlive its connection."""

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except (H2CProtocolRequiredError, H2ProtocolAssumedError):
            await self.send(Closed())


tcp_server.ProtocolWrapper = _Http1  # type: ignore[attr-defined]


class Server:
    """Open connections, and the application that answers on them."""

    def __init__(self, app: OriginGuard) -> None:
        self._app = ASGIWrapper(cast("ASGIFramework", app))
        self._config = Config()
        self._config.errorlog = _log
        self._config.include_server_header = False
        self._config.keep_alive_timeout = IDLE_SECONDS
        self._context = WorkerContext(None)
        self._open: set[Connection] = set()

    async def take(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end."""
        connection = Connection(stream)
        if len(self._open) >= MOST_CONNECTIONS:
            connection.close()
            return
        self._open.add(connection)
        try:
            with boundary(DefectError, "serving the page"):
                state = ConnectionState(LifespanState({}))
                with connection.scope:
                    await TCPServer(self._app, self._config, self._context, state, cast("Any", connection))
        except DefectError as failed:
            _log.warning("%s", failed)
        finally:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        for connection in self._open:
            connection.close()


async def serve(
    board: Snapshot,
    permissions: Permissions,
    port: int,
    *,
    task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; the port is bound first, so that a failure comes at once."""
    with _listen(port) as listening:
        bound = listening.getsockname()[1]
        totals = Aggregates(board)
        may_control = permissions.token is not None and permissions.control is not None
        view = View(board, totals, may_control=may_control)
        server = Server(OriginGuard(application(view, totals, permissions, Listeners()), bound))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(totals.follow)
            nursery.start_soon(trio.serve_listeners, server.take, [listener])
            task_status.started(f"http://{HOST}:{bound}/")
            try:
                await trio.sleep_forever()
            finally:
                server.close()


def _listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(MOST_CONNECTIONS)
    except (OSError, OverflowError) as failed:
        listening.close()
        taken = isinstance(failed, OSError) and failed.errno == errno.EADDRINUSE
        why = "another program uses it" if taken else getattr(failed, "strerror", None) or str(failed)
        raise ConfigError(
            f"the page cannot listen on port {port} of {HOST}: {why}",
            advice="choose another with --page PORT, or leave the page out with --no-page",
        ) from failed
    return listening
