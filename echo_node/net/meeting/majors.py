"""Peers of another major version of the wire: they share no protocol with this node, and its person hears of that in words.

What a peer says that it speaks is its own claim: it decides about one line of text, and about nothing else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from protocol import limits, peer_id

MOST: Final = 3
"""Versions that are spoken of: a liar gets no more lines than that."""
_NAME: Final = re.compile(r"/echo/[a-z]{1,32}/([1-9][0-9]{0,5})(?:\.[0-9]{1,6}){0,2}", re.ASCII)
_log = logging.getLogger("echo_node.net.meeting.majors")


def other_major(protocols: Iterable[str]) -> int | None:
    """The major version that a peer speaks if it does not speak ours; None for one of ours, and for a stranger."""
    majors = {int(found[1]) for each in protocols if (found := _NAME.fullmatch(each)) is not None}
    return None if limits.MAJOR in majors else max(majors, default=None)


class Majors:
    """Says once of each other version that somebody speaks it."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def heed(self, peer: bytes, protocols: Iterable[str]) -> bool:
        """Whether the peer is of another major version."""
        major = other_major(protocols)
        if major is None:
            return False
        if major not in self._said and len(self._said) < MOST:
            self._said.add(major)
            _log.warning("%s", in_words(peer, major))
        return True


def in_words(peer: bytes, major: int) -> str:
    """Who has to do what, so that the two can work together."""
    ours = limits.MAJOR
    fix = (
        "install a newer echo-node to work with it"
        if major > ours
        else "whoever runs it has to install a newer echo-node"
    )
    return (
        f"{peer_id(peer)} speaks version {major} of the protocol, and this node speaks version {ours}: {fix}"
    )
