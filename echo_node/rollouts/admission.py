"""Admission of rollout groups: checks that need the run, from cheap to expensive.

A group that fails is data, not an error: it is refused with one of the reasons that receipts carry.
No reward is computed here and no model runs. The prompts of many groups are made together in a
thread, since a contract may be slow and the caller has other messages to handle meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
import trio
from numpy.typing import NDArray

from echo_node.contract import Prompt
from echo_node.errors import ContractError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from protocol import (
    Envelope,
    Opened,
    ProtocolError,
    Roster,
    SlotAnnouncement,
    TrajectoryGroup,
    WeightsHead,
)
from protocol.envelope import verify_id
from protocol.errors import BadSignatureError, InconsistentError
from protocol.tokens import bits_for, unpack_ids
from protocol.turns import DrawnReplyError, TurnRules

REMEMBERED: Final = 16_384


class SignatureCache:
    """Cache of the newest valid signatures."""

    def __init__(self) -> None:
        self._good: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def check(self, envelope: Envelope) -> bytes:
        """Return the id of a message with a valid signature; else raise `ProtocolError`."""
        message_id = envelope.id
        seal = (message_id, envelope.signature)
        if seal not in self._good:
            verify_id(envelope.kind, message_id, envelope.signer, envelope.signature)
            self._good[seal] = None
            if len(self._good) > REMEMBERED:
                self._good.popitem(last=False)
        return message_id


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A refused group: the reason for its sampler, and a sentence for the log."""

    id: bytes
    reason: str
    what: str
    signed: bool = False
    """Whether its sampler has signed it; only then is the sampler sent a receipt."""


class _RefusalError(Exception):
    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


def _slot_of(group: RolloutRecord) -> tuple[bytes, bytes, int]:
    return group.head, group.sampler, group.slot


_SlotPrompt: TypeAlias = tuple[Prompt, NDArray[np.int64]] | ContractError
"""The prompt of a slot with its token ids, or the error of the contract."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A head that may be sampled under."""

    step: int
    members: dict[bytes, str]


MOST_HEADS: Final = 64
"""Most heads that may be sampled under at once; older ones are forgotten."""
SLOT_WINDOW: Final = 64
"""Slots by which a group may be ahead of the number admitted.

Samplers fill slots one after the other, and some get lost.
"""


class GroupFilter(Protocol):
    """The interface that admits groups: `Admission`, alone or with a verdict policy."""

    def accepts_from(self, sampler: bytes, /) -> bool:
        """Return whether groups of a sampler are accepted at all."""

    def judge(self, envelope: Envelope) -> RolloutRecord | Refused:
        """Admit a group once, or return why it is refused."""

    async def judge_all(self, envelopes: Sequence[Envelope]) -> list[RolloutRecord | Refused]:
        """Admit several groups, in their order."""

    def release(self, record: RolloutRecord, /) -> None:
        """Free the slot of a group that could not be kept."""

    def announce(self, envelope: Envelope, /) -> Refused | None:
        """Take in an announcement of slots, or return why it is refused."""

    def requested(self, head: bytes, sampler: bytes, until: int, /) -> None:
        """Take note that a sampler was to fill its slots below `until`."""


class Admission:
    """Checks of groups against the heads of the last S steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limits = run.limits
        self._turns = TurnRules.of(run.manifest)
        self.signatures = SignatureCache()
        self._bits = bits_for(run.manifest.model.vocab_size)
        self._is_end = np.zeros(run.limits.vocab_size, bool)
        self._is_end[[each for each in run.limits.end_tokens if each < run.limits.vocab_size]] = True
        self._known: dict[bytes, _Known] = {}
        self._members: frozenset[bytes] = frozenset()
        """Samplers of all rosters together."""
        self._filled: set[tuple[bytes, bytes, int]] = set()
        self._released: set[tuple[bytes, bytes, int]] = set()
        """Slots that were filled and are free again; each counts as admitted once."""
        self._admitted: Counter[tuple[bytes, bytes]] = Counter()
        """Number of admitted slots, by head and sampler."""
        self._now = 0

    def published(self, head: Opened[WeightsHead], roster: Roster) -> None:
        """Admit groups sampled under this head by this roster.

        Heads beyond the bound are forgotten.
        """
        self._now = head.message.step
        members = {member.key: member.engine for member in roster.members}
        self._known[head.id] = _Known(head.message.step, members)
        old = [key for key, known in self._known.items() if self.staleness(known.step) > self._bound]
        for key in (*old, *list(self._known)[len(old) : -MOST_HEADS]):
            self._known.pop(key, None)
        self._members = frozenset(sampler for known in self._known.values() for sampler in known.members)
        self._filled = {slot for slot in self._filled if slot[0] in self._known}
        self._released = {slot for slot in self._released if slot[0] in self._known}
        self._admitted = Counter(
            {key: count for key, count in self._admitted.items() if key[0] in self._known}
        )

    @property
    def _bound(self) -> int:
        return self._run.manifest.sync.staleness

    def staleness(self, step: int) -> int:
        """Return the number of steps that the policy is ahead of this one."""
        return self._now - step

    def judge(self, envelope: Envelope) -> RolloutRecord | Refused:
        """Admit a group once, or return why it is refused."""
        checked = self._first_checks(envelope, Counter())
        return (
            checked
            if isinstance(checked, Refused)
            else self._admit(checked, self._make_prompts([checked])[0])
        )

    async def judge_all(
        self, envelopes: Sequence[Envelope], *, taken: bool = False
    ) -> list[RolloutRecord | Refused]:
        """Admit several groups, in their order.

        Heads may come and slots be filled while their prompts are made. `taken` says that a leader
        took these groups, so it has judged their slots: that another group for the slot was seen
        here, or few before it, does not keep a group from being checked.
        """
        batch_counts: Counter[tuple[bytes, bytes]] = Counter()
        checked = [self._first_checks(envelope, batch_counts, taken=taken) for envelope in envelopes]
        candidates = [each for each in checked if isinstance(each, RolloutRecord)]
        prompts = iter(await trio.to_thread.run_sync(self._make_prompts, candidates) if candidates else [])
        return [
            each if isinstance(each, Refused) else self._admit(each, next(prompts), taken=taken)
            for each in checked
        ]

    def release(self, admitted: RolloutRecord) -> None:
        """Free the slot of a group that could not be kept."""
        slot = _slot_of(admitted)
        if slot in self._filled:
            self._filled.remove(slot)
            self._released.add(slot)

    def remember(self, head: bytes, sampler: bytes, slot: int) -> None:
        """Mark a slot that was filled before this process began."""
        if head in self._known and (head, sampler, slot) not in self._filled:
            self._fill((head, sampler, slot))

    def accepts_from(self, sampler: bytes) -> bool:
        """Return whether a sampler is in the roster of a head that is still fresh."""
        return sampler in self._members

    def is_signed(self, envelope: Envelope) -> bool:
        """Return whether a member's signature is valid.

        Signatures of strangers are not checked: that would cost too much.
        """
        if not self.accepts_from(envelope.signer) or envelope.run != self._run.id:
            return False
        try:
            self.signatures.check(envelope)
        except ProtocolError:
            return False
        return True

    @property
    def heads(self) -> Collection[bytes]:
        """Return the ids of the heads that may be sampled under, oldest first."""
        return self._known.keys()

    def may_sample(self, head: bytes, sampler: bytes) -> bool:
        """Return whether a sampler is in the roster of a fresh head."""
        known = self._known.get(head)
        return known is not None and sampler in known.members

    def read_announcement(self, envelope: Envelope) -> SlotAnnouncement | Refused:
        """Return a member's slot announcement under a fresh head, or its refusal."""
        try:
            message = envelope.claim(SlotAnnouncement, self._run.id)
            self._check_announcer(message.head, envelope.signer)
            self.signatures.check(envelope)
        except _RefusalError as refusal:
            return Refused(envelope.id, refusal.reason, str(refusal), self.is_signed(envelope))
        except BadSignatureError as error:
            return Refused(envelope.id, "wrong-signature", str(error))
        except ProtocolError as error:
            return Refused(envelope.id, "malformed", str(error), self.is_signed(envelope))
        return message

    def _check_announcer(self, head: bytes, sampler: bytes) -> None:
        known = self._known.get(head)
        if known is None:
            raise _RefusalError("stale", "slots of a head that is not among the newest")
        if sampler not in known.members:
            raise _RefusalError("not-in-roster", "the sampler was not in the head's roster")

    def announce(self, envelope: Envelope) -> Refused | None:
        """Check an announcement of slots; who keeps account of them records it."""
        read = self.read_announcement(envelope)
        return read if isinstance(read, Refused) else None

    def requested(self, head: bytes, sampler: bytes, until: int) -> None:
        """Take note of a request; who keeps account of slots records it."""

    def _first_checks(
        self, envelope: Envelope, batch_counts: Counter[tuple[bytes, bytes]], *, taken: bool = False
    ) -> RolloutRecord | Refused:
        """Run every check but that of the prompt.

        `batch_counts` counts, by head and sampler, the groups of the same call that have passed.
        """
        try:
            candidate = self._candidate(envelope, batch_counts, taken=taken)
        except _RefusalError as refusal:
            return Refused(envelope.id, refusal.reason, str(refusal), self.is_signed(envelope))
        except BadSignatureError as error:
            return Refused(envelope.id, "wrong-signature", str(error))
        except ProtocolError as error:
            return Refused(envelope.id, "malformed", str(error), self.is_signed(envelope))
        batch_counts[candidate.head, candidate.sampler] += 1
        return candidate

    def _candidate(
        self, envelope: Envelope, batch_counts: Counter[tuple[bytes, bytes]], *, taken: bool
    ) -> RolloutRecord:
        if not self.accepts_from(envelope.signer):
            raise _RefusalError("not-in-roster", "the sampler is in no roster of the newest heads")
        group = envelope.claim(TrajectoryGroup, self._run.id)
        self._check_named(envelope.signer)
        self._check_limits(group)
        slot = (group.heads[0], envelope.signer, group.slot)
        if slot in self._filled and not taken:
            raise _RefusalError("duplicate", f"slot {group.slot} of this sampler and head is filled")
        known = self._known.get(group.heads[0])
        if known is None or not self._known.keys() >= set(group.heads):
            raise _RefusalError("stale", "drawn under a head that is not among the newest")
        self._check_member(known, envelope.signer, group.engine)
        if not taken:
            self._check_window(slot, batch_counts[slot[:2]])
        self.signatures.check(envelope)
        self._check_ends(group)
        return RolloutRecord.of(envelope, group, known.step)

    def _make_prompts(self, candidates: Sequence[RolloutRecord]) -> list[_SlotPrompt]:
        """Return the prompts of the candidates' slots.

        Changes no state: it may run in a thread.
        """
        keys = [self._run.slot_key(*_slot_of(each)) for each in candidates]
        try:
            return [*self._run.prompts(keys)]
        except ContractError as error:
            # Samplers choose slots: none may stop the trainer or affect another.
            return [error] if len(keys) == 1 else [self._make_prompts([each])[0] for each in candidates]

    def _admit(
        self, candidate: RolloutRecord, slot_prompt: _SlotPrompt, *, taken: bool = False
    ) -> RolloutRecord | Refused:
        """Fill the slot, unless the prompt differs or something changed meanwhile."""
        try:
            prompt = self._final_checks(candidate, slot_prompt, taken=taken)
        except _RefusalError as refusal:
            return Refused(candidate.id, refusal.reason, str(refusal), signed=True)
        if (slot := _slot_of(candidate)) not in self._filled:
            self._fill(slot)
        return dataclasses.replace(candidate, slot_prompt=prompt)

    def _fill(self, slot: tuple[bytes, bytes, int]) -> None:
        self._filled.add(slot)
        self._admitted[slot[:2]] += slot not in self._released
        self._released.discard(slot)

    def _final_checks(self, candidate: RolloutRecord, slot_prompt: _SlotPrompt, *, taken: bool) -> Prompt:
        slot = _slot_of(candidate)
        if slot in self._filled and not taken:
            raise _RefusalError("duplicate", f"slot {slot[2]} of this sampler and head is filled")
        if not self._known.keys() >= set(candidate.message.heads):
            raise _RefusalError("stale", "drawn under a head that is no longer among the newest")
        if not taken:
            self._check_window(slot, 0)
        if isinstance(slot_prompt, ContractError):
            raise _RefusalError("wrong-prompt", f"its slot has no prompt: {slot_prompt}")
        prompt, ids = slot_prompt
        if not np.array_equal(ids, candidate.message.prompt_ids()):
            raise _RefusalError("wrong-prompt", "not the prompt of its slot")
        return prompt

    def _check_window(self, slot: tuple[bytes, bytes, int], in_batch: int) -> None:
        if slot[2] >= self._admitted[slot[:2]] + in_batch + SLOT_WINDOW:
            raise _RefusalError("over-limit", f"slot {slot[2]}: slots are filled one after the other")

    def _check_limits(self, group: TrajectoryGroup) -> None:
        manifest = self._run.manifest
        if group.bits != self._bits:
            raise _RefusalError("over-limit", f"ids of {group.bits} bits")
        if len(group.lengths) != manifest.sampling.group_size:
            raise _RefusalError(
                "over-limit", f"{len(group.lengths)} completions, not {manifest.sampling.group_size}"
            )
        if (
            max(group.lengths) > manifest.sampling.max_tokens
            or group.prompt_length > manifest.sampling.max_prompt
        ):
            raise _RefusalError("over-limit", "more tokens than the run allows")
        if len(group.heads) > 1 and not manifest.sync.in_flight:
            raise _RefusalError("over-limit", "a switch of heads, which the run does not allow")
        if (group.rewards is not None) != self._run.has_claims:
            raise _RefusalError(
                "wrong-reward", f"claims {'none' if group.rewards is None else 'some'} rewards"
            )
        if (group.ends is None) != (manifest.turns is None):
            raise _RefusalError(
                "malformed",
                "no ends of turns"
                if group.ends is None
                else "turns with an environment, which this run has not",
            )

    def _check_named(self, sampler: bytes) -> None:
        turns = self._run.manifest.turns
        if turns is not None and turns.samplers and sampler not in turns.samplers:
            raise _RefusalError(
                "unnamed-sampler",
                "nobody can recompute the environment, and the run does not name this sampler",
            )

    def _check_member(self, known: _Known, sampler: bytes, engine: str) -> None:
        if sampler not in known.members:
            raise _RefusalError("not-in-roster", "the sampler was not in the head's roster")
        if known.members[sampler] != engine:
            raise _RefusalError("wrong-engine", f"drawn with {engine}, joined with {known.members[sampler]}")

    def _check_ends(self, group: TrajectoryGroup) -> None:
        limits = self._limits
        ids = unpack_ids(group.tokens, group.token_count, group.bits)
        if int(ids.max()) >= limits.vocab_size:
            raise _RefusalError("over-limit", "an id outside the vocabulary")
        if self._turns is not None:
            self._check_turns(group, self._turns)
            return
        lengths = np.array(group.lengths)
        ends = self._is_end[ids]
        at_end = ends[np.cumsum(lengths) - 1]
        claimed = np.array([finish == "end" for finish in group.finish])
        if int(ends.sum()) != int(at_end.sum()) or not np.array_equal(at_end, claimed):
            raise _RefusalError("malformed", "an end token where none belongs, or none where one is claimed")
        if (lengths[~at_end] != limits.max_tokens).any():
            raise _RefusalError("malformed", "a completion that ends before its end")

    @staticmethod
    def _check_turns(group: TrajectoryGroup, rules: TurnRules) -> None:
        """Check the structure of episodes; verifiers check the environment's replies."""
        for completion in group.completions():
            try:
                rules.check(completion)
            except DrawnReplyError as error:
                raise _RefusalError("drawn-reply", str(error)) from error
            except InconsistentError as error:
                raise _RefusalError("malformed", str(error)) from error
