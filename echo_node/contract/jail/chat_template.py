"""Chat template in the jail: messages to text, by jinja's sandbox.

A template is code of whoever made the model. It has neither clock nor files here and cannot build
large values by multiplication or padding; time and memory are bounded by the jail around it, since
a template can grow a value in more ways than anybody lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import LoopControlExtension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from echo_node.errors import ContractError, boundary

LONGEST_TEMPLATE: Final = 256 * 1024  # characters
LONGEST_PROMPT: Final = 4 * 1024 * 1024  # bytes that a template may give
_PADDING_METHODS: Final = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}
_PADDING_FILTERS: Final = {"center", "format", "indent", "wordwrap"}


class ChatTemplate:
    """A template, compiled when it is first rendered."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._compiled: Template | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text; whatever goes wrong is a `ContractError`."""
        with boundary(ContractError, "rendering the model's chat template"):
            if self._compiled is None:
                self._compiled = _compile(self._source)
            pieces, size = [], 0
            for piece in self._compiled.generate(variables):
                pieces.append(piece)
                size += len(piece.encode())
                if size > LONGEST_PROMPT:
                    raise SecurityError(f"the text is longer than {LONGEST_PROMPT} bytes")
            return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja sandbox without operations that grow a large value from a short template."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute in _PADDING_METHODS:
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and argument in _PADDING_METHODS:  # x["format"] is x.format
            return self.unsafe_undefined(obj, argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not all(isinstance(side, int | float) for side in (left, right)):
            raise SecurityError(f"{operator} is for numbers here")
        if operator == "**" or max(abs(left), abs(right)) > 2**32:
            raise SecurityError("a template may not calculate with large numbers")
        return super().call_binop(context, operator, left, right)


def _compile(source: str) -> Template:
    if len(source) > LONGEST_TEMPLATE:
        raise SecurityError(f"{len(source)} characters are more than {LONGEST_TEMPLATE}")
    # The settings with which models' templates are written.
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _no_clock}
    for unbounded in ("lipsum", "cycler"):
        sandbox.globals.pop(unbounded)
    for padding in _PADDING_FILTERS:
        sandbox.filters.pop(padding)
    return sandbox.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Dump plain JSON, since jinja's own filter escapes for HTML.

    Models were not trained on such escapes.
    """
    return json.dumps(value, ensure_ascii=False, indent=indent if indent is None else min(indent, 8))


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _no_clock(_format: str) -> NoReturn:
    raise TemplateError("the template asks for the time, and a prompt must be the same for all")
