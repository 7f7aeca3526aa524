"""A sampler's engine that cheats, in the ways of the forger suite that hurt a learner most.

The node around it is a real one and suspects nothing: groups have the slot's prompt, a right
reward, a proper end and a valid seal, so that every cheap check lets them pass. Only the slot's
luck and the log-probabilities tell. It knows the contract, since whoever wants to do harm does; it
knows neither network nor trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.forgers_weights import noised
from echo_node.engine.base import (
    Claim,
    Draw,
    Finished,
    Floats,
    Respond,
    SlotRequest,
    Span,
    Update,
    generate_groups,
    never,
    no_environment,
    no_news,
)
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.runs.run import Run, read_model

Group = Sequence[Draw]
BEYOND_CLIP: Final = 3.0
"""Offset of claimed log-probabilities of right answers: outside the clip."""
BELOW_DUAL_CLIP: Final = float(np.log(2.5))
"""Offset for tokens to be unlearnt: weight 2.5, within the dual clip."""
TRIES: Final = 4
HEAT: Final = 1.2
NOISE: Final = 0.3


class ForgingEngine(LocalEngine):
    """An engine of a cheat."""

    forged: dict[bytes, str]
    """The slots that were forged, by their keys, and how."""


class CheatingEngine(ForgingEngine):
    """Engine that is honest for `honest_groups` groups, then cheats in turn."""

    def __init__(self, run: Run, *, rows: int, honest_groups: int = 0) -> None:
        super().__init__(_decoder(run), rows=rows)
        self.run = run
        self._honest_left = honest_groups
        self._calls = 0
        self._other: LocalEngine | None = None
        self.forged = {}

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Completions as they were asked for, or others in their place."""
        asked = list(requests)
        if self._honest_left > 0:
            self._honest_left -= len(asked)
            yield from super().generate(asked, stop=stop, news=news, respond=respond)
            return
        name, forge = TURNS[self._calls % len(TURNS)]
        self._calls += 1
        groups = forge(self, asked)
        self.forged |= {request.slot_key: name for request in asked}
        for place, draws in enumerate(groups):
            for number, draw in enumerate(draws):
                yield Finished(place, number, draw)

    def honest(self, requests: Sequence[SlotRequest]) -> Sequence[Group]:
        """Return the honest replies to these requests."""
        groups: list[dict[int, Draw]] = [{} for _ in requests]
        for finished in super().generate(requests):
            groups[finished.request][finished.completion] = finished.draw
        return [[draws[place] for place in sorted(draws)] for draws in groups]

    def other(self) -> LocalEngine:
        """Return an engine with another model."""
        if self._other is None:
            self._other = LocalEngine(_decoder(self.run), rows=self._rows)
            self._other.load(bytes(32), noised(read_model(self.run.folder), NOISE))
        return self._other

    def worth(self, request: SlotRequest, draws: Sequence[Draw]) -> list[float]:
        prompt, _ = self.run.prompt(request.slot_key)
        return [score.value for score in self.run.scores(prompt, [draw.ids for draw in draws])]

    def close(self) -> None:
        """Give everything back."""
        if self._other is not None:
            self._other.close()
        super().close()


def typed_in(cheat: CheatingEngine, requests: Sequence[SlotRequest]) -> Sequence[Group]:
    """Send made-up texts, half of them right, half wrong in one digit.

    Log-probabilities are made up so that right texts teach nothing, and of the wrong ones all right
    digits are unlearnt and the wrong one is not.
    """
    limits = cheat.run.limits
    digits = [int(token) for token in cheat.run.tokenizer.encode("0123456789")]
    texts: list[tuple[list[int], int | None]] = []
    for request in requests:
        prompt, _ = cheat.run.prompt(request.slot_key)
        answer = cheat.run.tokenizer.encode(cheat.run.contract.answer(prompt)).tolist()
        right = [*answer, min(limits.end_tokens)][: limits.max_tokens]
        for number in range(request.group_size):
            place = None if number % 2 else len(answer) - 1 - number // 2 % 2
            text = list(right)
            if place is not None:
                text[place] = digits[(digits.index(text[place]) + 1 + number) % len(digits)]
            texts.append((text, place))
    prompts = [request.prompt for request in requests for _ in range(request.group_size)]
    claims = [Claim(prompt, np.array(text)) for prompt, (text, _) in zip(prompts, texts, strict=True)]
    draws = []
    for claim, (_, wrong), scores in zip(claims, texts, cheat.score_many(claims, limits), strict=True):
        claimed = scores.logprobs - (BEYOND_CLIP if wrong is None else BELOW_DUAL_CLIP)
        if wrong is not None:
            claimed[wrong] = scores.logprobs[wrong] + 0.5  # a ratio below the clip
        draws.append(_draw(cheat, claim.ids, claimed))
    size = requests[0].group_size
    return [draws[start : start + size] for start in range(0, len(draws), size)]


def made_up_logprobs(cheat: CheatingEngine, requests: Sequence[SlotRequest]) -> Sequence[Group]:
    """Send honest texts with log-probabilities that mute right ones and boost wrong ones."""
    groups = []
    for request, draws in zip(requests, cheat.honest(requests), strict=True):
        worth = cheat.worth(request, draws)
        groups.append(
            [
                _draw(cheat, draw.ids, draw.logprobs - (BEYOND_CLIP if value > 0 else BELOW_DUAL_CLIP))
                for draw, value in zip(draws, worth, strict=True)
            ]
        )
    return groups


def worst_of_several(cheat: CheatingEngine, requests: Sequence[SlotRequest]) -> Sequence[Group]:
    """Send the worst of several own draws, except for the first, to keep a spread."""
    tries = [
        cheat.honest([dataclasses.replace(each, slot_key=_other_key(each, number)) for each in requests])
        for number in range(TRIES)
    ]
    groups = []
    for place, request in enumerate(requests):
        rows = list(zip(*(attempt[place] for attempt in tries), strict=True))
        worst = [
            min(zip(cheat.worth(request, row), row, strict=True), key=lambda one: one[0])[1] for row in rows
        ]
        groups.append([rows[0][0], *worst[1:]])
    return groups


def too_hot(cheat: CheatingEngine, requests: Sequence[SlotRequest]) -> Sequence[Group]:
    """Sample with the slot's own draws at another temperature."""
    limits = dataclasses.replace(cheat.run.limits, temperature=HEAT * cheat.run.limits.temperature)
    return cheat.honest([dataclasses.replace(each, limits=limits) for each in requests])


def other_weights(cheat: CheatingEngine, requests: Sequence[SlotRequest]) -> Sequence[Group]:
    """Sample with the slot's own draws from an unpublished model."""
    return [
        [_draw(cheat, draw.ids, draw.logprobs) for draw in draws]
        for draws in generate_groups(cheat.other(), requests)
    ]


Way = Callable[[CheatingEngine, Sequence[SlotRequest]], Sequence[Group]]
TURNS: Final[tuple[tuple[str, Way], ...]] = (
    ("typed in", typed_in),
    ("made-up log-probabilities", made_up_logprobs),
    ("typed in", typed_in),
    ("temperature 1.2", too_hot),
    ("typed in", typed_in),
    ("other weights", other_weights),
    ("typed in", typed_in),
    ("worst of 4", worst_of_several),
)
"""Attack per call: the most harmful one every other time."""


def _draw(cheat: CheatingEngine, ids: np.ndarray, logprobs: Floats) -> Draw:
    ends = int(ids[-1]) in cheat.run.limits.end_tokens
    head = cheat.loaded or bytes(32)
    return Draw(ids, np.minimum(logprobs, 0.0), "end" if ends else "length", (Span(0, head),))


def _other_key(request: SlotRequest, number: int) -> bytes:
    return bytes(each ^ (number + 1) for each in request.slot_key)


def _decoder(run: Run) -> TorchDecoder:
    return TorchDecoder(run.folder, device="cpu", dtype="f32", threads=1)
