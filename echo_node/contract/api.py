"""What the author of a reward contract writes, and how the program calls it:

    class Parity(Contract):
        name, version = "parity", "1"
        def prompt(self, key): return Prompt(f"Is {random_from(key).below(100)} even? ")
        def score(self, prompt, completion): ...

A contract is pure: the same key gives the same prompt, the same prompt and text the same score, on every machine,
in every process. It knows nothing of tokens, peers or time, and its text comes from strangers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, final

from echo_node.errors import ContractError, boundary, one_line


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked, and what the contract needs to know again when it scores the answer.

    The model reads `text` as it stands; with `chat` it reads `messages` through its own chat template instead.
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
        """The prompt as a conversation: what the system says, if anything, and then the text as the user's words."""
        said = [("system", self.system)] if self.system else []
        return [{"role": role, "content": text} for role, text in (*said, ("user", self.text))]


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion is worth, with a reason of one printable line, whatever text is quoted in it."""

    value: float
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value) + 0.0)  # a -0.0 would have other bytes
        object.__setattr__(self, "reason", one_line(self.reason))


@final
class Params:
    """The parameters of a run, as its manifest has them, read one by one. What nobody reads is an error."""

    def __init__(self, contract: str, given: Mapping[str, object]) -> None:
        self._contract = contract
        self._given = dict(given)
        self._known: set[str] = set()

    def whole(self, name: str, *, default: int, low: int, high: int) -> int:
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, *, default: float, low: float, high: float) -> float:
        value = self._take(name, default)
        if type(value) not in {int, float} or not low <= float(value) <= high:
            raise self._bad(name, value, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._take(name, default)
        if type(value) is not bool:
            raise self._bad(name, value, "true or false")
        return value

    def choice(self, name: str, *options: str, default: str) -> str:
        value = self._take(name, default)
        if type(value) is not str or value not in options:
            raise self._bad(name, value, f"one of {', '.join(options)}")
        return value

    def text(self, name: str, *, default: str, longest: int) -> str:
        value = self._take(name, default)
        if type(value) is not str or len(value) > longest or not value.isprintable():
            raise self._bad(name, value, f"a line of at most {longest} characters")
        return value

    def finish(self) -> None:
        """Raise if something was given that the contract does not have."""
        for name in sorted(self._given.keys() - self._known):
            known = ", ".join(sorted(self._known)) or "none"
            raise ContractError(f"{self._contract} has no parameter {name!r}", advice=f"it has: {known}")

    def _take(self, name: str, default: object) -> Any:
        self._known.add(name)
        return self._given.get(name, default)

    def _bad(self, name: str, value: object, wanted: str) -> ContractError:
        return ContractError(
            f"{self._contract}: parameter {name!r} is {wanted}, not {value!r}",
            advice="give it another value, or leave it out for its default",
        )


class Contract(ABC):
    """A task: prompts from keys, and scores for what comes back, from `low` to `high`."""

    name: ClassVar[str]
    version: ClassVar[str]
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0

    def __init__(self, params: Mapping[str, object] | None = None) -> None:
        given = Params(f"{self.name} {self.version}", params or {})
        self.configure(given)
        given.finish()

    def configure(self, params: Params) -> None:  # noqa: B027 -- most have none, and need not say so
        """Read the parameters. A contract without any leaves this out."""

    @abstractmethod
    def prompt(self, key: bytes) -> Prompt:
        """The prompt of a slot, from the slot's 32-byte key alone."""

    @abstractmethod
    def score(self, prompt: Prompt, completion: str) -> Score:
        """What the completion is worth. It is text without the end token, written by a stranger."""

    def shape(self, prompt: Prompt, completion: str, score: Score) -> Score:  # noqa: ARG002 -- as `answer`
        """What the trainer is to learn from instead of the plain score, such as a little for a good form."""
        return score

    def answer(self, prompt: Prompt) -> str:  # noqa: ARG002 -- for those who override it
        """A completion that shows a good score off, where the contract can tell one; used in examples and vectors."""
        return ""


def prompt_of(contract: Contract, key: bytes) -> Prompt:
    """The contract's prompt; whatever goes wrong in it is a `ContractError`."""
    with boundary(ContractError, f"{contract.name} {contract.version}: making a prompt"):
        prompt: object = contract.prompt(key)
        if not isinstance(prompt, Prompt) or type(prompt.text) is not str:
            raise TypeError("it made no Prompt with a text")
        if type(prompt.system) is not str or type(prompt.chat) is not bool:
            raise TypeError("the system's words are a text, and chat is true or false")
        prompt.text.encode()
        prompt.system.encode()
        return prompt


def score_of(contract: Contract, prompt: Prompt, completion: str) -> Score:
    """The contract's shaped score within its range; whatever goes wrong in it is a `ContractError`."""
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
