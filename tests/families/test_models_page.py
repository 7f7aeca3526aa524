"""docs/models.md: its table has every family, and says of each what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from echo_node.models.families import FAMILIES
from tests.families import zoo

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"
]


def measured():
    start = next(place for place, row in enumerate(ROWS) if row[0] == "model")
    names = ROWS[start]
    return {row[0]: dict(zip(names, row, strict=True)) for row in ROWS[start + 2 :]}


def test_the_page_names_the_families_that_the_code_has():
    end = next(place for place, row in enumerate(ROWS) if row[0] == "model")
    named = {family for row in ROWS[2:end] for family in re.findall(r"`(\w+)`", row[0])}
    assert named == set(FAMILIES)


def test_the_table_has_a_row_for_every_model_and_a_figure_or_a_refusal_in_every_cell():
    rows = measured()
    assert list(rows) == list(zoo.MODELS)
    for name, row in rows.items():
        assert row["publish"] == "bit for bit"
        assert float(row["trainer"]) < 1e-4
        assert float(row["torch/f32"]) < 1e-4
        for kind, most in {"f32": 1e-4, "f16": 0.03, "bf16": 0.2, "q8_0": 0.6}.items():
            refused = name in zoo.REFUSED_BY_LLAMA or (kind == "f32" and name in zoo.REFUSED_AS_F32)
            cell = row[f"llama/{kind}"]
            assert cell.startswith("refused (") if refused else float(cell) < most


def test_every_refusal_of_the_table_has_its_reason():
    numbers = {int(number) for number in re.findall(r"refused \((\d+)\)", PAGE)}
    assert numbers == {int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)}
