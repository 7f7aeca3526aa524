"""Bad input and broken machines: one line that says what, why and what to do, and an exit code.

Each case runs the whole program in this process, as `echo-node WORDS`, in a folder with a state,
a run and a TOML file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from echo_node.cli.main import app
from echo_node.engine import engine_classes
from echo_node.identity.key_backup import Cost, write_backup
from echo_node.runs import manifest_exchange
from echo_node.runs.spec import RunSpec, new_run, write_run
from echo_node.runtime import exit_codes
from echo_node.storage import files as storage_files
from echo_node.storage import state_dir
from protocol import Identity, Link, limits, open_manifest

STRANGER = Identity(b"s" * 32)
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER.peer_id}"
LINK = str(Link(addresses=(NOBODY,), head=bytes(32), run=bytes(32), term=1, version=0))
CLASS_NAME = re.compile(r"\b[A-Z]\w+(Error|Exception|Warning)\b")
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
SAMPLE = ("join", "--role", "sampler", *LOOPBACK)
SEED = ("join", "--role", "bootstrap", *LOOPBACK)
LONG = "x" * 300
LONG_LINK = str(Link(addresses=(NOBODY,) * 6, head=bytes(32), run=bytes(32), term=1, version=0))
"""Both are longer than a file's name may be."""
GARBAGE = b"this is no database, and never was one. " * 200


@dataclass(frozen=True)
class Place:
    """The folder of a case: `state`, `run`, `theirs` (a run of others), `run.toml`, and what
    `before` adds.
    """

    path: Path
    run_id: str

    @property
    def held(self) -> Path:
        """What the node holds of the run."""
        folder = self.path / "state" / "runs" / self.run_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def fingerprint(self) -> dict[str, str]:
        files = (each for each in self.path.rglob("*") if each.is_file() and each.name != "lock")
        return {
            str(each.relative_to(self.path)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files
        }


Before = Callable[[Place], "AbstractContextManager[object] | None"]


@dataclass(frozen=True)
class Case:
    """Define a case; `says` is in the line, and `{port}` in a word is a port in use.

    A box of typer's own is more than one line.
    """

    id: str
    words: tuple[str, ...]
    says: str
    code: int = 2
    before: Before = lambda _place: None
    box: bool = False


def case(id_: str, words: str | tuple[str, ...], says: str, code: int = 2, **more) -> Case:
    return Case(id_, tuple(words.split()) if isinstance(words, str) else words, says, code, **more)


def usage(id_: str, words: str | tuple[str, ...], says: str) -> Case:
    return case(id_, words, says, box=True)


def toml(id_: str, says: str, text: str = "", *, code: int = 2, **lines: str) -> Case:
    """`run new` on the good file with these lines instead."""

    def before(place: Place) -> None:
        good = {"name": '"a test"', "trainers": f'["{STRANGER.peer_id}"]'} | lines
        told = "\n".join(f"{name} = {value}" for name, value in good.items() if value)
        (place.path / "bad.toml").write_text(f"{told}\n{text}\n")

    return case(f"toml: {id_}", "run new bad.toml --state state", says, code, before=before)


def written(name: str, data: bytes | str) -> Before:
    def before(place: Place) -> None:
        path = place.path / name.replace("HELD", str(place.held))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return before


def mode(name: str, bits: int) -> Before:
    return lambda place: (place.path / name).chmod(bits)


def instead(name: str, kind: str) -> Before:
    """A pipe that nobody writes into, a device or a folder, where a file should be."""

    def before(place: Place) -> None:
        path = place.path / name.replace("HELD", str(place.held))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "a folder":
            path.mkdir()
        elif kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path, 0o600)

    return before


def newer(database: Path, mark: int) -> None:
    """Write a file of this kind by a later program."""
    with closing(sqlite3.connect(database)) as file:
        file.execute(f"PRAGMA application_id = {mark}")
        file.execute("PRAGMA user_version = 99")
        file.execute("CREATE TABLE what_comes (later)")


def damaged_manifest(place: Place) -> None:
    file = place.path / "run" / "manifest"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def strangers_manifest(place: Place) -> None:
    """The same words, said to be another's."""
    file = place.path / "run" / "manifest"
    data = file.read_bytes()
    author = open_manifest(data).signer
    assert author in data
    file.write_bytes(data.replace(author, STRANGER.public))


def two_runs(place: Place) -> None:
    for last in "ef":
        written(f"state/runs/abcd{last * 60}/weights/manifest", b"")(place)


def another_node_runs(place: Place) -> AbstractContextManager[object]:
    return state_dir.opened(place.path / "state")


@contextmanager
def _as_nobody():
    """Run as a user without access to the files; a plain user drops the permissions instead."""
    if os.geteuid() != 0:
        pytest.skip("only a superuser can be somebody else for a moment")
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def _full_disk(folder: Path):
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(folder))
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 512):
                    pass
            except OSError:
                pass
        (folder / "filler").rename(folder / "lock")
        yield
        assert [each.name for each in folder.iterdir() if each.is_file() and each.stat().st_size] == ["lock"]
    finally:
        subprocess.run(("umount", str(folder)), check=True)


@contextmanager
def _torch_computes_on(device: str):
    before, engine_classes.torch_device = engine_classes.torch_device, lambda: device
    try:
        yield
    finally:
        engine_classes.torch_device = before


@contextmanager
def _of_no_home():
    """A user of a container, whom no list has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_STATE_HOME")
        patch.setenv("HOME", "")
        patch.setattr(os, "getuid", lambda: 2**31 - 7)
        yield


@contextmanager
def _without_torch():
    before = sys.modules.get("torch")
    sys.modules["torch"] = None  # as it looks where it is not installed
    try:
        yield
    finally:
        sys.modules.pop("torch")
        if before is not None:
            sys.modules["torch"] = before


def pipe(place: Place) -> AbstractContextManager[object]:
    instead("pipe", "a pipe")(place)
    written("backup", backup_of(STRANGER))(place)
    return mock.patch.object(storage_files, "PIPE_SECONDS", 0.2)


def backup_of(identity: Identity) -> str:
    return write_backup(identity, "the right passphrase", Cost(doublings=14))


def with_backup(passphrase: str) -> Before:
    def before(place: Place) -> None:
        written("backup", backup_of(STRANGER))(place)
        written("passphrase", passphrase + "\n")(place)

    return before


CASES = (
    # words
    usage("unknown command", "sampel", "sampel"),
    usage("unknown flag", "join --rolle sampler run", "--rolle"),
    usage("no role", "join run", "--role"),
    usage("no steps", "join --role trainer --steps 0 run", "--steps"),
    usage("negative threads", "join --role sampler --threads -2 run", "--threads"),
    usage("more threads than there can be", "join --role sampler --threads 99999999999999999999 run", "--threads"),
    usage("no slots", "join --role sampler --slots 0 run", "--slots"),
    usage("a port that there is not", "join --role sampler --page 99999 run", "--page"),
    usage("too nice", "join --role sampler --nice 30 run", "--nice"),
    usage("a number that is none", "join --role trainer --steps many run", "--steps"),
    case("unknown role", "join --role spectator run", "spectator"),
    case("nproc of a sampler", "join --role sampler --nproc 2 run", "--nproc is for trainers"),
    case("unknown device", "join --role sampler --device tpu run", "tpu"),
    case("memory in words", "join --role sampler --max-memory lots run", "--max-memory"),
    case("negative disk", "join --role sampler --max-disk=-5GB run", "--max-disk"),
    case("no upload at all", "join --role sampler --max-up 0 run", "--max-up"),
    case("page and no page", "join --role sampler --page 0 --no-page run", "contradict"),
    # which run
    case("no run, nobody to ask", SAMPLE, "no run was given"),
    case("link cut short", (*SAMPLE, LINK[:-4]), "no complete link"),
    case("link with a typo", (*SAMPLE, LINK[:40] + ("a" if LINK[40] != "a" else "b") + LINK[41:]), "no complete link"),
    case("link of another scheme", (*SAMPLE, "http" + LINK[4:]), "echo:"),
    case("long link of another scheme", (*SAMPLE, "http" + LONG_LINK[4:]), "echo:"),
    case("link without its scheme, cut short", (*SAMPLE, LONG_LINK[5:-4]), "echo:"),
    case("link in spaces, cut short", (*SAMPLE, f"  {LONG_LINK[:-4]} "), "no complete link"),
    case("id that nobody can be asked for", (*SAMPLE, "ab" * 32), "no peer is known to ask for it"),
    case("id too short", (*SAMPLE, "abcdef0123"), "abcdef0123"),
    case("folder that is not there", (*SAMPLE, "nowhere"), "nowhere"),
    case("link of a run that is not held", ("run", "show", LINK), "holds nothing of the run"),
    case("run file that is not sealed", "run show unsealed.toml", "run new unsealed.toml", before=written("unsealed.toml", 'name = "x"')),
    case("id of a run that is not held", "run eval abcd", "holds nothing of the run abcd"),
    case("half an id that several runs begin with", "run show abcd", "several runs begin with abcd", before=two_runs),
    case("no seed reachable", (*SAMPLE, "--seed", NOBODY, "ab" * 32), "nobody", 1, before=lambda _: mock.patch.object(manifest_exchange, "FIND_SECONDS", 0.5)),
    # addresses
    case("seed in words", (*SEED, "--seed", "my friend's"), "my friend's"),
    case("seed without a peer", (*SEED, "--seed", "/ip4/192.0.2.1/tcp/4001"), "peer id is missing"),
    case("listen nowhere", "join --role bootstrap --listen nowhere", "nowhere"),
    case("listen on a name", "join --role bootstrap --listen /dns4/example.org/tcp/1", "/dns4/example.org"),
    case("announce nonsense", (*SEED, "--announce", "/ip9/here"), "/ip9/here"),
    case("announce what nobody can dial", (*SEED, "--announce", "/ip4/0.0.0.0/tcp/4001"), "cannot be dialled"),
    case("announce nothing", (*SEED, "--announce", ""), "cannot be dialled"),
    case("announce any port", (*SEED, "--announce", "/dns4/seed.example/tcp/0"), "cannot be dialled"),
    case("listen elsewhere", "join --role bootstrap --listen /ip4/192.0.2.1/tcp/0", "this machine does not have that address"),
    case("listen on a port in use", "join --role bootstrap --listen /ip4/127.0.0.1/tcp/{port}", "another program"),
    case("page on a port in use", (*SEED, "--page", "{port}"), "{port}"),
    case("doctor with a bad seed", "doctor --seed here", "here"),
    # names that can be none
    *(
        case(f"{words} with a name too long", words.replace("LONG", LONG), "too long")
        for words in (
            "run show LONG",
            "run eval LONG",
            "run export LONG out",
            "run link LONG",
            "run open LONG",
            "join --role sampler LONG",
            "join --role sampler --model LONG run",
            "engines --model LONG",
            "engines --model LONG.gguf",
            "verifier calibrate --model LONG",
            "weights log LONG",
            "weights provenance 1 --folder LONG",
            "keys backup --out LONG",
        )
    ),
    case("run that may not be read", "run show run", "Permission denied", before=lambda _: _as_nobody()),
    # the run does not fit this node
    case("trainer without torch", (*SAMPLE[:2], "trainer", "run"), "echo-node[torch]", 1, before=lambda _: _without_torch()),
    case("trainer who is none", (*SAMPLE[:2], "trainer", "theirs"), "none of the run's trainers"),
    case("verifier who is none", (*SAMPLE[:2], "verifier", "theirs"), "none of the run's verifiers"),
    case("engine that there is not", (*SAMPLE, "--engine", "abacus", "run"), "abacus"),
    case("engine that the run does not take", (*SAMPLE, "--engine", "torch/bf16", "run"), "torch/bf16"),
    case("device that this machine has not", (*SAMPLE, "--device", "cuda", "run"), "no cuda here", before=lambda _: _torch_computes_on("cpu")),
    case("device that a trainer's machine has not", (*SAMPLE[:2], "trainer", *LOOPBACK, "--device", "cuda", "run"), "no cuda here", before=lambda _: _torch_computes_on("cpu")),
    case("several processes on one device", (*SAMPLE[:2], "trainer", "--device", "mps", "--nproc", "2", "run"), "in one process"),
    case("device of another engine", (*SAMPLE, "--device", "cuda", "--engine", "llama/f16", "theirs"), "compute on the CPU", before=lambda _: _torch_computes_on("cuda")),
    case("model that is not there", (*SAMPLE, "--model", "no-model", "run"), "no-model"),
    case("model without a configuration", (*SAMPLE, "--model", "run", "run"), "config.json"),
    case("model too large for the memory", (*SAMPLE, "--max-memory", "1MB", "run"), "--max-memory", 1),
    # the key
    case("key that others can read", (*SEED,), "chmod 600", 1, before=mode("state/key", 0o644)),
    case("key that is garbage", "keys show", "identity", 1, before=written("state/key", b"short")),
    case("restore of garbage", "keys restore backup", "no backup of a key", before=written("backup", b"\xff\0 hello")),
    case("restore of a file that is not there", "keys restore nowhere", "nowhere"),
    case(
        "restore with another passphrase",
        "keys restore backup --passphrase-file passphrase",
        "not the passphrase",
        before=with_backup("the wrong passphrase"),
    ),
    case(
        "restore over another key",
        "keys restore backup --passphrase-file passphrase",
        "--replace",
        1,
        before=with_backup("the right passphrase"),
    ),
    case("restore without the passphrase's file", "keys restore backup --passphrase-file none", "none", before=with_backup("x")),
    case("backup into no folder", "keys backup --passphrase-file passphrase --out no/where", "no/where", 1, before=written("passphrase", "the right passphrase\n")),
    case("backup over a file", "keys backup --out run.toml", "there already"),
    case(
        "backup under a short passphrase",
        "keys backup --passphrase-file passphrase",
        "5 characters",
        before=written("passphrase", "short\n"),
    ),
    # pipes, devices and folders where files should be
    *(
        case(f"{kind} for the {name}, {words}", words, f"it is {kind}, and no file", 1, before=instead(f"state/{name}", kind))
        for kind in ("a pipe", "a device", "a folder")
        for name, words in (("key", "keys show"), ("key", SEED), ("format", "keys show"))
    ),
    case("pipe for a service's file", "service uninstall", "it is a pipe, and no file", 1, before=instead("config/systemd/user/echo-node.service", "a pipe")),
    case("pipe for a model's description", "engines --model piped", "it has no config.json", before=instead("piped/config.json", "a pipe")),
    case("pipe for a model", "engines --model model.gguf", "there is no file", before=instead("model.gguf", "a pipe")),
    case("pipe for a manifest", "run show pipe", "there is no run in pipe", before=instead("pipe", "a pipe")),
    case("pipe for a run's manifest", "run show run", "there is no run in run", before=instead("run/manifest", "a pipe")),
    *(
        case(f"pipe that nobody writes into, {words}", words, "nobody writes into it", before=pipe)
        for words in (
            "run new pipe",
            "demo --config pipe",
            "keys restore pipe",
            "keys restore backup --passphrase-file pipe",
        )
    ),
    *(
        case(f"{name} that is a pipe", (*SAMPLE[:2], role, *LOOPBACK, "run"), name, 1, before=instead(f"HELD/{name}", "a pipe"))
        for role, name in (("sampler", "outbox.sqlite"), ("sampler", "ledger.sqlite"), ("trainer", "journal.sqlite"), ("trainer", "records.sqlite"))
    ),
    # paths that are empty
    *(
        case(f"empty {name}, {' '.join(words)}", (*words, ""), f"the path for {name} is empty")
        for name, words in (
            ("--state", ("keys", "show", "--state")),
            ("--state", (*SEED, "--state")),
            ("--state", ("status", "--json", "--state")),
            ("--state", ("service", "install", "--print", "--", *SEED[1:], "--state")),
            ("--out", ("run", "new", "run.toml", "--out")),
            ("--out", ("demo", "--out")),
            ("FILE", ("run", "new")),
            ("--passphrase-file", ("keys", "backup", "--passphrase-file")),
        )
    ),
    case("nobody's home", "keys show", "has no home folder", before=lambda _: _of_no_home()),
    # the state
    case("state that is a file", "keys show --state run.toml", "run.toml", 1),
    case("state under a file", "keys show --state run.toml/state", "run.toml", 1),
    case("state of another kind", "keys show --state theirs", "something else", 1),
    case("state of a newer format", (*SEED,), "'99'", 1, before=written("state/format", "99\n")),
    case("state that may not be read", "keys show", "state", 1, before=lambda _: _as_nobody()),
    case("two nodes on one state", (*SEED,), "another node runs", 1, before=another_node_runs),
    case("full disk: key", "keys show --state full", "full", 1, before=lambda place: _full_disk(place.path / "full")),
    case("full disk: run", "run new run.toml --out full/run", "full", 1, before=lambda place: _full_disk(place.path / "full")),
    case("state that is a link to nowhere", "keys show --state nowhere", "leads nowhere", 1, before=lambda place: (place.path / "nowhere").symlink_to("gone")),
    # databases
    case("corrupt outbox", (*SAMPLE, "run"), "outbox.sqlite", 1, before=written("HELD/outbox.sqlite", GARBAGE)),
    case("corrupt journal", (*SAMPLE[:2], "trainer", *LOOPBACK, "run"), "journal.sqlite", 1, before=written("HELD/journal.sqlite", GARBAGE)),
    case("corrupt records", (*SAMPLE[:2], "trainer", *LOOPBACK, "run"), "records.sqlite", 1, before=written("HELD/records.sqlite", GARBAGE)),
    case("records of a newer version", (*SAMPLE[:2], "trainer", *LOOPBACK, "run"), "run the echo-node that wrote it", 1, before=lambda place: newer(place.held / "records.sqlite", 0x4563_5245)),
    case("corrupt ledger", (*SAMPLE[:2], "verifier", *LOOPBACK, "run"), "ledger.sqlite", 1, before=written("HELD/ledger.sqlite", GARBAGE)),
    # manifests
    case("manifest damaged", "run show run", "no manifest", before=damaged_manifest),
    case("manifest said to be a stranger's", (*SAMPLE, "run"), "no manifest", before=strangers_manifest),
    case("manifest too large", "run show big", "too large", before=written("big", bytes(limits.MANIFEST_BYTES * 2))),
    case("manifest empty", "run show empty", "no manifest", before=written("empty", b"")),
    # run files
    toml("no TOML", "bad.toml", "this is = = not TOML"),
    toml("no name", "name", name=""),
    toml("unknown field", "colour", colour='"red"'),
    toml("wrong type", "trainers", trainers="7"),
    toml("bad peer id", "12D3KooWnobody", trainers='["12D3KooWnobody"]'),
    toml("bad engine", "abacus", engines='["abacus"]'),
    toml("bad seed", "over there", seeds='["over there"]'),
    toml("seed without a peer", "peer id is missing", seeds='["/ip4/192.0.2.1/tcp/4001"]'),
    toml("stale beyond reason", "staleness", "[sync]\nstaleness = 1000"),
    toml("lease shorter than heartbeats", "lease", "[terms]\nheartbeat_ms = 5000\nlease_ms = 1000"),
    toml("quorum without verifiers", "quorum", '[verification]\npolicy = "quorum"\nquorum = 3'),
    toml("sampled without verifiers", "there are no verifiers", '[verification]\npolicy = "sampled"\nshare = 0.5'),
    toml("a quorum with the trainer in it", "is trainer and verifier", '[verification]\npolicy = "quorum"', verifiers=f'["{STRANGER.peer_id}"]'),
    toml("verdicts by the trainer alone", "is trainer and verifier", '[verification]\npolicy = "sampled"', verifiers=f'["{STRANGER.peer_id}"]'),
    toml("prompts that are all too long", "sampling.max_prompt is 3", "[sampling]\nmax_prompt = 3"),
    toml("a veto on everything", "veto", "[algorithm]\nveto = 1.5"),
    toml("infinite temperature", "temperature", "[sampling]\ntemperature = inf"),
    toml("unknown number of the algorithm", "luck", "[algorithm]\nluck = 7"),
    toml("contract missing", "no-such-contract", contract='"no-such-contract@1"', code=1),
    toml("contract of another version", "99", contract='"digits-reverse@99"', code=1),
    toml("bad parameter of the contract", "fingers", "[params]\nfingers = 10", code=1),
    toml("model missing", "no-model", model='"./no-model"'),
    toml("a truth for a number", "sync.staleness", "[sync]\nstaleness = true"),
    toml("a number in quotes", "sampling.group_size", '[sampling]\ngroup_size = "8"'),
    toml("a value for a table", "sampling is a table", sampling="7"),
    toml("a name of nothing", "name", name='"  "'),
    toml("a name that turns the line round", "control characters", name='"\\u202egnp.exe"'),
    toml("contract without a version", "'digits-reverse' is no name with a version", contract='"digits-reverse"'),
    toml("contract without a name", "'@1' is no name with a version", contract='"@1"'),
    toml("parameter out of range", "from 1 to 32", "[params]\ndigits = 0", code=1),
    toml("batch of nothing", "batch_groups is 0", "[algorithm]\nbatch_groups = 0"),
    toml("learning rate in words", "learning_rate is 'high'", '[algorithm]\nlearning_rate = "high"'),
    toml("learning rate of nothing", "algorithm.learning_rate is 0, and must be from 1e-12 to 1", "[algorithm]\nlearning_rate = 0"),
    toml("learning rate beyond all reason", "algorithm.learning_rate is 1e+300, and must be from 1e-12 to 1", "[algorithm]\nlearning_rate = 1e300"),
    toml("learning rate that is no number", "algorithm.learning_rate is nan", "[algorithm]\nlearning_rate = nan"),
    toml("infinite weight decay", "algorithm.weight_decay is inf, and must be from 0 to 10", "[algorithm]\nweight_decay = inf"),
    toml("warm-up without end", "algorithm.warm_up", "[algorithm]\nwarm_up = 99999999999999999999"),
    toml("version that no run reaches", "sync.async_from", "[sync]\nasync_from = 99999999999999999999"),
    toml("heartbeat of a year", "heartbeat_ms", "[terms]\nheartbeat_ms = 31536000000\nlease_ms = 99999999999999999999"),
    case("demo beyond all reason", "demo --set algorithm.learning_rate=1e300", "algorithm.learning_rate is 1e+300"),
    case("demo in memory beyond all reason", "demo --in-memory --set algorithm.kl=1e9", "algorithm.kl is"),
    case("joining a run file with a number too large", (*SAMPLE[:2], "trainer", *LOOPBACK, "bad.toml"), "algorithm.learning_rate is 1e+300", before=written("bad.toml", f'name = "x"\ntrainers = ["{STRANGER.peer_id}"]\n[algorithm]\nlearning_rate = 1e300')),
    case("joining a run file with an unknown number", (*SAMPLE[:2], "trainer", *LOOPBACK, "bad.toml"), "no setting luck", before=written("bad.toml", f'name = "x"\ntrainers = ["{STRANGER.peer_id}"]\n[algorithm]\nluck = 7')),
    toml("one trainer twice", "one key twice", trainers=f'["{STRANGER.peer_id}", "{STRANGER.peer_id}"]'),
    case("toml: without end", "run new /dev/zero", "too long for settings"),
    case("toml: not UTF-8", "run new bad.toml", "not UTF-8 text", before=written("bad.toml", b'name = "\xff\xfe"')),
    case("toml: nested without end", "run new bad.toml", "nested too deeply", before=written("bad.toml", "a = " + "[" * 50_000)),
    case("run file that is not there", "run new nowhere.toml", "nowhere.toml"),
    case("set without a value", "run new run.toml --set staleness", "--set"),
    case("set inside a value", "run new run.toml --set name.first=x", "name is a value"),
    case("set of what there is not", "run new run.toml --set sync.colour=red", "sync.colour"),
    case("run where one is already", "run new run.toml --out run", "holds a run already"),
    # runs without weights
    case("link without heads", "run link run", "knows none"),
    case("eval without weights", "run eval run", "holds no version", 1),
    case("export without a measurement", "run export run out", "run eval"),
    case("open where a folder is in the way", "run close run", "open", 1, before=lambda place: (place.held / "open").mkdir()),
    case("open of others' run", "run open theirs", "no trainer"),
    case("weights of no store", "weights log run", "no store of weights"),
    case("verify of no store", "weights verify nowhere", "no store of weights"),
    usage("log of fewer than none", "weights log run --last=-3", "--last"),
    case("provenance without a run", "weights provenance 1", "--folder"),
    # nobody runs
    *(case(f"{word} without a node", word, "no node runs", 1) for word in ("leave", "pause", "resume", "watch")),
    case("forget two things", "leave --forget-weights --forget-run", "--forget options exclude each other"),
    case("forget the key in passing", "leave --forget-everything", "keys backup"),
    case("forget a run that is not here", "leave --forget-run --run ffff", "holds nothing"),
    # services, demos, tools
    case("service in an unknown role", "service install --print -- --role cook run", "cook"),
    case("service with a page and none", "service install --print -- --role sampler --page 1 --no-page run", "contradict"),
    case("service on an unknown device", "service install --print -- --role sampler --device tpu run", "tpu"),
    usage("service with bad words", "service install --print -- --role sampler --steps 0 run", "--steps"),
    usage("service without words", "service install", "JOIN WORDS"),
    case("demo in an unknown mode", "demo --mode serial", "mode"),
    case("demo of no steps", "demo --steps 0", "steps"),
    case("demo of a crowd", "demo --samplers 99", "samplers"),
    case("demo of what does not go together", "demo --hostile --in-memory", "has no verifier"),
    case("demo with an unknown setting", "demo --set colour=red", "colour"),
    case("demo without its settings", "demo --config nowhere.toml", "nowhere.toml"),
    case("demo into a file", "demo --in-memory --out run.toml", "run.toml"),
    case("contract with half a parameter", "contract show digits-reverse --param digits", "--param"),
    case("unknown contract", "contract show no-such-contract", "no-such-contract", 1),
    case("unknown engine", "engines --only abacus", "abacus"),
    case("engines without the model", "engines --model ./no-model", "no-model"),
    case("calibration of an unknown engine", "verifier calibrate --engine abacus", "abacus"),
)  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    home = state_dir.prepared(folder / "state")
    me = home.identity()
    home.note_backup(me.peer_id)  # else a node that starts reminds of it, in a line of its own
    with state_dir.opened(folder / "state"):
        pass
    told = RunSpec(name="a test", trainers=[me.peer_id], verifiers=[me.peer_id], engines=["torch/f32"])
    write_run(folder / "run", new_run(told, me))
    theirs = RunSpec(name="others' test", trainers=[STRANGER.peer_id])
    write_run(folder / "theirs", new_run(theirs, STRANGER))
    (folder / "run.toml").write_text(f'name = "a test"\ntrainers = ["{me.peer_id}"]\n')
    return folder, open_manifest((folder / "run" / "manifest").read_bytes()).id.hex()


@pytest.fixture
def place(template, tmp_path, monkeypatch):
    folder, run_id = template
    home = tmp_path / "home"
    shutil.copytree(folder, home)
    (home / "xdg").mkdir()
    (home / "state").rename(home / "xdg" / "echo-node")
    (home / "state").symlink_to(home / "xdg" / "echo-node")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.chdir(home)
    return Place(home, run_id)


@pytest.fixture
def own_logging():
    """The program sets logging up for itself; the tests want theirs back."""
    root, names = logging.getLogger(), ("echo_node", "libp2p", "transformers")
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in names}
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def end_of(words, capsys) -> tuple[int, str, str]:
    """The exit code and what was said, on standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        exit_codes.run(lambda: app(list(words), prog_name="echo-node"), "echo-node")
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_input_is_one_line_and_damages_nothing(case, place, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [word.replace("{port}", port) for word in case.words]
        entered = case.before(place) or nullcontext()
        before = place.fingerprint()
        with entered:
            code, _, said = end_of(words, capsys)
    assert "Traceback" not in said
    assert code == case.code, said
    assert case.says.replace("{port}", port) in said
    if not case.box:
        lines = said.splitlines()
        if case.id == "no seed reachable":  # a node that did run may have logged what it tried
            lines = [line for line in lines if not line.startswith('{"time"')]
        (line,) = lines
        assert re.fullmatch(r"echo-node: .+ \(.+\)", line), "what, why, and what to do next"
        assert not CLASS_NAME.search(line), "words for people, not names of classes"
    after = place.fingerprint()
    assert after | before == after, "what was there is as it was"
    assert all(name.startswith("xdg/echo-node/") for name in after.keys() - before.keys())


@pytest.mark.usefixtures("own_logging")
def test_status_without_a_node_says_what_is_held_and_fails(place, capsys):
    code, out, said = end_of(["status"], capsys)
    assert (code, said) == (1, "")
    assert "no node runs on" in out
    assert str(place.path) in out


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    "words",
    [
        "keys show --state EVIL",
        "keys backup --passphrase-file passphrase --out EVIL",
        "keys restore EVIL",
        "status --state EVIL",
        "watch --state EVIL",
        "leave --forget-weights --state EVIL",
        "run new run.toml --out EVIL",
        "run new EVIL",
        "run show EVIL",
        "run eval EVIL",
        "join --role sampler EVIL",
        "join --role EVIL",
        "EVIL",
        "weights log EVIL",
        "engines --model EVIL",
        "contract show EVIL",
        "contract new digits --folder EVIL",
        "demo --config EVIL",
        "demo --set EVIL=1",
        "service install --print -- --role sampler --state EVIL run",
    ],
)
def test_nothing_that_a_person_names_is_obeyed_by_the_terminal(words, place, capsys):
    (place.path / "passphrase").write_text("a passphrase that is long enough\n")
    evil = "\x1b]0;title\x07\x1b[31mred\rback\x9b2J"
    _, out, said = end_of([word.replace("EVIL", evil) for word in words.split()], capsys)
    obeyed = {each for each in out + said if not each.isprintable()} - {"\n"}
    assert not obeyed
    assert out + said


@pytest.mark.usefixtures("own_logging")
def test_status_says_what_is_wrong_with_the_key_rather_than_that_there_is_none(place, capsys):
    (place.path / "state" / "key").chmod(0o644)
    code, out, _ = end_of(["status"], capsys)
    assert code == 1
    assert "chmod 600" in out
    assert "no key yet" not in out


def test_a_corrupt_address_book_is_set_aside_two_nodes_share_no_port_and_both_end_in_order(place):
    """The one damage that a node mends by itself: the book is a cache."""
    book = place.path / "state" / "peers.sqlite"
    book.write_bytes(GARBAGE)
    command = [sys.executable, "-m", "echo_node", *SEED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--json"], **pipes) as node:
        try:
            address = [json.loads(node.stdout.readline()) for _ in range(2)][1]["addresses"][0]
            listen = ("--listen", address.partition("/p2p/")[0], "--state", str(place.path / "second"))
            second = subprocess.run(
                [*command, *listen], capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            node.send_signal(signal.SIGTERM)
            _, said = node.communicate(timeout=60)
    assert (second.returncode, node.returncode) == (2, 0), (second.stderr, said)
    assert "another program may use the port" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert any(each.read_bytes() == GARBAGE for each in book.parent.glob("peers.sqlite*")), (
        "kept for whoever looks"
    )
    assert book.read_bytes() != GARBAGE


CHOOSING = """
from types import SimpleNamespace as Some
from echo_node.cli import confirm
from echo_node.runtime import exit_codes
runs = [Some(message=Some(name=name), id=bytes(32)) for name in ("first", "second")]
exit_codes.main(lambda: print("chosen:", confirm.choose(runs).message.name), "echo-node")
"""
CTRL_C, CTRL_D = b"\x03", b"\x04"
BACKUP = ("Make a backup of it now", "passphrase of the backup: ")


def at_a_terminal(words: list[str], *talk: tuple[str, bytes]) -> tuple[int, str]:
    """Return the exit code and the whole screen; type each answer once its question is shown.

    Ctrl-C or Ctrl-D between the question and the read of its answer may be lost, whatever else is
    printed meanwhile: it is pressed again, as people do, until the program has said its last line.
    """
    inside = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [sys.executable, "-c", inside, sys.executable, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as person:
        screen, read, key = b"", 0, b""

        def more() -> bytes:
            while key and b"echo-node: " not in screen[read:]:
                if select.select([person.stdout], [], [], 1.0)[0]:
                    break
                person.stdin.write(key)
            return os.read(person.stdout.fileno(), 4096)

        try:
            for question, answer in talk:
                while question.encode() not in screen[read:]:
                    piece = more()
                    assert piece, screen
                    screen += piece
                read = len(screen)
                person.stdin.write(answer)
                key = answer if answer in {CTRL_C, CTRL_D} else b""
            while piece := more():
                screen += piece
            return person.wait(timeout=60), screen.decode()
        except BaseException:
            person.kill()
            raise


@pytest.mark.parametrize(
    ("answers", "code", "ends"),
    [
        ((b"7\n", b"two\n", b"2\n"), 0, "chosen: second"),
        ((b"\n",), 0, "chosen: first"),
        ((b"7\n",) * 3, 2, "echo-node: no run was chosen (nothing was fetched and nothing was run)"),
        ((CTRL_D,), 2, "echo-node: no run was chosen (nothing was fetched and nothing was run)"),
        ((CTRL_C,), 130, "echo-node: stopped"),
    ],
    ids=["mistyped", "default", "mistyped for good", "Ctrl-D", "Ctrl-C"],
)
def test_a_person_who_chooses_a_run_may_mistype_and_may_stop(answers, code, ends):
    found, screen = at_a_terminal(["-c", CHOOSING], *(("Which one?", answer) for answer in answers))
    assert (found, screen.splitlines()[-1].strip()) == (code, ends), screen


@pytest.mark.parametrize(
    "answers", [(CTRL_C,), (b"y\n", CTRL_C)], ids=["at the question", "at the passphrase"]
)
def test_ctrl_c_at_the_offer_of_a_backup_is_no_answer_but_the_end(place, answers):
    words = ["-m", "echo_node", *SEED, "--no-page", "--state", str(place.path / "new")]
    code, screen = at_a_terminal(words, *zip(BACKUP, answers, strict=False))
    assert (code, screen.splitlines()[-1].strip()) == (130, "echo-node: stopped"), screen
    assert "reachable at" not in screen
    assert (place.path / "new" / "key").stat().st_size == 32


@pytest.mark.usefixtures("place")
def test_ctrl_d_at_the_passphrase_is_one_line_and_no_backup():
    words = ["-m", "echo_node", "keys", "backup"]
    code, screen = at_a_terminal(words, (BACKUP[1], CTRL_D))
    assert (code, screen.splitlines()[-1].strip()) == (2, "echo-node: no passphrase was given (start again)")


@pytest.mark.usefixtures("own_logging")
def test_a_backup_that_cannot_be_noted_is_one_all_the_same(place, capsys):
    (place.path / "passphrase").write_text("a passphrase that is long enough\n")
    (place.path / "state" / "backed-up").unlink()
    (place.path / "state" / "backed-up").mkdir()
    code, out, said = end_of(["keys", "backup", "--passphrase-file", "passphrase"], capsys)
    assert code == 0, said
    assert out.startswith("ECHO-NODE KEY BACKUP")
    assert re.fullmatch(r"the backup is written, but could not be recorded: .*\n", said)


PLUG_INS = {
    "raises": 'raise RuntimeError("not today")',
    "ends": "import sys; sys.exit(3)",
    "prints": "print('hello from a plug-in')",
}


@pytest.fixture
def plug_in(request, place, monkeypatch):
    """Install a package whose contract misbehaves on import, and write a run file that names it."""
    name = f"bad-{request.param}"
    told = place.path / "site" / f"bad_{request.param}-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(f"[echo_node.contracts]\n{name} = bad_{request.param}:Bad\n")
    (told.parent / f"bad_{request.param}.py").write_text(
        f"{PLUG_INS[request.param]}\n"
        "from echo_node.contract.builtin.digits_reverse import DigitsReverse\n"
        f"class Bad(DigitsReverse):\n    name = {name!r}\n    version = '1'\n"
    )
    run = f'name = "x"\ntrainers = ["{STRANGER.peer_id}"]\ncontract = "{name}@1"\n'
    (place.path / "plugged.toml").write_text(run)
    monkeypatch.syspath_prepend(told.parent)
    return name


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("plug_in", "says"),
    [("raises", "not today"), ("ends", "wanted to end the program, with 3")],
    indirect=["plug_in"],
)
def test_a_contract_that_fails_as_it_is_imported_is_named_in_one_line(plug_in, says, place, capsys):
    code, out, said = end_of(["run", "new", "plugged.toml", "--json"], capsys)
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"echo-node: .*{plug_in}.*{says} \(whoever wrote it can mend it; .*\)\n", said)
    assert not (place.path / "plugged").exists()


@pytest.mark.usefixtures("own_logging", "place")
@pytest.mark.parametrize("plug_in", ["prints"], indirect=True)
def test_what_a_contract_prints_is_no_part_of_the_answer(plug_in, capsys):
    code, out, said = end_of(["run", "new", "plugged.toml", "--json"], capsys)
    assert code == 0, said
    assert json.loads(out).keys() == {"run", "manifest"}, plug_in
    assert "hello from a plug-in" in said


@pytest.mark.usefixtures("own_logging")
def test_a_store_that_cannot_be_locked_is_one_line_without_an_empty_one_before_it(place, capsys):
    weights = place.held / "weights"
    weights.mkdir()
    shutil.copy(place.path / "run" / "manifest", weights / "manifest")
    (weights / "lock").mkdir()
    code, out, said = end_of(["weights", "verify", str(weights)], capsys)
    assert (code != 0, out) == (True, "")
    assert re.fullmatch(r"echo-node: .+ \(.+\)\n", said), said
