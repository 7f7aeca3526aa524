"""Decoder on llama.cpp: a private mapped GGUF file, updated in place.

Where writes to the file do not reach the running model (offloaded or repacked layers, or a
self-test at the first load that fails), every update loads the file again.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from echo_node.engine.base import Change, Ids, TensorBytes
from echo_node.engine.engine_classes import AUTO
from echo_node.engine.gguf import BLOCK, BLOCKED, KINDS, GgufFile, file_size
from echo_node.engine.gguf_map import read_plan
from echo_node.engine.host_resources import SPARE, NoRoomError, available_memory, check_fits, cores
from echo_node.engine.llama_adapter import LlamaAdapter
from echo_node.engine.llama_ffi import (
    MOST_SEQUENCES,
    PIECE,
    LlamaModel,
    Sequences,
    gpu_memory,
    offloads,
    outputs,
    rounded,
)
from echo_node.engine.prefix_sharing import shared_prompt
from echo_node.engine.token_sampling import Logits
from echo_node.errors import EngineError, boundary
from echo_node.models.adapter import read_adapter
from echo_node.models.folder import map_folder
from echo_node.models.safetensors_file import MappedTensor

_log = logging.getLogger(__name__)
_REPACKED: Final = ("q4_0",)
"""Types that llama.cpp reorders as it loads them: writes to the file never reach those."""
_GPU_WEIGHTS: Final = 0.7
"""Part of the GPU's free memory for weights; keys, values and work buffers take the rest."""
_MOST_POSITIONS: Final = 2**31 - 1
_PROBE: Final = 4  # tokens: enough for attention to have something to choose from
_FEWER: Final = "take fewer rows or shorter completions"


def gpu_layers_for(device: str, layers: int, size: int) -> int:
    """Return how many of a model's layers fit into the GPU's free memory.

    `size` is the weights' bytes. llama.cpp counts the output layer as one more, so all layers of a
    model are `layers + 1`.
    """
    if device == "cpu":
        return 0
    if not offloads():
        if device == AUTO:
            return 0
        raise EngineError(
            f"this build of llama.cpp cannot use a GPU, and the device {device} was asked for",
            advice="install a build of llama-cpp-python for your GPU (see echo-node doctor), "
            "or take --device cpu",
        )
    free, every = gpu_memory(), layers + 1
    if free is None:
        return every
    fitting = min(every, int(_GPU_WEIGHTS * free * every / max(size, 1)))
    if not fitting and device != AUTO:
        raise NoRoomError(
            f"no layer of the model fits on {device}: {free / 1e9:.2f} GB are free there",
            advice="free some of its memory, take a smaller model, or take --device cpu",
        )
    return fitting


class LlamaDecoder:
    """A model run by llama.cpp in this process. Logits are valid until the next call.

    `kind` is the type of its weights. `device` (auto, cpu, cuda, mps) decides how many layers are
    offloaded to the GPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: str = "f16",
        threads: int | None = None,
        device: str = AUTO,
        scratch: Path | None = None,
        _mapped: bool = True,
    ) -> None:
        if kind not in KINDS:
            raise EngineError(f"no weights of the kind {kind!r}", advice=f"take one of {', '.join(KINDS)}")
        if threads is not None and threads < 1:
            raise EngineError(f"{threads} threads compute nothing", advice="give it at least one")
        self._plan = plan = read_plan(folder, kind)
        self._kind, self._mapped = kind, _mapped
        self._threads = len(cores()) if threads is None else threads
        self._size = file_size(plan, kind)
        self._gpu_layers = gpu_layers_for(device, plan.layers, self._size)
        self._free_at_first = available_memory()
        check_fits(self._size, f"a model of {plan.parameters} weights as {kind}", advice="take a smaller one")
        self.engine_class = f"llama/{kind}"
        self.device = "gpu" if self._gpu_layers else "cpu"
        self.vocabulary = plan.vocabulary
        self.context: int | None = plan.context
        self.parameters = plan.parameters
        self.granule = BLOCK if kind in BLOCKED else 1
        # Offloaded layers are copies in the GPU's memory: writes to the file never reach them.
        self.live: bool | None = False if kind in _REPACKED or self._gpu_layers else None
        """Whether writes to the file reach the running model; None before the first load tested it.
        Where they do not, every update loads the file again."""
        self._file: GgufFile | None = None
        self._model: LlamaModel | None = None
        self._room: Sequences | None = None
        self._desk: Sequences | None = None  # one row, for scoring what is too long for the room
        self._lengths = np.zeros(0, np.int64)
        self._whole = False
        with boundary(EngineError, "making a folder for the model", advice="set another scratch folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="echo-llama-", dir=scratch)
        settings = read_adapter(folder)
        self._adapter: LlamaAdapter | None = None
        if settings is not None:
            self._adapter = LlamaAdapter(plan, settings, Path(self._folder.name))
            self._base, self.granule, self.live = folder, 1, False  # nobody changes its base

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, keys and values."""
        rooms = (room for room in (self._room, self._desk) if room is not None)
        adapter = self._adapter.nbytes if self._adapter is not None else 0
        return self._size + adapter + sum(self._kv_bytes(room.rows, room.length) for room in rooms)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that it wants, by their Hugging Face names, tied ones once."""
        if self._adapter is not None:
            return {name: tensor.shape for name, tensor in self._adapter.tensors.items()}
        return {name: place.shape for name, place in self._plan.places.items()}

    def load(self, weights: Mapping[str, TensorBytes]) -> None:
        """Copy all weights in. They have been checked against `shapes`."""
        if self._adapter is not None:
            self._adapter.load(weights)
            self._apply_adapter(self._adapter)
            return
        with self._rewriting() as file:
            file.fill(weights)

    def put(self, changes: Iterable[Change]) -> None:
        """Copy elements in, effective at once; after a failure reload all weights."""
        self._check_whole()
        if self._adapter is not None:
            self._whole = False
            self._adapter.put(changes)
            self._apply_adapter(self._adapter)
            return
        with self._rewriting() as file:
            for change in changes:
                file.put(change)

    def make_room(self, rows: int, length: int) -> None:
        """Be ready for so many rows of so many positions.

        Room that is large enough is kept.
        """
        if not 1 <= rows <= MOST_SEQUENCES:
            raise EngineError(
                f"llama.cpp runs 1 to {MOST_SEQUENCES} rows at once, not {rows}", advice="set fewer rows"
            )
        model = self._check_whole()
        room = self._room
        if room is not None and room.rows >= rows and room.length >= length:
            room.clear()
        else:
            self._drop_rooms()
            self._room = room = self._sequences(model, rows, length)
        self._lengths = np.zeros(room.rows, np.int64)

    def prefill(self, rows: Sequence[int], prompts: Sequence[Ids]) -> Logits:
        """Fill rows afresh, whatever was in them; give what follows each prompt."""
        room, of = self._check_room(), np.array(rows, np.int64)
        sizes = np.array([prompt.size for prompt in prompts], np.int64)
        self._check_fit(room, of, int(sizes.max()))
        order = np.argsort(of)  # llama.cpp computes rows together if they are neighbours
        for row in rows:
            room.cut(row, 0)
        self._lengths[of] = 0
        begin = self._fill_beginning(room, of[order], prompts)
        lefts = sizes[order] - begin
        ends = np.cumsum(lefts)
        starts = np.repeat(ends - lefts, lefts)
        tokens = np.concatenate([prompts[place][begin:] for place in order])
        wanted = np.zeros(tokens.size, np.bool_)
        wanted[ends - 1] = True
        positions = np.arange(tokens.size) - starts + begin
        logits = room.run(tokens, positions, np.repeat(of[order], lefts), wanted)
        self._lengths[of] = sizes
        return logits if (order[:-1] < order[1:]).all() else logits[np.argsort(order)]

    @staticmethod
    def _fill_beginning(room: Sequences, rows: Ids, prompts: Sequence[Ids]) -> int:
        """Fill all rows with the common beginning of their prompts; return its length."""
        if begin := shared_prompt(prompts):
            places = np.arange(begin)
            room.run(prompts[0][:begin], places, np.full(begin, rows[0]), np.zeros(begin, np.bool_))
            for row in rows[1:].tolist():
                room.copy(int(rows[0]), row, begin)
        return begin

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another row."""
        room = self._check_room()
        self._check_fit(room, np.array([source, target]), length)
        if not 0 < length <= self._lengths[source]:
            raise EngineError(f"{length} positions of row {source}, which has {self._lengths[source]}")
        room.copy(source, target, length)
        self._lengths[target] = length

    def extend(self, rows: Sequence[int], ids: Sequence[Ids]) -> Logits:
        """Append ids to rows, keeping keys and values; return the last logits."""
        room, of = self._check_room(), np.array(rows, np.int64)
        sizes = np.array([each.size for each in ids], np.int64)
        self._check_fit(room, of, int((self._lengths[of] + sizes).max()))
        order = np.argsort(of)
        ends = np.cumsum(sizes[order])
        starts = np.repeat(ends - sizes[order] - self._lengths[of[order]], sizes[order])
        tokens = np.concatenate([ids[place] for place in order])
        wanted = np.zeros(tokens.size, np.bool_)
        wanted[ends - 1] = True
        logits = room.run(tokens, np.arange(tokens.size) - starts, np.repeat(of[order], sizes[order]), wanted)
        self._lengths[of] += sizes
        return logits[np.argsort(order)]

    def rest(self, rows: Sequence[int]) -> None:
        """Keep these rows: here a row is touched by nothing but what names it."""

    def decode(self, tokens: Ids) -> Logits:
        """One token more for each of the rows 0 … len(tokens) - 1; give what follows."""
        room = self._check_room()
        rows, positions = np.arange(tokens.size), self._lengths[: tokens.size]
        self._check_fit(room, rows, int(positions.max()) + 1)
        logits = room.run(tokens, positions, rows, np.ones(tokens.size, np.bool_))
        positions += 1
        return logits

    def _score_room(self, length: int) -> Sequences:
        """Return an empty room for one sequence of a given length."""
        model = self._check_whole()
        room = self._room
        if room is None or room.length < length:
            if self._desk is None or self._desk.length < length:
                self._drop_desk()
                self._desk = self._sequences(model, 1, length)
            room = self._desk
        room.clear()
        self._lengths[:] = 0
        return room

    def score(self, ids: Ids, keep: int) -> Logits:
        """Return the logits after each of the last `keep` ids, in one pass; uses no rows."""
        room = self._score_room(ids.size)
        places = np.arange(ids.size)
        logits = room.run(ids, places, np.zeros_like(places), places >= ids.size - keep)
        room.clear()
        return logits

    def score_pieces(self, ids: Ids, keep: int, piece: int) -> Iterator[Logits]:
        """Score a long sequence, a piece after the other."""
        room = self._score_room(ids.size)
        places = np.arange(ids.size)
        for start in range(0, ids.size, piece):
            part = slice(start, start + piece)
            wanted = places[part] >= ids.size - keep
            logits = room.run(ids[part], places[part], np.zeros_like(places[part]), wanted)
            if wanted.any():
                yield logits
        room.clear()

    def score_many(self, sequences: Sequence[Ids], keep: Sequence[int]) -> Logits:
        """Score several sequences, one after the other."""
        if len(sequences) == 1:
            return self.score(sequences[0], keep[0])
        return np.concatenate(
            [self.score(ids, count).copy() for ids, count in zip(sequences, keep, strict=True)]
        )

    def close(self) -> None:
        """Give the memory and the file back."""
        self._whole = False
        self._drop_rooms()
        self._drop_model()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._folder.cleanup()

    @contextmanager
    def _rewriting(self) -> Iterator[GgufFile]:
        """Open the file for changes; afterwards the running model has them."""
        self._whole = False  # should it break off, nothing is computed from a mixture
        file = self._file
        if file is None:
            with boundary(EngineError, "writing the model's file", advice="set another scratch folder"):
                self._file = file = GgufFile(Path(self._folder.name) / "model.gguf", self._plan, self._kind)
                if file.unname() and self._adapter is None:  # whose file is written for every version
                    self._folder.cleanup()
        yield file
        if self._model is None or not self.live:
            self._reload(file)
        if self.live is None:
            self._self_test(file)
        self._whole = True

    def _apply_adapter(self, adapter: LlamaAdapter) -> None:
        """Put the adapter into the model; the base is read from its folder the first time."""
        if self._model is None:
            with self._rewriting() as file:
                file.fill({name: _tensor(each) for name, each in map_folder(self._base).items()})
        self._whole = False
        if self._model is not None:
            with boundary(EngineError, "writing the adapter's file", advice="set another scratch folder"):
                adapter.apply(self._model, self._room, self._desk)
        self._whole = True

    def _reload(self, file: GgufFile) -> LlamaModel:
        """Load the file anew, and make the same room again."""
        room = self._room
        self._drop_rooms()
        self._drop_model()
        self._model = model = LlamaModel(
            file.path,
            gpu_layers=self._gpu_layers,
            mapped=self._mapped,
            repacked=self._kind in _REPACKED,
        )
        if room is not None:
            self._room = self._sequences(model, room.rows, room.length)
            self._lengths[:] = 0
        return model

    def _self_test(self, file: GgufFile) -> None:
        """Test that the running model sees file writes as a reloaded one does."""
        before = self._probe()
        tensors = [file.cells(name) for name in file.slots]
        firsts = [cells[:1].copy() for cells in tensors]
        for cells in tensors:
            cells[:1].view(np.uint8)[-1] ^= 0x02  # a step of a block, the exponent or the largest digit
        running = self._probe()
        self._reload(file)
        anew = self._probe()
        for cells, first in zip(tensors, firsts, strict=True):
            cells[:1] = first
        if anew == before:  # broken weights, which show nothing: the next ones will
            self._reload(file)
            return
        self.live = running == anew and self._probe() == before
        if not self.live:
            _log.warning(
                "llama.cpp does not see writes to the model's file: it loads the file for every update"
            )
            self._reload(file)

    def _probe(self) -> bytes:
        """Return the logits after a few tokens, computed in a row of its own."""
        if self._model is None:
            return b""
        room = Sequences(
            self._model, rows=1, length=_PROBE, threads=self._threads, single=self._kind == "f32"
        )
        try:
            places = np.arange(_PROBE)
            return room.run(places % self.vocabulary, places, 0 * places, places >= 0).tobytes()
        finally:
            room.close()

    def _sequences(self, model: LlamaModel, rows: int, length: int) -> Sequences:
        what = f"room for {rows} rows of {length} positions"
        if rows * rounded(length) > _MOST_POSITIONS:
            raise NoRoomError(f"{what} is more than llama.cpp can number", advice=_FEWER)
        need = self._kv_bytes(rows, length) + self._work_bytes(rows, length)
        check_fits(need, what, advice=_FEWER)
        # Mapped weights count as free memory though they are in use: compare with the start too.
        free = max(available_memory() or 0, self._free_at_first or 0)
        if free and self._size + need > SPARE * free:
            raise NoRoomError(
                f"{what} and the weights would take {(self._size + need) / 1e9:.2f} GB of {free / 1e9:.2f} GB",
                advice=_FEWER,
            )
        room = Sequences(model, rows=rows, length=length, threads=self._threads, single=self._kind == "f32")
        if self._adapter is not None:
            self._adapter.attach(room)
        return room

    def _kv_bytes(self, rows: int, length: int) -> int:
        per = 2 * self._plan.layers * self._plan.kv_heads * self._plan.head_size
        return rows * rounded(length) * per * (4 if self._kind == "f32" else 2)

    def _work_bytes(self, rows: int, length: int) -> int:
        """Return the bytes of a pass: activations, attention, logits and our copy of them."""
        plan = self._plan
        per = 8 * plan.hidden + 3 * plan.feed_forward + plan.heads * (rounded(length) + 4 * plan.head_size)
        return 4 * (PIECE * per + 2 * outputs(rows, plan.vocabulary) * plan.vocabulary)

    def _check_whole(self) -> LlamaModel:
        if self._model is None or not self._whole:
            raise EngineError(
                "llama.cpp has no weights, or half of them", advice="load those of a head first"
            )
        return self._model

    def _check_room(self) -> Sequences:
        self._check_whole()
        if self._room is None:
            raise EngineError("llama.cpp has no rows to decode in", advice="make room first")
        return self._room

    def _check_fit(self, room: Sequences, rows: Ids, length: int) -> None:
        """Asked for more, llama.cpp ends the process."""
        if rows.min() < 0 or rows.max() >= room.rows:
            raise EngineError(
                f"row {rows.max()} where there is room for {room.rows}", advice="make more room first"
            )
        if length > room.length:
            raise EngineError(f"{length} positions for rows of {room.length}", advice="make more room first")

    def _drop_rooms(self) -> None:
        self._drop_desk()
        if self._room is not None:
            self._room.close()
            self._room = None

    def _drop_desk(self) -> None:
        if self._desk is not None:
            self._desk.close()
            self._desk = None

    def _drop_model(self) -> None:
        if self._adapter is not None:
            self._adapter.drop()
        if self._model is not None:
            self._model.close()
            self._model = None


def _tensor(mapped: MappedTensor) -> TensorBytes:
    """Return a tensor of a base, which is bf16."""
    if mapped.dtype != "BF16":
        raise EngineError(f"the base has a tensor of the type {mapped.dtype}, not of bf16")
    return TensorBytes("bf16", mapped.shape, mapped.data)
