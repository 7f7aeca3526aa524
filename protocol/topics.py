"""Names of gossip topics, stream ids and DHT keys, each with the major version."""

from __future__ import annotations

from typing import Final

from protocol import limits
from protocol.digest import derive
from protocol.errors import OutOfRangeError

KAD_PROTOCOL: Final = f"/echo/kad/{limits.MAJOR}.0.0"

# Gossip, one topic per run and cargo
GROUPS: Final = "groups"
HEADS: Final = "heads"
RECEIPTS: Final = "receipts"
VERDICTS: Final = "verdicts"
JOINS: Final = "joins"
HEARTBEATS: Final = "heartbeats"
GRANTS: Final = "grants"
INVENTORIES: Final = "inventories"
CARGOES: Final = (GROUPS, HEADS, RECEIPTS, VERDICTS, JOINS, HEARTBEATS, GRANTS, INVENTORIES)

# Streams, one id per question
ROLLOUT_STREAM: Final = f"/echo/rollout/{limits.MAJOR}"
DELIVER_STREAM: Final = f"/echo/deliver/{limits.MAJOR}"
CHAIN_STREAM: Final = f"/echo/chain/{limits.MAJOR}"
WANTS_STREAM: Final = f"/echo/wants/{limits.MAJOR}"
BLOB_STREAM: Final = f"/echo/blob/{limits.MAJOR}"
BULK_STREAM: Final = f"/echo/bulk/{limits.MAJOR}"
PEERS_STREAM: Final = f"/echo/peers/{limits.MAJOR}"
VOTE_STREAM: Final = f"/echo/vote/{limits.MAJOR}"
GRANTS_STREAM: Final = f"/echo/grants/{limits.MAJOR}"
MANIFEST_STREAM: Final = f"/echo/manifest/{limits.MAJOR}"
CREDIT_STREAM: Final = f"/echo/credit/{limits.MAJOR}"
GROUPS_STREAM: Final = f"/echo/groups/{limits.MAJOR}"
STREAMS: Final = (
    ROLLOUT_STREAM,
    DELIVER_STREAM,
    CHAIN_STREAM,
    WANTS_STREAM,
    BLOB_STREAM,
    BULK_STREAM,
    PEERS_STREAM,
    VOTE_STREAM,
    GRANTS_STREAM,
    MANIFEST_STREAM,
    CREDIT_STREAM,
    GROUPS_STREAM,
)

ROLES: Final = ("trainer", "verifier", "sampler", "bootstrap")

# Multihash code and length of a 32-byte BLAKE3 digest, as other libp2p implementations expect in a
# DHT key.
_BLAKE3_MULTIHASH: Final = bytes.fromhex("1e20")


def topic(run: bytes, cargo: str) -> str:
    """Return the gossip topic of one cargo of a run."""
    if cargo not in CARGOES:
        raise OutOfRangeError(f"{cargo!r} is none of {', '.join(CARGOES)}", "topic")
    return f"/echo/{limits.MAJOR}/{run.hex()}/{cargo}"


def role_key(run: bytes, role: str) -> bytes:
    """Return the DHT key of the peers of one role of a run.

    Under the run ZERO: trainers of open runs.
    """
    if role not in ROLES:
        raise OutOfRangeError(f"{role!r} is none of {', '.join(ROLES)}", "role")
    return _BLAKE3_MULTIHASH + derive("role", run, role.encode())


def blob_key(blob: bytes) -> bytes:
    """Return the DHT key under which the holders of a blob announce themselves."""
    return _BLAKE3_MULTIHASH + blob
