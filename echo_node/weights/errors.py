"""Refusals of weights, by a name that logs, scores and tests share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from echo_node.errors import PeerError
from protocol import ProtocolError


class UnprovenError(PeerError):
    """Weights, or what leads to them, do not match their head. Nothing was taken.

    `reason` is wrong-base, wrong-after-hash, wrong-root, wrong-layout, wrong-table, missing-blob,
    unknown-codec, or that of a `ProtocolError`, such as bad-frame.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@contextmanager
def unproven(doing: str) -> Generator[None]:
    """Turn a `ProtocolError` into an `UnprovenError` with the same reason."""
    try:
        yield
    except ProtocolError as error:
        raise UnprovenError(error.reason, f"{doing}: {error}") from error
