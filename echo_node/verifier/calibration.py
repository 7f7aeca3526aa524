"""How far honest draws of an engine class lie from a judge's prefill, on this machine and model, and how far forged ones.

Engines draw, the judge looks at each completion once, and a tolerance for the manifest comes out: so many times the worst
that honesty gave. Forgers tell the judge's own log-probabilities, so that only their tokens can give them away.
It knows no run, no peer and no picture.
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
from echo_node.text import Tokenizer
from echo_node.verifier.bands import CONTRAST, GAP, Bands
from echo_node.verifier.evidence import Evidence, evidence
from echo_node.verifier.judging import TEMPERATURES
from protocol.digest import derive
from protocol.manifest import EngineTolerance
from protocol.sampling import uniforms

MARGIN: Final = 2.0
"""Times the worst mean that was seen."""
TOKEN_MARGIN: Final = 3.0
"""Times the worst token: single ones have the longer tail."""
LEAST: Final = EngineTolerance(
    d_mean=1e-5, d_most=1e-3, engine="torch/f32", share=1.0, z_mean=1e-4, z_most=1e-2
)
"""No band is narrower, since other machines round otherwise than this one."""
WIDE_SHARE: Final = 0.25
"""Of a batch that may come from a class in which a cheat could hide."""
EDITED: Final = 4 / 64
"""The share of tokens that the editor changes."""
_FARTHEST: Final = 1e6
"""The widest z that a manifest can say."""
_GROUP: Final = 4
_LONGEST_PROMPT: Final = 256
_SHORTEST_PROMPT: Final = 8
_ASKING: Final = ("Write about {}.", "Explain {} to a child.", "Tell me a short story about {}.")
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

Watch = Callable[[int, int], None]
"""Is told how many completions of how many are done."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is drawn: slots of one model, the same ones for every engine."""

    requests: tuple[SlotRequest, ...]
    limits: SamplingLimits
    prose: bool
    """Whether prompts are texts; else they are random ids, since the model reads no texts or has no tokenizer."""

    @classmethod
    def of(cls, folder: Path, *, completions: int, tokens: int, temperature: float) -> Task:
        """So many completions of at most so many tokens, fewer where the model's context is short."""
        with boundary(ConfigError, f"reading {folder / 'config.json'}"):
            config = json.loads((folder / "config.json").read_text("utf-8"))
            vocabulary, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
            ends = config.get("eos_token_id")
            end_tokens = frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)
        room = min(tokens, context - _SHORTEST_PROMPT)
        if room < 1:
            raise ConfigError(
                f"a context of {context} ids leaves nothing to draw", advice="take another model"
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
    """A completion as somebody says that it was drawn. A forger's log-probabilities are whatever the judge's are."""

    prompt: Ids
    ids: Ids
    luck: Floats
    logprobs: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What an engine of a class has drawn, honestly and otherwise."""

    engine_class: str
    honest: tuple[Claim, ...]
    forged: Mapping[str, tuple[Claim, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """What was found for a class. Evidence is per completion."""

    tolerance: EngineTolerance
    honest: tuple[Evidence, ...]
    forged: Mapping[str, tuple[Evidence, ...]]
    refused: int
    """Honest completions that a tolerance from the other half of them refuses: more than 0 means too few were drawn."""

    @property
    def off(self) -> int:
        """Honest completions in which the judge would have drawn otherwise at all."""
        return sum(each.d_sum > 0 for each in self.honest)

    @property
    def caught(self) -> dict[str, float]:
        """The share of each forger's completions that the tolerance refuses, each looked at alone."""
        bands = Bands(self.tolerance)
        return {
            name: sum(bands.breach(each) is not None for each in found) / len(found)
            for name, found in self.forged.items()
        }


# The engine's side


def draw(engine: Engine, task: Task, watch: Watch) -> Drawn:
    """Let an engine with its weights draw the slots; forgers do with a quarter of them."""
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
            watch(next(done), total)
        return tuple(found[place] for place in sorted(found))

    honest = claims(task.requests)
    to_forge = honest[: sum(each.group_size for each in some)]
    forged = {
        "own luck": tuple(_lucky(claim, n) for n, claim in enumerate(to_forge)),
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


def _lucky(claim: Claim, number: int) -> Claim:
    """Drawn by the right model at the right temperature, but not by this slot's luck: best-of-n, copies, no seed."""
    return replace(claim, luck=uniforms(_key("own", number), 0, claim.ids.size), logprobs=None)


def _edited(claim: Claim, number: int, vocabulary: int) -> Claim:
    luck = np.random.default_rng(number)
    places = luck.choice(claim.ids.size, max(1, round(EDITED * claim.ids.size)), replace=False)
    ids = claim.ids.copy()
    ids[places] = (ids[places] + luck.integers(1, vocabulary, places.size)) % vocabulary
    return replace(claim, ids=ids, logprobs=None)


# The judge's side


def calibrate(judge: Engine, drawn: Drawn, limits: SamplingLimits, watch: Watch) -> Calibration:
    """Look at everything that an engine has drawn, with a judge that holds the same weights."""
    total = len(drawn.honest) + sum(map(len, drawn.forged.values()))
    done = itertools.count(1)

    def look(claims: Sequence[Claim], *, wide: bool) -> tuple[Evidence, ...]:
        found = []
        for claim in claims:
            found.append(_look(judge, claim, limits, wide=wide))
            watch(next(done), total)
        return tuple(found)

    honest = look(drawn.honest, wide=False)
    tolerance = propose(drawn.engine_class, honest)
    wide = Bands(tolerance).wide
    if wide:  # then temperatures are contrasted too, and that must not refuse the honest either
        total += len(honest)
        honest = look(drawn.honest, wide=True)
        tolerance = propose(drawn.engine_class, honest)
    forged = {name: look(claims, wide=wide) for name, claims in drawn.forged.items()}
    return Calibration(tolerance, honest, forged, _refused(drawn.engine_class, honest))


def propose(engine_class: str, honest: Sequence[Evidence]) -> EngineTolerance:
    """A tolerance that none of this evidence breaches, one by one or together, by the margins above."""
    together = sum(honest, Evidence())
    d_mean = z_mean = 0.0
    for each in (*honest, together):
        part = Bands.part(max(1, each.tokens))
        d_mean = max(d_mean, each.d_mean / part, each.gap_mean / part / GAP, each.contrast / part / CONTRAST)
        z_mean = max(z_mean, each.z_mean / part)
    d_mean = _up(max(LEAST.d_mean, min(1.0, MARGIN * d_mean)))
    told = EngineTolerance(
        d_mean=d_mean,
        d_most=_up(max(LEAST.d_most, min(1.0, TOKEN_MARGIN * together.d_most))),
        engine=engine_class,
        share=1.0,
        z_mean=_up(max(LEAST.z_mean, min(_FARTHEST, MARGIN * z_mean))),
        z_most=_up(max(LEAST.z_most, min(_FARTHEST, TOKEN_MARGIN * together.z_most))),
    )
    return replace(told, share=WIDE_SHARE) if Bands(told).wide else told


def _look(judge: Engine, claim: Claim, limits: SamplingLimits, *, wide: bool) -> Evidence:
    scores = judge.score(claim.prompt, claim.ids, limits)
    temperatures = [factor * limits.temperature for factor in TEMPERATURES] if wide else []
    others = tuple(
        judge.score(claim.prompt, claim.ids, replace(limits, temperature=each)) for each in temperatures
    )
    return evidence(scores, claim.luck, scores.logprobs if claim.logprobs is None else claim.logprobs, others)


def _refused(engine_class: str, honest: Sequence[Evidence]) -> int:
    halves = honest[::2], honest[1::2]
    return sum(
        Bands(propose(engine_class, mine)).breach(each) is not None
        for mine, others in (halves, halves[::-1])
        if mine
        for each in others
    )


def _up(value: float) -> float:
    """Rounded up to two digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / step - 1e-6) * step:.2g}")


# Prompts


def _texts(folder: Path, count: int, vocabulary: int) -> list[Ids]:
    """So many prompts that people could have written; none if the model's tokenizer has no words for them."""
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer.from_folder(folder)
    asked = [asking.format(topic) for asking in _ASKING for topic in _TOPICS]
    found = []
    for text in itertools.islice(itertools.cycle(asked), count):
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
    luck = np.random.default_rng(0)
    return (luck.integers(0, vocabulary, length, dtype=np.int64) for _ in range(count))


def _key(name: str, number: int) -> bytes:
    return derive("calibration", name.encode().ljust(8), number.to_bytes(8))
