"""Describe a model for a manifest: layout, state root, end tokens, small files.

The weights are read once, chunk by chunk: hashed, and checked to be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError, boundary
from echo_node.models.adapter import map_weights
from echo_node.models.bf16_file import is_finite
from echo_node.models.folder import read_json, read_model_config
from echo_node.models.intake import MODEL_FILES
from echo_node.models.progress import Progress, no_progress
from echo_node.runs.tokenizer import Tokenizer
from echo_node.weights.tensors import State, chunks, from_mapped, layout_of
from protocol import blob_id, encode, limits, merkle_root
from protocol.manifest import Adapter, Model, ModelFile

_CONTEXTS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names under which families give the length of their context."""
_FLOATS: Final = {"f16": "<f2", "f32": "<f4"}
_FILE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one small file, as on the wire."""


def describe_model(
    folder: Path,
    progress: Progress = no_progress,
    stop: Sequence[str] = (),
    adapter: Adapter | None = None,
) -> Model:
    """Return a model's part of the manifest; refuse weights that are not finite.

    The tokens of `stop` texts end a completion too.
    """
    config = read_model_config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json, without which nobody can read prompts",
            advice="write it with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        )
    with boundary(ConfigError, f"reading the model in {folder}"):
        state = from_mapped(map_weights(folder))
        return Model(
            adapter=adapter,
            architecture=config["architectures"][0],
            context=context_of(config),
            end_tokens=end_tokens(folder, config, stop),
            files=tuple(_file(folder / name) for name in MODEL_FILES if (folder / name).is_file()),
            layout=blob_id(encode(layout_of(state))),
            root=merkle_root(list(_hashes(state, f"hashing {folder.name}", progress))),
            vocab_size=_number(config, "vocab_size"),
        )


def end_tokens(folder: Path, config: dict[str, Any], stop: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the ids that end a completion: of the model's files, and of stop texts."""
    generation = folder / "generation_config.json"
    found: set[int] = set()
    for settings in (config, read_json(generation) if generation.is_file() else {}):
        ends = settings.get("eos_token_id")
        found |= set(ends if isinstance(ends, list) else () if ends is None else (ends,))
    if not found:
        raise ConfigError(
            f"{folder} names no end token, so that no completion would ever end",
            advice="add eos_token_id to its generation_config.json",
        )
    if stop:
        tokenizer = Tokenizer.from_folder(folder)
        found |= {tokenizer.stop_token(each) for each in stop}
    if len(found) > limits.END_TOKENS or not all(type(each) is int for each in found):
        raise ConfigError(
            f"{folder}: its end tokens are {limits.END_TOKENS} ids at most, not {sorted(map(str, found))}"
        )
    return tuple(sorted(found))


def context_of(config: dict[str, Any]) -> int:
    """Return the length of a model's context."""
    return _number(config, *_CONTEXTS)


def _number(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if type(config.get(name)) is int:
            return int(config[name])
    raise ConfigError(f"the model's config.json has no {names[0]}", advice="add it, as a whole number")


def _hashes(state: State, doing: str, progress: Progress) -> Iterator[bytes]:
    total = sum(len(each.data) for each in state.values())
    narrow = all(each.dtype == "bf16" for each in state.values())
    done = 0
    for chunk in chunks(state):
        if not narrow or not is_finite(np.frombuffer(chunk, "<u2")):
            for name, tensor in state.items():  # to name the tensor
                _check_finite(name, tensor)
            narrow = True
        yield blob_id(chunk)
        done += len(chunk)
        progress(doing, done, total)


def _check_finite(name: str, tensor: TensorBytes) -> None:
    """Refuse a tensor with a value that is infinite or not a number."""
    step = 2 * limits.CHUNK_ELEMENTS
    for start in range(0, len(tensor.data), step):
        piece = memoryview(tensor.data)[start : start + step]
        if tensor.dtype == "bf16":
            finite = is_finite(np.frombuffer(piece, "<u2"))
        else:
            finite = bool(np.isfinite(np.frombuffer(piece, _FLOATS[tensor.dtype])).all())
        if not finite:
            raise ConfigError(
                f"the weights {name} hold a value that is infinite or not a number",
                advice="no run can start from them: take the model from its source again",
            )


def _file(path: Path) -> ModelFile:
    size = path.stat().st_size
    if size > _FILE_BYTES:
        raise ConfigError(f"{path} has {size:,} bytes, and {_FILE_BYTES:,} may travel with a model")
    data = path.read_bytes()
    return ModelFile(blob=blob_id(data), name=path.name, size=len(data))
