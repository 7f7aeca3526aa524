"""Every maximum of the wire, in one place. A number here is normative; SPEC.md repeats it."""

from __future__ import annotations

from typing import Final

MAJOR: Final = 1
"""The major version of the wire. It is in every envelope, hash context, topic and stream id."""

# Canonical values
DEPTH: Final = 16
"""Containers within containers, the outermost counted."""
ITEMS: Final = 16_384
"""Items of all containers of a value together (a map's pair counts as two)."""
MANY_ITEMS: Final = 262_144
"""The same for the few objects that are long lists: layouts and rosters."""
KEY_BYTES: Final = 64
"""One key of a map."""
SAFE_INTEGER: Final = 2**53 - 1
"""The largest counter: every language with float64 numbers can hold it."""

# Whole messages, in bytes of the body
GOSSIP_BYTES: Final = 65_536
"""One gossip message, and so a batch of groups or verdicts."""
ENVELOPE_BYTES: Final = 192
"""What sealing may add to a body."""
DELIVERY_BYTES: Final = GOSSIP_BYTES + 128
"""One gossip message that is handed over directly, with its topic."""
GROUP_BYTES: Final = 4 * 1024 * 1024
"""One trajectory group; above GOSSIP_BYTES it travels by reference."""
ANSWER_BYTES: Final = 4 * 1024 * 1024 + 65_536
"""All sealed groups that answer one rollout request."""
MANIFEST_BYTES: Final = 131_072
HEAD_BYTES: Final = 2_048 - ENVELOPE_BYTES
SMALL_BYTES: Final = 4_096
"""Joins, heartbeats, verdicts, votes, references."""
GRANT_BYTES: Final = 16_384
RECEIPT_BYTES: Final = 32_768
ROSTER_BYTES: Final = 1024 * 1024
LAYOUT_BYTES: Final = 16 * 1024 * 1024
TABLE_BYTES: Final = 72 * 65_536
LINK_BYTES: Final = 2_048

# Fields
EXT_BYTES: Final = 1_024
"""The signed, ignorable `ext` map of a message."""
PARAMS_BYTES: Final = 16_384
"""Parameters of a contract or an algorithm."""
NAME_BYTES: Final = 64
TEXT_BYTES: Final = 1_024
"""A text for people: a reason, a vector's completion."""
ADDRESS_BYTES: Final = 256
ADDRESSES: Final = 16
PEERS: Final = 32
"""Peers that are told in one answer."""
PEER_ADDRESSES: Final = 8
"""Addresses of one peer that are told."""
PEERS_QUESTION_BYTES: Final = 64
PEERS_ANSWER_BYTES: Final = 69_632
"""An answer with every peer and every address at its longest, and a little."""
TENSOR_NAME_BYTES: Final = 256
TENSORS: Final = 32_768
TENSOR_RANK: Final = 8

# Trajectories
VOCABULARY_BITS: Final = 24
TOKENS: Final = 131_072
"""Tokens of one prompt, and of one completion."""
COMPLETIONS: Final = 256
"""Completions of one group."""
SPANS: Final = 256
"""Spans of one completion."""
HEADS: Final = 9
"""Heads that one group names: the slot's and at most one for each further version within the bound."""
BATCH: Final = 512
"""Groups or verdicts in one batch."""
REWARD: Final = 1e6
"""The magnitude of a reward."""

# Runs
STALENESS: Final = 8
KEYS: Final = 64
"""Trainer, verifier or elector keys of a run."""
CLASSES: Final = 16
CONTRACT_VECTORS: Final = 16
MODEL_FILES: Final = 16
END_TOKENS: Final = 8

# Weights
CHUNK_ELEMENTS: Final = 4 * 1024 * 1024
CHUNKS: Final = 65_536
FRAME_BYTES: Final = 4 * CHUNK_ELEMENTS + 65_536
"""One frame: a chunk of 32-bit elements stored raw, and a little."""
WINDOW_BYTES: Final = 8 * 1024 * 1024
"""How far back a frame's zstd may reach, unless it is one segment, which reaches over its own content."""
ROUTES: Final = 8
HELD_HEADS: Final = 32
"""Heads that are named in one question for what follows."""
CHAIN_HEADS: Final = 256
"""Heads in one answer to that."""
HEADS_BYTES: Final = CHAIN_HEADS * (HEAD_BYTES + ENVELOPE_BYTES + 8) + 64
"""That answer with every head at its longest, and a little."""
GRANTS: Final = 8
"""Grants in one answer."""
GRANTS_BYTES: Final = HEADS_BYTES + GRANTS * GRANT_BYTES
"""That answer with the heads that lead to them."""
VOTE_BYTES: Final = HEADS_BYTES + SMALL_BYTES
"""A candidate's question, with the heads that lead to its base."""

# Blobs
WANTS: Final = 256
"""Blobs of one want-list."""
SLICES: Final = 256
"""Slices of blobs in one question."""
SLICES_BYTES: Final = 16_384
"""A question about blobs: 256 ids or slices, and a little."""
READ_BYTES: Final = 4 * 1024 * 1024
"""What one question has answered over its stream."""
BULK_BYTES: Final = 1024 * 1024 * 1024
"""What one question has answered at the door beside it."""
BULK_SECONDS: Final = 30
"""How long that door is open for a token."""

# Rosters and receipts
ROSTER: Final = 8_192
RECEIPT_IDS: Final = 768
"""Group ids in one receipt, over all its lists."""
RECEIPT_REASONS: Final = 32
CREDIT_REASONS: Final = 32
"""Reasons in one statement of a sampler's account."""
