"""Totals of each sampler's groups, learnt from or refused, kept by SQL triggers.

The triggers are on the journal's table of groups, so a total changes in the same transaction as the
group, whoever changes it, and outlives rows that are pruned.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from echo_node.credit.statement_server import Sums

_LEARNT: Final = ""
"""Value of the column `what` for learnt groups; others have the reason."""
_CONDEMNED: Final = "condemned"
NO_ADVANTAGE: Final = "no-advantage"
"""Reason of groups that a batch was drawn without, because their rewards are equal.

They were accepted, and count as learnt from.
"""
_IS_BEGUN: Final = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'tallies'"
_OF_SAMPLER: Final = "SELECT what, groups, since FROM tallies WHERE sampler = ? AND groups > 0"
_SCHEMA: Final = (
    """CREATE TABLE tallies (
        sampler BLOB NOT NULL, what TEXT NOT NULL, groups INTEGER NOT NULL, since INTEGER NOT NULL, PRIMARY KEY (sampler, what)
    ) WITHOUT ROWID""",
    # A journal that was begun without totals is counted once.
    """INSERT INTO tallies
        SELECT sampler, CASE state WHEN 1 THEN '' ELSE why END AS what, count(*), CAST(strftime('%s', 'now') AS INTEGER)
        FROM groups WHERE state != 0 GROUP BY sampler, what""",
    """CREATE TRIGGER groups_counted AFTER UPDATE OF state ON groups
        WHEN NEW.state != 0 AND (NEW.state, NEW.why) != (OLD.state, OLD.why) BEGIN
            INSERT INTO tallies VALUES (
                NEW.sampler, CASE NEW.state WHEN 1 THEN '' ELSE NEW.why END, 1, CAST(strftime('%s', 'now') AS INTEGER)
            ) ON CONFLICT DO UPDATE SET groups = groups + 1;
        END""",
    # Leaving a branch takes back what was learnt; another trainer's account, what was dropped here.
    """CREATE TRIGGER groups_taken_back AFTER UPDATE OF state ON groups
        WHEN OLD.state != 0 AND (NEW.state, NEW.why) != (OLD.state, OLD.why) BEGIN
            UPDATE tallies SET groups = groups - 1
                WHERE sampler = OLD.sampler AND what = CASE OLD.state WHEN 1 THEN '' ELSE OLD.why END;
        END""",
)


def begin(file: sqlite3.Connection) -> None:
    """Create the totals and count the groups that are there, unless done before."""
    if file.execute(_IS_BEGUN).fetchone() is None:
        for statement in _SCHEMA:
            file.execute(statement)


def sums(file: sqlite3.Connection, sampler: bytes) -> Sums:
    """Return the totals of a sampler's groups."""
    rows = file.execute(_OF_SAMPLER, (sampler,)).fetchall()
    counts = {what: groups for what, groups, _ in rows}
    return Sums(
        condemned=counts.pop(_CONDEMNED, 0),
        learnt=counts.pop(_LEARNT, 0) + counts.pop(NO_ADVANTAGE, 0),
        refused=counts,
        since=min((since for *_, since in rows), default=None),
    )
