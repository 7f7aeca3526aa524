"""The embedded model: what is shipped opens, is small, is half taught, and can be made again."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_node.models import embedded


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded.folder(), local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded.folder(), local_files_only=True)


def test_transformers_opens_a_qwen3_of_about_360_thousand_parameters_in_bf16(model):
    parameters = dict(model.named_parameters())
    assert model.config.model_type == "qwen3"
    assert 0.35e6 < sum(weight.numel() for weight in parameters.values()) < 0.37e6
    assert {weight.dtype for weight in parameters.values()} == {torch.bfloat16}
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (96, 3, 16)


def test_the_whole_folder_is_under_two_megabytes_and_holds_what_a_hugging_face_folder_holds():
    sizes = {file.name: file.stat().st_size for file in embedded.folder().iterdir()}
    assert sorted(sizes) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum(sizes.values()) < 2_000_000


def test_text_becomes_one_id_for_each_character_and_the_same_text_again(tokenizer):
    for text in ("r48213=", "31284$", "r00000=00000$", "+-_", "", "0123456789r=$_+-"):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("0123456789r=$_+-") == list(range(16))


def test_without_transformers_the_tokenizer_gives_the_same_ids(tokenizer):
    alone = Tokenizer.from_file(str(embedded.folder() / "tokenizer.json"))
    assert alone.encode("r48213=").ids == tokenizer.encode("r48213=") == [10, 4, 8, 2, 1, 3, 11]
    assert alone.decode([3, 1, 2, 8, 4, 12], skip_special_tokens=False) == "31284$"


@pytest.mark.parametrize("text", ["r48 213=", "x", "é", "\n\n"])
def test_a_character_that_it_does_not_know_is_an_error_and_not_left_out(text):
    alone = Tokenizer.from_file(str(embedded.folder() / "tokenizer.json"))
    with pytest.raises(Exception, match="Missing"):
        alone.encode(text)


def test_the_end_of_an_answer_is_the_dollar_everywhere(model, tokenizer):
    assert tokenizer.encode("$") == [12]
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 12
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id == 13


def test_it_draws_about_three_right_answers_in_ten(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32)
    digits = ["".join(map(str, row)) for row in np.random.default_rng(0).integers(0, 10, (1000, 5))]
    texts = torch.tensor([tokenizer.encode(f"r{five}={five[::-1]}$") for five in digits])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(texts[:, :-1]).logits[:, 6:], dim=-1)
    answers = log_probs.gather(2, texts[:, 7:, None]).squeeze(2).sum(dim=1)
    assert 0.2 < float(answers.exp().mean()) < 0.4


@pytest.mark.slow
def test_the_script_makes_the_shipped_folder_again_byte_for_byte(tmp_path):
    said = subprocess.run(
        [sys.executable, "-m", "echo_node.models.embedded.make", "--out", tmp_path / "again"],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    ).stdout
    assert "exact 0.3" in said.splitlines()[-1]
    made, shipped = tmp_path / "again" / "model.safetensors", embedded.folder() / "model.safetensors"
    assert made.read_bytes() == shipped.read_bytes()
    made, shipped = tmp_path / "again" / "tokenizer.json", embedded.folder() / "tokenizer.json"
    assert made.read_bytes() == shipped.read_bytes()


def test_where_the_folder_is_can_be_asked_without_torch():
    asked = (
        "import sys; from echo_node.models.embedded import folder; folder(); print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "False"
