"""What may go into a batch: the checks of a group that need the run, from cheap to dear. Knows no network.

A group that fails is data, not an error: it is refused with one of the reasons that receipts carry. Nothing here
computes a reward or runs a model. The prompts of many groups are asked for together, in a thread: a contract may take its
time, and whoever judges has others to hear meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import trio
from numpy.typing import NDArray

from echo_node.contract import Prompt
from echo_node.errors import ContractError
from echo_node.run import Run
from echo_node.seals import Seals
from protocol import Envelope, Opened, ProtocolError, Roster, TrajectoryGroup, WeightsHead
from protocol.errors import BadSignatureError
from protocol.tokens import bits_for, unpack_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """A group that may be trained on, with what its checks have found out."""

    group: Opened[TrajectoryGroup]
    step: int
    """The optimiser step of the head under which it was drawn."""
    prompt: Prompt

    @property
    def order(self) -> tuple[bytes, int]:
        """Batches are sorted by sampler and slot, so that their order is not that of arrival."""
        return self.group.signer, self.group.message.slot


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A group that may not, by a reason for its sampler and a sentence for the log."""

    id: bytes
    reason: str
    what: str
    signed: bool = False
    """Whether the sampler that it names has really said it: else it is not to be told of it."""


class _RefusalError(Exception):
    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    """A group that has passed everything but the look at its prompt."""

    group: Opened[TrajectoryGroup]
    step: int

    @property
    def slot(self) -> tuple[bytes, bytes, int]:
        return self.group.message.heads[0], self.group.signer, self.group.message.slot


_Asked: TypeAlias = tuple[Prompt, NDArray[np.int64]] | ContractError
"""What a slot asks, or why that cannot be told."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A head that may be sampled under."""

    step: int
    members: dict[bytes, str]


MOST_HEADS: Final = 64
"""Heads that may be sampled under at once; older ones are forgotten, whatever their step."""
SLOT_WINDOW: Final = 64
"""How far ahead of the number that were admitted a slot may be: slots are filled one after the other, some get lost."""


class Admission:
    """Judges groups against the heads of the last S steps. The trainer tells it what was published and what is new."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limits = run.limits
        self.seals = Seals()
        self._bits = bits_for(run.told.model.vocab_size)
        self._is_end = np.zeros(run.limits.vocab_size, bool)
        self._is_end[[each for each in run.limits.end_tokens if each < run.limits.vocab_size]] = True
        self._known: dict[bytes, _Known] = {}
        self._members: frozenset[bytes] = frozenset()
        """Of all rosters together."""
        self._filled: set[tuple[bytes, bytes, int]] = set()
        self._released: set[tuple[bytes, bytes, int]] = set()
        """Slots that were filled, and are free again: they count once among those that were admitted."""
        self._admitted: Counter[tuple[bytes, bytes]] = Counter()
        """By head and sampler."""
        self._now = 0

    def published(self, head: Opened[WeightsHead], roster: Roster) -> None:
        """From now on groups may be drawn under this head, by these samplers. Heads beyond the bound are forgotten."""
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
        return self._run.told.sync.staleness

    def staleness(self, step: int) -> int:
        """How many steps the policy has moved on."""
        return self._now - step

    def judge(self, envelope: Envelope) -> Admitted | Refused:
        """Admit a group once, or say why not."""
        looked = self._look(envelope, Counter())
        return looked if isinstance(looked, Refused) else self._admit(looked, self._ask([looked])[0])

    async def judge_all(self, envelopes: Sequence[Envelope]) -> list[Admitted | Refused]:
        """The same for several, in their order. Heads may come and slots be filled while their prompts are made."""
        company: Counter[tuple[bytes, bytes]] = Counter()
        looked = [self._look(envelope, company) for envelope in envelopes]
        found = [each for each in looked if isinstance(each, _Candidate)]
        asked = iter(await trio.to_thread.run_sync(self._ask, found) if found else [])
        return [each if isinstance(each, Refused) else self._admit(each, next(asked)) for each in looked]

    def release(self, admitted: Admitted) -> None:
        """A group could not be kept: its slot may be filled again."""
        group = admitted.group
        slot = (group.message.heads[0], group.signer, group.message.slot)
        if slot in self._filled:
            self._filled.remove(slot)
            self._released.add(slot)

    def remember(self, head: bytes, sampler: bytes, slot: int) -> None:
        """A slot that was filled before this process began."""
        if head in self._known and (head, sampler, slot) not in self._filled:
            self._fill((head, sampler, slot))

    def is_member(self, sampler: bytes) -> bool:
        """Whether a sampler is in the roster of a head that can still be sampled under."""
        return sampler in self._members

    def is_signed(self, envelope: Envelope) -> bool:
        """Whether a sampler has really said something. Strangers are not worth the cost of a signature."""
        if not self.is_member(envelope.signer) or envelope.run != self._run.id:
            return False
        try:
            self.seals.check(envelope)
        except ProtocolError:
            return False
        return True

    def _look(self, envelope: Envelope, company: Counter[tuple[bytes, bytes]]) -> _Candidate | Refused:
        """Every check but that of the prompt. `company` counts, by head and sampler, those that have passed with it."""
        try:
            candidate = self._candidate(envelope, company)
        except _RefusalError as refusal:
            return Refused(envelope.id, refusal.reason, str(refusal), self.is_signed(envelope))
        except BadSignatureError as error:
            return Refused(envelope.id, "wrong-signature", str(error))
        except ProtocolError as error:
            return Refused(envelope.id, "malformed", str(error), self.is_signed(envelope))
        company[candidate.slot[:2]] += 1
        return candidate

    def _candidate(self, envelope: Envelope, company: Counter[tuple[bytes, bytes]]) -> _Candidate:
        if not self.is_member(envelope.signer):
            raise _RefusalError("not-in-roster", "the sampler is in no roster of the newest heads")
        group = envelope.claim(TrajectoryGroup, self._run.id)
        self._check_limits(group)
        slot = (group.heads[0], envelope.signer, group.slot)
        if slot in self._filled:
            raise _RefusalError("duplicate", f"slot {group.slot} of this sampler and head is filled")
        known = self._known.get(group.heads[0])
        if known is None or not self._known.keys() >= set(group.heads):
            raise _RefusalError("stale", "drawn under a head that is not among the newest")
        self._check_member(known, envelope.signer, group.engine)
        self._check_window(slot, company[slot[:2]])
        opened = Opened(group, self.seals.check(envelope), envelope.run, envelope.signer, envelope.sealed)
        self._check_ends(group)
        return _Candidate(opened, known.step)

    def _ask(self, candidates: Sequence[_Candidate]) -> list[_Asked]:
        """What the slots of these ask. Changes nothing here: it may run in a thread."""
        keys = [self._run.slot_key(*each.slot) for each in candidates]
        try:
            return [*self._run.prompts(keys)]
        except ContractError as error:  # samplers choose slots: none may end the trainer, or harm another
            return [error] if len(keys) == 1 else [self._ask([each])[0] for each in candidates]

    def _admit(self, candidate: _Candidate, asked: _Asked) -> Admitted | Refused:
        """Fill the slot, unless the prompt is another or something has changed since the first look."""
        group, slot = candidate.group, candidate.slot
        try:
            prompt = self._second_look(candidate, asked)
        except _RefusalError as refusal:
            return Refused(group.id, refusal.reason, str(refusal), signed=True)
        self._fill(slot)
        return Admitted(group, candidate.step, prompt)

    def _fill(self, slot: tuple[bytes, bytes, int]) -> None:
        self._filled.add(slot)
        self._admitted[slot[:2]] += slot not in self._released
        self._released.discard(slot)

    def _second_look(self, candidate: _Candidate, asked: _Asked) -> Prompt:
        slot = candidate.slot
        if slot in self._filled:
            raise _RefusalError("duplicate", f"slot {slot[2]} of this sampler and head is filled")
        if not self._known.keys() >= set(candidate.group.message.heads):
            raise _RefusalError("stale", "drawn under a head that is no longer among the newest")
        self._check_window(slot, 0)
        if isinstance(asked, ContractError):
            raise _RefusalError("wrong-prompt", f"its slot has no prompt: {asked}")
        prompt, ids = asked
        if not np.array_equal(ids, candidate.group.message.prompt_ids()):
            raise _RefusalError("wrong-prompt", "not the prompt of its slot")
        return prompt

    def _check_window(self, slot: tuple[bytes, bytes, int], company: int) -> None:
        if slot[2] >= self._admitted[slot[:2]] + company + SLOT_WINDOW:
            raise _RefusalError("over-limit", f"slot {slot[2]}: slots are filled one after the other")

    def _check_limits(self, group: TrajectoryGroup) -> None:
        told = self._run.told
        if group.bits != self._bits:
            raise _RefusalError("over-limit", f"ids of {group.bits} bits")
        if len(group.lengths) != told.sampling.group_size:
            raise _RefusalError(
                "over-limit", f"{len(group.lengths)} completions, not {told.sampling.group_size}"
            )
        if max(group.lengths) > told.sampling.max_tokens or group.prompt_length > told.sampling.max_prompt:
            raise _RefusalError("over-limit", "more tokens than the run allows")
        if group.spans and not told.sync.in_flight:
            raise _RefusalError("over-limit", "a switch of heads, which the run does not allow")
        if any(span.head is None for span in group.spans):
            raise _RefusalError("malformed", "tokens of an environment, which this run has not")

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
        lengths = np.array(group.lengths)
        ends = self._is_end[ids]
        at_end = ends[np.cumsum(lengths) - 1]
        claimed = np.array([finish == "end" for finish in group.finish])
        if int(ends.sum()) != int(at_end.sum()) or not np.array_equal(at_end, claimed):
            raise _RefusalError("malformed", "an end token where none belongs, or none where one is claimed")
        if (lengths[~at_end] != limits.max_tokens).any():
            raise _RefusalError("malformed", "a completion that ends before its end")
