"""A second look before anybody is condemned, with weights that are put into the engine afresh.

The first goes by weights that were changed many times since they were put in. Should they ever not be those of the head
whose name they have, an honest sampler would pay for it. What was found dishonest is kept, token by token, in `condemned`. It
knows no network, and no peer's past.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from echo_node.admission import Admitted
from echo_node.engine.base import Engine
from echo_node.run import Run
from echo_node.verifier.condemned import Condemned
from echo_node.verifier.judging import Finding, Judge, Seen

log = logging.getLogger(__name__)


class Held(Protocol):
    """Where weights are had: see `weights/handing`."""

    def at(self, head_id: bytes) -> Engine:
        """An engine with the weights of a head."""

    def afresh(self, head_id: bytes) -> Engine:
        """The same, with all of them put in anew."""


class Twice:
    """Judges the groups of a run. Files on what was condemned go to `folder`."""

    def __init__(self, run: Run, held: Held, folder: Path | None = None) -> None:
        self._run = run
        self._held = held
        self._once = Judge(run, held.at)
        self._condemned = Condemned(run, folder) if folder is not None else None
        self.mistaken = 0
        """Groups that only the first look found dishonest: each is a defect of this node."""

    def judge(self, admitted: Admitted, cancelled: Callable[[], bool] = lambda: False) -> Finding | None:
        """Look at a whole group, and again if it seems dishonest. None: it was cancelled."""
        first = self._once.judge(admitted, cancelled)
        if first is None or first.breach is None or not first.breach.sure:
            return first
        if first.reward is not None:  # the contract's word, in which the weights have no part
            self.keep(admitted, first)
            return first
        seen: list[Seen] = []
        second = Judge(self._run, self._afresh(), seen.append).judge(admitted, cancelled)
        if second is None:
            return None
        if second.breach is None:
            self.mistaken += 1
            log.error(
                "group %s seemed dishonest (%s: %s) by weights that were not those of its head: a defect of this node",
                admitted.group.id.hex()[:16],
                first.breach.reason,
                first.breach.what,
            )
        self.keep(admitted, second, first, seen)
        return second

    def keep(
        self, admitted: Admitted, found: Finding, first: Finding | None = None, seen: list[Seen] | None = None
    ) -> None:
        """Write down what was found dishonest, by this look or by the first."""
        if self._condemned is not None:
            self._condemned.keep(admitted, found, first or found, seen or [])

    def _afresh(self) -> Callable[[bytes], Engine]:
        """All weights of a head, put in once for each time that another head's are asked for."""
        last: list[tuple[bytes, Engine]] = []

        def at(head_id: bytes) -> Engine:
            if not last or last[-1][0] != head_id:
                last.append((head_id, self._held.afresh(head_id)))
            return last[-1][1]

        return at
