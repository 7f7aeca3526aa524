"""The page of the benchmarks: it says what was measured, and cannot drift from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import PAGE, RESULTS, results, run, this_machine
from benchmarks.report import NOT_RUN, Machine, Result, page, read_results, write_results
from benchmarks.report_catalogue import BENCHMARKS, PARTS, Bound

FOLDER = Path(benchmarks.__file__).parent
MACHINE = Machine("a processor", 2, 8.2, "3.11.2", "2.13.0")


def result(**figures):
    return Result(figures, "python -m benchmarks.wire", "2026-01-31", 12.3, 0.4, MACHINE)


def rows(text, name):
    return [line for line in text.splitlines() if line.startswith(f"| {name} |")]


def test_the_page_is_what_the_program_writes_from_the_results():
    assert PAGE.read_text("utf-8") == page(results()), "run: python -m benchmarks --page"


def test_the_results_are_kept_as_the_program_writes_them():
    assert write_results(results()) == RESULTS.read_text("utf-8")


def test_every_program_of_the_folder_has_a_row_or_is_a_part_of_one_that_has():
    programs = {
        file.stem
        for file in FOLDER.glob("*.py")
        if '__name__ == "__main__"' in file.read_text("utf-8") and file.stem != "__main__"
    }
    assert programs == BENCHMARKS.keys() | PARTS.keys()
    assert set(PARTS.values()) <= BENCHMARKS.keys()
    assert all(rows(page({}), name) for name in BENCHMARKS)


def test_what_was_never_run_says_so_and_tells_what_is_asked_of_it():
    first, *asked = rows(page({}), "wire")
    assert NOT_RUN in first
    assert [row.split(" | ")[1:4] for row in asked] == [
        ["seal_over_bare", "", "≥ 0.6"],
        ["open_over_bare", "", "≥ 0.6"],
    ]


def test_a_figure_that_keeps_its_bound_holds_and_one_that_does_not_falls_short():
    told = page({"wire": result(seal_over_bare=0.6, open_over_bare=0.599, other=7)})
    ran, seal, opened, other = rows(told, "wire")
    assert "| 2026-01-31 | 12 | 0.4 | 1 |" in ran
    assert seal.endswith("| 0.6 | ≥ 0.6 | holds |")
    assert opened.endswith("| 0.599 | ≥ 0.6 | **falls short** |")
    assert other == "| wire | other | 7 |  |  |"
    assert f"Machine 1: {MACHINE}." in told


def test_a_bound_whose_figure_is_missing_is_shown_as_not_measured():
    assert rows(page({"wire": result(seal_over_bare=0.7)}), "wire")[-1].endswith(
        "|  | ≥ 0.6 | not measured |"
    )


def test_figures_within_figures_have_rows_of_their_own_and_text_cannot_break_the_table():
    told = page({"verify": result(caught={"edited": 1.0}, words="one | two\nthree")})
    assert "| verify | caught/edited | 1 |  |  |" in told
    assert "| verify | words | one / two three |  |  |" in told


@pytest.mark.parametrize(
    ("bound", "value", "holds"),
    [
        (Bound("≥", 2), 2, True),
        (Bound("≥", 2), 1.9, False),
        (Bound("≤", 2), 2, True),
        (Bound("≤", 2), 2.1, False),
        (Bound("=", 0), 0, True),
        (Bound("=", 0), 1, False),
    ],
)
def test_a_bound_holds_up_to_its_edge(bound, value, holds):
    assert bound.holds(value) is holds


def test_results_are_read_as_they_were_written_and_stand_in_the_order_of_the_catalogue():
    kept = {"load": result(groups_per_s=1.5), "wire": result(seal_over_bare=0.7)}
    text = write_results(kept)
    assert read_results(text) == kept
    assert text.index('"wire"') < text.index('"load"')


def test_the_machine_is_told_by_what_it_can_do_and_not_by_its_name():
    told = this_machine()
    assert told.cores >= 1
    assert told.memory_gb > 0
    assert not any("/" in part and part.startswith("/") for part in str(told).split())


@pytest.mark.parametrize(
    ("program", "figures"),
    [
        ('print("a table"); print(\'{"ratio": 2.5}\')', {"ratio": 2.5}),
        ("print('{\"ratio\": 2.5}'); raise SystemExit(1)", None),
        ('print("a table")', None),
        ("print([1])", None),
    ],
)
def test_only_the_last_line_of_a_program_that_ended_well_is_a_result(program, figures, tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "crafted.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    assert run("crafted") == figures


def test_a_name_that_is_no_benchmark_is_refused_with_those_there_are():
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "no benchmark is called nothing" in ended.stderr
    assert "wire" in ended.stderr
