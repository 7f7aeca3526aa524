"""What a store of weights holds, read without changing it: the chain, every blob, the state.

Nothing here trusts what the store says of itself: signatures are left to whoever asks, hashes are
computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.errors import EchoError
from echo_node.storage import files
from echo_node.storage.blob_dir import BlobDir, DamagedBlobError
from echo_node.weights.chain_log import ENTRY_BYTES, ChainLog
from echo_node.weights.flat_layout import FlatLayout
from echo_node.weights.state_file import tensors
from echo_node.weights.store_metadata import read_metadata
from echo_node.weights.version_archive import VersionArchive
from protocol import (
    Envelope,
    Manifest,
    Opened,
    ProtocolError,
    Rules,
    TermGrant,
    WeightsHead,
    blob_id,
    canonical,
    decode,
    limits,
    merkle_root,
)

_HEX: Final = 64


@dataclass(frozen=True)
class KnownHead:
    """A head as it stands in a store, before anybody has checked its signature."""

    sealed: bytes
    id: bytes
    signer: bytes
    message: WeightsHead

    @classmethod
    def of(cls, sealed: bytes, run: bytes) -> KnownHead:
        envelope = Envelope.parse(sealed)
        return cls(sealed, envelope.id, envelope.signer, envelope.claim(WeightsHead, run))

    @property
    def order(self) -> tuple[int, int]:
        return self.message.term, self.message.version

    def __str__(self) -> str:
        return f"version {self.message.version} of term {self.message.term} ({self.id.hex()[:12]})"


@dataclass(frozen=True)
class Holdings:
    """One node's store.

    `chain` are the ids of the heads that it follows, by the rules of the chain; `taken` is why that
    could not be told. `damaged` are blobs whose bytes are not what their names say, `wrong_state`
    what the state is not.
    """

    heads: tuple[KnownHead, ...] = ()
    grants: tuple[TermGrant, ...] = ()
    chain: tuple[bytes, ...] = ()
    taken: str = ""
    current: bytes | None = None
    proven: frozenset[bytes] = frozenset()
    """Heads whose root the node holds: as the state on disk, or as it can be built."""
    damaged: tuple[str, ...] = ()
    wrong_state: str = ""
    archive: VersionArchive | None = field(default=None, compare=False, repr=False)

    def roster(self, head: WeightsHead) -> bytes | None:
        """The blob with a head's roster, hashed again."""
        if self.archive is None or not self.archive.blobs.has(head.roster):
            return None
        data = self.archive.blobs.path(head.roster).read_bytes()
        return data if blob_id(data) == head.roster else None

    def state(self, head: bytes) -> dict[str, TensorBytes] | None:
        """The weights of a version, built from what is here; none, if they cannot be."""
        built = None if self.archive is None else _built(self.archive, head)
        return (
            None if built is None or self.archive is None else tensors(self.archive.flat, memoryview(built))
        )


def read_holdings(folder: Path, manifest: Opened[Manifest]) -> Holdings:
    """The store in a folder that no process uses."""
    heads: dict[bytes, KnownHead] = {}
    grants: list[TermGrant] = []
    for kind, *rest in _entries(folder / "heads"):
        sealed = rest if kind in {"head", "proof"} else rest[1] if kind == "grant" else []
        for each in sealed:
            head = KnownHead.of(bytes(each), manifest.id)
            heads.setdefault(head.id, head)
        if kind == "grant":
            grants.append(decode(TermGrant, bytes(rest[0])))
    rules = Rules.of(manifest)
    try:
        journal = ChainLog(folder / "heads", rules, None, durable=False)
    except EchoError as error:
        return Holdings(tuple(heads.values()), tuple(grants), taken=str(error))
    _, _, layout = read_metadata(folder)
    archive = VersionArchive(FlatLayout(layout), _Evidence(folder / "blobs", durable=False), journal)
    chain = tuple(head.id for head in journal.follower.heads)
    current = folder / "current"
    held = bytes.fromhex(current.read_text("ascii").strip()) if current.exists() else None
    wrong = ""
    proven = set()
    if held is not None and held in heads:
        root, marked = heads[held].message.root, folder / "state.whole"
        in_state = _root_of(folder / "state", archive.flat) == root
        if not in_state and marked.exists() and marked.read_bytes() == held:
            wrong = f"the state on disk is marked whole and is not that of {heads[held]}"
        built = _built(archive, held)
        if in_state or (built is not None and _root(built, archive.flat) == root):
            proven.add(held)
    return Holdings(
        tuple(heads.values()),
        tuple(grants),
        chain,
        current=held,
        proven=frozenset(proven),
        damaged=tuple(_damaged(folder / "blobs")),
        wrong_state=wrong,
        archive=archive,
    )


class _Evidence(BlobDir):
    """Blobs that stay as they are, damaged ones too: a node would take those away."""

    def read(self, blob: bytes, most: int = limits.FRAME_BYTES) -> bytes:
        if not self.is_right(blob, most):
            raise DamagedBlobError(f"{blob.hex()} has another hash")
        return files.read_whole(self.path(blob), most)


def _entries(folder: Path) -> Iterator[list[Any]]:
    for path in sorted(each for each in folder.iterdir() if each.name.isdecimal()):
        entry: Any = canonical.decode(path.read_bytes(), most=ENTRY_BYTES)
        yield entry


def _damaged(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if len(path.name) == _HEX and blob_id(path.read_bytes()).hex() != path.name:
            yield f"blob {path.name[:12]} of {path.stat().st_size} bytes has another hash"


def _root_of(state: Path, flat: FlatLayout) -> bytes | None:
    if not state.is_file() or state.stat().st_size != flat.size:
        return None
    return _root(state.read_bytes(), flat)


def _root(data: bytes, flat: FlatLayout) -> bytes:
    view = memoryview(data)
    return merkle_root([blob_id(bytes(view[each.offset : each.offset + each.size])) for each in flat.chunks])


def _built(archive: VersionArchive, head: bytes) -> bytes | None:
    """A version from nothing but blobs."""
    try:
        readers = archive.readers(archive.way(head))
        parts = [np.asarray(archive.build(readers, chunk)).tobytes() for chunk in archive.flat.chunks]
    except (EchoError, ProtocolError, KeyError):
        return None
    return b"".join(parts)
