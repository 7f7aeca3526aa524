"""Names for bytes: domain-separated BLAKE3, and Merkle roots over it. Knows nothing of what is named.

Blobs, which anybody may hold, are named by plain BLAKE3, so that `b3sum` can check them. Everything else is named
in derive-key mode under a context of its own, so that no two kinds of thing can share a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from protocol import limits

DIGEST_BYTES: Final = 32
ZERO: Final = bytes(DIGEST_BYTES)
"""Stands for "none" where a digest is required: the run of a manifest, the predecessor of the first head."""


def context(name: str) -> str:
    """The hash context, and signature domain, of one kind of thing in this major version."""
    return f"echo/{name}/{limits.MAJOR}"


def derive(name: str, *parts: bytes) -> bytes:
    """The 32-byte name of some bytes as one kind of thing. Callers pass parts of fixed length, the last one free."""
    return blake3(b"".join(parts), derive_key_context=context(name)).digest()


def blob_id(data: bytes) -> bytes:
    """The name by which a blob is fetched."""
    return blake3(data).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root of a binary tree over the leaves, in their order; it commits to their number as well.

    A level's odd last node goes up as it is. Leaves, nodes and the root have contexts of their own.
    """
    level = [derive("leaf", leaf) for leaf in leaves]
    while len(level) > 1:
        pairs = [derive("node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    return derive("root", len(leaves).to_bytes(8), *level)
