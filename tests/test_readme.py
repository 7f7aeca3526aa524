"""README.md and docs/ as a stranger follows them: each command is run here or by a named test."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "examples" / "own_contract" / "README.md",
    )
}
README = PAGES["README.md"]
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
WALKED = (
    ("docs/operator.md", "Train a model"),
    ("docs/operator.md", "Two machines"),
    ("docs/volunteer.md", "Lend a machine"),
    ("README.md", "Lend a machine"),
    ("README.md", "Train a model"),
    ("docs/smollm2.md", "As an operator"),
)
"""Sections whose every command is run in this file."""
NEW_CONTRACT = "tests/cli/test_contract.py::test_a_new_contract_is_installed_listed_tried_and_scored"
OWN_CONTRACT = "tests/test_examples.py::test_a_contract_of_ones_own_stands_its_trial_and_is_learnt"
ELSEWHERE = {
    "make demo": "tests/cli/test_demo.py::test_the_demo_ends_with_a_summary_a_picture_and_a_line_of_json",
    "make test": "",  # this
    "echo-node engines": "tests/cli/test_engines.py::test_engines_are_measured_by_generating_and_one_is_chosen",
    "echo-node join --role verifier": "tests/swarm/test_swarm.py::test_five_processes_learn_first_by_asking_and_then_without_waiting",
    "echo-node join --role trainer digits --nproc": "tests/swarm/test_swarm.py::test_a_trainer_of_two_processes_is_one_peer",
    "torchrun": "tests/trainer/test_distributed.py::test_when_the_launcher_is_ended_no_rank_goes_on",
    "echo-node verifier calibrate": "tests/cli/test_verifier.py::test_tolerances_come_out_as_lines_that_a_manifest_takes",
    "echo-node contract show digits-sorted": "tests/cli/test_contract.py::test_samples_are_shown_with_a_right_and_a_wrong_answer",
    "echo-node contract test digits-sorted": OWN_CONTRACT,
    "echo-node contract": NEW_CONTRACT,
    "pip install examples/own_contract": OWN_CONTRACT,
    "pip install": NEW_CONTRACT,
    "python -m pytest examples/own_contract": OWN_CONTRACT,
    "python examples/own_contract/learn.py": OWN_CONTRACT,
    "python -m bootstrap": "tests/bootstrap/test_seed.py::test_a_seed_keeps_its_address_and_ends_in_peace",
}
"""How a command begins, and the test that runs such a command; the first that fits counts."""
HERE_DOCUMENT = re.compile(r"^cat > .*?<<END\n(.*?)^END\n", re.DOTALL | re.MULTILINE)


def section_of(page: str, section: str) -> str:
    return PAGES[page].split(f"## {section}\n")[1].split("\n## ")[0]


def typed(text: str) -> list[str]:
    """The commands in the shell blocks of a text, without comments and here-documents."""
    blocks = [
        block for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if kind in {"", "sh"}
    ]
    lines = [
        line.split("  #")[0].strip() for block in blocks for line in HERE_DOCUMENT.sub("", block).splitlines()
    ]
    return [line for line in lines if line]


def commands(page: str, section: str) -> list[str]:
    return typed(section_of(page, section))


class Person:
    """Somebody in a home of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XDG_")},
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_WAIT_POLICY": "passive",
        }

    def types(self, command: str, *more: str, seconds: float = 100) -> str:
        done = subprocess.run(
            [*shlex.split(command), *more],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout

    def starts(self, command: str, *more: str) -> Program:
        with (self.home / "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                [*shlex.split(command), *more, "--json"],
                cwd=self.home,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        return Program(process)


class Program:
    """A running program and its JSON events, read as they come: a full pipe would stop it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._events: queue.Queue[dict | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def until(self, wanted) -> dict:
        while (event := self._events.get(timeout=100)) is not None:
            if wanted(event):
                return event
        raise AssertionError("it ended before it said so")

    def ends(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture
def stage(tmp_path):
    """People and their programs; whatever happens, no program is left."""
    programs: list[Program] = []

    def start(person: Person, command: str, *more: str) -> Program:
        programs.append(person.starts(command, *more))
        return programs[-1]

    yield tmp_path, start
    for program in programs:
        program.close()


@pytest.mark.timeout(400)
def test_an_operator_and_a_volunteer_type_what_their_pages_say(stage):
    folder, start = stage
    host, operator, volunteer = (Person(folder / name) for name in ("host", "operator", "volunteer"))
    seed = start(host, "echo-node join --role bootstrap", *LOOPBACK)
    address = seed.until(lambda event: event["event"] == "listening")["addresses"][0]

    keys_show, new, show, join, link, open_, stop, evaluate, export, provenance = commands(
        "docs/operator.md", "Train a model"
    )
    peer_id = operator.types(keys_show).strip()
    (operator.home / "digits.toml").write_text(
        f'name = "digits"\ntrainers = ["{peer_id}"]\nseeds = ["{address}"]\n[algorithm]\nbatch_groups = 8\n'
    )
    assert "sealed" in operator.types(new)
    assert peer_id in operator.types(show)
    trainer = start(operator, join.replace("ADDRESS", address), *LOOPBACK, "--threads", "1")
    trainer.until(lambda event: event.get("version") == 0)  # before anybody has joined
    found = operator.types(link.replace("ADDRESS", address)).strip()
    assert found.startswith("echo:")
    helper = start(host, f"echo-node join --role sampler {found} --yes --state helper", *LOOPBACK)
    trainer.until(lambda event: event["event"] == "step" and event["step"] >= 2)
    assert "open" in operator.types(open_)

    doctor, sample, status, pause, resume, leave, backup, service = commands(
        "docs/volunteer.md", "Lend a machine"
    )
    assert commands("README.md", "Lend a machine") == [doctor, sample, status]
    assert "wrong" in volunteer.types(doctor)
    sampler = start(volunteer, sample.replace("LINK", found), "--yes", *LOOPBACK, "--threads", "1")
    sampler.until(lambda event: event.get("accepted", 0) > 0)
    assert "digits" in volunteer.types(status)
    assert volunteer.types(pause)
    sampler.until(lambda event: event["event"] == "paused")
    assert volunteer.types(resume)
    sampler.until(lambda event: event["event"] == "resumed")
    assert volunteer.types(leave)
    assert sampler.ends() == 0
    (volunteer.home / "secret").write_text("correct horse battery staple\n")
    (volunteer.home / "secret").chmod(0o600)
    assert json.loads(volunteer.types("echo-node keys show --json"))["peer_id"] in volunteer.types(backup)
    assert found in volunteer.types(service.replace("LINK", found))

    helper.process.send_signal(signal.SIGTERM)
    assert operator.types(stop)
    assert (trainer.ends(), helper.ends()) == (0, 0)
    assert "held-out prompts" in operator.types(evaluate, "--prompts", "64")
    assert "is the best" in operator.types(export)
    assert (operator.home / "out" / "model.safetensors").stat().st_size > 700_000
    assert operator.types(provenance)


@pytest.mark.timeout(400)
def test_two_machines_type_what_the_operators_page_says(stage):
    folder, start = stage
    text = section_of("docs/operator.md", "Two machines")
    keys_show, new, lead, link, lend = commands("docs/operator.md", "Two machines")
    alone = lead.partition(" --listen")[0]
    assert commands("README.md", "Train a model") == [new, alone, link]
    first, second = Person(folder / "first"), Person(folder / "second")
    spec = HERE_DOCUMENT.search(text)[1]
    (first.home / "digits.toml").write_text(spec.replace("12D3KooW…", first.types(keys_show).strip()))
    assert "sealed" in first.types(new)
    trainer = start(first, alone, *LOOPBACK, "--threads", "1")
    assert "Once it prints `no sampler has joined yet`" in text
    trainer.until(lambda event: event["event"] == "unhelped")
    found = first.types(link).strip()
    start(second, lend.replace("LINK", found), "--yes", *LOOPBACK, "--threads", "1")
    trainer.until(lambda event: event["event"] == "step")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_operator_types_what_the_page_of_smollm2_says(stage):
    folder, start = stage
    person, first, second = (Person(folder / name) for name in ("operator", "first", "second"))
    shutil.copytree(ROOT / "examples", person.home / "examples")
    new, lead, llama, torch, evaluate, export = commands("docs/smollm2.md", "As an operator")
    peer_id = person.types("echo-node keys show").strip()
    assert "sealed" in person.types(new.replace("ID", peer_id), seconds=600)
    trainer = start(person, lead.replace("--steps 60", "--steps 3"), *LOOPBACK)
    trainer.until(lambda event: event.get("version") == 0)
    link = person.types("echo-node run link larger").strip()
    samplers = [
        start(volunteer, command.replace("LINK", link), "--yes", *LOOPBACK, "--threads", "1")
        for volunteer, command in ((first, llama), (second, torch))
    ]
    assert trainer.ends(seconds=900) == 0
    for sampler in samplers:
        sampler.process.send_signal(signal.SIGTERM)
    assert "held-out prompts" in person.types(evaluate.replace("500", "16"), seconds=300)
    assert person.types(export, seconds=300)
    assert (person.home / "larger-model" / "model.safetensors").stat().st_size > 250_000_000


def test_every_command_of_the_readme_and_the_docs_is_run_by_a_test():
    lines = [(page, line) for page, text in PAGES.items() for line in typed(text)]
    assert len(lines) > 50
    here = {line for page, section in WALKED for line in commands(page, section)}
    for page, line in lines:
        test = next((test for start, test in ELSEWHERE.items() if line.startswith(start)), None)
        assert line in here or test is not None, f"{page}: nobody runs {line!r}"
    for test in filter(None, ELSEWHERE.values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
    for start in ELSEWHERE:
        assert any(line.startswith(start) for _, line in lines), f"no page has {start!r} any more"


def test_a_new_contract_is_where_the_readme_installs_it_from(tmp_path):
    new, install, *_ = commands("README.md", "Write a reward contract")
    assert [new, install] == commands("docs/contracts.md", "Write a reward contract")[:2]
    author = Person(tmp_path / "author")
    author.types(new)
    assert (author.home / install.split()[-1] / "pyproject.toml").is_file()


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES])
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target


def test_the_readme_leads_to_every_page_of_the_docs():
    assert {page for page in PAGES if page.startswith("docs/")} <= set(re.findall(r"\]\(([^)#]+)\)", README))


def test_three_terminals_are_a_whole_run():
    began = time.monotonic()
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "three_terminals.sh"), "3"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (time.monotonic() - began, done.stdout, done.stderr)
    assert "step 3: reward" in done.stdout
    assert "held-out prompts" in done.stdout
