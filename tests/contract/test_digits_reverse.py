"""The embedded task: the same everywhere, exact, and unmoved by hostile text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import Prompt, check_vectors, contract_vectors, load, prompt_of, score_of
from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.errors import ContractError
from protocol.manifest import ContractPin
from protocol.wire import of

ROOT = Path(__file__).resolve().parents[2]
KEYS = [bytes([n]) * 32 for n in range(16)]
ELSEWHERE = """
import json
from echo_node.contract import load, prompt_of, score_of
task = load("digits-reverse", "1", {"digits": 7})
said = []
for n in range(16):
    prompt = prompt_of(task, bytes([n]) * 32)
    for text in (task.answer(prompt), "123", "\\x00\\ud83d"):
        score = score_of(task, prompt, text)
        said.append([prompt.text, dict(prompt.data), score.value, score.reason])
print(json.dumps(said))
"""


def test_it_asks_for_digits_and_wants_them_backwards():
    task = DigitsReverse()
    prompt = prompt_of(task, KEYS[1])
    assert prompt.text == "r48849="
    assert score_of(task, Prompt("r48213=", {"answer": "31284"}), "31284").value == 1.0


@given(st.binary(min_size=32, max_size=32), st.integers(1, 32))
def test_every_prompt_has_its_form_and_its_answer_scores_one(key, digits):
    task = DigitsReverse({"digits": digits})
    prompt = prompt_of(task, key)
    asked = re.fullmatch(r"r([0-9]+)=", prompt.text)[1]
    assert len(asked) == digits
    score = score_of(task, prompt, asked[::-1])
    assert (score.value, score.reason) == (1.0, f"{asked[::-1]} is exact")
    assert score_of(task, prompt, asked[::-1] + "0").value == 0.0


def test_prompts_vary_and_every_digit_stands_everywhere():
    prompts = {prompt_of(DigitsReverse(), n.to_bytes(32)).text for n in range(1000)}
    assert len(prompts) > 980
    for place in range(1, 6):
        assert {prompt[place] for prompt in prompts} == set("0123456789")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 31284",
        "31284\n",
        "31284$",
        "٣١٢٨٤",  # Arabic digits, which int() would read
        "３１２８４",  # full-width digits
        "31284\x00",
        "\x1b[2J31284",
        "\u202e48213",
        "\ud800",
        b"\xff\xfe31284".decode("latin-1"),
        "__import__('os').abort()",
        "9" * 10_000_000,
        "(" * 100_000,
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_hostile_text_scores_nothing_and_its_reason_can_be_printed(text):
    score = score_of(DigitsReverse(), Prompt("r48213=", {"answer": "31284"}), text)
    assert score.value == 0.0
    assert score.reason.isprintable()
    assert score.reason.endswith("is not 31284")
    assert len(score.reason) < 300


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"digits": 0}, "digits"),
        ({"digits": 33}, "digits"),
        ({"digits": "5"}, "digits"),
        ({"partial": True}, "partial"),
    ],
)
def test_a_bad_parameter_is_named(params, named):
    with pytest.raises(ContractError, match=named):
        load("digits-reverse", "1", params)


def test_it_is_the_same_in_every_process_and_under_every_hash_seed():
    said = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", ELSEWHERE],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
                timeout=60,
            ).stdout
        )
        for seed in ("0", "4711")
    ]
    assert said[0] == said[1]
    task = DigitsReverse({"digits": 7})
    prompts = [prompt_of(task, key) for key in KEYS]
    assert [[row[0], row[1]] for row in said[0][::3]] == [[prompt.text, prompt.data] for prompt in prompts]
    assert [row[2] for row in said[0]] == [1.0, 0.0, 0.0] * len(KEYS)


def test_its_vectors_hold_right_and_wrong_answers_and_survive_the_manifest():
    task = DigitsReverse()
    vectors = contract_vectors(task, KEYS)
    assert [vector.score for vector in vectors] == [1.0, 0.0] * 8
    pin = ContractPin(
        name=task.name, params={"digits": 5}, pure=True, vectors=vectors, version=task.version, wheel=None
    )
    wire = of(ContractPin)
    check_vectors(task, wire.load(wire.dump(pin)).vectors)
    with pytest.raises(ContractError, match="vector 0"):
        check_vectors(DigitsReverse({"digits": 6}), vectors)
