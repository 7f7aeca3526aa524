"""Sequential pull: ask the samplers of a head's roster to fill its slots, and take a batch of nothing else.

Slots are dealt in turn, answers are sorted by sampler and slot, so the batch does not depend on who was faster. A sampler
that does not answer is left out, and its share is dealt to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from echo_node.admission import Admitted, Refused
from echo_node.errors import PeerError
from echo_node.net.base import Network
from protocol import (
    Envelope,
    Identity,
    Opened,
    ProtocolError,
    RolloutRequest,
    Roster,
    WeightsHead,
    limits,
    peer_id,
    read_batch,
    seal,
    topics,
)

log = logging.getLogger(__name__)
ROLLOUT_SECONDS = 60.0
LONGEST_REST = 64
"""Steps."""


class NobodyAnswersError(PeerError):
    """No sampler of the roster answers now. Another may have joined since, or come back."""


class SequentialSource:
    """Batches of exactly one head. A sampler that failed is left alone for a while, longer each time that it fails."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        run: bytes,
        batch: int,
        judge: Callable[[Envelope], Admitted | Refused],
    ) -> None:
        self._network = network
        self._identity = identity
        self._run = run
        self._batch = batch
        self._judge = judge
        self._failures: dict[bytes, int] = {}
        self._rests: dict[bytes, int] = {}
        """In how many steps a sampler that failed is asked again."""

    async def next_batch(self, head: Opened[WeightsHead], roster: Roster) -> tuple[Admitted, ...]:
        """Every slot filled once, under this head, by samplers of its roster."""
        willing = self._rested([member.key for member in roster.members])
        filled: list[Admitted] = []
        used = dict.fromkeys(willing, 0)
        while len(filled) < self._batch:
            if not willing:
                raise NobodyAnswersError(
                    "no sampler of the roster answers", advice="start one with echo-node join --role sampler"
                )
            failed: set[bytes] = set()
            missing = self._batch - len(filled)
            async with trio.open_nursery() as nursery:
                for index, sampler in enumerate(willing):
                    if count := min(len(range(index, missing, len(willing))), limits.BATCH):
                        nursery.start_soon(self._ask, sampler, head, used[sampler], count, filled, failed)
                        used[sampler] += count
            willing = [sampler for sampler in willing if sampler not in failed]
            self._remember(failed, willing)
        return tuple(sorted(filled, key=lambda group: group.order))

    def _rested(self, roster: list[bytes]) -> list[bytes]:
        """Whom to ask: those who do not rest; all of them, if everybody does."""
        self._rests = {key: left - 1 for key, left in self._rests.items() if left > 1 and key in roster}
        return [key for key in roster if key not in self._rests] or roster

    def _remember(self, failed: set[bytes], answered: list[bytes]) -> None:
        for key in answered:
            self._failures.pop(key, None)
        for key in failed:
            self._failures[key] = self._failures.get(key, 0) + 1
            self._rests[key] = min(2 ** (self._failures[key] - 1), LONGEST_REST)

    async def _ask(
        self,
        sampler: bytes,
        head: Opened[WeightsHead],
        first: int,
        count: int,
        filled: list[Admitted],
        failed: set[bytes],
    ) -> None:
        """Have one sampler fill its slots: all of them count, or none."""
        request = RolloutRequest(count=count, first=first, head=head.id)
        try:
            answer = await self._network.request(
                sampler,
                topics.ROLLOUT_STREAM,
                seal(request, self._identity, self._run),
                deadline=ROLLOUT_SECONDS,
                most=limits.ANSWER_BYTES,
            )
            filled += self._read(sampler, request, answer)
        except (PeerError, ProtocolError) as error:
            log.warning("sampler %s is left out of this step: %s", peer_id(sampler), error)
            failed.add(sampler)

    def _read(self, sampler: bytes, request: RolloutRequest, answer: bytes) -> list[Admitted]:
        groups = []
        for envelope in read_batch(answer, most=limits.ANSWER_BYTES):
            if envelope.signer != sampler:  # before it is judged, which would fill the slot of whose it is
                raise PeerError("it sent a group of somebody else's")
            judged = self._judge(envelope)
            if isinstance(judged, Refused):
                raise PeerError(f"it sent a group that is refused: {judged.what}")
            if judged.group.message.heads != (request.head,):
                raise PeerError("it sent a group that it was not asked for")
            groups.append(judged)
        slots = sorted(group.group.message.slot for group in groups)
        if slots != list(range(request.first, request.first + request.count)):
            raise PeerError(f"it filled {len(groups)} slots, not the {request.count} that it was asked for")
        return groups
