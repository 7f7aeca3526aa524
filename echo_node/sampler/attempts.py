"""Failed attempts in a row: pause before the next, and when to give up."""

from __future__ import annotations

from typing import Final, NoReturn

import trio

from echo_node.errors import ContractError, EchoError, EngineError, one_line
from protocol import ProtocolError

PAUSES: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the next attempt, by the number of failures in a row."""
FAILING: Final = 3
"""Failures in a row after which a sampler says that it is failing."""
GIVE_UP: Final = 10
"""Failures in a row of engine or contract after which they do not heal: about three minutes."""

Failure = EchoError | ProtocolError


class Attempts:
    """Failures since the last group that ended; new versions do not reset them."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._hopeless = trio.Event()

    def succeed(self) -> None:
        """Forget the failures: a group has ended."""
        self._failures = []

    def fail(self, error: Failure) -> None:
        """Record a failure."""
        self._failures = [*self._failures, error][-GIVE_UP:]
        if len(self._failures) == GIVE_UP and all(map(_is_local, self._failures)):
            self._hopeless.set()

    async def raise_if_hopeless(self) -> NoReturn:
        """Wait for too many failures of engine or contract; raise the last error."""
        await self._hopeless.wait()
        raise self._failures[-1]

    @property
    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        return PAUSES[min(len(self._failures), len(PAUSES)) - 1] if self._failures else 0.0

    @property
    def ends_with_news(self) -> bool:
        """Return whether a newer version or a new peer may help before the pause is over."""
        return bool(self._failures) and not _is_local(self._failures[-1])

    @property
    def reason(self) -> str | None:
        """The last error, once there were several in a row."""
        return one_line(str(self._failures[-1])) if len(self._failures) >= FAILING else None


def _is_local(error: Failure) -> bool:
    return isinstance(error, EngineError | ContractError)
