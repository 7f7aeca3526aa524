"""GossipSub RPC frames as protobuf, with every field bounded on the way in.

The schema is declared here because py-libp2p's has text topics, which parse as `str` or as `bytes`
depending on what the peer sent, and several topics per message, which GossipSub v1.1 does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from protocol import ProtocolError, limits

PROTOCOL_ID: Final = "/meshsub/1.1.0"
FRAME_BYTES: Final = 1024 * 1024
"""Limit of one frame, as in other implementations."""
TOPIC_BYTES: Final = 256
SUBSCRIPTIONS: Final = 256
"""Subscription changes in one frame."""
MESSAGES: Final = 1_024
BYTES_A_MESSAGE: Final = 8_192
"""Bytes that cost as much as one message in the rate limit."""
CONTROLS: Final = 256
"""Items of each control type in one frame."""
IDS: Final = 5_000
"""Message ids in one frame."""
ID_BYTES: Final = 128


class GossipError(ProtocolError):
    """A malformed or oversized GossipSub frame."""

    reason = "malformed-gossip"


@dataclass(frozen=True, slots=True)
class Published:
    """A message on a topic; author, sequence number and signature are ignored."""

    topic: str
    data: bytes


@dataclass(slots=True)
class Control:
    """GossipSub control messages."""

    graft: list[str] = field(default_factory=list)
    prune: list[tuple[str, int]] = field(default_factory=list)
    """Topic and backoff in seconds."""
    have: list[tuple[str, list[bytes]]] = field(default_factory=list)
    want: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.graft or self.prune or self.have or self.want)


@dataclass(slots=True)
class Frame:
    """One RPC frame."""

    subscriptions: list[tuple[str, bool]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    control: Control = field(default_factory=Control)

    @property
    def cost(self) -> float:
        """Cost in messages: long frames and frames full of ids cost more."""
        control = self.control
        ids = len(control.want) + sum(len(each) for _, each in control.have)
        changes = len(self.subscriptions) + len(control.graft) + len(control.prune)
        size = sum(len(message.data) for message in self.published)
        return 1 + len(self.published) + size / BYTES_A_MESSAGE + changes / 8 + ids / 64


def write_frame(
    *,
    subscriptions: Iterable[tuple[str, bool]] = (),
    published: Iterable[Published] = (),
    control: Control | None = None,
) -> bytes:
    """Encode a frame with its length prefix."""
    rpc = _Rpc()
    for topic, on in subscriptions:
        rpc.subscriptions.add(subscribe=on, topicid=topic.encode())
    for message in published:
        rpc.publish.add(data=message.data, topic=message.topic.encode())
    if control:
        for topic in control.graft:
            rpc.control.graft.add(topicID=topic.encode())
        for topic, seconds in control.prune:
            rpc.control.prune.add(topicID=topic.encode(), backoff=seconds)
        for topic, ids in control.have:
            rpc.control.ihave.add(topicID=topic.encode(), messageIDs=ids)
        if control.want:
            rpc.control.iwant.add(messageIDs=control.want)
    body: bytes = rpc.SerializeToString()
    return write_length(len(body)) + body


def read_frame(body: bytes) -> Frame:
    """Decode a frame without its length prefix. Raises `GossipError`."""
    rpc = _Rpc()
    try:
        rpc.ParseFromString(body)
    except DecodeError as error:
        raise GossipError("a frame that is not protobuf") from error
    control = rpc.control
    _at_most(SUBSCRIPTIONS, rpc.subscriptions, "subscriptions")
    _at_most(MESSAGES, rpc.publish, "messages")
    for items, what in (
        (control.graft, "grafts"),
        (control.prune, "prunes"),
        (control.ihave, "offers"),
        (control.iwant, "wants"),
    ):
        _at_most(CONTROLS, items, what)
    return Frame(
        subscriptions=[(_topic(each.topicid), bool(each.subscribe)) for each in rpc.subscriptions],
        published=[_published(each) for each in rpc.publish],
        control=Control(
            graft=[_topic(each.topicID) for each in control.graft],
            prune=[(_topic(each.topicID), min(each.backoff, 3600)) for each in control.prune],
            have=[(_topic(each.topicID), _ids(each.messageIDs)) for each in control.ihave],
            want=_ids([each for want in control.iwant for each in want.messageIDs]),
        ),
    )


def write_length(length: int) -> bytes:
    """Encode an unsigned varint."""
    out = bytearray()
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def take_frames(buffer: bytearray) -> list[bytes]:
    """Remove and return the complete frames of a buffer. Raises `GossipError`."""
    frames = []
    while (found := _read_length(buffer)) is not None:
        length, start = found
        if len(buffer) < start + length:
            break
        frames.append(bytes(buffer[start : start + length]))
        del buffer[: start + length]
    return frames


def _read_length(buffer: bytearray) -> tuple[int, int] | None:
    length = 0
    for n, byte in enumerate(buffer[:5]):
        length |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            if length > FRAME_BYTES:
                raise GossipError(f"a frame of {length} bytes, the limit is {FRAME_BYTES}")
            return length, n + 1
    if len(buffer) >= 5:
        raise GossipError("a length of more than 5 bytes")
    return None


def _published(each: Any) -> Published:
    if len(each.data) > limits.GOSSIP_BYTES:
        raise GossipError(f"a message of {len(each.data)} bytes, the limit is {limits.GOSSIP_BYTES}")
    return Published(_topic(each.topic), each.data)


def _topic(name: bytes) -> str:
    if not 0 < len(name) <= TOPIC_BYTES:
        raise GossipError(f"a topic of {len(name)} bytes")
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise GossipError("a topic that is not UTF-8") from error


def _ids(ids: Sequence[bytes]) -> list[bytes]:
    _at_most(IDS, ids, "message ids")
    if any(len(each) > ID_BYTES for each in ids):
        raise GossipError(f"a message id of more than {ID_BYTES} bytes")
    return list(ids)


def _at_most(most: int, items: Sequence[Any], what: str) -> None:
    if len(items) > most:
        raise GossipError(f"{len(items)} {what} in a frame, the limit is {most}")


def _schema() -> Any:
    """Build the GossipSub v1.1 messages, with topics and ids as bytes."""
    kinds = descriptor_pb2.FieldDescriptorProto
    scalar = {"bytes": kinds.TYPE_BYTES, "bool": kinds.TYPE_BOOL, "uint64": kinds.TYPE_UINT64}
    schema = {
        "Rpc": "*SubOpts subscriptions=1, *Message publish=2, Control control=3",
        "SubOpts": "bool subscribe=1, bytes topicid=2",
        "Message": "bytes data=2, bytes topic=4",
        "Control": "*Have ihave=1, *Want iwant=2, *Graft graft=3, *Prune prune=4",
        "Have": "bytes topicID=1, *bytes messageIDs=2",
        "Want": "*bytes messageIDs=1",
        "Graft": "bytes topicID=1",
        "Prune": "bytes topicID=1, uint64 backoff=3",
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="echo_gossip.proto", package="echo.gossip", syntax="proto2"
    )
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            kind, label = text.split(" ")
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            entry = message.field.add(
                name=label.split("=")[0],
                number=int(label.split("=")[1]),
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
                type=scalar.get(kind, kinds.TYPE_MESSAGE),
            )
            if kind not in scalar:
                entry.type_name = f".echo.gossip.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("echo.gossip.Rpc"))


_Rpc: Final = _schema()
