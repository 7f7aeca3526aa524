"""What must hold after a chaos run: one function from the evidence to the violations for each.

    report = check(place)
    report.findings          # nothing: all hold

Each says what it reads and what it cannot see. What is allowed and yet worth knowing is counted. It
changes nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from protocol.identity import peer_id
from tests.chaos.accounts import acknowledged, fresh, signed, under_known_heads
from tests.chaos.branches import Branches, problems_of_chain
from tests.chaos.evidence import Evidence, NodeEvidence, lines_of, read_evidence
from tests.chaos.report import Counts, Finding, Report, short

MUTED: Final = re.compile(r"(12D3KooW\w+) is muted")
"""What nodes log of a peer that they no longer hear."""
Invariant = Callable[[Evidence, Branches, Counts], Iterator[Finding]]


def check(place: Path, *, replay: bool = True) -> Report:
    """Check all invariants of the run in this folder.

    With `replay`, groups are drawn again, which needs torch and a while.
    """
    return check_evidence(read_evidence(place), replay=replay)


def check_evidence(evidence: Evidence, *, replay: bool = False) -> Report:
    branches, counts = Branches(evidence), Counts()
    asked: list[Invariant] = [*INVARIANTS]
    if replay:
        from tests.chaos.replaying import drawn_at_the_named_head

        asked.append(drawn_at_the_named_head)
    findings = [each for invariant in asked for each in invariant(evidence, branches, counts)]
    return Report(findings, dict(sorted(counts.items())))


# All of the evidence is there


def readable(evidence: Evidence, _branches: Branches, _counts: Counts) -> Iterator[Finding]:
    """Every file that a node keeps could be read, but those that the nemesis has damaged."""
    for node in evidence.nodes:
        for what in node.unreadable:
            if node.honest and not evidence.was_damaged(node.name, what.split(":")[0]):
                yield Finding("readable", node.name, what)


# d. One chain


def one_chain(evidence: Evidence, branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Versions form one chain of rising terms, and every node holds a verified prefix of it.

    It reads every head and grant that any node has taken and checks signatures, leaders, majorities
    and links again, by rules of its own; then each node's blobs by their hashes, and the state that
    it holds by its root. A node that was not running at the end may be on a branch that a grant has
    left; that is counted. It cannot see heads that were signed and reached nobody.
    """
    for text in problems_of_chain(branches):
        yield Finding("one-chain", None, text)
    counts["terms"] = len(branches.leaders)
    counts["heads on branches that were left"] = len(branches.heads) - len(branches.chain)
    alive = set(alive_at_end(evidence))
    for node in evidence.nodes:
        held = node.holdings
        if held is None or not node.honest:
            continue
        if held.taken:
            yield Finding("one-chain", node.name, f"its chain cannot be taken again: {held.taken}")
        if held.chain and held.chain[-1] not in branches.places:
            if node.name in alive:
                tip = branches.heads[held.chain[-1]]
                yield Finding(
                    "one-chain", node.name, f"it follows {tip}, which is not on the surviving branch"
                )
            counts["nodes that ended on a branch that was left"] += 1
        damaged = evidence.was_damaged(node.name, "weights/blobs")
        for text in () if damaged else held.damaged:
            yield Finding("one-chain", node.name, text)
        if held.wrong_state and not evidence.was_damaged(node.name, "weights/state"):
            yield Finding("one-chain", node.name, held.wrong_state)
        if held.current is not None and held.current not in held.proven and not damaged:
            head = branches.heads.get(held.current)
            yield Finding(
                "one-chain", node.name, f"it does not hold the root of {head or held.current.hex()[:12]}"
            )


# f. Nobody honest is silenced


def honest_are_heard(evidence: Evidence, _branches: Branches, counts: Counts) -> Iterator[Finding]:
    """No honest peer was muted by anybody, nor a group of one found dishonest.

    It reads what nodes told (`muted` events of each, and whom a trainer names in its progress), the
    lines that they logged, the verdicts in trainers' journals and those in verifiers' ledgers.
    Nodes look once a second, and the shortest mute is far longer; it cannot see one that a node was
    killed within a second of.
    """
    honest = {node.peer_id: node.name for node in evidence.nodes if node.honest}
    for node in evidence.nodes:
        if not node.honest:
            continue
        for muted, why in _muted_by(node):
            if muted in honest:
                yield Finding("honest-heard", node.name, f"it muted {honest[muted]}: {why}")
            else:
                counts["mutes of hostile peers"] += 1
    for node in evidence.nodes:
        for each in (*node.verdicts, *(node.trainer.verdicts if node.trainer else ())):
            if each.result == "dishonest" and each.sampler and peer_id(each.sampler) in honest:
                name = honest[peer_id(each.sampler)]
                yield Finding(
                    "honest-heard",
                    node.name,
                    f"group {short(each.group)} of {name} was condemned: {each.reason}",
                )


def _muted_by(node: NodeEvidence) -> Iterator[tuple[str, str]]:
    seen = set()
    for told in lines_of(node.events, "muted"):
        yield told["peer_id"], ", ".join(told["reasons"])
    for told in lines_of(node.events, "progress"):
        for muted, why in (told.get("muted") or {}).items():
            if (muted, why) not in seen:
                seen.add((muted, why))
                yield muted, why
    for line in node.stderr.splitlines():
        for muted in MUTED.findall(line):
            yield muted, line[-120:]


# g. Life goes on


def progress(evidence: Evidence, _branches: Branches, counts: Counts) -> Iterator[Finding]:
    """Every honest node that ran at the end did its work after the last fault, within the bound.

    It comes to a version beyond all that anybody had told of by then; a sampler also has another
    group accepted. Of a seed there is nothing to see but that it runs. It reads what nodes told, by
    the harness's clock.
    """
    last = max(
        (each["at"] for each in evidence.timeline if each.get("what") in {"fault", "heal"}), default=0.0
    )
    reached = max(
        (_version(each) for node in evidence.nodes for each in node.events if each["at"] <= last), default=0
    )
    slowest = 0.0
    for name in alive_at_end(evidence):
        node = evidence.node(name)
        if node.role == "bootstrap" or not node.honest:
            continue
        when = _first_progress(node, last, reached)
        slowest = max(slowest, (when or last) - last)
        if when is None:
            yield Finding("progress", name, f"it made no progress after the last fault, at {last:.1f} s")
        elif when > last + evidence.bound_seconds:
            late = when - last
            text = f"its first progress after the last fault took {late:.1f} s, more than {evidence.bound_seconds:g}"
            yield Finding("progress", name, text)
    counts["slowest progress after the last fault, in seconds"] = round(slowest, 1)


def alive_at_end(evidence: Evidence) -> list[str]:
    """Nodes that ran when the harness began to end them: all of them, where it does not say."""
    ends = [each["at"] for each in evidence.timeline if each.get("what") in {"all well", "not well", "end"}]
    end = min(ends, default=float("inf"))
    running: dict[str, bool] = {}
    for each in evidence.timeline:
        if each.get("what") in {"start", "exit"} and each["at"] <= end and each.get("node"):
            running[each["node"]] = each["what"] == "start"
    return [node.name for node in evidence.nodes if running.get(node.name, not running)]


def _first_progress(node: NodeEvidence, since: float, reached: int) -> float | None:
    """Return when, after this time, a node first reported a version beyond this one.

    A sampler must also have had one more group accepted.
    """
    accepted, works = 0, node.role != "sampler"
    for told in node.events:
        if told.get("event") == "started":
            accepted = 0
        elif told["at"] <= since:
            accepted = told.get("accepted") or accepted
        else:
            works = works or (told.get("accepted") or 0) > accepted
            if works and _version(told) > reached:
                return float(told["at"])
    return None


def _version(told: Mapping[str, Any]) -> int:
    return (told.get("version") or 0) if told.get("event") in {"progress", "step"} else 0


INVARIANTS: Final[tuple[Invariant, ...]] = (
    readable,
    acknowledged,
    fresh,
    signed,
    one_chain,
    under_known_heads,
    honest_are_heard,
    progress,
)


def in_words(report: Report) -> Iterable[str]:
    """For people."""
    yield from (f"{name}: {value}" for name, value in report.counts.items())
    yield from map(str, report.findings)
    yield f"{len(report.findings)} findings"


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    sys.stdout.write("\n".join(in_words(found)) + "\n")
    sys.exit(bool(found.findings))
