"""The README, walked by somebody who types what it says: every command of it is run here, or by the test that is named."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
ELSEWHERE = {
    "make demo": "tests/test_demo.py::test_the_demo_ends_with_a_summary_a_picture_and_a_line_of_json",
    "make test": "",  # this
    "echo-node engines": "tests/test_engines_cli.py::test_engines_are_measured_by_generating_and_one_is_chosen",
    "echo-node verifier calibrate": "tests/test_verifier_cli.py::test_tolerances_come_out_as_lines_that_a_manifest_takes",
    "echo-node contract": "tests/contract/test_contract_cli.py::test_a_new_contract_is_installed_listed_tried_and_scored",
    "pip install": "tests/contract/test_contract_cli.py::test_a_new_contract_is_installed_listed_tried_and_scored",
    "python -m bootstrap": "tests/bootstrap/test_seed.py::test_a_seed_keeps_its_address_and_ends_in_peace",
}


def commands(section: str) -> list[str]:
    """What a section tells to type, without the comments."""
    text = README.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines]


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

    def types(self, command: str, *more: str) -> str:
        done = subprocess.run(
            [*shlex.split(command), *more],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
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
    """One that goes on, and tells what happens. What it says is read as it comes: a full pipe would stop it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._said: queue.Queue[dict | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def until(self, wanted) -> dict:
        while (event := self._said.get(timeout=100)) is not None:
            if wanted(event):
                return event
        raise AssertionError("it ended before it said so")

    def ends(self) -> int:
        return self.process.wait(60)

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
def test_an_operator_and_a_volunteer_type_what_the_readme_says(stage):
    folder, start = stage
    host, operator, volunteer = (Person(folder / name) for name in ("host", "operator", "volunteer"))
    seed = start(host, "echo-node join --role bootstrap", *LOOPBACK)
    address = seed.until(lambda event: event["event"] == "listening")["addresses"][0]

    keys_show, new, show, join, link, open_, stop, evaluate, export, provenance = commands("Train a model")
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

    doctor, sample, status, pause, resume, leave, backup, service = commands("Lend a machine")
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
def test_two_machines_type_what_the_example_says(stage):
    folder, start = stage
    text = (ROOT / "examples" / "two_machines.md").read_text()
    lines = [line.split("  #")[0].strip() for line in text.splitlines()]
    keys_show, new, lead, link, lend = (line for line in lines if line.startswith("echo-node "))
    first, second = Person(folder / "first"), Person(folder / "second")
    told = text.split("<<END\n")[1].split("END\n")[0]
    (first.home / "digits.toml").write_text(told.replace("12D3KooW…", first.types(keys_show).strip()))
    assert "sealed" in first.types(new)
    trainer = start(first, lead.partition(" --listen")[0], *LOOPBACK, "--threads", "1")
    assert "once it says `no sampler has joined yet`" in text
    trainer.until(lambda event: event["event"] == "unhelped")
    found = first.types(link).strip()
    start(second, lend.replace("echo:…", found), "--yes", *LOOPBACK, "--threads", "1")
    trainer.until(lambda event: event["event"] == "step")


def test_every_command_of_the_readme_is_run_by_a_test():
    blocks = [
        text for kind, text in re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL) if kind in {"", "sh"}
    ]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    typed = [line for line in lines if re.match(r"(make|echo-node|pip|python) ", line)]
    assert len(typed) > 25
    here = [*commands("Train a model"), *commands("Lend a machine")]
    for line in typed:
        test = next((test for start, test in ELSEWHERE.items() if line.startswith(start)), None)
        assert line in here or test is not None, f"nobody runs {line!r}"
    for test in filter(None, ELSEWHERE.values()):
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), test


def test_a_new_contract_is_where_the_readme_installs_it_from(tmp_path):
    new, install, *_ = commands("Write a reward contract")
    author = Person(tmp_path / "author")
    author.types(new)
    assert (author.home / install.split()[-1] / "pyproject.toml").is_file()


def test_every_picture_and_example_that_the_readme_shows_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


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
