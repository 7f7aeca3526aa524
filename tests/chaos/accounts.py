"""Invariants of groups: none lost, none stale, all signed, all sampled under a head that was held.

Each function goes from the evidence to what is wrong, and says what it reads and what it cannot
see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from echo_node.rollouts.announced_slots import is_announcement
from protocol import Envelope, Join, ProtocolError, Roster, TrajectoryGroup, decode, open_sealed
from protocol.digest import context
from protocol.identity import verify
from protocol.receipt import REASONS
from tests.chaos.branches import Branches, Trained, rosters
from tests.chaos.evidence import Evidence, KnownGroup, NodeEvidence, Posted
from tests.chaos.holdings import KnownHead
from tests.chaos.report import Counts, Finding, short

NAMED: Final = frozenset((*REASONS, "unverified", "contract-failed"))
"""Why a group may be dropped once it was acknowledged."""

# a. Nothing that was acknowledged is lost


def acknowledged(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Every acknowledged group was trained on once, dropped for a named reason, or still waits.

    Acknowledged is what stands in a trainer's journal (it is there before a receipt goes out; one
    that stands by has there what the leader's receipts named) and what a sampler's outbox has as
    acknowledged, now or before it let go of it. What was trained on is what heads commit to. At a
    change of leaders a group may be missing that the old one held: one that it had waiting, drawn
    at most S steps before the head from which the new one went on, or used for a version after that
    head; these are counted. It cannot see the moment of a receipt, nor what outboxes and journals
    forget beyond 65,536 names; a receipt that was lost on its way is no acknowledgement.
    """
    trained = Counter(each.group.id for groups in branches.trained.values() for each in groups)
    yield from _unnamed(evidence, branches, counts)
    for id_, times in trained.items():
        if times > 1:
            where = [v for v, groups in branches.trained.items() for each in groups if each.group.id == id_]
            yield Finding(
                "acknowledged", None, f"group {short(id_)} was trained on {times} times, for {where}"
            )
    known: dict[bytes, list[tuple[NodeEvidence, KnownGroup]]] = {}
    for node in evidence.of("trainer"):
        for id_, group in (node.trainer.groups if node.trainer else {}).items():
            known.setdefault(id_, []).append((node, group))
    said = dict(_said_acknowledged(evidence))
    refused = {
        each.id: each.reason for node in evidence.nodes for each in node.outbox if each.state == "refused"
    }
    counts["groups acknowledged"] = len(known.keys() | said.keys())
    counts["groups acknowledged to samplers"] = len(said)
    counts["groups trained"] = len(trained)
    for id_ in sorted(known.keys() | said.keys()):
        if id_ in trained:
            continue
        if not (facts := known.get(id_, [])):
            sampler, posted = said[id_]
            if any(_lost_its_journal(evidence, key) for key in _acknowledgers(posted, evidence, branches)):
                counts["groups missing with a damaged journal"] += 1
            else:
                text = f"group {short(id_)} was acknowledged, and no trainer knows it"
                yield Finding("acknowledged", sampler, text)
            continue
        yield from _outcome(id_, facts, refused.get(id_, ""), branches, evidence, counts)


def _outcome(
    id_: bytes,
    facts: list[tuple[NodeEvidence, KnownGroup]],
    refused: str,
    branches: Branches,
    evidence: Evidence,
    counts: Counts,
) -> Iterator[Finding]:
    """Tell what became of a group that no version of the surviving branch was trained on.

    The newest leader that knows the group must account for it.
    """
    node, group = max(facts, key=lambda fact: _last_term(fact[0].key, branches))
    if group.state == "dropped":
        counts[f"groups dropped: {group.why}"] += 1
        if group.why not in NAMED:
            text = f"group {short(id_)} was dropped for {group.why!r}, no named reason"
            yield Finding("acknowledged", node.name, text)
    elif node.key == branches.last_leader and _still_waits(node, group, branches):
        counts["groups waiting at the end"] += 1
    elif _lost_at_failover(node, group, branches, evidence.staleness):
        counts["groups missing at a failover"] += 1
    elif refused in NAMED:
        counts[f"groups refused by a later leader: {refused}"] += 1
    else:
        batch = f" in batch {group.batch}" if group.batch else ""
        yield Finding(
            "acknowledged",
            node.name,
            f"group {short(id_)} of step {group.step} was acknowledged and is lost: {group.state}{batch} there, and in no version",
        )


def _last_term(key: bytes, branches: Branches) -> int:
    return max((term for term, leader in branches.leaders.items() if leader == key), default=0)


def _still_waits(node: NodeEvidence, group: KnownGroup, branches: Branches) -> bool:
    """In the buffer, or in a batch that was drawn on the newest head and not yet published.

    It may have been drawn while that head was being published.
    """
    if group.state == "waiting":
        return True
    if not node.trainer or not branches.chain:
        return False
    tip = branches.chain[-1]
    return any(
        each.number == group.batch
        and each.version > tip.message.version
        and each.tip in {tip.id, tip.message.previous}
        for each in node.trainer.batches
    )


def _lost_at_failover(node: NodeEvidence, group: KnownGroup, branches: Branches, staleness: int) -> bool:
    """Whether a new leader may lack it: the old one held it when its term was ended."""
    led = [term for term, leader in branches.leaders.items() if leader == node.key]
    version = (
        next((each.version for each in node.trainer.batches if each.number == group.batch), None)
        if node.trainer
        else None
    )
    for grant, base in branches.bases():
        if not any(term < grant.vote.term for term in led):
            continue
        if version is not None and version > base.message.version:
            return True
        if version is None and group.step >= base.message.step - staleness:
            return True
    return False


def _unnamed(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Versions whose head commits to groups that no journal and no records name."""
    counts["versions"] = len(branches.chain)
    for head in branches.chain[1:]:
        if head.message.version in branches.trained:
            continue
        if _lost_its_journal(evidence, head.signer):
            counts["versions whose groups a damaged journal had"] += 1
        else:
            name = evidence.name_of(head.signer)
            yield Finding(
                "acknowledged", name, f"no journal has the groups to which the head of {head} commits"
            )


def _said_acknowledged(evidence: Evidence) -> Iterator[tuple[bytes, tuple[str, Posted]]]:
    for node in evidence.nodes:
        for each in node.outbox:
            announces = each.data and is_announcement(Envelope.parse(each.data))
            if node.honest and not announces and each.state in {"acknowledged", "delivered"}:
                yield each.id, (node.name, each)


def _acknowledgers(posted: Posted, evidence: Evidence, branches: Branches) -> Iterator[bytes]:
    """Tell who may have acknowledged a group.

    Not a trainer that never led, nor, while the group's bytes name its head, one that led before
    it.
    """
    head: KnownHead | None = None
    if posted.data:
        group = Envelope.parse(posted.data).claim(TrajectoryGroup, evidence.manifest.id)
        head = branches.heads.get(group.heads[0])
    for term, leader in branches.leaders.items():
        if head is None or term >= head.message.term:
            yield leader


def _lost_its_journal(evidence: Evidence, key: bytes) -> bool:
    return evidence.was_damaged(evidence.name_of(key), "journal.sqlite")


# b. Nothing stale


def fresh(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """No trained group is staler than S, or drawn under a head that is no ancestor of its version.

    Its age is counted from the signed head that it names, not from what the trainer wrote down of
    it; the step at which it was used is the journal's, and must not be before that of the version's
    parent. It reads what heads commit to, so it cannot see what was trained on for versions of
    branches that were left.
    """
    oldest = 0
    for each, parent in _all_trained(branches):
        where = f"group {short(each.group.id)} of {evidence.name_of(each.group.sampler)} in version {each.version}"
        place = branches.places.get(each.group.head)
        if place is None or branches.chain[place].message.version >= each.version:
            yield Finding("fresh", each.trainer, f"{where} was drawn under a head that is no ancestor of it")
            continue
        used_at = max(each.policy_step, parent.message.step)
        age = used_at - branches.chain[place].message.step
        oldest = max(oldest, age)
        if age > evidence.staleness:
            yield Finding(
                "fresh", each.trainer, f"{where} was {age} steps old, more than {evidence.staleness}"
            )
    counts["oldest group trained, in steps"] = oldest


def _all_trained(branches: Branches) -> Iterator[tuple[Trained, KnownHead]]:
    parents = {
        head.message.version: before for before, head in zip(branches.chain, branches.chain[1:], strict=False)
    }
    for version, groups in branches.trained.items():
        for each in groups:
            yield each, parents[version]


# c. Nothing that is nobody's, or condemned


def signed(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Every trained group is signed by a member of its head's roster and was not condemned before.

    A journal keeps a group's bytes until a checkpoint covers them, and from then on the signature,
    which is over the group's id; both are checked again here. Records, which stand in for a journal
    that is lost, have neither: counted. Rosters are read where somebody still holds the blob; where
    all have pruned it, the sampler's own signed join must be in a journal. What a verdict was
    before or after is told by the batch that was the newest when it was written down: it cannot see
    a verdict that the trainer never heard, nor check a verdict's signature, which nobody keeps.
    What hostile samplers brought about is counted.
    """
    honest = {node.key for node in evidence.nodes if node.honest}
    held = {blob: decode(Roster, data) for blob, data in rosters(branches).items()}
    joined = set(_joined(evidence))
    condemned = {
        (node.name, each.group): each
        for node in evidence.of("trainer")
        for each in (node.trainer.verdicts if node.trainer else ())
        if each.result == "dishonest"
    }
    counts["groups of hostile peers condemned"] = len(
        {each.group for each in condemned.values() if each.sampler not in honest}
    )
    for each, _ in _all_trained(branches):
        group = each.group
        counts["groups of hostile peers trained"] += group.sampler not in honest
        what = f"group {short(group.id)} of {evidence.name_of(group.sampler)} in version {each.version}"
        if wrong := _wrong_signature(group, evidence.manifest.id, counts):
            yield Finding("signed", each.trainer, f"{what}: {wrong}")
        head = branches.heads.get(group.head)
        roster = held.get(head.message.roster) if head else None
        if roster is not None and roster.find(group.sampler) is None:
            yield Finding("signed", each.trainer, f"{what}: its sampler is not in the roster of its head")
        elif roster is None:
            counts["groups whose roster nobody keeps"] += 1
            if group.sampler not in joined:
                yield Finding("signed", each.trainer, f"{what}: its sampler has not joined")
        verdict = condemned.get((each.trainer, group.id))
        if verdict is None or verdict.after is None or each.batch is None:
            continue
        if verdict.after < each.batch:
            yield Finding(
                "signed", each.trainer, f"{what}: it was condemned ({verdict.reason}) before its use"
            )
        else:
            counts["groups condemned after their use"] += 1


def _wrong_signature(group: KnownGroup, run: bytes, counts: Counts) -> str:
    try:
        if group.sealed is not None:
            opened = open_sealed(group.sealed, TrajectoryGroup, run, signer=group.sampler)
            counts["signatures checked"] += 1
            return "" if opened.id == group.id else "its bytes are those of another group"
        if group.signature is not None:
            signed_bytes = context(TrajectoryGroup.KIND).encode() + b"\0" + group.id
            verify(group.sampler, group.signature, signed_bytes)
            counts["signatures checked"] += 1
        else:
            counts["signatures not kept"] += 1
    except ProtocolError as error:
        return str(error)
    return ""


def _joined(evidence: Evidence) -> Iterator[bytes]:
    """Samplers whose signed join is in a trainer's journal."""
    for node in evidence.of("trainer"):
        for sealed in node.trainer.joins if node.trainer else ():
            try:
                yield open_sealed(sealed, Join, evidence.manifest.id).signer
            except ProtocolError:
                continue


# e. Nothing is made up


def under_known_heads(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """No honest node sampled under a head that its own store lacks, and no verifier found so.

    It reads who sampled every group in journals and outboxes, the heads in that sampler's own
    store, and the verifiers' ledgers. That the weights of that head were in the engine, `replaying`
    proves by drawing again, of groups whose bytes are kept; and verifiers have proved it of those
    that they found honest, which are counted. Of the rest nothing is kept that could prove it.
    """
    own = {node.key: node for node in evidence.of("sampler") if node.honest and node.holdings is not None}
    taken = {key: {head.id for head in node.holdings.heads} for key, node in own.items() if node.holdings}
    made = {
        (group.sampler, group.head)
        for node in evidence.of("trainer")
        for group in (node.trainer.groups if node.trainer else {}).values()
    }
    for sampler, head in sorted(made):
        if sampler in taken and head not in taken[sampler]:
            yield Finding(
                "held",
                own[sampler].name,
                f"it made groups under {branches.heads.get(head) or head.hex()[:12]}, which it never took",
            )
    for node in evidence.of("verifier"):
        counts["groups found honest by verifiers"] += sum(each.result == "honest" for each in node.verdicts)
