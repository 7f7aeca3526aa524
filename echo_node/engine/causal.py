"""A transformers model as an engine needs it: ids in, the next token's logits out, keys and values kept between.

Any model that `AutoModelForCausalLM` builds, in float32. It comes from a folder's config.json alone: nothing is
unpickled, and no code of a model's own is ever run. It draws nothing and knows no limits of sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from echo_node.engine.base import Ids
from echo_node.engine.branches import Growth
from echo_node.engine.draws import Logits
from echo_node.errors import EngineError


class CausalModel:
    """The model on its device, with weights of no meaning until somebody copies them in."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise EngineError(f"the model of {folder} is quantised", advice="take its full-precision form")
        # None: whatever a config.json wishes, attention is transformers' own and no kernel from a hub.
        self._model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=None, trust_remote_code=False
        )
        self._model.to(device).eval().requires_grad_(requires_grad=False)
        self._config: PreTrainedConfig = self._model.config
        self._accepted = inspect.signature(self._model.forward).parameters.keys()
        if not {"attention_mask", "past_key_values"} <= self._accepted:
            raise EngineError(f"a {config.model_type} model keeps no keys and values that a batch can share")
        self.device = device
        self.weights: dict[str, Tensor] = dict(self._model.named_parameters())
        """By their Hugging Face names; tied ones have one name."""
        self.vocabulary = int(self._config.vocab_size)
        self.context: int | None = getattr(self._config, "max_position_embeddings", None)

    def cache(self) -> DynamicCache:
        """An empty store of keys and values."""
        return DynamicCache(config=self._config)

    def forward(self, ids: Ids, *, keep: int, **inputs: NDArray[Any] | DynamicCache | bool | None) -> Logits:
        """The logits of the last `keep` places, [rows, keep, vocabulary]."""
        # Some models take no positions and work them out from the mask.
        there = {name: self._there(value) for name, value in inputs.items() if name in self._accepted}
        if "logits_to_keep" in self._accepted:
            there["logits_to_keep"] = keep
        logits: Tensor = self._model(input_ids=self._there(ids), **there).logits
        array: Logits = logits[:, -keep:].float().cpu().numpy()
        return array

    def _there(self, value: Any) -> Any:
        return torch.from_numpy(value).to(self.device) if isinstance(value, np.ndarray) else value


class CausalBatch:
    """Rows that are decoded together: their keys and values, and what is padding in them.

    Prompts of unlike length are padded on the left. Padding is masked and counts no position, so that a row does
    not depend on its neighbours. Without padding the model knows both by itself, and faster.
    """

    def __init__(self, model: CausalModel, prompts: Sequence[Ids]) -> None:
        self._model = model
        self._cache = model.cache()
        self._lengths = np.array([prompt.size for prompt in prompts])
        width = int(self._lengths.max())
        self._ids = np.zeros((len(prompts), width), np.int64)
        for row, prompt in zip(self._ids, prompts, strict=True):
            row[width - prompt.size :] = prompt
        self._seen = np.arange(width) >= width - self._lengths[:, None]

    def prefill(self) -> Logits:
        """What follows each prompt."""
        return self._forward(self._ids, np.maximum(self._seen.cumsum(axis=1) - 1, 0))

    def decode(self, growth: Growth) -> Logits:
        """What follows each row that goes on, after one token more."""
        parents, tokens = growth
        if not np.array_equal(parents, np.arange(self._lengths.size)):
            places = torch.from_numpy(parents).to(self._model.device)
            self._cache.reorder_cache(places)  # type: ignore[arg-type]  # any tensor of int64 will do
            self._lengths, self._seen = self._lengths[parents], self._seen[parents]
        self._seen = np.pad(self._seen, ((0, 0), (0, 1)), constant_values=True)
        positions, self._lengths = self._lengths[:, None], self._lengths + 1
        return self._forward(tokens[:, None], positions)

    def _forward(self, ids: Ids, positions: Ids) -> Logits:
        padding = {} if self._seen.all() else {"attention_mask": self._seen, "position_ids": positions}
        logits = self._model.forward(ids, keep=1, past_key_values=self._cache, use_cache=True, **padding)
        last: Logits = logits[:, -1]
        return last
