"""What is in a state folder while no node runs on it: whose key, which runs, what it earned in them, how many
bytes, and since when nobody was there.

It also forgets what a person wants forgotten, and only that. It knows nothing of what the bytes mean.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from echo_node.account import read_credit
from echo_node.errors import ConfigError, EchoError, StoreError, boundary
from echo_node.keyfile import load
from echo_node.ledger import Credit
from echo_node.plain import open_plain
from echo_node.state import opened
from protocol import ProtocolError, limits, open_manifest, public_key_of

Forgetting: TypeAlias = Literal["weights", "run", "everything"]
_WORD: Final[dict[Forgetting, tuple[str, ...]]] = {
    "weights": ("journal.sqlite",),
    "run": ("journal.sqlite", "votes"),
}
"""Signs of what must not be forgotten with it: what a trainer has published, what an elector has voted. Who says another
thing afterwards is revoked.
"""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of which something is on disk."""

    id: str
    name: str
    """Empty if it is not known."""
    weights: int
    """Bytes."""
    bytes: int
    credit: Credit | None = None
    """What this node has earned in it by its own ledger; None if that has no account of it, or cannot be read: then
    `credit_problem` says why."""
    credit_problem: str = ""

    def told(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "id": self.id,
            "name": self.name,
            "weights_bytes": self.weights,
            "bytes": self.bytes,
            "credit": None if self.credit is None else asdict(self.credit),
            "credit_problem": self.credit_problem or None,
        }


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a state folder has. `peer_id` is empty if there is no key, or none that can be used: `key_problem` says why."""

    path: Path
    peer_id: str
    backed_up: bool
    runs: tuple[HeldRun, ...]
    bytes: int
    last_seen: float | None
    """When something was last written there, by the system's clock."""
    key_problem: str = ""

    def told(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "running": False,
            "state": str(self.path),
            "peer_id": self.peer_id or None,
            "backed_up": self.backed_up,
            "runs": [run.told() for run in self.runs],
            "bytes": self.bytes,
            "last_seen": self.last_seen,
        }


def look_into(path: Path) -> Holdings:
    """What is there. It makes nothing, and needs no lock."""
    with boundary(StoreError, f"looking into {path}", advice="may you read it?"):
        whose, problem = _peer_id(path / "key")
        runs = tuple(_held(folder, whose) for folder in _folders(path / "runs"))
        mark = path / "backed-up"
        seen = [stat.st_mtime for stat in _files(path)]
        return Holdings(
            path=path,
            peer_id=whose,
            backed_up=bool(whose) and mark.is_file() and mark.read_text("utf-8", "replace").strip() == whose,
            runs=runs,
            bytes=_weigh(path),
            last_seen=round(max(seen), 3) if seen else None,
            key_problem=problem,
        )


def check_forgetting(path: Path, what: Forgetting, wanted: str | None, *, sure: bool) -> str | None:
    """The id of the run that is meant, the only one if none is named. What must not be forgotten by mistake is said."""
    if not (path / "format").is_file():
        raise ConfigError(f"{path} is no state of a node", advice="give its folder by --state")
    if what == "everything":
        return None
    run = _chosen_run(path, wanted)
    if not sure and any((path / "runs" / run / name).exists() for name in _WORD[what]):
        raise ConfigError(
            f"this node has signed things for run {run[:12]} that it must remember, or its key may be revoked",
            advice="forget them only if this key never takes part in that run again, and say --yes",
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
        "several runs are held"
        if found
        else f"no run that is held begins with {wanted[:12] if wanted else ''}"
    )
    raise ConfigError(which, advice=f"say which by --run: {short}")


def forget(path: Path, what: Forgetting, run: str | None = None) -> int:
    """Remove it, and say how many bytes that freed. Nobody may run on the folder meanwhile."""
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
    """What this key has earned in the run of the folder, or why that cannot be said."""
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
    """What its author called the run, if its signed manifest lies there."""
    most = limits.MANIFEST_BYTES + limits.ENVELOPE_BYTES
    try:
        with open_plain(manifest) as file:
            return open_manifest(file.read(most + 1)).message.name
    except (OSError, ProtocolError):
        return ""


def _peer_id(key: Path) -> tuple[str, str]:
    """Whose key it is, or why that cannot be said, where there is one."""
    try:
        return load(key).peer_id, ""
    except EchoError as error:
        return "", str(error) if os.path.lexists(key) else ""


def _folders(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _files(path: Path) -> Iterator[os.stat_result]:
    """Every file below, as far as one may look. Links are not followed, and a file that goes away is gone."""
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield os.lstat(os.path.join(folder, name))  # noqa: PTH118 - there may be very many
            except FileNotFoundError:
                continue


def _weigh(path: Path) -> int:
    """Bytes on disk, where a sparse file has as many as it takes and one with two names counts once."""
    seen: dict[tuple[int, int], int] = {
        (stat.st_dev, stat.st_ino): stat.st_blocks * 512 for stat in _files(path)
    }
    return sum(seen.values())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
