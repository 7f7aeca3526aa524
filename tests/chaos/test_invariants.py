"""Every invariant can fail: a run is damaged in one way, and exactly that one reports it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from protocol import Ballot, Envelope, TermGrant, encode, merkle_root, seal
from tests.chaos.branches import Branches
from tests.chaos.evidence import KnownVerdict, NodeEvidence, Posted, TrainerFiles, read_evidence
from tests.chaos.holdings import KnownHead
from tests.chaos.invariants import check, check_evidence
from tests.chaos.small_place import HEIR, JUDGE, NAMES, STALENESS, make_place, small_run
from tests.crafting import SAMPLERS, TRAINER, identity, sealed_group

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("chaos") / "place")


@pytest.fixture(scope="module")
def truth(place):
    """The evidence of a run in which all is well."""
    return read_evidence(place)


@pytest.fixture
def copy(place, tmp_path):
    """A place of one's own, to be damaged on disk."""
    return shutil.copytree(place, tmp_path / "place")


def folder_in(place, name):
    return next((place / "nodes" / name / "state" / "runs").iterdir())


def found(evidence, invariant, node, *words):
    """What is found, when that is all of one kind, and these words are in it."""
    findings = check_evidence(evidence).findings
    assert findings, "nothing was found"
    assert {each.invariant for each in findings} == {invariant}, findings
    assert any(each.node == node and all(word in each.text for word in words) for each in findings), findings


def trainer_changed(evidence, name, **changes):
    return evidence.changed(name, trainer=replace(evidence.node(name).trainer, **changes))


def group_changed(evidence, name, id_, **changes):
    groups = evidence.node(name).trainer.groups
    return trainer_changed(evidence, name, groups={**groups, id_: replace(groups[id_], **changes)})


def some_trained(evidence, trainer="standby", has="id"):
    """Return a group of the newest version of this trainer that its journal still holds."""
    trained = Branches(evidence).trained
    return next(
        each[0]
        for _, each in sorted(trained.items(), reverse=True)
        if each and each[0].trainer == trainer and getattr(each[0].group, has) is not None
    )


def with_head(evidence, name, head):
    """One node has taken one more head."""
    held = evidence.node(name).holdings
    return evidence.changed(name, holdings=replace(held, heads=(*held.heads, head)))


def signed_head(head, who, run):
    return KnownHead.of(seal(head, who, run), run)


def tip_changed(evidence, **changes):
    """The newest head said otherwise, and everybody has it so."""
    old = Branches(evidence).chain[-1]
    new = signed_head(replace(old.message, **changes), HEIR, evidence.manifest.id)

    def swapped(ids):
        return tuple(new.id if each == old.id else each for each in ids)

    for node in evidence.nodes:
        held = node.holdings
        if held is None:
            continue
        heads = tuple(new if each.id == old.id else each for each in held.heads)
        changed = {"chain": swapped(held.chain), "proven": frozenset(swapped(held.proven))}
        current = new.id if held.current == old.id else held.current
        evidence = evidence.changed(
            node.name, holdings=replace(held, heads=heads, current=current, **changed)
        )
    return evidence


def distrusting(evidence, name):
    return evidence.changed(name, honest=False)


# All is well


def test_in_a_true_place_all_invariants_hold_and_every_group_is_accounted_for(place):
    report = check(place)
    assert report.findings == []
    counts = report.counts
    dropped = sum(
        count for name, count in counts.items() if name.startswith(("groups dropped", "groups refused"))
    )
    rest = counts.get("groups waiting at the end", 0) + counts.get("groups missing at a failover", 0)
    assert counts["groups acknowledged"] == counts["groups trained"] + dropped + rest
    assert counts["groups acknowledged to samplers"] > counts["groups trained"] / 2
    assert counts["signatures checked"] == counts["groups trained"], "of settled batches too"
    assert counts["groups drawn again"] > 0
    assert counts["terms"] == 2
    assert 0 < counts["oldest group trained, in steps"] <= STALENESS


# Acknowledged


def test_a_group_that_was_acknowledged_and_that_no_trainer_knows_is_missed(copy):
    with sqlite3.connect(folder_in(copy, "ann") / "outbox.sqlite") as file:
        file.execute("INSERT INTO delivered (id, added, settled) VALUES (?, 1.0, 2.0)", (b"v" * 32,))
    file.close()
    found(read_evidence(copy), "acknowledged", "ann", (b"v" * 32).hex()[:12], "no trainer knows it")


def damaging(evidence, name):
    """The nemesis has damaged this node's journal, and nobody has put it back."""
    note = {"at": 1.0, "what": "damage", "node": name, "file": "runs/x/journal.sqlite"}
    return replace(evidence, timeline=(note, *evidence.timeline))


def posted(evidence, head):
    """A group under this head was acknowledged to ann, and no trainer knows it."""
    data = sealed_group(small_run(), head.id, SAMPLERS[0], 77)
    item = Posted(Envelope.parse(data).id, "acknowledged", data=data)
    return evidence.changed("ann", outbox=(*evidence.node("ann").outbox, item))


def test_a_damaged_journal_excuses_only_what_its_own_trainer_may_have_acknowledged(truth):
    early, late = posted(truth, Branches(truth).chain[1]), posted(truth, Branches(truth).chain[-1])
    for name, evidence in (("trainer", early), ("standby", early), ("standby", late)):
        report = check_evidence(damaging(evidence, name))
        assert (report.findings, report.counts["groups missing with a damaged journal"]) == ([], 1)
    found(damaging(late, "trainer"), "acknowledged", "ann", "no trainer knows it")
    idle = NodeEvidence("idle", "trainer", identity("idle").peer_id, trainer=TrainerFiles())
    found(
        damaging(replace(early, nodes=(*early.nodes, idle)), "idle"),
        "acknowledged",
        "ann",
        "no trainer knows it",
    )


def test_a_group_in_two_versions_is_found(truth):
    branches = Branches(truth)
    tip, parent = branches.chain[-1], branches.chain[-2]
    node = truth.node("standby").trainer
    trained = sum(branches.trained.values(), ())
    once = next(each for each in trained if each.trainer == "standby" and each.version < tip.message.version)
    others = tuple(each for each in node.batches if each.version < tip.message.version)
    number = node.batches[-1].number + 1
    again = replace(
        others[-1], number=number, version=tip.message.version, tip=parent.id, groups=(once.group.id,)
    )
    committed = tip_changed(truth, groups=merkle_root([once.group.id]))
    patient = replace(
        committed, staleness=100
    )  # by now it is stale as well, which is another test's business
    twice = trainer_changed(patient, "standby", batches=(*others, again))
    versions = f"[{once.version}, {tip.message.version}]"
    found(twice, "acknowledged", None, once.group.id.hex()[:12], "2 times", versions)


def with_group(evidence, **changes):
    """The old leader's journal has one more group."""
    group = replace(some_trained(evidence, "trainer").group, id=b"d" * 32, batch=None, sealed=None, **changes)
    groups = {**evidence.node("trainer").trainer.groups, group.id: group}
    return trainer_changed(evidence, "trainer", groups=groups)


def test_a_group_that_was_dropped_for_no_named_reason_is_found(truth):
    assert check_evidence(with_group(truth, state="dropped", why="stale")).findings == []
    found(with_group(truth, state="dropped", why=""), "acknowledged", "trainer", (b"d" * 32).hex()[:12])


def test_what_a_leader_dropped_does_not_excuse_the_next_one_that_acknowledged_it_and_lost_it(truth):
    dropped = with_group(truth, state="dropped", why="stale")
    group = dropped.node("trainer").trainer.groups[b"d" * 32]
    groups = dropped.node("standby").trainer.groups
    again = replace(group, state="drawn", why="", batch=10_000)
    lost = trainer_changed(dropped, "standby", groups={**groups, group.id: again})
    found(lost, "acknowledged", "standby", group.id.hex()[:12], "lost")
    waits = trainer_changed(dropped, "standby", groups={**groups, group.id: replace(again, state="waiting")})
    assert check_evidence(waits).findings == []


def test_what_the_old_leader_held_may_be_missing_and_what_was_older_may_not(truth):
    left = check_evidence(with_group(truth, state="waiting", step=1_000))
    before = check_evidence(truth).counts.get("groups missing at a failover", 0)
    assert left.findings == []
    assert left.counts["groups missing at a failover"] == before + 1
    old = with_group(truth, state="waiting", step=-10)
    found(old, "acknowledged", "trainer", (b"d" * 32).hex()[:12], "lost")


def test_a_version_whose_groups_nobody_can_name_is_found(truth):
    each = some_trained(truth)
    node = truth.node("standby").trainer
    batches = tuple(batch for batch in node.batches if batch.version != each.version)
    recorded = {version: groups for version, groups in node.recorded.items() if version != each.version}
    report = check_evidence(trainer_changed(truth, "standby", batches=batches, recorded=recorded))
    assert any(f"version {each.version} " in finding.text for finding in report.findings)
    assert {(finding.invariant, finding.node) for finding in report.findings} == {("acknowledged", "standby")}


def test_a_version_whose_groups_nobody_can_name_is_excused_by_its_own_trainers_damaged_journal_alone(truth):
    each, node = some_trained(truth), truth.node("standby").trainer
    batches = tuple(batch for batch in node.batches if batch.version != each.version)
    recorded = {version: groups for version, groups in node.recorded.items() if version != each.version}
    unnamed = trainer_changed(truth, "standby", batches=batches, recorded=recorded)

    def is_found(evidence):
        return any("no journal has the groups" in each.text for each in check_evidence(evidence).findings)

    assert is_found(unnamed)
    assert is_found(damaging(unnamed, "trainer"))
    assert not is_found(damaging(unnamed, "standby"))


# Fresh


def test_a_stale_group_is_found(truth):
    each = some_trained(truth)
    node = truth.node("standby").trainer
    batches = [
        replace(b, policy_step=b.policy_step + 10) if b.number == each.batch else b for b in node.batches
    ]
    old = trainer_changed(truth, "standby", batches=tuple(batches))
    found(
        old, "fresh", "standby", each.group.id.hex()[:12], f"more than {STALENESS}", f"version {each.version}"
    )


def test_a_group_of_a_branch_that_was_left_is_found(truth):
    each, branches = some_trained(truth), Branches(truth)
    base = branches.chain[1]
    left = signed_head(replace(base.message, luck=b"l" * 32), TRAINER, truth.manifest.id)
    forked = group_changed(truth, "standby", each.group.id, head=left.id)
    found(
        distrusting(forked, truth.name_of(each.group.sampler)),
        "fresh",
        "standby",
        each.group.id.hex()[:12],
        "no ancestor",
    )


# Signed


@pytest.mark.parametrize("how", ["sealed", "signature"])
def test_a_forged_signature_is_found_before_and_after_its_bytes_are_let_go(truth, how):
    trainer = "standby" if how == "sealed" else "trainer"
    each = some_trained(truth, trainer, has=how)
    kept = getattr(each.group, how)
    forged = group_changed(truth, trainer, each.group.id, **{how: kept[:-1] + bytes([kept[-1] ^ 1])})
    found(forged, "signed", trainer, each.group.id.hex()[:12], truth.name_of(each.group.sampler))


def test_bytes_of_another_group_are_found(truth):
    whole = [
        each.group
        for each in sum(Branches(truth).trained.values(), ())
        if each.group.sealed and each.trainer == "standby"
    ]
    one = whole[0]
    other = next(each for each in whole if each.sampler == one.sampler and each.id != one.id)
    found(
        group_changed(truth, "standby", one.id, sealed=other.sealed),
        "signed",
        "standby",
        one.id.hex()[:12],
        "another",
    )


def test_groups_of_somebody_who_never_joined_are_found(truth):
    for name in NAMES:
        truth = truth.changed(name, holdings=replace(truth.node(name).holdings, archive=None))
    for name in ("trainer", "standby"):
        truth = trainer_changed(truth, name, joins=())
    found(truth, "signed", "standby", "has not joined")


def test_a_group_that_was_condemned_before_its_use_is_found_and_afterwards_is_counted(truth):
    each = some_trained(truth)
    judged = distrusting(truth, truth.name_of(each.group.sampler))

    def condemned(after):
        verdict = KnownVerdict(
            each.group.id, each.group.sampler, JUDGE.public, "dishonest", "own-luck", after
        )
        return trainer_changed(judged, "standby", verdicts=(verdict,))

    found(condemned(each.batch - 1), "signed", "standby", each.group.id.hex()[:12], "own-luck")
    report = check_evidence(condemned(each.batch))
    assert (report.findings, report.counts["groups condemned after their use"]) == ([], 1)


def test_a_verdict_on_disk_that_was_there_before_the_batch_is_found_and_what_a_cheat_brought_about_is_counted(
    copy,
):
    each = some_trained(read_evidence(copy))
    row = (each.group.id, each.group.sampler, JUDGE.public, each.batch - 1)
    with closing(sqlite3.connect(folder_in(copy, "standby") / "journal.sqlite")) as file, file:
        file.execute("DELETE FROM verdicts WHERE id = ?", row[:1])
        file.execute(
            "INSERT INTO verdicts (id, sampler, verifier, result, reason, at, after) VALUES (?, ?, ?, 'dishonest', 'own-luck', 1.0, ?)",
            row,
        )
    evidence = read_evidence(copy)
    cheat = evidence.name_of(each.group.sampler)
    found(distrusting(evidence, cheat), "signed", "standby", each.group.id.hex()[:12], "condemned", cheat)
    counts = check_evidence(distrusting(evidence, cheat)).counts
    of_cheat = [
        one for one in sum(Branches(evidence).trained.values(), ()) if one.group.sampler == each.group.sampler
    ]
    assert counts["groups of hostile peers trained"] == len(of_cheat)
    assert counts["groups of hostile peers condemned"] == 1


# One chain


def test_two_heads_of_one_parent_are_found(truth):
    tip = Branches(truth).chain[-1]
    other = signed_head(replace(tip.message, luck=b"x" * 32), HEIR, truth.manifest.id)
    found(with_head(truth, "ann", other), "one-chain", None, str(tip), str(other))


def test_a_term_that_falls_is_found(truth):
    tip = Branches(truth).chain[-1]
    head = replace(tip.message, previous=tip.id, version=tip.message.version + 1, term=1)
    found(
        with_head(truth, "bob", signed_head(head, TRAINER, truth.manifest.id)),
        "one-chain",
        None,
        "the term falls",
        str(tip),
    )


def test_a_head_of_another_key_than_the_leaders_is_found(truth):
    tip = Branches(truth).chain[-1]
    head = replace(tip.message, previous=tip.id, version=tip.message.version + 1, groups=merkle_root([]))
    found(
        with_head(truth, "bob", signed_head(head, TRAINER, truth.manifest.id)),
        "one-chain",
        None,
        "trainer, who did not lead",
    )


def test_a_forged_head_is_found(truth):
    tip = Branches(truth).chain[-1]
    forged = replace(tip, sealed=tip.sealed[:-1] + bytes([tip.sealed[-1] ^ 1]))
    for node in truth.nodes:
        heads = tuple(forged if each.id == tip.id else each for each in node.holdings.heads)
        truth = truth.changed(node.name, holdings=replace(node.holdings, heads=heads))
    found(truth, "one-chain", None, str(tip), "not signed")


def test_a_grant_without_a_majority_or_with_a_forged_ballot_is_found(truth):
    grant = next(iter(Branches(truth).grants[2]))
    few = TermGrant(grant.ballots[:1], grant.vote)
    forged = TermGrant(tuple(Ballot(each.elector, bytes(64)) for each in grant.ballots), grant.vote)
    for bad, words in ((few, "1 of 3 electors"), (forged, "has not signed")):
        changed = truth
        for node in truth.nodes:
            if node.holdings.grants:
                changed = changed.changed(node.name, holdings=replace(node.holdings, grants=(bad,)))
        found(changed, "one-chain", None, "term 2", words)


def test_a_node_on_a_branch_that_was_left_is_found_if_it_ran_at_the_end(truth):
    left = Branches(truth).chain[3]
    other = signed_head(replace(left.message, luck=b"y" * 32), TRAINER, truth.manifest.id)
    held = truth.node("verifier").holdings
    lost = truth.changed(
        "verifier", holdings=replace(held, heads=(*held.heads, other), chain=(*held.chain[:3], other.id))
    )
    findings = check_evidence(lost).findings
    assert {each.invariant for each in findings} == {"one-chain"}
    assert any(each.node == "verifier" and str(other) in each.text for each in findings)


@pytest.mark.parametrize("how", ["blob", "state"])
def test_a_flipped_bit_is_found_unless_the_nemesis_has_flipped_it(copy, how):
    weights = folder_in(copy, "verifier") / "weights"
    path = (
        weights / "state"
        if how == "state"
        else max((weights / "blobs").iterdir(), key=lambda each: each.stat().st_size)
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    damaged = read_evidence(copy)
    found(damaged, "one-chain", "verifier", path.name[:12])
    note = {
        "at": 1.0,
        "what": "damage",
        "node": "verifier",
        "file": str(path.relative_to(copy / "nodes" / "verifier" / "state")),
    }
    assert check_evidence(replace(damaged, timeline=(note, *damaged.timeline))).findings == []
    restored = {**note, "what": "restore"}
    assert check_evidence(replace(damaged, timeline=(note, restored, *damaged.timeline))).findings


def test_a_file_that_cannot_be_read_is_found(copy):
    (folder_in(copy, "bob") / "outbox.sqlite").write_bytes(b"no database at all" * 500)
    found(read_evidence(copy), "readable", "bob", "outbox.sqlite")


# Held


def test_groups_under_a_head_that_their_sampler_never_took_are_found(truth):
    each = some_trained(truth)
    name = truth.name_of(each.group.sampler)
    held = truth.node(name).holdings
    without = tuple(head for head in held.heads if head.id != each.group.head)
    under = str(Branches(truth).heads[each.group.head])
    found(truth.changed(name, holdings=replace(held, heads=without)), "held", name, under)


def test_a_group_that_was_not_drawn_from_its_heads_weights_is_found(truth):
    head = Branches(truth).chain[-1]
    typed = sealed_group(small_run(), head.id, SAMPLERS[0], 99)
    outbox = (Posted(b"t" * 32, "pending", data=typed),)
    findings = check_evidence(
        truth.changed("ann", outbox=(*truth.node("ann").outbox, *outbox)), replay=True
    ).findings
    assert [(each.invariant, each.node) for each in findings] == [("held", "ann")]
    assert str(head) in findings[0].text


# Heard


@pytest.mark.parametrize("how", ["event", "progress", "line", "verdict"])
def test_an_honest_peer_that_was_muted_or_condemned_is_found(truth, how):
    node, ann = truth.node("standby"), truth.node("ann")
    event = {"event": "muted", "at": 1.0, "peer_id": ann.peer_id, "reasons": {"malformed": 9}}
    progress = {"event": "progress", "at": 1.0, "muted": {ann.peer_id: "own-luck"}}
    verdict = KnownVerdict(b"g" * 32, ann.key, JUDGE.public, "dishonest", "own-luck", 0)
    changed = {
        "event": truth.changed("standby", events=(event, *node.events)),
        "progress": truth.changed("standby", events=(progress, *node.events)),
        "line": truth.changed("standby", stderr=f'{{"what": "sampler {ann.peer_id} is muted: own-luck"}}\n'),
        "verdict": truth.changed("verifier", verdicts=(verdict,)),
    }[how]
    found(changed, "honest-heard", "verifier" if how == "verdict" else "standby", "ann")


def test_a_hostile_peer_that_was_muted_is_counted(truth):
    event = {"event": "muted", "at": 1.0, "peer_id": truth.node("ann").peer_id, "reasons": {"malformed": 9}}
    evidence = distrusting(truth, "ann").changed("bob", events=(event, *truth.node("bob").events))
    report = check_evidence(evidence)
    assert (report.findings, report.counts["mutes of hostile peers"]) == ([], 1)


# Progress


@pytest.mark.parametrize("name", ["standby", "verifier", "ann"])
def test_a_node_that_stands_still_after_the_last_fault_is_found(truth, name):
    healed = next(each["at"] for each in truth.timeline if each["what"] == "heal")
    events = tuple(each for each in truth.node(name).events if each["at"] <= healed)
    found(truth.changed(name, events=events), "progress", name, f"{healed:.1f}")


def test_progress_that_comes_too_late_is_found_and_who_was_down_at_the_end_is_not_asked(truth):
    found(replace(truth, bound_seconds=0.01), "progress", "standby", "more than 0.01")
    silent = truth.changed("trainer", events=())
    assert check_evidence(silent).findings == []


def test_a_sampler_that_follows_and_has_nothing_accepted_makes_no_progress(truth):
    events = tuple(
        {**each, "accepted": 3} if "accepted" in each else each for each in truth.node("bob").events
    )
    found(truth.changed("bob", events=events), "progress", "bob")


def test_evidence_is_read_and_not_changed(copy):
    def bytes_of():
        return {path: path.read_bytes() for path in sorted(copy.rglob("*")) if path.is_file()}

    before = bytes_of()
    read_evidence(copy)
    assert bytes_of() == before
    assert encode(next(iter(Branches(read_evidence(copy)).grants[2])).vote)
