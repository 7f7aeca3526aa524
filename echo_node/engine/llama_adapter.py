"""LoRA adapter of a llama.cpp model, as a GGUF adapter swapped whole.

A and B are float32 in the file, so that bf16 values arrive exactly. Rows of B follow the order
in which the base's rows lie in llama.cpp's file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Change, TensorBytes
from echo_node.engine.gguf_map import ModelPlan
from echo_node.engine.llama_ffi import LlamaModel, Sequences, adapter_failure
from echo_node.errors import EngineError
from echo_node.models.adapter import AdapterSettings, AdapterTensor, adapter_tensors

_NAMES: Final = {"A": "lora_a", "B": "lora_b"}


class LlamaAdapter:
    """The adapter of one model, in this process and in llama.cpp."""

    def __init__(self, plan: ModelPlan, settings: AdapterSettings, folder: Path) -> None:
        shapes = {name: place.shape for name, place in plan.places.items()}
        self.tensors = {each.name: each for each in adapter_tensors(shapes, settings)}
        self._plan, self._settings, self._path = plan, settings, folder / "adapter.gguf"
        self._values: dict[str, NDArray[np.uint16]] = {}
        """Bit patterns of the tensors' bf16 values, in their own order."""
        self._handle: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in float32."""
        return 4 * sum(each.shape[0] * each.shape[1] for each in self.tensors.values())

    def load(self, weights: Mapping[str, TensorBytes]) -> None:
        """Take all tensors over; they have been checked against the shapes."""
        if any(weights[name].dtype != "bf16" for name in self.tensors):
            raise EngineError("an adapter whose tensors are not bf16")
        self._values = {name: np.frombuffer(weights[name].data, "<u2").copy() for name in self.tensors}

    def put(self, changes: Iterable[Change]) -> None:
        """Take changed elements over."""
        for change in changes:
            held = self._values.get(change.tensor)
            if held is None or change.values.dtype.itemsize != held.dtype.itemsize:
                raise EngineError(f"a change of {change.tensor}, which the adapter does not have")
            if change.positions.size and not 0 <= change.positions[0] <= change.positions[-1] < held.size:
                raise EngineError(f"a change of {change.tensor} outside its shape")
            held[change.positions] = change.values

    def apply(self, model: LlamaModel, *rooms: Sequences | None) -> None:
        """Put the tensors into the running model, in place of those that were in."""
        self._write()
        handle: Any = llama_cpp.llama_adapter_lora_init(model.handle, os.fsencode(self._path))
        self._path.unlink()
        if not handle:
            raise adapter_failure()
        before, self._handle = self._handle, handle
        for room in rooms:
            self.attach(room)
        if before:
            llama_cpp.llama_adapter_lora_free(before)

    def attach(self, room: Sequences | None) -> None:
        """Let sequences compute with the adapter."""
        if room is not None and self._handle:
            handles = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._handle)
            room.set_adapters(handles, (ctypes.c_float * 1)(1.0))

    def drop(self) -> None:
        """Forget what is in the model, which frees it as it is closed."""
        self._handle = None

    def _write(self) -> None:
        writer = gguf.GGUFWriter(self._path, self._plan.architecture)
        try:
            writer.add_type("adapter")
            writer.add_string("adapter.type", "lora")
            writer.add_float32("adapter.lora.alpha", self._settings.alpha)
            for each in self.tensors.values():
                place = self._plan.places[f"{each.module}.weight"]
                writer.add_tensor(f"{place.name}.{_NAMES[each.side]}", self._floats(each))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    def _floats(self, tensor: AdapterTensor) -> NDArray[np.float32]:
        bits = self._values[tensor.name].astype(np.uint32) << 16
        found = bits.view(np.float32).reshape(tensor.shape)
        if tensor.side == "B":
            found = found[np.argsort(self._plan.places[f"{tensor.module}.weight"].row_order())]
        return np.ascontiguousarray(found)
