"""Bytes of tensors: those alive now, and the most that were alive at a time in a block."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def live_storages() -> dict[int, int]:
    """Return the bytes of each storage of a tensor that this process holds, by its identity.

    Tensors of a compiled graph, whose sizes are symbols, hold no memory.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    size: Any = storage.nbytes()
                    if isinstance(size, int):
                        storages[storage._cdata] = size  # noqa: SLF001 - no public identity
    return storages


class PeakBytes(TorchDispatchMode):
    """Counts storages that are made after this is, for as long as they are alive.

    Fake tensors count like any others: what would be made is known without any arithmetic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = set(live_storages())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key = storage._cdata  # noqa: SLF001
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
