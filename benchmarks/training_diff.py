"""One real training step as two bf16 states, before and after; made once.

The model has about 100 M parameters, drawn at random; AdamW at 1e-6 updates masters in float32, and
what is compared are their casts to bf16, as a trainer publishes them. The files lie under `build/`;
where they are missing, making them takes one to five minutes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"
LEARNING_RATE = 1e-6
WARM_STEPS = 5
"""Steps before the measured one: AdamW's first moves every weight."""
SEQUENCES, TOKENS = 4, 64
VOCABULARY = 16_384
Patterns = NDArray[np.uint16]


@dataclasses.dataclass(frozen=True)
class TrainingDiff:
    """Flat 16-bit states before and after one step, and the row width per tensor."""

    before: Patterns
    after: Patterns
    tensors: list[tuple[int, int]]
    """Elements, and elements of one row, tensor by tensor."""

    @property
    def share(self) -> float:
        """Which share of the weights the step changed."""
        return int((self.before != self.after).sum()) / self.before.size

    def thinned(self, share: float) -> TrainingDiff:
        """Return the same step with only this share of all weights changed."""
        changed = np.flatnonzero(self.before != self.after)
        wanted = round(share * self.before.size)
        assert wanted <= changed.size, f"the step changed only {self.share:.2%} of the weights"
        kept = np.random.default_rng(5).choice(changed, wanted, replace=False)
        after = self.before.copy()
        after[kept] = self.after[kept]
        return dataclasses.replace(self, after=after)


def training_diff() -> TrainingDiff:
    """Return the step, from its files or made now."""
    before, after, tensors = (
        FOLDER / f"training_diff_{name}" for name in ("before.npy", "after.npy", "tensors.json")
    )
    if not tensors.exists():
        print("making a training step of 100 M parameters, once")
        made = _train()
        FOLDER.mkdir(parents=True, exist_ok=True)
        np.save(before, made.before)
        np.save(after, made.after)
        tensors.write_text(json.dumps(made.tensors))  # last: it says that all is there
    return TrainingDiff(np.load(before), np.load(after), json.loads(tensors.read_text()))


def _train() -> TrainingDiff:
    # Imported here: whoever has the files needs no torch.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(5)
    shape = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = transformers.Qwen3ForCausalLM(shape).float()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    masters = dict(sorted(model.named_parameters()))

    def cast() -> Patterns:
        patterns = (each.detach().to(torch.bfloat16).view(torch.uint16) for each in masters.values())
        return np.concatenate([pattern.numpy().reshape(-1) for pattern in patterns])

    for _ in range(WARM_STEPS):
        step()
    before = cast()
    step()
    return TrainingDiff(before, cast(), [(each.numel(), each.shape[-1]) for each in masters.values()])
