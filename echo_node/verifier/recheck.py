"""Second check of a dishonest-looking group, with freshly loaded weights.

The first check uses weights that were patched many times since they were loaded. If they ever
differed from those of the head that they are named after, an honest sampler would pay for it. The
evidence against a group is written to a file, token by token (`evidence_files`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from echo_node.engine.base import Engine
from echo_node.errors import ContractError, EngineError, StoreError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.runtime.reputation import CLASS_IN_DOUBT
from echo_node.verifier.class_breaches import ClassBreaches
from echo_node.verifier.evidence_files import EvidenceFiles
from echo_node.verifier.replay_check import Finding, ReplayCheck, ScoredPiece
from echo_node.verifier.tolerance import Breach
from protocol import peer_id

log = logging.getLogger(__name__)
UNDECIDED: Final = "undecided"
"""Result of a check that speaks neither for a group nor against it."""


class EngineSource(Protocol):
    """Source of engines with the weights of a given head.

    `weights.engine_sync.EngineSync` is one.
    """

    def at(self, head_id: bytes) -> Engine:
        """Return an engine with the weights of a head."""

    def afresh(self, head_id: bytes) -> Engine:
        """Return an engine into which all weights of a head were loaded anew."""


class Recheck:
    """Two-stage check of a run's groups; evidence files go to `folder`."""

    def __init__(self, run: Run, engines: EngineSource, folder: Path | None = None) -> None:
        self._run = run
        self._engines = engines
        self._first = ReplayCheck(run, engines.at)
        self._files = EvidenceFiles(run, folder) if folder is not None else None
        self.class_breaches = ClassBreaches()
        self.mistaken = 0
        """Groups that only the first check found dishonest: each is a defect of this node."""

    def check(self, admitted: RolloutRecord, cancelled: Callable[[], bool] = lambda: False) -> Finding | None:
        """Check a whole group, twice if it seems dishonest; return None if cancelled."""
        first = self._first.check(admitted, cancelled)
        if first is None or first.breach is None or not first.breach.sure:
            return first
        if first.reward is not None:  # found by the contract: the weights have no part in it
            self.save(admitted, first)
            return first
        pieces: list[ScoredPiece] = []
        second = ReplayCheck(self._run, self._load_afresh(), pieces.append).check(admitted, cancelled)
        if second is None:
            return None
        if second.breach is None:
            self.mistaken += 1
            log.error(
                "group %s seemed dishonest (%s: %s) only with patched weights: a defect of this node",
                admitted.id.hex()[:16],
                first.breach.reason,
                first.breach.what,
            )
        self.save(admitted, second, first, pieces)
        return second

    def result_of(self, group: RolloutRecord) -> str | None:
        """Return a group's result: a reason, None, "undecided", "class-in-doubt".

        A reason says why it is dishonest; None is honest. That it cannot be checked here is a fault
        of this node, and not of the group.
        """
        try:
            finding = self.check(group)
        except (ContractError, EngineError, StoreError) as error:
            log.warning("group %s not checked: %s", group.id.hex()[:16], error)
            return UNDECIDED
        if finding is None:
            return UNDECIDED
        breach = self.review(group, finding.breach, time.time())
        if breach is None:
            return None
        return breach.reason if breach.sure or breach.reason == CLASS_IN_DOUBT else UNDECIDED

    def review(self, group: RolloutRecord, breach: Breach | None, now: float) -> Breach | None:
        """Return a breach, undecided if its class's tolerance may be to blame."""
        engine, peers = group.message.engine, self.class_breaches
        if breach is None:
            peers.honest(group.sampler, engine, now)
            return None
        if not breach.sure or not peers.excuses(group.sampler, engine, breach.over, now):
            return breach
        breached, proven = peers.count(engine, now)
        log.warning(
            "%s breached the tolerance of %s by little (%.2f times the bound), undecided: %d of %d proven samplers of"
            " the class did today%s",
            peer_id(group.sampler),
            engine,
            breach.over,
            breached,
            proven,
            "; its tolerance seems too narrow: calibrate it" if peers.is_in_doubt(engine, now) else "",
        )
        return replace(breach, reason=CLASS_IN_DOUBT, sure=False)

    def save(
        self,
        admitted: RolloutRecord,
        found: Finding,
        first: Finding | None = None,
        pieces: list[ScoredPiece] | None = None,
    ) -> None:
        """Write the evidence file of a group that either check found dishonest."""
        if self._files is not None:
            self._files.save(admitted, found, first or found, pieces or [])

    def _load_afresh(self) -> Callable[[bytes], Engine]:
        """Return a loader that reloads all weights only when another head is asked for."""
        last: list[tuple[bytes, Engine]] = []

        def at(head_id: bytes) -> Engine:
            if not last or last[-1][0] != head_id:
                last.append((head_id, self._engines.afresh(head_id)))
            return last[-1][1]

        return at
