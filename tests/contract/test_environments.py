"""Contracts that answer the model: guess-number, calculator, and the pieces that they share."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import Contract, Prompt, Reply, Score, Turn, load, play, prompt_of, reply_of, score_of
from echo_node.contract.api import own_answer, script_of
from echo_node.contract.arithmetic import calculate
from echo_node.contract.builtin.sokoban_rounds import Board
from echo_node.contract.jail.episode_cache import EpisodeCache
from echo_node.contract.sandbox import load_jailed
from echo_node.contract.tools import ToolError, find_call, find_plain_call
from echo_node.errors import ContractError

KEY = bytes(range(32))


def test_a_number_is_found_by_halving_and_costs_a_quarter_for_each_further_guess():
    task = load("guess-number", "1")
    values = []
    for number in range(64):
        prompt = prompt_of(task, bytes([number]) * 32)
        turns, replies = play(task, prompt, script_of(own_answer(task, prompt)))
        assert replies[-1].done
        assert turns[-1].text == prompt.data["number"]
        values.append(score_of(task, prompt, turns).value)
        assert values[-1] == 1 - (len(turns) - 1) / 4
    assert 0.45 < sum(values) / len(values) < 0.6
    assert prompt.data["number"] != prompt.text, "the name of a game does not tell"


def test_the_environment_says_higher_lower_or_that_it_was_no_number():
    task = load("guess-number", "1")
    prompt = Prompt("12345=", {"number": "5"})
    said = [reply_of(task, prompt, [Turn(text)]).text for text in ("4", "6", "", "55", "$", "٤")]
    assert said == ["+", "-", "=", "=", "=", "="]
    assert reply_of(task, prompt, [Turn("1", "+")] * 3 + [Turn("2")]).done, "the fourth guess is the last"
    assert score_of(task, prompt, [Turn("4", "+"), Turn("5")]).value == 0.75
    assert score_of(task, prompt, [Turn("4", "+"), Turn("6")]).value == 0.0


def test_a_jailed_environment_answers_as_the_contract_does():
    task = load("calculator", "1")
    jailed = load_jailed("calculator", "1", require=())
    try:
        assert jailed.has_environment
        prompt = prompt_of(task, KEY)
        script = ["calculator: 6 * 7", "<tool_call>{", "answer: 1"]
        assert play(jailed, prompt, script) == play(task, prompt, script)
        turns, _ = play(task, prompt, script)
        assert score_of(jailed, prompt, turns) == score_of(task, prompt, turns)
    finally:
        jailed.close()


def test_a_word_sum_is_solved_with_the_calculator():
    task = load("calculator", "1")
    prompt = prompt_of(task, KEY)
    turns, _ = play(task, prompt, script_of(own_answer(task, prompt)))
    assert turns[0].reply == f"result: {prompt.data['answer']}"
    assert score_of(task, prompt, turns).value == 1.0
    wrong = [turns[0], Turn("answer: 1")]
    assert score_of(task, prompt, wrong).value == 0.0
    assert score_of(task, prompt, turns[:1]).value == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>", "no end"),
        ("<tool_call>{</tool_call>", "no JSON"),
        ("<tool_call>[]</tool_call>", "no object"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "no object"),
        (f"<tool_call>{'[' * 5000}</tool_call>", "too long"),
    ],
)
def test_a_malformed_call_is_an_answer_and_no_error(text, said):
    with pytest.raises(ToolError, match=said):
        find_call(text)
    task = load("calculator", "1")
    reply = reply_of(task, prompt_of(task, KEY), [Turn(text)])
    assert said in reply.text
    assert not reply.done


def test_calls_are_found_in_both_forms():
    call = find_call(
        'I think <tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    )
    assert call is not None
    assert (call.name, call.arguments) == ("calculator", {"expression": "1"})
    plain = find_plain_call("so\n calculator: 2 + 2 \nanswer: 3", {"calculator": "expression"})
    assert plain is not None
    assert plain.arguments == {"expression": "2 + 2"}
    assert find_plain_call("other: 2", {"calculator": "expression"}) is None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("-(2)-3", "-5"),
        ("1/3", "0.333333"),
        ("2/4", "0.5"),
        ("-1/3", "-0.333333"),
        ("10/5", "2"),
    ],
)
def test_the_calculator_is_exact_and_rounds_at_the_end(expression, value):
    assert calculate({"expression": expression}) == value


@pytest.mark.parametrize(
    "bad", ["", "1/0", "1+", "(1", "1)", "2**9", "abs(1)", "1 2", "9" * 300, "(" * 200, "٣"]
)
def test_what_is_not_arithmetic_is_refused_in_our_own_words(bad):
    with pytest.raises(ToolError):
        calculate({"expression": bad})


@given(st.text("0123456789+-*/(). ", max_size=60))
def test_any_expression_has_a_value_or_a_refusal(text):
    with contextlib.suppress(ToolError):
        float(calculate({"expression": text}))


@given(st.text(max_size=40))
def test_any_turn_has_a_reply(text):
    for name in ("calculator", "guess-number"):
        task = load(name, "1")
        reply = reply_of(task, prompt_of(task, KEY), [Turn(text)])
        assert reply.done or reply.text


def test_sokoban_in_rounds_is_solved_by_its_own_moves_and_shows_the_board_in_between():
    pytest.importorskip("reasoning_gym", reason="the extra `gym` is not installed")
    task = load("sokoban", "2", {"moves": 3})
    for number in range(4):
        prompt = prompt_of(task, bytes([number]) * 32)
        turns, replies = play(task, prompt, script_of(own_answer(task, prompt, 40)))
        assert replies[-1].done
        assert score_of(task, prompt, turns).value == 1.0
        assert all(each.text.startswith("The board is now:") for each in replies[:-1])
        assert score_of(task, prompt, turns[:1]).value <= 0.1 or len(turns) == 1
        again = [reply_of(task, prompt, turns[: place + 1]) for place in range(len(turns))]
        assert again == replies, "from the transcript alone"


def test_boxes_stop_at_walls_and_at_each_other():
    board = Board("+ + + + +\n+ * @ @ +\n+ - X X +\n+ + + + +")
    board.move("R")
    assert str(board).splitlines()[1] == "+ * @ @ +"
    for way in "DRRURU":
        board.move(way)
    assert board.boxes == (0, 2)
    board = Board("+ + + + +\n+ * @ X +\n+ + + + +")
    board.move("R")
    assert str(board).splitlines()[1] == "+ - * $ +"
    assert board.boxes == (1, 1)


class Counting(Contract):
    """Holds episodes, and counts how often one is begun."""

    name, version = "counting", "1"
    begun = 0

    def prompt(self, _key):
        return Prompt("count")

    def score(self, _prompt, turns):
        return Score(0.0, str(len(turns)))

    def begin(self, _prompt):
        type(self).begun += 1
        return Sum()


class Sum:
    def __init__(self):
        self.total = 0

    def step(self, text):
        self.total += len(text)
        return Reply(str(self.total), done=self.total > 9)


def test_an_episode_goes_on_where_it_was_and_replays_where_it_is_not_known():
    task, cache, prompt = Counting(), EpisodeCache(), Prompt("count")
    turns = []
    for text in ("a", "bb", "ccc"):
        reply = cache.reply(task, prompt, [*turns, Turn(text)])
        turns.append(Turn(text, reply.text))
    assert [turn.reply for turn in turns] == ["1", "3", "6"]
    assert Counting.begun == 1
    assert EpisodeCache().reply(task, prompt, turns).text == "6", "from the transcript alone"
    assert task.has_environment
    assert reply_of(task, prompt, turns) == Reply("6")


@pytest.mark.parametrize("reply", [None, "text", Reply(""), Reply("x" * 70_000), Reply(5)])
def test_what_is_no_reply_is_an_error_of_the_contract(reply):
    class Bad(Counting):
        def reply(self, _prompt, _turns):
            return reply

    with pytest.raises(ContractError):
        reply_of(Bad(), Prompt("x"), [Turn("y")])


def test_a_script_is_a_list_of_texts_and_anything_else_is_one_turn():
    assert script_of(json.dumps(["a", "b"])) == ["a", "b"]
    for text in ("a", "[]", "[1]", '{"a": 1}', "[" * 100_000):
        assert script_of(text) == [text]
