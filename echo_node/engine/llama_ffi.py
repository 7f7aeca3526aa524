"""llama.cpp's C interface as two objects: a loaded model, and its sequences.

Each frees its memory by `close`. The library's log is silenced; its first complaint is quoted in
the error. Whatever would make the library abort the process is checked beforehand.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Ids
from echo_node.errors import EngineError

MOST_SEQUENCES: Final = 256  # llama.cpp's own bound
_ROUND: Final = 256  # it rounds a sequence's positions up to a multiple of this
_BATCH: Final = 2048  # tokens that are handed over at once
PIECE: Final = 512  # tokens that are computed at once
_OUTPUT: Final = 2**25  # logits that are computed at once
_ERROR, _CONTINUED = 4, 5  # levels of its log
_GPUS: Final = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU

_complaints: deque[str] = deque(maxlen=8)
_complaining = False


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _listen(level: int, text: bytes | None, _: Any) -> None:
    global _complaining  # noqa: PLW0603  # one library, one log
    _complaining = level == _ERROR or (level == _CONTINUED and _complaining)
    if _complaining and text and (line := text.decode("utf-8", "replace").strip()):
        _complaints.append(line)


def _silence() -> None:
    _complaints.clear()
    llama_cpp.llama_log_set(_listen, ctypes.c_void_p(0))


def _failure(what: str, advice: str) -> EngineError:
    """Return an error that quotes llama.cpp's first complaint.

    Later ones only say that it failed.
    """
    complaint = f": {_complaints[0]}" if _complaints else ""
    return EngineError(f"{what}{complaint}", advice=advice)


def adapter_failure() -> EngineError:
    """Return the error of an adapter that llama.cpp does not take."""
    return _failure("llama.cpp does not take the adapter", "load the weights again")


def offloads() -> bool:
    """Return whether this build of llama.cpp can offload layers to a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())


def gpu_memory() -> int | None:
    """Return the free bytes of all GPUs of llama.cpp; None if it cannot tell."""
    llama_cpp.llama_backend_init()
    library: Any = llama_cpp.llama_cpp._lib  # noqa: SLF001 - these functions have no binding
    if not hasattr(library, "ggml_backend_dev_memory"):
        return None
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    free, total, found = ctypes.c_size_t(), ctypes.c_size_t(), 0
    for index in range(library.ggml_backend_dev_count()):
        device = ctypes.c_void_p(library.ggml_backend_dev_get(ctypes.c_size_t(index)))
        if library.ggml_backend_dev_type(device) in _GPUS:
            library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            found += free.value
    return found


class LlamaModel:
    """A model's weights.

    `mapped`: used from the mapped file. `repacked`: reordered for the CPU.
    """

    def __init__(self, path: Path, *, gpu_layers: int, mapped: bool, repacked: bool) -> None:
        _silence()
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = gpu_layers
        options.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        options.lazy_mode = llama_cpp.LLAMA_LAZY_MODE_OFF
        options.use_extra_bufts = repacked
        self.on_gpu = gpu_layers != 0
        self.handle: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise _failure("llama.cpp cannot load the model's file", "load the weights again")
        vocabulary: Any = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(vocabulary))

    def close(self) -> None:
        if self.handle:
            llama_cpp.llama_model_free(self.handle)
            self.handle = None


def rounded(length: int) -> int:
    """Return the positions that a sequence of this length takes."""
    return -(-length // _ROUND) * _ROUND


def outputs(rows: int, vocabulary: int) -> int:
    """Places whose logits are computed at once."""
    return max(rows, 1, min(PIECE, _OUTPUT // vocabulary))


class Sequences:
    """KV rows of up to `length` positions; `single`: float32, without flash attention."""

    def __init__(self, model: LlamaModel, *, rows: int, length: int, threads: int, single: bool) -> None:
        _silence()
        self.rows, self.length = rows, rounded(length)
        self._vocabulary, self._outputs = model.vocabulary, outputs(rows, model.vocabulary)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = rows * self.length
        options.n_seq_max = rows
        options.n_batch = self._batch = min(_BATCH, rows * self.length)
        options.n_ubatch = PIECE
        options.n_outputs_max = self._outputs
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = False
        options.swa_full = True  # layers with a window keep all keys too: rows are copied and cut
        options.no_perf = True
        options.offload_kqv = options.op_offload = model.on_gpu
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32 if single else llama_cpp.GGML_TYPE_F16
        options.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if single else llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        )
        self._handle: Any = llama_cpp.llama_init_from_model(model.handle, options)
        if not self._handle:
            raise _failure(
                f"llama.cpp cannot make room for {rows} rows of {self.length} positions",
                "take fewer rows or shorter ones",
            )
        self._memory: Any = llama_cpp.llama_get_memory(self._handle)
        self._tokens = np.zeros(self._batch, np.int32)
        self._positions = np.zeros(self._batch, np.int32)
        self._of = np.zeros(self._batch, np.int32)
        self._wanted = np.zeros(self._batch, np.int8)
        self._one = np.ones(self._batch, np.int32)
        # llama.cpp wants a list of rows per token: each is one long.
        self._lists = self._of.ctypes.data + self._of.itemsize * np.arange(self._batch, dtype=np.uintp)
        self._given = llama_cpp.llama_batch(
            token=self._tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            pos=self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._one.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._lists.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._logits = np.empty((self._outputs, self._vocabulary), np.float32)

    def run(self, tokens: Ids, positions: Ids, rows: Ids, wanted: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Append tokens to rows; return the wanted logits in order.

        They are valid until the next call.
        """
        seen = np.cumsum(wanted)
        count = int(seen[-1])
        logits = self._logits[:count]
        if count > self._outputs:
            logits = np.empty((count, self._vocabulary), np.float32)
        start = done = 0
        while start < tokens.size:
            stop = min(start + self._batch, int(np.searchsorted(seen, done + self._outputs, side="right")))
            size = stop - start
            self._tokens[:size] = tokens[start:stop]
            self._positions[:size] = positions[start:stop]
            self._of[:size] = rows[start:stop]
            self._wanted[:size] = wanted[start:stop]
            self._decode(size)
            until = int(seen[stop - 1])
            if until > done:
                # A copy: the library's own buffer moves and goes away as it likes.
                there = llama_cpp.llama_get_logits(self._handle)
                ctypes.memmove(logits[done:until].ctypes.data, there, logits[done:until].nbytes)
            start, done = stop, until
        return logits

    def _decode(self, size: int) -> None:
        self._given.n_tokens = size
        _complaints.clear()
        if (code := llama_cpp.llama_decode(self._handle, self._given)) != 0:
            raise _failure(
                f"llama.cpp could not decode {size} tokens (code {code})", "load the weights again"
            )

    def cut(self, row: int, length: int) -> None:
        """Forget what a row holds beyond its first positions."""
        llama_cpp.llama_memory_seq_rm(self._memory, row, length, -1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let a row be the beginning of another. The library copies rows whole."""
        if source != target:
            llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.cut(target, length)

    def set_adapters(self, handles: Any, scales: Any) -> None:
        """Compute with these adapters; the rows' keys and values stay as they were."""
        if llama_cpp.llama_set_adapters_lora(self._handle, handles, len(handles), scales) != 0:
            raise adapter_failure()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)  # noqa: FBT003

    def close(self) -> None:
        if self._handle:
            llama_cpp.llama_free(self._handle)
            self._handle = None
