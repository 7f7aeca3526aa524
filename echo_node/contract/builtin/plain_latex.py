"""Bounds on the mathematics given to sympy: short, flat, small numbers and powers.

math-verify reads LaTeX without running it, but then evaluates it, and `9^{9^{9^9}}` has a value.
What passes here can be evaluated in bounded time and memory. Only characters are examined; no
mathematics is parsed.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 256  # characters
DEEPEST: Final = 8  # brackets within brackets
DIGITS: Final = 30  # of one number
POWERS: Final = 4  # in one answer
LARGEST_POWER_OF_A_SUM: Final = 8
FUNCTIONS: Final = 2  # sines, logarithms and the like, beyond those of the right answer

_COMMANDS: Final = frozenset(
    """
    frac dfrac tfrac sqrt pi infty cdot times div pm le leq ge geq lt gt ne neq cup cap in left right sin cos tan cot
    arcsin arccos arctan log ln exp text mathrm mathbb circ degree emptyset quad alpha beta gamma theta lambda
    """.split()  # noqa: SIM905 -- a list as people read it
)
_FUNCTIONS: Final = re.compile(r"\\(?:sin|cos|tan|cot|arcsin|arccos|arctan|log|ln|exp)(?![A-Za-z])")
_WORDS: Final = re.compile(r"\\(?:text|mathrm|mathbb)\s*\{[^{}]*\}|\\[A-Za-z]+|^\s*[A-Za-z]\s*(?==)")
_LETTER: Final = re.compile(r"[A-Za-z]")
_TOKEN: Final = re.compile(r"\\[A-Za-z]+|\\[{}%,;:! $|]|[0-9]+|[A-Za-z]|[-+*/^_()\[\]{},.<>=|:; ]", re.ASCII)
_POWER: Final = re.compile(r"(.?)\s*\^\s*(?:\{([^{}^]*)\}|([0-9A-Za-z]))")
_CHAIN: Final = re.compile(r"\^\s*(?:\{[^{}]*\}|.)\s*\^")
_EXPONENT: Final = re.compile(r"-?\s*[0-9]{1,2}|[A-Za-z]|-?\s*[0-9]\s*/\s*[0-9]|\\circ")


def trouble_with(text: str, wanted: str) -> str:
    """Return why sympy may not compare a text with the right answer, else ""."""
    if len(text) > LONGEST:
        return f"it has more than {LONGEST} characters"
    if _depth(text) > DEEPEST:
        return f"it has more than {DEEPEST} brackets within each other"
    if strange := sorted(_letters(text) - _letters(wanted)):
        return f"the right answer has no {strange[0]}"
    if len(_FUNCTIONS.findall(text)) > FUNCTIONS + len(_FUNCTIONS.findall(wanted)):
        return f"it has more than {FUNCTIONS} functions that the right answer has not"
    return _trouble_with_words(text) or _trouble_with_powers(text)


def _trouble_with_words(text: str) -> str:
    tokens = _TOKEN.findall(text)
    if sum(map(len, tokens)) != len(text):
        return "it has a character that is not read"
    for token in tokens:
        if token[0] == "\\" and token[1].isalpha() and token[1:] not in _COMMANDS:
            return f"{token} is not read"
        if token.isdigit() and len(token) > DIGITS:
            return f"it has a number of more than {DIGITS} digits"
    return ""


def _letters(text: str) -> set[str]:
    """Return the variables of an expression, except that of `x = …`.

    Other variables make another expression.
    """
    return set(_LETTER.findall(_WORDS.sub(" ", text)))


def _trouble_with_powers(text: str) -> str:
    """Return whether all powers are small numbers or letters.

    So `9^{9^9}` is refused, and the terms of `(x+y)^8` can be counted.
    """
    powers = list(_POWER.finditer(text))
    if len(powers) != text.count("^") or _CHAIN.search(text):
        return "it has a power that is not read"
    if len(powers) > POWERS:
        return f"it has more than {POWERS} powers"
    for power in powers:
        base, exponent = power[1], (power[2] if power[2] is not None else power[3]).strip()
        if not _EXPONENT.fullmatch(exponent):
            return f"the power {exponent!r} is not read"
        number = exponent.replace(" ", "")
        of_a_sum = base in {")", "}", "]", "|"} and number.lstrip("-").isdigit()
        if of_a_sum and abs(int(number)) > LARGEST_POWER_OF_A_SUM:
            return f"it has a sum to a power of more than {LARGEST_POWER_OF_A_SUM}"
    return ""


def _depth(text: str) -> int:
    depth = most = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    return most
