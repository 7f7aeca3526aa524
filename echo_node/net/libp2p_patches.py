"""Patches to py-libp2p that cannot be subclasses, each with a test.

The patches depend on the library's internals, so its version is checked first.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from importlib.metadata import version
from typing import Any, Final

from libp2p.crypto import serialization
from libp2p.crypto.exceptions import CryptographyError
from libp2p.crypto.keys import KeyType, PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.stream_muxer import muxer_multistream
from libp2p.tools.anyio_service.trio_manager import TrioManager
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from echo_node.errors import ConfigError, DefectError, EchoError, boundary
from echo_node.net.yamux.muxer import Yamux

VERSION: Final = "0.8.1"
NEGOTIATION_BYTES: Final = 1_024
"""Bytes of one line of multistream-select: the name of a protocol, or a keyword."""
_done: list[bool] = []
_log = logging.getLogger("echo_node.net.libp2p_patches")


def harden() -> None:
    """Apply the patches, once per process."""
    if _done:
        return
    if (found := version("libp2p")) != VERSION:
        raise ConfigError(
            f"py-libp2p {found} is installed, and echo-node is made for {VERSION}",
            advice=f"pip install 'libp2p=={VERSION}'",
        )
    _silence_loggers()
    _use_our_yamux()
    _bound_negotiation()
    _accept_ed25519_only()
    _contain_tasks()
    _done.append(True)


def _silence_loggers() -> None:
    """Silence the library's loggers.

    The library logs what any stranger does to it, partly on the root logger. One of its loggers
    sets its own level, and repeats for ever that there could be more connections.
    """
    for name in ("libp2p", "libp2p.network.auto_connector"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _use_our_yamux() -> None:
    """Use our Yamux, as the library ignores the muxer given for `/yamux/1.0.0`."""
    muxer_multistream.Yamux = Yamux  # type: ignore[attr-defined, assignment]


def _bound_negotiation() -> None:
    """Bound a line of protocol negotiation, which an unauthenticated peer can send.

    The library reads lines of any length. A line that is not UTF-8 ends the negotiation, and not
    the task that runs it.
    """

    async def read(self: multiselect_communicator.MultiselectCommunicator) -> str:
        try:
            line = await read_varint_prefixed_bytes_limited(self.read_writer, NEGOTIATION_BYTES)
            text = line.decode()
        except (ParseError, IOException, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError("a line that is none") from error
        if not text.endswith("\n"):
            raise MultiselectCommunicatorError("a line without an end")
        return text[:-1]

    multiselect_communicator.MultiselectCommunicator.read = read  # type: ignore[method-assign]


def _accept_ed25519_only() -> None:
    """Accept Ed25519 public keys only.

    An unauthenticated peer may otherwise send an RSA key that takes the library seconds to check:
    it accepts private keys as public ones, and tests their primes. Peer ids of this network are
    Ed25519.
    """

    def refuse(_data: bytes) -> PublicKey:
        raise CryptographyError("a kind of key that has no place here")

    known = serialization.key_type_to_public_key_deserializer
    for kind in known:
        if kind != KeyType.Ed25519.value:
            known[kind] = refuse
    RSAPublicKey.from_bytes = refuse  # type: ignore[method-assign, assignment]  # signed records of peers do not ask by kind


def _contain_tasks() -> None:
    """Make an unexpected error on a connection end that connection only.

    In the library, an error in a task of a service ends the service; the tasks of a swarm are its
    connections, so that the first such error ends them all.
    """
    stock = TrioManager.run_task

    def run_task(
        self: TrioManager,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        _internal: bool = False,
        **named: Any,
    ) -> None:
        stock(self, async_fn if _internal else _contained(async_fn), *args, _internal=_internal, **named)

    TrioManager.run_task = run_task  # type: ignore[method-assign]


def _contained(work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    @wraps(work)
    async def run(*args: Any) -> None:
        try:
            with boundary(DefectError, "carrying a connection"):
                await work(*args)
        except (EchoError, ExceptionGroup) as error:
            _log.error("%s", error, exc_info=error)
            if isinstance(connection := getattr(work, "__self__", None), SwarmConn):
                await connection.close()

    return run
