"""Adversarial test of a contract, as run by `echo-node contract test`.

Every trial runs in a process of its own, in the jail in which the node runs contracts, with a
deadline, so that a bad contract costs its own trial and no more. The contract is never imported
here: `adversarial_worker` runs the steps, and this module compares the results.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.contract.hostile_texts import TEXTS
from echo_node.contract.jail.process import environment_for
from echo_node.contract.registry import ADVICE
from echo_node.errors import ContractError, one_line

SECONDS: Final = 30.0  # for one process
PASSED, FAILED, NOT_TRIED = "passed", "failed", "not tried"
_KEYS: Final = list(range(16))
_MANY_KEYS: Final = 200
_ROUNDS: Final = 100
_PROMPT_SECONDS: Final = 1.0  # what the usual prompt may take
_SCORE_SECONDS: Final = 0.1  # what the usual score may take
_HOSTILE_SECONDS: Final = (
    2.0  # of work that any score may take, on a machine that may have other things to do
)
_GROWTH: Final = 512 * 1024  # bytes in the second half of the rounds

Step = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A contract to test: name, version (empty if there is only one) and parameters."""

    name: str
    version: str
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one point, and what was found."""

    point: str
    verdict: str
    found: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of one or more processes: about the contract, and per step.

    A step that ended its process has `stopped`.
    """

    about: dict[str, Any]
    steps: dict[str, dict[str, Any]]


def try_contract(subject: Subject, *, seconds: float = SECONDS) -> list[Finding]:
    """Return a finding per point; a contract that passes all is fit for a run."""
    budget = seconds / 6
    answers: Step = {"name": "answers", "act": "answers", "keys": _KEYS, "budget": budget}
    variety: Step = {"name": "variety", "act": "variety", "keys": _MANY_KEYS, "budget": budget}
    first = run_trial(subject, [answers, variety], hash_seed=0, seconds=seconds)
    if problem := _of(first, "load") or _of(first, "answers"):
        point = "it works" if "error" in problem else "time"
        return [Finding(point, FAILED, one_line(problem.get("error") or problem["why"])), *_not_tried(point)]
    if (slow := _time(first, first)).verdict == FAILED:
        return [slow, *_not_tried(slow.point)]
    rows = first.steps["answers"]["rows"]
    answers = {**answers, "keys": [int(key) for key in rows], "budget": seconds}
    backwards: Step = {**answers, "keys": answers["keys"][::-1]}
    texts = [{"name": f"text: {name}", "act": "hostile", "text": name} for name in TEXTS]
    second = run_trial(subject, [backwards, *texts], hash_seed=0, seconds=seconds)
    watching: Step = {"name": "watched", "act": "watched", "keys": 4}
    memory: Step = {"name": "memory", "act": "memory", "rounds": _ROUNDS, "budget": budget}
    third = run_trial(subject, [answers, watching, memory], hash_seed=4711, seconds=seconds)
    watched = third.steps.get("watched", {})
    return [
        Finding("it works", PASSED, _about(first.about)),
        _repeats(rows),
        _same("every process", first, second),
        _same("every hash seed", first, third),
        _range(first, second),
        _worth(first, rows),
        _time(first, second),
        _memory(third.steps.get("memory", {})),
        *(_texts(second, point, names) for point, names in _TEXTS.items()),
        _variety(first.steps.get("variety", {})),
        _reach(watched, "clock", "the clock", "it reads"),
        _reach(watched, "luck", "luck", "it draws from"),
        _reach(watched, "code", "completions are not run", ""),
        _reach(watched, "outside", "the outside", "it does"),
    ]


def find_impurity(subject: Subject, *, seconds: float = SECONDS) -> str | None:
    """Return what makes a contract impure, in words; None if it is pure.

    Prompts and scores are the same when asked again, in another process, in another order and with
    another hash seed; and the contract uses no clock, no unseeded randomness and nothing outside.
    """
    answers: Step = {"name": "answers", "act": "answers", "keys": _KEYS, "budget": seconds / 6}
    watching: Step = {"name": "watched", "act": "watched", "keys": 4}
    first = run_trial(subject, [answers], hash_seed=0, seconds=seconds)
    if problem := _of(first, "load") or _of(first, "answers"):
        return one_line(problem.get("error") or problem["why"])
    rows = first.steps["answers"]["rows"]
    backwards: Step = {**answers, "keys": [int(key) for key in rows][::-1], "budget": seconds}
    second = run_trial(subject, [backwards, watching], hash_seed=4711, seconds=seconds)
    watched = second.steps.get("watched", {})
    findings = [
        _repeats(rows),
        _same("every process", first, second),
        _reach(watched, "clock", "the clock", "it reads"),
        _reach(watched, "luck", "luck", "it draws from"),
        _reach(watched, "outside", "the outside", "it does"),
    ]
    return next((f"{each.point}: {each.found}" for each in findings if each.verdict != PASSED), None)


_EMPTY: Final = ("empty", "blank")
_HUGE: Final = ("huge", "huge number", "many lines")
_BINARY: Final = ("binary", "nulls", "half characters", "terminal codes")
_HOSTILE: Final = tuple(name for name in TEXTS if name not in {*_EMPTY, *_HUGE, *_BINARY})
_TEXTS: Final = {"empty text": _EMPTY, "huge text": _HUGE, "binary text": _BINARY, "hostile text": _HOSTILE}
POINTS: Final = (
    *(
        "it works",
        "it repeats itself",
        "every process",
        "every hash seed",
        "range",
        "worth",
        "time",
        "memory",
    ),
    *_TEXTS,
    *("variety", "the clock", "luck", "completions are not run", "the outside"),
)


def show_contract(subject: Subject, *, samples: int = 3, seconds: float = SECONDS) -> Trial:
    """Return some prompts and scores, made in a process of its own."""
    trial = run_trial(
        subject, [{"name": "show", "act": "show", "keys": samples}], hash_seed=0, seconds=seconds
    )
    if problem := _of(trial, "load") or _of(trial, "show"):
        if "error" in problem:
            raise ContractError(problem["error"])
        raise ContractError(f"trying {subject.name}: {problem['why']}", advice=ADVICE)
    return trial


def run_trial(subject: Subject, steps: Sequence[Step], *, hash_seed: int, seconds: float) -> Trial:
    """Run every step; after one that ends its process, run the rest in another."""
    about: dict[str, Any] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    left = list(steps)
    while left:
        lines, why = _in_a_process(subject, left, hash_seed, seconds)
        done = {line["did"]: line for line in lines if "did" in line}
        about = about or done.pop("load", {})
        outcomes |= {name: line for name, line in done.items() if name != "load"}
        stopped = next(
            (line["doing"] for line in lines[::-1] if line.get("doing") not in {None, *done}), None
        )
        if "error" in about or stopped == "load" or not lines:
            return Trial(about or {"stopped": True, "why": why}, outcomes)
        if stopped is None or stopped == "load":
            break
        outcomes[stopped] = {"stopped": True, "why": why}
        left = left[next(n for n, step in enumerate(left) if step["name"] == stopped) + 1 :]
    return Trial(about, outcomes)


def _in_a_process(
    subject: Subject, steps: Sequence[Step], hash_seed: int, seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Run steps in a process; return its lines of JSON and how it ended.

    This is the only place where code of a contract is started.
    """
    order = {
        "name": subject.name,
        "version": subject.version,
        "params": dict(subject.params),
        "steps": list(steps),
        "seconds": seconds,
    }
    # Of ours little more than a jail gets: authors may keep what they try in a folder of their own.
    folders = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    environment = {**environment_for(folders), "PYTHONHASHSEED": str(hash_seed)}
    with (
        tempfile.TemporaryDirectory(prefix="echo-contract-") as folder,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "echo_node.contract.adversarial_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(json.dumps(order).encode(), timeout=seconds)
            why = f"its process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it was stopped after {seconds:g} seconds"
            _end(process)
            output, _ = process.communicate()
        finally:
            _end(process)
    return _lines(output), why


def _lines(output: bytes) -> list[dict[str, Any]]:
    """Return the worker's lines without the contract's own output between them."""
    lines = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and ("did" in row or "doing" in row):
            lines.append(row)
    return lines


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started: they are a process group of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _about(about: Mapping[str, Any]) -> str:
    layers = one_line(", ".join(about.get("layers", ()))) or "nothing: this system has no jail"
    return f"{about['name']} {about['version']}, tried behind {layers}"


def _of(trial: Trial, step: str) -> dict[str, Any] | None:
    """Return what went wrong in a step, if anything."""
    outcome = (
        trial.about if step == "load" else trial.steps.get(step, {"stopped": True, "why": "it never came"})
    )
    return outcome if "error" in outcome or "stopped" in outcome else None


def _not_tried(*but: str) -> list[Finding]:
    return [Finding(point, NOT_TRIED, "") for point in POINTS if point not in but]


def _verdict(point: str, problem: str, fine: str) -> Finding:
    return Finding(point, FAILED if problem else PASSED, one_line(problem or fine))


def _repeats(rows: Mapping[str, Any]) -> Finding:
    others = [
        key
        for key, row in rows.items()
        if not row["repeats"] or any((each or "").startswith("another") for each in row["replies"].values())
    ]
    return _verdict(
        "it repeats itself",
        f"of {len(rows)} keys, {len(others)} gave another prompt or score when asked again" if others else "",
        f"{len(rows)} keys asked twice",
    )


def _same(point: str, first: Trial, other: Trial) -> Finding:
    if problem := _of(other, "load") or _of(other, "answers"):
        return Finding(point, FAILED, one_line(problem.get("error") or problem["why"]))
    rows, theirs = first.steps["answers"]["rows"], other.steps["answers"]["rows"]
    for key, row in rows.items():
        if row["prompt"] != theirs[key]["prompt"]:
            return Finding(point, FAILED, f"key {key} has another prompt (or data) there")
        for text, replies in row["replies"].items():
            if replies != theirs[key]["replies"][text]:
                return Finding(point, FAILED, f"key {key}: {text} is answered in another way there")
        for text, score in row["scores"].items():
            one, two = (_worth_of(each) for each in (score, theirs[key]["scores"][text]))
            if one != two:
                return Finding(point, FAILED, f"key {key}: {text} scores {one} here and {two} there")
    return Finding(point, PASSED, f"{len(first.steps['answers']['rows'])} prompts and their scores agree")


def _worth_of(score: Mapping[str, Any]) -> Any:
    return score.get("value", "an error")


def _range(first: Trial, second: Trial) -> Finding:
    """Check the range of all scores; an error counts as a score out of range."""
    for name, outcome in {**first.steps, **second.steps}.items():
        for score in _scores(outcome):
            if "error" in score:
                return Finding("range", FAILED, one_line(f"{name}: {score['error']}"))
    return Finding("range", PASSED, f"every score is from {first.about['low']:g} to {first.about['high']:g}")


def _scores(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "rows" in outcome:
        return [score for row in outcome["rows"].values() for score in row["scores"].values()]
    scores = outcome.get("scores", [])
    return scores if isinstance(scores, list) else []


def _worth(first: Trial, rows: Mapping[str, Any]) -> Finding:
    """Check that a right answer scores more than none, where the contract has one."""
    scored = [row["scores"] for row in rows.values() if row["own"]]
    if not scored:
        return Finding("worth", PASSED, "it names no answer of its own")
    own = statistics.fmean(scores["its own"].get("value", first.about["low"]) for scores in scored)
    none = statistics.fmean(scores["empty"].get("value", first.about["low"]) for scores in scored)
    text = f"its own answers score {own:.3g}, no answer {none:.3g}"
    return _verdict("worth", text if own <= none else "", text)


def _time(first: Trial, second: Trial) -> Finding:
    rows = first.steps["answers"]["rows"].values()
    prompt = statistics.median(row["seconds"] for row in rows)
    score = statistics.median(each["seconds"] for row in rows for each in row["scores"].values())
    slowest = [
        (each["work"], name)
        for name, outcome in {**first.steps, **second.steps}.items()
        for each in _scores(outcome)
    ]
    worst, where = max(slowest)
    problem = next(
        (f"{name}: {outcome['why']}" for name, outcome in second.steps.items() if "stopped" in outcome), ""
    )
    if prompt > _PROMPT_SECONDS or score > _SCORE_SECONDS or worst > _HOSTILE_SECONDS:
        problem = f"a prompt takes {prompt:.2g} s, a score {score:.2g} s, the slowest {worst:.2g} s ({where})"
    fine = (
        f"a prompt {1000 * prompt:.2g} ms, a score {1000 * score:.2g} ms, the slowest {1000 * worst:.2g} ms"
    )
    return _verdict("time", problem, fine)


def _memory(outcome: Mapping[str, Any]) -> Finding:
    if "grown" not in outcome:
        return Finding(
            "memory", FAILED, one_line(outcome.get("error") or outcome.get("why") or "it could not be tried")
        )
    text = f"{max(0, outcome['grown']) / 1024:,.0f} KiB more after {outcome['scores']} scores of {outcome['text']} characters"
    return _verdict("memory", text if outcome["grown"] > _GROWTH else "", text)


def _texts(second: Trial, point: str, names: Sequence[str]) -> Finding:
    count = 0
    for name in names:
        outcome = second.steps.get(f"text: {name}", {"stopped": True, "why": "it was not reached"})
        if "stopped" in outcome or "error" in outcome:
            return Finding(point, FAILED, one_line(f"{name}: {outcome.get('error') or outcome['why']}"))
        for score in outcome["scores"]:
            count += 1
            if "error" in score:
                return Finding(point, FAILED, one_line(f"{name}: {score['error']}"))
            if score["value"] >= second.about["high"] and name != "answer in a crowd":
                return Finding(
                    point, FAILED, one_line(f"{name}: it earns the highest score: {score['reason']}")
                )
    return Finding(point, PASSED, f"{count} texts, each with a score and none with the highest")


def _variety(outcome: Mapping[str, Any]) -> Finding:
    if "distinct" not in outcome:
        return Finding(
            "variety", FAILED, one_line(outcome.get("error") or outcome.get("why") or "it could not be tried")
        )
    text = f"{outcome['distinct']} different prompts from {outcome['keys']} keys"
    return _verdict("variety", text if 2 * outcome["distinct"] < outcome["keys"] else "", text)


def _reach(outcome: Mapping[str, Any], kind: str, point: str, doing: str) -> Finding:
    if "seen" not in outcome:
        return Finding(
            point, FAILED, one_line(outcome.get("error") or outcome.get("why") or "it could not be tried")
        )
    seen: list[str] = outcome["seen"][kind]
    return _verdict(point, f"{doing} {', '.join(seen)}".strip() if seen else "", "left alone")
