"""Completions share a row as long as they agree."""

from __future__ import annotations

import numpy as np

from echo_node.engine.base import SamplingLimits, SlotRequest
from echo_node.engine.branches import Branches
from protocol.sampling import uniforms

LIMITS = SamplingLimits(max_tokens=3, temperature=1.0, end_tokens=frozenset({0}), vocab_size=10)
ONE = SlotRequest(np.array([1, 2]), b"k" * 32, 3)
OTHER = SlotRequest(np.array([5]), b"l" * 32, 2)


def grow(branches, tokens):
    return branches.grow(np.array(tokens), -np.array(tokens, dtype=np.float64))


def test_a_group_starts_on_the_row_of_its_prompt_and_branches_where_its_tokens_part():
    branches = Branches([ONE, OTHER], LIMITS)
    assert branches.rows.tolist() == [0, 0, 0, 1, 1]
    growth = grow(branches, [4, 4, 9, 4, 0])
    assert growth.parents.tolist() == [0, 0, 1]  # the same token under another prompt is another row
    assert growth.tokens.tolist() == [4, 9, 4]
    assert branches.rows.tolist() == [0, 0, 1, 2]
    growth = grow(branches, [0, 6, 0, 6])
    assert growth.parents.tolist() == [0, 2]
    assert growth.tokens.tolist() == [6, 6]
    assert grow(branches, [0, 8]) is None

    groups = [[(draw.ids.tolist(), draw.finish) for draw in group] for group in branches.groups()]
    assert groups == [
        [([4, 0], "end"), ([4, 6, 0], "end"), ([9, 0], "end")],
        [([4, 6, 8], "length"), ([0], "end")],
    ]
    assert all(np.array_equal(draw.logprobs, -draw.ids) for group in branches.groups() for draw in group)


def test_each_completion_keeps_its_own_luck_when_others_leave():
    branches = Branches([ONE, OTHER], LIMITS)
    streams = [uniforms(slot.slot_key, j, 3) for slot in (ONE, OTHER) for j in range(slot.group_size)]
    assert branches.luck.tolist() == [stream[0] for stream in streams]
    grow(branches, [0, 1, 1, 0, 1])
    assert branches.luck.tolist() == [streams[place][1] for place in (1, 2, 4)]
