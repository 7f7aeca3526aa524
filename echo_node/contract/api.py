"""Public interface of reward contracts: what an author writes.

    class Parity(Contract):
        name, version = "parity", "1"
        def prompt(self, key): return Prompt(f"Is {random_from(key).below(100)} even? ")
        def score(self, prompt, completion): ...

A contract is pure: the same key gives the same prompt, and the same prompt and completion give the
same score, on every machine and in every process. Completions are untrusted text: compare or parse
them, never execute them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, final

from echo_node.errors import ContractError, boundary, one_line


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the model, and the data that the contract needs to score the answer.

    The model reads `text` as it stands; with `chat` it reads `messages` through its own chat
    template instead.
    """

    text: str
    data: Mapping[str, str] = field(default_factory=dict, hash=False)
    system: str = ""
    chat: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (self.text, dict(self.data), self.system, self.chat)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation: the system message, if any, and the user message."""
        system = [("system", self.system)] if self.system else []
        return [{"role": role, "content": text} for role, text in (*system, ("user", self.text))]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a completion, with a reason of one printable line."""

    value: float
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value) + 0.0)  # -0.0 would have other bytes than 0.0
        object.__setattr__(self, "reason", one_line(self.reason))


@final
class Params:
    """The parameters of a run from its manifest, read one by one; unread ones are an error."""

    def __init__(self, contract: str, values: Mapping[str, object]) -> None:
        self._contract = contract
        self._values = dict(values)
        self._known: set[str] = set()

    def whole(self, name: str, *, default: int, low: int, high: int) -> int:
        """Return an integer parameter from `low` to `high`."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, *, default: float, low: float, high: float) -> float:
        """Return a number parameter from `low` to `high`."""
        value = self._take(name, default)
        if type(value) not in {int, float} or not low <= float(value) <= high:
            raise self._bad(name, value, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean parameter."""
        value = self._take(name, default)
        if type(value) is not bool:
            raise self._bad(name, value, "true or false")
        return value

    def choice(self, name: str, *options: str, default: str) -> str:
        """Return a text parameter that is one of `options`."""
        value = self._take(name, default)
        if type(value) is not str or value not in options:
            raise self._bad(name, value, f"one of {', '.join(options)}")
        return value

    def text(self, name: str, *, default: str, longest: int) -> str:
        """Return a one-line text parameter of at most `longest` characters."""
        value = self._take(name, default)
        if type(value) is not str or len(value) > longest or not value.isprintable():
            raise self._bad(name, value, f"a line of at most {longest} characters")
        return value

    def finish(self) -> None:
        """Refuse parameters that the contract does not have."""
        for name in sorted(self._values.keys() - self._known):
            known = ", ".join(sorted(self._known)) or "none"
            raise ContractError(f"{self._contract} has no parameter {name!r}", advice=f"it has: {known}")

    def _take(self, name: str, default: object) -> Any:
        self._known.add(name)
        return self._values.get(name, default)

    def _bad(self, name: str, value: object, wanted: str) -> ContractError:
        return ContractError(
            f"{self._contract}: parameter {name!r} is {wanted}, not {value!r}",
            advice="give it another value, or leave it out for its default",
        )


class Contract(ABC):
    """A task: prompts from keys, and scores of completions from `low` to `high`."""

    name: ClassVar[str]
    version: ClassVar[str]
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0
    reads_rows: ClassVar[bool] = False
    """Whether it makes its prompts of the rows of a run's data set, by `row_prompt`."""

    def __init__(
        self, params: Mapping[str, object] | None = None, rows: Sequence[Mapping[str, str]] = ()
    ) -> None:
        self.rows = rows
        """Rows of the run's data set that it may draw from: `problem` and `answer`."""
        reader = Params(f"{self.name} {self.version}", params or {})
        self.configure(reader)
        reader.finish()

    def configure(self, params: Params) -> None:  # noqa: B027 -- most have none, and need not say so
        """Read the parameters. A contract without any leaves this out."""

    @abstractmethod
    def prompt(self, key: bytes) -> Prompt:
        """Return the prompt of a slot, from the slot's 32-byte key alone."""

    def held_out(self, key: bytes) -> Prompt:
        """Return a prompt to evaluate with, which `prompt` should never return.

        By default that of the key itself: the keys of an evaluation are never those of a slot. A
        task with few problems sets some of them apart.
        """
        return self.prompt(key)

    def row_prompt(self, row: Mapping[str, str]) -> Prompt:
        """Return the prompt of a row of the data set; for contracts that read rows."""
        raise NotImplementedError(f"{self.name} makes no prompts of rows, such as {row}")

    @abstractmethod
    def score(self, prompt: Prompt, completion: str) -> Score:
        """Return the score of a completion: untrusted text, without the end token."""

    def shape(self, prompt: Prompt, completion: str, score: Score) -> Score:  # noqa: ARG002 -- as `answer`
        """Return the reward to learn from, such as a little for good form; default: `score`."""
        return score

    def answer(self, prompt: Prompt) -> str:  # noqa: ARG002 -- for those who override it
        """Return a completion that scores well, if there is one; for examples and pin vectors."""
        return ""


def prompt_of(contract: Contract, key: bytes, *, held_out: bool = False) -> Prompt:
    """Return the contract's prompt; whatever goes wrong in it is a `ContractError`."""
    with boundary(ContractError, f"{contract.name} {contract.version}: making a prompt"):
        prompt: object = contract.held_out(key) if held_out else contract.prompt(key)
        if not isinstance(prompt, Prompt) or type(prompt.text) is not str:
            raise TypeError("it made no Prompt with a text")
        if type(prompt.system) is not str or type(prompt.chat) is not bool:
            raise TypeError("the system's words are a text, and chat is true or false")
        prompt.text.encode()
        prompt.system.encode()
        return prompt


def score_of(contract: Contract, prompt: Prompt, completion: str) -> Score:
    """Return the contract's shaped score; an error or a score out of range is a `ContractError`."""
    with boundary(ContractError, f"{contract.name} {contract.version}: scoring a completion"):
        plain: object = contract.score(prompt, completion)
        if not isinstance(plain, Score):
            raise TypeError("it gave no Score")
        score: object = contract.shape(prompt, completion, plain)
        if not isinstance(score, Score):
            raise TypeError("its shaping gave no Score")
        if not math.isfinite(score.value) or not contract.low <= score.value <= contract.high:
            raise ValueError(f"{score.value} is not from {contract.low} to {contract.high}")
        return score
