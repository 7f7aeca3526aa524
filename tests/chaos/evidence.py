"""Read what every node of a chaos run left behind, after all of them have ended.

Files are read as they are, never changed: databases are copied first, since a killed process leaves
a log that SQLite would write back. What cannot be read is said, and the rest is read all the same.
What the nodes' stores of weights hold, `holdings` reads.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from echo_node.errors import EchoError
from echo_node.runs.spec import read_manifest
from protocol import Manifest, Opened, ProtocolError, identity
from tests.chaos.holdings import Holdings, read_holdings

STATES: Final = {0: "waiting", 1: "drawn", 2: "dropped"}
OUTBOX_STATES: Final = {0: "pending", 1: "acknowledged", 2: "refused"}
UNIX: Final = 1e8
"""Times beyond this are Unix times, others seconds since the start."""


@dataclass(frozen=True)
class KnownGroup:
    """A group in a trainer's journal.

    `why` it was dropped; its bytes, or later its signature alone, as far as they are kept.
    """

    id: bytes
    sampler: bytes
    slot: int
    head: bytes
    step: int
    state: str
    why: str = ""
    batch: int | None = None
    sealed: bytes | None = None
    signature: bytes | None = None


@dataclass(frozen=True)
class KnownBatch:
    """A batch in a trainer's journal: its version, the head before it, the policy step."""

    number: int
    policy_step: int
    version: int
    tip: bytes
    groups: tuple[bytes, ...]


@dataclass(frozen=True)
class KnownVerdict:
    """A verdict, as a trainer or the verifier itself recorded it.

    `after` is the newest batch of the trainer at that time.
    """

    group: bytes
    sampler: bytes
    verifier: bytes
    result: str
    reason: str
    after: int | None = None


@dataclass(frozen=True)
class TrainerFiles:
    """A trainer's journal, and the groups of each version by its records.

    Records are not synced at every step.
    """

    groups: Mapping[bytes, KnownGroup] = field(default_factory=dict)
    batches: tuple[KnownBatch, ...] = ()
    verdicts: tuple[KnownVerdict, ...] = ()
    joins: tuple[bytes, ...] = ()
    recorded: Mapping[int, tuple[tuple[int, KnownGroup], ...]] = field(default_factory=dict)
    """By version: the step of the policy, and the group."""


@dataclass(frozen=True)
class Posted:
    """A group in a sampler's outbox.

    It is pending, acknowledged, delivered (acknowledged and let go since) or refused.
    """

    id: bytes
    state: str
    reason: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class NodeEvidence:
    """One node: who it is, and what it left."""

    name: str
    role: str
    peer_id: str
    honest: bool = True
    engine: str | None = None
    trainer: TrainerFiles | None = None
    outbox: tuple[Posted, ...] = ()
    verdicts: tuple[KnownVerdict, ...] = ()
    """Its own, as a verifier."""
    holdings: Holdings | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    stderr: str = ""
    unreadable: tuple[str, ...] = ()

    @property
    def key(self) -> bytes:
        return identity.public_key_of(self.peer_id)


@dataclass(frozen=True)
class Evidence:
    """All of it. `timeline` is the harness's word on what it did, and when."""

    manifest: Opened[Manifest]
    nodes: tuple[NodeEvidence, ...]
    timeline: tuple[Mapping[str, Any], ...] = ()
    staleness: int = 0
    bound_seconds: float = 0.0

    def of(self, role: str) -> tuple[NodeEvidence, ...]:
        return tuple(node for node in self.nodes if node.role == role)

    def node(self, name: str) -> NodeEvidence:
        return next(node for node in self.nodes if node.name == name)

    def by_key(self, key: bytes) -> NodeEvidence | None:
        return next((node for node in self.nodes if node.key == key), None)

    def name_of(self, key: bytes) -> str:
        node = self.by_key(key)
        return node.name if node else identity.peer_id(key)

    def changed(self, name: str, **changes: Any) -> Evidence:
        """The same, but for one node."""
        nodes = [replace(node, **changes) if node.name == name else node for node in self.nodes]
        return replace(self, nodes=tuple(nodes))

    def was_damaged(self, name: str, part: str) -> bool:
        """Whether the nemesis has damaged such a file of this node, and nobody has put it back."""
        hurt: set[str] = set()
        for each in self.timeline:
            if each.get("node") == name and part in str(each.get("file", "")):
                (hurt.add if each["what"] == "damage" else hurt.discard)(each["file"])
        return bool(hurt)


def read_evidence(place: Path) -> Evidence:
    """The evidence in the folder of a chaos run, when all its processes have ended."""
    settings = json.loads((place / "chaos.json").read_text())
    manifest = read_manifest(place / settings["run"])
    started = float(settings["started"])
    nodes = [
        _read_node(place / "nodes" / name, name, about, manifest, started)
        for name, about in settings["nodes"].items()
    ]
    return Evidence(
        manifest=manifest,
        nodes=tuple(nodes),
        timeline=tuple(_lines(place / "timeline.jsonl", started)[0]),
        staleness=int(settings["staleness"]),
        bound_seconds=float(settings["bound_seconds"]),
    )


def _read_node(
    folder: Path, name: str, about: Mapping[str, Any], manifest: Opened[Manifest], started: float
) -> NodeEvidence:
    run = folder / "state" / "runs" / manifest.id.hex()
    unreadable: list[str] = []

    def attempt(what: str, read: Any, otherwise: Any) -> Any:
        if not (run / what).exists():
            return otherwise
        try:
            return read(run / what)
        except (sqlite3.Error, OSError, EchoError, ProtocolError, ValueError) as error:
            unreadable.append(f"{what}: {error}")
            return otherwise

    trainer = attempt("journal.sqlite", _read_journal, TrainerFiles() if about["role"] == "trainer" else None)
    if trainer is not None:
        trainer = replace(trainer, recorded=attempt("records.sqlite", _read_records, {}))
    events, torn = _lines(folder / "events.jsonl", started)
    if torn:
        unreadable.append(f"events.jsonl: {torn} lines are no JSON")
    return NodeEvidence(
        name=name,
        role=about["role"],
        peer_id=about["peer_id"],
        honest=about.get("honest", True),
        engine=about.get("engine"),
        trainer=trainer,
        outbox=attempt("outbox.sqlite", _read_outbox, ()),
        verdicts=attempt("ledger.sqlite", _read_ledger, ()),
        holdings=attempt("weights", lambda path: read_holdings(path, manifest), None),
        events=tuple(events),
        stderr=(folder / "stderr").read_text(errors="replace") if (folder / "stderr").is_file() else "",
        unreadable=tuple(unreadable),
    )


# Databases


@contextmanager
def _copied(path: Path) -> Generator[sqlite3.Connection]:
    """Open a copy of a database together with its log.

    The original stays as it was left.
    """
    with tempfile.TemporaryDirectory(prefix="echo-evidence-") as folder:
        for suffix in ("", "-wal"):
            source = path.with_name(path.name + suffix)
            if source.exists():
                shutil.copyfile(source, Path(folder) / f"copy{suffix}")
        with closing(sqlite3.connect(Path(folder) / "copy", isolation_level=None)) as file:
            yield file


def _read_journal(path: Path) -> TrainerFiles:
    with _copied(path) as file:
        groups = {
            row[0]: KnownGroup(*row[:5], STATES[row[5]], *row[6:])
            for row in file.execute(
                "SELECT id, sampler, slot, head, step, state, why, batch, sealed, signature FROM groups ORDER BY seq"
            )
        }
        members: dict[int, list[bytes]] = {}
        for number, group in file.execute(
            "SELECT batch, id FROM groups WHERE batch IS NOT NULL ORDER BY batch, place"
        ):
            members.setdefault(number, []).append(group)
        batches = tuple(
            KnownBatch(*row, tuple(members.get(row[0], ())))
            for row in file.execute("SELECT number, policy_step, version, tip FROM batches ORDER BY number")
        )
        question = "SELECT id, sampler, verifier, result, reason, after FROM verdicts ORDER BY seq"
        verdicts = tuple(KnownVerdict(*row) for row in file.execute(question))
        joins = tuple(row[0] for row in file.execute("SELECT sealed FROM joins ORDER BY key"))
    return TrainerFiles(groups, batches, verdicts, joins)


def _read_records(path: Path) -> dict[int, tuple[tuple[int, KnownGroup], ...]]:
    found: dict[int, list[tuple[int, KnownGroup]]] = {}
    with _copied(path) as file:
        for version, policy_step, number, *facts in file.execute(
            """SELECT steps.version, steps.policy_step, steps.number, id, sampler, slot, trained.head, trained.step
            FROM trained JOIN steps USING (number) ORDER BY number, place"""
        ):
            found.setdefault(version, []).append(
                (policy_step, KnownGroup(*facts, state="drawn", batch=number))
            )
    return {version: tuple(groups) for version, groups in found.items()}


def _read_outbox(path: Path) -> tuple[Posted, ...]:
    with _copied(path) as file:
        items = [
            Posted(id_, OUTBOX_STATES[state], reason, data)
            for id_, state, reason, data in file.execute(
                "SELECT id, state, reason, data FROM items ORDER BY seq"
            )
        ]
        past = file.execute("SELECT id FROM delivered ORDER BY seq").fetchall()
    return (*items, *(Posted(row[0], "delivered") for row in past))


def _read_ledger(path: Path) -> tuple[KnownVerdict, ...]:
    with _copied(path) as file:
        return tuple(
            KnownVerdict(*row)
            for row in file.execute(
                """SELECT verdicts.id, coalesce(groups.sampler, x''), verifier, result, verdicts.reason
                FROM verdicts LEFT JOIN groups USING (id) ORDER BY verdicts.at"""
            )
        )


# Lines


def _lines(path: Path, started: float) -> tuple[list[dict[str, Any]], int]:
    """Return objects with times since the start, and the number of torn lines.

    A process that is killed may leave one.
    """
    if not path.is_file():
        return [], 0
    found, torn = [], 0
    lives = 1
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            torn += bool(line.strip())
            continue
        lives += event.get("event") == "started"
        at = float(event.get("at", 0.0))
        found.append({**event, "at": at - started if at > UNIX else at})
    return found, max(0, torn - lives)


def lines_of(events: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [each for each in events if each.get("event") == event]
