"""The policy: log-probability and entropy of a model at each sampled token.

It is an `nn.Module` of its own so that FSDP can see where a forward pass begins and ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from echo_node.engine.attention_masks import tree_masks
from echo_node.models.families import check_family, read_config
from echo_node.trainer.output_head import OutputHead
from echo_node.trainer.tree_packing import PackedRows


class Policy(nn.Module):
    """A model over the first `vocab_size` ids, at the samplers' temperature."""

    def __init__(self, model: Any, vocab_size: int, temperature: float, *, narrow: bool) -> None:
        super().__init__()
        self.body: nn.Module = model.base_model
        self.head = OutputHead(model, vocab_size, temperature)
        self._config = model.config
        self._narrow = narrow  # matmuls in bf16; the softmax stays in float32

    def forward(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy at each sampled token, both [B, T]."""
        masks = tree_masks(self._config, packed.seen, packed.position_ids, torch.float32)
        with torch.autocast(packed.ids.device.type, torch.bfloat16, enabled=self._narrow):
            states: Tensor = self.body(
                input_ids=packed.ids,
                position_ids=packed.position_ids,
                attention_mask=masks,
                use_cache=False,
            ).last_hidden_state
            # Only positions that predict a sampled token go through the output head.
            found = self.head(states.flatten(0, 1)[packed.sources[packed.mask]], packed.targets[packed.mask])
        log_probs, entropies = (each.new_zeros(packed.mask.shape) for each in found)
        log_probs[packed.mask], entropies[packed.mask] = found
        return log_probs, entropies

    def layers(self) -> list[nn.Module]:
        """Return the blocks of the body: what can be recomputed, or sharded, one by one."""
        return [module for module in self.body.modules() if isinstance(module, GradientCheckpointingLayer)]


def open_model(folder: Path, device: torch.device, *, recompute: bool) -> Any:
    """Load the model of a folder, in float32, without dropout; refuse one of another family.

    With `recompute` only the inputs of each block are kept for the backward pass.
    """
    family = check_family(read_config(folder))
    # Whatever a config.json asks for, attention is transformers' own, no kernel from a hub.
    can_sdpa = getattr(transformers, family.architecture)._supports_sdpa  # noqa: SLF001 - no public name for it
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa" if can_sdpa else "eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model.to(device).eval()  # dropout would move π_θ away from μ
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # else it does not recompute; its dropout stays in eval
    return model


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
