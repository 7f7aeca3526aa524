"""`echo-node join`: errors are one line, and a node ends on a signal."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from echo_node.cli.confirm import agree, choose
from echo_node.cli.main import app
from echo_node.errors import ConfigError, EchoError, StoreError
from echo_node.runs.resolve import ResolvedRun, find_local_run, resolve_run
from echo_node.runs.spec import RunSpec, new_run, read_manifest, write_run
from echo_node.storage import state_dir
from protocol import Identity, Link

JOIN = (sys.executable, "-m", "echo_node", "join")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
TRAINER = Identity(b"t" * 32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "digits"
    told = RunSpec(name="a test", trainers=[TRAINER.peer_id], engines=["torch/f32"])
    write_run(folder, new_run(told, TRAINER))
    return folder


def failure(*words) -> EchoError:
    done = CliRunner().invoke(app, ["join", *map(str, words)])
    assert isinstance(done.exception, EchoError), done.output
    assert "\n" not in str(done.exception)
    assert done.exception.advice, "and what to do next"
    return done.exception


def test_what_the_person_wrote_and_cannot_be_used_is_said(run, tmp_path):
    place = ("--state", tmp_path / "state")
    link = Link(addresses=(), head=bytes(32), run=bytes(32), term=1, version=0)
    for words, says in (
        (("--role", "spectator", run), "spectator"),
        (("--role", "sampler"), "no run was given"),
        (("--role", "sampler", tmp_path / "nowhere"), "nowhere"),
        (("--role", "sampler", str(link)), "no peer is known to ask for it"),
        (("--role", "sampler", "ab" * 32), "no peer is known to ask for it"),
        (("--role", "sampler", str(link)[:-3]), "no complete link"),
        (("--role", "sampler", "--nproc", "2", run), "--nproc is for trainers"),
        (("--role", "sampler", "--log", "wandb", run), "--log is for trainers"),
        (("--role", "trainer", "--log", "excel", run), "take one of tensorboard, trackio, wandb"),
        (("--role", "trainer", run), "none of the run's trainers"),
        (("--role", "verifier", run), "none of the run's verifiers"),
        (("--role", "sampler", "--engine", "llama/f16", run), "llama/f16"),
        (("--role", "sampler", "--engine", "abacus", run), "abacus"),
        (("--role", "sampler", "--model", tmp_path, run), "config.json"),
    ):
        failed = failure(*words, *place)
        assert isinstance(failed, ConfigError)
        assert says in str(failed)


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")],
)
def test_a_log_whose_package_is_missing_is_refused_before_anything_starts(
    run, tmp_path, name, module, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    failed = failure("--role", "trainer", "--log", name, run, "--state", tmp_path / "state")
    assert str(failed) == f"{name} is not installed (pip install {name})"
    assert not (tmp_path / "state").exists()


def test_flags_that_torchrun_has_too_reach_the_node():
    from torch.distributed.run import get_args_parser

    from echo_node.trainer.torchrun import _positional

    words = ["join", "--role", "trainer", "--log", "wandb", "--nproc", "2", "--log=trackio", "run"]
    parsed = get_args_parser().parse_args(
        ["--nproc-per-node", "2", *_positional(["-m", "echo_node", *words])]
    )
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (True, "echo_node", words)
    parsed = get_args_parser().parse_args(_positional(["script.py", "--log", "x"]))
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (
        False,
        "script.py",
        ["--log", "x"],
    )


@pytest.mark.parametrize("lost", ["", "echo:"])
def test_a_link_is_one_whatever_was_lost_or_added_around_it(lost):
    link = Link(addresses=("/ip4/192.0.2.7/tcp/4001",) * 9, head=bytes(32), run=b"r" * 32, term=1, version=0)
    assert resolve_run(f" \n{str(link).removeprefix(lost)}  ", TRAINER) == ResolvedRun(link.run, link)


@pytest.mark.parametrize("pasted", ["<{}>", '"{}"', "{} ", "'\n{}\n'"])
def test_a_link_from_a_letter_is_one_with_its_brackets_and_broken_lines(pasted):
    link = Link(addresses=("/ip4/192.0.2.7/tcp/4001",) * 9, head=bytes(32), run=b"r" * 32, term=1, version=0)
    broken = f"{str(link)[:70]}\r\n  {str(link)[70:]}"
    assert resolve_run(pasted.format(broken), TRAINER) == ResolvedRun(link.run, link)


def test_the_file_in_a_runs_own_folder_means_that_run_and_no_second_one(run):
    assert resolve_run(str(run / "run.toml"), TRAINER) == run
    assert find_local_run(str(run / "run.toml"), run) == run
    assert sorted(each.name for each in run.iterdir()) == ["manifest", "run.toml"]


def test_ctrl_d_is_no_yes_and_chooses_nothing(run, monkeypatch):
    class Ended(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Ended())
    manifest = read_manifest(run)
    assert agree(manifest) is False
    with pytest.raises(ConfigError, match="no run was chosen"):
        choose([manifest, manifest])


def test_two_nodes_do_not_share_a_folder(run, tmp_path):
    with state_dir.opened(tmp_path):
        failed = failure("--role", "sampler", run, "--state", tmp_path)
        assert isinstance(failed, StoreError)
        assert "another node runs on" in str(failed)
    with state_dir.opened(tmp_path):
        pass


def test_a_folder_of_something_else_or_of_another_format_is_left_alone(run, tmp_path):
    (tmp_path / "letters").touch()
    assert "something else" in str(failure("--role", "sampler", run, "--state", tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["letters"]
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "format").write_text("2\n")
    assert "'2'" in str(failure("--role", "sampler", run, "--state", tmp_path / "newer"))
    (tmp_path / "file").touch()
    assert "opening" in str(failure("--role", "sampler", run, "--state", tmp_path / "file"))


def test_a_key_that_is_no_key_is_not_overwritten(run, tmp_path):
    (tmp_path / "key").write_bytes(b"short")
    assert "identity" in str(failure("--role", "sampler", run, "--state", tmp_path))
    assert (tmp_path / "key").read_bytes() == b"short"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--seed", "somewhere"), 2, "somewhere"),
        (("--listen", "nowhere"), 2, "nowhere"),
        (("--role", "nobody"), 2, "nobody"),
    ],
)
def test_from_a_shell_it_is_one_line_and_an_exit_code(tmp_path, words, code, says):
    done = subprocess.run(
        [*JOIN, "--role", "bootstrap", "--state", str(tmp_path), *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_seed_says_where_it_is_and_ends_when_it_is_told_to(tmp_path, number):
    command = [*JOIN, "--role", "bootstrap", "--json", "--state", str(tmp_path), *LOOPBACK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        started, listening = (json.loads(process.stdout.readline()) for _ in range(2))
        assert (started["event"], started["role"]) == ("started", "bootstrap")
        assert listening["event"] == "listening"
        assert listening["addresses"][0].endswith(started["peer_id"])
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["event"] == "stopped"
    assert not err


def test_without_json_it_speaks_in_words(tmp_path):
    command = [*JOIN, "--role", "bootstrap", "--state", str(tmp_path), *LOOPBACK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "this node is 12D3KooW" in process.stdout.readline()
        assert "/ip4/127.0.0.1/tcp/" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (0, "stopped")


def test_the_help_is_enough_to_use_it():
    words = CliRunner().invoke(app, ["join", "--help"], env={"COLUMNS": "200"}).output
    for option in (
        "--role",
        "--state",
        "--seed",
        "--listen",
        "--engine",
        "--threads",
        "--steps",
        "--log",
        "tensorboard or trackio",
        "--model",
        "--json",
    ):
        assert option in words
