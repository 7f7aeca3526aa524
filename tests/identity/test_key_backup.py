"""Paper backup of a key: it is restored however it is typed, and errors name the line."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echo_node.cli.keys import app
from echo_node.errors import ConfigError, StoreError
from echo_node.identity import key_backup
from echo_node.identity.key_backup import Cost, check_passphrase, peer_of, read_backup, write_backup
from echo_node.storage.state_dir import backup_reminder, opened, prepared
from protocol import Identity

CHEAP = Cost(doublings=14)
PASSPHRASE = "four words of mine"  # noqa: S105 - it guards nothing
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
PRINTED = write_backup(ALICE, PASSPHRASE, CHEAP)


def lines_of(text: str) -> list[str]:
    return text.splitlines()


def test_it_shows_whose_it_is_and_nothing_of_the_key():
    title, peer, *body = lines_of(PRINTED)
    assert title == "ECHO-NODE KEY BACKUP 1"
    assert peer == f"peer id: {ALICE.peer_id}"
    assert all(re.fullmatch(r"[1-7]: ([0-9A-Z]{4}-){4}[0-9A-Z]{4}", line) for line in body)
    assert len(body) == 7
    assert write_backup(ALICE, PASSPHRASE, CHEAP) != PRINTED, (
        "two backups have nothing in common but their owner"
    )
    assert peer_of(PRINTED) == ALICE.peer_id


@pytest.mark.parametrize(
    "typed",
    [
        PRINTED,
        re.sub(r"(?m)^\d: .*$", lambda line: line[0].lower(), PRINTED),
        PRINTED.replace("-", " ").replace("ECHO NODE", "ECHO-NODE"),
        re.sub(r"(?m)^(\d): (.*)$", lambda m: f"{m[1]}: {m[2].replace('0', 'O').replace('1', 'l')}", PRINTED),
        PRINTED.replace("\n", "\r\n").replace(": ", " :\t"),
        re.sub(r"(?m)^\d: ", "", PRINTED),
        re.sub(r"(?m)^\d: ", "", PRINTED).replace("-", "-\n").replace("ECHO-\nNODE", "ECHO-NODE"),
        "\n".join([*lines_of(PRINTED)[:2], *reversed(lines_of(PRINTED)[2:])]),
        "kept since spring\n\n" + PRINTED.replace("\n", "\n\n") + "\n",
        PRINTED.replace("-", "\N{EN DASH}"),
    ],
    ids=[
        "printed",
        "small",
        "spaces",
        "letters",
        "breaks",
        "unnumbered",
        "wrapped",
        "turned",
        "noted",
        "dashes",
    ],
)
def test_it_comes_back_however_it_is_typed(typed):
    assert read_backup(typed, PASSPHRASE).seed == ALICE.seed


@pytest.mark.parametrize("number", range(1, 8))
def test_one_wrong_character_is_named_by_its_line(number):
    lines = lines_of(PRINTED)
    line = lines[number + 1]
    for place in (3, 13, len(line) - 1):
        wrong = "7" if line[place] != "7" else "8"
        lines[number + 1] = line[:place] + wrong + line[place + 1 :]
        with pytest.raises(ConfigError, match=f"line {number} of the backup is off"):
            peer_of("\n".join(lines))
    lines[number + 1] = line[:-1]
    with pytest.raises(ConfigError, match=f"line {number} of the backup has 19 characters"):
        peer_of("\n".join(lines))


def test_two_lines_that_changed_places_are_noticed():
    lines = lines_of(PRINTED)
    lines[2], lines[3] = "1: " + lines[3][3:], "2: " + lines[2][3:]
    with pytest.raises(ConfigError, match="line 1 of the backup is off"):
        peer_of("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no backup"),
        ("a letter to my aunt", "no backup"),
        (PRINTED.replace("BACKUP 1", "BACKUP 2"), "of format 2"),
        (PRINTED.replace("12D3", "12D4"), "peer id is missing or off"),
        ("\n".join(lines_of(PRINTED)[:5]), "line 4 of the backup is missing"),
        ("\n".join(lines_of(PRINTED)[:2]), "line 1 of the backup is missing"),
        (PRINTED + "3: " + "0" * 20, "line 3 of the backup is there twice"),
        (PRINTED + " " * 20_000, "too long"),
    ],
)
def test_what_is_no_whole_backup_is_said_in_words(text, says):
    with pytest.raises(ConfigError, match=says):
        read_backup(text, PASSPHRASE)


def test_another_passphrase_is_said_to_be_the_wrong_one():
    with pytest.raises(ConfigError, match="not the passphrase"):
        read_backup(PRINTED, PASSPHRASE + "!")


def test_one_passphrase_typed_on_two_keyboards_is_one():
    printed = write_backup(ALICE, "gr\u00fc\u00dfe ueberall", CHEAP)
    assert read_backup(printed, "gru\u0308\u00dfe ueberall").seed == ALICE.seed


def test_a_backup_under_another_name_is_not_believed():
    with pytest.raises(ConfigError, match=f"says {BOB.peer_id} and holds the key of {ALICE.peer_id}"):
        read_backup(PRINTED.replace(ALICE.peer_id, BOB.peer_id), PASSPHRASE)


@pytest.mark.parametrize(
    "head", [(1, 30, 8, 1), (1, 255, 255, 255), (1, 17, 8, 0), (1, 17, 200, 1), (1, 1, 8, 1), (2, 17, 8, 1)]
)
def test_a_stranger_does_not_choose_how_much_memory_it_costs(head, monkeypatch):
    def forged(number: int) -> str:
        body = key_backup._encoded(bytes(head) + bytes(6) if number == 1 else bytes(10))
        return f"{number}: {body}{key_backup._check(number, body)}"

    monkeypatch.setattr(key_backup, "Scrypt", lambda **_: pytest.fail("it was computed"))
    text = "\n".join(["ECHO-NODE KEY BACKUP 1", ALICE.peer_id, *map(forged, range(1, 8))])
    with pytest.raises(ConfigError, match="another format"):
        read_backup(text, PASSPHRASE)


@given(st.text(max_size=300), st.integers(0, len(PRINTED)), st.integers(0, len(PRINTED)))
def test_no_text_makes_it_stumble(junk, start, end):
    text = PRINTED[:start] + junk + PRINTED[end:]
    with suppress(ConfigError):
        assert peer_of(text)[:8] == "12D3KooW"


def test_a_passphrase_that_guards_nothing_is_refused():
    with pytest.raises(ConfigError, match="7 characters"):
        check_passphrase("1234567")
    check_passphrase("12345678")


# The commands


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "passphrase"
    file.write_text(PASSPHRASE + "\n")
    return file


def invoke(*words, **more):
    return CliRunner().invoke(app, [str(word) for word in words], **more)


def test_a_reinstall_with_the_backup_is_the_same_node(tmp_path, secret):
    before = prepared(tmp_path / "old").identity()
    out = tmp_path / "paper"
    done = invoke("backup", "--state", tmp_path / "old", "--out", out, "--passphrase-file", secret)
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    done = invoke("restore", out, "--state", tmp_path / "new" / "home", "--passphrase-file", secret)
    assert done.exit_code == 0, done.output
    assert before.peer_id in done.output
    restored = prepared(tmp_path / "new" / "home")
    assert restored.identity().seed == before.seed
    assert stat.S_IMODE(restored.key.stat().st_mode) == 0o600
    again = invoke(
        "restore", "-", "--state", restored.path, "--passphrase-file", secret, input=out.read_text()
    )
    assert again.exit_code == 0, "the same key again changes nothing"
    assert sorted(each.name for each in restored.path.iterdir()) == ["backed-up", "format", "key", "lock"]


def test_another_key_is_replaced_only_when_that_is_asked_for_and_is_kept(tmp_path, secret):
    paper = tmp_path / "paper"
    paper.write_text(PRINTED)
    place = prepared(tmp_path / "state")
    there = place.identity().seed
    words = ("restore", paper, "--state", place.path, "--passphrase-file", secret)
    refused = invoke(*words)
    assert isinstance(refused.exception, StoreError)
    assert "--replace" in str(refused.exception)
    assert place.key.read_bytes() == there
    assert invoke(*words, "--replace").exit_code == 0
    assert place.identity().seed == ALICE.seed
    (old,) = place.path.glob("key.old-*")
    assert (old.read_bytes(), stat.S_IMODE(old.stat().st_mode)) == (there, 0o600)


def test_a_node_that_runs_keeps_its_key(tmp_path, secret):
    paper = tmp_path / "paper"
    paper.write_text(PRINTED)
    with opened(tmp_path / "state"):
        done = invoke(
            "restore", paper, "--state", tmp_path / "state", "--passphrase-file", secret, "--replace"
        )
    assert isinstance(done.exception, StoreError)
    assert "another node runs on" in str(done.exception)
    assert not (tmp_path / "state" / "key").exists()


def test_a_backup_is_never_overwritten_and_what_is_missing_is_said(tmp_path, secret):
    out = tmp_path / "paper"
    out.write_text("older")
    words = ("backup", "--state", tmp_path / "state", "--passphrase-file")
    for wrong, says in (
        ((*words, secret, "--out", out), "there already"),
        ((*words, tmp_path / "nowhere"), "nowhere"),
        (("restore", tmp_path / "nowhere", "--state", tmp_path / "state"), "nowhere"),
        (("restore", out, "--state", tmp_path / "state"), "no backup"),
    ):
        done = invoke(*wrong)
        assert isinstance(done.exception, ConfigError), done.output
        assert says in str(done.exception)
    assert out.read_text() == "older"
    out.unlink()
    (tmp_path / "short").write_text("short\n")
    assert "characters" in str(invoke(*words, tmp_path / "short", "--out", out).exception)
    assert not out.exists()


def test_a_person_is_reminded_until_there_is_a_backup_of_this_very_key(tmp_path, secret):
    place = prepared(tmp_path / "state")
    assert "echo-node keys backup" in backup_reminder(place)
    assert "\n" not in backup_reminder(place)
    printed = invoke("backup", "--state", place.path, "--passphrase-file", secret)
    assert peer_of(printed.output) == place.identity().peer_id
    assert backup_reminder(place) is None
    place.key.unlink()
    assert backup_reminder(place) is not None, "another key needs another backup"


@contextmanager
def at_a_terminal(command):
    """A program that has a terminal, which we type at and read. It does not outlive the block."""
    has_one = f"import pty, sys; sys.exit(pty.spawn({command!r}) >> 8)"
    with subprocess.Popen(
        [sys.executable, "-c", has_one], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_person_at_a_terminal_is_asked_twice_and_nothing_is_echoed(tmp_path):
    keys = [sys.executable, "-m", "echo_node", "keys", "backup", "--state", str(tmp_path)]
    for first, second, code in ((PASSPHRASE, PASSPHRASE, 0), (PASSPHRASE, "something else", 2)):
        with at_a_terminal(keys) as process:
            said = b""
            for prompt, typed in ((b"of the backup: ", first), (b"again: ", second)):
                while not said.endswith(prompt):
                    more = os.read(process.stdout.fileno(), 4096)
                    assert more, said
                    said += more
                os.write(process.stdin.fileno(), typed.encode() + b"\n")
            said += process.stdout.read()
            process.stdin.close()
            assert process.wait(timeout=60) == code, said
        assert PASSPHRASE.encode() not in said
        assert (b"KEY BACKUP" in said) == (code == 0)


def test_at_its_first_start_on_a_terminal_a_node_offers_a_backup_and_never_again(tmp_path):
    words = ("join", "--role", "bootstrap", "--no-page", "--listen", "/ip4/127.0.0.1/tcp/0")
    node = [sys.executable, "-m", "echo_node", *words, "--state", str(tmp_path)]
    mistyped = ((b"of the backup: ", PASSPHRASE), (b"again: ", "something else"))
    twice = ((b"of the backup: ", PASSPHRASE), (b"again: ", PASSPHRASE))
    for answers in (((b"[Y/n]: ", "y"), *mistyped, *twice), ()):
        with at_a_terminal(node) as process:
            said = b""
            for prompt, typed in (*answers, (b"reachable at ", "\x03")):
                while prompt not in said:
                    more = os.read(process.stdout.fileno(), 4096)
                    assert more, said
                    said += more
                said = said.partition(prompt)[2]
                os.write(process.stdin.fileno(), typed.encode() + b"\n")
            said += process.stdout.read()
            process.stdin.close()
            assert process.wait(timeout=60) == 0, said
        assert b"keys backup" not in said, "there is nothing to be reminded of"
    (kept,) = tmp_path.glob("backup-*.txt")
    assert read_backup(kept.read_text(), PASSPHRASE).peer_id == prepared(tmp_path).identity().peer_id
    assert kept.stat().st_mode & 0o077 == 0


def test_without_a_terminal_the_file_is_asked_for(tmp_path):
    command = [sys.executable, "-m", "echo_node", "keys", "backup", "--state", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--passphrase-file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
