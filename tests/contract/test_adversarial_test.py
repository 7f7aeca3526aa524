"""`contract test` finds what is wrong with a contract, in real processes, and outlives it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from echo_node.contract import purity_watch
from echo_node.contract.adversarial_test import (
    FAILED,
    NOT_TRIED,
    PASSED,
    POINTS,
    Subject,
    find_impurity,
    run_trial,
    show_contract,
    try_contract,
)
from echo_node.contract.hostile_texts import TEXTS
from echo_node.errors import ContractError
from tests.contract import bad_contracts

HERE = Path(__file__).parent
BAD = {
    contract.name: contract
    for contract in vars(bad_contracts).values()
    if isinstance(contract, type) and issubclass(contract, bad_contracts.Good)
}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The bad contracts as an installed package, for this process's children too."""
    info = tmp_path / "bad_contracts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-contracts\nVersion: 1\n")
    lines = [f"{name} = bad_contracts:{contract.__name__}" for name, contract in BAD.items()]
    (info / "entry_points.txt").write_text("[echo_node.contracts]\n" + "\n".join(lines) + "\n")
    paths = [str(tmp_path), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def tried(name, seconds=10.0):
    return {finding.point: finding for finding in try_contract(Subject(name, "", {}), seconds=seconds)}


@pytest.mark.parametrize("name", ["good", "good-cache"])
def test_a_good_contract_passes_the_purity_test(name):
    assert find_impurity(Subject(name, "", {})) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("bad-random", "asked again"),
        ("bad-hash-order", "every process: key"),
        ("bad-clock", ":"),
        ("bad-outside", "the outside: it does"),
        ("bad-memory", "asked again"),
    ],
)
def test_the_purity_test_names_what_is_impure(name, found):
    assert found in find_impurity(Subject(name, "", {}), seconds=10.0)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["good", "good-cache"])
def test_a_good_contract_passes_on_every_point(name):
    findings = tried(name)
    assert tuple(findings) == POINTS
    assert {finding.verdict for finding in findings.values()} == {PASSED}, findings


@pytest.mark.parametrize(
    ("name", "points", "found"),
    [
        ("bad-random", {"luck", "it repeats itself", "every process", "every hash seed"}, "random module"),
        ("bad-leak", {"memory"}, "KiB more after"),
        ("bad-clock", {"the clock"}, "time.time"),
        ("bad-hash-order", {"every hash seed"}, "another prompt"),
        ("bad-range", {"range", "huge text", "binary text", "hostile text"}, "is not from 0.0 to 1.0"),
        slow("bad-eval", {"completions are not run"}, "compiled as Python"),
        slow("bad-variety", {"variety"}, "different prompts"),
        slow("bad-exit", {"binary text"}, "ended with 3"),
        slow("bad-own-luck", {"luck", "it repeats itself", "every process"}, "without a seed"),
        slow("bad-memory", {"it repeats itself"}, "when asked again"),
        slow("bad-outside", {"the outside"}, "os.listdir"),
        slow("bad-generous", {"empty text"}, "highest score"),
        slow("bad-raise", {"range"}, "ValueError"),
    ],
)
def test_a_bad_contract_fails_on_the_point_that_it_is_bad_at(name, points, found):
    findings = tried(name, seconds=5.0 if name == "bad-eval" else 20.0)
    wrong = {point for point, finding in findings.items() if finding.verdict == FAILED}
    assert points <= wrong, findings
    if name in {"bad-hash-order", "bad-leak", "bad-variety"}:
        assert wrong == points, "the fault stands alone"
    assert any(found in findings[point].found for point in points), findings


def test_a_slow_contract_is_found_slow():
    findings = tried("bad-slow")
    assert findings["time"].verdict == FAILED
    assert "a score 0.1" in findings["time"].found


def test_an_endless_contract_ends_with_the_trial_and_the_rest_is_not_tried():
    findings = tried("bad-endless", seconds=3.0)
    assert findings["time"].verdict == FAILED
    assert "stopped after 3 seconds" in findings["time"].found
    assert {finding.verdict for finding in findings.values()} == {FAILED, NOT_TRIED}


def test_one_text_without_end_costs_that_text_alone():
    steps = [{"name": name, "act": "hostile", "text": name} for name in ("empty", "huge number", "nulls")]
    told = run_trial(Subject("bad-quadratic", "", {}), steps, hash_seed=0, seconds=3.0).steps
    assert "stopped after" in told["huge number"]["why"]
    assert "scores" in told["empty"]
    assert "scores" in told["nulls"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other layers")
def test_a_contract_that_robs_is_tried_where_there_is_nothing_to_take(tmp_path_factory, monkeypatch):
    key = tmp_path_factory.mktemp("home") / "key"
    key.write_text("the key of this node")
    monkeypatch.setenv("A_SECRET", "the password")
    subject = Subject("bad-burglar", "1", {"at": str(key.parent)})
    told = show_contract(subject, samples=1)
    assert {"landlock", "seccomp"} <= set(told.about["layers"])
    assert told.steps["show"]["samples"][0]["answer_score"]["reason"] == "compared", "nothing was found"
    findings = {finding.point: finding for finding in try_contract(subject, seconds=20.0)}
    assert findings["the outside"].verdict == FAILED
    assert "tried behind" in findings["it works"].found
    assert key.read_text() == "the key of this node"
    assert [path.name for path in key.parent.iterdir()] == ["key"]


def test_what_is_not_there_or_gets_a_wrong_parameter_fails_with_the_reason():
    findings = {finding.point: finding for finding in try_contract(Subject("no-such", "", {}))}
    assert findings["it works"].verdict == FAILED
    assert "no contract no-such" in findings["it works"].found
    findings = {finding.point: finding for finding in try_contract(Subject("good", "1", {"size": 3}))}
    assert "no parameter 'size'" in findings["it works"].found
    with pytest.raises(ContractError, match="no contract no-such"):
        show_contract(Subject("no-such", "", {}))


def test_samples_show_a_right_and_a_wrong_answer():
    told = show_contract(Subject("good", "1", {}), samples=2)
    for sample in told.steps["show"]["samples"]:
        assert sample["answer"] in sample["prompt"]
        assert sample["answer_score"]["value"] == 1.0
        assert sample["wrong_score"]["value"] == 0.0


def test_every_hostile_text_is_a_text():
    for name, make in TEXTS.items():
        assert type(make("42")) is str, name
    assert max(len(make("42")) for make in TEXTS.values()) >= 1_000_000 - 15


def test_watching_sees_what_code_reaches_for_and_nothing_afterwards(tmp_path):
    import datetime as dt
    import random
    import secrets

    with purity_watch.watch() as seen:
        time.time()
        dt.datetime.now(dt.UTC)
        dt.date.today()  # noqa: DTZ011 -- what is watched for
        random.randint(1, 6)
        random.Random()
        secrets.token_bytes(2)
        compile(purity_watch.CODE, "text", "eval")
        (tmp_path / "file").touch()
    assert seen["clock"] >= {"time.time", "datetime.now", "date.today"}
    assert {"os.urandom", "random.Random without a seed"} <= seen["luck"]
    assert any("random module" in what for what in seen["luck"])
    assert seen["code"]
    assert seen["outside"]
    before = {kind: set(what) for kind, what in seen.items()}
    time.monotonic()
    compile(purity_watch.CODE, "text", "eval")
    assert seen == before
    with purity_watch.watch() as nothing:
        random.Random(7).random()
        sum(range(10))
    assert not any(nothing.values()), nothing
