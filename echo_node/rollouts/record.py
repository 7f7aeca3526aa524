"""The one record of a rollout group: message, rewards, sealed bytes.

It is the same in every role. A sampler makes it as it seals the group. Elsewhere admission makes
it; the replay buffer, the batch scorer, the journal, the training step and the replay check use it.
The sealed bytes are parsed once in a node: only a record that was read back from the journal parses
them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from echo_node.contract import Prompt
from echo_node.errors import DefectError, StoreError
from protocol import Envelope, TrajectoryGroup

SIGNATURE_BYTES: Final = 64
"""Length in bytes of the signature, which ends every sealed message."""


@dataclass(frozen=True)
class RolloutRecord:
    """A sealed or admitted rollout group, or what the journal keeps of one.

    The id, sampler, slot, head and step outlive the sealed bytes, which the journal lets go of.
    """

    id: bytes
    sampler: bytes
    slot: int
    head: bytes
    """Id of the head under which the group was sampled; the first, if it switched."""
    step: int
    """Optimiser step of the policy that sampled the group."""
    sealed: bytes | None = field(default=None, repr=False)
    rewards: tuple[float, ...] | None = None
    """Rewards of the completions as the trainer computed them; None before scoring."""
    stored_signature: bytes | None = None
    """The sampler's signature, where the sealed bytes were never here or are gone."""
    decoded: TrajectoryGroup | None = field(default=None, repr=False, compare=False)
    slot_prompt: Prompt | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        envelope: Envelope,
        message: TrajectoryGroup,
        step: int,
        prompt: Prompt | None = None,
        rewards: Sequence[float] | None = None,
    ) -> RolloutRecord:
        """Return the record of a group whose signature was made or checked here."""
        return cls(
            id=envelope.id,
            sampler=envelope.signer,
            slot=message.slot,
            head=message.heads[0],
            step=step,
            sealed=envelope.sealed,
            rewards=None if rewards is None else tuple(rewards),
            decoded=message,
            slot_prompt=prompt,
        )

    @cached_property
    def message(self) -> TrajectoryGroup:
        """Return the decoded message; raise `StoreError` if its bytes are gone."""
        if self.decoded is not None:
            return self.decoded
        if self.sealed is None:
            raise StoreError(f"group {self.id.hex()[:16]} of a batch is not in the journal any more")
        envelope = Envelope.parse(self.sealed)  # the signature was checked before it was stored
        return envelope.claim(TrajectoryGroup, envelope.run)

    @property
    def prompt(self) -> Prompt:
        """Return the prompt of the slot, which admission made."""
        if self.slot_prompt is None:
            raise DefectError("the prompt of a rollout record that admission did not make")
        return self.slot_prompt

    @property
    def signature(self) -> bytes | None:
        """Return the sampler's signature over the id, if it is known."""
        return self.stored_signature if self.sealed is None else self.sealed[-SIGNATURE_BYTES:]

    @property
    def order(self) -> tuple[bytes, int]:
        """Return the sort key within a batch, whatever the order of arrival."""
        return self.sampler, self.slot
