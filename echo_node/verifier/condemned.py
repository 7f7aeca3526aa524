"""What was found dishonest, on disk: the group as it was sealed, the bands, both looks, and every token that was looked at.

One file of JSON for each, the newest ones up to a bound, so that whoever doubts a verdict can look again, and tell a tail of
honest figures (one token far off, all log-probabilities right) from other weights (no log-probability right). It decides
nothing.
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

from echo_node.admission import Admitted
from echo_node.errors import StoreError, boundary
from echo_node.run import Run
from echo_node.verifier.evidence import Evidence
from echo_node.verifier.judging import Finding, Seen
from protocol import peer_id

log = logging.getLogger(__name__)
MOST_FILES: Final = 64
MOST_BYTES: Final = 64 * 2**20


class Condemned:
    """The files in a folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._folder = folder
        self._bands = {told.engine: dataclasses.asdict(told) for told in run.told.engines}

    def keep(self, admitted: Admitted, found: Finding, first: Finding, seen: Sequence[Seen]) -> None:
        """Write one down. A disk that is full costs the file, and nothing else."""
        group, breach = admitted.group.message, found.breach or first.breach
        record = {
            "group": admitted.group.id.hex(),
            "run": admitted.group.run.hex(),
            "sampler": peer_id(admitted.group.signer),
            "engine": group.engine,
            "step": admitted.step,
            "slot": group.slot,
            "heads": [head.hex() for head in group.heads],
            "at": time.time(),
            "dishonest": found.breach is not None,
            "reason": breach.reason if breach else "",
            "what": breach.what if breach else "",
            "band": self._bands[group.engine],
            "first": _told(first.evidence),
            "second": _told(found.evidence) if found is not first else None,
            "pieces": [_piece(each, group.heads) for each in seen],
            "sealed": base64.b64encode(admitted.group.sealed).decode(),
        }
        path = self._folder / f"{admitted.group.id.hex()}.json"
        try:
            with boundary(StoreError, f"writing {path}", advice="check the folder and its disk"):
                self._folder.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(record, indent=1), "utf-8")
                part.replace(path)
                self._let_go()
        except StoreError as error:
            log.warning("what was found of a group is not kept: %s", error)
        else:
            log.warning("what was found of a dishonest group is in %s", path)

    def _let_go(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        size = 0
        for number, path in enumerate(files):
            size += path.stat().st_size
            if number and (number >= MOST_FILES or size > MOST_BYTES):
                path.unlink(missing_ok=True)


def sealed_in(path: Path) -> bytes:
    """The group that a file is about, as it was sealed, to be looked at again."""
    with boundary(StoreError, f"reading {path}"):
        return base64.b64decode(json.loads(path.read_text("utf-8"))["sealed"], validate=True)


def _told(found: Evidence) -> dict[str, Any]:
    means = {"d_mean": found.d_mean, "z_mean": found.z_mean, "gap_mean": found.gap_mean}
    return {**dataclasses.asdict(found), **means}


def _piece(seen: Seen, heads: Sequence[bytes]) -> dict[str, Any]:
    replay = seen.scores.replay(seen.luck)
    return {
        "completion": seen.piece.index,
        "start": seen.piece.start,
        "head": heads.index(seen.piece.head),
        "luck": seen.luck.tolist(),
        "low": seen.scores.low.tolist(),
        "high": seen.scores.high.tolist(),
        "d": replay.d.tolist(),
        "z": replay.z.tolist(),
        "logprobs": seen.scores.logprobs.tolist(),
        "claimed": seen.claimed.tolist(),
    }
