"""A model becomes the same state whatever files it comes in; what is none is one clear line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.models.bf16_file import to_bf16
from echo_node.models.model_source import find_model, open_model
from echo_node.models.safetensors_file import map_tensors
from echo_node.runs.model_description import describe_model
from tests.models import ggufs

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tied Llama model in bf16, in one file, with the tokenizer of the embedded model."""
    folder = tmp_path_factory.mktemp("made") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.folder() / name, folder / name)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "llama")


def weights(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder):
    tensors = weights(folder)
    places = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(sorted(tensors))}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == part}, folder / part)
    (folder / "model.safetensors").unlink()
    write_index(folder, places)
    return places


def write_index(folder, places, **others):
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": places, **others})
    (folder / "model.safetensors.index.json").write_text(text)


def shards_with_a_bare_index(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard(folder)}))


def as_float32(folder):
    rewrite(folder, {name: each.to(torch.float32) for name, each in weights(folder).items()})


def as_float16(folder):
    rewrite(folder, {name: each.to(torch.float16) for name, each in weights(folder).items()})


def with_a_copy_of_the_head(folder):
    tensors = weights(folder)
    rewrite(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def without_the_prefix(folder):
    rewrite(folder, {name.removeprefix("model."): each for name, each in weights(folder).items()})


def with_stored_masks(folder):
    rewrite(folder, {**weights(folder), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (shard, None),
        (shards_with_a_bare_index, "one file"),
        (as_float32, "float32 weights are cast to bfloat16"),
        (as_float16, "float16 weights are cast to bfloat16"),
        (with_a_copy_of_the_head, "lm_head.weight repeats model.embed_tokens.weight"),
        (without_the_prefix, "names of the model's own parameters"),
        (with_stored_masks, "constants that are no parameters are left out"),
        (lambda folder: (as_float32(folder), with_a_copy_of_the_head(folder), shard(folder)), "float32"),
    ],
)
def test_whatever_files_a_model_comes_in_it_is_the_same_state(folder, tmp_path, change, note):
    tensors = {name: each.to(torch.float16).to(torch.bfloat16) for name, each in weights(folder).items()}
    rewrite(folder, tensors)  # values that both 16-bit types have
    root = describe_model(folder).root
    change(folder)
    notes = []
    taken = open_model(str(folder), cache=tmp_path / "cache", note=notes.append)
    assert describe_model(taken).root == root
    assert (taken == folder) == (note is None), "what fits already is not copied"
    assert note is None or any(note in each for each in notes)
    again = []
    assert open_model(str(folder), cache=tmp_path / "cache", note=again.append) == taken
    assert not again, "the second time nothing is written"
    assert LlamaForCausalLM.from_pretrained(taken).dtype == torch.bfloat16


def test_a_bf16_gguf_file_is_the_same_state_as_the_folder(tmp_path):
    packed, plain = ggufs.bf16_twins()
    converted = find_model(str(ggufs.write(tmp_path / "tiny.gguf", packed)), cache=tmp_path / "cache")
    folder = shutil.copytree(converted, tmp_path / "folder")
    rewrite(folder, {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in plain.items()})
    found = describe_model(converted)
    assert (found.root, found.layout) == (describe_model(folder).root, describe_model(folder).layout)
    assert open_model(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache") == converted


def test_a_file_that_changed_since_is_taken_in_anew(folder, tmp_path):
    as_float32(folder)
    first = open_model(str(folder), cache=tmp_path / "cache")
    tensors = weights(folder)
    tensors["model.norm.weight"][0] = 7.0
    rewrite(folder, tensors)
    second = open_model(str(folder), cache=tmp_path / "cache")
    assert describe_model(second).root != describe_model(first).root


def test_casting_rounds_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    expected = values.to(torch.bfloat16)
    found = torch.from_numpy(to_bf16(values.numpy()).view(np.int16)).view(torch.bfloat16)
    finite = ~expected.isnan()
    assert torch.equal(found[finite], expected[finite])
    assert found[~finite].isnan().all(), "what is no number stays none"


def test_end_tokens_are_those_of_both_configurations(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert describe_model(folder).end_tokens == (2, 5)


def test_the_chat_template_and_the_files_of_the_tokenizer_travel_with_the_model(folder):
    for name in ("chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    names = [file.name for file in describe_model(folder).files]
    assert names == sorted(names)
    assert {"chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"} < {*names}
    assert "pytorch_model.bin" not in names


def _not_a_number(folder):
    tensors = weights(folder)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    rewrite(folder, tensors)


def _infinite(folder):
    tensors = {name: each.to(torch.float32) for name, each in weights(folder).items()}
    tensors["model.norm.weight"][0] = 3.4e38  # beyond what bf16 has
    rewrite(folder, tensors)


def _missing_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _index_that_lies(folder):
    places = shard(folder)
    first = min(places)
    places[first] = next(name for name in places.values() if name != places[first])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _index_names_nothing(folder):
    places = shard(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**places, "model.ghost": min(places.values())}})
    )


def _one_tensor_in_two_shards(folder):
    places = shard(folder)
    first = folder / min(places.values())
    tensors, second = load_file(first), folder / max(places.values())
    save_file({**load_file(second), min(tensors): tensors[min(tensors)]}, second)


def _out_of_the_folder(folder):
    places = shard(folder)
    index = {name: f"../{place}" for name, place in places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _wrong_shape(folder):
    tensors = weights(folder)
    tensors["model.norm.weight"] = torch.ones(33, dtype=torch.bfloat16)
    rewrite(folder, tensors)


def _lacking(folder):
    tensors = weights(folder)
    del tensors["model.norm.weight"]
    rewrite(folder, tensors)


def _quantised(folder):
    tensors = weights(folder)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    rewrite(folder, tensors)


def _tied_but_different(folder):
    tensors = weights(folder)
    rewrite(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


def _pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_not_a_number, r"layers\.1\.mlp\.up_proj\.weight hold a value that is infinite or not a number"),
        (_infinite, r"model\.norm\.weight hold a value that is infinite"),
        (_missing_shard, "lacks model-00002-of-00002.safetensors, which its index names"),
        (_index_that_lies, "the index of .* does not place there"),
        (_index_names_nothing, "places 'model.ghost' in model-00001"),
        (_one_tensor_in_two_shards, "stands in two shards"),
        (_out_of_the_folder, "does not say in which files"),
        (_wrong_shape, r"model\.norm\.weight has the shape \(33,\), and config.json calls for \(32,\)"),
        (_lacking, r"the weights lack model\.norm\.weight"),
        (_quantised, "has the type I8, which cannot be trained"),
        (_tied_but_different, "ties lm_head.weight to model.embed_tokens.weight, and the two differ"),
        (_pickle, "pytorch_model.bin, a pickle"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04 a zip"),
            "no safetensors file",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_a_bad_model_is_one_clear_line_and_nothing_is_kept(folder, tmp_path, harm, says):
    harm(folder)
    with pytest.raises(ConfigError, match=says) as caught:
        describe_model(open_model(str(folder), cache=tmp_path / "cache"))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob(".partial-*"))


@pytest.mark.parametrize("harm", ["overlap", "gap", "twice", "beyond"])
def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path, harm):
    entry = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
    other = {
        **entry,
        "data_offsets": {"overlap": [4, 12], "gap": [10, 18], "beyond": [8, 99]}.get(harm, [8, 16]),
    }
    text = json.dumps({"a": entry, "b": other})
    if harm == "twice":
        text = text.replace('"b"', '"a"')
    data = text.encode()
    (tmp_path / "x.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(18))
    with pytest.raises(ConfigError, match=r"overlap or leave a gap|twice|does not lie|bytes that no tensor"):
        map_tensors(tmp_path / "x.safetensors")


def test_reading_a_model_imports_neither_torch_nor_transformers():
    code = "import sys, echo_node.models.model_source; print(*{'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()
