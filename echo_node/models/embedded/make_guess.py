"""Make the second embedded model, which guesses numbers near chance level.

`python -m echo_node.models.embedded.make_guess --out DIR` writes the shipped folder. The model has
the size and the characters of the first one (`make`), and learns the form of `guess-number`: one
digit and the end token, then the environment's sign. Its teacher heeds the signs in one guess of
two; the rest is left for GRPO to learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor, nn

from echo_node.models.embedded import make

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray
    from transformers import Qwen3ForCausalLM

HIGHER, LOWER = (make.CHARACTERS.index(char) for char in "+-")
GUESSES: Final = 4
LENGTH: Final = make.DIGITS + 1 + 3 * GUESSES - 1
"""Tokens of the longest episode: the name of the game, `=`, and guesses with a sign between two."""
HEEDED: Final = 1 / 2
"""Share of the teacher's guesses that fit what the signs said; the others are any digit."""
SHIPPED_SEED: Final = 11
STEPS: Final = 160


def make_guess(out: Path, seed: int = SHIPPED_SEED) -> float:
    """Write the whole folder, and return the last loss per token."""
    torch.set_num_threads(1)
    draws = np.random.default_rng(seed)
    model = make.untrained(make.architecture(), draws)
    loss = _learn(model, draws)
    make.write_folder(model, out)
    return loss


def _learn(model: Qwen3ForCausalLM, draws: Generator) -> float:
    weights = list(model.parameters())
    optimiser = torch.optim.AdamW(weights, lr=make.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(STEPS):
        ids, mask = _episodes(draws, make.BATCH)
        logits = model(ids[:, :-1]).logits
        log_probs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(log_probs * mask[:, 1:]).sum() / mask[:, 1:].sum()
        if step % 20 == 0:
            make.say(f"after {step:3d} steps: loss {loss.item():.3f}")
        optimiser.param_groups[0]["lr"] = make.LEARNING_RATE * min(1.0, (step + 1) / make.WARM_UP)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, make.GRADIENT_NORM)
        optimiser.step()
    return float(loss.detach())


def _episodes(draws: Generator, count: int) -> tuple[Tensor, Tensor]:
    """Return rows of ids, padded, and which of them the model is to write."""
    ids = np.full((count, LENGTH), make.PAD)
    mask = np.zeros((count, LENGTH))
    for row, written in zip(ids, mask, strict=True):
        _play(draws, row, written)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _play(draws: Generator, row: NDArray[np.int64], written: NDArray[np.float64]) -> None:
    number, low, high, at = int(draws.integers(10)), 0, 9, make.DIGITS + 1
    row[: make.DIGITS] = draws.integers(0, 10, make.DIGITS)
    row[make.DIGITS] = make.EQUALS
    for turn in range(GUESSES):
        heeds = draws.random() < HEEDED
        guess = int(draws.integers(low, high + 1)) if heeds else int(draws.integers(10))
        row[at : at + 2] = guess, make.END
        written[at : at + 2] = 1.0
        if guess == number or turn + 1 == GUESSES:
            return
        row[at + 2] = HIGHER if guess < number else LOWER
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        at += 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m echo_node.models.embedded.make_guess", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="default: the one that was shipped")
    wish = parser.parse_args()
    loss = make_guess(wish.out, wish.seed)
    make.say(f"{wish.out}: seed {wish.seed}, loss {loss:.3f}")


if __name__ == "__main__":
    main()
