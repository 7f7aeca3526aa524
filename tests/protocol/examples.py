"""One honest example of each wire type, the same on every machine: what vectors, fuzzing and
benchmarks start from.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from protocol import (
    ChunkTable,
    Completion,
    CreditRefusal,
    CreditStatement,
    Delivery,
    Figures,
    Frame,
    GrantsAnswer,
    GrantsQuestion,
    GroupReference,
    GroupsQuestion,
    HeadsAnswer,
    HeadsQuestion,
    Heartbeat,
    Identity,
    Inventory,
    InventoryAck,
    Join,
    Layout,
    Link,
    Manifest,
    Member,
    Opened,
    PeerPlace,
    PeersAnswer,
    PeersQuestion,
    Receipt,
    Refusal,
    RolloutRequest,
    Roster,
    Route,
    ShownGrant,
    SlotAnnouncement,
    TermGrant,
    TermVote,
    TrajectoryGroup,
    Verdict,
    VoteAnswer,
    VoteQuestion,
    WeightsHead,
    blob_id,
    encode,
    merkle_root,
    open_manifest,
    open_sealed,
    seal,
)
from protocol.blob import BlobHoldings, BlobRead, BlobWants, BulkAsk, BulkOffer, Slice
from protocol.digest import ZERO
from protocol.election import cast
from protocol.manifest import (
    Adapter,
    Algorithm,
    ContractPin,
    ContractVector,
    DataSet,
    EngineTolerance,
    Joins,
    Model,
    ModelFile,
    Sampling,
    Sync,
    Template,
    Terms,
    Turns,
    Verification,
    Wheel,
)
from protocol.trajectory import Stretch
from protocol.verdict import sign_draw
from protocol.weights import TensorEntry


def name(text: str) -> bytes:
    """32 bytes that stand for something that these examples do not hold."""
    return hashlib.sha256(text.encode()).digest()


def identity(text: str) -> Identity:
    return Identity(name(f"identity of {text}"))


TRAINER, STANDBY, VERIFIER, SAMPLER, STRANGER = map(
    identity, ("trainer", "standby", "verifier", "sampler", "stranger")
)
VOCABULARY = 151_936

LAYOUT = Layout(
    tensors=(
        TensorEntry("model.embed_tokens.weight", "bf16", (151_936, 64)),
        TensorEntry("model.layers.0.self_attn.q_proj.bias", "f32", (64,)),
        TensorEntry("model.norm.weight", "bf16", (64,)),
    )
)

MANIFEST = Manifest(
    algorithm=Algorithm(name="grpo", params={"batch_groups": 32, "learning_rate": 1e-6}, version="1"),
    contract=ContractPin(
        name="digits-reverse",
        params={"digits": 5},
        pure=True,
        vectors=(
            ContractVector(key=name("slot"), prompt=name("r48213="), replies=None, score=1.0, text="31284$"),
        ),
        version="1.0.0",
        wheel=None,
    ),
    data=(DataSet(blob=name("gsm.jsonl"), held_out=97, rows=1_000, size=412_345),),
    engines=(
        EngineTolerance(
            d_mean=7e-5,
            d_most=0.0017,
            engine="llamacpp/f16",
            gap_most=0.1,
            share=1.0,
            z_mean=6e-4,
            z_most=0.01,
        ),
        EngineTolerance(
            d_mean=1e-5,
            d_most=0.001,
            engine="torch/f32",
            gap_most=0.002,
            share=1.0,
            z_mean=1e-4,
            z_most=0.01,
        ),
    ),
    joins=Joins(per_address=256, total=6_000),
    model=Model(
        adapter=None,
        architecture="Qwen3ForCausalLM",
        context=4096,
        end_tokens=(151_643, 151_645),
        files=(
            ModelFile(blob=name("config.json"), name="config.json", size=512),
            ModelFile(blob=name("tokenizer.json"), name="tokenizer.json", size=7_031_645),
        ),
        layout=blob_id(encode(LAYOUT)),
        root=merkle_root([name("chunk 0"), name("chunk 1"), name("chunk 2")]),
        vocab_size=VOCABULARY,
    ),
    name="An example run",
    nonce=name("nonce"),
    sampling=Sampling(group_size=8, max_prompt=512, max_tokens=256, temperature=1.0),
    seeds=("/dns4/seed.example/tcp/4001/p2p/" + STRANGER.peer_id,),
    sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
    template=Template(chat=True, system="Think first.", thinking=True, variables={"enable_thinking": True}),
    terms=Terms(
        electors=tuple(sorted((TRAINER.public, STANDBY.public, VERIFIER.public))),
        heartbeat_ms=15_000,
        lease_ms=60_000,
    ),
    trainers=(TRAINER.public, STANDBY.public),
    turns=None,
    verification=Verification(policy="sampled", quorum=1, share=0.1),
    verifiers=(VERIFIER.public,),
    ext={"homepage": "none"},
)
MANIFEST_WITH_CODE = dataclasses.replace(
    MANIFEST,
    contract=dataclasses.replace(
        MANIFEST.contract,
        wheel=(
            Wheel(
                blob=name("echo_contract_digits-2.0.whl"),
                name="echo-contract-digits",
                size=4_321,
                version="2.0",
            ),
            Wheel(blob=name("numerals-1.4.whl"), name="numerals", size=98_765, version="1.4.post1"),
        ),
    ),
    turns=Turns(end=151_645, environment=128, most=4, role="user", samplers=(SAMPLER.public,), tokens=64),
)
"""A run whose contract is no built-in one, and answers the model."""
MANIFEST_WITH_ADAPTER = dataclasses.replace(
    MANIFEST,
    model=dataclasses.replace(
        MANIFEST.model,
        adapter=Adapter(
            alpha=32.0,
            layout=name("the base's layout"),
            norm=16.0,
            rank=16,
            root=name("the base's root"),
            table=name("the base's table"),
            targets=("down_proj", "q_proj", "v_proj"),
        ),
    ),
)
"""A run that trains an adapter on a frozen base."""

SEALED_MANIFEST = seal(MANIFEST, TRAINER, ZERO)
OPENED_MANIFEST: Opened[Manifest] = open_manifest(SEALED_MANIFEST)
RUN = OPENED_MANIFEST.id

JOIN = Join(agent="echo-node/0.1.0", engine="torch/f32", head=name("a head"), name="a laptop")
SEALED_JOIN = seal(JOIN, SAMPLER, RUN)
ROSTER = Roster(
    members=tuple(
        sorted(
            (
                Member(SAMPLER.public, "torch/f32", open_sealed(SEALED_JOIN, Join, RUN).id),
                Member(STRANGER.public, "llamacpp/f16", name("another join")),
            ),
            key=lambda member: member.key,
        )
    )
)
TABLE = ChunkTable.of(
    "gap8-ulp8-zstd1",
    [
        Frame(name("frame 0"), 27_183, name("chunk 0")),
        Frame(ZERO, 0, name("chunk 1")),
        Frame(name("frame 2"), 9, ZERO),
    ],
)
HEAD_ZERO = WeightsHead(
    groups=merkle_root([]),
    layout=MANIFEST.model.layout,
    luck=name("luck 0"),
    previous=ZERO,
    root=MANIFEST.model.root,
    roster=blob_id(encode(ROSTER)),
    routes=(Route(base=None, codec="safetensors", size=19_447_936, table=name("anchor table")),),
    step=0,
    term=1,
    version=0,
)
SEALED_HEAD_ZERO = seal(HEAD_ZERO, TRAINER, RUN)
HEAD_ZERO_ID = open_sealed(SEALED_HEAD_ZERO, WeightsHead, RUN).id
HEAD = WeightsHead(
    groups=merkle_root([name("group 0"), name("group 1")]),
    layout=MANIFEST.model.layout,
    luck=name("luck 1"),
    previous=HEAD_ZERO_ID,
    root=merkle_root([name("chunk 0 after"), name("chunk 1"), name("chunk 2 after")]),
    roster=blob_id(encode(ROSTER)),
    routes=(Route(base=HEAD_ZERO_ID, codec="gap8-ulp8-zstd1", size=27_192, table=blob_id(encode(TABLE))),),
    step=1,
    term=1,
    version=1,
    ext={"note": "first"},
)


def completion(
    seed: int, tokens: int, stretches: tuple[Stretch, ...] = (), ends: tuple[str, ...] | None = None
) -> Completion:
    """A completion of made-up tokens."""
    random = np.random.default_rng(seed)
    stretches = stretches or (Stretch(0, tokens, 0),)
    logprobs = -random.exponential(2.0, tokens)
    for stretch in stretches:
        if stretch.head is None:
            logprobs[stretch.start : stretch.end] = 0.0
    return Completion(
        ids=random.integers(0, VOCABULARY, tokens),
        logprobs=logprobs,
        finish="length" if seed % 2 else "end",
        reward=round(float(random.random()), 3),
        stretches=stretches,
        ends=ends,
    )


def group(completions: int = 8, tokens: int = 256, slot: int = 0) -> TrajectoryGroup:
    """A group of the shape that runs have: completions of one length under one head."""
    return TrajectoryGroup.of(
        prompt=np.random.default_rng(7).integers(0, VOCABULARY, 40),
        completions=[completion(index, tokens) for index in range(completions)],
        engine="torch/f32",
        heads=(HEAD_ZERO_ID,),
        slot=slot,
        vocabulary=VOCABULARY,
    )


SMALL_GROUP = dataclasses.replace(
    TrajectoryGroup.of(
        prompt=[1, 2, 3, 151_935],
        completions=[
            completion(1, 5, ends=("length",)),
            completion(2, 9, (Stretch(0, 3, 0), Stretch(3, 5, None), Stretch(5, 9, 1)), ends=("turn", "end")),
        ],
        engine="torch/f32",
        heads=(HEAD_ZERO_ID, name("a later head")),
        slot=3,
        vocabulary=VOCABULARY,
    ),
    ext={"note": "an environment, and a switch to a later head"},
)
SEALED_GROUP = seal(SMALL_GROUP, SAMPLER, RUN)
GROUP_ID = open_sealed(SEALED_GROUP, TrajectoryGroup, RUN).id

REFERENCE = GroupReference(
    blob=blob_id(SEALED_GROUP), group=GROUP_ID, head=HEAD_ZERO_ID, size=len(SEALED_GROUP), slot=3
)
HEARTBEAT = Heartbeat(head=HEAD_ZERO_ID, term=1, time_ms=1_790_000_000_000, version=0)
RECEIPT = Receipt(
    accepted=GROUP_ID + name("group 1"),
    announced=name("announcement"),
    head=HEAD_ZERO_ID,
    rate=0.5,
    refused=(Refusal("duplicate", name("group 2")), Refusal("stale", name("group 3") + name("group 4"))),
    term=1,
    version=0,
)
VERDICT = Verdict(
    draw=sign_draw(VERIFIER, RUN, GROUP_ID),
    figures=Figures(
        contrast=-0.0001,
        d_mean=2e-5,
        d_most=0.0004,
        logprob_gap=0.002,
        reward=1.0,
        tokens=12,
        z_mean=1e-4,
        z_most=0.003,
    ),
    group=GROUP_ID,
    note="every draw lies where it should",
    reason="seed-replay",
    result="honest",
)
INVENTORY = Inventory(groups=GROUP_ID + name("group 1"), head=HEAD_ZERO_ID, number=1, term=1)
INVENTORY_ACK = InventoryAck(
    drawn=GROUP_ID,
    inventory=open_sealed(seal(INVENTORY, TRAINER, RUN), Inventory, RUN).id,
    lacking=name("group 1"),
)
CREDIT_STATEMENT = CreditStatement(
    at_ms=1_790_000_000_000,
    condemned=1,
    learnt=40,
    refused=(CreditRefusal("forked-head", 2), CreditRefusal("stale", 7)),
    sampler=SAMPLER.public,
    since_ms=1_780_000_000_000,
    tokens=12_345,
    verified=50,
)
VOTE = TermVote(base=HEAD_ZERO_ID, leader=STANDBY.public, term=2)
GRANT = TermGrant(
    ballots=tuple(
        sorted((cast(VOTE, who, RUN) for who in (STANDBY, VERIFIER)), key=lambda ballot: ballot.elector)
    ),
    vote=VOTE,
)
LINK = Link(
    addresses=("/ip4/127.0.0.1/tcp/4001/p2p/" + TRAINER.peer_id,),
    head=HEAD_ZERO_ID,
    run=RUN,
    term=1,
    version=0,
)

ROLLOUT_REQUEST = RolloutRequest(count=16, first=32, head=HEAD_ZERO_ID, taken=(0, 3, 15))
SLOT_ANNOUNCEMENT = SlotAnnouncement(count=16, first=32, head=HEAD_ZERO_ID)
GROUPS_QUESTION = GroupsQuestion(groups=GROUP_ID + name("group 1"), run=RUN)
DELIVERY = Delivery(cargo="joins", data=SEALED_JOIN, run=RUN)
HEADS_QUESTION = HeadsQuestion(held=(HEAD_ZERO_ID,))
HEADS_ANSWER = HeadsAnswer(heads=(SEALED_HEAD_ZERO,))
VOTE_QUESTION = VoteQuestion(branch=(SEALED_HEAD_ZERO,), vote=VOTE)
VOTE_ANSWER = VoteAnswer(refusal=None, signature=GRANT.ballots[0].signature)
VOTE_REFUSAL = VoteAnswer(refusal="lease", signature=None)
GRANTS_QUESTION = GrantsQuestion(held=(HEAD_ZERO_ID,), term=1)
GRANTS_ANSWER = GrantsAnswer(grants=(ShownGrant(GRANT, (SEALED_HEAD_ZERO,)),))

WANTS = BlobWants.of([name("frame 0"), name("frame 2"), name("a stranger's blob")])
HOLDINGS = BlobHoldings(sizes=(27_183, 0, None))
SLICES = (Slice(name("frame 0"), 1_024, 26_159), Slice(name("frame 2"), 0, 9))
READ = BlobRead(slices=SLICES)
BULK_ASK = BulkAsk(slices=(Slice(name("anchor"), 0, 1 << 30),))
BULK_OFFER = BulkOffer(pin=name("a certificate"), port=49_152, seconds=30, token=name("a token"))

PEERS_QUESTION = PeersQuestion(wanted=8)
PEERS_ANSWER = PeersAnswer(
    peers=tuple(
        sorted(
            (
                PeerPlace(TRAINER.public, ("/ip4/198.51.100.7/tcp/4001", "/ip6/2001:db8::7/tcp/4001")),
                PeerPlace(
                    STRANGER.public,
                    ("/ip4/203.0.113.9/tcp/4001/p2p/" + VERIFIER.peer_id + "/p2p-circuit",),
                ),
            ),
            key=lambda place: place.key,
        )
    )
)

SEALED_TYPES = {
    "manifest": (MANIFEST, TRAINER, ZERO),
    "group": (SMALL_GROUP, SAMPLER, RUN),
    "group-reference": (REFERENCE, SAMPLER, RUN),
    "join": (JOIN, SAMPLER, RUN),
    "heartbeat": (HEARTBEAT, TRAINER, RUN),
    "receipt": (RECEIPT, TRAINER, RUN),
    "verdict": (VERDICT, VERIFIER, RUN),
    "inventory": (INVENTORY, TRAINER, RUN),
    "inventory-ack": (INVENTORY_ACK, VERIFIER, RUN),
    "credit-statement": (CREDIT_STATEMENT, VERIFIER, RUN),
    "head": (HEAD, TRAINER, RUN),
    "vote": (VOTE, STANDBY, RUN),
    "rollout-request": (ROLLOUT_REQUEST, TRAINER, RUN),
    "slot-announcement": (SLOT_ANNOUNCEMENT, SAMPLER, RUN),
}
"""Messages that travel sealed: an example, who says it, and in which run."""

BARE_TYPES = {
    "roster": ROSTER,
    "chunk-table": TABLE,
    "layout": LAYOUT,
    "grant": GRANT,
    "link": LINK,
    "delivery": DELIVERY,
    "blob-wants": WANTS,
    "blob-holdings": HOLDINGS,
    "blob-read": READ,
    "bulk-ask": BULK_ASK,
    "bulk-offer": BULK_OFFER,
    "peers-question": PEERS_QUESTION,
    "peers-answer": PEERS_ANSWER,
    "groups-question": GROUPS_QUESTION,
    "heads-question": HEADS_QUESTION,
    "heads-answer": HEADS_ANSWER,
    "vote-question": VOTE_QUESTION,
    "vote-answer": VOTE_REFUSAL,
    "grants-question": GRANTS_QUESTION,
    "grants-answer": GRANTS_ANSWER,
}
"""Objects that travel bare: named by their hash, or proving themselves."""

MESSAGES = {kind: message for kind, (message, _, _) in SEALED_TYPES.items()} | BARE_TYPES
