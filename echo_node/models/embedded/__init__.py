"""The embedded model: small enough to ship and to train within a minute.

It reverses five digits: `r48213=` is answered `31284$`, where `$` ends an answer. `make` is the
script that made it. A second one of the same size guesses numbers, turn by turn (`make_guess`).
Importing this package imports no torch.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Return the embedded model's folder: configuration, tokenizer, weights."""
    return Path(__file__).resolve().parent / "model"


def guess_folder() -> Path:
    """Return the folder of the model that guesses numbers."""
    return Path(__file__).resolve().parent / "guess"
