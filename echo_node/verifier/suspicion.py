"""What many small things say together: evidence of a peer adds up, under one engine class, in a window of tokens.

A sampler at a slightly wrong temperature, or with slightly wrong weights, is within the bands of one group and outside of
those of a hundred. It knows neither groups nor weights.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from echo_node.verifier.bands import Bands, Breach
from echo_node.verifier.evidence import Evidence

WINDOW: Final = 256
"""Groups of a peer that are added up."""
PEERS: Final = 10_000


class Suspicion:
    """The evidence of all peers."""

    def __init__(self) -> None:
        self._peers: OrderedDict[tuple[bytes, str], deque[Evidence]] = OrderedDict()

    def add(self, peer: bytes, engine_class: str, found: Evidence, bands: Bands) -> Breach | None:
        """Take in an honest-looking group's evidence; what it and those before it say together."""
        key = (peer, engine_class)
        groups = self._peers.setdefault(key, deque(maxlen=WINDOW))
        self._peers.move_to_end(key)
        groups.append(found)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        together = Evidence()
        for each in reversed(groups):  # the newest first: a change is seen before it is diluted
            together += each
            breach = bands.breach(together)
            if breach is not None:
                return Breach(breach.reason, f"over {together.tokens} tokens: {breach.what}")
        return None

    def forget(self, peer: bytes) -> None:
        """It was condemned: what comes later stands for itself."""
        for key in [key for key in self._peers if key[0] == peer]:
            del self._peers[key]
