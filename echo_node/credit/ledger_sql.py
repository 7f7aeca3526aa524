"""SQL statements of the credit ledger; the schema is in `ledger`."""

from __future__ import annotations

from typing import Final

INSERT_GROUP: Final = """INSERT INTO groups
    SELECT :id, :run, :sampler, :head, :version, :slot, :tokens, :engine, :at, 'sent', '', 'sent', ''
    WHERE NOT EXISTS (SELECT 1 FROM closed WHERE run = :run AND version >= :version)
    ON CONFLICT DO NOTHING"""
"""Insert a group, unless it is known or of a version whose groups were pruned."""
SET_ANSWER: Final = """UPDATE groups SET answer = :answer, why = :why WHERE id = :id AND (answer, why) != (:answer, :why)
    AND NOT (answer != 'sent' AND :why = 'duplicate')"""
"""Set the trainer's answer; a late "duplicate" does not undo an earlier answer."""
UPSERT_VERDICT: Final = """INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    result = excluded.result, reason = excluded.reason, note = excluded.note, figures = excluded.figures,
    at = excluded.at
    WHERE instr(' undecided honest dishonest', ' ' || excluded.result)
        > instr(' undecided honest dishonest', ' ' || verdicts.result)"""
"""Insert a verdict; of several by one verifier the gravest stays."""
SETTLE_GROUP: Final = """UPDATE groups SET (state, reason) = (
        SELECT CASE WHEN dishonest >= :condemning THEN 'condemned' WHEN honest > 0 THEN 'verified' ELSE answer END,
            CASE WHEN dishonest >= :condemning THEN (SELECT reason FROM verdicts
                WHERE id = :id AND result = 'dishonest' ORDER BY verifier LIMIT 1) WHEN honest > 0 THEN '' ELSE why END
        FROM (SELECT count(*) FILTER (WHERE result = 'dishonest') AS dishonest,
            count(*) FILTER (WHERE result = 'honest') AS honest FROM verdicts WHERE id = :id)
    ) WHERE id = :id"""
"""Derive a group's state from the trainer's answer and all verdicts."""
CREDIT: Final = """SELECT state, reason, sum(groups), sum(tokens) FROM (
        SELECT run, state, reason, count(*) AS groups, sum(tokens) AS tokens FROM groups
            WHERE sampler = :sampler GROUP BY run, state, reason
        UNION ALL SELECT run, state, reason, groups, tokens FROM pruned WHERE sampler = :sampler
    ) WHERE :run IS NULL OR run = :run GROUP BY state, reason"""
"""Sums by state and reason of a sampler's groups, pruned ones included."""
FOUND_BY_VERIFIER: Final = """SELECT result, count(*), sum(tokens), min(verdicts.at) FROM groups JOIN verdicts USING (id)
        WHERE sampler = :sampler AND run = :run AND verifier = :verifier GROUP BY result
    UNION ALL SELECT 'pruned', sum(groups), sum(tokens), NULL FROM pruned
        WHERE sampler = :sampler AND run = :run AND state = 'verified' GROUP BY state"""
"""Sums of one verifier's verdicts on a sampler's groups, and of pruned groups."""
SUM_PRUNED: Final = """INSERT INTO pruned
    SELECT run, sampler, state, reason, count(*), sum(tokens) FROM groups WHERE at < ?
        GROUP BY run, sampler, state, reason
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, tokens = tokens + excluded.tokens"""
"""Add groups older than a time to the sums of pruned groups."""
CLOSE_VERSIONS: Final = """INSERT INTO closed SELECT run, max(version) FROM groups WHERE at < ? GROUP BY run
    ON CONFLICT DO UPDATE SET version = max(version, excluded.version)"""
"""Remember up to which version groups were pruned, so that none is inserted again."""
EXPORTED: Final = {
    "closed": "SELECT * FROM closed ORDER BY run",
    "group": "SELECT id, run, sampler, head, version, slot, tokens, engine, at, state, reason FROM groups ORDER BY id",
    "pruned": "SELECT * FROM pruned ORDER BY run, sampler, state, reason",
    "verdict": 'SELECT id AS "group", verifier, result, reason, note, figures, at FROM verdicts ORDER BY id, verifier',
}
"""Sorted queries of an export, by the kind of line."""
