"""Discovery of nodes on the LAN by multicast DNS, without any seed.

Zeroconf works in a thread of its own; the names that it finds cross over in one bounded queue.
Announcements are unverified: peers and addresses to try. Without multicast, that is logged once
and nobody is found.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

import trio
from zeroconf import InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from echo_node.errors import EchoError, boundary
from echo_node.net.discovery.address_scope import Scope, expand, interfaces, usable
from echo_node.runtime.threads import run_abandonable
from protocol import ProtocolError, peer_id, public_key_of

SERVICE: Final = "_echo-node._tcp.local."
NAMES: Final = 64
"""Announced names that wait to be resolved; the oldest are dropped."""
ADDRESSES: Final = 8
TEXT_BYTES: Final = 250
"""Most bytes of one address; an entry of a TXT record has at most 255."""
RESOLVE_MS: Final = 2_000
START_SECONDS: Final = 10.0
STOP_SECONDS: Final = 3.0
CHECK_SECONDS: Final = 5.0
"""Seconds between checks of this machine's interfaces: a laptop moves."""
_log = logging.getLogger("echo_node.net.discovery.mdns")

T = TypeVar("T")
Found: TypeAlias = Callable[[bytes, Sequence[str]], None]


class LanError(EchoError):
    """Multicast DNS does not work on this machine's network."""


class MdnsDiscovery:
    """Announces one node on the LAN and finds others."""

    def __init__(
        self, public: bytes, listening: Callable[[], Sequence[str]], *, service: str = SERVICE
    ) -> None:
        """Make it for a node; `listening` returns its listen addresses (0.0.0.0 for all)."""
        self._public = public
        self._listening = listening
        self._service = service
        self._last_logged = ""

    async def run(self, found: Found) -> None:
        """Announce this node and report others, until cancelled."""
        while True:
            ips = interfaces()
            addresses = self._announced(ips)
            if not addresses:
                self._log_once("this node does not listen on a LAN: it is neither announced nor found there")
                await self._until_changed(addresses)
                continue
            try:
                await self._discover(addresses, found)
            except LanError as error:
                self._log_once(f"nobody is looked for on the LAN: {error}")
                await self._until_changed(addresses)

    def _announced(self, ips: Sequence[str]) -> list[str]:
        where = expand(self._listening(), ips)
        return usable(where, self._public, least=Scope.LINK, most=ADDRESSES)

    async def _until_changed(self, addresses: Sequence[str]) -> None:
        while self._announced(interfaces()) == addresses:  # noqa: ASYNC110 - interfaces tell nobody when they change
            await trio.sleep(CHECK_SECONDS)

    async def _discover(self, addresses: Sequence[str], found: Found) -> None:
        names: deque[str] = deque(maxlen=NAMES)
        wakeup = _Wakeup()

        def on_change(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:
            # in zeroconf's thread
            if state_change is not ServiceStateChange.Removed and name not in names:
                names.append(name)
                wakeup.set()

        async with _zeroconf() as zeroconf, trio.open_nursery() as nursery:
            own = self._service_info(addresses)
            await _in_thread("announcing this node", lambda: zeroconf.register_service(own), START_SECONDS)
            browser = await _in_thread(
                "listening for others",
                lambda: ServiceBrowser(zeroconf, self._service, handlers=[on_change]),
                START_SECONDS,
            )
            _log.debug("announced on the LAN with %s", ", ".join(addresses))
            nursery.start_soon(self._resolve_names, zeroconf, names, wakeup, own.name, found)
            await self._until_changed(addresses)
            nursery.cancel_scope.cancel()
            browser.cancel()

    async def _resolve_names(
        self, zeroconf: Zeroconf, names: deque[str], wakeup: _Wakeup, own: str, found: Found
    ) -> None:
        """Resolve one name after the other, so that a flood of names costs one at a time."""
        while True:
            await wakeup.wait()
            while names:
                name = names.popleft()
                if name == own:
                    continue
                info = ServiceInfo(self._service, name)
                try:
                    resolved = await _in_thread(
                        "looking at a node of the LAN",
                        lambda info=info: (
                            info.load_from_cache(zeroconf) or info.request(zeroconf, RESOLVE_MS)
                        ),  # type: ignore[misc]
                        2 * RESOLVE_MS / 1000,
                    )
                except LanError as error:
                    _log.debug("%s", error)
                    continue
                if resolved:
                    self._report(info, found)

    def _report(self, info: ServiceInfo, found: Found) -> None:
        record = info.decoded_properties
        try:
            public = public_key_of(record.get("id") or "")
        except ProtocolError as error:
            _log.debug("a node of the LAN without a name: %s", error)
            return
        addresses = [record.get(f"a{index}") or "" for index in range(ADDRESSES)]
        ways = usable(addresses, public, least=Scope.LINK, most=ADDRESSES)
        if ways and public != self._public:
            found(public, ways)

    def _service_info(self, addresses: Sequence[str]) -> ServiceInfo:
        """Make the announcement, under a random name that nobody can take before us."""
        record = {"id": peer_id(self._public)}
        record |= {f"a{index}": way for index, way in enumerate(addresses) if len(way) <= TEXT_BYTES}
        name = secrets.token_hex(8)
        ips = [way.split("/")[2] for way in addresses]
        port = int(addresses[0].split("/")[4])
        return ServiceInfo(
            self._service,
            f"{name}.{self._service}",
            port=port,
            properties=record,
            server=f"{name}.local.",
            parsed_addresses=list(dict.fromkeys(ips)),
        )

    def _log_once(self, text: str) -> None:
        if text != self._last_logged:
            self._last_logged = text
            _log.info("%s", text)


class _Wakeup:
    """An event that any thread sets and trio awaits; several sets may become one."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()

    def set(self) -> None:
        try:
            self._token.run_sync_soon(self._event.set, idempotent=True)
        except trio.RunFinishedError:
            return  # the node has ended, and this thread is about to

    async def wait(self) -> None:
        await self._event.wait()
        self._event = trio.Event()


@asynccontextmanager
async def _zeroconf() -> AsyncGenerator[Zeroconf]:
    given_up = threading.Event()

    def open_zeroconf() -> Zeroconf:
        zeroconf = Zeroconf(InterfaceChoice.All)
        if given_up.is_set():
            zeroconf.close()
        return zeroconf

    try:
        zeroconf = await _in_thread("opening multicast DNS", open_zeroconf, START_SECONDS)
    except BaseException:
        given_up.set()
        raise
    try:
        yield zeroconf
    finally:
        # Sends goodbye and ends its thread; what hangs is left to its daemon thread.
        with trio.CancelScope(shield=True):
            try:
                await _in_thread("closing multicast DNS", zeroconf.close, STOP_SECONDS)
            except LanError as error:
                _log.debug("%s", error)


async def _in_thread(doing: str, work: Callable[[], T], seconds: float) -> T:
    """Run a blocking call of Zeroconf in a thread; any failure is a `LanError`."""
    try:
        with trio.fail_after(seconds), boundary(LanError, doing):
            return await run_abandonable(work)
    except trio.TooSlowError:
        raise LanError(f"{doing} took more than {seconds:g} s") from None
