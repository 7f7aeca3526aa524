"""Wire format of echo-node: every message as frozen types and pure functions.

SPEC.md is its normative description, `vectors/` its golden bytes. No I/O, and no import of torch,
libp2p, trio or the program that uses it.
"""

from protocol.batch import fill_batches, read_batch, write_batch
from protocol.chain import Elector, Equivocation, Follower, Rules
from protocol.chain_sync import HeadsAnswer, HeadsQuestion
from protocol.credit import CreditRefusal, CreditStatement, open_statement
from protocol.delivery import Delivery
from protocol.delta import DELTA_CODEC, Delta, decode_delta, encode_delta
from protocol.digest import ZERO, blob_id, derive, merkle_root
from protocol.election import (
    Ballot,
    GrantsAnswer,
    GrantsQuestion,
    Heartbeat,
    ShownGrant,
    TermGrant,
    TermVote,
    VoteAnswer,
    VoteQuestion,
    cast,
)
from protocol.envelope import Envelope, Opened, open_sealed, seal
from protocol.errors import ChainError, ProtocolError
from protocol.identity import Identity, peer_id, public_key_of
from protocol.inventory import GroupsQuestion, Inventory, InventoryAck
from protocol.join import Join, Member, Roster
from protocol.link import Link
from protocol.manifest import Manifest, open_manifest
from protocol.peer_exchange import PeerPlace, PeersAnswer, PeersQuestion
from protocol.receipt import Receipt, Refusal
from protocol.rollout_request import RolloutRequest, read_part
from protocol.slot_announcement import SlotAnnouncement
from protocol.trajectory import Completion, GroupReference, Span, Stretch, TrajectoryGroup
from protocol.verdict import Figures, Verdict
from protocol.weights import ChunkTable, Frame, Layout, Route, WeightsHead
from protocol.wire import decode, encode
from protocol.zstd import RAW_CODEC, decode_raw, encode_raw

__all__ = [
    "DELTA_CODEC",
    "RAW_CODEC",
    "ZERO",
    "Ballot",
    "ChainError",
    "ChunkTable",
    "Completion",
    "CreditRefusal",
    "CreditStatement",
    "Delivery",
    "Delta",
    "Elector",
    "Envelope",
    "Equivocation",
    "Figures",
    "Follower",
    "Frame",
    "GrantsAnswer",
    "GrantsQuestion",
    "GroupReference",
    "GroupsQuestion",
    "HeadsAnswer",
    "HeadsQuestion",
    "Heartbeat",
    "Identity",
    "Inventory",
    "InventoryAck",
    "Join",
    "Layout",
    "Link",
    "Manifest",
    "Member",
    "Opened",
    "PeerPlace",
    "PeersAnswer",
    "PeersQuestion",
    "ProtocolError",
    "Receipt",
    "Refusal",
    "RolloutRequest",
    "Roster",
    "Route",
    "Rules",
    "ShownGrant",
    "SlotAnnouncement",
    "Span",
    "Stretch",
    "TermGrant",
    "TermVote",
    "TrajectoryGroup",
    "Verdict",
    "VoteAnswer",
    "VoteQuestion",
    "WeightsHead",
    "blob_id",
    "cast",
    "decode",
    "decode_delta",
    "decode_raw",
    "derive",
    "encode",
    "encode_delta",
    "encode_raw",
    "fill_batches",
    "merkle_root",
    "open_manifest",
    "open_sealed",
    "open_statement",
    "peer_id",
    "public_key_of",
    "read_batch",
    "read_part",
    "seal",
    "write_batch",
]
