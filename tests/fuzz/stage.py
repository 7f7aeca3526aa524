"""A small real run without torch, a network whose answers are a fuzzer's, and signed messages.

Most of what peers say is signed, and no fuzzer forges a signature: here the body is a fuzzer's, and
the seal is real.
"""

# ruff: noqa: ARG002 -- the signatures are the network's
from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import trio
from libp2p.custom_types import TProtocol

from echo_node.contract import load
from echo_node.models import embedded
from echo_node.net.base import ACCEPT, CAPACITY, Handler, Message, PeerEvent, RequestError, Validator
from echo_node.net.handler_guard import run_validator
from echo_node.net.host import HardHost, build_host
from echo_node.net.request_response import RequestResponse
from echo_node.net.subscription import Subscription
from echo_node.runs.run import Run, draft, read_model
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import (
    ZERO,
    Completion,
    Identity,
    Member,
    Opened,
    Roster,
    Route,
    Stretch,
    TrajectoryGroup,
    WeightsHead,
    blob_id,
    canonical,
    encode,
    limits,
    merkle_root,
    open_sealed,
    seal,
)
from protocol.envelope import sign_body
from protocol.manifest import Sampling, Sync, Verification
from tests.fuzz.wires import Wire, framed

ENGINE = "torch/f32"


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


TRAINER, STANDBY, VERIFIER, SAMPLER, STRANGER = map(
    identity, ("trainer", "standby", "verifier", "sampler", "stranger")
)
ROSTER = Roster((Member(SAMPLER.public, ENGINE, bytes(32)),))


@functools.cache
def run() -> Run:
    """The embedded task, with two trainers and a verifier whose word counts."""
    sealed = draft(
        name="fuzz",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={"batch_groups": 2},
        sampling_=Sampling(group_size=2, max_prompt=16, max_tokens=6, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=2),
        author=TRAINER,
        trainers=[TRAINER.public, STANDBY.public],
        verifiers=[VERIFIER.public],
        verification=Verification(policy="quorum", quorum=1, share=0.25),
        nonce=bytes(32),
    )
    return Run.open(sealed, embedded.folder(), jailed=False)


@functools.cache
def head(version: int = 0) -> Opened[WeightsHead]:
    """The heads of the run's chain. What weights they stand for is of no interest here."""
    before = head(version - 1) if version else None
    message = WeightsHead(
        groups=merkle_root([]),
        layout=run().rules.layout,
        luck=bytes(32),
        previous=before.id if before else ZERO,
        root=run().rules.root,
        roster=blob_id(encode(ROSTER)),
        routes=(Route(base=None, codec="safetensors", size=1, table=bytes(32)),),
        step=version,
        term=1,
        version=version,
    )
    return open_sealed(seal(message, TRAINER, run().id), WeightsHead, run().id)


def group(slot: int = 0, version: int = 0) -> TrajectoryGroup:
    """What an honest sampler with a perfect model says."""
    told = run()
    prompt, ids = told.prompt(told.slot_key(head(version).id, SAMPLER.public, slot))
    answer = [*told.tokenizer.encode(told.contract.answer(prompt)), *told.manifest.model.end_tokens[:1]]
    row = np.array(answer, dtype=np.int64)
    said = Completion(row, np.full(len(row), -0.5), "end", 1.0, (Stretch(0, len(row), 0),))
    return TrajectoryGroup.of(
        prompt=ids,
        completions=[said, said],
        engine=ENGINE,
        heads=(head(version).id,),
        slot=slot,
        vocabulary=told.manifest.model.vocab_size,
    )


@contextmanager
def store(heads: int = 2) -> Generator[WeightsStore]:
    with WeightsStore.temporary(run().rules, layout_of(read_model(embedded.folder()))) as opened:
        for version in range(heads):
            opened.keep_head(head(version))
        yield opened


def signed(kind: str, body: bytes, by: Identity) -> bytes:
    """A sealed message with this body, whatever it is."""
    told = run().id
    body = body[: limits.GROUP_BYTES]
    return canonical.pack([limits.MAJOR, kind, told, by.public, body, sign_body(kind, body, by, told)])


@functools.cache
def _host(me: Identity) -> HardHost:
    """It listens nowhere, and streams are handed to it by name."""
    return build_host(me)


Answer = Callable[[bytes, str, bytes], bytes]
"""From a peer, a stream and a question to what it answers."""


class Desk:
    """A network of one node.

    What it serves can be requested over streams in memory; its own requests are answered by a
    function.
    """

    def __init__(
        self,
        me: Identity,
        *,
        gossip: dict[str, bytes] | None = None,
        answer: Answer | None = None,
        sender: bytes = STRANGER.public,
    ) -> None:
        self.public = me.public
        self.bulk: Any = None
        self._host = _host(me)
        self._asking = RequestResponse(self._host, Counter())
        self._gossip = gossip or {}
        self._answer = answer
        self._sender = sender
        self.faults: Counter[str] = Counter()
        self.heard = 0

    # What a fuzzer does

    async def ask(self, stream: str, question: bytes, peer: bytes = STRANGER.public) -> bool:
        """A question over a stream; whether it was answered, and not refused."""
        wire = Wire(b"\0", peer=peer, first=framed(question))
        await self._host.multiselect.handlers[TProtocol(stream)](wire)
        return wire.written[:1] == b"\0"

    # The network, as roles see it

    def serve(self, stream: str, handler: Handler, *, most: int) -> AbstractContextManager[None]:
        return self._asking.serve(stream, handler, most=most)

    @asynccontextmanager
    async def subscribe(
        self, topic: str, validator: Validator, *, capacity: int = CAPACITY
    ) -> AsyncGenerator[Subscription[Message]]:
        """Everything that is ever gossiped on the topic, and then the end."""
        inbox: Subscription[Message] = Subscription(capacity)
        if topic in self._gossip:
            message = Message(topic, self._gossip[topic], self._sender)
            if run_validator(validator, message, Counter()) is ACCEPT:
                self.heard += 1
                inbox.put(message)
        inbox._in.close()
        await trio.lowlevel.checkpoint()
        yield inbox
        inbox.close()

    async def request(self, peer: bytes, stream: str, data: bytes, *, deadline: float, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._answer is None:
            raise RequestError("unreachable", "nobody is there")
        said = self._answer(peer, stream, data)
        if len(said) > most:
            raise RequestError("too-large", f"an answer of {len(said)} bytes, at most {most} wanted")
        return said

    async def publish(self, topic: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def provide(self, key: bytes, *, deadline: float = 1.0) -> None:
        await trio.lowlevel.checkpoint()

    async def find(self, key: bytes, count: int, *, deadline: float = 1.0) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [STRANGER.public]

    def peers(self) -> frozenset[bytes]:
        return frozenset({STRANGER.public})

    def address(self, peer: bytes) -> str | None:
        return "192.0.2.1"

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[Subscription[PeerEvent]]:
        inbox: Subscription[PeerEvent] = Subscription(CAPACITY)
        await trio.lowlevel.checkpoint()
        yield inbox
        inbox.close()

    def score(self, peer: bytes, reason: str) -> None:
        self.faults[reason] += 1

    def scores(self) -> dict[bytes, dict[str, int]]:
        return {}

    def mutes(self) -> dict[bytes, Any]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}
