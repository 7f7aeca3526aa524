"""Data sets of runs: read, checked, cut into two parts, pinned by hash, drawn through the jail."""

from __future__ import annotations

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import load
from echo_node.contract.data_rows import rows_of
from echo_node.contract.extraction import asking
from echo_node.errors import ConfigError, ContractError, EchoError
from echo_node.runs.data_source import choose_files, read_source
from echo_node.runs.dataset import (
    FILE,
    DataTable,
    Row,
    check_rows,
    cut,
    describe,
    is_held_out,
    normalise,
    write_rows,
)
from echo_node.runs.run import Run
from echo_node.runs.spec import RunSpec, SamplingTable, new_run, open_run, write_run
from protocol import Identity, open_manifest
from protocol.digest import derive
from tests.chat_model import write_chat_model

AUTHOR = Identity(b"a" * 32)
NONCE = b"n" * 32
ROWS = [{"question": f"r{number:05d}=", "answer": f"step by step #### {number}"} for number in range(40)]
GSM = DataTable(source="x.jsonl", problem="question", pattern="#### (.+)")


def lines(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path, **changes):
    return DataTable(**{"source": str(path), "problem": "question", "pattern": "#### (.+)", **changes})


def rows_in(path, **changes):
    return check_rows(read_source(str(path), "train"), table(path, **changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


def spec(data, model, **changes):
    return RunSpec(
        model=str(model),
        name="a test",
        trainers=[AUTHOR.peer_id],
        contract="math@1",
        params={"way": "whole"},
        data=data,
        engines=["torch/f32"],
        sampling=SamplingTable(max_prompt=80, max_tokens=8),
        **changes,
    )


@pytest.fixture
def rows():
    return check_rows(((f"row {at}", row) for at, row in enumerate(ROWS)), GSM)


def test_the_same_rows_come_from_json_lines_json_csv_and_parquet(tmp_path, rows):
    lines(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert rows_in(tmp_path / name) == rows
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert rows_in(tmp_path / "a.parquet") == rows


def test_of_a_hubs_folder_the_files_of_the_split_are_taken_in_one_form(tmp_path):
    for name in ("main/train-0.parquet", "main/test-0.parquet", "train.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert choose_files(tmp_path, "train", "a/b") == [tmp_path / "train.jsonl"]
    assert choose_files(tmp_path, "test", "a/b") == [tmp_path / "main/test-0.parquet"]
    with pytest.raises(ConfigError, match="no data file of the split 'dev'"):
        choose_files(tmp_path, "dev", "a/b")


def test_the_answer_is_what_the_pattern_finds(rows):
    assert rows[7] == Row("r00007=", "7", "step by step #### 7")


@given(st.text(max_size=40), st.binary(min_size=32, max_size=32), st.floats(0, 0.99))
def test_whether_a_row_is_held_out_depends_on_its_normalised_problem_alone(problem, nonce, share):
    spelled = f"  {problem} \n"
    assert normalise(spelled) == normalise(problem)
    assert is_held_out(spelled, nonce, share) == is_held_out(problem, nonce, share)


def test_the_cut_ignores_order_and_answers_and_follows_the_nonce(rows):
    train, held = cut(rows, NONCE, 0.3)
    assert cut(rows[::-1], NONCE, 0.3) == (train, held)
    other = [Row(row.problem, "other", "other") for row in rows]
    assert [row.problem for row in cut(other, NONCE, 0.3)[1]] == [row.problem for row in held]
    assert cut(rows, b"m" * 32, 0.3)[1] != held
    assert {*train} | {*held} == {*rows}
    assert not {*train} & {*held}
    assert 4 <= len(held) <= 20


def test_held_out_rows_are_never_drawn_for_training(rows):
    train, held = cut(rows, NONCE, 0.3)
    data = write_rows(train, held)
    found = describe(data, len(held))
    task = load("math", "1", {"way": "whole"}, rows_of(data, found.rows, found.held_out, "train"))
    drawn = {task.prompt(derive("k", number.to_bytes(4, "big"))).text.split("\n")[0] for number in range(600)}
    assert drawn == {row.problem for row in train}
    test = load("math", "1", {"way": "whole"}, rows_of(data, found.rows, found.held_out, "held-out"))
    measured = {test.prompt(derive("k", n.to_bytes(4, "big"))).text.split("\n")[0] for n in range(600)}
    assert measured == {row.problem for row in held}


def test_a_run_with_data_is_drawn_and_scored_in_the_jail_and_measured_on_what_is_held_out(tmp_path, model):
    path = lines(tmp_path / "gsm.jsonl")
    notes = []
    made = new_run(spec(table(path, held_out=0.25), model), AUTHOR, note=notes.append)
    write_run(tmp_path / "run", made)
    manifest = open_manifest(made.sealed).message
    assert manifest.data[0].rows == 40
    assert any("rows to train on" in each for each in notes)
    run = open_run(tmp_path / "run")
    held = run.for_evaluation()
    try:
        train = {json.loads(line)["problem"] for line in made.data.splitlines()[: -manifest.data[0].held_out]}
        prompts = [prompt for prompt, _ in run.prompts([derive("s", bytes([n])) for n in range(50)])]
        assert {prompt.text.split("\n")[0] for prompt in prompts} <= train
        answer = run.tokenizer.encode(prompts[0].data["answer"])
        assert run.score(prompts[0], answer).value == 1.0
        others = [prompt for prompt, _ in held.prompts([derive("s", bytes([n])) for n in range(50)])]
        assert not {prompt.text.split("\n")[0] for prompt in others} & train
        assert manifest.data[0].blob in run.files()
    finally:
        run.close()
        held.close()


def test_a_data_set_of_another_hash_is_refused(tmp_path, model):
    made = new_run(spec(table(lines(tmp_path / "gsm.jsonl")), model), AUTHOR)
    file = tmp_path / FILE
    file.write_bytes(made.data.replace(b"r00001=", b"r99999="))
    with pytest.raises(ConfigError, match="is not the data set that the manifest names"):
        Run.open(made.sealed, model, jailed=False, data=file)
    with pytest.raises(ConfigError, match="is not the data set"):
        Run.open(made.sealed, model, jailed=False, data=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="it has 40 rows"):
        rows_of(made.data, 41, 1, "train")


def test_a_contract_that_reads_no_rows_refuses_a_data_set(tmp_path, model):
    path = lines(tmp_path / "gsm.jsonl")
    wrong = spec(table(path), model).model_copy(update={"contract": "digits-reverse@1", "params": {}})
    with pytest.raises(ContractError, match="reads no data set"):
        new_run(wrong, AUTHOR)


def test_prompts_over_the_limit_are_left_out_with_a_count(tmp_path, model):
    long = {"question": "r" + "1" * 90 + "=", "answer": "#### 9"}
    notes = []
    made = new_run(spec(table(lines(tmp_path / "a.jsonl", [*ROWS, long])), model), AUTHOR, note=notes.append)
    assert "1 of 41 prompts are over 80 tokens and left out" in notes
    assert open_manifest(made.sealed).message.data[0].rows == 40


def test_limits_that_are_left_open_follow_from_the_data(tmp_path, model):
    notes = []
    asked = spec(table(lines(tmp_path / "a.jsonl")), model).model_copy(
        update={"sampling": SamplingTable(), "params": {"way": "last-line"}}
    )
    sampling = open_manifest(new_run(asked, AUTHOR, note=notes.append).sealed).message.sampling
    assert sampling.max_prompt == len("r00001=\n" + asking("last-line") + "\n"), "as the model reads it"
    assert sampling.max_tokens == 128
    assert any(
        f"max_prompt {sampling.max_prompt}, max_tokens {sampling.max_tokens}" in each for each in notes
    )


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ([{"question": "1+1=", "answer": "#### "}], {}, "line 1 of a.jsonl: data.pattern"),
        ([{"question": "1+1=", "answer": "  "}], {"pattern": ""}, "line 1 of a.jsonl: the answer is empty"),
        ([{"question": " ", "answer": "#### 2"}], {}, "the field 'question' is empty"),
        (
            [{"question": "1+1=", "answer": "#### 2"}, {"question": " 1+1=\n", "answer": "#### 3"}],
            {},
            "line 2 of a.jsonl has the same problem as line 1 of a.jsonl",
        ),
        ([{"q": "1", "answer": "#### 2"}], {}, "has no field 'question'; it has q, answer"),
        ([{"question": None, "answer": "#### 2"}], {}, "has no field 'question'"),
        ([{"question": ["1"], "answer": "#### 2"}], {}, "the field 'question' is a list"),
        ([{"question": True, "answer": "#### 2"}], {}, "is a bool"),
        (["no table"], {}, "line 1 of a.jsonl is no table of fields"),
        ([], {}, "holds no row"),
        (ROWS, {"pattern": "####"}, "has 0 groups"),
        (ROWS, {"pattern": "(("}, "reading data.pattern"),
    ],
)
def test_bad_data_is_one_clear_line_and_nothing_is_sealed(tmp_path, model, rows, changes, says):
    path = lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")) as caught:
        new_run(spec(table(path, **changes), model), AUTHOR)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"question": 1\n', "line 1 of a.jsonl"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.parquet", b"PAR1 no", "reading .*a.parquet"),
        ("a.bin", b"x", "is no .jsonl"),
        ("a.csv", b'question,answer\n"1,#### 2\n', "reading .*a.csv"),
    ],
)
def test_a_file_that_is_no_data_is_one_clear_line(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EchoError, match=says) as caught:
        rows_in(tmp_path / name)
    assert "\n" not in str(caught.value)
