"""Measures of a long run: slopes per hour of memory, open files, disk and lag of each node.

It measures and computes; it knows nothing of what is done to the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import psutil

from tests.chaos.swarm import Swarm

MEASURES: Final = ("rss_mb", "fds", "disk_mb", "lag")
LEAST: Final = 3
"""Points that a slope needs."""
MOST: Final = 10_000


class Soak:
    """Measurements of every node, each since its last start: a restart begins another line."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._points: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)

    def look(self) -> str:
        """Measure all; a line for people."""
        words, head, now = [], self._swarm.head_version, self._swarm.line.now
        for member in self._swarm.members.values():
            tree = member.tree()
            if not tree:
                words.append(f"{member.name} down")
                continue
            point = {"at": now, "rss_mb": 0.0, "fds": 0.0, "disk_mb": member.disk.used() / 1e6}
            for process in tree:
                with suppress(psutil.Error):
                    point["rss_mb"] += process.memory_info().rss / 1e6
                    point["fds"] += process.num_fds()
            version = member.last("progress").get("version")
            point["lag"] = 0.0 if version is None else float(head - version)
            points = self._points[member.name, tree[0].pid]
            points.append(point)
            del points[:-MOST]
            words.append(f"{member.name} {point['rss_mb']:.0f}MB/{point['fds']:.0f}fd/{point['lag']:.0f}")
        return f"head {head}: {', '.join(words)}"

    def slopes(self) -> dict[str, dict[str, float]]:
        """Return the growth per hour of each measure, by node, over its longest life.

        The first tenth is left out, in which a node fills its caches.
        """
        found: dict[str, dict[str, float]] = {}
        for name in self._swarm.members:
            lives = [points for (of, _), points in self._points.items() if of == name]
            longest = max(lives, key=len, default=[])
            kept = longest[len(longest) // 10 :]
            if len(kept) >= LEAST:
                hours = [point["at"] / 3600 for point in kept]
                found[name] = {
                    f"{each}_per_hour": round(slope(hours, [point[each] for point in kept]), 3)
                    for each in MEASURES
                } | {"minutes": round((hours[-1] - hours[0]) * 60, 1)}
        return found


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """By least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
