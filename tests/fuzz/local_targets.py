"""Targets on this machine: jailed contracts, engine processes, programs on loopback, the LAN."""

from __future__ import annotations

import functools
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from typing import Any, Final

import msgpack
import numpy as np
import trio
from zeroconf import ServiceInfo

from echo_node.contract import Prompt
from echo_node.contract.jail.process import MAX_MESSAGE_BYTES
from echo_node.contract.jail.serde import pack_prompt
from echo_node.contract.jail.worker import _read_answer as read_answer
from echo_node.contract.sandbox import _read_answer, _read_prompt
from echo_node.control.server import NodeControl, _ControlServer
from echo_node.dashboard.aggregates import Aggregates
from echo_node.dashboard.app import Permissions, application
from echo_node.dashboard.origin_guard import OriginGuard
from echo_node.dashboard.server import Server
from echo_node.dashboard.sse import Listeners
from echo_node.dashboard.view import View
from echo_node.engine.base import Claim, Draw, Finished, SamplingLimits, SlotRequest
from echo_node.engine.worker import serde
from echo_node.net.discovery.mdns import SERVICE, MdnsDiscovery
from echo_node.runtime import ipc
from echo_node.runtime.pause_gate import PauseGate
from echo_node.telemetry.snapshot import Snapshot
from tests.fuzz.loops import bare, looped
from tests.fuzz.target import Feed, Target, plain
from tests.fuzz.wires import ME, PEER

TOKEN: Final = b"\0" * 8
PORT: Final = 4100
LISTEN_SECONDS: Final = 100.0
"""Of the clock that jumps."""


# A socket between two who do not trust each other


async def _called(serve: Callable[[trio.SocketStream], Awaitable[None]], data: bytes) -> bytes:
    """Connect, send all of this at once, read for a while, hang up: then it must be over."""
    ours, its = socket.socketpair()
    its.settimeout(0)
    its.send(data)
    its.shutdown(socket.SHUT_WR)
    said = b""

    async def take() -> None:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
            await serve(stream)
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await trio.sleep(LISTEN_SECONDS)
            said = _heard(its)
            its.close()
        return said or _heard(its)
    finally:
        its.close()


def _heard(end: socket.socket) -> bytes:
    try:
        return end.recv(65_536)
    except (BlockingIOError, OSError):
        return b""


async def _page(data: bytes) -> bool:
    board = Snapshot()
    totals = Aggregates(board)
    view = View(board, totals, may_control=True)
    server = Server(
        OriginGuard(
            application(view, totals, Permissions("token", NodeControl(PauseGate())), Listeners()), PORT
        )
    )
    said = await _called(server.take, data)
    return said.startswith(b"HTTP/1.1 20")


async def _control(data: bytes) -> bool:
    said = await _called(_ControlServer(Snapshot(), NodeControl(PauseGate())).take, data)
    return bool(said) and b'"error"' not in said


def _requests() -> list[bytes]:
    def asked(what: str, *more: str) -> bytes:
        return "\r\n".join([f"{what} HTTP/1.1", f"Host: 127.0.0.1:{PORT}", *more, "", ""]).encode()

    return [
        asked("GET /"),
        asked("GET /api/snapshot", f"Origin: http://127.0.0.1:{PORT}"),
        asked("GET /api/events", "Sec-Fetch-Site: same-origin"),
        asked("GET /metrics", "Connection: close"),
        asked("POST /api/pause", "Authorization: Bearer token", "Content-Length: 0"),
        asked("POST /api/resume", "X-Echo-Token: token", "Content-Length: 2") + b"{}",
        asked("GET /", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZQ=="),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        asked("GET /", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    ]


# Pipes


@contextmanager
def _jail() -> Generator[Feed]:
    """A message of a jailed process: about a prompt, or an answer of the contract's own."""

    def feed(data: bytes) -> None:
        ours, its = socket.socketpair()
        with its, closing(ipc.Pipe(ours, max_bytes=MAX_MESSAGE_BYTES)) as pipe:
            its.settimeout(0)
            its.send(data[1:])
            its.shutdown(socket.SHUT_WR)
            read: Any = _read_prompt if data[:1] == b"\0" else _read_answer
            for index in range(2):
                read_answer(pipe.expect(5.0), TOKEN, index, read)

    yield feed


def _jail_says() -> list[bytes]:
    prompt = pack_prompt(Prompt("r12345=", {"digits": "12345"}, "Be brief.", chat=True))
    said = [
        (b"\0", [{"kind": "result", "fields": prompt}] * 2),
        (b"\1", [{"kind": "result", "fields": ["54321"]}, {"kind": "result", "fields": ["1"]}]),
        (
            b"\1",
            [
                {"kind": "failed", "reason": "it failed", "out_of_memory": False},
                {"kind": "failed", "reason": "no memory", "out_of_memory": True},
            ],
        ),
    ]
    return [
        which
        + b"".join(
            ipc.encode({**answer, "token": TOKEN, "index": index}) for index, answer in enumerate(answers)
        )
        for which, answers in said
    ]


_LIMITS: Final = SamplingLimits(max_tokens=4, temperature=1.0, end_tokens=frozenset({12}), vocab_size=16)
_UNPACKERS: Final[tuple[Callable[[Any], object], ...]] = (
    serde.unpack_finished,
    serde.unpack_scores,
    serde.unpack_description,
    serde.unpack_request,
    serde.unpack_claim,
    serde.unpack_change,
    serde.unpack_limits,
)


def _engine(data: bytes) -> None:
    """What an engine's process says, and what it is told."""
    if data:
        _UNPACKERS[data[0] % len(_UNPACKERS)](ipc.decode(data[1:]))


def _engine_says() -> list[bytes]:
    ids, logprobs = np.array([1, 2, 12]), np.array([-0.5, -0.25, -0.125])
    finished = serde.pack_finished(Finished(0, 1, Draw(ids, logprobs, "end", ())))
    request = serde.pack_request(SlotRequest(ids, bytes(32), 2, _LIMITS))
    claim = serde.pack_claim(Claim(ids, ids))
    told = ((0, finished), (3, request), (4, claim), (6, serde.pack_limits(_LIMITS)))
    return [bytes([which]) + msgpack.packb({"kind": "said", **message}) for which, message in told]


# The LAN


def _lan(data: bytes) -> bool:
    """The TXT record of a node that announces itself by multicast DNS."""
    found: list[bytes] = []
    info = ServiceInfo(SERVICE, f"fuzz.{SERVICE}", properties=data)
    MdnsDiscovery(ME.public, list)._report(info, lambda public, _ways: found.append(public))
    return bool(found)


def _records() -> list[bytes]:
    entries = [f"id={PEER.peer_id}".encode(), b"a0=/ip4/192.168.1.2/tcp/4001", b"a1=/ip4/10.0.0.9/tcp/1"]
    return [b"".join(bytes([len(entry)]) + entry for entry in entries)]


TARGETS: Final = [
    Target(
        name="page",
        entry="echo_node.dashboard.server.Server.take",
        opener=functools.partial(looped, bare(_page)),
        seeds=_requests,
    ),
    Target(
        name="control",
        entry="echo_node.control.server.serve_control",
        opener=functools.partial(looped, bare(_control)),
        seeds=lambda: [
            b'{"ask": "status", "steps": 3}\n',
            b'{"ask": "watch"}\n',
            b'{"ask": "pause"}\n',
            b'{"ask": "leave"}\n',
        ],
        most=512,
    ),
    Target(
        name="jail-pipe",
        entry="echo_node.runtime.ipc.Pipe.receive",
        opener=_jail,
        seeds=_jail_says,
        also=(ipc.PipeError,),
        prefix=1,
    ),
    Target(
        name="engine-pipe",
        entry="echo_node.runtime.ipc.decode",
        opener=plain(_engine),
        seeds=_engine_says,
        also=(ipc.PipeError,),
        prefix=1,
    ),
    Target(
        name="lan",
        entry="echo_node.net.discovery.mdns.MdnsDiscovery._report",
        opener=plain(_lan),
        seeds=_records,
        most=1_024,
    ),
]
