"""The disk of one node: a small tmpfs that can be filled, freed and damaged.

At the end it is unmounted, and its files stay as a plain folder.

It knows files, and nothing of what they mean.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BYTES: Final = 256 << 20
BALLAST: Final = "ballast"
HURTS: Final = ("truncate", "zeros", "noise")
"""Ways in which a file is damaged."""
PART: Final = 512
"""Bytes that are damaged at one place: a sector."""
PAGE: Final = 4096


class Disk:
    """One node's: mounted at `path`."""

    def __init__(self, path: Path, size: int = BYTES) -> None:
        self.path = path
        path.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "echo-chaos", str(path)]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
        self._mounted = True

    def fill(self) -> int:
        """Leave no room. How many bytes it took."""
        file = os.open(self.path / BALLAST, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for size in (1 << 20, PAGE):
                while _takes(file, size):
                    pass
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def free(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes on it, the ballast left out."""
        usage = os.statvfs(self.path)
        ballast = self.path / BALLAST
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize - (
            ballast.stat().st_size if ballast.exists() else 0
        )

    def close(self) -> None:
        """The files in a plain folder, and the tmpfs gone."""
        if not self._mounted:
            return
        self._mounted = False
        self.free()
        out = self.path.with_name(f"{self.path.name}.out")
        shutil.copytree(self.path, out, ignore=_what_is_no_file, symlinks=True)
        subprocess.run(["umount", "-l", str(self.path)], check=True, capture_output=True, timeout=20)
        self.path.rmdir()
        out.rename(self.path)


def _takes(file: int, size: int) -> bool:
    """Whether the disk takes so many bytes more, or some of them."""
    try:
        return os.write(file, bytes(size)) > 0
    except OSError:
        return False


def _what_is_no_file(folder: str, names: list[str]) -> set[str]:
    """Sockets, such as the one on which a node hears its person."""
    kinds = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}  # noqa: PTH118
    return {name for name, mode in kinds.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))}


@dataclass(frozen=True)
class Damage:
    """What was done to a file, and what it and those beside it (a database's log) were before."""

    path: Path
    how: str
    before: Mapping[Path, bytes]

    def undo(self) -> None:
        for path in _beside(self.path):
            path.unlink()
        for path, data in self.before.items():
            path.write_bytes(data)


def _beside(path: Path) -> list[Path]:
    return [each for each in path.parent.glob(f"{path.name}*") if each.is_file()]


def damage(folder: Path, patterns: Sequence[str], how: str, luck: random.Random) -> Damage | None:
    """Damage a file that matches the first pattern with a match; do nothing if all are empty.

    Databases are hurt where a page of theirs begins: their bytes carry no checksum of their own, so
    a digit that flips in the middle of a row is beyond any program that reads them.
    """
    for pattern in patterns:
        found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)
        if found:
            return _hurt(luck.choice(found), how, luck)
    return None


def _hurt(path: Path, how: str, luck: random.Random) -> Damage:
    together = {each: each.read_bytes() for each in _beside(path)}
    before = together[path]
    if how == "truncate":
        after = before[: luck.randrange(len(before))]
    else:
        pages = range(0, len(before), PAGE)
        at = luck.choice(pages) if path.suffix == ".sqlite" else luck.randrange(len(before))
        size = min(PART, len(before) - at)
        piece = bytes(size) if how == "zeros" else luck.randbytes(size)
        after = before[:at] + piece + before[at + size :]
    path.write_bytes(after)
    return Damage(path, how, together)
