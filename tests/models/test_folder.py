"""Which folders are taken for models."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.models.model_source import find_model


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(embedded.folder(), tmp_path / "model")


def shard(model):
    """Split the weights over two files, as large models are."""
    with safe_open(model / "model.safetensors", framework="np") as file:
        names = sorted(file.keys())
    import numpy as np

    places = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for part in set(places.values()):
        save_file({name: np.zeros(2) for name in names if places[name] == part}, model / part)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sorted(set(places.values()))


def test_a_folder_with_a_model_is_the_model(model, tmp_path, monkeypatch):
    assert find_model(str(model)) == model
    monkeypatch.chdir(tmp_path)
    assert find_model("model").resolve() == model


def test_a_folder_wins_over_a_hub_id_of_the_same_name(model, tmp_path, monkeypatch):
    (tmp_path / "somebody").mkdir()
    model.rename(tmp_path / "somebody" / "reverser")
    monkeypatch.chdir(tmp_path)
    assert find_model("somebody/reverser", endpoint="http://127.0.0.1:1").is_dir()


def test_weights_in_shards_are_taken_if_every_shard_is_there(model):
    parts = shard(model)
    assert find_model(str(model)) == model
    (model / parts[1]).unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00002.safetensors.*fetch it again"):
        find_model(str(model))


def test_an_index_that_leads_out_of_the_folder_is_refused(model):
    shard(model)
    index = {"weight_map": {"weight": "../other/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="does not say in which files"):
        find_model(str(model))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_refused_with_what_to_do(model, name):
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(ConfigError, match=f"in {name}, a pickle") as caught:
        find_model(str(model))
    assert "safetensors" in caught.value.advice


def test_a_pickle_beside_safetensors_is_left_alone(model):
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    assert find_model(str(model)) == model


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "it has no config.json"),
        ("{", "it must be JSON"),
        ("[]", "no table"),
        ("{}", "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": "Qwen3ForCausalLM"}', "names no architecture"),
        ("\udc80", "it must be JSON"),
    ],
)
def test_a_folder_without_a_usable_configuration_is_no_model(model, config, says):
    (model / "config.json").unlink()
    if config is not None:
        (model / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        find_model(str(model))


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, 727_279])
def test_weights_that_were_cut_short_are_found_out_without_reading_them_all(model, keep):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="damaged or was cut short"):
        find_model(str(model))


def test_what_is_nothing_at_all_is_said_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        find_model(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="there is no model"):
        find_model(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is no model's folder"):
        find_model(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="there is no file"):
        find_model(str(tmp_path / "nowhere.gguf"))
