"""Hostile completions for testing a scorer: huge, nested, binary, or code.

Each is made when it is needed, some from the right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo_node.contract import extraction

MEGABYTE: Final = 1_000_000

TEXTS: Final[dict[str, Callable[[str], str]]] = {
    "empty": lambda _: "",
    "blank": lambda _: " \n\t\r\v\f " * 100,
    "huge": lambda _: "so much to say " * (MEGABYTE // 15),
    "huge number": lambda _: "9" * MEGABYTE,
    "many lines": lambda _: "1\n" * (MEGABYTE // 2),
    "binary": lambda _: bytes(range(256)).decode("latin-1") * 100,
    "nulls": lambda _: "\x00" * 10_000,
    "half characters": lambda _: "\ud800\udfff\ud83d" * 1000,
    "terminal codes": lambda _: "\x1b[2J\x1b]0;owned\x07\u202e" * 100,
    "other digits": lambda _: "٣١٢٨٤３１２８４",
    "open brackets": lambda _: "([{" * 100_000,
    "open boxes": lambda _: "\\boxed{" * 100_000,
    "open tags": lambda _: "<answer>" * 100_000,
    "nested lists": lambda _: "[" * 2000 + "]" * 2000,
    "no number": lambda _: "nan",
    "endless number": lambda _: "1e999999999",
    "tower of powers": lambda _: "9**9**9**9**9",
    "tower in LaTeX": lambda _: "9^{9^{9^{9^{9}}}}",
    "factorials": lambda _: "99999999!!!!",
    "spaces that backtrack": lambda _: "answer" + " " * 50_000 + "a" + "1 " * 50_000 + "!",
    "template": lambda _: "{{7*7}} ${7*7} %s%n {0.__class__}",
    "code": lambda _: "[].__class__.__base__.__subclasses__() or exit(0) or exec('while True: pass')",
    "answer in a crowd": lambda answer: f"{answer} {'0 1 2 yes no ' * 5000}",
}


def placed(text: str) -> list[str]:
    """Return the text alone and in every place where an answer may be looked for."""
    return list(dict.fromkeys([text, *(extraction.written(text, way) for way in extraction.WAYS)]))
