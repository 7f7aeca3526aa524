"""Episodes in progress in a jailed process, so that a turn costs one step.

The node asks for every reply by the whole transcript, and any process may answer. One that answered
the turn before still has the episode, if the contract has episodes (`begin`); otherwise the
transcript is played from its beginning. Code of a plug-in answers in a child that keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from echo_node.contract.api import Contract, Episode, Prompt, Reply, Turn, checked_reply, reply_of
from echo_node.errors import ContractError, boundary

KEPT: Final = 512
"""Episodes that a process keeps; the least recently used is dropped."""
_Key = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]


class EpisodeCache:
    """Episodes by prompt and the texts of their turns so far."""

    def __init__(self) -> None:
        self._episodes: OrderedDict[_Key, Episode] = OrderedDict()

    def reply(self, contract: Contract, prompt: Prompt, turns: Sequence[Turn]) -> Reply:
        """Return the answer to the last turn; whatever goes wrong is a `ContractError`."""
        if type(contract).begin is Contract.begin:
            return reply_of(contract, prompt, turns)
        texts = tuple(turn.text for turn in turns)
        data = (prompt.text, tuple(sorted(prompt.data.items())))
        with boundary(ContractError, f"{contract.name} {contract.version}: answering a turn"):
            episode = self._episodes.pop((*data, texts[:-1]), None)
            if episode is None:
                episode = contract.begin(prompt)
                for text in texts[:-1]:
                    episode.step(text)
            reply = checked_reply(episode.step(texts[-1]))
            self._episodes[(*data, texts)] = episode
            if len(self._episodes) > KEPT:
                self._episodes.popitem(last=False)
            return reply
