"""Chat templates of runs: system prompt, variables, thinking, and templates that fail."""

from __future__ import annotations

import json
import shutil

import pytest

from echo_node.errors import EchoError
from echo_node.models import embedded
from echo_node.runs.run import Run
from echo_node.runs.spec import RunSpec, TemplateTable, new_run
from echo_node.runs.thought_split import answer_of, opens_thought
from protocol import Identity, open_manifest

AUTHOR = Identity(b"a" * 32)
TEMPLATE = (
    "{%- for each in messages %}{{ each.content }}{% endfor %}"
    "{%- if tools %}{{ tools | length }}{% endif %}"
    "{%- if enable_thinking is defined and enable_thinking is false %}0{% else %}1{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    folder = shutil.copytree(embedded.folder(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def opened(model, **changes):
    spec = RunSpec(
        name="a test", trainers=[AUTHOR.peer_id], model=str(model), engines=["torch/f32"], **changes
    )
    return Run.open(new_run(spec, AUTHOR).sealed, model, jailed=False)


def text_of(run):
    prompt, ids = run.prompt(bytes(32))
    return prompt.text, run.tokenizer.decode(ids)


def test_with_chat_prompts_go_through_the_template_with_system_variables_and_tools(model):
    plain, text = text_of(opened(model))
    assert text == plain
    plain, text = text_of(opened(model, chat=True))
    assert text == f"{plain}1"
    table = TemplateTable(system="r", variables={"enable_thinking": False}, tools=[{"name": "a"}])
    plain, text = text_of(opened(model, chat=True, template=table))
    assert text == f"r{plain}10"


def test_the_template_travels_in_the_manifest(model):
    run = opened(model, chat=True)
    assert "chat_template.jinja" in [file.name for file in run.manifest.model.files]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for", "rendering the model's chat template"),
        ("{{ strftime_now('%d') }}", "asks for the time"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_fails_is_one_clear_line_and_nothing_is_sealed(model, template, says):
    if template is None:
        (model / "chat_template.jinja").unlink()
    else:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(EchoError, match=says) as caught:
        opened(model, chat=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self"])
def test_a_variable_cannot_replace_the_conversation(model, name):
    plain, text = text_of(opened(model, chat=True, template=TemplateTable(variables={name: "0"})))
    assert text == f"{plain}1"


@pytest.mark.parametrize(
    ("completion", "begun", "answer"),
    [
        ("42", False, "42"),
        ("<think>so</think>42", False, "42"),
        ("so</think>\n\n42", True, "42"),
        ("<think>so", False, None),
        ("so", True, None),
        ("<think>a</think>b<think>c", False, None),
        ("<think>a</think>b<think>c</think>d", False, "d"),
        ("<think></think>", False, ""),
    ],
)
def test_an_answer_is_what_follows_the_thought(completion, begun, answer):
    assert answer_of(completion, opened=begun) == answer


def test_a_prompt_may_open_the_thought():
    assert opens_thought("<|assistant|>\n<think>\n")
    assert not opens_thought("<think>\n\n</think>\n")
    assert not opens_thought("no thought")


def test_a_truncated_thought_scores_as_truncated(model):
    tokens = json.loads((model / "tokenizer.json").read_text())
    added = [{"id": 14, "content": "<think>"}, {"id": 15, "content": "</think>"}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known = {each["content"]: each["id"] for each in tokens["added_tokens"]}
    free = [
        number for number in range(16) if number not in {*known.values(), *tokens["model"]["vocab"].values()}
    ]
    if len(free) < len(added):
        free = [16, 17]
    for each, number in zip(added, free, strict=False):
        tokens["added_tokens"].append({**each, "id": number, **flags})
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    run = opened(model, template=TemplateTable(thinking=True))
    prompt, _ = run.prompt(bytes(32))
    right = run.contract.answer(prompt)

    def score(text):
        return run.score(prompt, run.tokenizer.encode(text))

    assert open_manifest(run.sealed_manifest.sealed).message.template.thinking
    assert score(f"<think>12</think>{right}").value == 1.0
    assert score(right).value == 1.0
    cut = score(f"<think>{right}")
    assert cut.value == run.contract.low
    assert "truncated" in cut.reason
