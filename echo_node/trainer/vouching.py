"""Groups that were asked for, until verifiers have said what the run's verdict policy wants to hear of them.

Only the trainer has seen such groups, so it shows them. What is still without a word when verifiers have fallen silent is left
out, and the batch is smaller for it; so is the part that some engine classes may fill of it. Groups that samplers push wait in
the buffer instead, which knows the same bounds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import trio

from echo_node.admission import Admitted
from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.outbox.item import LONGEST
from echo_node.run import Run
from echo_node.trainer.choosing import Entrance, choose_most
from echo_node.trainer.classes import ClassShares
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.verdicts import LONGEST_UNVOUCHED, VerdictPolicy
from protocol import fill_batches, topics

log = logging.getLogger(__name__)


class Vouching:
    """What one trainer lets into a batch that it asked for. `left_out` counts what it does not, by reason."""

    def __init__(
        self, run: Run, network: Network, policy: VerdictPolicy, receipts: Receipts, left_out: Counter[str]
    ) -> None:
        self._run = run
        self._network = network
        self._policy = policy
        self._receipts = receipts
        self._left_out = left_out
        self._shares = ClassShares(run.told.engines)
        self._heard = trio.Event()

    def wake(self) -> None:
        """A verdict has been heard."""
        self._heard.set()
        self._heard = trio.Event()

    async def let_in(self, drawn: Sequence[Admitted]) -> tuple[Admitted, ...]:
        """The groups that may be learnt from, perhaps none. Waits while verdicts come that could let in more."""
        shown = await self._show(drawn)
        while True:
            heard, refused = self._heard, self._refused(drawn)
            good = [each for each in drawn if each.group.id not in refused]
            chosen = choose_most(good, self._policy, self._shares)
            inside = {each.group.id for each in chosen}
            outside = [each for each in good if each.group.id in shown - inside]
            if not any(map(self._is_awaited, outside)):
                break
            with trio.move_on_after(LONGEST_UNVOUCHED) as silence:
                await heard.wait()
            if silence.cancelled_caught:
                break
        beyond = {each.group.id for each in good if self._policy.entrance(each) is Entrance.OPEN}
        for group in sorted({each.group.id for each in drawn} - inside):
            reason = refused.get(group, "over-share" if group in beyond else "unverified")
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        return tuple(chosen)

    def _is_awaited(self, group: Admitted) -> bool:
        """Whether a verdict could let in a group. Of one that may go in, only its engine class has no room."""
        return self._policy.entrance(group) is not Entrance.OPEN and self._policy.awaits(group)

    async def _show(self, drawn: Sequence[Admitted]) -> frozenset[bytes]:
        """Let verifiers see groups; returns which of them they can have seen."""
        sealed = {each.group.sealed: each.group.id for each in drawn if len(each.group.sealed) <= LONGEST}
        if not self._run.told.verifiers:
            return frozenset()
        try:
            for message in fill_batches([*sealed]):
                await self._network.publish(topics.topic(self._run.id, topics.GROUPS), message)
        except PeerError as error:
            log.info("verifiers were not shown the groups of a step: %s", error)
            return frozenset()
        return frozenset(sealed.values())

    def _refused(self, drawn: Sequence[Admitted]) -> dict[bytes, str]:
        """What verifiers have spoken against, and why."""
        condemned = (each.group.id for each in drawn if self._policy.is_condemned(each.group.id))
        muted = (each.group.id for each in drawn if self._policy.is_muted(each.group.signer))
        return dict.fromkeys(muted, "muted") | dict.fromkeys(condemned, "condemned")
