"""Every maximum of the wire. A number here is normative; SPEC.md repeats it."""

from __future__ import annotations

from typing import Final

MAJOR: Final = 2
"""Major version of the wire, in every envelope, hash context, topic and stream id."""

# Canonical values
DEPTH: Final = 16
"""Nested containers, the outermost counted."""
ITEMS: Final = 16_384
"""Items of all containers of a value together (a map's pair counts as two)."""
MANY_ITEMS: Final = 262_144
"""Items of objects that are long lists: layouts and rosters."""
KEY_BYTES: Final = 64
"""Bytes of one key of a map."""
SAFE_INTEGER: Final = 2**53 - 1
"""Largest counter: every language with float64 numbers can hold it."""

# Whole messages, in bytes of the body
GOSSIP_BYTES: Final = 65_536
"""Bytes of one gossip message, and so of a batch of groups or verdicts."""
ENVELOPE_BYTES: Final = 192
"""Bytes that sealing may add to a body."""
DELIVERY_BYTES: Final = GOSSIP_BYTES + 128
"""Bytes of one gossip message that is delivered directly, with its topic."""
GROUP_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one trajectory group; above GOSSIP_BYTES it travels by reference."""
ANSWER_BYTES: Final = 1024 * 1024 + 65_536
"""Bytes of one part of the answer to a rollout request; a larger group goes by reference."""
GROUPS_ANSWER_BYTES: Final = GROUP_BYTES + 65_536
"""Bytes of the sealed groups that answer a question for groups that the leader took."""
MANIFEST_BYTES: Final = 131_072
HEAD_BYTES: Final = 2_048 - ENVELOPE_BYTES
SMALL_BYTES: Final = 4_096
"""Bytes of a join, heartbeat, verdict, vote or reference."""
GRANT_BYTES: Final = 16_384
RECEIPT_BYTES: Final = 32_768
ROSTER_BYTES: Final = 1024 * 1024
LAYOUT_BYTES: Final = 16 * 1024 * 1024
TABLE_BYTES: Final = 72 * 65_536
LINK_BYTES: Final = 2_048

# Fields
EXT_BYTES: Final = 1_024
"""Bytes of the signed, ignorable `ext` map of a message."""
PARAMS_BYTES: Final = 16_384
"""Bytes of the parameters of a contract or an algorithm."""
NAME_BYTES: Final = 64
TEXT_BYTES: Final = 1_024
"""Bytes of a text for people: a reason, a vector's completion."""
ADDRESS_BYTES: Final = 256
ADDRESSES: Final = 16
PEERS: Final = 32
"""Peers in one answer."""
PEER_ADDRESSES: Final = 8
"""Addresses of one peer in an answer."""
PEERS_QUESTION_BYTES: Final = 64
PEERS_ANSWER_BYTES: Final = 69_632
"""Bytes of an answer with every peer and every address at its longest, and a little."""
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
TURNS: Final = 256
"""Turns of one completion."""
HEADS: Final = 9
"""Heads that one group names: the slot's, and one for each further version within the bound."""
ANNOUNCED: Final = 256
"""Slots in one announcement."""
BATCH: Final = 512
"""Groups or verdicts in one batch."""
REWARD: Final = 1e6
"""Magnitude of a reward."""

# Runs
STALENESS: Final = 8
KEYS: Final = 64
"""Trainer, verifier or elector keys of a run."""
CLASSES: Final = 16
CONTRACT_VECTORS: Final = 16
MODEL_FILES: Final = 16
DATA_BYTES: Final = 256 * 1024 * 1024
"""Bytes of a run's data set."""
WHEELS: Final = 64
"""Packages of a contract's code."""
CODE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of all of them together."""
END_TOKENS: Final = 8
ADAPTER_RANK: Final = 1024
ADAPTER_TARGETS: Final = 32
"""Names of modules that an adapter is trained for."""

# Weights
CHUNK_ELEMENTS: Final = 4 * 1024 * 1024
CHUNKS: Final = 65_536
FRAME_BYTES: Final = 4 * CHUNK_ELEMENTS + 65_536
"""Bytes of one frame: a chunk of 32-bit elements stored raw, and a little."""
WINDOW_BYTES: Final = 8 * 1024 * 1024
"""Bytes of a frame's zstd window, unless it is one segment, which reaches over its content."""
ROUTES: Final = 8
HELD_HEADS: Final = 32
"""Heads named in one question for what follows."""
CHAIN_HEADS: Final = 256
"""Heads in one answer to that."""
HEADS_BYTES: Final = CHAIN_HEADS * (HEAD_BYTES + ENVELOPE_BYTES + 8) + 64
"""Bytes of that answer with every head at its longest, and a little."""
GRANTS: Final = 8
"""Grants in one answer."""
GRANTS_BYTES: Final = HEADS_BYTES + GRANTS * GRANT_BYTES
"""Bytes of that answer with the heads that lead to them."""
VOTE_BYTES: Final = HEADS_BYTES + SMALL_BYTES
"""Bytes of a candidate's question, with the heads that lead to its base."""

# Blobs
WANTS: Final = 256
"""Blobs of one want-list."""
SLICES: Final = 256
"""Slices of blobs in one question."""
SLICES_BYTES: Final = 16_384
"""Bytes of a question about blobs: 256 ids or slices, and a little."""
READ_BYTES: Final = 4 * 1024 * 1024
"""Bytes that answer one question over its stream."""
BULK_BYTES: Final = 1024 * 1024 * 1024
"""Bytes that answer one question at the bulk port."""
BULK_SECONDS: Final = 30
"""Seconds for which a token opens the bulk port."""

# Rosters and receipts
ROSTER: Final = 8_192
RECEIPT_IDS: Final = 768
"""Group ids in one receipt, over all its lists."""
RECEIPT_REASONS: Final = 32
INVENTORY_IDS: Final = 768
"""Group ids in one inventory of the leader."""
INVENTORY_BYTES: Final = 32_768
ASKED_GROUPS: Final = 128
"""Groups of one question for groups that the leader took."""
GROUPS_QUESTION_BYTES: Final = 8_192
CREDIT_REASONS: Final = 32
"""Reasons in one credit statement."""
