"""Provider records of the DHT, bounded per key, per provider and in all."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from multiaddr import Multiaddr

SECONDS: Final = 45 * 60.0
"""Seconds that a record is valid; providers announce three times in that time."""
PER_KEY: Final = 64
PER_PROVIDER: Final = 8_192
RECORDS: Final = 65_536


@dataclass(frozen=True, slots=True)
class _Record:
    addresses: tuple[Multiaddr, ...]
    until: float


class Providers:
    """Provider records. The provider with the most of them makes room."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, OrderedDict[bytes, _Record]] = {}
        self._keys_of: dict[bytes, OrderedDict[bytes, None]] = {}
        self._counts: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, key: bytes, provider: bytes, addresses: Sequence[Multiaddr]) -> None:
        self._remove(key, provider)
        if self._counts[provider] >= PER_PROVIDER:
            self._remove(next(iter(self._keys_of[provider])), provider)
        elif len(self) >= RECORDS:
            greedy = max(self._counts, key=lambda each: self._counts[each])
            self._remove(next(iter(self._keys_of[greedy])), greedy)
        if len(self._by_key.get(key, ())) >= PER_KEY:
            self._remove(key, next(iter(self._by_key[key])))
        self._by_key.setdefault(key, OrderedDict())[provider] = _Record(
            tuple(addresses), trio.current_time() + SECONDS
        )
        self._keys_of.setdefault(provider, OrderedDict())[key] = None
        self._counts[provider] += 1

    def of(self, key: bytes) -> dict[bytes, tuple[Multiaddr, ...]]:
        """Return the providers of a key and their addresses, newest first."""
        now = trio.current_time()
        for provider in [each for each, record in self._by_key.get(key, {}).items() if record.until <= now]:
            self._remove(key, provider)
        return {each: record.addresses for each, record in reversed(self._by_key.get(key, {}).items())}

    def expire(self) -> None:
        for key in tuple(self._by_key):
            self.of(key)

    def _remove(self, key: bytes, provider: bytes) -> None:
        if provider not in self._by_key.get(key, ()):
            return
        del self._by_key[key][provider]
        if not self._by_key[key]:
            del self._by_key[key]
        del self._keys_of[provider][key]
        if not self._keys_of[provider]:
            del self._keys_of[provider]
        self._counts[provider] -= 1
        if not self._counts[provider]:
            del self._counts[provider]
