"""The decoder interface: a model in memory, with rows of keys and values.

torch and llama.cpp each implement it. A row holds the ids of one sequence from its first position
on. The rows in use are numbered 0 … n-1 without a gap; the caller keeps them so. Beyond them rows
may rest, with a sequence that is to be extended later. A decoder draws no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from echo_node.engine.base import Change, Ids, TensorBytes
from echo_node.engine.token_sampling import Follows, Logits


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
        """Bytes of weights, keys and values."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that it wants, by their Hugging Face names, tied ones once."""

    def load(self, weights: Mapping[str, TensorBytes]) -> None:
        """Copy all weights in. They have been checked against `shapes`."""

    def put(self, changes: Iterable[Change]) -> None:
        """Copy elements in, effective at once.

        Their types are those of the loaded weights. Rows in use are stale afterwards.
        """

    def make_room(self, rows: int, length: int) -> None:
        """Reserve rows of a given length; no row is in use afterwards.

        Raises `NoRoomError` if that takes too much memory.
        """

    def prefill(self, rows: Sequence[int], prompts: Sequence[Ids]) -> Follows:
        """Fill rows afresh, whatever was in them; give what follows each prompt."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another row."""

    def extend(self, rows: Sequence[int], ids: Sequence[Ids]) -> Follows:
        """Append ids to rows, keeping keys and values; return the last logits."""

    def rest(self, rows: Sequence[int]) -> None:
        """Keep these rows as they are, beside those that `decode` appends to."""

    def decode(self, tokens: Ids) -> Follows:
        """Append a token to each of the rows 0 … len(tokens) - 1; return their logits."""

    def score(self, ids: Ids, keep: int) -> Logits:
        """Return the logits after each of the last `keep` ids, in one pass; uses no rows."""

    def score_many(self, sequences: Sequence[Ids], keep: Sequence[int]) -> Logits:
        """Score several sequences; return their logits one sequence after another."""

    def score_pieces(self, ids: Ids, keep: int, piece: int) -> Iterator[Logits]:
        """Yield the logits of the last `keep` ids of a long sequence, in pieces.

        A piece has at most `piece` ids, and leaves only its keys and values behind in memory.
        """

    def close(self) -> None:
        """Give the memory back."""
