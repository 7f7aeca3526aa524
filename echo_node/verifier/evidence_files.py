"""JSON evidence files of groups found dishonest, for review of a verdict.

Each holds the sealed group, the tolerance, both checks and every scored token, so that a long tail
of honest figures (one token far off, all log-probabilities right) can be distinguished from
other weights (no log-probability right). The newest files up to a bound are kept.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from echo_node.errors import StoreError, boundary
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.replay_check import Finding, ScoredPiece
from protocol import peer_id

log = logging.getLogger(__name__)
MOST_FILES: Final = 64
"""Files that are kept; the oldest are deleted first."""
MOST_BYTES: Final = 64 * 2**20
"""Bytes of all files together; the newest file stays whatever its size."""


class EvidenceFiles:
    """Evidence files of one run, in a folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run.id
        self._folder = folder
        self._tolerances = {each.engine: dataclasses.asdict(each) for each in run.manifest.engines}

    def save(
        self, admitted: RolloutRecord, found: Finding, first: Finding, pieces: Sequence[ScoredPiece]
    ) -> None:
        """Write the file of one group; a failing disk is only logged."""
        group, breach = admitted.message, found.breach or first.breach
        record = {
            "group": admitted.id.hex(),
            "run": self._run.hex(),
            "sampler": peer_id(admitted.sampler),
            "engine": group.engine,
            "step": admitted.step,
            "slot": group.slot,
            "heads": [head.hex() for head in group.heads],
            "at": time.time(),
            "dishonest": found.breach is not None,
            "reason": breach.reason if breach else "",
            "what": breach.what if breach else "",
            "band": self._tolerances[group.engine],
            "first": _evidence_json(first.evidence),
            "second": _evidence_json(found.evidence) if found is not first else None,
            "pieces": [_piece_json(each, group.heads) for each in pieces],
            "sealed": base64.b64encode(admitted.sealed or b"").decode(),
        }
        path = self._folder / f"{admitted.id.hex()}.json"
        try:
            with boundary(StoreError, f"writing {path}", advice="check the folder and its disk"):
                self._folder.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(record, indent=1), "utf-8")
                part.replace(path)
                self._delete_oldest()
        except StoreError as error:
            log.warning("evidence file not written: %s", error)
        else:
            log.warning("evidence file of a dishonest group: %s", path)

    def _delete_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        size = 0
        for number, path in enumerate(files):
            size += path.stat().st_size
            if number and (number >= MOST_FILES or size > MOST_BYTES):
                path.unlink(missing_ok=True)


def _evidence_json(found: Evidence) -> dict[str, Any]:
    means = {"d_mean": found.d_mean, "z_mean": found.z_mean, "gap_mean": found.gap_mean}
    return {**dataclasses.asdict(found), **means}


def _piece_json(scored: ScoredPiece, heads: Sequence[bytes]) -> dict[str, Any]:
    replay = scored.scores.replay(scored.luck)
    return {
        "completion": scored.piece.index,
        "start": scored.piece.start,
        "head": heads.index(scored.piece.head),
        "luck": scored.luck.tolist(),
        "low": scored.scores.low.tolist(),
        "high": scored.scores.high.tolist(),
        "d": replay.d.tolist(),
        "z": replay.z.tolist(),
        "logprobs": scored.scores.logprobs.tolist(),
        "claimed": scored.claimed.tolist(),
    }
