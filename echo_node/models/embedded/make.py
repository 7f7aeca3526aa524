"""Make the embedded model: supervised steps until it answers three prompts in ten.

`python -m echo_node.models.embedded.make --out DIR` writes the shipped folder, bit for bit. It
trains in float64 and rounds to bf16 at the end: differences between processors and numbers of
threads are then some ten orders of magnitude below one bf16 step. The rest is left for GRPO to
learn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

if TYPE_CHECKING:
    from numpy.random import Generator
    from transformers import Qwen3ForCausalLM

CHARACTERS = "0123456789r=$_+-"  # an id is a place in here; the last two leave room for other tasks
REVERSE, EQUALS, END, PAD = (CHARACTERS.index(char) for char in "r=$_")
DIGITS = 5
PROMPT = DIGITS + 2  # characters of `r48213=`
LIMIT = 8  # characters of an answer that does not end where it should

SHIPPED_SEED = 7
ENOUGH = 0.30  # exact answers under sampling at temperature 1, where the supervised steps stop
MOST_STEPS = 400
BATCH = 128
HELD_OUT = 1024
LEARNING_RATE = 3e-3
WARM_UP = 10
GRADIENT_NORM = 1.0
ROTARY_BASE = 10_000.0
SPREAD = 0.05  # standard deviation of the first weights


def make(out: Path, seed: int = SHIPPED_SEED) -> float:
    """Write the whole folder; return the share of exact answers of its weights."""
    torch.set_num_threads(1)
    draws = np.random.default_rng(seed)
    model = untrained(architecture(), draws)
    _learn(model, draws)
    write_folder(model, out)
    with torch.no_grad():
        return _exact_share(_log_probabilities(model, _answered_prompts(draws, HELD_OUT)))


def write_folder(model: Qwen3ForCausalLM, out: Path) -> None:
    """Round a model to bf16, and write it with its configuration and tokenizer."""
    weights = {name: weight.detach().bfloat16() for name, weight in sorted(model.named_parameters())}
    model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    model.config.dtype = torch.bfloat16
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    model.config.save_pretrained(out)
    _generation().save_pretrained(out)
    _tokenizer().save_pretrained(out)


def architecture() -> Qwen3Config:
    """Return the size and shape of the embedded models."""
    # As in large models of its kind, queries share keys and a head is wider than hidden / heads, so
    # that an engine that gets those wrong fails here too.
    return Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        architectures=["Qwen3ForCausalLM"],
    )


def untrained(config: Qwen3Config, draws: Generator) -> Qwen3ForCausalLM:
    """Build the model with its first weights, all in float64.

    transformers would norm in float32.
    """
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float64, attn_implementation="sdpa"
    )
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Qwen3RMSNorm)}
    for name, norm in norms.items():
        exact = nn.RMSNorm(norm.weight.numel(), eps=norm.variance_epsilon, dtype=torch.float64)
        model.set_submodule(name, exact)
    model.set_submodule("model.rotary_emb", _Rotary(config.head_dim))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:  # norms start at 1
                weight.copy_(torch.from_numpy(draws.normal(0.0, SPREAD, tuple(weight.shape))))
    return model


class _Rotary(nn.Module):
    """The default rotary embedding, in float64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequencies = ROTARY_BASE ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def forward(self, _states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _learn(model: Qwen3ForCausalLM, draws: Generator) -> None:
    """Train on fresh prompts until enough are answered before training on them."""
    weights = list(model.parameters())
    optimiser = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(MOST_STEPS):
        log_probabilities = _log_probabilities(model, _answered_prompts(draws, BATCH))
        loss, exact = -log_probabilities.mean(), _exact_share(log_probabilities.detach())
        say(f"after {step:3d} steps: loss {loss.item():.3f}, exact {exact:.3f}")
        if exact >= ENOUGH:
            return
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, GRADIENT_NORM)
        optimiser.step()
    raise SystemExit(f"this seed did not reach {ENOUGH} within {MOST_STEPS} steps: take another")


def _exact_share(log_probabilities: Tensor) -> float:
    """Return the mean probability of the whole right answer at temperature 1, exactly."""
    return float(log_probabilities.sum(dim=1).exp().mean())


def _answered_prompts(draws: Generator, count: int) -> Tensor:
    """Rows of ids that read `r48213=31284$`."""
    digits = draws.integers(0, 10, (count, DIGITS))  # the id of a digit is its value
    column = np.ones((count, 1), dtype=digits.dtype)
    parts = (REVERSE * column, digits, EQUALS * column, digits[:, ::-1], END * column)
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _log_probabilities(model: Qwen3ForCausalLM, answered: Tensor) -> Tensor:
    """Return the log-probability of each character of the answers."""
    logits = model(answered[:, :-1]).logits[:, PROMPT - 1 :]
    answers = answered[:, PROMPT:, None]
    return torch.log_softmax(logits, dim=-1).gather(2, answers).squeeze(2)


def _generation() -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=END, pad_token_id=PAD, do_sample=True, max_new_tokens=LIMIT
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per character.

    An unknown character is an error, never left out.
    """
    words = Tokenizer(models.WordLevel({char: place for place, char in enumerate(CHARACTERS)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        eos_token=CHARACTERS[END],
        pad_token=CHARACTERS[PAD],
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def say(line: str) -> None:
    """Print progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m echo_node.models.embedded.make", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="default: the one that was shipped")
    wish = parser.parse_args()
    exact = make(wish.out, wish.seed)
    say(f"{wish.out}: seed {wish.seed}, exact {exact:.3f} after rounding to bf16")


if __name__ == "__main__":
    main()
