"""Decoder on transformers models, on any torch device.

Takes models of the families that are right (`models/families.py`) and refuses others. A model is
built from a folder's config.json alone: nothing is unpickled, and no code of a model's own is run.
Weights come from `load` only. On one machine, with one number of threads, the same calls give the
same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from echo_node.engine.attention_masks import tree_masks
from echo_node.engine.base import Change, Ids, TensorBytes
from echo_node.engine.device_draws import DeviceLogits
from echo_node.engine.gqa import GROUPED
from echo_node.engine.host_resources import check_fits
from echo_node.engine.kv_cache import KvCache
from echo_node.engine.lora_linear import adapt_model
from echo_node.engine.onednn_linear import OneDnnLinears
from echo_node.engine.prefix_sharing import SharedRow, shared_prompt, shared_row
from echo_node.engine.token_sampling import Follows, Logits, row_of, stacked
from echo_node.engine.weight_layout import lay_by_columns, put_at
from echo_node.errors import ConfigError, EngineError, boundary
from echo_node.models.families import check_family, read_config
from echo_node.models.folder import map_folder

DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_FILLED_AT_ONCE: Final = 8_192
"""Most ids per pass, padding included; bounds the memory that a pass takes."""


class TorchDecoder:
    """A model run by torch in this process.

    `threads` is torch's, for the whole process.
    """

    granule: int = 1

    def __init__(
        self, folder: Path, *, device: str = "auto", dtype: str = "f32", threads: int | None = None
    ) -> None:
        if dtype not in DTYPES:
            raise EngineError(f"torch computes in {', '.join(DTYPES)}, not in {dtype!r}")
        if threads is not None:
            torch.set_num_threads(threads)
        self.engine_class = f"torch/{dtype}"
        with boundary(EngineError, f"building the model of {folder}"):
            where = torch.device(_best_device() if device == "auto" else device)
            self._model = _build(folder, where, DTYPES[dtype])
            self._weights, parameters = _weights(self._model, folder)
        self._accepted = inspect.signature(self._model.forward).parameters.keys()
        self._packing = OneDnnLinears(self._model)
        self._kinds: dict[str, str] = {}
        self._columns = KvCache(0, 0)
        self._cache = self._columns.cache()
        self._used = 0
        self.device = str(where)
        self.draws_on_device = where.type != "cpu"
        """Whether logits stay on the device, and tokens are drawn there."""
        self.vocabulary = int(self._model.config.vocab_size)
        self.context: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self.parameters = parameters
        self._weight_bytes = sum(weight.nbytes for weight in self._model.parameters())

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, keys and values."""
        return self._weight_bytes + self._packing.nbytes + self._columns.nbytes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that it wants, by their Hugging Face names, tied ones once."""
        return {name: tuple(weight.shape) for name, weight in self._weights.items()}

    @torch.inference_mode()
    def load(self, weights: Mapping[str, TensorBytes]) -> None:
        """Copy all weights in."""
        for name, weight in self._weights.items():
            given = weights[name]
            self._kinds[name] = given.dtype
            weight.copy_(
                _values(np.frombuffer(given.data, _BITS[given.dtype]), given.dtype).view(given.shape)
            )
        self._packing.changed()
        self._used = 0

    @torch.inference_mode()
    def put(self, changes: Iterable[Change]) -> None:
        """Copy elements in, live at once."""
        for change in changes:
            weight = self._weights[change.tensor]
            values = _values(change.values, self._kinds[change.tensor])
            positions = torch.from_numpy(change.positions).to(weight.device)
            put_at(weight, positions, values.to(weight.device, weight.dtype))
            self._packing.changed(weight)

    def make_room(self, rows: int, length: int) -> None:
        """Reserve rows of a given length; the memory is taken when the first is filled."""
        self._used = 0
        self._columns.resting = ()
        if self._columns.holds(rows, length):
            return
        columns = KvCache(rows, length)
        check_fits(
            _bytes_per_id(self._model.config, self._model.dtype) * rows * columns.width,
            f"keys and values of {rows} rows of {length} ids",
            advice="generate fewer completions at once",
        )
        self._columns, self._cache = columns, columns.cache()

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Ids]) -> Follows:
        """Fill rows afresh; give what follows each prompt."""
        if len(rows) >= self._used:  # maybe all that is in use is filled anew
            kept = {*range(self._used), *self._columns.resting} - set(rows)
            self._used = max(kept, default=-1) + 1
        logits: dict[int, Follows] = {}
        for places in _together([prompt.size for prompt in prompts]):
            found = self._fill([rows[place] for place in places], [prompts[place] for place in places])
            logits |= {place: row_of(found, number) for number, place in enumerate(places)}
        return stacked([logits[place] for place in range(len(rows))])

    def _fill(self, rows: list[int], prompts: list[Ids]) -> Follows:
        if shared_prompt(prompts) and (shared := shared_row(prompts, [1] * len(prompts))) is not None:
            return self._fill_shared(rows, prompts, shared)
        lengths = [prompt.size for prompt in prompts]
        width = max(lengths)
        ids = np.zeros((len(rows), width), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[width - prompt.size :] = prompt
        padded = min(lengths) < width
        seen = np.arange(width) >= width - np.array(lengths)[:, None]
        positions = np.maximum(seen.cumsum(axis=1) - 1, 0)
        self._columns.before_prefill(torch.tensor(rows, device=self._model.device), width, self._used)
        last = self._follows(ids, positions if padded else None, seen if padded else None)
        self._columns.after_prefill(rows, lengths)
        self._used = max(self._used, *(row + 1 for row in rows))
        return last

    def _fill_shared(self, rows: list[int], prompts: list[Ids], row: SharedRow) -> Follows:
        """Fill rows whose prompts begin alike: the beginning is computed once."""
        lengths = [prompt.size for prompt in prompts]
        places = [
            self._there(
                np.concatenate((np.arange(row.begin), np.arange(last + 1 - length + row.begin, last + 1)))
            )
            for last, length in zip(row.wanted.tolist(), lengths, strict=True)
        ]
        self._columns.before_prefill(self._there(np.array(rows)), max(lengths), self._used, places)
        last = self._handed(self._through(row, cache=True))
        self._columns.after_prefill(rows, lengths)
        self._used = max(self._used, *(each + 1 for each in rows))
        return last

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Let a row begin as another does."""
        self._columns.copy(source, target, length)
        self._used = max(self._used, target + 1)

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], ids: Sequence[Ids]) -> Follows:
        """Append ids to rows, keeping keys and values; return the last logits."""
        logits: dict[int, Follows] = {}
        by_size: dict[int, list[int]] = {}
        for place, each in enumerate(ids):
            by_size.setdefault(each.size, []).append(place)
        for size, places in sorted(by_size.items()):
            at_once = max(1, _FILLED_AT_ONCE // size)
            for start in range(0, len(places), at_once):
                some = places[start : start + at_once]
                found = self._extend([rows[place] for place in some], np.stack([ids[each] for each in some]))
                logits |= {place: row_of(found, number) for number, place in enumerate(some)}
        return stacked([logits[place] for place in range(len(rows))])

    def _extend(self, rows: list[int], ids: Ids) -> Follows:
        columns, count = self._columns, ids.shape[1]
        columns.before_extend(rows, count)
        starts = np.array([columns.starts[row] for row in rows])
        seen = np.arange(columns.first, columns.end) >= starts[:, None]
        positions = np.arange(columns.end - count, columns.end) - starts[:, None]
        last = self._follows(ids, positions, seen)
        columns.after_extend()
        self._used = max(self._used, *(row + 1 for row in rows))
        return last

    def rest(self, rows: Sequence[int]) -> None:
        """Keep these rows as they are, beside those that `decode` appends to."""
        self._columns.resting = tuple(rows)

    @torch.inference_mode()
    def decode(self, tokens: Ids) -> Follows:
        """One token more for each of the rows 0 … len(tokens) - 1; give what follows."""
        columns = self._columns
        self._used = max(len(tokens), *(row + 1 for row in (*columns.resting, 0)))
        columns.before_decode(len(tokens))
        starts = np.array(columns.starts[: len(tokens)])
        positions = (columns.end - starts)[:, None]
        padded = int(starts.max()) > columns.first
        seen = np.arange(columns.first, columns.end + 1) >= starts[:, None] if padded else None
        with self._packing.on():
            last = self._follows(tokens[:, None], positions, seen)
        columns.after_decode()
        return last

    @torch.inference_mode()
    def score(self, ids: Ids, keep: int) -> Logits:
        """Return the logits after each of the last `keep` ids, in one pass."""
        follows: Logits = self._forward(ids[None], keep, None, None, cache=False)[0]
        return follows

    @torch.inference_mode()
    def score_pieces(self, ids: Ids, keep: int, piece: int) -> Iterator[Logits]:
        """Score a long sequence piece by piece, with the keys and values of those before."""
        cache = DynamicCache(config=self._model.config)
        for start in range(0, ids.size, piece):
            part = ids[start : start + piece]
            wanted = min(part.size, start + part.size - (ids.size - keep))
            logits: Tensor = self._model(
                input_ids=self._there(part[None]),
                past_key_values=cache,
                use_cache=True,
                **({"logits_to_keep": max(1, wanted)} if "logits_to_keep" in self._accepted else {}),
            ).logits
            if wanted > 0:
                yield logits[0, -wanted:].float().cpu().numpy()

    @torch.inference_mode()
    def score_many(self, sequences: Sequence[Ids], keep: Sequence[int]) -> Logits:
        """Score several sequences, in as few passes as they fit in."""
        if len(sequences) == 1:
            return self.score(sequences[0], keep[0])
        if (shared := shared_row(sequences, keep)) is not None:
            scored: Logits = self._through(shared, cache=False).cpu().numpy()
            return scored
        lengths = [ids.size for ids in sequences]
        found: list[Logits] = [np.empty(0)] * len(sequences)
        for places in _together(lengths):
            width = max(lengths[place] for place in places)
            ids = np.zeros((len(places), width), np.int64)
            for row, place in zip(ids, places, strict=True):
                row[: lengths[place]] = sequences[place]  # what comes after it is seen by none of its places
            widest = max(width - lengths[place] + keep[place] for place in places)
            logits = self._forward(ids, widest, None, None, cache=False)
            for row, place in zip(logits, places, strict=True):
                end = widest - (width - lengths[place])
                found[place] = row[end - keep[place] : end]
        together: Logits = np.concatenate(found)
        return together

    def _through(self, row: SharedRow, *, cache: bool) -> Tensor:
        """Return the logits at the wanted places of a packed row."""
        positions, seen = self._there(row.positions[None]), self._there(row.seen[None])
        logits: Tensor = self._model(
            input_ids=self._there(row.ids[None]),
            position_ids=positions,
            attention_mask=tree_masks(self._model.config, seen, positions, self._model.dtype),
            logits_to_keep=self._there(row.wanted),
            use_cache=cache,
            **({"past_key_values": self._cache} if cache else {}),
        ).logits
        return logits[0].float()

    def close(self) -> None:
        """Give the memory back."""
        self._columns = KvCache(0, 0)
        self._cache = self._columns.cache()
        self._weights = {}
        self._packing.close()
        self._model = None  # type: ignore[assignment] # whoever closes an engine does not use it again

    def _follows(self, ids: Ids, positions: Ids | None, seen: NDArray[np.bool_] | None) -> Follows:
        """Append ids to the rows; return the logits after the last of each."""
        return self._handed(self._logits(ids, 1, positions, seen, cache=True)[:, -1].float())

    def _handed(self, last: Tensor) -> Follows:
        """Return logits in host memory, unless tokens are drawn on the device."""
        if self.draws_on_device:
            return DeviceLogits(last)
        host: Logits = last.cpu().numpy()
        return host

    def _forward(
        self, ids: Ids, keep: int, positions: Ids | None, seen: NDArray[np.bool_] | None, *, cache: bool
    ) -> Logits:
        """Return the logits of the last `keep` positions, in host memory."""
        array: Logits = self._logits(ids, keep, positions, seen, cache=cache).float().cpu().numpy()
        return array

    def _logits(
        self, ids: Ids, keep: int, positions: Ids | None, seen: NDArray[np.bool_] | None, *, cache: bool
    ) -> Tensor:
        """Return the logits of the last `keep` positions, [rows, keep, vocabulary]."""
        given: dict[str, Any] = {"use_cache": cache}
        if cache:
            given["past_key_values"] = self._cache
        if seen is not None:
            given["attention_mask"] = self._there(seen)
        if positions is not None and "position_ids" in self._accepted:
            given["position_ids"] = self._there(positions)  # some models work them out from the mask
        if "logits_to_keep" in self._accepted:
            given["logits_to_keep"] = keep
        logits: Tensor = self._model(input_ids=self._there(ids), **given).logits
        return logits[:, -keep:]

    def _there(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


def _build(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on its device, with undefined weights until they are loaded."""
    try:
        check_family(read_config(folder))
    except ConfigError as error:
        raise EngineError(f"building the model of {folder}: {error.what}", advice=error.advice) from error
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Whatever a config.json asks for, attention is transformers' own or ours, no kernel from a hub.
    with torch.device("meta"), no_init_weights():
        shape = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=None, trust_remote_code=False
        )
    elements = sum(weight.numel() for weight in shape.parameters())
    if device.type == "cpu":
        check_fits(elements * dtype.itemsize, f"the model of {folder}", advice="take a smaller model")
    attention = GROUPED if shape._supports_sdpa else "eager"  # noqa: SLF001 - no public name for it
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()  # which is otherwise part of giving them their first values
    model.to(device)  # type: ignore[arg-type] # its decorator hides what it takes
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(requires_grad=False)
    lay_by_columns(model)
    return model


@torch.inference_mode()
def _weights(model: PreTrainedModel, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Return the weights that `load` is given, and the number of parameters in all.

    With an adapter they are its tensors; the base is read from the folder, once.
    """
    whole: dict[str, Tensor] = dict(model.named_parameters())
    layers = adapt_model(model, folder, model.dtype)
    parameters = sum(weight.numel() for weight in model.parameters())
    if layers is None:
        return whole, parameters
    model.requires_grad_(requires_grad=False)  # an adapter's tensors are made to be trained
    for name, tensor in map_folder(folder).items():
        given = np.frombuffer(tensor.data, "<u2")  # as `check_base` has seen, a base is bf16
        whole[name].copy_(_values(given, "bf16").view(tensor.shape))
    return dict(layers.weights), parameters


_BITS: Final = {"bf16": "<u2", "f16": "<u2", "f32": "<u4"}


def _values(bits: NDArray[Any], kind: str) -> Tensor:
    """Bit patterns as numbers.

    They may lie in memory that nobody may write to, and are copied.
    """
    signed = np.array(bits, dtype=f"<i{bits.dtype.itemsize}" if bits.flags.writeable else bits.dtype)
    return torch.from_numpy(signed.view(f"<i{bits.dtype.itemsize}")).view(DTYPES[kind])


def _together(lengths: Sequence[int]) -> Iterable[list[int]]:
    """Yield prompts for one pass each, of similar length for little padding."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        count = max(1, _FILLED_AT_ONCE // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def _bytes_per_id(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values per position.

    It is an upper guess if the configuration lacks the figures.
    """
    text = config.get_text_config()
    queries = int(getattr(text, "num_attention_heads", None) or 1)
    heads = int(getattr(text, "num_key_value_heads", None) or queries)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
    return 2 * int(text.num_hidden_layers or 1) * heads * size * dtype.itemsize


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
