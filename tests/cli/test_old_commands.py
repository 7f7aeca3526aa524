"""Commands, flags and arguments of the release before: each is still taken.

`old_commands.json` was read from the command line of that release. A command or flag that goes is
taken out of the file only together with an answer that names what replaces it, and a test of that.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bootstrap.__main__ as bootstrap_main
from echo_node.cli.main import app

OLD = json.loads((Path(__file__).parent / "old_commands.json").read_text())
RUNNER = CliRunner()


def seed_app() -> typer.Typer:
    """The command line of a seed, made as `python -m bootstrap` makes it."""
    seed = typer.Typer()
    seed.command()(bootstrap_main.seed)
    return seed


COMMANDS = {
    "echo-node": typer.main.get_command(app),
    "python -m bootstrap": typer.main.get_command(seed_app()),
}


def command_of(words: str):
    """Return the command that these words name today, or None."""
    [found] = [(name, command) for name, command in COMMANDS.items() if words.startswith(name)]
    name, command = found
    for word in words.removeprefix(name).split():
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return None
    return command


def of_kind(command, kind: str):
    return [each for each in command.params if each.param_type_name == kind]


@pytest.mark.parametrize("words", OLD)
def test_an_old_command_with_its_flags_is_still_taken(words):
    command = command_of(words)
    assert command is not None, f"{words} is gone: keep it, or say what replaces it"
    flags = {flag for each in of_kind(command, "option") for flag in (*each.opts, *each.secondary_opts)}
    assert set(OLD[words]["flags"]) <= flags


@pytest.mark.parametrize("words", OLD)
def test_an_old_command_line_lacks_nothing_that_is_required_now(words):
    command = command_of(words)
    arguments = of_kind(command, "argument")
    before = OLD[words]["arguments"]
    assert [each.name for each in arguments][: len(before)] == [name for name, _, _ in before]
    required_before = {name for name, required, _ in before if required}
    assert {each.name for each in arguments if each.required} <= required_before
    assert {each.nargs for each in arguments[: len(before)]} <= {count for _, _, count in before} | {1}
    new = {each.opts[0] for each in of_kind(command, "option") if each.required}
    assert new <= set(OLD[words]["required"])


def test_the_file_has_every_command_of_that_release():
    assert len(OLD) == 39
    assert sum(len(each["flags"]) for each in OLD.values()) == 123


def test_help_of_an_old_command_names_its_flags():
    shown = RUNNER.invoke(app, ["join", "--help"], env={"COLUMNS": "200"}, terminal_width=200).output
    assert {"--role", "--max-up", "--promote", "--seed"} <= set(shown.replace("│", " ").split())
