"""The output head in pieces: the same numbers and gradients, without all logits at once."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GraniteConfig

from echo_node.trainer.output_head import OutputHead

VOCABULARY, HIDDEN = 4096, 16


def new_head(temperature=0.7, vocab_size=4001):
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=0.2,
    )
    model = AutoModelForCausalLM.from_config(config)
    return OutputHead(model, vocab_size, temperature)


def plain(head, states, targets):
    logits = torch.nn.functional.linear(states, head.own.lm_head.linear.weight) / 0.2
    every = torch.log_softmax(logits[:, :4001] / 0.7, dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(dim=1)


@pytest.mark.parametrize("piece", [1000, 64, 7])
def test_log_probabilities_entropies_and_gradients_are_those_of_all_logits_at_once(piece):
    head = new_head()
    head.piece = piece
    states = torch.randn(100, HIDDEN, requires_grad=True)
    targets, weight = torch.randint(0, 4001, (100,)), head.own.lm_head.linear.weight
    found = []
    for measure in (head, lambda *given: plain(head, *given)):
        states.grad = weight.grad = None
        log_probs, entropies = measure(states, targets)
        (log_probs * torch.linspace(-1, 2, 100) + 0.3 * entropies**2).sum().backward()
        found.append((log_probs, entropies, states.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that were made in the block and are still alive."""

    def __init__(self, *before):
        super().__init__()
        self.now = self.most = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.count(each.untyped_storage())
        return made

    def count(self, storage):
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key, size):
        self.known.discard(key)
        self.now -= size


def peak(tokens, piece):
    head = new_head()
    head.piece = piece
    states, targets = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randint(0, 4001, (tokens,))
    with Alive(*head.parameters(), states, targets) as alive:
        log_probs, entropies = head(states, targets)
        (log_probs + entropies).sum().backward()
    return alive.most


def test_memory_grows_with_the_hidden_size_and_not_with_the_vocabulary():
    few, many = peak(512, 32), peak(2048, 32)
    logits = 4 * VOCABULARY * 2048
    assert peak(2048, 2048) > 2.5 * logits
    assert many < 0.15 * logits
    assert many - few < 1536 * 4 * HIDDEN * 8  # a few rows of hidden states for each token more
