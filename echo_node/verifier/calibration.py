"""Calibration of an engine class's tolerance from honest and forged completions.

An engine draws, a judge engine scores each completion once, and the result is a tolerance for the
manifest: a multiple of the worst honest evidence. Forged completions claim the judge's own
log-probabilities, so that only their tokens can give them away.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from echo_node.engine.base import Engine, Floats, Ids, SamplingLimits, SlotRequest
from echo_node.errors import ConfigError, ContractError, boundary
from echo_node.runs.tokenizer import Tokenizer
from echo_node.verifier.evidence import Evidence, evidence
from echo_node.verifier.replay_check import TEMPERATURES
from echo_node.verifier.tolerance import CONTRAST, GAP, Tolerance, few_gap_share
from protocol.digest import derive
from protocol.manifest import EngineTolerance
from protocol.sampling import uniforms

MARGIN: Final = 2.0
"""Multiple of the worst honest mean."""
TOKEN_MARGIN: Final = 3.0
"""Multiple of the worst honest token: single tokens have the longer tail."""
LEAST: Final = EngineTolerance(
    d_mean=1e-5, d_most=1e-3, engine="torch/f32", gap_most=2e-3, share=1.0, z_mean=1e-4, z_most=1e-2
)
"""Smallest tolerance, since other machines round differently from this one."""
WIDE_SHARE: Final = 0.25
"""Share of a batch that may come from a class wide enough to hide a cheat."""
EDITED: Final = 4 / 64
"""Share of tokens that the "edited" forger changes."""
LARGEST_GAP: Final = 1e3
"""Largest `gap_most` that a manifest can state."""
FARTHEST: Final = 1e6
"""Largest z that a manifest can state."""
_GROUP: Final = 4
"""Completions per slot."""
_LONGEST_PROMPT: Final = 256
"""Tokens of a prompt at most; its end is kept."""
_SHORTEST_PROMPT: Final = 8
"""Tokens of the context that are reserved for a prompt."""
_QUESTIONS: Final = ("Write about {}.", "Explain {} to a child.", "Tell me a short story about {}.")
_TOPICS: Final = (
    *(
        "the sea",
        "a lost key",
        "why bread rises",
        "the moon",
        "two brothers",
        "a train that is late",
        "winter",
    ),
    *("how to plant a tree", "the number seven", "an honest thief", "salt", "a letter never sent", "bees"),
    *("learning to swim", "the first telescope", "rain on a tin roof", "a chess game", "clocks", "old maps"),
)

Progress = Callable[[int, int], None]
"""Receives the number of completions done, and of all."""


@dataclass(frozen=True, slots=True)
class Task:
    """Slots to draw from one model, the same for every engine."""

    requests: tuple[SlotRequest, ...]
    limits: SamplingLimits
    prose: bool
    """Whether prompts are texts; otherwise random ids, for a model without a text tokenizer."""

    @classmethod
    def of(cls, folder: Path, *, completions: int, tokens: int, temperature: float) -> Task:
        """Make a task for a model folder; a short context means fewer tokens."""
        with boundary(ConfigError, f"reading {folder / 'config.json'}"):
            config = json.loads((folder / "config.json").read_text("utf-8"))
            vocabulary, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
            ends = config.get("eos_token_id")
            end_tokens = frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)
        room = min(tokens, context - _SHORTEST_PROMPT)
        if room < 1:
            raise ConfigError(
                f"a context of {context} tokens leaves no room for a completion",
                advice="use another model",
            )
        limits = SamplingLimits(room, temperature, end_tokens, vocabulary)
        longest = min(_LONGEST_PROMPT, context - room)
        starts = range(0, completions, _GROUP)
        texts = _texts(folder, len(starts), vocabulary)
        prompts = texts or list(_random_ids(len(starts), vocabulary, min(longest, 2 * _SHORTEST_PROMPT)))
        requests = tuple(
            SlotRequest(prompt[-longest:], _key("honest", start), min(_GROUP, completions - start), limits)
            for start, prompt in zip(starts, prompts, strict=True)
        )
        return cls(requests, limits, prose=bool(texts))


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A claimed completion; `logprobs=None` is the judge's own, as forgers claim."""

    prompt: Ids
    ids: Ids
    luck: Floats
    logprobs: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Honest and forged completions of one engine class."""

    engine_class: str
    honest: tuple[Claim, ...]
    forged: Mapping[str, tuple[Claim, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Calibrated tolerance of a class, with the evidence per completion."""

    tolerance: EngineTolerance
    honest: tuple[Evidence, ...]
    forged: Mapping[str, tuple[Evidence, ...]]
    refused: int
    """Honest completions refused by a tolerance from the other half; above 0: too few drawn."""

    @property
    def off(self) -> int:
        """Number of honest completions in which the judge would have drawn another token."""
        return sum(each.d_sum > 0 for each in self.honest)

    @property
    def caught(self) -> dict[str, float]:
        """Return the share of each forger's completions refused, each checked alone."""
        tolerance = Tolerance(self.tolerance)
        return {
            name: sum(tolerance.breach(each) is not None for each in found) / len(found)
            for name, found in self.forged.items()
        }


# Drawing


def draw(engine: Engine, task: Task, progress: Progress) -> Drawn:
    """Draw all slots honestly with a loaded engine, and forge a quarter of them."""
    some = task.requests[: math.ceil(len(task.requests) / 4)]
    warm = [tuple(_heated(each, factor) for each in some) for factor in TEMPERATURES]
    total = sum(each.group_size for each in itertools.chain(task.requests, *warm))
    done = itertools.count(1)

    def claims(requests: Sequence[SlotRequest]) -> tuple[Claim, ...]:
        found = {}
        for each in engine.generate(requests):
            request, drawn = requests[each.request], each.draw
            luck = uniforms(request.slot_key, each.completion, drawn.ids.size)
            found[each.request, each.completion] = Claim(request.prompt, drawn.ids, luck, drawn.logprobs)
            progress(next(done), total)
        return tuple(found[key] for key in sorted(found))

    honest = claims(task.requests)
    to_forge = honest[: sum(each.group_size for each in some)]
    forged = {
        "own luck": tuple(_reseeded(claim, n) for n, claim in enumerate(to_forge)),
        **{
            f"T×{factor:g}": tuple(replace(claim, logprobs=None) for claim in claims(requests))
            for factor, requests in zip(TEMPERATURES, warm, strict=True)
        },
        "edited": tuple(_edited(claim, n, task.limits.vocab_size) for n, claim in enumerate(to_forge)),
    }
    return Drawn(engine.engine_class, honest, forged)


def _heated(request: SlotRequest, factor: float) -> SlotRequest:
    limits = request.limits
    return replace(request, limits=replace(limits, temperature=factor * limits.temperature))


def _reseeded(claim: Claim, number: int) -> Claim:
    """Claim other uniforms than were drawn with: best-of-n, copies, no seed."""
    return replace(claim, luck=uniforms(_key("own", number), 0, claim.ids.size), logprobs=None)


def _edited(claim: Claim, number: int, vocabulary: int) -> Claim:
    rng = np.random.default_rng(number)
    edited = rng.choice(claim.ids.size, max(1, round(EDITED * claim.ids.size)), replace=False)
    ids = claim.ids.copy()
    ids[edited] = (ids[edited] + rng.integers(1, vocabulary, edited.size)) % vocabulary
    return replace(claim, ids=ids, logprobs=None)


# Scoring


def calibrate(judge: Engine, drawn: Drawn, limits: SamplingLimits, progress: Progress) -> Calibration:
    """Score all claims with a judge of the same weights; propose a tolerance."""
    total = len(drawn.honest) + sum(map(len, drawn.forged.values()))
    done = itertools.count(1)

    def score(claims: Sequence[Claim], *, wide: bool) -> tuple[Evidence, ...]:
        found = []
        for claim in claims:
            found.append(_score(judge, claim, limits, wide=wide))
            progress(next(done), total)
        return tuple(found)

    honest = score(drawn.honest, wide=False)
    tolerance = propose(drawn.engine_class, honest)
    wide = Tolerance(tolerance).wide
    if wide:  # then temperatures are contrasted too, and that must not refuse the honest either
        total += len(honest)
        honest = score(drawn.honest, wide=True)
        tolerance = propose(drawn.engine_class, honest)
    forged = {name: score(claims, wide=wide) for name, claims in drawn.forged.items()}
    return Calibration(tolerance, honest, forged, _refused(drawn.engine_class, honest))


def propose(engine_class: str, honest: Sequence[Evidence]) -> EngineTolerance:
    """Return a tolerance with margin that this evidence does not breach.

    That holds for each piece of evidence, and for its sum.
    """
    together = sum(honest, Evidence())
    d_mean = z_mean = gap_most = 0.0
    for each in (*honest, together):
        scale = Tolerance.scale(max(1, each.tokens))
        d_mean = max(
            d_mean, each.d_mean / scale, each.gap_mean / scale / GAP, each.contrast / scale / CONTRAST
        )
        z_mean = max(z_mean, each.z_mean / scale)
        gap_most = max(
            gap_most,
            TOKEN_MARGIN * each.gap_most,
            MARGIN * few_gap_share(each.ends),
            MARGIN * few_gap_share(each.rare),
        )
    d_mean = round_up(max(LEAST.d_mean, min(1.0, MARGIN * d_mean)))
    tolerance = EngineTolerance(
        d_mean=d_mean,
        d_most=round_up(max(LEAST.d_most, min(1.0, TOKEN_MARGIN * together.d_most))),
        engine=engine_class,
        gap_most=round_up(max(LEAST.gap_most, min(LARGEST_GAP, gap_most))),
        share=1.0,
        z_mean=round_up(max(LEAST.z_mean, min(FARTHEST, MARGIN * z_mean))),
        z_most=round_up(max(LEAST.z_most, min(FARTHEST, TOKEN_MARGIN * together.z_most))),
    )
    return replace(tolerance, share=WIDE_SHARE) if Tolerance(tolerance).wide else tolerance


def _score(judge: Engine, claim: Claim, limits: SamplingLimits, *, wide: bool) -> Evidence:
    scores = judge.score(claim.prompt, claim.ids, limits)
    temperatures = [factor * limits.temperature for factor in TEMPERATURES] if wide else []
    others = tuple(
        judge.score(claim.prompt, claim.ids, replace(limits, temperature=each)) for each in temperatures
    )
    claimed = scores.logprobs if claim.logprobs is None else claim.logprobs
    is_end = np.isin(claim.ids, np.array(sorted(limits.end_tokens), np.int64))
    return evidence(scores, claim.luck, claimed, is_end, others)


def _refused(engine_class: str, honest: Sequence[Evidence]) -> int:
    halves = honest[::2], honest[1::2]
    return sum(
        Tolerance(propose(engine_class, mine)).breach(each) is not None
        for mine, others in (halves, halves[::-1])
        if mine
        for each in others
    )


def round_up(value: float) -> float:
    """Round up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / step - 1e-6) * step:.2g}")


# Prompts


def _texts(folder: Path, count: int, vocabulary: int) -> list[Ids]:
    """Return `count` text prompts, or none if the tokenizer cannot encode them."""
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer.from_folder(folder)
    texts = [question.format(topic) for question in _QUESTIONS for topic in _TOPICS]
    found = []
    for text in itertools.islice(itertools.cycle(texts), count):
        try:
            ids = tokenizer.encode(
                tokenizer.render([{"role": "user", "content": text}]) if tokenizer.has_template else text
            )
        except ContractError:
            return []
        if not ids.size or ids.max() >= vocabulary:
            return []
        found.append(ids)
    return found


def _random_ids(count: int, vocabulary: int, length: int) -> Iterator[Ids]:
    rng = np.random.default_rng(0)
    return (rng.integers(0, vocabulary, length, dtype=np.int64) for _ in range(count))


def _key(name: str, number: int) -> bytes:
    return derive("calibration", name.encode().ljust(8), number.to_bytes(8))
