"""Wait for the required verdicts on a requested batch.

Only the trainer has received such groups, so it publishes them for the verifiers. Groups without a
verdict when verifiers have fallen silent are left out, and the batch is smaller for it; so is the
part that some engine classes may fill of it. Groups that samplers push wait in the buffer instead,
which has the same bounds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.outbox.outbox import LONGEST
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import Run
from echo_node.trainer.batch_selection import Entrance, choose_most
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.verdict_policy import LONGEST_UNVOUCHED, VerdictPolicy
from protocol import fill_batches, topics

log = logging.getLogger(__name__)


class VerdictGate:
    """Selects the groups of a requested batch by their verdicts.

    `left_out` counts the others, by reason.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        policy: VerdictPolicy,
        receipts: Receipts,
        left_out: Counter[str],
        inventory: InventoryPublisher | None = None,
    ) -> None:
        self._run = run
        self._network = network
        self._policy = policy
        self._receipts = receipts
        self._left_out = left_out
        self._inventory = inventory
        self._shares = ClassShares(run.manifest.engines)

    async def let_in(self, groups: Sequence[RolloutRecord]) -> tuple[RolloutRecord, ...]:
        """Return the groups that may be learnt from, perhaps none.

        Waits while verdicts come that could let in more.
        """
        published = await self._publish(groups)
        while True:
            seen, refused = self._policy.changed.count, self._refused(groups)
            good = [each for each in groups if each.id not in refused]
            chosen = choose_most(good, self._policy, self._shares)
            inside = {each.id for each in chosen}
            outside = [each for each in good if each.id in published - inside]
            if not any(map(self._is_awaited, outside)):
                break
            with trio.move_on_after(LONGEST_UNVOUCHED) as silence:
                await self._policy.changed.wait(since=seen)
            if silence.cancelled_caught:
                break
        verified = {each.id for each in good if self._policy.entrance(each) is Entrance.OPEN}
        for group in sorted({each.id for each in groups} - inside):
            reason = refused.get(group, "over-share" if group in verified else "unverified")
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        return tuple(chosen)

    def _is_awaited(self, group: RolloutRecord) -> bool:
        """Return whether a verdict could let in a group, which no full class keeps out."""
        return self._policy.entrance(group) is not Entrance.OPEN and self._policy.awaits(group)

    async def _publish(self, groups: Sequence[RolloutRecord]) -> frozenset[bytes]:
        """Publish groups for verifiers, and list all; return those that they can have."""
        sealed = {each.sealed: each.id for each in groups if each.sealed and len(each.sealed) <= LONGEST}
        if not self._run.manifest.verifiers:
            return frozenset()
        try:
            for message in fill_batches([*sealed]):
                await self._network.publish(topics.topic(self._run.id, topics.GROUPS), message)
        except PeerError as error:
            log.info("groups of a batch were not sent to verifiers: %s", error)
            return frozenset()
        if self._inventory is None:
            return frozenset(sealed.values())
        await self._inventory.flush()
        return frozenset(each.id for each in groups)  # verifiers fetch those that gossip cannot carry

    def _refused(self, groups: Sequence[RolloutRecord]) -> dict[bytes, str]:
        """Return the groups that verdicts exclude, and why."""
        condemned = (each.id for each in groups if self._policy.is_condemned(each.id))
        muted = (each.id for each in groups if self._policy.is_muted(each.sampler))
        return dict.fromkeys(muted, "muted") | dict.fromkeys(condemned, "condemned")
