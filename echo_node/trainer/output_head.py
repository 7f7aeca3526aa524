"""Log-probability and entropy through a model's own output head, in pieces.

The head is the model's own `forward`, with its body replaced by one that returns the hidden states
it is given: whatever a family does after its last layer (scaling, soft caps) is done here too.
Logits of a few tokens exist at a time; going backward they are computed again, so that memory grows
with tokens × hidden size, not with tokens × vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from echo_node.errors import DefectError

PIECE: Final = 2**24
"""Logits that exist at a time: 64 MB in float32, several times that with what follows from them."""


class OutputHead(nn.Module):
    """What a model does after its last layer, over the first `vocab_size` ids."""

    def __init__(self, model: Any, vocab_size: int, temperature: float) -> None:
        super().__init__()
        self.own: Any = _without_body(model)
        self._vocab_size = vocab_size or model.config.vocab_size
        self._temperature = temperature
        self.piece = max(1, PIECE // int(model.config.vocab_size))
        """Tokens whose logits exist at a time."""

    def forward(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy, [N], of targets [N] after hidden states [N, H]."""
        if len(states) <= self.piece:
            return self._measure(states, targets)
        parts = [
            checkpoint(self._measure, *part, use_reentrant=False)
            for part in zip(torch.split(states, self.piece), torch.split(targets, self.piece), strict=True)
        ]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    def _measure(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.own(inputs_embeds=states[None], use_cache=False).logits[0]
        # The softmax is in float32, whatever the matrices are multiplied in.
        all_log_probs = torch.log_softmax(logits[:, : self._vocab_size].float() / self._temperature, dim=-1)
        log_probs = all_log_probs.gather(1, targets[:, None]).squeeze(1)
        return log_probs, -(all_log_probs.exp() * all_log_probs).sum(dim=-1)


class _GivenStates(nn.Module):
    """Stands for a model's body; returns its inputs as the last hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]


def _without_body(model: Any) -> Any:
    """Return a copy of a model that shares all its modules but the body."""
    if model.base_model is model:
        raise DefectError(f"a {model.config.model_type} model has no body apart from its output head")
    head = copy.copy(model)
    modules = {**head.__dict__["_modules"], model.base_model_prefix: _GivenStates()}
    head.__dict__["_modules"] = modules  # of the copy: the model keeps its own
    return head
