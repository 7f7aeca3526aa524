"""The model that comes with the program: small enough to ship, to train within a minute, and to learn visibly.

It reverses five digits: `r48213=` is answered `31284$`, where `$` ends an answer. `make` is the script that
made it. This room knows nothing of runs, engines or peers, and importing it imports no torch.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The Hugging Face folder of the embedded model: configuration, tokenizer and weights."""
    return Path(__file__).resolve().parent / "model"
