"""Checkpoints from the leader to those who stand by: lent as blobs, named in heartbeats, fetched, checked and kept.

What is in a checkpoint is the trainer's business: here it is a file on one side, and whoever keeps it checks it on the other.
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
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.holders import Want
from echo_node.weights import disk
from echo_node.weights.store import WeightsStore
from protocol import Heartbeat, Opened
from protocol.digest import DIGEST_BYTES

log = logging.getLogger(__name__)
LENT: Final = 2
"""Checkpoints that are lent at once: the newest, and the one that somebody may still be fetching."""
AGAIN_SECONDS: Final = 5.0
"""After a checkpoint could not be had."""
_EXT: Final = "checkpoint"
_LARGEST: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Replica:
    """A checkpoint that somebody lends."""

    blob: bytes
    size: int
    step: int

    def as_ext(self) -> dict[str, Any]:
        """What stands in a heartbeat."""
        return {_EXT: {"blob": self.blob, "size": self.size, "step": self.step}}

    @classmethod
    def of(cls, beat: Heartbeat) -> Replica | None:
        """The checkpoint that a heartbeat names; none, if what stands there is none."""
        told = beat.ext.get(_EXT)
        if not isinstance(told, Mapping) or told.keys() != {"blob", "size", "step"}:
            return None
        blob, size, step = told["blob"], told["size"], told["step"]
        if not isinstance(blob, bytes) or len(blob) != DIGEST_BYTES:
            return None
        if type(size) is not int or type(step) is not int or not 0 < size <= _LARGEST or step < 0:
            return None
        return cls(blob, size, step)


class Lending:
    """The leader's side. Whatever offers the store's blobs offers these as well."""

    def __init__(self, store: WeightsStore) -> None:
        self._folder = store.lent.folder
        self._lent: list[Replica] = []

    def ext(self) -> Mapping[str, Any]:
        """For heartbeats: the newest."""
        return self._lent[-1].as_ext() if self._lent else {}

    def lend(self, path: Path, step: int) -> Replica:
        """Lend a file that does not change. It may be removed from where it is. Blocks."""
        with disk.touching(f"lending {path.name}"):
            beside = self._folder / f"{os.getpid()}{disk.BESIDE}"
            beside.unlink(missing_ok=True)
            try:
                os.link(path, beside)
            except OSError:
                shutil.copyfile(path, beside)
            hashed = blake3()
            hashed.update_mmap(beside)
            replica = Replica(hashed.digest(), beside.stat().st_size, step)
            disk.rename(beside, self._folder / replica.blob.hex())
        self._lent = [*(each for each in self._lent if each.blob != replica.blob), replica][-LENT:]
        self._tidy()
        return replica

    def _tidy(self) -> None:
        """What was lent longer ago, by a process before this one too, goes."""
        kept = {each.blob.hex() for each in self._lent}
        for path in self._folder.iterdir():
            if path.name not in kept:
                disk.remove(path)


class Borrowing:
    """The side of a node that stands by. `keep` checks a checkpoint and has it on disk when it returns; it blocks."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        keep: Callable[[Path], None],
        *,
        most: int,
        blobs: Blobs | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._most = most
        self._blobs = blobs or Blobs(network)
        self._wanted: tuple[Replica, bytes] | None = None
        self._wake = trio.Event()
        self.kept: Replica | None = None
        """The newest that is here."""

    def hear(self, beat: Opened[Heartbeat]) -> None:
        """What a heartbeat that counts says of checkpoints."""
        replica = Replica.of(beat.message)
        if replica is None or replica == self.kept:
            return
        if replica.size > self._most:
            log.warning("the leader lends a checkpoint of %d bytes, more than one has", replica.size)
            return
        self._wanted = replica, beat.signer
        self._wake.set()

    async def follow(self) -> None:
        """Fetch and keep what was named, until cancelled. What cannot be had is tried again with a later heartbeat."""
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
            self.kept = replica  # it is what its hash says, and worth nothing: not to be fetched again
            raise
        finally:
            await trio.to_thread.run_sync(disk.remove, paths[replica.blob])
        self.kept = replica
        log.info("the checkpoint of step %d is here, should this trainer have to lead", replica.step)

    def _clear(self) -> None:
        """Drafts of others than the one that is wanted now."""
        if self._folder.is_dir() and self._wanted is not None:
            for path in self._folder.iterdir():
                if not path.name.startswith(self._wanted[0].blob.hex()):
                    disk.remove(path)
