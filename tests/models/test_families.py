"""Families by name: those that are right, and one clear line for each of the others."""

from __future__ import annotations

import json

import pytest

from echo_node.errors import ConfigError
from echo_node.models.families import FAMILIES, check_family, check_length, read_config, window_of

REFUSED = {
    "experts": ({"model_type": "mixtral"}, "'mixtral'.*mixture of experts"),
    "experts of qwen2": ({"model_type": "qwen2_moe"}, "mixture of experts"),
    "experts of qwen3": ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts"),
    "experts of gpt-oss": ({"model_type": "gpt_oss"}, "'gpt_oss'.*mixture of experts"),
    "experts of a new family": ({"model_type": "newer", "num_local_experts": 8}, "mixture of experts"),
    "experts in a known name": ({"model_type": "llama", "n_routed_experts": 64}, "mixture of experts"),
    "hybrid": ({"model_type": "qwen3_next"}, "'qwen3_next'.*carry a state from token to token"),
    "recurrent": ({"model_type": "mamba2"}, "carry a state"),
    "hybrid layers": ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "carry a state"),
    "unknown": ({"model_type": "stablelm"}, "'stablelm'.*has not been shown"),
    "pictures": ({"model_type": "gemma3", "text_config": {}}, "more than text"),
    "no name": ({}, "no model_type"),
    "no text": ({"model_type": 7}, "no model_type"),
    "another head": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "of class LlamaForSequenceClassification .*LlamaForCausalLM",
    ),
    "quantised": ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised .*full-precision"),
    "no window": ({"model_type": "mistral", "sliding_window": 0}, "attention window is 0 tokens"),
    "a window of words": ({"model_type": "phi3", "sliding_window": "4k"}, "attention window is '4k' tokens"),
    "both ways": ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "to later ones"),
    "not causal": ({"model_type": "llama", "is_causal": False}, "to later ones"),
    "two sequences": ({"model_type": "gpt2", "add_cross_attention": True}, "a second sequence"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_family_that_would_train_wrongly_is_refused_in_one_clear_line(why):
    config, words = REFUSED[why]
    with pytest.raises(ConfigError, match=words) as refusal:
        check_family(config)
    assert refusal.value.advice
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_is_right_is_known_by_its_name_and_its_class(name):
    family = FAMILIES[name]
    assert check_family({"model_type": name}) is family
    assert check_family({"model_type": name, "architectures": [family.architecture]}) is family


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_length_are_right_up_to_where_they_do(kind):
    rope = {"rope_type": kind, "original_max_position_embeddings": 4096}
    config = {"model_type": "phi3", "rope_scaling": rope, "max_position_embeddings": 131072}
    check_length(config, 4096)
    with pytest.raises(ConfigError, match=f"'{kind}'.*beyond 4096 tokens.*up to 4097.*at most 4096 together"):
        check_length(config, 4097)
    check_length({**config, "rope_scaling": {"rope_type": "yarn"}}, 131072)
    check_length({"model_type": "llama", "rope_scaling": None}, 10**6)
    outside = {"original_max_position_embeddings": 64, "rope_scaling": {"type": kind}}
    with pytest.raises(ConfigError, match="beyond 64"):
        check_length({"model_type": "phi3", **outside}, 65)


def test_the_window_is_the_one_that_some_layer_has():
    assert window_of({"model_type": "llama", "sliding_window": 7}) is None
    assert window_of({"model_type": "mistral", "sliding_window": 7}) == 7
    assert window_of({"model_type": "mistral", "sliding_window": None}) is None
    assert window_of({"model_type": "qwen2", "sliding_window": 7}) is None
    assert window_of({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}) == 7
    assert window_of({"model_type": "gemma2", "sliding_window": 7}) == 7
    types = {"layer_types": ["full_attention"], "use_sliding_window": True}
    assert window_of({"model_type": "qwen2", "sliding_window": 7, **types}) is None


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff"])
def test_a_config_that_cannot_be_read_is_one_clear_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json.*whole model folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_config(tmp_path) == {"model_type": "llama"}
