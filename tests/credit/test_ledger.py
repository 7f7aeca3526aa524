"""The ledger: verified tokens count once, whatever the order of records, kills and repeats.

As a program (`python -m tests.credit.test_ledger PATH LIFE`) it writes until it is killed; each
line that it prints is a promise.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.credit.ledger import CONDEMNING, Credit, Entry, Found, Ledger
from echo_node.credit.offline import read_credit
from echo_node.errors import DefectError, StoreError
from protocol import Figures, Opened, TrajectoryGroup, Verdict, derive, open_sealed
from protocol.verdict import RESULTS

ROOT = Path(__file__).resolve().parents[2]
RUN, OTHER_RUN = b"r" * 32, b"q" * 32
ANNA, BERT = b"a" * 32, b"b" * 32
VERIFIERS = (b"1" * 32, b"2" * 32, b"3" * 32)
FIGURES = Figures(
    contrast=-0.25, d_mean=1e-5, d_most=0.5, logprob_gap=0.0, reward=None, tokens=9, z_mean=0.0, z_most=1.0
)


def entry(n, sampler=ANNA, *, tokens=None, version=3, run=RUN):
    return Entry(
        id=derive("ledger-test", n.to_bytes(8)),
        run=run,
        sampler=sampler,
        head=b"h" * 32,
        version=version,
        slot=n,
        tokens=10 + n if tokens is None else tokens,
        engine="torch/f32",
    )


def verdict(group, verifier=VERIFIERS[0], result="honest", reason="none", note="", run=RUN):
    told = Verdict(bytes(64), FIGURES, group.id, note, reason, result)
    return Opened(told, bytes(32), run, verifier, b"")


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger") as opened:
        yield opened


def lines(ledger):
    stream = io.StringIO()
    ledger.export(stream)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# What a group is worth


def test_only_a_group_that_a_verifier_found_honest_earns_its_tokens(ledger):
    first, second, third = entry(1), entry(2), entry(3)
    for group in (first, second, third):
        ledger.sent(group)
    ledger.admitted(first.id)
    ledger.admitted(second.id)
    ledger.refused(third.id, "stale")
    assert ledger.credit(ANNA) == Credit(0, 0, 0, {"stale": 1}, admitted=2)
    ledger.verdict(verdict(first))
    assert ledger.credit(ANNA) == Credit(11, 1, 0, {"stale": 1}, admitted=1)
    assert ledger.credit(BERT) == Credit(0, 0, 0, {})
    states = [ledger.state(group.id) for group in (first, second, third, entry(4))]
    assert states == [("verified", ""), ("admitted", ""), ("refused", "stale"), None]


def test_a_verdict_counts_once_however_often_and_by_however_many_it_comes(ledger):
    group = entry(1)
    news = [ledger.verdict(verdict(group, verifier), group) for verifier in VERIFIERS for _ in range(3)]
    assert news == [True, False, False] * 3
    assert ledger.credit(ANNA) == Credit(11, 1, 0, {})


def test_two_verifiers_take_the_credit_back_and_one_does_not_however_often_it_speaks(ledger):
    group = entry(1)
    ledger.verdict(verdict(group), group)
    for _ in range(3):
        ledger.verdict(verdict(group, VERIFIERS[1], "dishonest", "luck-not-its-own"))
    assert ledger.credit(ANNA).tokens == 11
    ledger.verdict(verdict(group, VERIFIERS[2], "dishonest", "wrong-reward"))
    assert ledger.credit(ANNA) == Credit(0, 0, 1, {})
    assert ledger.state(group.id) == ("condemned", "luck-not-its-own")
    assert not ledger.verdict(verdict(group)), "honest was said before"
    assert ledger.credit(ANNA).tokens == 0


def test_of_a_verifier_that_says_both_the_graver_word_counts_whichever_came_first(ledger):
    for n, words in enumerate((("honest", "dishonest"), ("dishonest", "honest"))):
        for word in words:
            ledger.verdict(verdict(entry(n), result=word), entry(n))
        assert ledger.state(entry(n).id) == ("sent", "")
    ledger.verdict(verdict(entry(2), result="undecided"), entry(2))
    assert ledger.credit(ANNA).tokens == 0
    ledger.verdict(verdict(entry(2), result="honest"))
    assert ledger.credit(ANNA).tokens == 12


def test_a_verdict_that_comes_before_its_group_is_kept_for_it(ledger):
    group = entry(1)
    assert ledger.verdict(verdict(group))
    assert ledger.credit(ANNA).tokens == 0
    assert ledger.sent(group)
    assert ledger.credit(ANNA).tokens == 11


def test_an_answer_to_a_group_that_nobody_signed_is_not_written_down(ledger):
    assert not ledger.refused(entry(1).id, "wrong-signature")
    assert not ledger.admitted(entry(1).id)
    assert lines(ledger) == []


def test_the_last_answer_counts_but_a_duplicate_undoes_nothing(ledger):
    group = entry(1)
    ledger.refused(group.id, "full", group)
    assert ledger.admitted(group.id)
    assert not ledger.admitted(group.id)
    assert not ledger.refused(group.id, "duplicate")
    assert ledger.state(group.id) == ("admitted", "")
    ledger.refused(group.id, "stale")
    assert ledger.credit(ANNA).refused == {"stale": 1}


def test_what_one_verifier_found_is_told_apart_from_what_others_did(tmp_path):
    first, second, third = VERIFIERS
    now = [100.0]
    with Ledger(tmp_path / "ledger", clock=lambda: now[0]) as ledger:
        for n, verifier, result in (
            (1, first, "honest"),
            (2, first, "honest"),
            (3, first, "dishonest"),
            (3, second, "honest"),
            (4, first, "undecided"),
            (4, second, "honest"),
        ):
            ledger.verdict(verdict(entry(n), verifier, result), entry(n))
            now[0] += 1
        ledger.verdict(verdict(entry(5, BERT), first), entry(5, BERT))
        ledger.verdict(verdict(entry(6, run=OTHER_RUN), first, run=OTHER_RUN), entry(6, run=OTHER_RUN))
        assert ledger.found_by(first, ANNA, RUN) == Found(11 + 12, 2, 1, 100.0)
        assert ledger.found_by(second, ANNA, RUN) == Found(13 + 14, 2, 0, 103.0)
        assert ledger.found_by(third, ANNA, RUN) == Found(0, 0, 0, None)
        assert ledger.found_by(first, BERT, RUN).tokens == 15


def test_what_a_verifier_found_outlives_the_groups_that_are_pruned(tmp_path):
    now = [100.0]
    with Ledger(tmp_path / "ledger", clock=lambda: now[0]) as ledger:
        for n in (1, 2, 3):
            ledger.verdict(verdict(entry(n, version=n)), entry(n, version=n))
            now[0] += 1
        ledger.prune(102.0)
        assert ledger.found_by(VERIFIERS[0], ANNA, RUN) == Found(11 + 12 + 13, 3, 0, 102.0)


def test_who_looks_into_what_was_found_waits_for_no_writer(ledger):
    ledger.verdict(verdict(entry(1)), entry(1))
    with ThreadPoolExecutor(1) as pool, ledger.transaction():
        ledger.verdict(verdict(entry(2)), entry(2))
        found = pool.submit(ledger.found_by, VERIFIERS[0], ANNA, RUN).result(timeout=20)
    assert found.honest == 1
    assert ledger.found_by(VERIFIERS[0], ANNA, RUN).honest == 2


def test_credit_is_also_told_for_one_run(ledger):
    for n, run in enumerate((RUN, OTHER_RUN, OTHER_RUN)):
        ledger.verdict(verdict(entry(n, run=run), run=run), entry(n, run=run))
    assert [ledger.credit(ANNA, run).tokens for run in (None, RUN, OTHER_RUN)] == [33, 10, 23]


def test_news_of_one_group_written_down_for_another_is_our_own_mistake(ledger):
    with pytest.raises(DefectError):
        ledger.verdict(verdict(entry(1)), entry(2))
    with pytest.raises(DefectError):
        ledger.admitted(entry(1).id, entry(2))
    assert lines(ledger) == []


def test_an_entry_says_what_the_sealed_group_says():
    from tests import crafting  # brings torch, which those who are killed need not wait for
    from tests.records import record_of

    run = crafting.open_run()
    sampler = crafting.SAMPLERS[0]
    head = crafting.Chain(run).next(sampler)
    sealed = crafting.sealed_group(run, head.id, sampler, 5)
    group = open_sealed(sealed, TrajectoryGroup, run.id)
    assert Entry.of(record_of(group, 0), run.id, 7) == Entry(
        group.id, run.id, sampler.public, head.id, 7, 5, group.message.token_count, crafting.ENGINE
    )


# Text of strangers


def test_what_peers_wrote_is_one_printable_line_in_the_ledger(ledger):
    group = entry(1)
    ledger.verdict(verdict(group, note="\r\u202eup\0"))
    other = entry(2)
    ledger.refused(other.id, "full\x1b[2J\nfake line" + "x" * 10_000, other)
    (refused,) = ledger.credit(ANNA).refused
    for text in (ledger.state(other.id)[1], refused):
        assert text.startswith("full\\x1b[2J\\nfake linexxx")
        assert text.isprintable()
        assert len(text) <= 600
    assert lines(ledger)[-1]["note"] == "\\r\\u202eup\\x00"


# Out


def test_an_export_is_sorted_lines_of_json_with_ids_in_hex(ledger, tmp_path):
    group = entry(1)
    ledger.verdict(verdict(group, VERIFIERS[1], "dishonest", "wrong-reward", "by 0.5"), group)
    ledger.verdict(verdict(group))
    ledger.sent(entry(2))
    assert ledger.export(tmp_path / "out.jsonl") == 4
    found = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in found]
    assert [row["kind"] for row in rows] == ["group", "group", "verdict", "verdict"]
    assert [row["id"] for row in rows[:2]] == sorted(each.id.hex() for each in (group, entry(2)))
    assert [row["verifier"] for row in rows[2:]] == [key.hex() for key in VERIFIERS[:2]]
    assert rows[3]["figures"] == dataclasses.asdict(FIGURES)
    assert (rows[3]["group"], rows[3]["reason"], rows[3]["note"]) == (
        group.id.hex(),
        "wrong-reward",
        "by 0.5",
    )
    assert rows == lines(ledger), "the same into a stream"
    assert sorted(tmp_path.glob("out*")) == [tmp_path / "out.jsonl"], "and no half file beside it"


def test_an_export_sees_one_moment_while_others_write(ledger):
    ledger.sent(entry(1))
    reading = ledger._lines()
    next(reading)
    ledger.sent(entry(2))
    assert not list(reading)
    assert len(lines(ledger)) == 2


def test_pruning_keeps_the_sums_and_nothing_pruned_counts_again(tmp_path):
    now = [100.0]
    with Ledger(tmp_path / "ledger", clock=lambda: now[0]) as ledger:
        old = [entry(n) for n in range(4)]
        for group in old:
            ledger.verdict(verdict(group), group)
        ledger.refused(entry(5).id, "full", entry(5))
        now[0] = 200.0
        newer = entry(6)
        ledger.verdict(verdict(newer), newer)
        before = ledger.credit(ANNA)
        assert ledger.prune(150.0) == 5
        assert ledger.credit(ANNA) == before
        assert [row["kind"] for row in lines(ledger)] == ["closed", "group", "pruned", "pruned", "verdict"]
        for group in old:
            assert not ledger.sent(group)
            ledger.verdict(verdict(group, VERIFIERS[1]), group)
        assert ledger.credit(ANNA) == before
        ledger.verdict(verdict(newer, VERIFIERS[1]), newer)
        assert ledger.sent(entry(7, version=4))
        now[0] = 300.0
        assert ledger.prune(250.0) == 2
        assert ledger.credit(ANNA) == before
        assert "verdict" not in {row["kind"] for row in lines(ledger)}, "late ones of pruned groups go too"


# The file


def test_what_is_written_together_is_there_together_or_not_at_all(ledger):
    def break_off():
        with ledger.transaction():
            ledger.sent(entry(1))
            ledger.verdict(verdict(entry(1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert lines(ledger) == []
    with ledger.transaction():
        ledger.sent(entry(1))
        ledger.verdict(verdict(entry(1)))
    assert ledger.credit(ANNA).tokens == 11


def test_after_a_write_that_failed_the_next_one_is_kept(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        with suppress(ZeroDivisionError), ledger.transaction():
            ledger.sent(entry(1))
            raise ZeroDivisionError
        ledger.sent(entry(2))
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.state(entry(1).id) is None
        assert ledger.state(entry(2).id) == ("sent", "")


def test_threads_write_through_one_ledger_and_nothing_is_lost(ledger):
    def write(numbers):
        for n in numbers:
            with ledger.transaction():
                ledger.sent(entry(n))
                ledger.verdict(verdict(entry(n)))

    threads = [threading.Thread(target=write, args=(range(start, 100, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.credit(ANNA) == Credit(sum(10 + n for n in range(100)), 100, 0, {})


def test_a_ledger_is_there_again_after_closing_and_a_closed_one_says_so(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.verdict(verdict(entry(1)), entry(1))
    ledger.close()
    with pytest.raises(StoreError, match="is closed"):
        ledger.sent(entry(2))
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.credit(ANNA).tokens == 11


COUNT = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM groups').fetchone())"


def test_another_process_may_read_while_the_node_writes(ledger, tmp_path):
    ledger.sent(entry(1))
    with ledger.transaction():
        ledger.sent(entry(2))
        command = [sys.executable, "-c", COUNT, str(tmp_path / "ledger")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def _spoil_every_page_but_the_first(path):
    with Ledger(path) as ledger:
        for number in range(50):
            ledger.sent(entry(number))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"rot!" * ((len(whole) - 4096) // 4))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"no database at all " * 300), "is damaged"),
        (lambda path: _execute(path, "CREATE TABLE notes (text)"), "another program's file"),
        (lambda path: (Ledger(path).close(), _execute(path, "PRAGMA user_version = 9")), "has version 9"),
        (lambda path: path.mkdir(), "opening the ledger"),
        (_spoil_every_page_but_the_first, "is damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_as_it_is(tmp_path, spoil, says):
    path = tmp_path / "ledger"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=says) as caught:
        Ledger(path)
    assert caught.value.advice
    assert before is None or path.read_bytes() == before


def test_a_file_of_format_1_opens(tmp_path):
    """The statements are those of the first program that kept a ledger: they never change."""
    path = tmp_path / "ledger"
    file = sqlite3.connect(path)
    file.executescript(_FORMAT_1)
    row = (b"g" * 32, b"r" * 32, ANNA, b"h" * 32, 3, 0, 200, "torch/f32", 5.0)
    file.execute(
        f"INSERT INTO groups VALUES ({', '.join('?' * 9)}, 'admitted', '', 'verified', '')",  # noqa: S608
        row,
    )
    file.commit()
    file.close()
    assert read_credit(path, ANNA, b"r" * 32).tokens == 200
    with Ledger(path) as ledger:
        assert ledger.credit(ANNA).tokens == 200
        assert ledger.state(b"g" * 32) == ("verified", "")
    assert read_credit(path, ANNA, b"r" * 32).tokens == 200
    Ledger(tmp_path / "new").close()
    assert _marks(path) == _marks(tmp_path / "new") == [0x4563_4C45, 1]


_FORMAT_1 = """
    CREATE TABLE groups (
        id BLOB PRIMARY KEY, run BLOB NOT NULL, sampler BLOB NOT NULL, head BLOB NOT NULL,
        version INTEGER NOT NULL, slot INTEGER NOT NULL, tokens INTEGER NOT NULL, engine TEXT NOT NULL,
        at REAL NOT NULL, answer TEXT NOT NULL, why TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX groups_of_samplers ON groups (sampler, run, state, reason, tokens);
    CREATE INDEX groups_by_time ON groups (at);
    CREATE TABLE verdicts (
        id BLOB NOT NULL, verifier BLOB NOT NULL, result TEXT NOT NULL, reason TEXT NOT NULL,
        note TEXT NOT NULL, figures TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (id, verifier)
    ) WITHOUT ROWID;
    CREATE INDEX verdicts_by_time ON verdicts (at);
    CREATE TABLE pruned (
        run BLOB NOT NULL, sampler BLOB NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        groups INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (run, sampler, state, reason)
    ) WITHOUT ROWID;
    CREATE TABLE closed (run BLOB PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;
    PRAGMA application_id = 0x45634C45;
    PRAGMA user_version = 1;
"""


def _marks(path):
    file = sqlite3.connect(path)
    found = [file.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")]
    file.close()
    return found


def _execute(path, statement):
    file = sqlite3.connect(path)
    file.execute(statement)
    file.close()


# Any history

GROUPS = [entry(n, (ANNA, BERT)[n % 2]) for n in range(6)]
HAPPENED = st.lists(
    st.tuples(st.just("sent"), st.sampled_from(GROUPS))
    | st.tuples(st.just("admitted"), st.sampled_from(GROUPS))
    | st.tuples(st.just("refused"), st.sampled_from(GROUPS), st.sampled_from(("full", "stale", "duplicate")))
    | st.tuples(
        st.just("verdict"), st.sampled_from(GROUPS), st.sampled_from(VERIFIERS), st.sampled_from(RESULTS)
    ),
    max_size=40,
)


def naive(history, sampler):
    """Credit in the plainest words: over all groups that were ever named in the history."""
    tokens = groups = condemned = admitted = 0
    refused = Counter()
    for group in GROUPS:
        mine = [event for event in history if event[1] == group]
        if group.sampler != sampler or not mine:
            continue
        said = {}
        for _, _, verifier, result in (event for event in mine if event[0] == "verdict"):
            said.setdefault(verifier, set()).add(result)
        dishonest = [words for words in said.values() if "dishonest" in words]
        honest = [words for words in said.values() if "honest" in words and "dishonest" not in words]
        answer = None
        for event in mine:
            word = event[2] if event[0] == "refused" else ""
            if event[0] in {"admitted", "refused"} and not (word == "duplicate" and answer is not None):
                answer = word
        if len(dishonest) >= CONDEMNING:
            condemned += 1
        elif honest:
            groups += 1
            tokens += group.tokens
        elif answer:
            refused[answer] += 1
        elif answer is not None:
            admitted += 1
    return Credit(tokens, groups, condemned, dict(refused), admitted)


@given(HAPPENED)
def test_credit_is_what_a_naive_recount_of_any_history_gives(history):
    with Ledger(Path(":memory:")) as ledger:
        for what, group, *more in history:
            if what == "sent":
                ledger.sent(group)
            elif what == "admitted":
                ledger.admitted(group.id, group)
            elif what == "refused":
                ledger.refused(group.id, more[0], group)
            else:
                ledger.verdict(verdict(group, *more), group)
        for sampler in (ANNA, BERT):
            assert ledger.credit(sampler) == naive(history, sampler)


@given(HAPPENED, st.randoms())
def test_the_order_in_which_verdicts_come_changes_nothing(history, luck):
    told = [event for event in history if event[0] in {"sent", "verdict"}]
    mixed = luck.sample(told, len(told)) + told[:3]
    states = []
    for each in (told, mixed):
        with Ledger(Path(":memory:")) as ledger:
            for what, group, *more in each:
                _ = ledger.sent(group) if what == "sent" else ledger.verdict(verdict(group, *more))
            states.append([(ledger.state(group.id) or ("",))[0] for group in GROUPS])
    assert states[0] == states[1]


# kill -9

A_LIFE = 1_000_000


def write_for_ever(path, life):
    """Groups alone, and groups together with their verdict."""
    say = functools.partial(print, flush=True)
    with Ledger(Path(path)) as ledger:
        for n in range(life * A_LIFE, (life + 1) * A_LIFE):
            if n % 3 == 0:
                ledger.sent(entry(n))
                say("sent", n)
                continue
            with ledger.transaction():
                ledger.sent(entry(n))
                ledger.verdict(verdict(entry(n)))
            say("verified", n)


def check_kills(path, kills):
    said = []
    for life in range(kills):
        command = [sys.executable, "-m", "tests.credit.test_ledger", str(path), str(life)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            heard = [child.stdout.readline() for _ in range(life * 7 % 40 + 1)]
            child.kill()
            heard += child.stdout.readlines()
        said += [line.split() for line in heard if line.endswith("\n")]
    assert len(said) > kills
    with Ledger(path) as ledger:
        assert ledger._file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        for word, n in said:
            assert ledger.state(entry(int(n)).id) == (word, "")
        rows = lines(ledger)
        groups = {row["id"]: row for row in rows if row["kind"] == "group"}
        verdicts = {row["group"] for row in rows if row["kind"] == "verdict"}
        assert verdicts == {name for name, row in groups.items() if row["slot"] % 3}, "both or neither"
        assert len(groups) - len(said) <= kills, "one call in flight at each death"
        verified = [row["tokens"] for row in groups.values() if row["state"] == "verified"]
        assert ledger.credit(ANNA) == Credit(sum(verified), len(verified), 0, {})


def test_what_a_call_has_returned_for_survives_kill_9(tmp_path):
    check_kills(tmp_path / "ledger", kills=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_call_has_returned_for_survives_a_hundred_kills(tmp_path):
    check_kills(tmp_path / "ledger", kills=100)


if __name__ == "__main__":
    write_for_ever(sys.argv[1], int(sys.argv[2]))
