"""What a contract may return beyond a text and a number: system prompt, chat, shaped score."""

from __future__ import annotations

import pickle

import pytest

from echo_node.contract import Contract, Prompt, Score, prompt_of, score_of
from echo_node.contract.registry import find_only
from echo_node.errors import ContractError

KEY = bytes(32)


class Chatty(Contract):
    name, version = "chatty", "1"

    def configure(self, params):
        self.system = params.text("system", default="Be brief.", longest=20)

    def prompt(self, _key):
        return Prompt("Say hi.", {"answer": "hi"}, system=self.system, chat=True)

    def score(self, prompt, completion):
        return Score(float(completion == prompt.data["answer"]), "compared")


class Shaped(Chatty):
    def shape(self, prompt, completion, score):
        return score if score.value else Score(0.1 * (prompt.data["answer"] in completion), "it is in there")


def test_a_chat_has_the_systems_words_first():
    prompt = prompt_of(Chatty(), KEY)
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hi."},
    ]
    assert prompt_of(Chatty({"system": ""}), KEY).messages == [{"role": "user", "content": "Say hi."}]
    assert pickle.loads(pickle.dumps(prompt)) == prompt  # noqa: S301 -- our own bytes


def test_a_plain_prompt_is_what_it_was():
    assert Prompt("a", {"b": "c"}) == Prompt("a", {"b": "c"}, system="", chat=False)
    assert Prompt("a", {}, system="s") != Prompt("a")


@pytest.mark.parametrize("system", [3, "x" * 21, "two\nlines", None])
def test_a_text_parameter_is_one_short_line(system):
    with pytest.raises(ContractError, match="a line of at most 20 characters"):
        Chatty({"system": system})


def test_a_shaped_score_is_what_counts():
    prompt = prompt_of(Shaped(), KEY)
    assert [score_of(Shaped(), prompt, text).value for text in ("hi", "oh hi", "no")] == [1.0, 0.1, 0.0]
    assert score_of(Chatty(), prompt, "oh hi").value == 0.0


@pytest.mark.parametrize("shaped", [None, 0.5, Score(2.0, ""), Score(float("nan"), "")])
def test_a_shape_that_is_no_score_in_range_is_the_contracts_fault(shaped, monkeypatch):
    monkeypatch.setattr(Shaped, "shape", lambda *_: shaped)
    with pytest.raises(ContractError, match="chatty 1: scoring"):
        score_of(Shaped(), Prompt("p", {"answer": "a"}), "a")


@pytest.mark.parametrize("words", [{"system": b"x"}, {"chat": 1}, {"system": "\ud800"}])
def test_a_prompt_with_other_words_is_the_contracts_fault(words, monkeypatch):
    monkeypatch.setattr(Chatty, "prompt", lambda *_: Prompt("text", {}, **words))
    with pytest.raises(ContractError, match="making a prompt"):
        prompt_of(Chatty(), KEY)


def test_a_version_goes_without_saying_where_there_is_one():
    assert find_only("digits-reverse").version == "1"
    with pytest.raises(ContractError, match="no contract chess"):
        find_only("chess")
