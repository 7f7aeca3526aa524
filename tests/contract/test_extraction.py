"""The answer in a completion: the last whole one, found in one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract.extraction import LONGEST, WAYS, asking, extract, written

MARKS = ("<answer>", "</answer>", "\\boxed", "{", "}", "\\", "answer", "Answer:", "\n", "*", "x")
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="{}\\<>*:"), max_size=60)
MIXED = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=60).map("".join)


@pytest.mark.parametrize(
    ("completion", "way", "answer"),
    [
        ("I think <answer> 42 </answer> is it", "tags", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "tags", "2"),
        ("<answer>1</answer> and <answer>2", "tags", "1"),
        ("<answer><answer>1</answer>", "tags", "1"),
        ("</answer>1<answer>", "tags", None),
        ("<answer></answer>", "tags", None),
        ("42", "tags", None),
        ("so \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2}", "boxed", "2"),
        ("\\boxed{1} \\boxed{2", "boxed", "1"),
        ("\\boxed{a \\boxed{b} c}", "boxed", "b"),
        ("\\boxed {\\{1, 2\\}}", "boxed", "\\{1, 2\\}"),
        ("\\boxed{\\}}", "boxed", "\\}"),
        ("{\\boxed}{1}", "boxed", None),
        ("The answer: 7\nI am sure", "after", "7"),
        ("**Answer:** 7", "after", "7"),
        ("ANSWER : 7", "after", "7"),
        ("Answer: 1\nAnswer: 2", "after", "2"),
        ("Answer:", "after", None),
        ("reanswer: 7", "after", None),
        ("one\ntwo\n\n", "last-line", "two"),
        ("", "last-line", None),
        (" 42\n", "whole", "42"),
    ],
)
def test_the_last_whole_answer_counts(completion, way, answer):
    assert extract(completion, way) == answer


@given(PLAIN, PLAIN, st.sampled_from(WAYS))
def test_what_was_written_is_found_again(before, answer, way):
    wanted = answer.strip()
    if way in {"after", "last-line"}:
        wanted = " ".join(wanted.split())
    text = written(wanted, way) if way == "whole" else f"{before}\n{written(wanted, way)}"
    if way == "last-line" and not wanted:
        return
    assert extract(text, way) == (wanted or None)


@given(MIXED, st.sampled_from(WAYS))
def test_an_answer_is_a_piece_of_the_text_and_never_too_long(text, way):
    answer = extract(text, way, longest=20)
    assert answer is None or (answer in text and 0 < len(answer) <= 20 and answer == answer.strip())


@given(MIXED, MIXED, st.sampled_from(("tags", "boxed")))
def test_what_follows_a_whole_answer_and_is_none_leaves_it(text, after, way):
    marked = f"{text} {written('right', way)} "
    if "boxed" in after or "answer" in after:
        return
    assert extract(marked + after, way) == "right"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "piece",
    ["<answer>", "</answer>", "\\boxed{", "{", "}", "\\", "answer ", "answer:", " ", "\n", "\x00", "x", "*"],
    ids=ascii,
)
def test_a_megabyte_of_marks_is_read_once(way, piece):
    """Quadratic time would take hours; the test's own deadline is two minutes."""
    text = piece * (1_000_000 // len(piece))
    answer = extract(text, way)
    assert answer is None or answer in text


def test_an_endless_answer_is_none():
    assert extract(written("9" * LONGEST, "tags"), "tags") == "9" * LONGEST
    assert extract(written("9" * (LONGEST + 1), "tags"), "tags") is None


@pytest.mark.parametrize("way", WAYS)
def test_every_way_can_be_asked_for(way):
    assert asking(way).endswith(".")
