"""A model as a distribution over token ids: the log-probability and the entropy at each sampled place.

It knows nothing of losses, optimisers or masters. It is a module of its own so that what shards a model can see where
a forward pass begins and ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from echo_node.trainer.packing import PackedRows


class Policy(nn.Module):
    """A model over the first `vocab_size` ids, at the samplers' temperature."""

    def __init__(self, model: Any, vocab_size: int, temperature: float, *, narrow: bool) -> None:
        super().__init__()
        self.body: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self._vocab_size = vocab_size or model.config.vocab_size
        self._temperature = temperature
        self._narrow = narrow  # matrices are multiplied in bf16; the softmax is in float32 all the same

    def forward(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """The log-probability of each sampled token, and the entropy at its place, both [B, T]."""
        with torch.autocast(packed.ids.device.type, torch.bfloat16, enabled=self._narrow):
            states: Tensor = self.body(
                input_ids=packed.ids,
                position_ids=packed.position_ids,
                attention_mask=packed.attention,
                use_cache=False,
            ).last_hidden_state
            # Only what predicts a sampled token goes through the vocabulary.
            logits: Tensor = self.head(states.flatten(0, 1)[packed.sources[packed.mask]])
        every = torch.log_softmax(logits[:, : self._vocab_size].float() / self._temperature, dim=-1)
        log_probs, entropies = every.new_zeros(packed.mask.shape), every.new_zeros(packed.mask.shape)
        log_probs[packed.mask] = every.gather(1, packed.targets[packed.mask][:, None]).squeeze(1)
        entropies[packed.mask] = -(every.exp() * every).sum(dim=-1)
        return log_probs, entropies

    def layers(self) -> list[nn.Module]:
        """The blocks that the body is a stack of: what can be recomputed, or sharded, one by one."""
        return [module for module in self.body.modules() if isinstance(module, GradientCheckpointingLayer)]


def open_model(folder: Path, device: torch.device, *, recompute: bool) -> Any:
    """The model of a folder, in float32, without dropout; with `recompute` it keeps only what enters each block."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model.to(device).eval()  # dropout would move π_θ away from μ
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # it recomputes only then; what is in it, and may drop, stays in eval
    return model


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
