"""Contracts that nobody should use, one fault each, for `contract test` to find."""

from __future__ import annotations

import functools
import os
import random
import socket
import time
from pathlib import Path

from echo_node.contract import Contract, Prompt, Score, random_from


class Good(Contract):
    """The task that the others spoil."""

    name, version = "good", "1"

    def prompt(self, key):
        number = str(random_from(key).below(10**6))
        return Prompt(f"Say {number}: ", {"answer": number})

    def score(self, prompt, completion):
        return Score(float(completion == prompt.data["answer"]), "compared")

    def answer(self, prompt):
        return prompt.data["answer"]


class Random(Good):
    name = "bad-random"

    def score(self, _prompt, _completion):
        return Score(random.random(), "a guess")


class OwnLuck(Good):
    """A generator of its own, without a seed, for prompts."""

    name = "bad-own-luck"

    def prompt(self, _key):
        number = str(random.Random().randrange(10**6))
        return Prompt(f"Say {number}: ", {"answer": number})


class Slow(Good):
    name = "bad-slow"

    def score(self, prompt, completion):
        time.sleep(0.15)
        return super().score(prompt, completion)


class Endless(Good):
    name = "bad-endless"

    def score(self, _prompt, _completion):
        while True:
            pass


class SlowOnHugeText(Good):
    """Quadratic in the length of the text."""

    name = "bad-quadratic"

    def score(self, prompt, completion):
        while completion.startswith("9"):
            completion = completion[1:]
        return super().score(prompt, completion)


class Leaking(Good):
    name = "bad-leak"
    seen: list[str] = []  # noqa: RUF012 -- the fault

    def score(self, prompt, completion):
        self.seen.append(completion + "!")
        return super().score(prompt, completion)


class Caching(Good):
    """No fault: a cache that is full some time."""

    name = "good-cache"

    def score(self, prompt, completion):
        return Score(float(_upper(completion) == prompt.data["answer"]), "compared")


@functools.lru_cache(maxsize=1000)
def _upper(text):
    return f"{text}".upper()


class Clock(Good):
    name = "bad-clock"

    def score(self, prompt, completion):
        late = int(time.time()) % 2
        return Score(max(0.0, super().score(prompt, completion).value - late / 2), "the early bird")


class HashOrder(Good):
    name = "bad-hash-order"

    def prompt(self, key):
        words = {f"word{n}" for n in range(8)}
        return Prompt(f"{super().prompt(key).text} {next(iter(words))}", super().prompt(key).data)


class OutOfRange(Good):
    name = "bad-range"

    def score(self, _prompt, completion):
        return Score(len(completion) / 5, "the more the better")


class Remembering(Good):
    """The first one who says something gets the point."""

    name = "bad-memory"

    def __init__(self, params=None):
        super().__init__(params)
        self.said = set()

    def score(self, prompt, completion):
        new = completion not in self.said
        self.said.add(completion)
        return Score(float(new and completion == prompt.data["answer"]), "first come, first served")


class Evaluating(Good):
    name = "bad-eval"

    def score(self, prompt, completion):
        try:
            value = eval(completion)  # noqa: S307 -- the fault
        except Exception:  # noqa: BLE001 -- as such contracts do
            value = None
        return Score(float(str(value) == prompt.data["answer"]), "evaluated")


class Writing(Good):
    name = "bad-outside"

    def score(self, prompt, completion):
        list(Path(os.sep).iterdir())
        return super().score(prompt, completion)


class Burglar(Good):
    """Does what it can to the machine on which it is tried, from its first prompt on."""

    name = "bad-burglar"

    def configure(self, params):
        self.at = Path(params.text("at", default="", longest=200))

    def prompt(self, key):
        self.rob()
        return super().prompt(key)

    def score(self, prompt, completion):
        return Score(super().score(prompt, completion).value, self.rob() or "compared")

    def rob(self):
        found = [os.environ.get("A_SECRET", "")]
        for deed in (
            (self.at / "marker").touch,
            (self.at / "key").unlink,
            (self.at / "key").read_text,
            lambda: os.kill(os.getppid(), 0) or "the parent is in reach",
            lambda: os.fork() or os._exit(0) or "a child",
            lambda: socket.socket() and "a socket",
        ):
            try:
                found.append(str(deed() or ""))
            except OSError:
                continue
        return " ".join(filter(None, found))


class OnePrompt(Good):
    name = "bad-variety"

    def prompt(self, key):
        return Prompt("Say 1: ", {"answer": "1"}) if key[0] < 250 else super().prompt(key)


class Generous(Good):
    """Whoever says nothing gets everything."""

    name = "bad-generous"

    def score(self, prompt, completion):
        return Score(float(completion.strip() in {"", prompt.data["answer"]}), "generous")


class Dying(Good):
    name = "bad-exit"

    def score(self, prompt, completion):
        if "\x00" in completion:
            os._exit(3)
        return super().score(prompt, completion)


class Raising(Good):
    name = "bad-raise"

    def score(self, prompt, completion):
        int(completion or "0")
        return super().score(prompt, completion)
