"""Flat state in one preallocated file that can be rebuilt if it is torn.

While the file `whole` is beside it, the state is complete, synced and that of the head named there.
`whole` is removed before the first write, and written when the file is closed in order.
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
from echo_node.storage import files
from echo_node.weights.flat_layout import Chunk, FlatLayout
from protocol.digest import DIGEST_BYTES

Bytes = NDArray[np.uint8]
_MARK: Final = "whole"


class StateFile:
    """File of the size of a flat state.

    `mark` is the head that it holds for sure, if any.
    """

    def __init__(self, path: Path, flat: FlatLayout, *, durable: bool) -> None:
        self._path = path
        self._flat = flat
        self._durable = durable
        self._mark = path.with_name(f"{path.name}.{_MARK}")
        with files.disk_errors(f"opening {path.name}"):
            self.mark = files.read_whole(self._mark, DIGEST_BYTES) if self._mark.exists() else None
            self._handle = files.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(self._handle).st_size != flat.size:
                    self.about_to_change()
                    files.allocate(self._handle, flat.size)
            except BaseException:
                os.close(self._handle)
                raise

    def about_to_change(self) -> None:
        """Remove the mark on disk before the first write.

        So no crash hides a torn state.
        """
        if self.mark is not None:
            files.remove(self._mark)
            files.sync_folder(self._mark.parent, durable=self._durable)
            self.mark = None

    def read(self, chunk: Chunk) -> Bytes:
        """Return a copy of a chunk."""
        data = np.empty(chunk.size, np.uint8)
        with files.disk_errors(f"reading {self._path.name}"):
            files.read_at(self._handle, chunk.offset, data.data)
        return data

    def write(self, chunk: Chunk, data: files.Buffer) -> None:
        with files.disk_errors(f"writing {self._path.name}"):
            files.write_at(self._handle, chunk.offset, data)

    def view(self) -> memoryview:
        """Return the whole file, mapped, read-only. It shows later writes too."""
        with files.disk_errors(f"mapping {self._path.name}"):
            return memoryview(mmap.mmap(self._handle, self._flat.size, access=mmap.ACCESS_READ))

    def close(self, holds: bytes | None = None) -> None:
        """Close the file; `holds` is the head whose state is complete in it.

        If the disk cannot note that, the next opening takes longer.
        """
        try:
            with suppress(StoreError):
                if holds is not None and self.mark != holds:
                    self._say_whole(holds)
        finally:
            os.close(self._handle)

    def _say_whole(self, holds: bytes) -> None:
        with files.disk_errors(f"syncing {self._path.name}"):
            if self._durable:
                files.sync(self._handle)
        files.write_whole(self._mark, holds, durable=self._durable)
        files.sync_folder(self._mark.parent, durable=self._durable)


def tensors(flat: FlatLayout, state: memoryview) -> dict[str, TensorBytes]:
    """Return a flat state as tensors, without copies."""
    return {
        tensor.name: TensorBytes(
            tensor.dtype, tensor.shape, state[tensor.offset : tensor.offset + tensor.size]
        )
        for tensor in flat.tensors
    }
