"""The house stands: the packages are ours, the arrows hold, the README describes what is there."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

from echo_node.cli import app

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text()
ROOMS = ("bootstrap", "echo_node", "protocol")
EVERY_MODULE = """
import importlib, pkgutil, protocol
for module in pkgutil.walk_packages(protocol.__path__, "protocol."):
    importlib.import_module(module.name)
"""


def run(*command, cwd=ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def python(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints, far from the repository, so that only the install can help it."""
    done = run(sys.executable, "-c", code, cwd=cwd)
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
    timed = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
    pairs = [
        [float(python(timed.format(code), tmp_path)) for code in (EVERY_MODULE, "import torch")]
        for _ in range(7)
    ]
    wire, torch = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert wire < torch / 5, f"protocol {wire:.2f} s, torch {torch:.2f} s"


def test_the_arrows_between_the_rooms_hold():
    done = run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout


def test_every_room_in_the_readme_exists():
    tree = re.search(r"## The rooms\n.*?```\n(.*?)```", README, re.DOTALL)
    assert tree, "the README shows the tree under `## The rooms`"
    above: list[str] = []
    for line in tree[1].splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        above[len(indent) // 2 :] = [name]
        assert Path(ROOT, *above).exists(), "/".join(above)


def test_every_room_stands_in_the_readme():
    tree = README.split("## The rooms")[1]
    shown = set(re.findall(r"^ *(\w+)/ ", tree, re.MULTILINE))
    packages = {path.parent.name for room in ROOMS for path in ROOT.glob(f"{room}/**/__init__.py")}
    assert packages <= shown
    files = {path.name for path in ROOT.glob("echo_node/*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"^  (\w+\.py) ", tree, re.MULTILINE))


def test_the_help_of_every_command_is_as_wide_as_the_terminal():
    def helps(command):
        yield command.help or ""
        for inner in getattr(command, "commands", {}).values():
            yield from helps(inner)

    told = list(helps(typer.main.get_command(app)))
    assert len(told) > 30
    assert not any("\n" in paragraph for text in told for paragraph in text.strip().split("\n\n"))


def test_every_make_target_that_the_docs_name_exists():
    there = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    docs = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", docs, re.MULTILINE))
    assert {"demo", "test"} <= named <= there


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
