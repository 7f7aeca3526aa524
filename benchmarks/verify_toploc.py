"""TOPLOC (PyPI `toploc`) beside seed replay: what its proof takes, and what it says nothing of.

It commits to the largest activations of a prefill. So it tells another model or type of weights,
and nothing of how a token was chosen from the model's logits. Where its package can be imported,
its own code makes the proof that is counted.
"""

from __future__ import annotations

import importlib
from typing import Final

_TOKENS: Final = 64
_HIDDEN: Final = 576
_BATCH, _TOP = 32, 128
_FORMAT: Final = (2 + 2 * _TOP) / _BATCH
"""Bytes of a proof by its format: a modulus and 128 two-byte coefficients per 32 tokens."""
BLIND: Final = (
    *("own luck", "best of 8", "greedy", "temperature 0.8", "temperature 1.2", "top-p 0.9", "edited"),
    *("written elsewhere", "copied", "replayed", "wrong prompt", "false reward", "luckier version"),
    *("inflated length", "wrong finish", "made-up log-probabilities", "log-probabilities of zero"),
)
"""Forgers that activations cannot expose: the right model prefilled the tokens they claim."""


def toploc() -> dict[str, object]:
    """Bytes of proof a token, and the forgers that it does not catch by itself."""
    try:
        proof = _proof_bytes()
    except (ImportError, OSError) as error:
        return {"bytes_per_token": round(_FORMAT, 2), "run": f"no: {error}"[:200], "does_not_catch": BLIND}
    return {"bytes_per_token": round(proof / _TOKENS, 2), "run": "yes", "does_not_catch": BLIND}


def _proof_bytes() -> int:
    """Return the bytes of a completion's proofs, made by the package itself."""
    torch, package = importlib.import_module("torch"), importlib.import_module("toploc")
    luck = torch.Generator().manual_seed(0)
    rows = torch.randn(_TOKENS, _HIDDEN, generator=luck, dtype=torch.float32).to(torch.bfloat16)
    proofs = package.build_proofs_bytes(
        [rows[:1], *rows[1:]], decode_batching_size=_BATCH, topk=_TOP, skip_prefill=False
    )
    return sum(map(len, proofs))
