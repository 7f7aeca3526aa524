"""Attacks of the poisoned swarm: how cheats get forged groups past the verifiers, if they can.

What is forged is the engine's business (`poisoned_cheats`). An attack changes the node around it:
the run by which it claims rewards, or the network by which it sends. `ATTACKS` names them; each is
a side of the benchmark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.poisoned_cheats import CheatingEngine, ForgingEngine
from echo_node.contract import Prompt, Score
from echo_node.engine.base import Finished, Respond, SlotRequest, Update, never, no_environment, no_news
from echo_node.engine.local import LocalEngine
from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.runs.run import Run
from echo_node.sampler.delivery import GroupDelivery
from protocol import Identity, topics

DELIVERY_SECONDS: Final = 20.0
"""Deadline in seconds of a delivery by hand."""
HONEST_GROUPS: Final = 64
"""Groups for which a cheat is honest, to be trusted."""
LIE: Final = 3.0
"""Nats by which a liar's last tokens are claimed to be less likely."""
SHORT: Final = 256
"""Bytes above which a group goes by reference, where all are to be sent so."""
Join = Callable[[Identity], AbstractAsyncContextManager[Network]]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What the node of a sampler is made with."""

    run: Run
    join: Join


Change = Callable[[Sampler], Sampler]
MakeEngine = Callable[[Run, int, int], ForgingEngine]
"""Makes a cheat's engine of a run, rows, and the number of groups for which it is honest."""


def unchanged(sampler: Sampler) -> Sampler:
    return sampler


def _cheating_engine(run: Run, rows: int, honest_groups: int) -> ForgingEngine:
    return CheatingEngine(run, rows=rows, honest_groups=honest_groups)


@dataclasses.dataclass(frozen=True)
class Attack:
    """What cheats do, and what all samplers do alike."""

    cheats: Change = unchanged
    everybody: Change = unchanged
    engine: MakeEngine = _cheating_engine
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    """Holds while the swarm runs."""
    honest_groups: tuple[int, ...] = (HONEST_GROUPS, HONEST_GROUPS)
    """Groups for which each cheat is honest, to be trusted."""
    keys: int = 1
    """Keys under which each cheat joins; together they make as many groups as one."""


class EqualClaims(Run):
    """The run of a sampler that claims the same reward for every completion, once it is trusted."""

    honest_left: int
    """Groups whose rewards are still claimed as they are."""

    def scores(self, prompt: Prompt, completions: Sequence[NDArray[np.int64]]) -> list[Score]:
        self.honest_left -= 1
        if self.honest_left >= 0:
            return super().scores(prompt, completions)
        return [Score(self.contract.low, "whatever it is worth")] * len(completions)


def claim_equal_rewards(sampler: Sampler, honest_groups: int = HONEST_GROUPS) -> Sampler:
    """Claim equal rewards, so that groups look as if they taught nothing."""
    run = sampler.run
    claiming = EqualClaims(run.sealed_manifest, run.folder, run.contract, run.tokenizer)
    claiming.honest_left = honest_groups
    return dataclasses.replace(sampler, run=claiming)


class _HandDelivery:
    """A network on which groups are not gossiped, but delivered to the trainer by hand."""

    def __init__(self, network: Network, run: Run) -> None:
        self._network = network
        self._topic = topics.topic(run.id, topics.GROUPS)
        self._trainer = run.manifest.trainers[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def publish(self, topic: str, data: bytes) -> None:
        if topic != self._topic:
            await self._network.publish(topic, data)
            return
        with suppress(PeerError):  # the outbox delivers it again
            await deliver(self._network, self._trainer, topic, data, deadline=DELIVERY_SECONDS)


def deliver_by_hand(sampler: Sampler) -> Sampler:
    """Gossip no group: deliver all straight to the trainer, where no verifier hears of them."""

    @asynccontextmanager
    async def join(identity: Identity) -> AsyncGenerator[Network]:
        async with sampler.join(identity) as network:
            yield cast(Network, _HandDelivery(network, sampler.run))

    return dataclasses.replace(sampler, join=join)


@contextmanager
def by_reference() -> Generator[None]:
    """Have all samplers send groups as those are sent that are too large for gossip."""
    defaults = GroupDelivery.__init__.__kwdefaults__ or {}
    before = defaults["longest"]
    defaults["longest"] = SHORT
    try:
        yield
    finally:
        defaults["longest"] = before


class SingleTokenLiar(CheatingEngine):
    """An engine that draws honestly, and claims its last tokens as far less likely than they were.

    Each then weighs as much as the clip allows: how completions end is learnt, or unlearnt, most.
    """

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Yield honest completions; after those for trust, with a lie on the last token of each."""
        asked = list(requests)
        lies = self._honest_left <= 0
        self._honest_left -= len(asked)
        if lies:
            self.forged |= {request.slot_key: "single tokens" for request in asked}
        for finished in LocalEngine.generate(self, asked, stop=stop, news=news, respond=respond):
            draw = finished.draw
            if lies:
                claimed = draw.logprobs.copy()
                claimed[-1] -= LIE
                draw = dataclasses.replace(draw, logprobs=claimed)
            yield Finished(finished.request, finished.completion, draw)


def _single_token_liar(run: Run, rows: int, honest_groups: int) -> ForgingEngine:
    return SingleTokenLiar(run, rows=rows, honest_groups=honest_groups)


ATTACKS: Final[dict[str, Attack]] = {
    "equal_claims": Attack(cheats=claim_equal_rewards),
    "by_hand": Attack(cheats=deliver_by_hand),
    "single_token_mu": Attack(engine=_single_token_liar),
    "long_groups": Attack(everybody=deliver_by_hand, during=by_reference),
    "many_keys": Attack(keys=4, honest_groups=(0, 16)),
}
"""Attacks by the names of their sides in the results."""
