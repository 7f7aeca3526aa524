"""Blockwise attention over rows of token trees, without a full mask.

No mask as large as a row's square exists. Places of a row are in preorder, so the descendants of a
place are the places after it up to its end: who sees whom follows from one number for each place.
Blocks in which nothing is seen are left out. Scores of one block exist at a time; going backward
they are computed again. Registered with transformers by name, so that scaling, soft caps, windows
and grouped heads stay each family's own. Short rows take a dense mask and torch's kernel; on CUDA
long ones take `flex_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from echo_node.engine.attention_masks import added_mask, by_layer_type

TREE: Final = "echo_tree"
"""Name of this attention in transformers."""
DENSE: Final = 256
"""Places of the longest row that takes a dense mask."""
BLOCK: Final = 128
"""Places of a block, for queries and for keys."""
LONG: Final = 4096
"""Places from which on a row has blocks four times as long: there are fewer pairs to go through."""
FLEX_DEVICES: Final = ("cuda",)
FLEX_BLOCK: Final = 128
"""Places of a block of `flex_attention`."""
_NO_BLOCK_MASKS: Final = ("gpt2",)
"""Families whose class in transformers takes tensors as masks, and nothing else."""
EVERYWHERE: Final = 2**31 - 1
"""Window of a layer that has none."""


class Blocks(NamedTuple):
    """Blocks with something seen, and with all seen; [rows, queries, keys]."""

    some: Tensor
    all: Tensor


def tree_masks(config: Any, ends: Tensor, positions: Tensor) -> Any:
    """Return what a model with the attention `TREE` takes as `attention_mask`.

    `ends` and `positions` are [rows, places]: the place after a place's last descendant, and the
    position that a token has in its own sequence.
    """
    soft_cap = getattr(config, "attn_logit_softcapping", None) is not None
    form: Callable[[Tensor, Tensor, int], Tensor | BlockMask]
    if ends.shape[1] <= DENSE and not soft_cap:
        form = _dense
    else:
        flex = ends.device.type in FLEX_DEVICES and config.model_type not in _NO_BLOCK_MASKS
        form = flex_mask if flex else places_mask
    return by_layer_type(config, lambda window: form(ends, positions, window or EVERYWHERE))


def seen(ends: Tensor, positions: Tensor, window: int, queries: slice, keys: slice) -> Tensor:
    """Return [rows, queries, keys]: true where a place sees an ancestor or itself."""
    own = torch.arange(queries.start, queries.stop, device=ends.device)[:, None]
    others = torch.arange(keys.start, keys.stop, device=ends.device)
    found = (others <= own) & (own < ends[:, None, keys])
    if window < EVERYWHERE:
        found &= positions[:, queries, None] - positions[:, None, keys] < window
    return found


def blocks_of(ends: Tensor, positions: Tensor, window: int, size: int) -> Blocks:
    """Sort block pairs by what is seen in them; may overstate what is seen."""
    rows, places = ends.shape
    count = -(-places // size)
    tail = count * size - places

    def bounds(values: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat((values, values[:, -1:].expand(rows, tail)), dim=1)
        return torch.aminmax(padded.view(rows, count, size), dim=2)

    first = torch.arange(0, count * size, size, device=ends.device)
    last = torch.clamp(first + size, max=places) - 1
    least, most = bounds(ends)
    some = (first <= first[:, None]) & (most[:, None, :] > first[:, None])
    every = (last <= first[:, None]) & (least[:, None, :] > last[:, None])
    if window < EVERYWHERE:
        nearest, farthest = bounds(positions)
        some &= nearest[:, :, None] - farthest[:, None, :] < window
        every &= farthest[:, :, None] - nearest[:, None, :] < window
    return Blocks(some, every)


def _dense(ends: Tensor, positions: Tensor, window: int) -> Tensor:
    whole = slice(0, ends.shape[1])
    return added_mask(seen(ends, positions, window, whole, whole), torch.float32)


def places_mask(ends: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return ends, positions and window as [rows, 1, places, 3].

    A mask has four dimensions.
    """
    return torch.stack((ends, positions, torch.full_like(ends, window)), dim=-1)[:, None]


def flex_mask(ends: Tensor, positions: Tensor, window: int) -> BlockMask:
    """Return the block mask of `flex_attention`, made without the square of a row."""
    blocks = blocks_of(ends, positions, window, FLEX_BLOCK)

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = positions[row, query] - positions[row, key] < window
        return (key <= query) & (query < ends[row, key]) & near

    def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        return chosen.sum(dim=-1).int()[:, None], order.int()[:, None]

    return BlockMask.from_kv_blocks(
        *ordered(blocks.some & ~blocks.all),
        *ordered(blocks.all),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(ends.shape[1], ends.shape[1]),
    )


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, BlockMask):
        return _flex(query, key, value, attention_mask, scale, softcap).transpose(1, 2).contiguous(), None
    if attention_mask.is_floating_point():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **rest
        )
    ends, positions, windows = attention_mask[:, 0].unbind(-1)
    window = int(windows[0, 0])
    found: Tensor = BlockAttention.apply(query, key, value, ends, positions, window, scale, softcap or 0.0)  # type: ignore[no-untyped-call]
    return found.transpose(1, 2).contiguous(), None


def _flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    attend: Any = _compiled() if query.is_cuda else flex_attention
    found: Tensor = attend(
        query,
        key,
        value,
        score_mod=capped if softcap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return found


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


class BlockAttention(torch.autograd.Function):
    """Softmax attention in blocks, with running maxima and sums, and its gradient.

    Query is [rows, heads, places, size]; key and value have as many heads, or a divisor of them. A
    soft cap of 0 is none. Computed in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        positions: Tensor,
        window: int,
        scale: float,
        cap: float,
    ) -> Tensor:
        work = _Work(query, key, ends, positions, window, scale, cap)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        logs = work.new_rows(query.shape[2])
        for own, others in work.pairs():
            asked = work.grouped(query, own)
            most = asked.new_full((*asked.shape[:-1], 1), -torch.inf)
            total, found = torch.zeros_like(most), asked.new_zeros((*asked.shape[:-1], value.shape[-1]))
            for keys, full in others:
                scores, _ = work.scores(asked, own, keys, key, full=full)
                higher = torch.maximum(most, scores.amax(dim=-1, keepdim=True)).clamp_(min=_LEAST)
                shrink = (most - higher).exp_()
                scores.sub_(higher).exp_()
                total.mul_(shrink).add_(scores.sum(dim=-1, keepdim=True))
                found.mul_(shrink).add_(scores @ work.part(value, keys))
                most = higher
            work.ungroup(out, own, found.div_(total))
            logs[:, :, own] = work.ungrouped(most.add_(total.log_()), own)[..., 0]
        ctx.save_for_backward(query, key, value, ends, positions, out, logs)
        ctx.given = window, scale, cap
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, ends, positions, out, logs = ctx.saved_tensors
        (slope,) = slopes
        window, scale, cap = ctx.given
        work = _Work(query, key, ends, positions, window, scale, cap)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(each, dtype=work.dtype) for each in (key, value))
        for own, others in work.pairs():
            asked, back = work.grouped(query, own), work.grouped(slope, own)
            level = (back * work.grouped(out, own)).sum(dim=-1, keepdim=True)
            log = work.grouped(logs[..., None], own)
            found = torch.zeros_like(asked)
            for keys, full in others:
                shares, bend = work.scores(asked, own, keys, key, full=full)
                shares.sub_(log).exp_()
                of_value[:, :, keys] += shares.mT @ back
                shares.mul_((back @ work.part(value, keys).mT).sub_(level))
                if bend is not None:
                    shares.mul_(bend)
                shares.mul_(scale)
                found.add_(shares @ work.part(key, keys))
                of_key[:, :, keys] += shares.mT @ asked
            work.ungroup(of_query, own, found)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), *[None] * 5


_LEAST: Final = -1e30
"""Maximum of scores of which none was seen yet: what is subtracted must be finite."""


class _Work:
    """Blocks of one call; query heads of one key head become more queries of it."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        ends: Tensor,
        positions: Tensor,
        window: int,
        scale: float,
        cap: float,
    ) -> None:
        self._ends, self._positions, self._window = ends, positions, window
        self._scale, self._cap = scale, cap
        self._shape, self._shared = query.shape, key.shape[1]
        self._group = query.shape[1] // key.shape[1]
        self._device = query.device
        self.dtype = torch.promote_types(query.dtype, torch.float32)

    def new_rows(self, places: int) -> Tensor:
        return torch.empty((*self._shape[:2], places), dtype=self.dtype, device=self._device)

    def pairs(self) -> list[tuple[slice, list[tuple[slice, bool]]]]:
        """Return query blocks, each with the key blocks that it sees in part or whole."""
        places = self._shape[2]
        size = BLOCK if places < LONG else 4 * BLOCK
        blocks = blocks_of(self._ends, self._positions, self._window, size)
        some, every = blocks.some.any(dim=0).tolist(), blocks.all.all(dim=0).tolist()

        def block(number: int) -> slice:
            return slice(number * size, min((number + 1) * size, places))

        return [
            (block(own), [(block(at), every[own][at]) for at, there in enumerate(row) if there])
            for own, row in enumerate(some)
        ]

    def part(self, values: Tensor, block: slice) -> Tensor:
        return values[:, :, block].to(self.dtype)

    def grouped(self, values: Tensor, block: slice) -> Tensor:
        """Return a block of [rows, heads, places, n] grouped by key head.

        The result is [rows, key heads, group · block, n].
        """
        part = self.part(values, block)
        return part.reshape(len(part), self._shared, -1, part.shape[-1])

    def ungrouped(self, values: Tensor, block: slice) -> Tensor:
        return values.reshape(self._shape[0], self._shape[1], block.stop - block.start, -1)

    def ungroup(self, target: Tensor, block: slice, values: Tensor) -> None:
        target[:, :, block] = self.ungrouped(values, block)

    def scores(
        self, asked: Tensor, own: slice, keys: slice, key: Tensor, *, full: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return a block pair's scores, −∞ where unseen, and the cap's slope."""
        scores = (asked @ self.part(key, keys).mT).mul_(self._scale)
        bend = None
        if self._cap:
            scores.div_(self._cap).tanh_()
            bend = 1.0 - scores * scores
            scores.mul_(self._cap)
        if not full:
            there = seen(self._ends, self._positions, self._window, own, keys)
            hidden = ~there[:, None, None]
            shape = (*scores.shape[:2], self._group, own.stop - own.start, keys.stop - keys.start)
            scores.view(shape).masked_fill_(hidden, -torch.inf)
        return scores, bend


AttentionInterface.register(TREE, _attend)
AttentionMaskInterface.register(TREE, sdpa_mask)
