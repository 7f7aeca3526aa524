"""Public interface of reward contracts: what an author writes.

    class Parity(Contract):
        name, version = "parity", "1"
        def prompt(self, key): return Prompt(f"Is {random_from(key).below(100)} even? ")
        def score(self, prompt, completion): ...

A contract is pure: the same key gives the same prompt, and the same prompt and completion give the
same score, on every machine and in every process. Completions are untrusted text: compare or parse
them, never execute them.

A contract that defines `reply` is an environment: the model takes turns, and the contract answers
each of them. `score` then gets the list of turns. Replies are pure too: everybody recomputes them.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, final

from echo_node.errors import ContractError, boundary, one_line


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the model, and the data that scoring its answer needs.

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


REPLY_BYTES: Final = 65_536
"""Most bytes of one reply of an environment."""
_SCRIPT_TURNS: Final = 256
"""Most turns of a script, as of a completion on the wire."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The text of one turn of the model, and what the environment answered to it."""

    text: str
    reply: str | None = None
    """None: nothing yet, or the episode was over."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of an environment to a turn; `done` ends the episode.

    The model does not read the text of a last reply.
    """

    text: str = ""
    done: bool = False


class Episode(Protocol):
    """An episode in progress, for environments with costly state."""

    def step(self, text: str, /) -> Reply:
        """Return the answer to the model's next turn."""


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
    """Parameters of a run from its manifest; unread ones are an error."""

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
    role: ClassVar[str] = "user"
    """Role of its replies in the chat template: `user`, or `tool`."""
    replayable: ClassVar[bool] = True
    """Whether everybody can recompute its replies.

    If not (a clock, a judge), only samplers that the manifest names may fill slots.
    """

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
    def score(self, prompt: Prompt, completion: Any) -> Score:
        """Return the score of a completion: untrusted text, without the end token.

        Of an environment it is the list of turns, each with the model's text.
        """

    def shape(self, prompt: Prompt, completion: Any, score: Score) -> Score:  # noqa: ARG002 -- as `answer`
        """Return the reward to learn from, such as a little for good form.

        By default it is `score`.
        """
        return score

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply:
        """Answer the last of these turns, from the prompt and the turns alone.

        By default the episode of `begin` is played again.
        """
        episode = self.begin(prompt)
        replies = [episode.step(turn.text) for turn in turns]
        return replies[-1]

    def begin(self, prompt: Prompt) -> Episode:
        """Begin an episode whose steps give the same replies as `reply`.

        It is used instead of `reply`, where that would compute the state afresh.
        """
        raise NotImplementedError(f"{self.name} has no episodes, such as of {prompt.text[:40]!r}")

    def act(self, prompt: Prompt, turns: Sequence[Turn]) -> str:  # noqa: ARG002 -- as `answer`
        """Return the next turn of one who plays well, if there is one; for environments."""
        return ""

    @property
    def has_environment(self) -> bool:
        """Return whether it answers the model's turns."""
        mine = type(self)
        return mine.reply is not Contract.reply or mine.begin is not Contract.begin

    def answer(self, prompt: Prompt) -> str:  # noqa: ARG002 -- for those who override it
        """Return a completion that scores well, if any; for examples and pin vectors."""
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


def reply_of(contract: Contract, prompt: Prompt, turns: Sequence[Turn]) -> Reply:
    """Return the environment's answer; whatever goes wrong in it is a `ContractError`."""
    with boundary(ContractError, f"{contract.name} {contract.version}: answering a turn"):
        return checked_reply(contract.reply(prompt, list(turns)))


def checked_reply(reply: object) -> Reply:
    """Return a reply of the right form; raise otherwise."""
    if not isinstance(reply, Reply) or type(reply.text) is not str or type(reply.done) is not bool:
        raise TypeError("it gave no Reply with a text")
    if not reply.done and not 1 <= len(reply.text.encode()) <= REPLY_BYTES:
        raise ValueError(f"a reply of {len(reply.text.encode())} bytes, where 1 to {REPLY_BYTES} are allowed")
    return reply


def script_of(text: str) -> list[str]:
    """Return the model's turns in a text: a JSON array of texts, or the text alone."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    is_script = isinstance(found, list) and found and all(type(each) is str for each in found)
    return found[:_SCRIPT_TURNS] if is_script else [text]


def play(contract: Contract, prompt: Prompt, texts: Sequence[str]) -> tuple[list[Turn], list[Reply]]:
    """Play an episode with these turns of the model; return the turns and all replies."""
    turns: list[Turn] = []
    replies: list[Reply] = []
    for text in texts:
        reply = reply_of(contract, prompt, [*turns, Turn(text)])
        replies.append(reply)
        turns.append(Turn(text, None if reply.done else reply.text))
        if reply.done:
            break
    return turns, replies


def own_answer(contract: Contract, prompt: Prompt, most: int = 16) -> str:
    """Return the contract's own answer to a prompt.

    For an environment that is a script of its own turns.
    """
    with boundary(ContractError, f"{contract.name} {contract.version}: answering its own prompt"):
        if not contract.has_environment:
            answer: object = contract.answer(prompt)
            if type(answer) is not str:
                raise TypeError("it gave no text")
            return answer
        texts: list[str] = []
        turns: list[Turn] = []
        while len(texts) < most and (not turns or turns[-1].reply is not None):
            texts.append(contract.act(prompt, turns))
            turns, _ = play(contract, prompt, texts)
        return json.dumps(texts, ensure_ascii=False)


def score_of(contract: Contract, prompt: Prompt, completion: str | Sequence[Turn]) -> Score:
    """Return the contract's shaped score of a completion.

    An error or a score out of range is a `ContractError`. To an environment a text is a script,
    which is played first.
    """
    if contract.has_environment and isinstance(completion, str):
        completion, _ = play(contract, prompt, script_of(completion))
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
