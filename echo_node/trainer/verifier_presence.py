"""Presence of verifiers at a leader; a silent one is absent until it speaks.

A verifier that runs acknowledges every inventory within seconds, whether it has the groups or not,
and looks at every group of a newcomer that it has acknowledged. One that does neither for long is
absent: nobody waits for it, and its acknowledgements open nothing. Its absence never lowers the
checking: groups are looked at by the other verifiers, or by the trainer itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from protocol import peer_id

log = logging.getLogger(__name__)
SILENT_SECONDS: Final = 45.0
"""Seconds for which a verifier may leave inventories unanswered: less than a step waits for one."""
FEWEST_INVENTORIES: Final = 3
"""Inventories without an acknowledgement before a verifier can be absent."""
VERDICT_SECONDS: Final = 300.0
"""Seconds without any verdict after groups of newcomers were acknowledged."""
NO_ACKNOWLEDGEMENT: Final = "acknowledges no inventory"
NO_VERDICT: Final = "gives no verdicts on what it acknowledged"


@dataclass(slots=True)
class _State:
    listed_since: float | None = None
    """Time of the first inventory since the last acknowledgement."""
    listed: int = 0
    """Inventories since then."""
    owes_since: float | None = None
    """Time of the first acknowledged group of a newcomer since the last verdict."""
    absent: str = ""
    """Why it is absent, or nothing."""


class VerifierPresence:
    """Which verifiers of a run are there. Times are seconds of one clock."""

    def __init__(self, verifiers: Collection[bytes]) -> None:
        self._states = {each: _State() for each in sorted(verifiers)}

    @property
    def is_nobody_there(self) -> bool:
        """Return whether the run has verifiers, and all of them are absent."""
        return bool(self._states) and all(each.absent for each in self._states.values())

    @property
    def absent(self) -> dict[bytes, str]:
        """Return the absent verifiers, and what each of them does not do."""
        return {key: state.absent for key, state in self._states.items() if state.absent}

    @property
    def present(self) -> frozenset[bytes]:
        return frozenset(key for key, state in self._states.items() if not state.absent)

    def listed(self, now: float) -> None:
        """Record that an inventory was published."""
        for state in self._states.values():
            state.listed += 1
            if state.listed_since is None:
                state.listed_since = now

    def acknowledged(self, verifier: bytes, now: float, *, owes: bool) -> None:
        """Record an acknowledgement; `owes` says that a verdict must follow from it."""
        if (state := self._states.get(verifier)) is None:
            return
        state.listed_since, state.listed = None, 0
        if owes and state.owes_since is None:
            state.owes_since = now
        if state.absent == NO_ACKNOWLEDGEMENT:
            self._returned(verifier, state)

    def judged(self, verifier: bytes) -> None:
        """Record a verdict."""
        if (state := self._states.get(verifier)) is not None:
            state.owes_since = None
            if state.absent:
                state.listed_since, state.listed = None, 0
                self._returned(verifier, state)

    def review(self, now: float) -> bool:
        """Note who has become absent; return whether anybody has."""
        changed = False
        for verifier, state in self._states.items():
            if not state.absent and (why := _silence(state, now)):
                state.absent, changed = why, True
                log.warning(
                    "verifier %s counts as absent until it speaks again: it %s; see that it runs, and that"
                    " this trainer can reach it",
                    peer_id(verifier),
                    why,
                )
        return changed

    @staticmethod
    def _returned(verifier: bytes, state: _State) -> None:
        state.absent = ""
        log.info("verifier %s is there again", peer_id(verifier))


def _silence(state: _State, now: float) -> str:
    """Return what a verifier does not do, or nothing."""
    if (
        state.listed >= FEWEST_INVENTORIES
        and state.listed_since is not None
        and now - state.listed_since >= SILENT_SECONDS
    ):
        return NO_ACKNOWLEDGEMENT
    if state.owes_since is not None and now - state.owes_since >= VERDICT_SECONDS:
        return NO_VERDICT
    return ""
