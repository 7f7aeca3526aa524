"""Package scaffold of a new contract, written by `echo-node contract new`.

The task that it starts with is complete: it can be installed, tested and used as it is, and changed
from there. In the texts below `@name@` and the like stand for the author's names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, boundary

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST: Final = 40


def write_contract(name: str, folder: Path) -> list[Path]:
    """Write the package into a new folder; return its files."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} is no name for a contract",
            advice=f"take small letters and digits with single hyphens, at most {_LONGEST}, such as word-count",
        )
    if folder.exists():
        raise ConfigError(f"{folder} is there already", advice="name another one with --folder")
    names = {
        "@name@": name,
        "@module@": f"echo_contract_{name.replace('-', '_')}",
        "@package@": f"echo-contract-{name}",
        "@Class@": "".join(word.capitalize() for word in name.split("-")),
    }
    texts = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{names['@module@']}.py": _CONTRACT,
        f"test_{names['@module@']}.py": _TEST,
    }
    with boundary(ConfigError, f"writing {folder}", advice="give another with --folder"):
        folder.mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(_fill(text, names), "utf-8")
    return [folder / file for file in texts]


def _fill(text: str, names: dict[str, str]) -> str:
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@package@"
version = "1"
description = "The reward contract @name@ for echo-node"
requires-python = ">=3.11"
dependencies = ["echo-node"]

[project.entry-points."echo_node.contracts"]
"@name@@1" = "@module@:@Class@"

[tool.setuptools]
py-modules = ["@module@"]
"""

_CONTRACT = '''\
"""The reward contract `@name@`: add two numbers. Change prompt and score to your own task."""

from echo_node.contract import Contract, Params, Prompt, Score, random_from
from echo_node.contract.extraction import asking, extract, written


class @Class@(Contract):
    """Add two numbers. Parameter: `largest` number to add (1 to 1000000, default 999)."""

    name = "@name@"
    version = "1"  # change it whenever a prompt or a score changes

    def configure(self, params: Params) -> None:
        self.largest = params.whole("largest", default=999, low=1, high=1_000_000)

    def prompt(self, key: bytes) -> Prompt:
        # The only source of randomness: no clock, no `random`, no order of a set.
        rng = random_from(key)
        one, two = rng.between(0, self.largest), rng.between(0, self.largest)
        return Prompt(f"What is {one} + {two}? {asking('tags')}\\n", {"answer": str(one + two)})

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = extract(completion, "tags")  # untrusted text: compare it, never execute it
        if answer is None:
            return Score(0.0, "there is no answer between the tags")
        right = answer == prompt.data["answer"]
        return Score(float(right), f"{answer[:40]!r} is {'right' if right else 'wrong'}")

    def answer(self, prompt: Prompt) -> str:
        return written(prompt.data["answer"], "tags")
'''

_TEST = '''\
"""Tests of @name@: right answers score 1, all others 0."""

from @module@ import @Class@

from echo_node.contract import prompt_of, score_of

KEYS = [bytes([n]) * 32 for n in range(32)]


def test_its_own_answer_scores_one():
    task = @Class@()
    for key in KEYS:
        prompt = prompt_of(task, key)
        assert score_of(task, prompt, task.answer(prompt)).value == 1.0


def test_other_answers_score_nothing():
    task = @Class@()
    prompt = prompt_of(task, KEYS[0])
    for text in ("", "<answer></answer>", "<answer>-1</answer>", prompt.data["answer"], "\\x00" * 1000):
        assert score_of(task, prompt, text).value == 0.0


def test_the_same_key_gives_the_same_prompt_and_other_keys_give_others():
    prompts = [prompt_of(@Class@(), key).text for key in KEYS]
    assert prompts == [prompt_of(@Class@(), key).text for key in KEYS]
    assert len(set(prompts)) > 16
'''

_README = """\
# @package@

The reward contract `@name@` for echo-node: prompts and scores, in `@module@.py`.

```
pip install .
echo-node contract show @name@     # some prompts and scores
echo-node contract test @name@     # adversarial test of the contract
python -m pytest                   # its own tests
```

A contract is pure: the same key gives the same prompt, and the same prompt and completion give the same score, on
every machine. Completions are untrusted text: compare or parse them, never evaluate them. When a prompt or a score
changes, change the version too, in `@module@.py` and in the entry point of `pyproject.toml`: runs name both.
"""
