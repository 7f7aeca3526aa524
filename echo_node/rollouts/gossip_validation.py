"""Gossip validators of groups, receipts, verdicts and inventories.

They run before a message is forwarded. All subscribers of a topic run the same validator, so a peer
that passes on a forged message, or one of another run, could have seen that, and is blamed for it.
Nothing here needs the contents of a group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from echo_node.net.base import ACCEPT, CAPACITY, IGNORE, Message, Reject, Validation
from echo_node.rollouts.admission import Admission
from echo_node.runs.run import Run
from protocol import Envelope, Inventory, InventoryAck, ProtocolError, Receipt, Verdict, read_batch
from protocol.errors import WrongRunError


class GossipValidator:
    """Validator of gossiped groups. `admission` has the rosters.

    Nodes that the manifest names are not blamed: their messages are needed whatever others feed
    them. Groups of strangers alone are not passed on. What was accepted stays parsed until `take`.
    """

    def __init__(self, run: Run, admission: Admission) -> None:
        self._run = run.id
        self._admission = admission
        self.named = frozenset((*run.manifest.trainers, *run.manifest.verifiers))
        """Keys of the manifest, whose nodes pass on messages of others."""
        self._accepted: OrderedDict[bytes, Sequence[Envelope]] = OrderedDict()
        """Groups of messages that were accepted and not yet taken."""

    def validate(self, message: Message) -> tuple[Validation, Sequence[Envelope]]:
        """Return the validation of a message, and its groups.

        Raise `ProtocolError` for what is the sender's fault.
        """
        try:
            envelopes = read_batch(message.data)
            if any(envelope.run != self._run for envelope in envelopes):
                raise WrongRunError("a group of another run")
            if not any(self._admission.accepts_from(envelope.signer) for envelope in envelopes):
                return IGNORE, envelopes
            for envelope in envelopes:  # strangers' too: who is a stranger here may have joined elsewhere
                self._admission.signatures.check(envelope)
        except ProtocolError:
            if message.sender in self.named:
                return IGNORE, ()
            raise
        self._accepted[message.data] = envelopes
        if len(self._accepted) > CAPACITY:
            self._accepted.popitem(last=False)
        return ACCEPT, envelopes

    def take(self, data: bytes) -> Sequence[Envelope]:
        """Return the groups of a message, parsed once if it was accepted here."""
        return self._accepted.pop(data, None) or read_batch(data)


def validate_receipt(run: Run, message: Message) -> Validation:
    """Accept receipts of the run's trainers; which of them leads is not checked here."""
    envelope = Envelope.parse(message.data)
    if envelope.signer not in run.manifest.trainers:
        return Reject("not-trainer")
    envelope.open(Receipt, run.id)
    return ACCEPT


def validate_verdicts(run: Run, message: Message) -> Validation:
    """Accept batches of verdicts that verifiers of the run have signed."""
    for envelope in read_batch(message.data):
        if envelope.signer not in run.manifest.verifiers:
            return Reject("not-verifier")
        envelope.open(Verdict, run.id)
    return ACCEPT


def validate_inventories(run: Run, message: Message) -> Validation:
    """Accept inventories of the run's trainers, and acknowledgements of its verifiers."""
    envelope = Envelope.parse(message.data)
    if envelope.kind == InventoryAck.KIND:
        if envelope.signer not in run.manifest.verifiers:
            return Reject("not-verifier")
        envelope.open(InventoryAck, run.id)
        return ACCEPT
    if envelope.signer not in run.manifest.trainers:
        return Reject("not-trainer")
    envelope.open(Inventory, run.id)
    return ACCEPT
