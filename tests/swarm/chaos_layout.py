"""Files of an ended swarm of processes, laid out for the checker of chaos runs.

    place/chaos.json  place/timeline.jsonl  place/run  place/nodes/NAME/{state,events.jsonl,stderr}

Only the nodes' output is copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_node.runs.spec import read_manifest
from tests.swarm.processes import NodeProcess, Swarm


def lay_out(place: Path, swarm: Swarm, kills: Sequence[float], *, bound_seconds: float) -> Path:
    """Make the folder for the checker.

    `kills` are Unix times; after the last of them all nodes must progress within the bound.
    """
    place.mkdir()
    lives: dict[str, list[NodeProcess]] = {}
    for node in swarm.nodes:
        lives.setdefault(node.name, []).append(node)
    for name, starts in lives.items():
        folder = place / "nodes" / name
        folder.mkdir(parents=True)
        (folder / "state").symlink_to(swarm.state_of(name))
        (folder / "stderr").symlink_to(swarm.stderr_of(name))
        _write_lines(folder / "events.jsonl", (event for node in starts for event in node.events))
    (place / "run").symlink_to(swarm.run)
    _write_lines(place / "timeline.jsonl", ({"at": at, "what": "fault"} for at in kills))
    told = {
        "bound_seconds": bound_seconds,
        "nodes": {name: _about(starts) for name, starts in lives.items()},
        "run": "run",
        "staleness": read_manifest(swarm.run).message.sync.staleness,
        "started": min(event["at"] for node in swarm.nodes for event in node.events),
    }
    (place / "chaos.json").write_text(json.dumps(told, indent=2))
    return place


def _about(starts: Iterable[NodeProcess]) -> dict[str, Any]:
    started = next(node.first("started") for node in starts if node.all("started"))
    return {"role": started["role"], "peer_id": started["peer_id"]}


def _write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
