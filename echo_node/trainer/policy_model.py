"""The policy: log-probability and entropy of a model at each sampled token.

It is an `nn.Module` of its own so that FSDP can see where a forward pass begins and ends.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from echo_node.engine.lora_linear import LoraLayers, adapt_model
from echo_node.errors import ConfigError
from echo_node.models.adapter import map_weights, read_adapter
from echo_node.models.families import check_family, read_config
from echo_node.trainer.layer_upcast import LayerUpcast
from echo_node.trainer.output_head import OutputHead
from echo_node.trainer.tree_attention import TREE, tree_masks
from echo_node.trainer.tree_packing import PackedRows


class Policy(nn.Module):
    """A model over the first `vocab_size` ids, at the samplers' temperature."""

    def __init__(self, model: Any, vocab_size: int, temperature: float, *, narrow: bool) -> None:
        super().__init__()
        self.body: nn.Module = model.base_model
        self.head = OutputHead(model, vocab_size, temperature)
        self._config = model.config
        self._narrow = narrow  # matmuls in bf16; the softmax stays in float32
        self._upcast: LayerUpcast | None = None

    def upcast_layers(self) -> None:
        """Compute in float32 with weights that are bf16; see `LayerUpcast`."""
        self._upcast = LayerUpcast(self, but=(nn.Linear,) if self._narrow else ())

    def forward(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy at each sampled token, both [B, T]."""
        masks = tree_masks(self._config, packed.ends, packed.position_ids)
        saving = nullcontext() if self._upcast is None else self._upcast.saving_bf16()
        with saving, torch.autocast(packed.ids.device.type, torch.bfloat16, enabled=self._narrow):
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
    """Load a folder's model in float32, without dropout; refuse other families.

    The base of an adapter, which is not trained, is bf16. With `recompute` only the inputs of each
    block are kept for the backward pass.
    """
    check_family(read_config(folder))
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32 if read_adapter(folder) is None else torch.bfloat16,
        attn_implementation=TREE,  # whatever a config.json asks for: no kernel from a hub
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


@torch.no_grad()
def open_adapter(model: Any, folder: Path) -> LoraLayers | None:
    """Put a folder's adapter into its model, with float32 values.

    Return None if it has none.
    """
    layers = adapt_model(model, folder, torch.float32)
    if layers is None:
        return None
    found = map_weights(folder)
    if found.keys() != layers.weights.keys():
        extra = min(found.keys() ^ layers.weights.keys())
        raise ConfigError(
            f"the adapter in {folder} is of another base or has other targets: {extra} is in only one of the two",
            advice="make the run's folder again",
        )
    for name, weight in layers.weights.items():
        bits = torch.frombuffer(bytearray(found[name].data), dtype=torch.bfloat16)
        if not bits.isfinite().all():
            raise ConfigError(
                f"{name} of the adapter holds a value that is infinite or not a number",
                advice="make the run's folder again",
            )
        weight.copy_(bits.view(weight.shape))
    return layers


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
