"""Replicate checkpoints from the leader to standby trainers, as blobs.

Heartbeats name the newest checkpoint; standbys fetch, check and keep it. The trainer gives the file
on one side and the check on the other.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio
from blake3 import blake3

from echo_node.errors import EchoError, PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.storage import files
from echo_node.weights.store import WeightsStore
from protocol import Heartbeat, Opened
from protocol.digest import DIGEST_BYTES

log = logging.getLogger(__name__)
LENT: Final = 2
"""Checkpoints lent at once: the newest, and the one that a standby may still be fetching."""
AGAIN_SECONDS: Final = 5.0
"""Seconds until the next try after a checkpoint could not be fetched."""
_EXT: Final = "checkpoint"
_LARGEST: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Replica:
    """Reference to a checkpoint that the leader lends."""

    blob: bytes
    size: int
    step: int

    def as_ext(self) -> dict[str, Any]:
        """Return the entry for a heartbeat's `ext`."""
        return {_EXT: {"blob": self.blob, "size": self.size, "step": self.step}}

    @classmethod
    def of(cls, beat: Heartbeat) -> Replica | None:
        """Return the checkpoint that a heartbeat names; None if the entry is not valid."""
        entry = beat.ext.get(_EXT)
        if not isinstance(entry, Mapping) or entry.keys() != {"blob", "size", "step"}:
            return None
        blob, size, step = entry["blob"], entry["size"], entry["step"]
        if not isinstance(blob, bytes) or len(blob) != DIGEST_BYTES:
            return None
        if type(size) is not int or type(step) is not int or not 0 < size <= _LARGEST or step < 0:
            return None
        return cls(blob, size, step)


class CheckpointServer:
    """Leader's side: lend checkpoints beside the blobs of the weights store."""

    def __init__(self, store: WeightsStore) -> None:
        self._folder = store.lent.folder
        self._lent: list[Replica] = []

    def ext(self) -> Mapping[str, Any]:
        """Return the entry of the newest checkpoint for a heartbeat's `ext`."""
        return self._lent[-1].as_ext() if self._lent else {}

    def lend(self, path: Path, step: int) -> Replica:
        """Lend a copy of a file; the original may be removed afterwards. Blocks."""
        with files.disk_errors(f"lending {path.name}"):
            beside = self._folder / f"{os.getpid()}{files.BESIDE}"
            beside.unlink(missing_ok=True)
            try:
                os.link(path, beside)
            except OSError:
                shutil.copyfile(path, beside)
            hashed = blake3()
            hashed.update_mmap(beside)
            replica = Replica(hashed.digest(), beside.stat().st_size, step)
            files.rename(beside, self._folder / replica.blob.hex())
        self._lent = [*(each for each in self._lent if each.blob != replica.blob), replica][-LENT:]
        self._tidy()
        return replica

    def _tidy(self) -> None:
        """Remove older lent files, also those of an earlier process."""
        kept = {each.blob.hex() for each in self._lent}
        for path in self._folder.iterdir():
            if path.name not in kept:
                files.remove(path)


class CheckpointFetcher:
    """Standby's side.

    `keep` checks a checkpoint and returns once it is on disk; it blocks.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        keep: Callable[[Path], None],
        *,
        most: int,
        blobs: BlobClient | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._most = most
        self._blobs = blobs or BlobClient(network)
        self._wanted: tuple[Replica, bytes] | None = None
        self._wake = trio.Event()
        self.kept: Replica | None = None
        """The newest checkpoint on this node."""

    def hear(self, beat: Opened[Heartbeat]) -> None:
        """Take the checkpoint that a current heartbeat names."""
        replica = Replica.of(beat.message)
        if replica is None or replica == self.kept:
            return
        if replica.size > self._most:
            log.warning("the leader lends a checkpoint of %d bytes, more than one has", replica.size)
            return
        self._wanted = replica, beat.signer
        self._wake.set()

    async def follow(self) -> None:
        """Fetch and keep named checkpoints until cancelled; retry with a later heartbeat."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if self._wanted is None or self._wanted[0] == self.kept:
                continue
            replica, leader = self._wanted
            try:
                await self._fetch(replica, leader)
            except EchoError as error:
                log.warning("the checkpoint of step %d is not here: %s", replica.step, error)
                await trio.sleep(AGAIN_SECONDS)

    async def _fetch(self, replica: Replica, leader: bytes) -> None:
        await trio.to_thread.run_sync(self._clear)
        wants = [Want(replica.blob, replica.size)]
        paths = await self._blobs.fetch_to(self._folder, wants, named=[leader])
        try:
            await trio.to_thread.run_sync(self._keep, paths[replica.blob])
        except PeerError:
            # its bytes have the named hash, but are no checkpoint: do not fetch it again
            self.kept = replica
            raise
        finally:
            await trio.to_thread.run_sync(files.remove, paths[replica.blob])
        self.kept = replica
        log.info("the checkpoint of step %d is here, should this trainer have to lead", replica.step)

    def _clear(self) -> None:
        """Remove partial downloads of other checkpoints than the wanted one."""
        if self._folder.is_dir() and self._wanted is not None:
            for path in self._folder.iterdir():
                if not path.name.startswith(self._wanted[0].blob.hex()):
                    files.remove(path)
