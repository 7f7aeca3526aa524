"""How many groups of each sampler a trainer has learnt from, and how many it let go of and why: counted where they are written.

The journal's table of groups has triggers, so that a count changes in the same transaction as what is counted, whoever changes
it, and outlives rows that are pruned. It knows nothing of who asks.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from echo_node.attesting import Sums

_LEARNT: Final = ""
"""What stands in `what` for groups that were learnt from, where others have the reason."""
_CONDEMNED: Final = "condemned"
_IS_BEGUN: Final = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'tallies'"
_OF_SAMPLER: Final = "SELECT what, groups, since FROM tallies WHERE sampler = ? AND groups > 0"
_SCHEMA: Final = (
    """CREATE TABLE tallies (
        sampler BLOB NOT NULL, what TEXT NOT NULL, groups INTEGER NOT NULL, since INTEGER NOT NULL, PRIMARY KEY (sampler, what)
    ) WITHOUT ROWID""",
    # A journal that was begun without one is counted once.
    """INSERT INTO tallies
        SELECT sampler, CASE state WHEN 1 THEN '' ELSE why END AS what, count(*), CAST(strftime('%s', 'now') AS INTEGER)
        FROM groups WHERE state != 0 GROUP BY sampler, what""",
    """CREATE TRIGGER groups_counted AFTER UPDATE OF state ON groups
        WHEN NEW.state != 0 AND (NEW.state, NEW.why) != (OLD.state, OLD.why) BEGIN
            INSERT INTO tallies VALUES (
                NEW.sampler, CASE NEW.state WHEN 1 THEN '' ELSE NEW.why END, 1, CAST(strftime('%s', 'now') AS INTEGER)
            ) ON CONFLICT DO UPDATE SET groups = groups + 1;
        END""",
    # A branch of the chain that was left takes back what was learnt from it; another trainer's account, what was let go of here.
    """CREATE TRIGGER groups_taken_back AFTER UPDATE OF state ON groups
        WHEN OLD.state != 0 AND (NEW.state, NEW.why) != (OLD.state, OLD.why) BEGIN
            UPDATE tallies SET groups = groups - 1
                WHERE sampler = OLD.sampler AND what = CASE OLD.state WHEN 1 THEN '' ELSE OLD.why END;
        END""",
)


def begin(file: sqlite3.Connection) -> None:
    """Count from now on, and once what is there, unless that is done already."""
    if file.execute(_IS_BEGUN).fetchone() is None:
        for statement in _SCHEMA:
            file.execute(statement)


def sums(file: sqlite3.Connection, sampler: bytes) -> Sums:
    """What became of a sampler's groups."""
    rows = file.execute(_OF_SAMPLER, (sampler,)).fetchall()
    counts = {what: groups for what, groups, _ in rows}
    return Sums(
        condemned=counts.pop(_CONDEMNED, 0),
        learnt=counts.pop(_LEARNT, 0),
        refused=counts,
        since=min((since for *_, since in rows), default=None),
    )
