"""The first look at gossiped groups, before they are passed on: by all who subscribe to them, so that all see the same.

What is forged, or of another run, is held against whoever passed it on, since that one has looked too; not against those whom
the manifest names, who must be heard whatever others feed them. What is of strangers alone is passed on to nobody. It judges
nothing that needs the contents of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo_node.admission import Admission
from echo_node.net.base import ACCEPT, IGNORE, Message, Validation
from echo_node.run import Run
from protocol import Envelope, ProtocolError, read_batch
from protocol.errors import WrongRunError


class Sieve:
    """The first look of one node. `admission` knows who has joined."""

    def __init__(self, run: Run, admission: Admission) -> None:
        self._run = run.id
        self._admission = admission
        self.named = frozenset((*run.told.trainers, *run.told.verifiers))
        """Keys of the manifest, whose nodes pass on what others said."""

    def sift(self, message: Message) -> tuple[Validation, Sequence[Envelope]]:
        """What a validator says of a message, and the groups in it. A `ProtocolError` is its sender's fault."""
        try:
            envelopes = read_batch(message.data)
            if any(envelope.run != self._run for envelope in envelopes):
                raise WrongRunError("a group of another run")
            if not any(self._admission.is_member(envelope.signer) for envelope in envelopes):
                return IGNORE, envelopes
            for envelope in envelopes:  # strangers' too: who is a stranger here may have joined elsewhere
                self._admission.seals.check(envelope)
        except ProtocolError:
            if message.sender in self.named:
                return IGNORE, ()
            raise
        return ACCEPT, envelopes
