"""Rate control: how many groups a second samplers should send.

The target is a batch a step, with a little more than one batch waiting. Too few, and the trainer
waits; too many, and they grow stale before they are used. A new rate takes effect late, since
requests are under way, so it changes by small steps: a share more or less by what waits now, and a
gain that rises while steps have to wait (some samplers cannot keep the rate that they are given)
and falls back later.
"""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 0.7
"""Weight of the previous step time in the moving average."""
_FASTEST: Final = 1e6
"""The largest rate that a receipt can carry, in groups a second."""
_EAGERNESS: Final = ((1.0, 1.3), (2.0, 1.0), (3.0, 0.7))
"""Pairs of a number of waiting batches and the factor of the rate below it."""
_RELUCTANCE: Final = 0.5
"""Factor of the rate with more batches waiting than that."""
_MORE: Final = 1.15
"""Factor by which the gain rises with a step that had to wait."""
_LESS: Final = 0.99
_MOST_GAIN: Final = 8.0
_HURRY: Final = 1.5
"""Factor by which the rate rises while a step waits, at first."""
_COLD_SECONDS: Final = 10.0
"""Assumed seconds of a step before the first one, once enough groups wait for it."""


class RateControl:
    """The rate of one trainer, in groups a second of each sampler."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._samplers = 1
        self._gain = 1.0
        self._waited = False
        self.seconds: float | None = None
        """Seconds of a step without the wait for its batch; None before the first."""

    def stepped(self, seconds: float, samplers: int, waiting: int) -> float:
        """Return the rate after a step, given active samplers and waiting groups."""
        self.seconds = seconds if self.seconds is None else _MEMORY * self.seconds + (1 - _MEMORY) * seconds
        self._samplers = max(samplers, 1)
        batches = waiting / self._batch
        if self._waited:
            self._gain = min(self._gain * _MORE, _MOST_GAIN)
        elif batches >= 1:
            self._gain = max(self._gain * _LESS, 1.0)
        self._waited = False
        eagerness = next((share for below, share in _EAGERNESS if batches < below), _RELUCTANCE)
        return self._rate(eagerness * self._gain)

    def starving(self) -> float | None:
        """Return the rate while a step waits for groups; None means no limit."""
        self._waited = True
        return None if self.seconds is None else self._rate(_HURRY * self._gain)

    def starting(self, waiting: int, samplers: int) -> float | None:
        """Return the rate before the first step, whose length is unknown.

        None, which is no limit, until enough groups wait for it.
        """
        if waiting < 2 * self._batch:
            return None
        return self._batch / _COLD_SECONDS / max(samplers, 1)

    def _rate(self, share: float) -> float:
        seconds = max(self.seconds or 0.0, 1e-3)
        return min(share * self._batch / seconds / self._samplers, _FASTEST)
