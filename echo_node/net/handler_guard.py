"""Guard around the validators and handlers that a network calls.

Whatever they raise becomes a validation result, a refusal or a counted and logged bug, and never
ends the network. Also records the faults of peers.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

import trio

from echo_node.errors import EchoError, boundary, one_line
from echo_node.net.base import (
    IGNORE,
    BusyError,
    Handler,
    Message,
    Reject,
    RequestError,
    SenderMuted,
    Validation,
    ValidationResult,
    Validator,
)
from protocol import ProtocolError, peer_id

SHORT: Final = 200
"""Most characters of a refusal that the requester gets to read."""
PEERS: Final = 4_096
REASONS: Final = 32
OTHER: Final = "other"
_log = logging.getLogger("echo_node.net")


class _BugError(EchoError):
    """An unexpected error of our own code."""


def run_validator(validator: Validator, message: Message, counts: Counter[str]) -> Validation:
    """Run a validator; a bug in it drops the message, is counted and scores nobody."""
    try:
        with boundary(_BugError, f"validating gossip on {message.topic}"):
            return _checked_result(validator, message)
    except (EchoError, ExceptionGroup) as bug:
        counts["contained"] += 1
        _log.error("%s", bug, exc_info=bug)
        return IGNORE


def _checked_result(validator: Validator, message: Message) -> Validation:
    try:
        result = validator(message)
    except ProtocolError as error:
        return Reject(error.reason)
    if not isinstance(result, ValidationResult | Reject | SenderMuted):
        raise TypeError(
            f"a validator answers ACCEPT, IGNORE, Reject(reason) or SenderMuted(why), not {type(result).__name__}"
        )
    return result


async def run_handler(
    handler: Handler, stream: str, peer: bytes, data: bytes, scope: trio.CancelScope, counts: Counter[str]
) -> bytes | RequestError:
    """Run a handler; return its response, or the error that the requester gets.

    Cancelling the scope ends the handler.
    """
    try:
        with boundary(_BugError, f"answering {peer_id(peer)} on {stream}"), scope:
            response = await _checked_response(handler, peer, data)
    except _BugError as bug:
        counts["contained"] += 1
        _log.error("%s", bug, exc_info=bug)
        return RequestError("internal-error", "internal error")
    except BusyError as error:
        return RequestError("busy", one_line(error.what)[:SHORT])
    except EchoError as error:
        return RequestError("refused", one_line(error.what)[:SHORT])
    except ExceptionGroup as group:  # of EchoErrors, or the boundary would have kept it
        return RequestError("refused", one_line(str(_first(group)))[:SHORT])
    return (
        RequestError("no-handler", "it stopped serving this stream") if scope.cancelled_caught else response
    )


async def _checked_response(handler: Handler, peer: bytes, data: bytes) -> bytes:
    try:
        response = await handler(peer, data)
    except ProtocolError as error:
        raise EchoError(f"{error.reason}: {error}") from error
    check_bytes(response, "an answer")
    return response


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def check_bytes(data: object, what: str) -> None:
    """Require `bytes`: a bytearray could change, and text has no one encoding."""
    if type(data) is not bytes:
        raise TypeError(f"{what} is bytes, not {type(data).__name__}")


def check_name(name: object, what: str) -> None:
    """Require `str` as the name of a topic or stream."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is a str, not {type(name).__name__}")


class Faults:
    """Faults by peer and reason.

    Bounded: the peer with the fewest faults is dropped first, and rare reasons are counted
    together.
    """

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Counter[str]] = {}

    def score(self, peer: bytes, reason: str) -> None:
        if peer not in self._by_peer and len(self._by_peer) >= PEERS:
            del self._by_peer[min(self._by_peer, key=lambda known: self._by_peer[known].total())]
        faults = self._by_peer.setdefault(peer, Counter())
        faults[reason if reason in faults or len(faults) < REASONS - 1 else OTHER] += 1

    def scores(self) -> dict[bytes, dict[str, int]]:
        return {peer: dict(faults) for peer, faults in self._by_peer.items()}
