"""State folder of a node, used by one process at a time.

key               the node's private key
backed-up         peer id whose key has a backup
allowed-code      hashes of runs' code to which the user has consented
peers.sqlite      address book for the next start
runs/ID/          files of each run: weights, outbox, ledger, step records
control           socket of the running node
format, lock      format number, and the lock of the process that uses the folder
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
from echo_node.identity.keyfile import load_or_create
from echo_node.storage.files import open_plain, write_whole
from protocol import Identity

FORMAT: Final = 1
"""Format number of the folder. A folder of another program or a newer format is refused."""
MIGRATIONS: Final[Mapping[int, Callable[[Path], None]]] = {}
"""Format n to what brings a folder to n + 1. A migration that was interrupted runs again."""
_ADVICE: Final = "give another folder with --state"
_BEFORE_FORMAT: Final = frozenset({"format", "key", "lock"})
"""Names that may be in a folder before its format is written."""
_MARK_BYTES: Final = 1024
"""Bytes read of the format file: more than any number has."""
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths inside a state folder."""

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
        """Return the node's key, made at the first start."""
        return load_or_create(self.key)

    @property
    def is_backed_up(self) -> bool:
        """Return whether the user has a backup of the current key."""
        with boundary(StoreError, f"reading {self.backup_mark}", advice=_ADVICE):
            text = self.backup_mark.read_text("utf-8", "replace") if self.backup_mark.is_file() else ""
        return text.strip() == self.identity().peer_id

    def note_backup(self, peer_id: str) -> None:
        """Note that the user has a backup of this peer id's key."""
        with boundary(StoreError, f"writing {self.backup_mark}", advice=_ADVICE):
            self.backup_mark.write_text(f"{peer_id}\n")

    @property
    def allowed_code(self) -> frozenset[str]:
        """Hashes of code to which the user has consented."""
        file = self.path / "allowed-code"
        with boundary(StoreError, f"reading {file}", advice=_ADVICE):
            return frozenset(file.read_text("utf-8", "replace").split()) if file.is_file() else frozenset()

    def allow_code(self, code_hash: str) -> None:
        """Note that the user has consented to code of this hash."""
        known = self.allowed_code
        if code_hash not in known:
            text = "".join(f"{each}\n" for each in sorted({*known, code_hash}))
            write_whole(self.path / "allowed-code", text.encode(), durable=True)

    def size(self) -> int:
        """Return the bytes used on disk, without holes. Blocks."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):  # it may be gone by now
                    total += 512 * os.lstat(os.path.join(folder, name)).st_blocks  # noqa: PTH118 - many files
        return total

    def place_of(self, run_id: bytes) -> Path:
        """Return the path of a run's folder, whether or not it exists."""
        return self.path / "runs" / run_id.hex()

    def run(self, run_id: bytes) -> Path:
        """Return the folder of a run, made if need be."""
        folder = self.place_of(run_id)
        with boundary(StoreError, f"making {folder}", advice=_ADVICE):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def backup_reminder(place: StateDir) -> str | None:
    """Return a reminder for the user if the key has no backup yet."""
    if place.is_backed_up:
        return None
    return f"only {place.key} says who this node is: `echo-node keys backup` prints a backup to keep"


def prepared(path: Path) -> StateDir:
    """Return the state in this folder, made if there is none. Takes no lasting lock."""
    if _begun(path) != FORMAT:
        with _locked(path):
            migrate(path)
    return StateDir(path)


@contextmanager
def opened(path: Path) -> Generator[StateDir]:
    """Lock the state in this folder for this process, and migrate it."""
    _begun(path)
    with _locked(path):
        migrate(path)
        yield StateDir(path)


def is_in_use(path: Path) -> bool:
    """Return whether a node runs on this folder. Writes nothing."""
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
    """Return the format of the state in this folder; None if there is none.

    Writes nothing.
    """
    with boundary(StoreError, f"looking at {path}", advice=_ADVICE):
        if not _is_unmarked(path):
            return _format(path, FORMAT)
        if path.exists() and any(each.name not in _BEFORE_FORMAT for each in path.iterdir()):
            raise StoreError(f"{path} holds something else than a node's state", advice=_ADVICE)
    return None


def migrate(
    path: Path, table: Mapping[int, Callable[[Path], None]] = MIGRATIONS, newest: int = FORMAT
) -> None:
    """Migrate the folder to the newest format step by step, resumably."""
    for number in range(_format(path, newest), newest):
        with boundary(
            StoreError, f"bringing {path} from the format {number} to {number + 1}", advice=_ADVICE
        ):
            table[number](path)
            draft = path / "format.new"
            draft.write_text(f"{number + 1}\n")
            draft.replace(path / "format")


def _begun(path: Path) -> int:
    """Make and mark the folder if it is new; return its format."""
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
    """Return whether the format is not written yet.

    A power cut may leave an empty file.
    """
    mark = path / "format"
    return not mark.exists() or (mark.is_file() and not mark.stat().st_size)


def _mark(mark: Path) -> None:
    """Write the format mark first, so that an interrupted start can repeat."""
    with mark.open("w") as file:
        file.write(f"{FORMAT}\n")
        file.flush()
        os.fsync(file.fileno())


def _format(path: Path, newest: int) -> int:
    with open_plain(path / "format") as file:
        text = file.read(_MARK_BYTES).decode("utf-8", "replace").strip()
    if text.isdecimal() and 1 <= int(text[:9]) <= newest:
        return int(text[:9])
    raise StoreError(
        f"{path} has the format {text[:20]!r}, this program writes {newest}",
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
    """Take the lock; try again, since a reader holds it for a moment."""
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
