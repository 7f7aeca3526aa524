"""Mutation test: change one operator at a time and see whether the room's tests notice.

`make mutate` runs it. A mutant is one change to one module; it is killed when a test of the room
fails: first the quick ones, and if those pass, the others of the room that import the module.
Mutants are drawn by a seed from the modules given (or a default set) and run on a copy of the
working tree, so that nothing here is ever changed. Survivors are printed with their line: each is
either a gap in the tests or a change without effect. The latter are not counted once they stand,
with their reasons, in a file `mutate_equivalent.txt` beside this program.

    tools/mutate.py [--seed 1] [--mutants 84] [--jobs 2] [--json] [echo_node/net/gossip/mesh.py …]
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
DEFAULT_MODULES: Final = (
    "protocol/chain.py",
    "protocol/delta.py",
    "echo_node/credit/ledger.py",
    "echo_node/election/candidate.py",
    "echo_node/election/lease.py",
    "echo_node/net/gossip/mesh.py",
    "echo_node/net/rate_limit.py",
    "echo_node/rollouts/admission.py",
    "echo_node/sampler/send_rate.py",
    "echo_node/trainer/replay_buffer.py",
    "echo_node/trainer/verdict_policy.py",
    "echo_node/verifier/tolerance.py",
    "echo_node/weights/active_version.py",
    "echo_node/weights/route_graph.py",
)
MUTANT_SECONDS: Final = 150
"""A mutant whose tests take longer than this has made something hang, which counts as killed."""
QUICK_TEST_FILES: Final = 4
"""Test files that are run first, those named after the module before others."""
FURTHER_TEST_FILES: Final = 8
"""Test files that are run for a mutant that the first have let through."""
EQUIVALENT: Final = ROOT / "tools" / "mutate_equivalent.txt"

COMPARISONS: Final = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: Final = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
SILENT: Final = re.compile(r"\b_?log(ger)?\.|advice=|raise \w+Error\(")
"""Lines whose words or log calls no test should depend on."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one line of a module."""

    module: str
    line: int
    what: str
    before: str
    source: str
    """The whole module after the change."""

    @property
    def key(self) -> str:
        """Name the mutant independently of line numbers."""
        return f"{self.module} | {self.before} | {self.what}"


def mutants_of(module: str, root: Path = ROOT) -> list[Mutant]:
    """Return every mutant of a module."""
    text = (root / module).read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    found = []
    for number, node in enumerate(_behaviour(tree)):
        line = lines[node.lineno - 1].strip()
        if SILENT.search(line) or not isinstance(node, MUTABLE):
            continue
        changed = copy.deepcopy(tree)
        if what := _mutate(next(itertools.islice(_behaviour(changed), number, None))):
            found.append(Mutant(module, node.lineno, what, line, ast.unparse(changed)))
    return found


def _behaviour(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes inside of functions: no annotations, docstrings, decorators or defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__repr"):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue  # walked by itself
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.expr | ast.stmt) and hasattr(inner, "lineno"):
                        yield inner


MUTABLE: Final = (
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.AugAssign,
    ast.Constant,
    ast.Call,
    ast.Expr,
)


def _mutate(node: ast.AST) -> str:  # noqa: C901, PLR0911 - one branch per operator
    """Change the node in place. Return what was done, or nothing where there is no mutation."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            new = COMPARISONS[type(op)]()
            node.ops[0] = new
            return f"{type(op).__name__} -> {type(new).__name__}"
        case ast.BoolOp(op=ast.And()):
            node.op = ast.Or()
            return "and -> or"
        case ast.BoolOp():
            node.op = ast.And()
            return "or -> and"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            node.op = ast.Not()
            node.operand = ast.UnaryOp(ast.Not(), operand)
            return "not x -> x"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            if isinstance(node, ast.BinOp) and _is_text(node):
                return ""
            changed = ARITHMETIC[type(op)]()
            node.op = changed
            return f"{type(op).__name__} -> {type(changed).__name__}"
        case ast.Constant(value=bool(value)):
            node.value = not value
            return f"{value} -> {not value}"
        case ast.Constant(value=int(value)) if abs(value) < 1000:
            node.value = value + 1
            return f"{value} -> {value + 1}"
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            node.func = ast.Name("max" if name == "min" else "min", ast.Load())
            return f"{name} -> {node.func.id}"
        case ast.Expr(value=ast.Call() as call) if not re.match(r"_?log", ast.unparse(call)):
            node.value = ast.Constant(value=None)
            return "call removed"
    return ""


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operand is a string or bytes, for which + is no arithmetic."""
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


@dataclass(frozen=True, slots=True)
class TestFiles:
    """Test files of one module."""

    quick: list[str]
    further: list[str]


def tests_of(module: str) -> TestFiles:
    """Return the test files of a module: the one named after it, then others of its room.

    A module that few tests of its room import is tested through the modules that import it.
    """
    path = Path(module)
    room = path.parts[1] if path.parts[0] == "echo_node" and len(path.parts) > 2 else path.parts[0]
    folder = ROOT / "tests" / room
    files = sorted(folder.glob("test_*.py"), key=lambda file: file.stat().st_size)
    named = sorted(folder.glob(f"test_{path.stem}*.py"))
    using = _importers(module, files)
    if len({*named, *using}) < QUICK_TEST_FILES:
        near = _importers(module, [*(ROOT / path.parent).glob("*.py")])
        using += _importers_of_any(near, files)
        helpers = [file for file in folder.glob("*.py") if not file.name.startswith(("test_", "conftest"))]
        using += _importers_of_any(_importers_of_any([ROOT / module, *near], helpers), files)
    if not named and not using:  # tested in the room of those that use it
        everywhere = sorted((ROOT / "tests").glob("**/test_*.py"), key=lambda file: file.stat().st_size)
        using = _importers(module, everywhere)
    others = [file for file in dict.fromkeys(using) if file not in named]
    every = [str(file.relative_to(ROOT)) for file in [*named, *others]]
    return TestFiles(every[:QUICK_TEST_FILES], every[QUICK_TEST_FILES:][:FURTHER_TEST_FILES])


def _importers_of_any(modules: Sequence[Path], files: Sequence[Path]) -> list[Path]:
    """Return the files that import one of some modules."""
    return [file for each in modules for file in _importers(str(each.relative_to(ROOT)), files)]


def _importers(module: str, files: Sequence[Path]) -> list[Path]:
    """Return the files that import a module."""
    dotted = ".".join(Path(module).with_suffix("").parts)
    package, name = (re.escape(part) for part in dotted.rsplit(".", 1))
    forms = (
        rf"from {package}\.{name} import",
        rf"from {package} import [^\n]*\b{name}\b",
        rf"import {package}\.{name}\b",
    )
    imports = re.compile("|".join(forms))
    return [file for file in files if imports.search(file.read_text())]


class Workspace:
    """A copy of the working tree in which mutants are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in filter(None, names):
            source = ROOT / name
            if source.is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def passes(self, tests: Sequence[str], seconds: float) -> bool:
        """Run test files until the first failure. A run that hangs does not pass."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / ".hypothesis")
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds) in (0, 5)  # 5: every test is deselected
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def kills(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Return whether the tests notice a mutant. The copy is restored afterwards."""
        file = self.folder / mutant.module
        before = file.read_bytes()
        file.write_text(mutant.source)
        try:
            return not self.passes(tests, MUTANT_SECONDS)
        finally:
            file.write_bytes(before)


class Further:
    """The further tests of each module, one file at a time, as far as they pass unchanged.

    A file that fails without a mutant would kill every mutant, so it is left out.
    """

    def __init__(self) -> None:
        self._passing: dict[str, bool] = {}

    def kills(self, space: Workspace, mutant: Mutant, files: Sequence[str]) -> bool:
        """Return whether a further test notices a mutant."""
        for file in files:
            if not space.kills(mutant, [file]):
                continue
            if file not in self._passing:
                self._passing[file] = space.passes([file], MUTANT_SECONDS)
            if self._passing[file]:
                return True
        return False


def equivalents() -> dict[str, str]:
    """Read the mutants that are known to change nothing, with the reason of each."""
    if not EQUIVALENT.is_file():
        return {}
    rows = (line.split(" # ", 1) for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#")
    return {key.strip(): (why[0] if why else "") for key, *why in rows}


def main() -> int:
    """Draw mutants, run them, print the survivors and the share that was killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=DEFAULT_MODULES, help="files of echo_node or protocol")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--mutants", type=int, default=84, help="how many, over all modules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument(
        "--least", type=float, default=0.0, help="exit with 1 below this share of killed mutants"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    began = time.monotonic()
    tests = {module: tests_of(module) for module in options.modules}
    if without := [module for module, files in tests.items() if not files.quick]:
        parser.error(f"no test file in tests/ imports {', '.join(without)}")
    known = equivalents()
    chosen = _draw([str(module) for module in options.modules], options.mutants, options.seed)
    skipped = [mutant for mutant in chosen if mutant.key in known]
    chosen = [mutant for mutant in chosen if mutant.key not in known]
    print(
        f"{len(chosen)} mutants of {len(tests)} modules, seed {options.seed}; {len(skipped)} without effect left out"
    )
    killed = 0
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="echo-mutate-") as place:
        spaces: Queue[Workspace] = Queue()
        for number in range(options.jobs):
            spaces.put(Workspace(Path(place, str(number))))

        further = Further()

        def run(mutant: Mutant) -> bool:
            space, files = spaces.get(), tests[mutant.module]
            try:
                return space.kills(mutant, files.quick) or further.kills(space, mutant, files.further)
            finally:
                spaces.put(space)

        with ThreadPoolExecutor(options.jobs) as pool:
            for module, files in tests.items():  # a test that fails by itself would kill every mutant
                space = spaces.get()
                if not space.passes(files.quick, MUTANT_SECONDS):
                    print(
                        f"the tests of {module} fail without a mutant, or take over {MUTANT_SECONDS} s:"
                        f" {files.quick}"
                    )
                    return 2
                spaces.put(space)
            for mutant, dead in zip(chosen, pool.map(run, chosen), strict=True):
                killed += dead
                if not dead:
                    survivors.append(mutant)
                    print(
                        f"survived  {mutant.module}:{mutant.line}  {mutant.what}\n          {mutant.before}",
                        flush=True,
                    )
    share = killed / max(1, len(chosen))
    minutes = (time.monotonic() - began) / 60
    print(f"{killed} of {len(chosen)} killed: {share:.1%}, in {minutes:.1f} minutes")
    if options.json:
        print(
            json.dumps(
                {"killed": killed, "mutants": len(chosen), "share": round(share, 4), "seed": options.seed}
            )
        )
    return 1 if share < options.least else 0


def _draw(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants evenly over the modules."""
    rng = random.Random(seed)  # noqa: S311 - for repeating, not for secrets
    pools = {module: mutants_of(module) for module in modules}
    for pool in pools.values():
        rng.shuffle(pool)
    drawn: list[Mutant] = []
    while len(drawn) < count and any(pools.values()):
        for pool in pools.values():
            if pool and len(drawn) < count:
                drawn.append(pool.pop())
    return drawn


if __name__ == "__main__":
    sys.exit(main())
