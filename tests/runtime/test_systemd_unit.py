"""`echo-node service`: systemd itself reads the unit as meant; foreign units are untouched."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echo_node.cli.service import app
from echo_node.errors import ConfigError, StoreError
from echo_node.runtime.systemd_unit import MARK, quoted, unit

WORDS = ("--role", "sampler", "--state", "/somewhere", "a run")
TRICKY = (
    "50%t",
    "$HOME",
    "${HOME}",
    "$$",
    '"',
    "'",
    "\\",
    "\\n",
    ";",
    "",
    "é ü",
    "-",
    "a=b c",
    "%%",
    "@x",
    ":y",
)
text_words = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)


def invoke(*words, **environment):
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)


def read_by_systemds_rules(line: str) -> list[str]:
    """Parse words by systemd.service(5) and systemd.syntax(7): quotes, C escapes, `%%`, a colon."""
    assert "\n" not in line
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}
    words, rest = [], line
    while rest:
        assert rest[0] == '"', rest
        place, word = 1, ""
        while rest[place] != '"':
            char = rest[place]
            if char == "\\":
                place += 1
                if (digits := {"x": 2, "u": 4}.get(rest[place], 0)) > 0:
                    word += chr(int(rest[place + 1 : place + 1 + digits], 16))
                    place += digits
                else:
                    word += escapes[rest[place]]
            else:
                word += char
            place += 1
        assert not re.search(r"(?<!%)(%%)*%(?!%)", word), "a lone % names something else"
        words.append(word.replace("%%", "%"))
        rest = rest[place + 1 :]
        assert not rest or rest[0] == " "
        rest = rest.removeprefix(" ")
    return words


@given(st.lists(text_words, max_size=6))
@example(list(TRICKY))
@example(["\n[Service]\nExecStart=/bin/false"])
def test_every_word_comes_back_as_it_went_in(words):
    assert read_by_systemds_rules(" ".join(map(quoted, words))) == words


@pytest.mark.parametrize("word", ["a\0b", "\udc80"])
def test_a_word_that_no_command_line_holds_is_refused(word):
    with pytest.raises(ConfigError, match="cannot take the argument"):
        quoted(word)


@pytest.mark.parametrize("folder", ["/a\nb", "/a ", "/a\\", "/\udc80"])
def test_a_folder_that_a_unit_cannot_name_is_refused(folder):
    with pytest.raises(ConfigError, match="plainer name"):
        unit(Path(sys.executable), WORDS, Path(folder), "sampler")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_itself_finds_no_fault_and_reads_the_same_words(tmp_path):
    python = tmp_path / "with space 100%" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    file = tmp_path / "echo-node.service"
    file.write_text(unit(python, TRICKY, python.parent, "sampler"))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    command = ("systemd-analyze", "--user", "verify", "--man=no", str(file))
    run = {"capture_output": True, "text": True, "timeout": 60}
    found = subprocess.run(command, check=False, env=environment, **run)
    if "Failed to initialize manager" in found.stderr:
        pytest.skip("systemd cannot look at units in here")
    assert (found.returncode, found.stderr) == (0, "")
    told = subprocess.run(
        command, check=False, env={**environment, "SYSTEMD_LOG_LEVEL": "debug"}, **run
    ).stdout
    line = re.search(r"Command Line: (.*)", told)
    assert line, told[-2000:]
    assert as_a_shell_reads(line[1]) == [str(python), "-P", "-m", "echo_node", "join", *TRICKY]


def as_a_shell_reads(line: str) -> list[str]:
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [plain or re.sub(r"\\(.)", r"\1", inside) for inside, plain in parts]


def test_without_a_manager_the_unit_is_written_and_it_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemctl there
    home = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    done = invoke("install", "--", "--role", "sampler", "run", **home)
    assert done.exit_code == 0, done.output
    assert "systemctl --user enable --now echo-node" in done.output
    file = tmp_path / "systemd" / "user" / "echo-node.service"
    written = file.read_text()
    command = re.search("ExecStart=(.*)", written)[1]
    assert read_by_systemds_rules(command) == [
        f":{sys.executable}", "-P", "-m", "echo_node", "join",
        "--state", str(tmp_path / "state" / "echo-node"), "--role", "sampler", "run",
    ]  # fmt: skip
    assert f"WorkingDirectory=-{Path.cwd()}" in written
    assert invoke("status", **home).exit_code == 1
    assert invoke("uninstall", **home).exit_code == 0
    assert not file.exists()
    assert "there is no service" in invoke("uninstall", **home).output
    assert invoke("status", **home).exit_code == 1


def test_what_is_only_printed_changes_nothing(tmp_path):
    done = invoke("install", "--print", "--", *WORDS, XDG_CONFIG_HOME=str(tmp_path))
    assert done.output.startswith(MARK)
    assert list(tmp_path.iterdir()) == []


def test_what_join_would_refuse_is_refused_before_anything_is_written(tmp_path):
    for words in (("--role", "spectator"), ("--role",), ("--role", "sampler", "--color", "red")):
        done = invoke("install", "--", *words, XDG_CONFIG_HOME=str(tmp_path))
        assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


def test_a_unit_of_somebody_else_is_left_alone(tmp_path):
    file = tmp_path / "systemd" / "user" / "echo-node.service"
    file.parent.mkdir(parents=True)
    file.write_text("[Service]\nExecStart=/bin/true\n")
    for words in (("install", "--", *WORDS), ("uninstall",)):
        done = invoke(*words, XDG_CONFIG_HOME=str(tmp_path))
        assert isinstance(done.exception, ConfigError)
        assert "was not written by echo-node" in str(done.exception)
    assert file.read_text() == "[Service]\nExecStart=/bin/true\n"


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A systemctl that records its arguments: a real one would need a logged-in user."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n[ "$2" = "is-active" ] && echo active\n'
        f'[ "$2" = "is-enabled" ] && echo enabled\n[ -e {tmp_path}/broken ] && [ "$2" = restart ] && echo no >&2 && exit 5\nexit 0\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_with_a_manager_it_is_started_and_stopped(manager):
    home = {"XDG_CONFIG_HOME": str(manager / "config")}
    assert "it runs now" in invoke("install", "--", *WORDS, **home).output
    assert "active" in (shown := invoke("status", **home)).output
    assert shown.exit_code == 0
    assert "stopped and removed" in invoke("uninstall", **home).output
    told = [line for line in (manager / "told").read_text().splitlines() if "show-environment" not in line]
    assert told == [
        "--user daemon-reload",
        "--user enable echo-node.service",
        "--user restart echo-node.service",
        "--user is-active echo-node.service",
        "--user is-enabled echo-node.service",
        "--user disable --now echo-node.service",
        "--user daemon-reload",
    ]


def test_what_systemd_refuses_is_one_line(manager):
    (manager / "broken").touch()
    done = invoke("install", "--", *WORDS, XDG_CONFIG_HOME=str(manager / "config"))
    assert isinstance(done.exception, StoreError)
    assert "restart echo-node.service: no" in str(done.exception)
