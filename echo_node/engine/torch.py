"""The engine on transformers models, computing in float32. Weights come from `load` and from nowhere else.

Drawing is numpy's, in float64 on the CPU, whatever the device. On one machine, with one number of threads, the same
requests give the same bits. It knows nothing of peers, runs or text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from echo_node.engine.base import (
    Description,
    Draw,
    EngineStoppedError,
    Ids,
    SamplingLimits,
    Scores,
    SlotRequest,
    TensorBytes,
    never,
)
from echo_node.engine.branches import Branches
from echo_node.engine.causal import CausalBatch, CausalModel
from echo_node.engine.checks import Reach, check_weights
from echo_node.engine.draws import draw, measure
from echo_node.errors import EngineError, boundary


class TorchEngine:
    """One model in this process. `threads` sets torch's number of threads, which is the whole process's."""

    engine_class: str = "torch/f32"

    def __init__(self, model_folder: Path, *, device: str = "auto", threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        with boundary(EngineError, f"building the model of {model_folder}"):
            self._model = CausalModel(
                model_folder, torch.device(_best_device() if device == "auto" else device)
            )
        self._reach = Reach(self._model.vocabulary, self._model.context)
        self._busy = threading.Lock()
        self.loaded: bytes | None = None

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        """Take these weights, by their Hugging Face names, tied ones once: all of them or, if one is wrong, none."""
        with self._alone("loading weights"):
            own = self._model.weights
            check_weights(weights, {name: tuple(weight.shape) for name, weight in own.items()})
            self.loaded = None  # should the copying break off, no head's name stands over a mixture
            with torch.no_grad():
                for name, weight in own.items():
                    weight.copy_(torch.from_numpy(_float32(weights[name])))
            self.loaded = head_id

    def generate(
        self,
        requests: Sequence[SlotRequest],
        limits: SamplingLimits,
        cancelled: Callable[[], bool] = never,
    ) -> list[tuple[Draw, ...]]:
        """A group for each request, in order. `cancelled` is asked before each token: `EngineStoppedError`."""
        with self._alone("generating"), torch.inference_mode():
            self._check_loaded()
            self._reach.check_requests(requests, limits)
            if not requests:
                return []
            branches = Branches(requests, limits)
            batch = CausalBatch(self._model, [request.prompt for request in requests])
            logits = batch.prefill()
            while not cancelled():
                known = logits[:, : limits.vocab_size]
                growth = branches.grow(*draw(known, branches.rows, branches.luck, limits.temperature))
                if growth is None:
                    return branches.groups()
                logits = batch.decode(growth)
            raise EngineStoppedError("generation was stopped by whoever asked for it")

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""
        with self._alone("scoring"), torch.inference_mode():
            self._check_loaded()
            self._reach.check_claim(prompt, ids, limits)
            before = np.concatenate((prompt, ids[:-1])).astype(np.int64)  # the last token is only predicted
            logits = self._model.forward(before[None], keep=ids.size, use_cache=False)[0]
            return measure(logits[:, : limits.vocab_size], ids, limits.temperature)

    def describe(self) -> Description:
        """What this engine is and takes."""
        weights = self._model.weights.values()
        return Description(
            engine_class=self.engine_class,
            device=str(self._model.device),
            parameters=sum(weight.numel() for weight in weights),
            memory_bytes=sum(weight.nbytes for weight in weights),
            context=self._model.context,
        )

    def _check_loaded(self) -> None:
        if self.loaded is None:
            raise EngineError("the engine has no weights", advice="load those of a head first")

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """No token is drawn from a mixture of weights: a second call while one runs is refused."""
        if not self._busy.acquire(blocking=False):
            raise EngineError(f"{doing} while another call runs", advice="make one call at a time")
        try:
            with boundary(EngineError, doing):
                yield
        finally:
            self._busy.release()


def _float32(tensor: TensorBytes) -> NDArray[np.float32]:
    """A tensor's values in memory of their own. bf16 is the upper half of a float32."""
    if tensor.dtype == "bf16":
        upper = np.frombuffer(tensor.data, "<u2").astype(np.uint32)
        values = (upper << np.uint32(16)).view(np.float32)
    else:
        values = np.frombuffer(tensor.data, "<f2" if tensor.dtype == "f16" else "<f4").astype(np.float32)
    return values.reshape(tensor.shape)


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
