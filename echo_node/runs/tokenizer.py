"""Tokenizer of a run: text to ids, ids to text, and chat messages to text.

Reads Hugging Face folders without torch or transformers. The chat template is untrusted code: it
is rendered in a jailed process of its own (`contract/jail/chat_template.py`), with bounds on time
and memory. Engines never see text.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray

from echo_node.contract.jail.serde import TEMPLATE
from echo_node.contract.sandbox import Sandbox
from echo_node.errors import ConfigError, ContractError, DefectError, StoreError, boundary

_RENDER_SECONDS: Final = 5.0
"""Most time for one conversation."""
_RENDER_BYTES: Final = 256 * 2**20
"""Most memory of the process that renders."""
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Part(NamedTuple):
    """A part of a text that a model reads: the chat template's own, or content."""

    text: str
    is_content: bool = False


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
        self._sandbox: Sandbox | None = None
        self._plain: dict[bool, tokenizers.Tokenizer] = {}
        """The same without added tokens, for untrusted text: at the beginning, and further on."""
        self._added = frozenset(words.get_added_tokens_decoder())
        self._lock = threading.Lock()
        self.vocab_size: int = words.get_vocab_size(with_added_tokens=True)
        end = words.token_to_id(self._named.get("eos_token", ""))
        self.end_tokens: frozenset[int] = frozenset() if end is None else frozenset({end})
        """The folder's own end token; a manifest may name others."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        The last two are optional.
        """
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
        """Return the ids of a text, without added ones.

        Names of special tokens become those tokens.
        """
        with boundary(ContractError, "turning a text into tokens of this model"):
            return np.array(self._words.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_content(self, text: str, forbidden: Collection[int] = ()) -> NDArray[np.int64]:
        """Return the ids of untrusted text, none of which is a special or added token.

        The name of such a token is spelled out, so that nobody forges a turn by writing it.
        `forbidden` are further ids that must not come out, such as end tokens.
        """
        return self.encode_parts([Part(text, is_content=True)], forbidden)

    def encode_parts(
        self, parts: Sequence[Part], forbidden: Collection[int] = (), *, first: bool = True
    ) -> NDArray[np.int64]:
        """Return the ids of a conversation; contents yield no special or added ids.

        The template's text is cut at those ids. What lies between two of them, text of the
        template and contents together, is encoded as one text without any. `forbidden` are ids
        that contents must not yield either. Unless `first`, other ids stand before these.
        """
        found: list[int] = []
        run: list[Part] = []
        with boundary(ContractError, "turning a text into tokens of this model"):
            for part in parts:
                for piece in [part] if part.is_content else self._cut(part.text):
                    if isinstance(piece, Part):
                        run.append(piece)
                        continue
                    found += [*self._spelled(run, forbidden, first=first and not found), piece]
                    run = []
            found += self._spelled(run, forbidden, first=first and not found)
        return np.array(found, dtype=np.int64)

    def added_in(self, text: str) -> str | None:
        """Return the first special or added token that a text spells, or None."""
        names = (str(each) for each in self._words.get_added_tokens_decoder().values())
        return next((name for name in names if name in text), None)

    def text_after(self, text: str, token: int) -> str | None:
        """Return what follows a token in a text of the template; None without it."""
        encoded = self._words.encode(text, add_special_tokens=False)
        places = zip(encoded.ids, encoded.offsets, strict=True)
        return next((text[end:] for each, (_, end) in places if each == token), None)

    def _cut(self, text: str) -> Iterator[Part | int]:
        """Cut a text of the template into special or added ids and what lies between them."""
        encoded = self._words.encode(text, add_special_tokens=False)
        at = 0
        for each, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if each in self._added:
                if start > at:
                    yield Part(text[at:start])
                yield each
                at = end
        if at < len(text):
            yield Part(text[at:])

    def _spelled(self, run: Sequence[Part], forbidden: Collection[int], *, first: bool) -> list[int]:
        """Encode a text; what would become a reserved id is encoded in two parts instead."""
        text = "".join(part.text for part in run)
        if not text:
            return []
        contents = [place for part in run for place in itertools.repeat(part.is_content, len(part.text))]
        found: list[int] = []
        rest = [(0, len(text))]
        while rest:
            begin, stop = rest.pop()
            words = self._without_added_tokens(first=first and not begin)
            encoded = words.encode(text[begin:stop], add_special_tokens=False)
            offsets = [(begin + start, begin + end) for start, end in encoded.offsets]
            for each, (start, end) in zip(encoded.ids, offsets, strict=True):
                if each in self._added or (each in forbidden and any(contents[start:end])):
                    break
            else:
                found += encoded.ids
                continue
            if end - start < 2:
                raise ContractError(f"the text {text[start:end]!r} can only be written with a reserved token")
            middle = start + (end - start) // 2
            rest += [(middle, stop), (begin, middle)]
        return found

    def _without_added_tokens(self, *, first: bool) -> tokenizers.Tokenizer:
        if first not in self._plain:
            self._plain[first] = _without_added_tokens(self._words, first=first)
        return self._plain[first]

    def stop_token(self, text: str) -> int:
        """Return the one id that stands for a stop text, and for nothing more or less."""
        ids = self.encode(text)
        if len(ids) != 1 or self.decode(ids, ()) != text:
            found = [self.decode([each], ()) for each in ids[:8]]
            raise ConfigError(
                f"the stop text {text!r} is no single token of this model, but {found}",
                advice="stop at a text that is one token, such as a newline",
            )
        return int(ids[0])

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
        known = {**variables, "add_generation_prompt": add_generation_prompt}
        return self.render_all([messages], **known)[0]

    def render_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[str]:
        """Render many conversations; together they cost little more than one."""
        if not conversations:
            return []
        if self._template is None:
            raise ContractError("this model has no chat template", advice="write the prompt as plain text")
        known = {**self._named, **variables, "add_generation_prompt": add_generation_prompt}
        plain = [[dict(message) for message in messages] for messages in conversations]
        with self._lock:
            if self._sandbox is None:
                self._sandbox = Sandbox(
                    *(TEMPLATE, "", {"template": self._template}),
                    seconds=_RENDER_SECONDS,
                    memory_bytes=_RENDER_BYTES,
                    require=("limits",),
                )
        return self._sandbox.renders([{**known, "messages": messages} for messages in plain])

    def close(self) -> None:
        """End the process that renders, if there is one."""
        if self._sandbox is not None:
            self._sandbox.close()


def _without_added_tokens(words: tokenizers.Tokenizer, *, first: bool) -> tokenizers.Tokenizer:
    settings = json.loads(words.to_str())
    settings["added_tokens"] = []
    before = settings["pre_tokenizer"] or {}
    for each in before.get("pretokenizers", [before]):
        if not first and each.get("prepend_scheme") == "first":
            each["prepend_scheme"] = "never"
    return tokenizers.Tokenizer.from_str(json.dumps(settings))


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
