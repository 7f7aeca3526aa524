"""Report on a state folder without a running node, and removal of its parts.

The report names the key, the runs, the credit earned in them, the bytes on disk and the time of the
last write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from echo_node.credit.ledger import Credit
from echo_node.credit.offline import read_credit
from echo_node.errors import ConfigError, EchoError, StoreError, boundary
from echo_node.identity.keyfile import load
from echo_node.storage.files import open_plain
from echo_node.storage.state_dir import opened
from protocol import ProtocolError, limits, open_manifest, public_key_of

Forgetting: TypeAlias = Literal["weights", "run", "everything"]
_SIGNED: Final[dict[Forgetting, tuple[str, ...]]] = {
    "weights": ("journal.sqlite",),
    "run": ("journal.sqlite", "votes"),
}
"""Files that show that the key has signed heads or votes, which it must never contradict.

A key that signs something else afterwards is revoked.
"""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run that has files in the state folder."""

    id: str
    name: str
    """Empty if it is not known."""
    weights: int
    """Bytes of weights."""
    bytes: int
    """Bytes of all files of the run."""
    credit: Credit | None = None
    """Credit by this node's own ledger; None if it has no groups, or by `credit_problem`."""
    credit_problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        return {
            "id": self.id,
            "name": self.name,
            "weights_bytes": self.weights,
            "bytes": self.bytes,
            "credit": None if self.credit is None else asdict(self.credit),
            "credit_problem": self.credit_problem or None,
        }


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Contents of a state folder.

    `peer_id` is empty without a usable key; `key_problem` says why.
    """

    path: Path
    peer_id: str
    backed_up: bool
    runs: tuple[HeldRun, ...]
    bytes: int
    last_seen: float | None
    """Unix time of the newest file."""
    key_problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        return {
            "running": False,
            "state": str(self.path),
            "peer_id": self.peer_id or None,
            "backed_up": self.backed_up,
            "runs": [run.as_json() for run in self.runs],
            "bytes": self.bytes,
            "last_seen": self.last_seen,
        }


def look_into(path: Path) -> OfflineReport:
    """Report on a state folder; nothing is written, and no lock is needed."""
    with boundary(StoreError, f"looking into {path}", advice="may you read it?"):
        whose, problem = _peer_id(path / "key")
        runs = tuple(_held(folder, whose) for folder in _folders(path / "runs"))
        mark = path / "backed-up"
        seen = [stat.st_mtime for stat in _files(path)]
        return OfflineReport(
            path=path,
            peer_id=whose,
            backed_up=bool(whose) and mark.is_file() and mark.read_text("utf-8", "replace").strip() == whose,
            runs=runs,
            bytes=_weigh(path),
            last_seen=round(max(seen), 3) if seen else None,
            key_problem=problem,
        )


def check_forgetting(path: Path, what: Forgetting, wanted: str | None, *, sure: bool) -> str | None:
    """Return the id of the run to forget, the only one if none is named.

    Unless `sure`, refuse to forget what the key has signed and must not contradict.
    """
    if not (path / "format").is_file():
        raise ConfigError(f"{path} is not a node's state folder", advice="give its folder by --state")
    if what == "everything":
        return None
    run = _chosen_run(path, wanted)
    if not sure and any((path / "runs" / run / name).exists() for name in _SIGNED[what]):
        raise ConfigError(
            f"this key has signed heads or votes for run {run[:12]}, and may be revoked if it forgets them",
            advice="forget them only if this key never takes part in that run again, and pass --yes",
        )
    return run


def _chosen_run(path: Path, wanted: str | None) -> str:
    held = [folder.name for folder in _folders(path / "runs")]
    found = held if wanted is None else [each for each in held if each.startswith(wanted.lower())]
    if len(found) == 1:
        return found[0]
    if not held:
        raise ConfigError(
            f"{path} holds nothing of any run", advice="leave out --forget-weights and --forget-run"
        )
    short = ", ".join(each[:12] for each in held[:8])
    which = (
        "the folder holds several runs"
        if found
        else f"no run in the folder begins with {wanted[:12] if wanted else ''}"
    )
    raise ConfigError(which, advice=f"choose one by --run: {short}")


def forget(path: Path, what: Forgetting, run: str | None = None) -> int:
    """Remove it and return the bytes freed; no node may run on the folder."""
    with opened(path), boundary(StoreError, f"removing {what} in {path}", advice="may you write there?"):
        before = _weigh(path)
        if what == "everything":
            for each in sorted(path.iterdir()):
                if each.name not in {"lock", "format"}:
                    _remove(each)
            (path / "format").unlink()
            (path / "lock").unlink()
        elif run is not None:
            folder = path / "runs" / run
            _remove(folder / "weights" if what == "weights" else folder)
        after = _weigh(path)
    return before - after


def _held(folder: Path, whose: str) -> HeldRun:
    credit, problem = _credit(folder, whose)
    return HeldRun(
        folder.name,
        _name(folder / "weights" / "manifest"),
        _weigh(folder / "weights"),
        _weigh(folder),
        credit,
        problem,
    )


def _credit(folder: Path, whose: str) -> tuple[Credit | None, str]:
    """Return the key's credit in the run of the folder, and why it cannot be read."""
    try:
        run = bytes.fromhex(folder.name)
    except ValueError:
        return None, ""
    if not whose:
        return None, ""
    try:
        return read_credit(folder / "ledger.sqlite", public_key_of(whose), run), ""
    except StoreError as error:
        return None, str(error)


def _name(manifest: Path) -> str:
    """Return the run's name from its signed manifest, if there is one."""
    most = limits.MANIFEST_BYTES + limits.ENVELOPE_BYTES
    try:
        with open_plain(manifest) as file:
            return open_manifest(file.read(most + 1)).message.name
    except (OSError, ProtocolError):
        return ""


def _peer_id(key: Path) -> tuple[str, str]:
    """Return the peer id of the key file, and why it cannot be read."""
    try:
        return load(key).peer_id, ""
    except EchoError as error:
        return "", str(error) if os.path.lexists(key) else ""


def _folders(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _files(path: Path) -> Iterator[os.stat_result]:
    """Yield the stat of every readable file below; links are not followed."""
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(folder, name))  # noqa: PTH118 - there may be very many
            except FileNotFoundError:
                continue


def _weigh(path: Path) -> int:
    """Return the bytes on disk: sparse files by their blocks, hard links once."""
    seen: dict[tuple[int, int], int] = {
        (stat.st_dev, stat.st_ino): stat.st_blocks * 512 for stat in _files(path)
    }
    return sum(seen.values())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
