"""`echo-node service`: run the node in the background as a systemd user service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_node.runtime.console import say

app = typer.Typer(no_args_is_help=True, help="Run the node in the background, as a systemd user service.")
_SECONDS = 90.0
"""Seconds that systemctl may take: a node has a minute to stop."""
_MOST_BYTES = 1_000_000
"""Bytes of a unit file that are read."""


@app.command()
def install(
    words: Annotated[
        list[str],
        typer.Argument(
            help="What comes after `echo-node join`, such as -- --role sampler RUN",
            metavar="-- JOIN WORDS",
            show_default=False,
        ),
    ],
    *,
    only_print: Annotated[bool, typer.Option("--print", help="Show the unit and change nothing.")] = False,
) -> None:
    """Install the service and start it.

    Installing again with other arguments changes it.
    """
    from echo_node.errors import ConfigError, StoreError, boundary
    from echo_node.runtime.systemd_unit import unit

    role, complete = _checked(words)
    text = unit(Path(sys.executable), complete, Path.cwd(), role)
    if only_print:
        typer.echo(text, nl=False)  # as it is written: a unit holds no character that a terminal obeys
        return
    file = _file()
    with boundary(StoreError, f"writing {file}", advice="move it away, or check its permissions"):
        if file.exists() and not _is_ours(file):
            raise ConfigError(f"{file} was not written by echo-node", advice="move it away first")
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".new")
        draft.write_text(text, "utf-8")
        draft.replace(file)
    say(f"the service is in {file}")
    if not _manager_runs():
        say(
            "start it where systemd runs for you: systemctl --user daemon-reload && systemctl --user enable --now echo-node"
        )
        return
    for command in (("daemon-reload",), ("enable", file.name), ("restart", file.name)):
        _systemctl(*command)
    say("it runs now and at each login: echo-node status, journalctl --user -u echo-node")
    say("to keep it running while you are logged out: loginctl enable-linger")


@app.command()
def uninstall() -> None:
    """Stop and remove the service. The key and the node's data stay."""
    from echo_node.errors import ConfigError, StoreError, boundary

    file = _file()
    if not file.exists():
        say(f"there is no service: {file} does not exist")
        return
    with boundary(StoreError, f"removing {file}", advice="remove it by hand, if it is yours"):
        if not _is_ours(file):
            raise ConfigError(
                f"{file} was not written by echo-node", advice="remove it by hand, if it is yours"
            )
        runs = _manager_runs()
        if runs:
            _systemctl("disable", "--now", file.name)
        file.unlink()
        if runs:
            _systemctl("daemon-reload")
    say("the service is stopped and removed" if runs else f"{file} is removed")


@app.command()
def status() -> None:
    """Show whether the service is installed and runs. Exits with 1 if it does not run."""
    file = _file()
    if not file.exists():
        say("no service is installed: echo-node service install -- --role sampler RUN")
        raise typer.Exit(1)
    if not _manager_runs():
        say(f"the service is in {file}, but systemd does not run for you here")
        raise typer.Exit(1)
    active, enabled = _systemctl_output("is-active", file.name), _systemctl_output("is-enabled", file.name)
    say(f"the service is {active}, and {enabled} at login: journalctl --user -u echo-node shows what it says")
    if active != "active":
        raise typer.Exit(1)


def _checked(words: list[str]) -> tuple[str, list[str]]:
    """Return the role and the arguments, completed by the state folder.

    The service may see another environment than this shell. Whatever `join` would refuse is
    refused now, and not only in the service's log.
    """
    from echo_node.cli.join import join
    from echo_node.cli.join_options import check_flags
    from echo_node.config import state_home

    arguments = words[1:] if words[:1] == ["join"] else words
    parser = typer.Typer(add_completion=False)
    parser.command()(join)
    with typer.main.get_command(parser).make_context(
        "echo-node service install --", list(arguments)
    ) as parsed:
        given, state = parsed.params, parsed.params["state"]
    role = check_flags(
        **{name: given[name] for name in ("role", "nproc", "device", "page", "no_page", "log")}
    )
    return role, list(arguments) if state is not None else ["--state", str(state_home()), *arguments]


def _file() -> Path:
    from echo_node.config import config_home
    from echo_node.runtime.systemd_unit import NAME

    return config_home() / "systemd" / "user" / NAME


def _is_ours(file: Path) -> bool:
    from echo_node.runtime.systemd_unit import MARK
    from echo_node.storage.files import open_plain

    with open_plain(file) as opened:
        return MARK.encode() in opened.read(_MOST_BYTES)


def _manager_runs() -> bool:
    import shutil

    return shutil.which("systemctl") is not None and _run("show-environment").returncode == 0


def _systemctl(*words: str) -> None:
    from echo_node.errors import StoreError

    done = _run(*words)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise StoreError(
            f"systemctl --user {' '.join(words)}: {output}", advice="journalctl --user -u echo-node says more"
        )


def _systemctl_output(*words: str) -> str:
    from echo_node.errors import one_line

    return one_line(_run(*words).stdout.strip()) or "unknown"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    from echo_node.errors import StoreError, boundary

    with boundary(StoreError, f"systemctl --user {' '.join(words)}"):
        return subprocess.run(
            ("systemctl", "--user", *words), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
