"""Targets of the wire alone: every decoder of `protocol`, of gossip and of the DHT."""

from __future__ import annotations

from typing import Final

from tests.fuzz.decoders import decoders, seeds
from tests.fuzz.target import Feed, Target, plain
from tests.protocol.examples import MESSAGES

_ALL: Final = decoders()
_FAMILIES: Final = {
    "messages": [name for name in _ALL if name in MESSAGES],
    "sealed": [name for name in _ALL if name.startswith("sealed ")],
    "formats": [name for name in _ALL if name not in MESSAGES and not name.startswith("sealed ")],
}
_ENTRIES: Final = {
    "messages": "protocol.wire.decode",
    "sealed": "protocol.envelope.Envelope.open",
    "formats": "protocol.canonical.decode",
}


def _feed(names: list[str]) -> Feed:
    def feed(data: bytes) -> object:
        return _ALL[names[data[0] % len(names)]](data[1:]) if data else None

    return feed


def _starts(names: list[str]) -> list[bytes]:
    found = seeds()
    return [bytes([index]) + data for index, name in enumerate(names) for data in dict.fromkeys(found[name])]


TARGETS: Final = [
    Target(
        name=family,
        entry=_ENTRIES[family],
        opener=plain(_feed(names)),
        seeds=lambda names=names: _starts(names),
        prefix=1,
        memory=2 * 2**20,
    )
    for family, names in _FAMILIES.items()
]
