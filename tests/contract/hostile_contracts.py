"""Contracts that do what a contract should not. The tests install this file as `hostile`."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from pathlib import Path

from echo_node.contract import Contract, Prompt, Score


class Executing(Contract):
    """Executes what it scores, as careless scorers do.

    `value` and `told` are what the text leaves behind.
    """

    name, version = "executing", "1"

    def prompt(self, key: bytes) -> Prompt:
        if key == b"\1" * 32:
            raise ZeroDivisionError("no prompt for this one")
        if key == b"\2" * 32:
            os._exit(3)
        if key == b"\3" * 32:
            return Prompt("x" * 2**21)
        return Prompt("Write a program: ", {"key": key.hex()}, "You are a programmer.", chat=True)

    def score(self, prompt: Prompt, completion: str) -> Score:
        left = {"prompt": prompt}
        exec(completion, left)  # noqa: S102 -- this is what the jail is for
        return Score(left.get("value", 0.5), str(left.get("told", "")))

    def answer(self, _prompt: Prompt) -> str:
        return "value = 1.0"


class Leaking(Contract):
    """It keeps 48 MiB of every score, and gives from -2 to 2."""

    name, version = "leaking", "1"
    low, high = -2.0, 2.0

    def __init__(self, params=None):
        super().__init__(params)
        self.kept = []

    def prompt(self, _key: bytes) -> Prompt:
        return Prompt("")

    def score(self, _prompt: Prompt, completion: str) -> Score:
        self.kept.append(bytes(48 * 2**20))
        return Score(float(completion), "as you say")


class Reading(Contract):
    """It reads a file when it is made or when it scores."""

    name, version = "reading", "1"

    def configure(self, params):
        self.file = params.text("file", default="", longest=500)
        self.early = Path(self.file).read_text() if params.flag("early", default=False) else None

    def prompt(self, _key: bytes) -> Prompt:
        return Prompt("")

    def score(self, _prompt: Prompt, _completion: str) -> Score:
        return Score(1.0, self.early or Path(self.file).read_text())


class Threaded(Executing):
    """It starts a thread when it is made, which opens files for others."""

    name, version = "threaded", "1"

    def configure(self, _params):
        self.wanted, self.found = queue.Queue(), queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                self.found.put(Path(self.wanted.get()).read_text())
            except OSError as error:
                self.found.put(str(error))

    def score(self, prompt: Prompt, completion: str) -> Score:
        def ask_thread(path):
            self.wanted.put(path)
            return self.found.get(timeout=5)

        left = {"prompt": prompt, "ask_thread": ask_thread}
        exec(completion, left)  # noqa: S102 -- as above
        return Score(left.get("value", 0.5), str(left.get("told", "")))


class Counting(Contract):
    """It keeps a count of its scores and gives the next one more."""

    name, version = "counting", "1"
    count = 0

    def prompt(self, _key: bytes) -> Prompt:
        Counting.count += 1
        return Prompt(str(Counting.count))

    def score(self, _prompt: Prompt, _completion: str) -> Score:
        Counting.count += 1
        return Score(Counting.count / 100, "")


class Reaching(Executing):
    """It does what a text says when it is made, and tells what came of it."""

    name, version = "reaching", "1"

    def configure(self, params):
        left = {}
        try:
            exec(params.text("text", default="", longest=2000).replace(";;", "\n"), left)  # noqa: S102 -- as above
            self.told = str(left.get("told", "done"))
        except OSError as error:
            self.told = repr(error)

    def prompt(self, _key: bytes) -> Prompt:
        return Prompt(self.told)


class Unmade(Executing):
    name, version = "unmade", "1"

    def configure(self, _params):
        raise RuntimeError("it wants something that is not here")


class Dying(Executing):
    name, version = "dying", "1"

    def configure(self, _params):
        os._exit(7)


class Stuck(Executing):
    name, version = "stuck", "1"

    def configure(self, _params):
        threading.Event().wait()


def install(folder: Path) -> Path:
    """Put this file into a folder as `pip install --target` would leave a package there."""
    facts = folder / "hostile-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    kinds = (Executing, Leaking, Reading, Threaded, Counting, Reaching, Unmade, Dying, Stuck)
    entries = [f"{kind.name} = hostile_contracts:{kind.__name__}\n" for kind in kinds]
    (facts / "entry_points.txt").write_text("[echo_node.contracts]\n" + "".join(entries))
    shutil.copy(__file__, folder / "hostile_contracts.py")
    return folder
