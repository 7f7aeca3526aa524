"""reasoning-gym contracts: any allowed generator, `knights-knaves` and `sokoban`.

A slot's key seeds the generator, which makes one item; its own scorer then scores the extracted
answer. The library is imported when a contract is made, and only the release whose scorers were
reviewed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import textwrap
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from echo_node.contract import extraction
from echo_node.contract.api import Contract, Params, Prompt, Score
from echo_node.contract.builtin import gym_allowed
from echo_node.contract.builtin.gym_boards import boards_let_go
from echo_node.contract.builtin.gym_entry import entry_of, entry_text
from echo_node.contract.keyed_rng import KeyStream, random_from
from echo_node.errors import ContractError, boundary

DEEPEST: Final = 32  # brackets within brackets: how many a parser can take depends on who has called it
_LIBRARY: Final = "reasoning_gym"
_PLOTS: Final = (
    "matplotlib",
    "matplotlib.animation",
    "matplotlib.collections",
    "matplotlib.pyplot",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""Modules for plots, which a library of that library imports."""
_INSTALL: Final = "pip install 'echo-node[gym]'"
_OURS: Final = ("seed", "size")  # what a generator has and a run does not set
_TRIES: Final = 8  # seeds for one key
_LARGEST: Final = 2**40


class GymTask(Contract):
    """Base of the reasoning-gym contracts.

    Parameters of all of them: `way`, where the answer stands (tags, boxed, after, last-line,
    whole); `chat`, whether the prompt goes through the model's chat template; `form`, the score of
    a wrong answer in the right place.
    """

    version = "1"

    def configure(self, params: Params) -> None:
        self.way = params.choice("way", *extraction.WAYS, default="tags")
        self.chat = params.flag("chat", default=False)
        self.form = params.real("form", default=0.0, low=0.0, high=0.5)
        self._made: dict[tuple[str, tuple[tuple[str, object], ...]], Any] = {}

    @abstractmethod
    def generator(self, luck: KeyStream) -> tuple[str, Mapping[str, object]]:
        """Return a slot's generator and its settings.

        What the scorer reads of the settings is the same for all slots.
        """

    def prompt(self, key: bytes) -> Prompt:
        luck = random_from(key)
        task, settings = self.generator(luck)
        item = self._item(task, settings, luck)
        data = {"entry": entry_text(item), "task": task}
        asked, asking = str(item["question"]), extraction.asking(self.way)
        if self.chat:
            return Prompt(asked, data, system=asking, chat=True)
        return Prompt(f"{asked}\n{asking}\n", data)

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = extraction.extract(completion, self.way)
        if answer is None:
            return Score(0.0, f"there is no answer, or it is longer than {extraction.LONGEST} characters")
        if _depth(answer) > DEEPEST:
            return Score(0.0, f"the answer has more than {DEEPEST} brackets within each other")
        try:
            value = self._judged(prompt, answer)
        except ContractError as error:
            return Score(0.0, error.what)
        return Score(value, f"{answer[:80]!r} is worth {value:g} to {prompt.data['task']}")

    def shape(self, prompt: Prompt, completion: str, score: Score) -> Score:  # noqa: ARG002 -- the form alone counts
        if score.value >= self.form or extraction.extract(completion, self.way) is None:
            return score
        return Score(self.form, f"{score.reason}; {self.form:g} for the form")

    def answer(self, prompt: Prompt) -> str:
        return extraction.written(str(entry_of(prompt.data["entry"])["answer"]), self.way)

    def _item(self, task: str, settings: Mapping[str, object], luck: KeyStream) -> Any:
        """Return the item of the first seed that the generator accepts; few fail."""
        problems = []
        for _ in range(_TRIES):
            seed = int.from_bytes(luck.take(8), "little") >> 1
            try:
                with boundary(ContractError, f"making an item of {task}"), _contained():
                    return self._seeded(task, settings, seed)[0]
            except ContractError as problem:
                problems.append(problem)
        raise problems[-1]

    def _judged(self, prompt: Prompt, answer: str) -> float:
        """Return the generator's own score; an answer that it cannot read is an error."""
        entry, task = entry_of(prompt.data["entry"]), prompt.data["task"]
        with boundary(ContractError, f"{answer[:80]!r} is no answer to {task}"), _contained():
            scorer = self._seeded(*self.generator(random_from(bytes(32))), seed=0)
            value = float(scorer.score_answer(answer, entry))
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"worth {value}, which is out of range")
            return value

    def _seeded(self, task: str, settings: Mapping[str, object], seed: int) -> Any:
        """Return the generator with this seed, cached where its set-up needs no seed."""
        if task in gym_allowed.MADE_ANEW:
            return _dataset(task, settings, seed)
        wanted = (task, tuple(sorted(settings.items())))
        if wanted not in self._made:
            self._made[wanted] = _dataset(task, settings, seed)
        self._made[wanted].seed = seed
        return self._made[wanted]


class ReasoningGym(GymTask):
    """Any allowed generator.

    Parameters: `task`, the generator's name (default chain_sum), and its own numbers, flags and
    texts.
    """

    name = "reasoning-gym"

    def configure(self, params: Params) -> None:
        super().configure(params)
        self.task = params.text("task", default="chain_sum", longest=64)
        if self.task in gym_allowed.REFUSED:
            raise ContractError(
                f"reasoning-gym's {self.task} is refused: {gym_allowed.REFUSED[self.task]}",
                advice="`echo-node contract show reasoning-gym` names those that may be used",
            )
        if self.task not in gym_allowed.ALLOWED:
            raise ContractError(
                f"reasoning-gym {gym_allowed.RELEASE} has no generator {self.task!r}",
                advice="`echo-node contract show reasoning-gym` names them",
            )
        self.settings = _settings(self.task, params)
        with boundary(ContractError, f"setting up {self.task} with {self.settings}"):
            _dataset(self.task, self.settings, 0)

    def generator(self, luck: KeyStream) -> tuple[str, Mapping[str, object]]:  # noqa: ARG002 -- the same for all
        return self.task, self.settings


ReasoningGym.__doc__ = f"{ReasoningGym.__doc__}\n" + textwrap.fill(
    f"Generators: {', '.join(sorted(gym_allowed.ALLOWED))}.", width=110
)


class KnightsKnaves(GymTask):
    """Knights and knaves: find out who tells the truth.

    Parameters: `fewest` and `most` people (3 and 5), `depth` and `width` of their statements (2).
    """

    name = "knights-knaves"

    def configure(self, params: Params) -> None:
        super().configure(params)
        _library()
        self.fewest = params.whole("fewest", default=3, low=2, high=8)
        self.most = params.whole("most", default=max(self.fewest, 5), low=self.fewest, high=8)
        self.depth = params.whole("depth", default=2, low=1, high=4)
        self.width = params.whole("width", default=2, low=1, high=4)

    def generator(self, luck: KeyStream) -> tuple[str, Mapping[str, object]]:
        people = luck.between(self.fewest, self.most)
        shape = {"depth_constraint": self.depth, "width_constraint": self.width}
        return "knights_knaves", {"n_people": people, **shape}


class Sokoban(GymTask):
    """Push the boxes onto the goals.

    Parameters: `side` of the square (6), `boxes` (2), `depth` of the search (20).
    """

    name = "sokoban"

    def configure(self, params: Params) -> None:
        super().configure(params)
        _library()
        side = params.whole("side", default=6, low=6, high=10)
        boxes = params.whole("boxes", default=2, low=1, high=4)
        self.settings = {
            **dict.fromkeys(("min_w", "max_w", "min_h", "max_h"), side),
            **dict.fromkeys(("min_boxes", "max_boxes"), boxes),
            "max_depth": params.whole("depth", default=20, low=10, high=80),
        }

    def generator(self, luck: KeyStream) -> tuple[str, Mapping[str, object]]:  # noqa: ARG002 -- the same for all
        return "sokoban", self.settings


def _library() -> Any:
    """reasoning-gym's factory, if the release is the one whose scorers were read."""
    try:
        found = version(gym_allowed.PACKAGE)
        with _without_plots():
            from reasoning_gym import factory  # noqa: PLC0415 -- seconds of work that most runs never need
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or gym_allowed.PACKAGE
        raise ContractError(f"this contract needs {missing}, which is not here", advice=_INSTALL) from error
    if found != gym_allowed.RELEASE:
        raise ContractError(
            f"reasoning-gym {found} is here; the release whose scorers were read is {gym_allowed.RELEASE}",
            advice=_INSTALL,
        )
    return factory


@contextlib.contextmanager
def _without_plots() -> Iterator[None]:
    """Let the library be imported without matplotlib.

    One of its tasks could plot with it. matplotlib wants a folder that it can write to, and a jail
    has none.
    """
    if _LIBRARY in sys.modules or _PLOTS[0] in sys.modules:
        yield
        return
    modules = {name: _NoPlots(name) for name in _PLOTS}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in _PLOTS:
            sys.modules.pop(name, None)


class _NoPlots(ModuleType):
    """Stand-in for a matplotlib module during import; all its names are types."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", object)


def _dataset(task: str, settings: Mapping[str, object], seed: int) -> Any:
    return _library().create_dataset(task, **settings, seed=seed, size=1)


def _settings(task: str, params: Params) -> dict[str, object]:
    """Return the generator's defaults, overridden by the run's values."""
    taken: dict[str, object] = {}
    for field in dataclasses.fields(_library().DATASETS[task][1]):
        usual: object = field.default
        if field.name in _OURS:
            continue
        if type(usual) is bool:
            taken[field.name] = params.flag(field.name, default=usual)
        elif type(usual) is int:
            taken[field.name] = params.whole(field.name, default=usual, low=-_LARGEST, high=_LARGEST)
        elif type(usual) is float:
            taken[field.name] = params.real(field.name, default=usual, low=-_LARGEST, high=_LARGEST)
        elif type(usual) is str and usual.isprintable():
            taken[field.name] = params.text(field.name, default=usual, longest=200)
    return taken


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Suppress the library's output and free the boards that it made.

    What it prints may be untrusted text.
    """
    with contextlib.redirect_stdout(io.StringIO()), boards_let_go():
        yield


def _depth(text: str) -> int:
    depth = most = 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        most = max(most, depth)
    return most
