"""Episodes of a run: answer turns as they are drawn, and replay them.

A sampler answers by `EpisodeSource`. Everybody else, and the sampler itself before it posts, plays
the transcript again by `EpisodeReplay`: texts are read from the drawn ids, replies are computed
here, and their ids must be those of the group. A contract that fails decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_node.contract import Prompt, Reply, Turn, check_vectors
from echo_node.contract.jail.worker import Failed
from echo_node.engine.base import Draw, Ids, Respond, TurnEnd, TurnReply
from echo_node.errors import ContractError, DefectError
from echo_node.runs.run import Run, Scorable
from protocol.trajectory import Completion, Stretch
from protocol.turns import TurnRules, TurnTokens, turn_ends, turns_of

FRESH: Final = 2
"""Jail processes, each started for it, that must agree before a transcript is called forged."""


@dataclass(frozen=True, slots=True)
class EpisodeBreach:
    """A transcript that is not the environment's, with the reason of the verdict."""

    reason: str
    what: str


class EpisodeSource:
    """Replies of a run's environment to an engine's turns.

    Request n has `prompts[n]`.
    """

    def __init__(self, run: Run, prompts: Sequence[Prompt]) -> None:
        self._run = run
        self._rules = _rules_of(run)
        self._prompts = prompts
        self._turns: dict[tuple[int, int], tuple[Turn, ...]] = {}

    def respond(self, ended: Sequence[TurnEnd]) -> list[TurnReply]:
        """Answer these turns, in one call of the contract."""
        episodes = []
        for each in ended:
            prompt = self._prompts[each.request]
            before = self._turns.get((each.request, each.completions[0]), ())
            text = self._run.turn_text(prompt, each.ids[each.start :])
            episodes.append((prompt, (*before, Turn(text))))
        replies = self._run.replies(episodes)
        return [
            self._take(each, prompt, turns, reply)
            for each, (prompt, turns), reply in zip(ended, episodes, replies, strict=True)
        ]

    def _take(
        self, ended: TurnEnd, prompt: Prompt, turns: tuple[Turn, ...], reply: Reply | Failed
    ) -> TurnReply:
        if isinstance(reply, Failed):
            return TurnReply(None, "void")
        if reply.done:
            return TurnReply(None, "done")
        try:
            ids = self._run.reply_ids(prompt, reply.text, ended=ended.ids[-1] == self._rules.end)
        except ContractError:
            return TurnReply(None, "void")
        if not self._rules.fits(ids.size, ended.ids.size, ended.environment):
            return TurnReply(None, "length")
        answered = (*turns[:-1], Turn(turns[-1].text, reply.text))
        self._turns |= {(ended.request, number): answered for number in ended.completions}
        return TurnReply(ids)


class EpisodeReplay:
    """Recomputation of a group's replies, one turn of all completions at a time."""

    def __init__(self, run: Run, prompt: Prompt, completions: Sequence[Completion]) -> None:
        self._run = run
        self._rules = _rules_of(run)
        self._prompt = prompt
        self._completions = completions
        self.places: list[list[TurnTokens]] = [turns_of(each.stretches) for each in completions]
        self.turns: list[list[Turn]] = [[] for _ in completions]
        """Turns of each completion, as far as they were recomputed."""

    @property
    def most(self) -> int:
        """Most turns of a completion."""
        return max(len(places) for places in self.places)

    def step(self, number: int) -> EpisodeBreach | None:
        """Recompute the replies to turn `number`, from 0, of every completion that has it.

        Return the first that differs. Raises `ContractError` where the contract fails here.
        """
        asked: list[int] = []
        for index, (completion, places) in enumerate(zip(self._completions, self.places, strict=True)):
            if number >= len(places):
                continue
            place = places[number]
            text = self._run.turn_text(self._prompt, completion.ids[place.start : place.end])
            self.turns[index].append(Turn(text))
            end = self._rules.turn_end(int(completion.ids[place.end - 1]), place.end - place.start, place.end)
            if end is not None and self._rules.finish(end, number + 1, place.end) is None:
                asked.append(index)
        if not self._run.contract.replayable:
            self._read(number, asked)
            return None
        replies = self._run.replies([(self._prompt, self.turns[index]) for index in asked])
        failed = next((each for each in replies if isinstance(each, Failed)), None)
        for index, reply in zip(asked, replies, strict=True):
            if not isinstance(reply, Failed) and (what := self._compare(index, number, reply)) is not None:
                return what  # also beside a completion on which the contract fails
        if failed is not None:
            raise ContractError(f"replaying an episode: {failed.reason}")
        return None

    def breach(self) -> EpisodeBreach | None:
        """Recompute all turns that were not yet; return what differs first."""
        for number in range(max(map(len, self.turns)), self.most):
            if (found := self.step(number)) is not None:
                return found
        return None

    def _compare(self, index: int, number: int, reply: Reply) -> EpisodeBreach | None:
        completion, place = self._completions[index], self.places[index][number]
        is_last = number + 1 == len(self.places[index])
        name = f"turn {number + 1} of completion {index}"
        ids: Ids = np.array([], np.int64)
        if not reply.done:
            ended = int(completion.ids[place.end - 1]) == self._rules.end
            ids = self._run.reply_ids(self._prompt, reply.text, ended=ended)
            before = sum(each.replied - each.end for each in self.places[index][:number])
            if self._rules.fits(ids.size, place.end, before):
                if is_last:
                    reason = "false-end" if completion.finish == "done" else "skipped-turn"
                    return EpisodeBreach(reason, f"{name}: the environment went on, and the completion ends")
                if not np.array_equal(ids, completion.ids[place.end : place.replied]):
                    return EpisodeBreach(
                        "forged-observation", f"{name}: the environment answers with other tokens"
                    )
                self.turns[index][-1] = Turn(self.turns[index][-1].text, reply.text)
                return None
        finish = "done" if reply.done else "length"
        if not is_last:
            return EpisodeBreach("added-turn", f"{name} was the last by the environment ({finish})")
        if completion.finish != finish:
            return EpisodeBreach(
                "false-end", f"{name} ends as {completion.finish}, by the environment {finish}"
            )
        return None

    def _read(self, number: int, asked: Sequence[int]) -> None:
        """Take replies as a named sampler wrote them: nobody can compute them again."""
        template = self._run.turn_template(self._prompt)
        for index in asked:
            place, ids = self.places[index][number], self._completions[index].ids
            if place.replied > place.end:
                ended = int(ids[place.end - 1]) == self._rules.end
                text = template.text(ids[place.end : place.replied], ended=ended)
                self.turns[index][-1] = Turn(self.turns[index][-1].text, text)


def is_proven(run: Run, prompt: Prompt, completions: Sequence[Completion], found: EpisodeBreach) -> bool:
    """Return whether fresh jails agree on a breach. Blocks.

    Their contract must be the run's.
    """
    try:
        for _ in range(FRESH):
            run.renew()
            if EpisodeReplay(run, prompt, completions).breach() != found:
                return False
        check_vectors(run.contract, run.manifest.contract.vectors)
    except ContractError:  # this machine's jail, not the sampler
        return False
    return True


def responder(run: Run, prompts: Sequence[Prompt]) -> Respond | None:
    """Return the responder to turns of these prompts; None without environment."""
    return None if run.turn_rules is None else EpisodeSource(run, prompts).respond


def completion_of(run: Run, draw: Draw, heads: Sequence[bytes], reward: float | None = None) -> Completion:
    """Return a drawn completion as the wire has it; its heads are among `heads`."""
    cuts = [*(span.start for span in draw.spans), len(draw.ids)]
    stretches = tuple(
        Stretch(start, end, None if span.head_id is None else heads.index(span.head_id))
        for span, (start, end) in zip(draw.spans, itertools.pairwise(cuts), strict=True)
    )
    rules = run.turn_rules
    ends = None if rules is None else turn_ends(draw.ids, stretches, rules.end, rules.end_tokens)
    return Completion(draw.ids, draw.logprobs, draw.finish, reward, stretches, ends)


def scorable(run: Run, prompt: Prompt, draws: Sequence[Draw]) -> Sequence[Scorable]:
    """Return what is scored of draws that were made here: ids, or turns played again."""
    if run.turn_rules is None:
        return [draw.ids for draw in draws]
    if any(draw.finish == "void" for draw in draws):
        raise ContractError("the environment failed in the middle of an episode")
    heads = sorted({span.head_id for draw in draws for span in draw.spans if span.head_id is not None})
    return episodes_of(run, prompt, [completion_of(run, draw, heads) for draw in draws])


def episodes_of(run: Run, prompt: Prompt, completions: Sequence[Completion]) -> list[list[Turn]]:
    """Return the turns of own completions.

    Raise `ContractError` if the replies do not repeat.
    """
    replay = EpisodeReplay(run, prompt, completions)
    if (found := replay.breach()) is not None:
        raise ContractError(
            f"the environment does not repeat itself: {found.what}",
            advice="tell the contract's author: echo-node contract test",
        )
    return replay.turns


def _rules_of(run: Run) -> TurnRules:
    if run.turn_rules is None:
        raise DefectError("an episode in a run without an environment")
    return run.turn_rules
