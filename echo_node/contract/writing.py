"""A new contract as a package of its own: what `echo-node contract new` writes.

The task that it starts with is whole: it can be installed, tested and used as it is, and changed from there. The texts
are below, with `@name@` and the like where the author's name goes. It knows nothing of other contracts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from echo_node.errors import ConfigError, boundary

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST: Final = 40


def write_contract(name: str, folder: Path) -> list[Path]:
    """Write the package into a new folder and say which files there are."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} is no name for a contract",
            advice=f"take small letters and digits with single hyphens, at most {_LONGEST}, such as word-count",
        )
    if folder.exists():
        raise ConfigError(f"{folder} is there already", advice="name another one with --folder")
    words = {
        "@name@": name,
        "@module@": f"echo_contract_{name.replace('-', '_')}",
        "@package@": f"echo-contract-{name}",
        "@Class@": "".join(word.capitalize() for word in name.split("-")),
    }
    texts = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{words['@module@']}.py": _CONTRACT,
        f"test_{words['@module@']}.py": _TEST,
    }
    with boundary(ConfigError, f"writing {folder}", advice="give another with --folder"):
        folder.mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(_filled(text, words), "utf-8")
    return [folder / file for file in texts]


def _filled(text: str, words: dict[str, str]) -> str:
    for mark, word in words.items():
        text = text.replace(mark, word)
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
"""`@name@`: add two numbers. Change the prompt and the score, and it is a task of your own."""

from echo_node.contract import Contract, Params, Prompt, Score, random_from
from echo_node.contract.extraction import asking, extract, written


class @Class@(Contract):
    """Parameters: `largest`, the largest number that is asked for (1 to 1000000, 999 unless given)."""

    name = "@name@"
    version = "1"  # another prompt or score for the same input is another version

    def configure(self, params: Params) -> None:
        self.largest = params.whole("largest", default=999, low=1, high=1_000_000)

    def prompt(self, key: bytes) -> Prompt:
        luck = random_from(key)  # the only luck there is: no clock, no random, no set order
        one, two = luck.between(0, self.largest), luck.between(0, self.largest)
        return Prompt(f"What is {one} + {two}? {asking('tags')}\\n", {"answer": str(one + two)})

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = extract(completion, "tags")  # a stranger's text: compare it, never run it
        if answer is None:
            return Score(0.0, "there is no answer between the tags")
        right = answer == prompt.data["answer"]
        return Score(float(right), f"{answer[:40]!r} is {'right' if right else 'wrong'}")

    def answer(self, prompt: Prompt) -> str:
        return written(prompt.data["answer"], "tags")
'''

_TEST = '''\
"""@name@: right answers score 1, all others 0, and `echo-node contract test` finds nothing."""

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

The reward contract `@name@` for echo-node: what is asked and what an answer is worth, in `@module@.py`.

```
pip install .
echo-node contract show @name@     # some prompts and scores
echo-node contract test @name@     # tries it as an adversary would
python -m pytest                   # its own tests
```

A contract is pure: the same key gives the same prompt, the same prompt and text the same score, on every machine. The
text that it scores was written by a stranger: compare it or count in it, and never evaluate it. When a prompt or a score
changes, the version does too, in `@module@.py` and in the entry point of `pyproject.toml`: runs name both.
"""
