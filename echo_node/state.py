"""The folder in which a node keeps what it must not lose, used by one process at a time:

    key               who it is
    backed-up         whose key a person has a backup of
    peers.sqlite      good peers, for the next start
    runs/ID/          what it holds of each run: weights, outbox, ledger, steps
    control           where the node that runs listens to its person
    format, lock      which format this is, and that somebody uses it

It knows where things are, and nothing of what is in them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError, boundary
from echo_node.keyfile import load_or_create
from echo_node.plain import open_plain
from protocol import Identity

FORMAT: Final = 1
"""Of the folder. Another program's, or a newer one's, is left alone."""
MIGRATIONS: Final[Mapping[int, Callable[[Path], None]]] = {}
"""What brings a folder from format n to n + 1. Each may be cut off anywhere, and is then run again from its beginning."""
_ADVICE: Final = "give another folder with --state"
_BEFORE_FORMAT: Final = frozenset({"format", "key", "lock"})
"""What may be in a folder that is not marked yet."""
_MARK_BYTES: Final = 1024
"""More than any mark has."""
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class StateFolder:
    """What is where."""

    path: Path

    @property
    def book(self) -> Path:
        return self.path / "peers.sqlite"

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def backup_mark(self) -> Path:
        return self.path / "backed-up"

    def identity(self) -> Identity:
        """The key of this node; made at the first start."""
        return load_or_create(self.key)

    @property
    def is_backed_up(self) -> bool:
        """Whether a person has a backup of this very key."""
        with boundary(StoreError, f"reading {self.backup_mark}", advice=_ADVICE):
            told = self.backup_mark.read_text("utf-8", "replace") if self.backup_mark.is_file() else ""
        return told.strip() == self.identity().peer_id

    def note_backup(self, peer_id: str) -> None:
        """A person has a backup of this one's key."""
        with boundary(StoreError, f"writing {self.backup_mark}", advice=_ADVICE):
            self.backup_mark.write_text(f"{peer_id}\n")

    def size(self) -> int:
        """How many bytes it takes on disk, holes left out. Blocks."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):  # it may be gone by now
                    total += 512 * os.lstat(os.path.join(folder, name)).st_blocks  # noqa: PTH118 - many files
        return total

    def place_of(self, run_id: bytes) -> Path:
        """Where the folder of a run is, or would be."""
        return self.path / "runs" / run_id.hex()

    def run(self, run_id: bytes) -> Path:
        """The folder of a run, made if need be."""
        folder = self.place_of(run_id)
        with boundary(StoreError, f"making {folder}", advice=_ADVICE):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def backup_reminder(place: StateFolder) -> str | None:
    """The line for a person whose key has no backup yet."""
    if place.is_backed_up:
        return None
    return f"only {place.key} says who this node is: `echo-node keys backup` prints a backup to keep"


def prepared(path: Path) -> StateFolder:
    """The state in this folder, made if there is none. Nobody is kept out."""
    if _begun(path) != FORMAT:
        with _locked(path):
            migrate(path)
    return StateFolder(path)


@contextmanager
def opened(path: Path) -> Generator[StateFolder]:
    """The state in this folder, for this process alone."""
    _begun(path)
    with _locked(path):
        migrate(path)
        yield StateFolder(path)


def is_in_use(path: Path) -> bool:
    """Whether a node runs on this folder. It makes nothing there."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(f"looking at {path}: {error}", advice=_ADVICE) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def format_of(path: Path) -> int | None:
    """The format of the state in this folder; None if there is none yet. It makes nothing there."""
    with boundary(StoreError, f"looking at {path}", advice=_ADVICE):
        if not _is_unmarked(path):
            return _format(path, FORMAT)
        if path.exists() and any(each.name not in _BEFORE_FORMAT for each in path.iterdir()):
            raise StoreError(f"{path} holds something else than a node's state", advice=_ADVICE)
    return None


def migrate(
    path: Path, table: Mapping[int, Callable[[Path], None]] = MIGRATIONS, newest: int = FORMAT
) -> None:
    """Bring the folder to the newest format, a step at a time. Whatever ends it, the next start goes on from there."""
    for number in range(_format(path, newest), newest):
        with boundary(
            StoreError, f"bringing {path} from the format {number} to {number + 1}", advice=_ADVICE
        ):
            table[number](path)
            draft = path / "format.new"
            draft.write_text(f"{number + 1}\n")
            draft.replace(path / "format")


def _begun(path: Path) -> int:
    """The format of the folder, which is made and marked if there is none."""
    with boundary(StoreError, f"opening {path}", advice=_ADVICE):
        if path.is_symlink() and not path.exists():
            raise StoreError(
                f"opening {path}: it is a link that leads nowhere", advice=f"mend it, or {_ADVICE}"
            )
        if path.exists() and not path.is_dir():
            raise StoreError(f"opening {path}: it is no folder", advice=_ADVICE)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_unmarked(path):
            if any(each.name not in _BEFORE_FORMAT for each in path.iterdir()):
                raise StoreError(f"{path} holds something else than a node's state", advice=_ADVICE)
            _mark(path / "format")
        return _format(path, FORMAT)


def _is_unmarked(path: Path) -> bool:
    """Whether its format is not written down yet. An empty mark is one for which the disk, or the power, did not last."""
    mark = path / "format"
    return not mark.exists() or (mark.is_file() and not mark.stat().st_size)


def _mark(mark: Path) -> None:
    """On disk before anything else is there, so that whatever cuts it off, the next start finds a folder that is new."""
    with mark.open("w") as file:
        file.write(f"{FORMAT}\n")
        file.flush()
        os.fsync(file.fileno())


def _format(path: Path, newest: int) -> int:
    with open_plain(path / "format") as file:
        told = file.read(_MARK_BYTES).decode("utf-8", "replace").strip()
    if told.isdecimal() and 1 <= int(told[:9]) <= newest:
        return int(told[:9])
    raise StoreError(
        f"{path} has the format {told[:20]!r}, this program writes {newest}",
        advice="run the echo-node that wrote it, or give another folder with --state",
    )


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with boundary(StoreError, f"opening {path}", advice=_ADVICE):
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, path)
        yield
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    """Somebody who only looks holds it for a moment, so one moment's failure is none."""
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise StoreError(
                    f"another node runs on {path}",
                    advice="stop that one, or give this one a folder by --state",
                ) from None
            time.sleep(0.02)
        else:
            return
