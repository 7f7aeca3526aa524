"""Exit codes: Ctrl-C is always one line and 130; a bug is one line and a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest
import trio
import typer

from echo_node.errors import DefectError
from echo_node.runtime import exit_codes
from echo_node.runtime.signals import INTERRUPTED, TERMINATED


def command(body):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(body)
    return lambda: app([], prog_name="test")


def interrupted():
    raise KeyboardInterrupt


def interrupted_and_said():
    try:
        interrupted()
    except KeyboardInterrupt:
        typer.echo("in its own words", err=True)
        raise typer.Exit(INTERRUPTED)  # noqa: B904 - as a command might


def done():
    pass


def with_a_code():
    raise typer.Exit(INTERRUPTED)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (interrupted, INTERRUPTED, "a name: stopped\n"),
        (interrupted_and_said, INTERRUPTED, "in its own words\n"),
        (with_a_code, INTERRUPTED, ""),
        (done, 0, ""),
    ],
)
def test_ctrl_c_in_a_command_is_said_once(body, code, said, capsys):
    with pytest.raises(SystemExit) as end:
        exit_codes.run(command(body), "a name")
    assert end.value.code == code
    assert capsys.readouterr().err == said


def unforeseen():
    return {}["snapshot"]


def unforeseen_in_a_nursery():
    async def work():
        async with trio.open_nursery():
            unforeseen()

    trio.run(work)


def foreseen_but_never_meant():
    raise DefectError("KeyError: 'snapshot'")


@pytest.mark.parametrize("body", [unforeseen, unforeseen_in_a_nursery, foreseen_but_never_meant])
def test_a_bug_of_ours_is_one_line_and_a_file_that_says_where(body, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        exit_codes.run(command(body), "a name")
    assert end.value.code == 1
    (file,) = tmp_path.iterdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert "KeyError: 'snapshot' (a bug: please report it with " in line
    assert str(file) in line
    assert f"in {body.__name__}" in file.read_text()


def test_where_no_file_can_be_written_a_bug_is_still_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit):
        exit_codes.run(command(unforeseen), "a name")
    assert capsys.readouterr().err.splitlines() == [
        "a name: running this command: KeyError: 'snapshot' (a bug: please report it)"
    ]


def test_a_character_that_the_terminal_lacks_ends_nothing():
    script = "import typer; from echo_node.runtime import exit_codes; exit_codes.run(lambda: typer.echo('fine \\u2713'), 'a name')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine ?\n", "")


LINGERING = """
import atexit, sys, threading, time
class Slow:
    def __del__(self):
        time.sleep(100)
sys.slow = Slow()
threading.Thread(target=time.sleep, args=(100,)).start()
atexit.register(lambda: print("tidied up"))
sys.argv = ["echo-node", {word!r}]
from echo_node.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("word", "code", "said"), [("--version", 0, "echo-node "), ("--verse", 2, "tidied up\n")]
)
def test_a_program_that_is_done_waits_for_no_thread_and_no_library_to_be_taken_down(word, code, said):
    ended = subprocess.run(
        [sys.executable, "-c", LINGERING.format(word=word)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.startswith(said)
    assert ended.stdout.endswith("tidied up\n")


@pytest.mark.parametrize("moment", ["echo_node.cli.main", "echo_node.config", "echo_node.cli.demo"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", INTERRUPTED), ("SIGTERM", TERMINATED)])
def test_ctrl_c_or_sigterm_while_the_program_loads_is_one_line(moment, name, code, tmp_path):
    """The signal comes while a module is looked for, which no person could time as well."""
    script = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Interrupting())
sys.argv = ["echo-node", "demo", "--steps", "1"]
from echo_node.__main__ import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "echo-node: stopped\n")


@pytest.mark.parametrize("heard", ["default_int_handler", "SIG_IGN"])
def test_sigterm_ends_a_command_as_ctrl_c_does_also_where_nobody_hears_that(heard):
    script = f"""
import signal, time
from echo_node.runtime import exit_codes
signal.signal(signal.SIGINT, signal.{heard})  # as a shell may have set it
def wait():
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        print("tidied up", flush=True)
exit_codes.main(wait, "echo-node")
"""
    command = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as waiting:
        assert waiting.stdout.readline() == "waiting\n"
        waiting.send_signal(signal.SIGTERM)
        out, said = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (TERMINATED, "echo-node: stopped\n")
    assert out == ("tidied up\n" if heard == "default_int_handler" else "")


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 1, "writing: No space left on device (make room"),
    ],
)
def test_an_output_that_is_closed_or_full_is_no_bug(redirected, code, said):
    words = "from echo_node.cli.main import main; import sys; sys.argv = ['echo-node', '--version']; main()"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {redirected}', sys.executable, words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


@pytest.mark.parametrize(
    ("path", "called", "told"),
    [
        ("here/bin", "/somewhere/echo-node", "echo-node"),
        ("elsewhere", "here/bin/echo-node", "here/bin/echo-node"),
        ("elsewhere", "{cwd}/here/bin/echo-node", "here/bin/echo-node"),
        ("elsewhere", "/somewhere/echo-node", "/somewhere/echo-node"),
        ("elsewhere", "/somewhere/cli.py", "echo-node"),
    ],
)
def test_the_commands_to_try_next_can_be_typed_as_they_stand(path, called, told, tmp_path, monkeypatch):
    program_ = tmp_path / "here" / "bin" / "echo-node"
    program_.parent.mkdir(parents=True)
    program_.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / path))
    monkeypatch.setattr("sys.argv", [called.format(cwd=tmp_path)])
    assert exit_codes.command_name() == told
