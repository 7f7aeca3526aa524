"""Read credit from the ledger file of a node that is not running."""

from __future__ import annotations

from pathlib import Path

from echo_node.credit import ledger_sql
from echo_node.credit.ledger import DATABASE, Credit, sum_credit
from echo_node.storage.sqlite import open_reader


def read_credit(ledger: Path, sampler: bytes, run: bytes) -> Credit | None:
    """Return a sampler's credit from a closed ledger; None without groups.

    No node may have the ledger open. A `StoreError` says why the file cannot be read.
    """
    if not ledger.is_file() or not ledger.stat().st_size:
        return None
    with open_reader(ledger, DATABASE) as file:
        rows = file.execute(ledger_sql.CREDIT, {"sampler": sampler, "run": run}).fetchall()
    return sum_credit(rows) if rows else None
