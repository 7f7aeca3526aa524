"""`math`: equal answers are equal, and no text of a stranger is computed without bound."""

from __future__ import annotations

import json
import threading

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.contract import Prompt, load, prompt_of, score_of
from echo_node.contract.builtin import plain_latex, problems
from echo_node.contract.sandbox import Sandbox
from echo_node.errors import ContractError

KEYS = [n.to_bytes(32) for n in range(400)]
SAMPLE = load("math", "1")


@pytest.fixture
def task():
    return SAMPLE


def worth(task, wanted, said):
    return score_of(task, Prompt("", {"answer": wanted}), f"so \\boxed{{{said}}}").value


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "1/2"),
        ("\\frac{1}{2}", "$\\dfrac{2}{4}$"),
        ("2", "2.0"),
        ("3\\sqrt{5}", "\\sqrt{45}"),
        ("\\{1, 2\\}", "\\{2,1\\}"),
        ("x^2 + 3x + 2", "(x+1)(x+2)"),
        ("1000", "1,000"),
        ("5", "x = 5"),
        ("0", "\\sin(\\pi)"),
    ],
)
def test_equal_answers_are_equal(task, wanted, said):
    assert worth(task, wanted, said) == 1.0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("2", "3"),
        ("2", ""),
        ("2", "nan"),
        ("2", "\\infty"),
        ("x^2", "x^3"),
        ("\\{1, 2\\}", "1"),
        ("2", "1, 2"),
    ],
)
def test_others_are_not(task, wanted, said):
    assert worth(task, wanted, said) == 0.0


@pytest.mark.parametrize(
    "said",
    [
        "9^{9^{9^{9}}}",
        "9^9^9^9",
        "9^{{99}^{99}}",
        "9^{999999}",
        "(x+y+z)^{99}",
        "99999999!",
        "\\sum_{n=1}^{99} n",
        "\\int x",
        "\\binom{99}{9}",
        "9" * 100,
        "(" * 50,
        "\\exp(\\exp(\\exp(9)))",
        "__import__('os')",
        "x\x00",
        "1" * 300,
        "٣",
        "\\boxed",
        "\\input{/etc/passwd}",
    ],
)
def test_what_could_be_large_or_more_than_a_value_is_not_given_to_sympy(said):
    assert plain_latex.trouble_with(said, "(x+y+z)^2")


@settings(deadline=None, max_examples=60)  # sympy takes its time the first time
@given(st.text(st.sampled_from("0123456789x^{}()[]+-*/,.\\ =<|"), max_size=40))
def test_any_short_text_is_scored(said):
    assert worth(SAMPLE, "7", said) in {0.0, 1.0}


def test_its_own_answers_are_right_in_a_thread_too(task):
    said = []

    def work():
        for key in KEYS[:8]:
            prompt = prompt_of(task, key)
            said.extend(
                [
                    score_of(task, prompt, task.answer(prompt)).value,
                    worth(task, "2", "4/2"),
                    worth(task, "2", "5"),
                ]
            )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [1.0, 1.0, 0.0] * 8


def test_the_sample_is_whole_and_every_answer_is_its_own(task):
    assert len(task.problems) == 400
    assert len({prompt_of(task, key).text for key in KEYS}) > 200
    assert all(worth(task, problem.answer, f"{problem.answer} ") == 1.0 for problem in task.problems)
    readable = [
        problem for problem in task.problems if not plain_latex.trouble_with(problem.answer, problem.answer)
    ]
    assert readable == task.problems


def test_a_file_is_taken_by_name_and_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "folder", lambda: tmp_path)
    data = b'{"problem": "1 + 1?", "answer": "2"}\n\n{"problem": "x?", "answer": "y", "level": 3}\n'
    pinned = blake3(data).hexdigest()
    with pytest.raises(ContractError, match=r"no two\.jsonl.*put it into"):
        load("math", "1", {"data": "two.jsonl", "blake3": pinned})
    (tmp_path / "two.jsonl").write_bytes(data)
    task = load("math", "1", {"data": "two.jsonl", "blake3": pinned, "way": "tags"})
    assert {prompt_of(task, key).data["answer"] for key in KEYS} == {"2", "y"}
    (tmp_path / "two.jsonl").write_bytes(data + b"\n")
    with pytest.raises(ContractError, match="not the file that the run names"):
        load("math", "1", {"data": "two.jsonl", "blake3": pinned})


@pytest.mark.parametrize("name", ["../two.jsonl", "/etc/passwd", "", ".hidden", "a/b"])
def test_a_name_is_no_path(name):
    with pytest.raises(ContractError, match="plain name"):
        load("math", "1", {"data": name, "blake3": "0" * 64})


@pytest.mark.parametrize(
    "line", ["no json", "[]", "{}", '{"problem": 1, "answer": "2"}', '{"problem": "p", "answer": ""}', ""]
)
def test_a_file_of_something_else_is_refused(line, tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "folder", lambda: tmp_path)
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ContractError, match=r"bad\.jsonl"):
        load("math", "1", {"data": "bad.jsonl", "blake3": blake3(line.encode()).hexdigest()})


def test_the_hash_has_to_be_said(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "folder", lambda: tmp_path)
    with pytest.raises(ContractError, match="b3sum"):
        load("math", "1", {"data": "two.jsonl"})


def test_the_shipped_sample_is_the_one_that_is_pinned():
    from pathlib import Path

    data = (Path(problems.__file__).parent / problems.SAMPLE).read_bytes()
    assert blake3(data).hexdigest() == problems.SAMPLE_HASH
    assert all(json.loads(line) for line in data.splitlines())


def test_a_jail_finds_the_file_that_a_run_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = problems.folder()
    place.mkdir(parents=True)
    data = b'{"problem": "What is 1 + 1?", "answer": "2"}\n'
    (place / "own.jsonl").write_bytes(data)
    params = {"data": "own.jsonl", "blake3": blake3(data).hexdigest()}
    with Sandbox("math", "1", params) as sandbox:
        [prompt] = sandbox.prompts([bytes(32)])
        assert "1 + 1" in prompt.text
