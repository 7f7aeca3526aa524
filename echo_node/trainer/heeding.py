"""Verdicts as the trainer hears them, and what it does about them: groups leave the buffer, samplers are no longer heard.

A finding is in the journal before it counts, so that a restart forgets nothing. What a finding means, the policy decides.
"""

from __future__ import annotations

from collections.abc import Callable

from echo_node.admission import Admitted
from echo_node.net.base import ACCEPT, Message, Network, Reject, Validation
from echo_node.run import Run
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay import ReplayBuffer
from echo_node.trainer.verdicts import Consequences, VerdictPolicy
from protocol import Verdict, read_batch, topics


def look_at_verdicts(run: Run, message: Message) -> Validation:
    """Only verifiers of the run say such things, and whoever passes one on can see that it is signed."""
    for envelope in read_batch(message.data):
        if envelope.signer not in run.told.verifiers:
            return Reject("not-verifier")
        envelope.open(Verdict, run.id)
    return ACCEPT


class Heeding:
    """One trainer's ear for verdicts. `changed` is called when other groups may be drawn than before."""

    def __init__(
        self,
        run: Run,
        policy: VerdictPolicy,
        buffer: ReplayBuffer,
        receipts: Receipts,
        journal: TrainingJournal,
        changed: Callable[[], None],
    ) -> None:
        self._run = run
        self._policy = policy
        self._buffer = buffer
        self._receipts = receipts
        self._journal = journal
        self._changed = changed
        self._unwritten: dict[bytes, str] = {}
        """Groups that left the buffer, and why: the findings that say so are on disk already."""

    async def hear(self, network: Network) -> None:
        """Heed verdicts for as long as the trainer works."""
        topic = topics.topic(self._run.id, topics.VERDICTS)
        async with network.subscribe(topic, self._look_at) as inbox:
            async for message in inbox:
                opened = [each.open(Verdict, self._run.id) for each in read_batch(message.data)]
                findings = [found for each in opened if (found := self._policy.read(each)) is not None]
                if findings:
                    await self._journal.find(findings)
                    for found in findings:
                        self.apply(self._policy.take(found))
                    await self.flush()
                    self._changed()

    def _look_at(self, message: Message) -> Validation:
        return look_at_verdicts(self._run, message)

    def apply(self, told: Consequences) -> None:
        """Let go of what was condemned, and of all that a muted sampler has waiting."""
        self._let_go(self._buffer.remove(told.condemned, "condemned"), "condemned")
        if told.muted:
            gone = self._buffer.remove_where(lambda group: group.group.signer in told.muted, "muted")
            self._let_go(gone, "muted")

    async def flush(self) -> None:
        """Write down what has left the buffer."""
        written, self._unwritten = self._unwritten, {}
        if written:
            await self._journal.drop(written)

    def _let_go(self, groups: list[Admitted], reason: str) -> None:
        for group in groups:
            self._receipts.withdraw(group.group.id, reason)
            self._unwritten[group.group.id] = reason
