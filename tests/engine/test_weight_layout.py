"""Column-major weights: the same names, shapes and values, and elements patched in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echo_node.engine.weight_layout import lay_by_columns, put_at
from echo_node.errors import EngineError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight


def test_a_matrix_that_was_turned_round_is_the_same_matrix_and_its_ties_hold():
    model = Tied()
    before = model.head.weight.detach().clone()
    lay_by_columns(model)
    assert model.head.weight is model.words.weight
    assert not model.head.weight.is_contiguous()
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.words(torch.tensor([3])), before[3:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_that_would_lose_by_it_stay_as_they_are(dtype):
    layer = nn.Linear(5, 7).to(dtype)
    lay_by_columns(layer)
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (1, 6), (6, 1)])
def test_elements_are_put_by_their_places_in_the_order_of_rows(shape, turned):
    plain = torch.arange(float(shape[0] * shape[1])).view(shape)
    weight = plain.t().contiguous().t() if turned else plain.clone()
    positions = torch.tensor([0, 3, plain.numel() - 1])
    put_at(weight, positions, torch.tensor([-1.0, -2.0, -3.0]))
    plain.view(-1)[positions] = torch.tensor([-1.0, -2.0, -3.0])
    assert torch.equal(weight, plain)


def test_weights_in_pieces_are_refused_and_stay_as_they_are():
    weight = torch.zeros(4, 4)[::2]
    with pytest.raises(EngineError, match="one piece"):
        put_at(weight[:, ::2], torch.tensor([0]), torch.tensor([1.0]))
    assert not weight.any()
