"""Text to ids and back, and what a hostile chat template cannot do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Words
from tokenizers import decoders, models, pre_tokenizers

from echo_node.contract.jail.chat_template import LONGEST_TEMPLATE
from echo_node.errors import ConfigError, ContractError, DefectError, StoreError
from echo_node.models.embedded import folder as embedded
from echo_node.runs.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": " What is 2 < 3? "}]


@pytest.fixture(scope="module")
def digits():
    return Tokenizer.from_folder(embedded())


@pytest.fixture
def chat(tmp_path):
    """A byte-level tokenizer with a template to be chosen."""
    words = Words(
        models.BPE({char: place for place, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    words.enable_truncation(4)
    words.enable_padding(length=64)
    words.save(str(tmp_path / "tokenizer.json"))

    def with_template(template, **settings):
        written = {
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
            "chat_template": template,
            **settings,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
        return Tokenizer.from_folder(tmp_path)

    return with_template


def test_a_stop_text_is_one_token_or_refused_with_what_it_is(chat):
    tokenizer = chat(CHATML)
    newline = tokenizer.stop_token("\n")
    assert tokenizer.decode([newline], ()) == "\n"
    assert tokenizer.stop_token("<|im_end|>") == tokenizer.encode("<|im_end|>")[0]
    with pytest.raises(ConfigError, match=r"'ab' is no single token of this model, but \['a', 'b'\]"):
        tokenizer.stop_token("ab")
    with pytest.raises(ConfigError, match="is no single token"):
        tokenizer.stop_token("")


def test_a_stop_text_that_the_model_cannot_write_is_refused(digits):
    assert digits.stop_token("=") == 11
    with pytest.raises(ContractError, match="turning a text into tokens"):
        digits.stop_token("\n")


def test_the_embedded_task_reads_as_people_write_it(digits):
    assert digits.encode("r48213=").tolist() == [10, 4, 8, 2, 1, 3, 11]
    assert digits.vocab_size == 16
    assert digits.end_tokens == {12}
    assert digits.decode(np.array([3, 1, 2, 8, 4, 12])) == "31284"


def test_only_a_final_end_token_is_left_out(digits):
    assert digits.decode([3, 12, 4]) == "3$4"
    assert digits.decode([3, 12, 12]) == "3$"
    assert digits.decode([12]) == digits.decode([]) == ""
    assert digits.decode([3, 12], end_tokens=()) == "3$"
    assert digits.decode([3, 4], end_tokens={4}) == "3"


def test_a_text_that_the_model_cannot_read_names_the_contract(digits):
    for text in ("r4x=", "\ud800"):
        with pytest.raises(ContractError, match="turning a text into tokens"):
            digits.encode(text)


def test_ids_that_are_none_are_a_defect(digits):
    with pytest.raises(DefectError, match="turning tokens into text"):
        digits.decode([-1])


def test_a_prompt_is_taken_whole_whatever_the_file_says_of_truncation_and_padding(chat):
    text = "twelve chars, ünïcode ☃"
    tokenizer = chat(None)
    assert tokenizer.encode(text).size == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("").size == 0


def test_special_tokens_in_a_text_are_single_ids_and_keep_their_names(chat):
    tokenizer = chat(None)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids.tolist() == [256, tokenizer.encode("a")[0], 257]
    assert tokenizer.decode(ids) == "<|im_start|>a"
    assert tokenizer.vocab_size == 258


def test_messages_become_the_text_that_the_model_knows(chat):
    tokenizer = chat(CHATML)
    assert tokenizer.has_template
    rendered = "<|im_start|>user\nWhat is 2 < 3?<|im_end|>\n"
    assert tokenizer.render(HELLO) == rendered + "<|im_start|>assistant\n"
    assert tokenizer.render(HELLO, add_generation_prompt=False) == rendered
    assert chat("{{ eos_token }}{{ x }}").render([], x=7) == "<|im_end|>7"
    assert chat("{{ messages | tojson }}").render([{"a": "ü<"}]) == '[{"a": "ü<"}]'


def test_a_template_is_the_same_as_transformers_renders_it(chat, tmp_path):
    from transformers import PreTrainedTokenizerFast

    chat(CHATML)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    conversation = [*HELLO, {"role": "assistant", "content": "Yes"}, *HELLO]
    wanted = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_folder(tmp_path).render(conversation) == wanted


def test_the_template_is_found_wherever_folders_keep_it(chat, tmp_path, digits):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert chat(named).render([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert chat(named).render([]) == "F"
    assert not digits.has_template
    with pytest.raises(ContractError, match="no chat template"):
        digits.render(HELLO)


HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.items() }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "files": "{% include '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "width": "{{ '{:1000000000}'.format(1) }}",
    "width by item": "{{ '{:1000000000}'['format'](1) }}",
    "width by filter": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "width by map": "{{ (['{:1000000000}'] | map(attribute='format') | first)(1) }}",
    "padding": "{{ 'a'.ljust(10 ** 9) }}",
    "repetition": "{{ 'a' * 1000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "filter": "{{ 'a' | center(1000000000) }}",
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}",
    "doubling by ~": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s | length }}",
    "doubling by +": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s | length }}",
    "doubling by join": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}{{ ns.s | length }}",
    "doubling by replace": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}{{ ns.s | length }}",
    "doubling by a block": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}{{ ns.s | length }}",
    "doubling of lists": "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s | length }}",
    "lists in lists": "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s | tojson | length }}",
    "a macro that calls itself": "{% macro m(s) %}{{ m(s ~ s) }}{% endmacro %}{{ m('xxxxxxxx') | length }}",
    "macros in macros": "{% macro a() %}"
    + "x" * 9999
    + "{% endmacro %}"
    + "".join(
        f"{{% macro {chr(98 + n)}() %}}" + f"{{{{ {chr(97 + n)}() }}}}" * 30 + "{% endmacro %}"
        for n in range(6)
    )
    + "{{ g() | length }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slices": "{{ [1] | slice(1000000000) | list | length }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "digits": "{% set ns = namespace(n=10) %}{% for i in range(40) %}{% set ns.n = ns.n + ns.n %}{% endfor %}"
    "{{ 'x' * ns.n }}",
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
    "the clock": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_refused(case, chat):
    tokenizer = chat(HOSTILE[case])
    with pytest.raises(ContractError, match="rendering the model's chat template"):
        tokenizer.render(HELLO)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 | no_such_filter }}", "x" * (LONGEST_TEMPLATE + 1)])
def test_a_broken_template_hurts_only_whoever_renders_it(template, chat):
    tokenizer = chat(template)
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    with pytest.raises(ContractError, match="rendering the model's chat template"):
        tokenizer.render(HELLO)


@pytest.mark.parametrize("template", [7, [{"name": "default", "template": 7}], ["default"]])
def test_a_template_that_is_no_text_is_refused_when_the_folder_is_read(template, chat):
    with pytest.raises(StoreError):
        chat(template)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_broken_folder_is_a_store_error(name, content, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded() / file, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(StoreError):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_settings_has_a_tokenizer_and_no_end(tmp_path):
    shutil.copy(embedded() / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.end_tokens == frozenset()
    assert tokenizer.decode([3, 12]) == "3$"


def test_reading_text_needs_no_torch_and_no_transformers():
    code = "import echo_node.runs.tokenizer, echo_node.engine.base, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]
