"""Targets on this machine: processes that a contract or an engine may have taken over, programs that reach loopback, the LAN."""

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

from echo_node.board import Board
from echo_node.contract import Prompt
from echo_node.contract.jail.parcels import pack_prompt
from echo_node.contract.jail.pipe import Pipe, PipeError
from echo_node.contract.jail.seat import _understood
from echo_node.contract.sandbox import _read_answer, _read_prompt
from echo_node.control.serving import NodeHand, _Desk
from echo_node.dashboard.app import Powers, application
from echo_node.dashboard.door import Door
from echo_node.dashboard.live import Listeners
from echo_node.dashboard.serving import Server
from echo_node.dashboard.totals import Totals
from echo_node.dashboard.view import View
from echo_node.engine import parcels
from echo_node.engine import pipe as engine_pipe
from echo_node.engine.base import Claim, Draw, Finished, SamplingLimits, SlotRequest
from echo_node.net.meeting.lan import SERVICE, Lan
from echo_node.pausing import Gate
from tests.fuzz.loops import bare, looped
from tests.fuzz.target import Feed, Target, plain
from tests.fuzz.wires import ME, PEER

TOKEN: Final = b"\0" * 8
PORT: Final = 4100
LISTEN_SECONDS: Final = 100.0
"""Of the clock that jumps."""


# A socket between two who do not trust each other


async def _called(serve: Callable[[trio.SocketStream], Awaitable[None]], data: bytes) -> bytes:
    """Somebody connects, says all of this at once, listens for a while, and hangs up: then it must be over."""
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
    board = Board()
    totals = Totals(board)
    view = View(board, totals, may_control=True)
    server = Server(Door(application(view, totals, Powers("token", NodeHand(Gate())), Listeners()), PORT))
    said = await _called(server.take, data)
    return said.startswith(b"HTTP/1.1 20")


async def _control(data: bytes) -> bool:
    said = await _called(_Desk(Board(), NodeHand(Gate())).take, data)
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
    """What a jailed process says: an answer to a question about a prompt, or an answer of the contract's own."""

    def feed(data: bytes) -> None:
        ours, its = socket.socketpair()
        with its, closing(Pipe(ours)) as pipe:
            its.settimeout(0)
            its.send(data[1:])
            its.shutdown(socket.SHUT_WR)
            read: Any = _read_prompt if data[:1] == b"\0" else _read_answer
            for index in range(2):
                _understood(pipe.receive(5.0), [TOKEN, index], read)

    yield feed


def _jail_says() -> list[bytes]:
    prompt = pack_prompt(Prompt("r12345=", {"digits": "12345"}, "Be brief.", chat=True))
    said = [
        (b"\0", [[TOKEN, 0, True, *prompt], [TOKEN, 1, True, *prompt]]),
        (b"\1", [[TOKEN, 0, True, "54321"], [TOKEN, 1, True, "1"]]),
        (b"\1", [[TOKEN, 0, False, "it failed", False], [TOKEN, 1, False, "no memory", True]]),
    ]
    return [
        which + b"".join(len(body).to_bytes(4, "little") + body for body in map(msgpack.packb, messages))
        for which, messages in said
    ]


_LIMITS: Final = SamplingLimits(max_tokens=4, temperature=1.0, end_tokens=frozenset({12}), vocab_size=16)
_UNPACKERS: Final[tuple[Callable[[Any], object], ...]] = (
    parcels.unpack_finished,
    parcels.unpack_scores,
    parcels.unpack_description,
    parcels.unpack_request,
    parcels.unpack_claim,
    parcels.unpack_change,
    parcels.unpack_limits,
)


def _engine(data: bytes) -> None:
    """What an engine's process says, and what it is told."""
    if data:
        _UNPACKERS[data[0] % len(_UNPACKERS)](engine_pipe.decode(data[1:]))


def _engine_says() -> list[bytes]:
    ids, logprobs = np.array([1, 2, 12]), np.array([-0.5, -0.25, -0.125])
    finished = parcels.pack_finished(Finished(0, 1, Draw(ids, logprobs, "end", ())))
    request = parcels.pack_request(SlotRequest(ids, bytes(32), 2, _LIMITS))
    claim = parcels.pack_claim(Claim(ids, ids))
    told = ((0, finished), (3, request), (4, claim), (6, parcels.pack_limits(_LIMITS)))
    return [bytes([which]) + msgpack.packb({"kind": "said", **message}) for which, message in told]


# The LAN


def _lan(data: bytes) -> bool:
    """The TXT record of a node that announces itself by multicast DNS."""
    found: list[bytes] = []
    info = ServiceInfo(SERVICE, f"fuzz.{SERVICE}", properties=data)
    Lan(ME.public, list)._tell(info, lambda public, _ways: found.append(public))
    return bool(found)


def _records() -> list[bytes]:
    entries = [f"id={PEER.peer_id}".encode(), b"a0=/ip4/192.168.1.2/tcp/4001", b"a1=/ip4/10.0.0.9/tcp/1"]
    return [b"".join(bytes([len(entry)]) + entry for entry in entries)]


TARGETS: Final = [
    Target(
        name="page",
        entry="echo_node.dashboard.serving.Server.take",
        opener=functools.partial(looped, bare(_page)),
        seeds=_requests,
    ),
    Target(
        name="control",
        entry="echo_node.control.serving.serve_control",
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
        entry="echo_node.contract.jail.pipe.Pipe.receive",
        opener=_jail,
        seeds=_jail_says,
        also=(PipeError,),
        prefix=1,
    ),
    Target(
        name="engine-pipe",
        entry="echo_node.engine.pipe.decode",
        opener=plain(_engine),
        seeds=_engine_says,
        also=(engine_pipe.PipeError,),
        prefix=1,
    ),
    Target(
        name="lan",
        entry="echo_node.net.meeting.lan.Lan._tell",
        opener=plain(_lan),
        seeds=_records,
        most=1_024,
    ),
]
