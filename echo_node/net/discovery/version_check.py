"""Warn about peers of another major version of the protocol.

The protocols that a peer advertises are its own claim: they decide about a warning, nothing else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from protocol import limits, peer_id

MOST: Final = 3
"""Versions warned about: a liar gets no more lines in the log."""
_NAME: Final = re.compile(r"/echo/[a-z]{1,32}/([1-9][0-9]{0,5})(?:\.[0-9]{1,6}){0,2}", re.ASCII)
_log = logging.getLogger("echo_node.net.discovery.version_check")


def other_major(protocols: Iterable[str]) -> int | None:
    """Return a peer's major version; None if it has ours too, or none at all."""
    majors = {int(found[1]) for each in protocols if (found := _NAME.fullmatch(each)) is not None}
    return None if limits.MAJOR in majors else max(majors, default=None)


class VersionCheck:
    """Warn once about each other major version."""

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def check(self, peer: bytes, protocols: Iterable[str]) -> bool:
        """Return whether the peer is of another major version."""
        major = other_major(protocols)
        if major is None:
            return False
        if major not in self._warned and len(self._warned) < MOST:
            self._warned.add(major)
            _log.warning("%s", describe(peer, major))
        return True


def describe(peer: bytes, major: int) -> str:
    """Return a warning that says who has to upgrade."""
    ours = limits.MAJOR
    fix = (
        "install a newer echo-node to work with it"
        if major > ours
        else "whoever runs it has to install a newer echo-node"
    )
    return (
        f"{peer_id(peer)} speaks version {major} of the protocol, and this node speaks version {ours}: {fix}"
    )
