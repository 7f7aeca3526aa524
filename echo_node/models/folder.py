"""Check that a folder holds a Hugging Face model with safetensors weights.

Only headers are read, so it is quick whatever the model's size. Nothing is executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from echo_node.errors import ConfigError, boundary

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST_TEXT: Final = 64 * 1024 * 1024  # bytes of a JSON file that describes a model


def check_folder(folder: Path) -> Path:
    """Return the folder if its config names an architecture and every weights file is whole."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder} is no model's folder: it has no config.json", advice=_FORM)
    names = _read(config).get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{config} names no architecture", advice=_FORM)
    for path in _weights(folder):
        _check_weights(path)
    return folder


_FORM: Final = (
    "a model's folder has config.json, model.safetensors and tokenizer.json, as `save_pretrained` writes"
)


def _weights(folder: Path) -> list[Path]:
    """Return the files of the weights, shards too."""
    if (folder / INDEX).is_file():
        places = _read(folder / INDEX).get("weight_map")
        names = set(places.values()) if isinstance(places, dict) else set()
        if not names or not all(_is_shard(name) for name in names):
            raise ConfigError(f"{folder / INDEX} does not say in which files the weights are")
        return [folder / name for name in sorted(names)]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ConfigError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any program as it is opened",
            advice="take the model's safetensors, or convert it where you trust it, by `save_pretrained`",
        )
    raise ConfigError(f"{folder} has no weights as safetensors", advice=_FORM)


def _is_shard(name: object) -> bool:
    """Refuse an index that leads out of its folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _check_weights(path: Path) -> None:
    advice = "it is damaged or was cut short: fetch it again"
    with boundary(ConfigError, f"reading {path}", advice=advice), safe_open(path, framework="np") as file:
        if not file.keys():
            raise ConfigError(f"{path} holds no weights", advice=advice)


def _read(path: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"reading {path}", advice="it must be JSON: fetch it again"):
        if path.stat().st_size > _LARGEST_TEXT:
            raise ConfigError(f"{path} is too large to describe a model")
        config = json.loads(path.read_text("utf-8"))
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is JSON, but no table", advice="fetch it again")
    return config
