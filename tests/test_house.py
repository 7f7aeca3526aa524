"""The shape of the repository: packages, layers, file names, and pages that name what exists."""

from __future__ import annotations

import ast
import os
import pydoc
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import typer

from echo_node.cli.main import app
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text()
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
ROOMS = ("bootstrap", "echo_node", "protocol")
NOUNS = {
    "batch_scoring",
    "continuous_batching",
    "finding",
    "formatting",
    "peer_scoring",
    "prefix_sharing",
    "seeding",
    "sharding",
    "token_sampling",
    "tree_packing",
}
"""Names in -ing that are nouns of the field. Elsewhere: `delivery`, not `posting`."""
SHARED = {
    "__init__": "a package",
    "__main__": "what `python -m` runs",
    "base": "the interface of a package",
    "client": "the side that asks",
    "errors": "why something failed",
    "loop": "the main loop of a role",
    "main": "where a program starts",
    "process": "a child process as its parent sees it",
    "progress": "how far something is",
    "serde": "values to bytes for a pipe",
    "server": "the side that answers",
    "swarm": "peers that are connected: of libp2p, and of the demo",
    "view": "what is shown to a person",
    "wire": "frames of a protocol",
}
"""Base names that stand more than once outside of cli/, each with the one thing that it means."""
EVERY_MODULE = """
import importlib, pkgutil, protocol
for module in pkgutil.walk_packages(protocol.__path__, "protocol."):
    importlib.import_module(module.name)
"""


def run(*command, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


def python(code: str, cwd: Path) -> str:
    """Return what a fresh interpreter prints outside the repository: only the install counts."""
    # Compiled modules stay, as they do for a user, and not in the repository.
    compiled = {"PYTHONPYCACHEPREFIX": str(cwd / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
    done = run(sys.executable, "-c", code, cwd=cwd, **compiled)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("room", ROOMS)
def test_the_installed_packages_are_ours(room, tmp_path):
    found = python(f"import {room}; print({room}.__file__)", tmp_path)
    assert Path(found).resolve() == ROOT / room / "__init__.py"


def test_protocol_belongs_to_our_distribution_and_to_no_other():
    assert set(metadata.packages_distributions()["protocol"]) == {"echo-node"}
    assert tuple(sorted(metadata.distribution("echo-node").read_text("top_level.txt").split())) == ROOMS


def test_the_wire_pulls_in_no_network_and_no_model(tmp_path):
    loaded = set(python(EVERY_MODULE + "import sys; print(*sys.modules)", tmp_path).split())
    assert "protocol.canonical" in loaded
    assert not loaded & {"torch", "transformers", "libp2p", "trio", "echo_node", "bootstrap"}


def test_importing_the_wire_takes_under_a_fifth_of_importing_torch(tmp_path):
    timed = "import time; start = time.process_time()\n{}\nprint(time.process_time() - start)"
    pairs = [
        [float(python(timed.format(code), tmp_path)) for code in (EVERY_MODULE, "import torch")]
        for _ in range(3)
    ]
    wire, torch = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert wire < torch / 5, f"protocol {wire:.2f} s, torch {torch:.2f} s"


def test_the_arrows_between_the_rooms_hold():
    done = run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_the_readme_is_short_and_its_table_has_every_package():
    assert len(README.splitlines()) <= 160
    table = README.split("## Packages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w./]+)` \| (.+) \|$", table, re.MULTILINE)
    packages = {f"echo_node/{path.parent.name}/" for path in ROOT.glob("echo_node/*/__init__.py")}
    modules = {f"echo_node/{name}.py" for name in ("config", "errors")}
    assert {name for name, _ in rows} == packages | modules | {"protocol/", "bootstrap/"}
    assert len(rows) == len({name for name, _ in rows})
    assert all(len(holds) > 20 for _, holds in rows)


def test_the_layers_of_the_architecture_page_are_those_that_import_linter_holds():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    page = (ROOT / "ARCHITECTURE.md").read_text().split("## Layers\n")[1].split("```\n")[1]
    drawn = [re.split(r" {3,}", line.strip())[0] for line in page.splitlines()]
    assert drawn == [layer.replace("echo_node.", "") for layer in layers]


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md"])
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    files = set(
        re.findall(
            r"[\w.-]+(?:/[\w.-]+)*\.py\b|(?:[\w.-]+/)+[\w.-]+\.(?:json|md|png|service|sh|toml)\b", text
        )
    )
    folders = set(re.findall(r"`((?:[\w.-]+/)+)`", text))
    places = (ROOT, ROOT / "echo_node", (ROOT / page).parent)
    for name in files | folders:
        there = any((place / name).exists() for place in places)
        assert there, f"{name}: no such file"
    for name in re.findall(r"`((?:echo_node|protocol|bootstrap)(?:\.\w+)+)`", text):
        assert pydoc.locate(name) is not None, name


def test_the_root_of_the_node_has_no_other_modules():
    assert {path.stem for path in ROOT.glob("echo_node/*.py")} == {
        "__init__",
        "__main__",
        "config",
        "errors",
    }


def test_no_module_is_named_by_a_verb_in_ing():
    names = {path.stem for path in ROOT.glob("echo_node/**/*.py")}
    assert {name for name in names if name.endswith("ing")} <= NOUNS


def test_a_base_name_stands_once_unless_it_means_the_same_everywhere():
    files = [path for path in ROOT.glob("echo_node/**/*.py") if path.parent.name != "cli"]  # after commands
    count = Counter(path.stem for path in files)
    assert {name for name, times in count.items() if times > 1} <= set(SHARED)


def test_the_first_line_of_a_docstring_has_at_most_80_characters():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
        for room in ("echo_node", "protocol")
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and len((ast.get_docstring(node) or "").split("\n")[0]) > 80
    ]
    assert not long, "\n".join(long)


def test_the_help_of_every_command_is_as_wide_as_the_terminal():
    def helps(command):
        yield command.help or ""
        for inner in getattr(command, "commands", {}).values():
            yield from helps(inner)

    texts = list(helps(typer.main.get_command(app)))
    assert len(texts) > 30
    assert not any("\n" in paragraph for text in texts for paragraph in text.strip().split("\n\n"))


def test_every_make_target_that_the_docs_name_exists():
    there = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    docs = "".join((ROOT / page).read_text() for page in PAGES)
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", docs, re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= there


def test_the_command_line_answers():
    assert run(BIN / "echo-node", "--version").stdout == f"echo-node {metadata.version('echo-node')}\n"
    helped = run(BIN / "echo-node", "--help")
    assert helped.returncode == 0
    assert "demo" in helped.stdout


def test_a_process_that_a_test_leaves_behind_is_ended_and_fails_the_session(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import no_process_is_left_behind\n")
    (tmp_path / "test_leak.py").write_text(
        "import subprocess, sys\n"
        "def test_leak():\n"
        "    code = 'import time; time.sleep(77)'\n"
        "    subprocess.Popen([sys.executable, '-c', code]).returncode = 0  # no ResourceWarning\n"
    )
    command = ("-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", str(tmp_path))
    done = run(sys.executable, *command)
    assert done.returncode == 1, done.stdout
    assert "left processes behind" in done.stdout
    assert "time.sleep(77)" in done.stdout


def test_the_files_that_are_run_first_exist():
    assert not [file for file in LONGEST if not (ROOT / file).is_file()]
