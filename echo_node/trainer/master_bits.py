"""Split float32 masters into their published bf16 value and a 16-bit remainder.

The value is the master's bit pattern, rounded half up to its upper 16 bits; the remainder is the
lower 16 bits, read as a signed number. Their sum, as bit patterns, is the master again: every one
of the 2³² patterns has exactly one pair. (Half to even would not do: 3F808000 and 3F7F8000 would
both be 3F80 with the remainder 8000.) A pattern's sign bit is apart from its size, so "up" is away
from zero; subnormals are no special case. A finite master from 7F7F8000 on has the value infinity,
as with any rounding to nearest, and is still recovered from its pair.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_HALF: Final = 0x8000


def split(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, as bf16, and the remainders, as int16, of float32 masters."""
    bits = masters.contiguous().view(torch.int32)
    values = (bits + _HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return values, bits.to(torch.int16)


def join(values: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 masters of values and remainders.

    Values are bf16, or upcast to float32.
    """
    if values.dtype == torch.bfloat16:
        bits = values.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(remainders).view(torch.float32)
    return (values.view(torch.int32) + remainders).view(torch.float32)
