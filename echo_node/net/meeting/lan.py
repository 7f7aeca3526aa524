"""Nodes on one LAN find each other by multicast DNS, with no seed at all.

Zeroconf works in a thread of its own; what it hears crosses over through one bounded list. What is heard is hearsay from
the LAN: peers and addresses to try. It dials nobody. Without multicast it says so once and finds nobody.
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
from echo_node.net.meeting.places import Scope, expand, interfaces, usable
from echo_node.threads import run_abandonable
from protocol import ProtocolError, peer_id, public_key_of

SERVICE: Final = "_echo-node._tcp.local."
NAMES: Final = 64
"""Names of others that wait to be looked at; when more come, the oldest go."""
ADDRESSES: Final = 8
TEXT_BYTES: Final = 250
"""One entry of a TXT record has at most 255."""
LOOK_MS: Final = 2_000
START_SECONDS: Final = 10.0
STOP_SECONDS: Final = 3.0
CHECK_SECONDS: Final = 5.0
"""How often the interfaces of this machine are looked at: a laptop moves."""
_log = logging.getLogger("echo_node.net.meeting.lan")

T = TypeVar("T")
Found: TypeAlias = Callable[[bytes, Sequence[str]], None]


class LanError(EchoError):
    """This machine's network lets no multicast through."""


class Lan:
    """One node's voice and ear on the LAN."""

    def __init__(
        self, public: bytes, listening: Callable[[], Sequence[str]], *, service: str = SERVICE
    ) -> None:
        """`listening` gives the addresses at which the node listens, 0.0.0.0 for every interface."""
        self._public = public
        self._listening = listening
        self._service = service
        self._said = ""

    async def run(self, found: Found) -> None:
        """Announce this node and tell of others, until cancelled."""
        while True:
            ips = interfaces()
            told = self._announced(ips)
            if not told:
                self._say_once("this node does not listen on a LAN: it is neither announced nor found there")
                await self._until_changed(told)
                continue
            try:
                await self._meet(told, found)
            except LanError as error:
                self._say_once(f"nobody is looked for on the LAN: {error}")
                await self._until_changed(told)

    def _announced(self, ips: Sequence[str]) -> list[str]:
        where = expand(self._listening(), ips)
        return usable(where, self._public, least=Scope.PRIVATE, most=ADDRESSES)

    async def _until_changed(self, told: Sequence[str]) -> None:
        while self._announced(interfaces()) == told:  # noqa: ASYNC110 - interfaces tell nobody when they change
            await trio.sleep(CHECK_SECONDS)

    async def _meet(self, told: Sequence[str], found: Found) -> None:
        names: deque[str] = deque(maxlen=NAMES)
        heard = _Bell()

        def hear(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:  # in zeroconf's thread
            if state_change is not ServiceStateChange.Removed and name not in names:
                names.append(name)
                heard.ring()

        async with _zeroconf() as voice, trio.open_nursery() as nursery:
            own = self._own(told)
            await _in_thread("announcing this node", lambda: voice.register_service(own), START_SECONDS)
            browser = await _in_thread(
                "listening for others",
                lambda: ServiceBrowser(voice, self._service, handlers=[hear]),
                START_SECONDS,
            )
            _log.debug("announced on the LAN with %s", ", ".join(told))
            nursery.start_soon(self._look, voice, names, heard, own.name, found)
            await self._until_changed(told)
            nursery.cancel_scope.cancel()
            browser.cancel()

    async def _look(self, voice: Zeroconf, names: deque[str], heard: _Bell, own: str, found: Found) -> None:
        """One name after the other: however many are shouted, one look is under way."""
        while True:
            await heard.wait()
            while names:
                name = names.popleft()
                if name == own:
                    continue
                info = ServiceInfo(self._service, name)
                try:
                    there = await _in_thread(
                        "looking at a node of the LAN",
                        lambda info=info: info.load_from_cache(voice) or info.request(voice, LOOK_MS),  # type: ignore[misc]
                        2 * LOOK_MS / 1000,
                    )
                except LanError as error:
                    _log.debug("%s", error)
                    continue
                if there:
                    self._tell(info, found)

    def _tell(self, info: ServiceInfo, found: Found) -> None:
        record = info.decoded_properties
        try:
            public = public_key_of(record.get("id") or "")
        except ProtocolError as error:
            _log.debug("a node of the LAN without a name: %s", error)
            return
        addresses = [record.get(f"a{index}") or "" for index in range(ADDRESSES)]
        ways = usable(addresses, public, least=Scope.PRIVATE, most=ADDRESSES)
        if ways and public != self._public:
            found(public, ways)

    def _own(self, told: Sequence[str]) -> ServiceInfo:
        """The announcement. Its name is luck, so that nobody can take it before us; who we are stands inside."""
        record = {"id": peer_id(self._public)}
        record |= {f"a{index}": way for index, way in enumerate(told) if len(way) <= TEXT_BYTES}
        name = secrets.token_hex(8)
        ips = [way.split("/")[2] for way in told]
        port = int(told[0].split("/")[4])
        return ServiceInfo(
            self._service,
            f"{name}.{self._service}",
            port=port,
            properties=record,
            server=f"{name}.local.",
            parsed_addresses=list(dict.fromkeys(ips)),
        )

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.info("%s", text)


class _Bell:
    """Rung in any thread, heard in trio's. Any number of rings that nobody heard are one."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._rung = trio.Event()

    def ring(self) -> None:
        try:
            self._token.run_sync_soon(self._rung.set, idempotent=True)
        except trio.RunFinishedError:
            return  # the node has ended, and this thread is about to

    async def wait(self) -> None:
        await self._rung.wait()
        self._rung = trio.Event()


@asynccontextmanager
async def _zeroconf() -> AsyncGenerator[Zeroconf]:
    given_up = threading.Event()

    def open_voice() -> Zeroconf:
        voice = Zeroconf(InterfaceChoice.All)
        if given_up.is_set():
            voice.close()
        return voice

    try:
        voice = await _in_thread("opening multicast DNS", open_voice, START_SECONDS)
    except BaseException:
        given_up.set()
        raise
    try:
        yield voice
    finally:
        # says goodbye and ends its thread; what hangs is left to its daemon thread
        with trio.CancelScope(shield=True):
            try:
                await _in_thread("closing multicast DNS", voice.close, STOP_SECONDS)
            except LanError as error:
                _log.debug("%s", error)


async def _in_thread(doing: str, work: Callable[[], T], seconds: float) -> T:
    """Zeroconf's calls block, and fail in many ways: all of them are this machine's network."""
    try:
        with trio.fail_after(seconds), boundary(LanError, doing):
            return await run_abandonable(work)
    except trio.TooSlowError:
        raise LanError(f"{doing} took more than {seconds:g} s") from None
