"""The GGUF file of a model: its layout, what is refused, and writing in place."""

from __future__ import annotations

import json
import resource

import gguf
import numpy as np
import pytest
import torch

from echo_node.engine.base import Change, TensorBytes
from echo_node.engine.gguf import BLOCKED, KINDS, GgufFile, encode, file_size
from echo_node.engine.gguf_map import read_plan
from echo_node.errors import EngineError
from tests.engine import models
from tests.engine.deltas import Training

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 96,
    "intermediate_size": 40,  # rows that no blocks of 32 fill
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


def config_folder(at, **settings):
    changed = {**CONFIG, **settings}
    (at / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if v != "absent"}))
    return at


def family(at, name, **settings):
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name]
    return config_folder(at, model_type=name, architectures=[f"{kind}ForCausalLM"], **settings)


def random_weights(plan, dtype=torch.bfloat16, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return {
        name: models.tensor(torch.randn(place.shape, generator=draws).to(dtype))
        for name, place in plan.places.items()
    }


def floats(tensor):
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    values = torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.dtype])
    return values.float().numpy().reshape(tensor.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_of_gguf_finds_every_tensor_with_its_values(tmp_path, kind):
    plan = read_plan(config_folder(tmp_path))
    weights = random_weights(plan)
    file = GgufFile(tmp_path / "model.gguf", plan, kind)
    file.fill(weights)
    reader = gguf.GGUFReader(file.path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == {place.name for place in plan.places.values()}
    for name, place in plan.places.items():
        there = found[place.name]
        values = floats(weights[name])
        if "q_proj" in name or "k_proj" in name:  # llama.cpp wants the two halves of a head interleaved
            heads = 3 if "q_proj" in name else 1
            values = values.reshape(heads, 2, 16, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        wanted = kind
        if values.ndim == 1:
            wanted = "f32"
        elif kind in BLOCKED and values.shape[-1] % 32:
            wanted = "f16"
        assert there.tensor_type.name.lower() == wanted
        assert tuple(there.shape) == values.shape[::-1]
        exact = gguf.quants.quantize(values, there.tensor_type)
        assert there.data.tobytes() == exact.tobytes(), name
        assert there.data_offset == file.slots[name].offset
    file.close()


def test_the_header_says_what_the_config_says(tmp_path):
    plan = read_plan(family(tmp_path, "qwen3", head_dim=20, attention_bias=False, mlp_bias=False))
    file = GgufFile(tmp_path / "model.gguf", plan, "f16")
    fields = gguf.GGUFReader(file.path).fields
    said = {key: fields[key].contents() for key in fields if not key.startswith("GGUF.")}
    assert said["general.architecture"] == "qwen3"
    assert said["tokenizer.ggml.model"] == "none"
    assert said["qwen3.vocab_size"] == 40
    assert said["qwen3.attention.key_length"] == said["qwen3.attention.value_length"] == 20
    assert said["qwen3.rope.dimension_count"] == 20
    assert said["qwen3.rope.freq_base"] == 5000.0
    assert said["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert file_size(plan, "f16") <= file.size
    file.close()


def test_a_tied_output_is_left_out(tmp_path):
    tied = read_plan(config_folder(tmp_path, tie_word_embeddings=True)).places
    untied = read_plan(config_folder(tmp_path)).places
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert not tied.keys() - untied.keys()


def test_positions_are_found_under_their_old_and_their_new_names(tmp_path):
    new = config_folder(
        tmp_path, rope_theta="absent", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}
    )
    assert read_plan(new).theta == 7.0
    old = config_folder(tmp_path, rope_theta=8.0, rope_scaling={"type": "default"})
    assert read_plan(old).theta == 8.0
    assert read_plan(config_folder(tmp_path, rope_theta="absent")).theta == 10000.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_elements_that_are_put_make_the_file_that_is_written_anew(tmp_path, kind, dtype):
    plan = read_plan(config_folder(tmp_path))
    weights = random_weights(plan, dtype)
    file, anew = (GgufFile(tmp_path / name, plan, kind) for name in ("changed.gguf", "anew.gguf"))
    file.fill(weights)
    first = file.path.read_bytes()
    training = Training(weights)
    for _ in range(50):
        for change in training.step(32 if kind in BLOCKED else 1):
            file.put(change)
    anew.fill(training.weights())
    assert file.path.read_bytes() == anew.path.read_bytes()
    assert file.path.read_bytes() != first
    anew.fill(weights)
    assert anew.path.read_bytes() == first
    file.close()
    anew.close()


def test_blocks_of_q8_0_are_those_of_ggml_bit_for_bit():
    draws = np.random.default_rng(0)
    values = (draws.standard_normal((5000, 32)) * np.exp(draws.normal(0, 4, (5000, 1)))).astype(np.float32)
    values[:8] = 0
    values[8:16, 1:] = 0
    values[16:1000] = draws.integers(-254, 255, (984, 32)) / 2  # steps of one half: ties
    values[16:1000, 0] = 127
    values[20, 1:3] = 0.49999997, -0.49999997  # next to a tie
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    ours = encode(values.ravel().view(np.uint32), "f32", "q8_0")
    assert ours.tobytes() == theirs.tobytes()


def test_a_block_of_next_to_nothing_becomes_zeros_without_a_warning():
    values = np.full(32, 1e-40, np.float32)
    for kind in BLOCKED:
        cells = encode(values.view(np.uint32), "f32", kind)
        raw = np.frombuffer(cells.tobytes(), np.uint8)[None]
        kinds = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
        assert not gguf.quants.dequantize(raw, kinds[kind]).any()


def test_every_bf16_that_f16_can_hold_is_rounded_as_numpy_does():
    bits = np.arange(2**16, dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    held = np.abs(values) <= 65504
    halves = encode(bits[held], "bf16", "f16").view(np.float16)
    assert halves.tobytes() == values[held].astype(np.float16).tobytes()


@pytest.mark.parametrize(("kind", "most"), [("f16", 65504.0), ("q8_0", 65504.0 * 127), ("q4_0", 65504.0 * 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_type_cannot_hold_is_refused_and_nothing_is_written(tmp_path, kind, most, dtype):
    plan = read_plan(config_folder(tmp_path))
    weights = random_weights(plan, dtype)
    file = GgufFile(tmp_path / "model.gguf", plan, kind)
    file.fill(weights)
    before = file.path.read_bytes()
    name = "model.layers.1.self_attn.o_proj.weight"
    for wrong in (most * 1.01, -most * 1.01, float("inf"), float("nan")):
        values = torch.from_numpy(floats(weights[name]).copy())
        values[3, 5] = wrong
        broken = models.tensor(values.to(dtype))
        with pytest.raises(EngineError, match=f"{name} hold .*{kind} ends at .*as bf16 or f32"):
            file.fill({**weights, name: broken})
        bits = np.frombuffer(broken.data, "<u2" if dtype == torch.bfloat16 else "<u4")[3 * 96 : 4 * 96]
        with pytest.raises(EngineError, match=f"{name} hold .*{kind} ends at"):
            file.put(Change(name, np.arange(3 * 96, 4 * 96), bits))
        assert file.path.read_bytes() == before
    values[3, 5] = most * 0.99
    file.fill({**weights, name: models.tensor(values.to(dtype))})
    file.close()


def test_a_bf16_file_holds_what_bf16_holds(tmp_path):
    plan = read_plan(config_folder(tmp_path))
    weights = random_weights(plan)
    name = "model.norm.weight"
    file = GgufFile(tmp_path / "model.gguf", plan, "bf16")
    file.fill({**weights, name: models.tensor(torch.full((96,), 1e30).bfloat16())})
    assert file.cells(name).view("<f4")[0] == pytest.approx(1e30, rel=0.01)
    file.close()


def test_a_change_that_does_not_fit_its_tensor_is_refused(tmp_path):
    plan = read_plan(config_folder(tmp_path))
    file = GgufFile(tmp_path / "model.gguf", plan, "q8_0")
    file.fill(random_weights(plan))
    name, run = "lm_head.weight", np.arange(32)

    def put(tensor, positions, width=np.uint16, extra=0):
        file.put(Change(tensor, positions, np.zeros(positions.size + extra, width)))

    for wrong, words in [
        (lambda: put("lm_head.bias", run), "lm_head.bias, which the model does not have"),
        (lambda: put(name, run + 40 * 96), "outside its shape"),
        (lambda: put(name, run - 32), "outside its shape"),
        (lambda: put(name, run[:5]), "whole blocks of 32"),
        (lambda: put(name, run + 16), "whole blocks of 32"),
        (lambda: put(name, np.append(run[:31], 40)), "whole blocks of 32"),
        (lambda: put(name, run, extra=32), "do not match"),
        (lambda: put(name, run, np.uint32), "do not match"),
    ]:
        before = file.path.read_bytes()
        with pytest.raises(EngineError, match=words):
            wrong()
        assert file.path.read_bytes() == before
    put(name, run[:0])
    file.close()


def test_a_full_disk_is_found_before_anything_is_mapped(tmp_path):
    plan = read_plan(config_folder(tmp_path, vocab_size=4000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(EngineError, match=r"no room for a model of 2 MB .*scratch folder"):
            GgufFile(tmp_path / "model.gguf", plan, "f16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_without_a_name_can_still_be_read_and_changed(tmp_path):
    plan = read_plan(config_folder(tmp_path))
    weights = random_weights(plan)
    file = GgufFile(tmp_path / "model.gguf", plan, "f16")
    assert file.unname()
    assert not (tmp_path / "model.gguf").exists()
    file.fill(weights)
    found = {tensor.name for tensor in gguf.GGUFReader(file.path).tensors}
    assert "token_embd.weight" in found
    file.close()
    assert not file.path.exists()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
REFUSED = {
    "another family": ({"model_type": "gpt2"}, "type 'gpt2'"),
    "no family": ({"model_type": "absent"}, "type ''"),
    "experts": ({"model_type": "qwen3_moe"}, "type 'qwen3_moe'"),
    "not for text": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised model .*full-precision"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu'"),
    "odd heads": ({"head_dim": 15}, "odd size 15"),
    "shared heads": ({"num_key_value_heads": 2}, "3 heads that share 2"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    "linear": ({"rope_parameters": {"type": "linear", "factor": 2.0}}, "'linear'"),
    "half a llama3": ({"rope_scaling": {**LLAMA3, "factor": None}}, "without all of factor"),
    "crossed llama3": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "factors 1.0 and 1.0"),
    "no positions": ({"rope_scaling": "yes"}, "positions by 'yes'"),
    "no base": ({"rope_theta": -1.0}, "the base -1.0"),
    "part of a head": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turned in part"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "no vocabulary": ({"vocab_size": "absent"}, "vocab_size = None"),
    "no number": ({"hidden_size": "96"}, "hidden_size = '96'"),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_llama_cpp_would_run_otherwise_is_refused_by_name(tmp_path, why):
    settings, words = REFUSED[why]
    with pytest.raises(EngineError, match=words) as refusal:
        read_plan(config_folder(tmp_path, **settings))
    assert refusal.value.advice


def test_what_only_the_torch_engine_can_run_is_sent_there(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for name, settings, words in [
        ("qwen3", {"attention_bias": True}, "qwen3 model with attention biases"),
        ("qwen2", {"head_dim": 30}, "3 heads of 30 with a hidden size of 96"),
        ("qwen2", {"rope_scaling": LLAMA3}, "qwen2 model whose positions are scaled by 'llama3'"),
        ("qwen2", window, "slides over a window of 16"),
        ("qwen3", {**window, "attention_bias": False}, "slides over a window of 16"),
        ("qwen2", {**window, "layer_types": ["full_attention", "sliding_attention"]}, "window of 16"),
    ]:
        with pytest.raises(EngineError, match=words) as refusal:
            read_plan(family(tmp_path, name, **settings))
        assert "torch engine" in refusal.value.advice


def test_a_window_that_is_never_reached_is_none(tmp_path):
    for window in (
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2},
    ):
        assert read_plan(family(tmp_path, "qwen2", **window)).layers == 2


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe"])
def test_a_folder_without_a_config_says_so(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"config\.json .*whole model folder"):
        read_plan(tmp_path)


def test_weights_of_another_type_than_loaded_keep_their_own(tmp_path):
    plan = read_plan(config_folder(tmp_path))
    weights: dict[str, TensorBytes] = random_weights(plan)
    weights["lm_head.weight"] = models.tensor(torch.randn(40, 96))
    file = GgufFile(tmp_path / "model.gguf", plan, "f16")
    file.fill(weights)
    file.put(Change("lm_head.weight", np.array([1]), np.array([1.5], np.float32).view(np.uint32)))
    file.put(Change("model.norm.weight", np.array([1]), np.array([0x4000], np.uint16)))
    assert file.cells("lm_head.weight").view("<f2")[1] == 1.5
    assert file.cells("model.norm.weight").view("<f4")[1] == 2.0
    file.close()
