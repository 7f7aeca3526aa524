"""The flat state in one preallocated file, which may be torn at any moment: it can always be built again. No proofs.

While the file `whole` stands beside it, the state is whole and synced, and is that of the head named there. It is
taken away before the first write, and comes back when the file is closed in order.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import TensorBytes
from echo_node.errors import StoreError
from echo_node.weights import disk
from echo_node.weights.flat import Chunk, FlatLayout
from protocol.digest import DIGEST_BYTES

Bytes = NDArray[np.uint8]
_MARK: Final = "whole"


class Scratch:
    """A file of the size of a flat state. `mark` is the head whose state it holds for sure, if any."""

    def __init__(self, path: Path, flat: FlatLayout, *, durable: bool) -> None:
        self._path = path
        self._flat = flat
        self._durable = durable
        self._mark = path.with_name(f"{path.name}.{_MARK}")
        with disk.touching(f"opening {path.name}"):
            self.mark = disk.read_whole(self._mark, DIGEST_BYTES) if self._mark.exists() else None
            self._handle = disk.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(self._handle).st_size != flat.size:
                    self.about_to_change()
                    disk.allocate(self._handle, flat.size)
            except BaseException:
                os.close(self._handle)
                raise

    def about_to_change(self) -> None:
        """From now on it may be torn. On disk before the first write, so that no crash hides it."""
        if self.mark is not None:
            disk.remove(self._mark)
            disk.sync_folder(self._mark.parent, durable=self._durable)
            self.mark = None

    def read(self, chunk: Chunk) -> Bytes:
        """A copy of a chunk."""
        data = np.empty(chunk.size, np.uint8)
        with disk.touching(f"reading {self._path.name}"):
            disk.read_at(self._handle, chunk.offset, data.data)
        return data

    def write(self, chunk: Chunk, data: disk.Buffer) -> None:
        with disk.touching(f"writing {self._path.name}"):
            disk.write_at(self._handle, chunk.offset, data)

    def view(self) -> memoryview:
        """The whole file, mapped, to be read. It shows every later write too."""
        with disk.touching(f"mapping {self._path.name}"):
            return memoryview(mmap.mmap(self._handle, self._flat.size, access=mmap.ACCESS_READ))

    def close(self, holds: bytes | None = None) -> None:
        """Close the file. `holds`: it is whole, and this is its head. A disk that cannot say so costs the next one time."""
        try:
            with suppress(StoreError):
                if holds is not None and self.mark != holds:
                    self._say_whole(holds)
        finally:
            os.close(self._handle)

    def _say_whole(self, holds: bytes) -> None:
        with disk.touching(f"syncing {self._path.name}"):
            if self._durable:
                disk.sync(self._handle)
        disk.write_whole(self._mark, holds, durable=self._durable)
        disk.sync_folder(self._mark.parent, durable=self._durable)


def tensors(flat: FlatLayout, state: memoryview) -> dict[str, TensorBytes]:
    """A flat state as tensors, nothing copied."""
    return {
        tensor.name: TensorBytes(
            tensor.dtype, tensor.shape, state[tensor.offset : tensor.offset + tensor.size]
        )
        for tensor in flat.tensors
    }
