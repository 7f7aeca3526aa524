"""The built-in contract `few-shot`: tasks by name, right answers, held-out problems."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import load
from echo_node.contract.api import Contract, Prompt, Score, prompt_of
from echo_node.contract.builtin.few_shot import EXAMPLES, TASKS, is_held_out
from echo_node.contract.sandbox import load_jailed
from echo_node.errors import ContractError

keys = st.binary(min_size=32, max_size=32)


def question_of(prompt: Prompt) -> str:
    return prompt.text.splitlines()[-1]


def solve(question: str) -> str:
    """Solve a problem from its words alone."""
    words = question.rstrip(":=").split()
    match words:
        case ["larger", "of", one, "and", other]:
            return str(max(int(one), int(other)))
        case [one, "+", other]:
            return str(int(one) + int(other))
        case [number, "is", "even", "or", "odd"]:
            return ["even", "odd"][int(number) % 2]
        case ["last", "of", *four]:
            return four[-1]
        case [ordinal, "of", *four]:
            return four[["first", "second", "third", "fourth"].index(ordinal)]
    raise AssertionError(question)


@pytest.mark.parametrize("task", TASKS)
@given(keys)
def test_every_problem_has_its_right_answer_and_two_others_before_it(task, key):
    contract = load("few-shot", "1", {"task": task})
    for prompt in (contract.prompt(key), contract.held_out(key)):
        *shown, question = prompt.text.splitlines()
        assert [tuple(line.rsplit(" ", 1)) for line in shown] == list(EXAMPLES[task])
        assert all(solve(asked) == answer for asked, answer in EXAMPLES[task])
        right = solve(question)
        assert contract.score(prompt, contract.answer(prompt)).value == 1.0
        for answer, value in ((f" {right}", 1.0), (f"{right}\n{right}", 1.0), (f" {right}0", 0.0), ("", 0.0)):
            assert contract.score(prompt, answer).value == value


@pytest.mark.parametrize("task", TASKS)
@given(keys)
def test_what_is_held_out_is_never_drawn_for_training(task, key):
    contract = load("few-shot", "1", {"task": task})
    assert not is_held_out(question_of(contract.prompt(key)))
    assert is_held_out(question_of(contract.held_out(key)))


def test_in_the_jail_held_out_prompts_are_the_same_ones():
    plain, jailed = (
        load("few-shot", "1", {"task": "nth-word"}),
        load_jailed("few-shot", "1", {"task": "nth-word"}),
    )
    try:
        for number in range(8):
            key = bytes([number]) * 32
            assert jailed.held_out(key) == plain.held_out(key) != plain.prompt(key)
            assert jailed.prompt(key) == plain.prompt(key)
    finally:
        jailed.close()


def test_a_contract_that_holds_nothing_out_is_evaluated_on_its_own_prompts():
    class Plain(Contract):
        name, version = "plain", "1"

        def prompt(self, key: bytes) -> Prompt:
            return Prompt(key.hex())

        def score(self, _prompt: Prompt, _completion: str) -> Score:
            return Score(0.0, "nothing")

    key = bytes(32)
    assert prompt_of(Plain(), key, held_out=True) == prompt_of(Plain(), key) == Prompt(key.hex())


def test_a_task_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ContractError, match="one of larger, even-or-odd, last-word, nth-word"):
        load("few-shot", "1", {"task": "chess"})
