"""digits-sorted: the share of digits that are in their place."""

import pytest
from echo_contract_digits_sorted import DigitsSorted

from echo_node.contract import prompt_of, score_of

KEYS = [bytes([n]) * 32 for n in range(32)]


def test_its_own_answer_scores_one():
    task = DigitsSorted()
    for key in KEYS:
        prompt = prompt_of(task, key)
        assert score_of(task, prompt, task.answer(prompt)).value == 1.0


@pytest.mark.parametrize("text", ["", "x", "\x00" * 1000, "😀" * 5])
def test_what_has_nothing_in_its_place_scores_nothing(text):
    task = DigitsSorted()
    assert score_of(task, prompt_of(task, KEYS[0]), text).value == 0.0


def test_a_part_counts_and_too_much_costs():
    task = DigitsSorted()
    prompt = prompt_of(task, KEYS[0])
    right = task.answer(prompt)
    assert score_of(task, prompt, right[:4]).value == 4 / 5
    assert score_of(task, prompt, right + "0" * 5).value == 5 / 10
