"""Intake of groups from gossip, deliveries and requests into the buffer.

Everything that a group passes before it is part of a batch, built in the order in which the parts
need one another: verdict policy, buffer, receipts, admission, and the two sources of batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio

from echo_node.net.base import Network
from echo_node.net.outbox.direct_delivery import Taker
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.rollouts.group_refs import GroupRefFetcher
from echo_node.runs.algorithm import training_settings
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import Run
from echo_node.runtime.reputation import Reputations
from echo_node.trainer.gossip_source import GossipSource
from echo_node.trainer.group_admission import GroupAdmission
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.recovery import restore_groups
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.request_deadlines import RequestDeadlines
from echo_node.trainer.sender_quota import SenderQuota
from echo_node.trainer.sequential_source import SequentialSource
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.verdict_listener import VerdictEnforcer, VerdictListener
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.trainer.work_split import WorkSplit
from protocol import Identity


class GroupIntake:
    """The groups of a leading trainer, from the network to the sources of batches.

    `split` is how a requested batch is divided among samplers.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        policy: VerdictPolicy,
        journal: TrainingJournal,
        split: WorkSplit | None = None,
    ) -> None:
        batch, bound = training_settings(run.manifest).batch_groups, run.manifest.sync.staleness
        shares = ClassShares(run.manifest.engines)
        self._network, self._journal = network, journal
        self.policy = policy
        self.drops = Counter[str]()
        """Groups that were refused or left out, by reason."""
        self.checks = Admission(run)
        self.buffer = ReplayBuffer(
            capacity=(bound + 1) * batch, staleness=bound, batch=batch, entry=policy, shares=shares
        )
        self.receipts = Receipts(network, identity, run.id)
        self.enforcer = VerdictEnforcer(self.buffer, self.receipts, journal)
        self._verdicts = VerdictListener(run, policy, self.enforcer, journal)
        self._inventory = InventoryPublisher(run, network, identity, policy, self.buffer, self.receipts)
        self.admission = GroupAdmission(self.checks, policy, self.enforcer, self.drops, self._inventory)
        validator = GossipValidator(run, self.checks)
        quota = SenderQuota(validator.named)
        self.reputation = Reputations(quota, policy)
        """The mute rules of the trainer: useless groups, and dishonest ones."""
        self.gossip = GossipSource(
            run.id,
            batch,
            self.buffer,
            self.receipts,
            self.admission,
            journal,
            validator,
            quota,
            GroupRefFetcher(network, run.id),
        )
        self.sequential = SequentialSource(
            network,
            identity,
            run.id,
            batch,
            self.admission,
            self.receipts,
            spread=split,
            shares=shares,
            gate=VerdictGate(run, network, policy, self.receipts, self.drops, self._inventory),
            entry=policy,
            deadlines=RequestDeadlines(run.manifest.sampling.group_size * run.limits.max_tokens),
        )

    def taker(self) -> Taker:
        """Return the handler of delivered groups."""
        return Taker(self.gossip.validate, self.gossip.take)

    async def listen(self) -> None:
        """Take in gossip and verdicts, send receipts and inventories, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gossip.listen, self._network)
            nursery.start_soon(self._verdicts.listen, self._network)
            nursery.start_soon(self.receipts.send_periodically)
            nursery.start_soon(self._inventory.work)

    async def restore(self, heads: Sequence[bytes]) -> None:
        """Restore the groups under these heads and the verdicts from the journal."""
        await restore_groups(
            self._journal,
            heads,
            checks=self.checks,
            policy=self.policy,
            receipts=self.receipts,
            buffer=self.buffer,
            admission=self.admission,
        )
        await self.enforcer.flush()
