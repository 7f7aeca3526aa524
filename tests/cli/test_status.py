"""`echo-node status`, `watch`, `pause`, `resume`, `leave`, as a person meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from echo_node.cli import status
from echo_node.contract import load
from echo_node.control import formatting
from echo_node.control.client import NobodyRunsError
from echo_node.control.offline_report import look_into
from echo_node.credit.ledger import Entry, Ledger
from echo_node.errors import ConfigError, StoreError
from echo_node.models import embedded
from echo_node.runs.run import draft
from echo_node.storage import state_dir
from echo_node.telemetry.snapshot import Snapshot
from protocol import Identity, open_manifest
from protocol.manifest import Sampling, Sync
from tests.credit.test_ledger import verdict

app = typer.Typer(pretty_exceptions_enable=False)
for command in (status.status, status.watch, status.pause, status.resume, status.leave):
    app.command()(command)

PROGRAM = """
from tests.cli.test_status import app
from echo_node.runtime import exit_codes
exit_codes.run(app, "echo-node")
"""
NODE = """
import sys, trio
from pathlib import Path
from echo_node.runtime import exit_codes
from echo_node.storage import state_dir as state
from echo_node.telemetry.snapshot import Snapshot
from echo_node.control.server import under_control
from echo_node.runtime.pause_gate import PauseGate

async def work(folder):
    board = Snapshot()
    gate = PauseGate(lambda event, words, /, **more: board.record(event, words, more))
    told = {"role": "sampler", "peer_id": "12D3KooWme", "state": str(folder)}
    board.record("started", "sampler of digits", told)
    board.describe_run({"id": sys.argv[2], "name": "digits \\x1b[31m", "author": "12D3KooWauthor", "contract": "d 1",
                        "mode": "async", "staleness": 4, "group_size": 8})
    board.record("listening", "", {"addresses": []})
    progress = {"peers": 3, "joined": True, "leader_is_silent": False, "version": 41, "engine_version": 40,
                "accepted": 120, "refused": {"stale": 2, "duplicate": 1}, "waiting": 4, "tokens_per_second": 812.4,
                "paused": []}
    board.record("progress", "", progress)
    board.describe_swarm([], "Other nodes can dial this machine.")
    async with exit_codes.until_stop_signal(), under_control(folder, board, gate, battery=False):
        print("ready", flush=True)
        await trio.sleep_forever()

with state.opened(Path(sys.argv[1])) as place:
    place.identity()
    trio.run(work, place.path)
"""
RUN = "ab" * 32


def invoke(*given):
    return CliRunner().invoke(app, [str(word) for word in given])


def from_a_shell(*given, **more):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, given)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@pytest.fixture
def node(tmp_path):
    folder = tmp_path / "state"
    command = [sys.executable, "-c", NODE, str(folder), RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield folder
        if (folder / "control").exists():
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def holdings(folder):
    """A state folder in which somebody has worked."""
    with state_dir.opened(folder) as place:
        place.identity()
        place.book.write_bytes(b"peers")
        for number in (1, 2):
            weights = place.run(bytes([number]) * 32) / "weights"
            weights.mkdir()
            (weights / "flat").write_bytes(os.urandom(100_000))
            (weights.parent / "outbox.sqlite").write_bytes(b"x" * 5000)
    return state_dir.StateDir(folder)


# A node that runs


def test_it_says_what_it_does_for_whom_how_fast_and_what_came_of_it(node):
    done = invoke("status", "--state", node)
    assert done.exit_code == 0, done.output
    told = dict(line.strip().split("  ", 1) for line in done.output.splitlines())
    told = {name: text.strip() for name, text in told.items()}
    assert told["doing"] == "sampler, working"
    assert told["run"] == rf"digits \x1b[31m ({RUN[:12]}), async, contract d 1, by 12D3KooWauthor"
    assert told["version"] == "40, 1 behind the newest known"
    assert told["speed"] == "812 tokens/s"
    assert told["groups"] == "120 accepted, 3 refused (2 stale, 1 duplicate), 4 wait for an answer"
    assert told["credit"] == "120 groups accepted since it started"
    assert told["peers"] == "3 connected"
    assert told["reach"] == "Other nodes can dial this machine"
    assert told["identity"] == "12D3KooWme"
    assert told["state"] == str(node)
    as_json = json.loads(invoke("status", "--state", node, "--json").output)
    assert as_json["running"] is True
    assert as_json["progress"]["refused"] == {"stale": 2, "duplicate": 1}


def test_a_person_pauses_it_and_lets_it_go_on(node):
    assert "paused" in invoke("pause", "--state", node).output
    assert "sampler, paused" in invoke("status", "--state", node).output
    assert invoke("resume", "--state", node).output == "resumed\n"
    assert "sampler, working" in invoke("status", "--state", node).output


def test_it_leaves_and_only_what_was_named_is_removed(node):
    weights = node / "runs" / RUN / "weights"
    other = node / "runs" / ("cd" * 32) / "weights"
    for folder in (weights, other):
        folder.mkdir(parents=True)
        (folder / "flat").write_bytes(os.urandom(100_000))
    (weights.parent / "outbox.sqlite").touch()
    done = invoke("leave", "--state", node, "--forget-weights")
    assert done.exit_code == 0, done.output
    assert "the node has left" in done.output
    assert "kB freed" in done.output
    assert not weights.exists()
    assert (weights.parent / "outbox.sqlite").exists()
    assert (other / "flat").exists()
    assert (node / "key").exists()


def test_a_node_stays_when_what_was_wished_cannot_be(node):
    for wish in (("--forget-everything",), ("--forget-weights", "--forget-run")):
        assert isinstance(invoke("leave", "--state", node, *wish).exception, ConfigError)
    assert invoke("status", "--state", node).exit_code == 0


def test_watching_in_a_pipe_is_plain_lines_until_the_node_ends(node):
    with from_a_shell("watch", "--state", node) as watching:
        first = watching.stdout.readline()
        assert "sampler, working; 40, 1 behind the newest known; 812 tokens/s" in first
        invoke("pause", "--state", node)
        assert "sampler, paused" in watching.stdout.readline()
        invoke("leave", "--state", node)
        rest, said = watching.communicate(timeout=60)
    assert "\x1b" not in first + rest
    assert (watching.returncode, said) == (0, "the node has ended\n")


def test_ctrl_c_ends_the_watching_and_not_the_node(node):
    with from_a_shell("watch", "--json", "--state", node) as watching:
        assert json.loads(watching.stdout.readline())["phase"] == "working"
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=60)
    assert (watching.returncode, said) == (130, "stopped watching: the node goes on\n")
    assert invoke("status", "--state", node).exit_code == 0


def test_on_a_terminal_there_is_a_panel_and_nothing_of_a_strangers_making(tmp_path):
    board = Snapshot()
    board.record("started", "a name with \x1b]0;owned\x07", {"role": "sampler"})
    board.describe_run({"id": RUN, "name": "[red]\x1b[2J[/red]", "author": "12D3"})
    with (tmp_path / "screen").open("w+", encoding="utf-8") as screen:
        console = Console(file=screen, force_terminal=True, width=100, color_system=None)
        status._watch_live(console, iter([board.snapshot(), board.snapshot()]))
        screen.seek(0)
        shown = screen.read()
    assert "sampler, starting" in shown
    assert r"[red]\x1b[2J[/red]" in shown, "as it stands, and not as a colour"
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


# Nobody runs


def test_without_a_node_it_says_what_is_there_and_makes_nothing(tmp_path):
    place = holdings(tmp_path / "state")
    before = sorted(each.name for each in place.path.iterdir())
    done = invoke("status", "--state", place.path)
    assert done.exit_code == 1
    assert "no node runs on" in done.output
    assert f"{place.identity().peer_id} (no backup yet: echo-node keys backup)" in done.output
    assert "020202020202" in done.output
    assert "ago" in done.output
    told = json.loads(invoke("status", "--state", place.path, "--json").output)
    assert (told["running"], told["peer_id"]) == (False, place.identity().peer_id)
    assert [run["weights_bytes"] >= 100_000 for run in told["runs"]] == [True, True]
    assert told["bytes"] >= 200_000
    assert sorted(each.name for each in place.path.iterdir()) == before
    for where in ("nowhere", "."):
        assert invoke("status", "--state", tmp_path / where).exit_code == 1
    assert not (tmp_path / "nowhere").exists()


def earn(folder, run, *, close=True):
    """Make a sampler's ledger: a trainer took two groups, a verifier found one honest."""
    place = state_dir.prepared(folder)
    me = place.identity().public
    ledger = Ledger(place.run(run) / "ledger.sqlite")
    for number in (1, 2):
        group = Entry(bytes([number]) * 32, run, me, bytes(32), 3, number, 100 * number, "torch/f32")
        ledger.sent(group)
        ledger.admitted(group.id)
    ledger.verdict(verdict(group, run=run))
    if close:
        ledger.close()
    return ledger


@pytest.mark.parametrize("in_order", [True, False], ids=["ended in order", "killed"])
def test_without_a_node_it_says_what_was_earned_and_touches_nothing(tmp_path, in_order):
    run = b"r" * 32
    ledger = earn(tmp_path, run, close=in_order)
    earned = "200 verified tokens in 1 groups, 1 more groups accepted, as it was when the node ended"
    before = {each: each.read_bytes() for each in (tmp_path / "runs").rglob("*") if each.is_file()}
    done = invoke("status", "--state", tmp_path)
    assert done.exit_code == 1
    assert done.output.startswith("no node runs on")
    assert earned in done.output
    (told,) = json.loads(invoke("status", "--state", tmp_path, "--json").output)["runs"]
    assert told["credit"] == {"tokens": 200, "groups": 1, "condemned": 0, "refused": {}, "admitted": 1}
    assert told["credit_problem"] is None
    after = {each: each.read_bytes() for each in (tmp_path / "runs").rglob("*") if each.is_file()}
    assert after.keys() == before.keys()
    assert in_order is False or after == before
    ledger.close()


@pytest.mark.parametrize("damage", [b"this is no database " * 100, b"SQLite format 3\0" + bytes(5000)])
def test_an_account_that_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path, damage):
    earn(tmp_path, b"r" * 32)
    (tmp_path / "runs" / (b"r" * 32).hex() / "ledger.sqlite").write_bytes(damage)
    done = invoke("status", "--state", tmp_path)
    assert done.exit_code == 1
    assert "move the file away" in done.output
    assert "last seen" in done.output
    (told,) = json.loads(invoke("status", "--state", tmp_path, "--json").output)["runs"]
    assert told["credit"] is None
    assert "ledger.sqlite" in told["credit_problem"]


def test_where_this_node_earned_nothing_no_account_is_shown(tmp_path):
    place = holdings(tmp_path)
    with Ledger(place.run(b"\1" * 32) / "ledger.sqlite") as ledger:  # a verifier's, of others' groups
        ledger.sent(Entry(b"g" * 32, b"\1" * 32, b"other" * 6 + b"xx", bytes(32), 3, 0, 10, "torch/f32"))
    (place.run(b"\2" * 32) / "ledger.sqlite").touch()
    assert "credit" not in invoke("status", "--state", tmp_path).output


def test_a_run_that_is_held_has_the_name_that_its_author_gave(tmp_path):
    author = Identity(b"a" * 32)
    sealed = draft(
        name="digits",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={},
        sampling_=Sampling(group_size=2, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
        author=author,
        trainers=[author.public],
        nonce=bytes(32),
    )
    with state_dir.opened(tmp_path) as place:
        weights = place.run(open_manifest(sealed).id) / "weights"
    weights.mkdir()
    (weights / "manifest").write_bytes(sealed)
    assert [run.name for run in look_into(tmp_path).runs] == ["digits"]
    (weights / "manifest").write_bytes(sealed[:-1])
    assert [run.name for run in look_into(tmp_path).runs] == [""]


@pytest.mark.parametrize("command", ["watch", "pause", "resume", "leave"])
def test_nobody_to_talk_to_is_one_line(tmp_path, command):
    done = invoke(command, "--state", tmp_path)
    assert isinstance(done.exception, NobodyRunsError)
    assert "start one with echo-node join" in str(done.exception)


@pytest.mark.parametrize("command", ["watch", "leave"])
def test_from_a_shell_that_is_exit_code_1_and_no_traceback(tmp_path, command):
    with from_a_shell(command, "--state", tmp_path / "nowhere") as process:
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out, len(said.splitlines())) == (1, "", 1)


def test_which_run_to_forget_is_asked_for_where_it_is_not_clear(tmp_path):
    place = holdings(tmp_path)
    for wish, says in (
        (("--forget-run",), "several runs"),
        (("--forget-run", "--run", "ff"), "no run in the folder begins with ff"),
    ):
        done = invoke("leave", "--state", tmp_path, *wish)
        assert isinstance(done.exception, ConfigError)
        assert says in str(done.exception)
        assert "010101010101" in done.exception.advice
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert invoke("leave", "--state", tmp_path, "--forget-run", "--run", "0101").exit_code == 0
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["02" * 32]
    assert invoke("leave", "--state", tmp_path, "--forget-run").exit_code == 0, "the only one is meant"
    assert place.key.exists()
    assert isinstance(invoke("leave", "--state", tmp_path, "--forget-run").exception, ConfigError)


def test_everything_is_forgotten_only_by_those_who_say_so_twice(tmp_path):
    place = holdings(tmp_path)
    done = invoke("leave", "--state", tmp_path, "--forget-everything")
    assert isinstance(done.exception, ConfigError)
    assert "keys backup" in str(done.exception)
    assert place.key.exists()
    done = invoke("leave", "--state", tmp_path, "--forget-everything", "--yes")
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_never_emptied(tmp_path):
    (tmp_path / "letters").write_text("dear aunt")
    done = invoke("leave", "--state", tmp_path, "--forget-everything", "--yes")
    assert isinstance(done.exception, ConfigError)
    assert (tmp_path / "letters").exists()


def test_a_link_out_of_the_folder_is_removed_and_not_followed(tmp_path):
    place = holdings(tmp_path / "state")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").touch()
    (place.path / "runs" / "linked").symlink_to(tmp_path / "letters")
    assert invoke("leave", "--state", place.path, "--forget-everything", "--yes").exit_code == 0
    assert (tmp_path / "letters" / "one").exists()


def test_nothing_is_forgotten_under_a_node_that_does_not_leave(tmp_path):
    place = holdings(tmp_path)
    with state_dir.opened(tmp_path):
        done = invoke("leave", "--state", tmp_path, "--forget-everything", "--yes")
    assert isinstance(done.exception, StoreError)
    assert place.key.exists()


# Words


@pytest.mark.parametrize(
    ("progress", "phase", "says"),
    [
        ({}, "starting", "doing: node, starting"),
        ({"paused": ["person", "battery"]}, "working", "paused (person, battery), until echo-node resume, until it is plugged in"),
        ({"paused": ["leaving"]}, "paused", "leaving: finished groups are delivered first"),
        ({"failing": "no memory is left"}, "working", "doing: node, failing: no memory is left"),
        ({"leader_is_silent": True}, "working", "the leading trainer is silent"),
        ({"joined": False, "turned_away": "no room"}, "working", "refused by the trainer: no room"),
        ({"waits_for": "groups of other classes"}, "working", "waiting: groups of other classes"),
        ({"waits_for": None}, "working", ", working"),
        ({"clock": "this machine's clock is 2 hours behind"}, "working", "clock: this machine's clock is 2 hours behind"),
        ({"joined": False}, "working", "waiting to be added to the roster"),
        ({"leading": False}, "working", "standing by"),
        ({"version": None}, "working", "version: none known yet"),
        ({"version": 3}, "working", "version: 3"),
        ({"version": 3, "engine_version": None}, "working", "none in the engine yet, the newest known is 3"),
        ({"version": 3, "engine_version": 3}, "working", "version: 3, the newest known"),
        ({"reward": 0.5, "step": 7, "samplers": 2}, "working", "learning: step 7, reward 0.500, 2 samplers"),
        ({"dropped": {"stale": 1}, "waiting": 9}, "working", "groups: 9 wait, 1 dropped (1 stale)"),
        ({"verdicts": {"honest": 1200}}, "working", "verdicts: 1,200 honest"),
        ({"verdicts": {}}, "working", "verdicts: none yet"),
        ({"credit": {"tokens": 5000, "groups": 12, "admitted": 30, "condemned": 1}}, "working", "5,000 verified tokens in 12 groups, 30 more groups accepted, 1 condemned"),
        ({"credit": {"tokens": 50, "groups": 2, "admitted": 3, "attested": {"tokens": 20_480, "groups": 160, "learnt": 4}}}, "working", "20,480 verified tokens in 160 groups, as a verifier attests (counted here: 50 verified tokens in 2 groups, 3 more groups accepted)"),
        ({"credit": {"tokens": 50, "groups": 2, "admitted": 3, "attested": {"tokens": 50, "groups": 2, "learnt": 5}}}, "working", "credit: 50 verified tokens in 2 groups, 3 more groups accepted"),
        ({"credit": {"tokens": 0, "groups": 0, "admitted": 0, "attested": {"tokens": 0, "groups": 0, "learnt": 200}}}, "working", "0 more groups accepted, 200 groups learnt from, as a trainer attests"),
    ],
)  # fmt: skip
def test_each_state_has_its_words(progress, phase, says):
    snapshot = Snapshot().snapshot() | {"phase": phase, "progress": progress}
    assert says in "\n".join(f"{name}: {text}" for name, text in formatting.rows(snapshot))


def test_sizes_and_times_are_those_that_people_say():
    assert [formatting.size(n) for n in (0, 999, 1000, 2_500_000, 12_345_678_900)] == [
        "0 bytes", "999 bytes", "1 kB", "2 MB", "12.3 GB",
    ]  # fmt: skip
    assert [formatting.duration(n) for n in (-1, 59, 61, 7300, 200_000)] == [
        "0 s", "59 s", "1 min 1 s", "2 h 1 min", "2 d 7 h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wish", "binding"), [("run", "votes"), ("run", "journal.sqlite"), ("weights", "journal.sqlite")]
)
def test_what_binds_a_nodes_word_is_forgotten_only_by_those_who_are_sure(tmp_path, wish, binding):
    holdings(tmp_path)
    run = tmp_path / "runs" / ("01" * 32)
    (run / binding).touch()
    given = ("leave", "--state", tmp_path, "--run", "01", f"--forget-{wish}")
    done = invoke(*given)
    assert isinstance(done.exception, ConfigError)
    assert "may be revoked" in str(done.exception)
    assert (run / "weights" / "flat").exists()
    assert invoke(*given, "--yes").exit_code == 0
    assert not (run / "weights").exists()
    assert (run / binding).exists() == (wish == "weights")
