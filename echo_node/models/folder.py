"""Read the weights of a Hugging Face folder: one safetensors file, or shards.

Shards have an index. Only headers are read, so it is quick whatever the model's size. Nothing is
executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from echo_node.errors import ConfigError, boundary
from echo_node.models.safetensors_file import MappedTensor, map_tensors

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST_TEXT: Final = 64 * 1024 * 1024  # bytes of a JSON file that describes a model
_AGAIN: Final = "it is damaged or was cut short: fetch it again"


def check_folder(folder: Path) -> Path:
    """Return the folder if it names an architecture and its weights are whole."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    read_model_config(folder)
    map_folder(folder)
    return folder


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json, which must name an architecture."""
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder} is no model's folder: it has no config.json", advice=_FORM)
    settings = read_json(config)
    names = settings.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{config} names no architecture", advice=_FORM)
    return settings


def map_folder(folder: Path) -> dict[str, MappedTensor]:
    """Return every tensor of a folder's weights, mapped, sorted by name.

    Like `transformers`, one whole file goes before shards.
    """
    if (folder / WEIGHTS).is_file():
        found = map_tensors(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        found = _map_shards(folder)
    else:
        raise _no_weights(folder)
    if not found:
        raise ConfigError(f"{folder} holds no weights", advice=_AGAIN)
    return dict(sorted(found.items()))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights, shards too."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(_places(folder).values()))]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds a table."""
    with boundary(ConfigError, f"reading {path}", advice="it must be JSON: fetch it again"):
        if path.stat().st_size > _LARGEST_TEXT:
            raise ConfigError(f"{path} is too large to describe a model")
        found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is JSON, but no table", advice="fetch it again")
    return found


_FORM: Final = (
    "a model's folder has config.json, model.safetensors and tokenizer.json, as `save_pretrained` writes"
)


def _map_shards(folder: Path) -> dict[str, MappedTensor]:
    """Return the tensors of all shards, which must be exactly those of the index."""
    places = _places(folder)
    found: dict[str, MappedTensor] = {}
    for shard in sorted(set(places.values())):
        if not (folder / shard).is_file():
            raise ConfigError(f"{folder} lacks {shard}, which its index names", advice="fetch it again")
        inside = map_tensors(folder / shard)
        for name in inside:
            if name in found:
                raise ConfigError(f"the tensor {name[:64]!r} stands in two shards of {folder}", advice=_AGAIN)
            if places.get(name) != shard:
                raise ConfigError(
                    f"{shard} holds the tensor {name[:64]!r}, which the index of {folder} does not place there",
                    advice="the index and the shards are of two models: fetch all of them again",
                )
        found |= inside
    if missing := sorted(places.keys() - found.keys()):
        raise ConfigError(
            f"the index of {folder} places {missing[0][:64]!r} in {places[missing[0]]}, where it is not",
            advice="the index and the shards are of two models: fetch all of them again",
        )
    return found


def _places(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor; refuse an index that leads out of its folder."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_shard, places.values())):
        raise ConfigError(f"{folder / INDEX} does not say in which files the weights are")
    return places


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _no_weights(folder: Path) -> ConfigError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return ConfigError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any program as it is opened",
            advice="take the model's safetensors, or convert it where you trust it, by `save_pretrained`",
        )
    return ConfigError(f"{folder} has no weights as safetensors", advice=_FORM)
