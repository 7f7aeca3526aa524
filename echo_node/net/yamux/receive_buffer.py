"""Receive buffer of a stream.

Large pieces are kept as views into the message that brought them, so that their bytes are copied
once, when they are read. Small ones are joined, so that a peer that sends single bytes costs no
more memory than the bytes. The caller checks the window.
"""

from __future__ import annotations

from collections import deque
from typing import Final

GATHER_BELOW: Final = 16 * 1024
"""Bytes. A smaller piece is copied and joined with its neighbours."""
GATHERED: Final = 64 * 1024


class ReceiveBuffer:
    """Received bytes in order."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview | bytearray] = deque()
        self._at = 0  # how much of the first piece has been read
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def put(self, piece: memoryview) -> None:
        """Append bytes.

        A view keeps its whole message alive, so it is kept only if it is most of the message.
        """
        length = len(piece)
        self.size += length
        if length >= GATHER_BELOW and 2 * length >= len(memoryview(piece.obj)):
            self._pieces.append(piece)
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < GATHERED:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def take(self, most: int) -> bytes:
        """Remove and return up to `most` bytes; all of them if negative."""
        if most < 0 or most > self.size:
            most = self.size
        taken: list[memoryview | bytearray] = []
        left = most
        while left:
            first = self._pieces[0]
            here = len(first) - self._at
            if here <= left:
                taken.append(memoryview(first)[self._at :] if self._at else first)
                self._pieces.popleft()
                self._at = 0
                left -= here
            else:
                taken.append(memoryview(first)[self._at : self._at + left])
                self._at += left
                left = 0
        self.size -= most
        found = b"".join(taken)
        for each in taken:  # a gathered piece that is still viewed could not grow
            if isinstance(each, memoryview):
                each.release()
        return found

    def clear(self) -> None:
        """Drop everything."""
        self._pieces.clear()
        self._at = self.size = 0
