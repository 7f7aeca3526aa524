"""Checkpoint files: the whole training state, in safetensors with a content hash.

The hash stands in the file's own header, at a fixed place, and is checked first: a torn file is
skipped for the one before. The same bytes are sent to standby trainers. Callers that add tensors or
notes of their own choose names that nobody else uses.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import torch
from blake3 import blake3
from torch import Tensor

from echo_node.errors import EchoError, StoreError, boundary
from echo_node.storage import files

log = logging.getLogger(__name__)

KEPT: Final = 2
LONGEST_HEADER: Final = 16 << 20
MOST_TENSORS: Final = 1 << 16
LARGEST_STEP: Final = 2**53 - 1
LARGEST_FILE: Final = 1 << 40
HEAD_VERSION: Final = "head_version"
"""Note of a checkpoint with the version that was published when it was made."""
_OPENING: Final = b'{"__metadata__":{"blake3":"'
_HASH: Final = slice(8 + len(_OPENING), 8 + len(_OPENING) + 64)
"""Position of the hash, after the header's length.

It is computed with zeros in this place.
"""
_NAME: Final = re.compile(r"step-(\d{10,16})\.safetensors")
_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after a number of steps.

    The tensors are copies: training does not change them.
    """

    step: int
    tensors: Mapping[str, Tensor]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= LARGEST_STEP:
            raise ValueError(f"step {self.step} is not from 0 to {LARGEST_STEP}")


def to_bytes(checkpoint: Checkpoint) -> bytes:
    return b"".join(_pieces(checkpoint))


def from_bytes(data: bytes | bytearray | memoryview, *, blame: type[EchoError] = StoreError) -> Checkpoint:
    """Parse a checkpoint from untrusted bytes; raise `blame` where it is none."""
    with boundary(blame, "reading a checkpoint"):
        view = memoryview(data).cast("B")
        header = _checked_header(view)
        # The library checks each tensor's offsets, overlap and length.
        entries: Any = safetensors.deserialize(data if isinstance(data, bytes) else bytes(view))  # type: ignore[no-untyped-call]
        if len(entries) > MOST_TENSORS:
            raise ValueError(f"{len(entries)} tensors, of at most {MOST_TENSORS}")
        metadata = json.loads(header)["__metadata__"]
        notes = {
            name.removeprefix("note."): text for name, text in metadata.items() if name.startswith("note.")
        }
        if metadata.keys() != {"blake3", "step", *(f"note.{name}" for name in notes)}:
            raise ValueError("the header's fields are not those of a checkpoint")
        if not re.fullmatch(r"0|[1-9]\d{0,15}", metadata["step"], re.ASCII):
            raise ValueError("the step is no number")
        return Checkpoint(int(metadata["step"]), {name: _tensor(entry) for name, entry in entries}, notes)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically, and keep the one before it.

    Later ones in the folder are of a branch that was left, and are removed first: recovery must not
    find them.
    """
    path = folder / f"step-{checkpoint.step:010d}.safetensors"
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{files.BESIDE}")
    with files.disk_errors(f"writing {path.name}"):
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(f"step-*.safetensors.*{files.BESIDE}"):
            torn.unlink(missing_ok=True)
        try:
            _write(beside, _pieces(checkpoint))
            for later in _kept(folder):
                if _step(later) > checkpoint.step:
                    later.unlink(missing_ok=True)
            files.rename(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        files.sync_folder(folder, durable=True)
        for older in _kept(folder)[:-KEPT]:
            older.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    checkpoint = from_bytes(files.read_whole(path, LARGEST_FILE))
    if checkpoint.step != _step(path):
        raise StoreError(f"{path.name} holds the checkpoint of step {checkpoint.step}")
    return checkpoint


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest readable checkpoint.

    Torn or corrupt ones are skipped, and logged.
    """
    for path in reversed(_kept(folder)):
        try:
            return read_checkpoint(path)
        except StoreError as error:
            log.warning("%s cannot be used, so an older checkpoint is looked for: %s", path.name, error)
    return None


def _write(path: Path, pieces: Iterator[memoryview | bytes]) -> None:
    handle = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        at = 0
        for piece in pieces:
            files.write_at(handle, at, piece)
            at += len(piece)
        files.sync(handle)
    finally:
        os.close(handle)


def _pieces(checkpoint: Checkpoint) -> Iterator[memoryview | bytes]:
    """Return the file in pieces, without a copy of large tensors."""
    tensors = {
        name: checkpoint.tensors[name].detach().cpu().contiguous() for name in sorted(checkpoint.tensors)
    }
    blank = _header(checkpoint, tensors)
    hashed = blake3(blank)
    for tensor in tensors.values():
        hashed.update(_raw(tensor))
    return itertools.chain(
        (blank[: _HASH.start] + hashed.hexdigest().encode() + blank[_HASH.stop :],),
        map(_raw, tensors.values()),
    )


def _header(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> bytes:
    notes = {f"note.{name}": checkpoint.notes[name] for name in sorted(checkpoint.notes)}
    header: dict[str, Any] = {"__metadata__": {"blake3": "0" * 64, "step": str(checkpoint.step), **notes}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES or name == "__metadata__":
            raise ValueError(f"a checkpoint cannot hold {name!r} of type {tensor.dtype}")
        end = at + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER or len(tensors) > MOST_TENSORS:
        raise ValueError(
            f"{len(tensors)} tensors and {len(notes)} notes are more than a checkpoint's header holds"
        )
    return len(text).to_bytes(8, "little") + text


def _checked_header(view: memoryview) -> bytes:
    """Return the header of a file whose hash is right."""
    length = int.from_bytes(view[:8], "little")
    if not len(_OPENING) + 64 < length <= min(LONGEST_HEADER, len(view) - 8):
        raise ValueError("it is cut short, or no checkpoint")
    header = bytes(view[8 : 8 + length])
    if not header.startswith(_OPENING):
        raise ValueError("it is no checkpoint")
    hashed = blake3(view[: _HASH.start]).update(b"0" * 64).update(view[_HASH.stop :])
    if bytes(view[_HASH]) != hashed.hexdigest().encode():
        raise ValueError("its bytes are not those that were written")
    return header


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    for dtype, name in _TYPES.items():
        if name == entry["dtype"]:
            data: bytearray = entry["data"]  # a copy of the file's bytes
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(entry["shape"])
    raise ValueError(f"a tensor has the type {entry['dtype']!r}")


def _raw(tensor: Tensor) -> memoryview:
    flat: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data.cast("B") if flat.size else memoryview(b"")


def _kept(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest last."""
    with files.disk_errors(f"looking into {folder.name}"):
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(names, key=_step)


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise StoreError(f"{path.name} is not the name of a checkpoint")
    return int(found[1])
