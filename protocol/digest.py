"""Domain-separated BLAKE3 digests, and Merkle roots over them.

Blobs, which anybody may hold, are named by plain BLAKE3, so that `b3sum` can check them. Everything
else is named in derive-key mode under a context of its own, so that no two kinds of thing can share
a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from protocol import limits

DIGEST_BYTES: Final = 32
ZERO: Final = bytes(DIGEST_BYTES)
"""Stands for "none" where a digest is required: a manifest's run, the first head's predecessor."""


def context(name: str) -> str:
    """Return the hash context and signature domain of a kind, in this major."""
    return f"echo/{name}/{limits.MAJOR}"


def derive(name: str, *parts: bytes) -> bytes:
    """Return the 32-byte digest of bytes as one kind of thing.

    Callers pass parts of fixed length, the last one free.
    """
    return blake3(b"".join(parts), derive_key_context=context(name)).digest()


def blob_id(data: bytes) -> bytes:
    """Return the hash by which a blob is fetched."""
    return blake3(data).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the Merkle root of the leaves; it commits to their number too.

    A level's odd last node goes up as it is. Leaves, nodes and the root have contexts of their own.
    """
    level = [derive("leaf", leaf) for leaf in leaves]
    while len(level) > 1:
        pairs = [derive("node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    return derive("root", len(leaves).to_bytes(8), *level)
