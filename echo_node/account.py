"""What a node has earned in a run, by its own ledger, while no node runs. It changes nothing, not even beside the file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError
from echo_node.ledger import CREDIT, FORMAT, MARK, Credit, summed

_ADVICE: Final = "the next start of a node on this folder says what to do about it"


def read_credit(ledger: Path, sampler: bytes, run: bytes) -> Credit | None:
    """The account in a ledger that nobody has open. None: it has none of this sampler. A `StoreError` if it cannot be read."""
    if not ledger.is_file() or not ledger.stat().st_size:
        return None
    # A node that ended in order leaves one file. Of one that did not, the rest lies beside it, and SQLite has to put them together.
    ended = not any(Path(f"{ledger}{end}").exists() for end in ("-wal", "-journal"))
    place = f"{ledger.resolve().as_uri()}?mode=ro{'&immutable=1' if ended else ''}"
    try:
        with closing(sqlite3.connect(place, uri=True, timeout=0.5)) as file:
            marks = [
                file.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")
            ]
            if marks != [MARK, FORMAT]:
                raise StoreError(f"{ledger} is another program's file, or another version's", advice=_ADVICE)
            rows = file.execute(CREDIT, {"sampler": sampler, "run": run}).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"reading {ledger}: {error}", advice=_ADVICE) from error
    return summed(rows) if rows else None
