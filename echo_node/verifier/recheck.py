"""Second check of a dishonest-looking group, with freshly loaded weights.

The first check uses weights that were patched many times since they were loaded. If they ever
differed from those of the head that they are named after, an honest sampler would pay for it. The
evidence against a group is written to a file, token by token (`evidence_files`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from echo_node.engine.base import Engine
from echo_node.errors import ContractError, EngineError, StoreError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.verifier.evidence_files import EvidenceFiles
from echo_node.verifier.replay_check import Finding, ReplayCheck, ScoredPiece

log = logging.getLogger(__name__)
UNDECIDED: Final = "undecided"
"""Result of a check that speaks neither for a group nor against it."""


class EngineSource(Protocol):
    """Engines with the weights of a given head; `weights.engine_sync.EngineSync` is one."""

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
        """Return why a group is dishonest, None if it is not, or "undecided".

        That it cannot be checked here is a fault of this node, and not of the group.
        """
        try:
            finding = self.check(group)
        except (ContractError, EngineError, StoreError) as error:
            log.warning("group %s not checked: %s", group.id.hex()[:16], error)
            return UNDECIDED
        if finding is None or (finding.breach and not finding.breach.sure):
            return UNDECIDED
        return finding.breach.reason if finding.breach else None

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
