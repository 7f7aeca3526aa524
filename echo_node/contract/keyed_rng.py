"""Random numbers from a slot's key, the same on every machine and Python version.

`random.Random` does not promise that. The numbers are fixed by BLAKE3 and the few lines below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from blake3 import blake3

from echo_node.errors import ContractError

KEY_BYTES: Final = 32
_LABEL: Final = b"echo/contract/luck/1"
_BLOCK: Final = 64  # bytes of one BLAKE3 output block

T = TypeVar("T")


class KeyStream:
    """An endless byte stream from a key; each draw depends on those before it."""

    def __init__(self, key: bytes) -> None:
        if type(key) is not bytes or len(key) != KEY_BYTES:
            raise ContractError(f"luck comes from a key of {KEY_BYTES} bytes")
        self._stream = blake3(_LABEL, key=key)
        self._ready = b""
        self._read = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes of the stream."""
        while len(self._ready) < count:
            wanted = -(-(count - len(self._ready)) // _BLOCK) * _BLOCK
            self._ready += self._stream.digest(length=wanted, seek=self._read)
            self._read += wanted
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def below(self, bound: int) -> int:
        """Return a uniform integer in [0, `bound`).

        Takes as few bytes as can hold `bound - 1`, little-endian, keeps as few bits, and tries
        again when the number is too large.
        """
        if bound < 1:
            raise ContractError(f"there is no whole number from 0 up to and without {bound}")
        bits = (bound - 1).bit_length()
        while True:
            number = int.from_bytes(self.take((bits + 7) // 8), "little") & ((1 << bits) - 1)
            if number < bound:
                return number

    def between(self, low: int, high: int) -> int:
        """Return a uniform integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def fraction(self) -> float:
        """Return a uniform number in [0, 1), a multiple of 2^-53."""
        return (int.from_bytes(self.take(8), "little") >> 11) * 2.0**-53

    def choice(self, items: Sequence[T]) -> T:
        """Return one of the items, each equally likely."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in a new order, each order equally likely."""
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def digits(self, count: int) -> str:
        """Return `count` decimal digits, each from 0 to 9, the first one too."""
        return "".join("0123456789"[self.below(10)] for _ in range(count))


def random_from(key: bytes) -> KeyStream:
    """Return a slot's random stream, from which `Contract.prompt` draws."""
    return KeyStream(key)
