"""Tokenizer of a run: text to ids, ids to text, and chat messages to text.

Reads Hugging Face folders without torch or transformers. The chat template is untrusted code: it
runs in jinja's sandbox, without clock or files, and cannot build large values by multiplication
or padding. Time and memory are otherwise not bounded here: contracts render in their sandbox.
Engines never see text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import LoopControlExtension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import ArrayLike, NDArray

from echo_node.errors import ContractError, DefectError, StoreError, boundary

LONGEST_TEMPLATE: Final = 256 * 1024  # characters
LONGEST_PROMPT: Final = 4 * 1024 * 1024  # characters that a template may give
_PADDING_METHODS: Final = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}
_PADDING_FILTERS: Final = {"center", "format", "indent", "wordwrap"}
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer and chat template of a model's folder.

    `vocab_size` counts the ids that have a text; a model may have more, which are never sampled.
    """

    def __init__(
        self, words: tokenizers.Tokenizer, settings: Mapping[str, Any], template: str | None
    ) -> None:
        words.no_truncation()  # whatever the file says: a prompt is taken whole, and alone
        words.no_padding()
        self._words = words
        self._named = {name: text for name in _NAMED if (text := _text(settings.get(name))) is not None}
        self._template = template
        self.vocab_size: int = words.get_vocab_size(with_added_tokens=True)
        end = words.token_to_id(self._named.get("eos_token", ""))
        self.end_tokens: frozenset[int] = frozenset() if end is None else frozenset({end})
        """The folder's own end token; a manifest may name others."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, if present, tokenizer_config.json and chat_template.jinja."""
        with boundary(
            StoreError, f"reading the tokenizer of {folder}", advice="fetch the model's files again"
        ):
            words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            written = folder / "tokenizer_config.json"
            settings = json.loads(written.read_text("utf-8")) if written.exists() else {}
            if not isinstance(settings, dict):
                raise StoreError(f"{written} is no table of settings")
            return cls(words, settings, _template(folder, settings))

    @property
    def has_template(self) -> bool:
        """Return whether there is a chat template for `render`."""
        return self._template is not None

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text and no others; names of special tokens become those tokens."""
        with boundary(ContractError, "turning a text into tokens of this model"):
            return np.array(self._words.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: ArrayLike, end_tokens: Collection[int] | None = None) -> str:
        """Return the text of ids, without the end token if it is the last.

        Other special tokens appear by name, so `31284$` reads `31284`, and a stop elsewhere is
        visible to the scorer. `end_tokens` are the run's, by default the folder's own. Ids
        without a text are left out.
        """
        with boundary(DefectError, "turning tokens into text"):
            row: list[int] = np.asarray(ids, dtype=np.int64).tolist()
            if row and row[-1] in (self.end_tokens if end_tokens is None else end_tokens):
                row.pop()
            return self._words.decode(row, skip_special_tokens=False)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render messages by the model's chat template."""
        if self._template is None:
            raise ContractError("this model has no chat template", advice="write the prompt as plain text")
        known = {
            **self._named,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, length = [], 0
        with boundary(ContractError, "rendering the model's chat template"):
            for piece in _compile(self._template).generate(known):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST_PROMPT:
                    raise SecurityError(f"the text is longer than {LONGEST_PROMPT} characters")
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without operations that build a large value from a short template."""

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


@functools.lru_cache(maxsize=4)
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


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    written = folder / "chat_template.jinja"
    if written.exists():
        return written.read_text("utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {str(each.get("name")): each.get("template") for each in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise StoreError("the chat template is no text")
    return found


def _text(token: Any) -> str | None:
    """Return a named token's text, which is a string or a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """Dump plain JSON: jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent if indent is None else min(indent, 8))


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _no_clock(_format: str) -> NoReturn:
    raise TemplateError("the template asks for the time, and a prompt must be the same for all")
