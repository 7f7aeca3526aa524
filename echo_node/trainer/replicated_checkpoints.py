"""The leader's checkpoints in a standby's folder, from which it takes over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from echo_node.errors import PeerError, StoreError, boundary
from echo_node.storage import files
from echo_node.trainer.checkpoint import (
    HEAD_VERSION,
    LARGEST_FILE,
    from_bytes,
    read_checkpoint,
    write_checkpoint,
)
from protocol import limits

_NAME: Final = re.compile(r"step-(\d+)\.safetensors")


class ReplicatedCheckpoints:
    """A trainer's checkpoint folder, filled by itself or the leader. Blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.covered = -1
        """Version of the newest checkpoint that came from another trainer."""

    def keep(self, path: Path) -> None:
        """Check a checkpoint that was fetched from a peer, and copy it into the folder."""
        made = from_bytes(files.read_whole(path, LARGEST_FILE), blame=PeerError)
        with boundary(PeerError, "reading the version of a checkpoint"):
            version = int(made.notes.get(HEAD_VERSION, "-1"))
        write_checkpoint(self._folder, made)
        self.covered = max(-1, min(version, limits.SAFE_INTEGER))

    def remove_after(self, version: int) -> None:
        """Remove later checkpoints, of a former leader, that the chain lacks."""
        for path, _ in self.files():
            try:
                made = int(read_checkpoint(path).notes.get(HEAD_VERSION, "-1"))
            except (StoreError, ValueError):
                continue
            if made > version:
                files.remove(path)

    def files(self) -> list[tuple[Path, int]]:
        """Return the files with their steps, the newest last."""
        folder = self._folder
        with files.disk_errors(f"looking into {folder.name}"):
            paths = (
                [each for each in folder.iterdir() if _NAME.fullmatch(each.name)] if folder.is_dir() else []
            )
        steps = [(path, int(path.stem.removeprefix("step-"))) for path in paths]
        return sorted(steps, key=lambda each: each[1])
