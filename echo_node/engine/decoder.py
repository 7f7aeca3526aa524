"""What torch and llama.cpp each do their own way: a model in memory, and rows of keys and values to decode in.

A row holds the ids of one sequence from its first position on. The rows in use are numbered 0 … n-1 without a hole;
whoever uses a decoder keeps them so. A decoder draws nothing and knows no head, limit, key or request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from echo_node.engine.base import Change, Ids, TensorBytes
from echo_node.engine.draws import Logits


class Decoder(Protocol):
    """One model. Logits have one row per place and at least `vocabulary` columns."""

    engine_class: str
    device: str
    vocabulary: int
    context: int | None
    """The longest sequence; None: no bound."""
    granule: int
    """Elements that `put` wants changed together: 1, or the block of a quantised type."""
    parameters: int

    @property
    def memory_bytes(self) -> int:
        """What weights, keys and values take."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that it wants, by their Hugging Face names, tied ones once."""

    def load(self, weights: Mapping[str, TensorBytes]) -> None:
        """Copy all weights in. They have been checked against `shapes`."""

    def put(self, changes: Iterable[Change]) -> None:
        """Copy elements in, live at once; their types are those of what was loaded. Rows in use are stale afterwards."""

    def make_room(self, rows: int, length: int) -> None:
        """Be ready for so many rows of so many positions, which may be there already. No row is in use.

        A `NoRoomError` (see `fitting`) if that takes too much memory.
        """

    def prefill(self, rows: Sequence[int], prompts: Sequence[Ids]) -> Logits:
        """Fill rows afresh, whatever was in them; give what follows each prompt."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let a row begin as another does: with its first `length` positions, and nothing after them."""

    def decode(self, tokens: Ids) -> Logits:
        """One token more for each of the rows 0 … len(tokens) - 1; give what follows. Further rows are free."""

    def score(self, ids: Ids, keep: int) -> Logits:
        """What follows each of the last `keep` ids, by one pass. No row is in use, nor afterwards."""

    def score_many(self, sequences: Sequence[Ids], keep: Sequence[int]) -> Logits:
        """The same for several sequences: the places of the first, then those of the next, and so on."""

    def close(self) -> None:
        """Give the memory back."""
