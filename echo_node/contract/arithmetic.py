"""Calculator tool: sums, products and brackets in exact arithmetic.

The result is rounded at the end. Numbers are fractions, so that no machine rounds otherwise. The
work is bounded by the length of the expression and by the size of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from echo_node.contract.tools import ToolError

LONGEST: Final = 256
"""Most characters of an expression."""
LARGEST_BITS: Final = 4_096
"""Most bits of a numerator or denominator on the way."""
DECIMALS: Final = 6
"""Digits after the point of a result."""
DEEPEST: Final = 32
"""Most brackets within each other."""
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))")


def calculate(arguments: Mapping[str, Any]) -> str:
    """Return the value of `expression`, as the tool of a model."""
    expression = arguments.get("expression")
    if type(expression) is not str or not expression.strip():
        raise ToolError("the calculator takes an expression")
    if len(expression) > LONGEST or not expression.isascii():
        raise ToolError(f"the expression is not plain, or longer than {LONGEST} characters")
    return written(_Parser(expression.replace("^", " ")).value())


def written(value: Fraction) -> str:
    """Return a number as text: whole if it is, else rounded half to even."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**DECIMALS)
    sign, whole, rest = "-" if scaled < 0 else "", *divmod(abs(scaled), 10**DECIMALS)
    digits = f"{rest:0{DECIMALS}d}".rstrip("0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


class _Parser:
    """Recursive descent over sums, products, signs and brackets."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ToolError(f"{text[at : at + 8].strip()!r} is not arithmetic")
            self._tokens.append(match[1] or match[2])
            at = match.end()
        self._at = 0

    def value(self) -> Fraction:
        found = self._sum(0)
        if self._at != len(self._tokens):
            raise ToolError(f"{self._tokens[self._at]!r} is one too many")
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._at += 1
        return token

    def _sum(self, depth: int) -> Fraction:
        found = self._product(depth)
        while self._next() in {"+", "-"}:
            found = _bounded(
                found + self._product(depth) if self._take() == "+" else found - self._product(depth)
            )
        return found

    def _product(self, depth: int) -> Fraction:
        found = self._factor(depth)
        while self._next() in {"*", "/"}:
            if self._take() == "*":
                found = _bounded(found * self._factor(depth))
                continue
            by = self._factor(depth)
            if not by:
                raise ToolError("a division by zero")
            found = _bounded(found / by)
        return found

    def _factor(self, depth: int) -> Fraction:
        if depth > DEEPEST:
            raise ToolError("there are too many brackets within each other")
        word = self._take()
        if word == "-":
            return -self._factor(depth + 1)
        if word == "(":
            found = self._sum(depth + 1)
            if self._take() != ")":
                raise ToolError("a bracket is not closed")
            return found
        if not word or not (word[0].isdigit() or word[0] == "."):
            raise ToolError("the expression breaks off" if not word else f"{word!r} is in the wrong place")
        return Fraction(word)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ToolError("the numbers become too large")
    return value
