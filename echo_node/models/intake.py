"""Bring a model's folder into the form in which runs keep it.

That form is bf16, by the names of the model's own parameters, tied weights once. A folder that has
it, in one file or in shards, is used where it lies. Anything else is written once into the cache:
float32 and float16 are cast, redundant copies of tied weights and stored masks are left out. Memory
is bounded by a piece of a tensor, not by the model.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.models.architecture import Parameters, can_read_parameters, read_parameters
from echo_node.models.bf16_file import bf16_pieces, write_bf16_file
from echo_node.models.families import check_family
from echo_node.models.folder import INDEX, WEIGHTS, map_folder, read_json, read_model_config, weight_files
from echo_node.models.progress import Progress, no_progress
from echo_node.models.safetensors_file import MappedTensor

log = logging.getLogger(__name__)

MODEL_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Small files that travel with a model: configuration, tokenizer, chat template. Sorted."""
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MASKS: Final = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
"""Ends of the names of constants that older files store beside the parameters."""
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "transformer.wte.weight")
_MASK_RANK: Final = 4
_IN_PLACE: Final = ".in-place"


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors to keep by their canonical names, and notes for the operator."""

    tensors: dict[str, MappedTensor]
    notes: tuple[str, ...]
    """What differs from the form that runs keep; empty if nothing does."""


def take_in(
    folder: Path, cache: Path, progress: Progress = no_progress, note: Callable[[str], None] = log.info
) -> Path:
    """Return a folder with the model as runs keep it: this one or a cached copy.

    `note` gets a line for each difference from that form.
    """
    key = _key(folder)
    kept = cache / f"{folder.resolve().name}-{key}"
    mark = cache / f"{key}{_IN_PLACE}"
    if mark.is_file():
        return folder
    if kept.is_dir():
        return kept
    plan = make_plan(folder)
    with boundary(StoreError, f"making {kept}", advice="see that the disk has room and can be written to"):
        cache.mkdir(parents=True, exist_ok=True)
        if not plan.notes:
            mark.touch()
            return folder
        for text in plan.notes:
            note(text)
        with tempfile.TemporaryDirectory(
            prefix=".partial-", dir=cache, ignore_cleanup_errors=True
        ) as partial:
            built = Path(partial, "model")
            built.mkdir()
            _write(plan, folder, built, progress)
            try:
                built.rename(kept)
            except OSError:
                if not kept.is_dir():  # else somebody made the same at the same time
                    raise
    return kept


def make_plan(folder: Path) -> Plan:
    """Decide which weights are kept; refuse what does not fit the configuration."""
    config = read_model_config(folder)
    check_family(config)
    found = map_folder(folder)
    wanted = read_parameters(folder) if can_read_parameters() else None
    notes: list[str] = []
    if not (folder / WEIGHTS).is_file() and not isinstance(read_json(folder / INDEX).get("metadata"), dict):
        notes.append("the index of the shards has no metadata: the weights are written as one file")
    tensors: dict[str, MappedTensor] = {}
    for name, tensor in found.items():
        if _is_mask(name, tensor):
            notes.append("constants that are no parameters are left out")
            continue
        tensors[wanted.canonical_name(name) if wanted else name] = tensor
    if tensors.keys() - found.keys():
        notes.append("tensors get the names of the model's own parameters")
    notes += _drop_copies(folder, _tied(config, wanted, tensors), tensors)
    if wanted:
        _check_parameters(folder, wanted, tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            bf16_pieces(name, tensor).__next__()  # which refuses it
    if casts := sorted({_DTYPES[each.dtype] for each in tensors.values()} - {"bfloat16"}):
        notes.append(f"{' and '.join(casts)} weights are cast to bfloat16")
    return Plan(tensors, tuple(dict.fromkeys(notes)))


def _drop_copies(folder: Path, tied: dict[str, str], tensors: dict[str, MappedTensor]) -> Iterator[str]:
    """Remove redundant copies of tied tensors; yield a note about each."""
    for copy, source in tied.items():
        if copy in tensors and source in tensors:
            if not _same(tensors[copy], tensors[source]):
                raise ConfigError(
                    f"{folder}: config.json ties {copy} to {source}, and the two differ in the file",
                    advice="set tie_word_embeddings to false in config.json, or take the model from its source",
                )
            del tensors[copy]
            yield f"{copy} repeats {source}, to which it is tied: it is left out"


def _tied(
    config: dict[str, object], wanted: Parameters | None, tensors: dict[str, MappedTensor]
) -> dict[str, str]:
    if wanted:
        return wanted.tied
    source = next((name for name in _EMBEDDINGS if name in tensors), None)
    return {_HEAD: source} if source and config.get("tie_word_embeddings") is True else {}


def _is_mask(name: str, tensor: MappedTensor) -> bool:
    if not name.endswith(_MASKS):
        return False
    return not name.endswith(".attn.bias") or len(tensor.shape) == _MASK_RANK


def _same(one: MappedTensor, other: MappedTensor) -> bool:
    return one[:2] == other[:2] and one.data == other.data


def _check_parameters(folder: Path, wanted: Parameters, tensors: dict[str, MappedTensor]) -> None:
    """Check that the file has exactly the configured parameters and shapes."""
    advice = "its config.json and its weights are of two models: fetch both again"
    if missing := sorted(wanted.shapes.keys() - tensors.keys()):
        raise ConfigError(
            f"{folder}: the weights lack {missing[0]}, which config.json calls for", advice=advice
        )
    if others := sorted(tensors.keys() - wanted.shapes.keys()):
        raise ConfigError(
            f"{folder}: the weights hold {others[0][:64]!r}, which is no parameter of the model",
            advice=advice,
        )
    for name, shape in wanted.shapes.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{folder}: {name} has the shape {tensors[name].shape}, and config.json calls for {shape}",
                advice=advice,
            )


def _write(plan: Plan, folder: Path, built: Path, progress: Progress) -> None:
    for name in MODEL_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, built / name)
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)
    (built / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))
    shapes = {name: tensor.shape for name, tensor in plan.tensors.items()}
    total = 2 * sum(len(each.data) // {"F32": 4}.get(each.dtype, 2) for each in plan.tensors.values())
    write_bf16_file(
        built / WEIGHTS,
        shapes,
        lambda name: bf16_pieces(name, plan.tensors[name]),
        lambda done: progress(f"writing {folder.name} as bfloat16", done, total),
    )


def _key(folder: Path) -> str:
    """Return a name for a folder's content by its place, sizes and times of writing."""
    digest = blake3()
    small = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    for path in (*small, *weight_files(folder)):
        with boundary(ConfigError, f"looking at {path}", advice="fetch it again"):
            facts = path.stat()
        digest.update(f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
