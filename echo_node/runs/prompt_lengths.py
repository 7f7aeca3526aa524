"""Token limits of a run that fit its model and its data.

Prompts and answers are measured in tokens, as the model reads them. Limits that the run's file
leaves open follow from them; prompts over the limit are left out before anything is sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo_node.errors import ConfigError
from protocol import limits

_MARGIN: Final = 1.25  # of generated prompts: a sample's longest is not the longest
_ANSWER_ROOM: Final = 2.0  # tokens of a completion for each of a written answer
_LEAST_TOKENS: Final = 128
_LEAST_THINKING: Final = 1024
_MOST_TOKENS: Final = 4096
_STEP: Final = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the prompts and of the answers that came with them."""

    prompts: Sequence[int]
    answers: Sequence[int]
    complete: bool
    """Whether these are all prompts of the run, or a sample of what a contract generates."""

    def choose(
        self,
        context: int,
        *,
        max_prompt: int | None,
        max_tokens: int | None,
        thinking: bool = False,
        exact: bool = False,
    ) -> tuple[int, int]:
        """Return `max_prompt` and `max_tokens`: those given, or what fits the lengths.

        `exact` leaves no room beyond the longest answer, for models that write nothing else.
        """
        longest = max(self.prompts)
        if max_prompt is None:
            spread = not self.complete and min(self.prompts) != longest
            max_prompt = _round_up(longest * _MARGIN) if spread else longest
            max_prompt = min(max_prompt, max(1, context // 2), limits.TOKENS)
        if max_tokens is None:
            answer = max(self.answers, default=0) + 1  # the end token
            least = _LEAST_THINKING if thinking else _LEAST_TOKENS
            most = min(_MOST_TOKENS, context - max_prompt, limits.TOKENS)
            max_tokens = min(answer if exact else max(least, _round_up(answer * _ANSWER_ROOM)), most)
        if max_tokens < 1 or max_prompt + max_tokens > context:
            raise ConfigError(
                f"sampling.max_prompt {max_prompt} and max_tokens {max_tokens} exceed the model's context of {context}",
                advice="lower one of the two, or take a model with a longer context",
            )
        return max_prompt, max_tokens

    def check(self, max_prompt: int, contract: str) -> None:
        """Refuse a limit under which no prompt is left."""
        if min(self.prompts) > max_prompt:
            raise ConfigError(
                f"sampling.max_prompt is {max_prompt}, and of {len(self.prompts)} prompts of {contract} the shortest has"
                f" {min(self.prompts)} tokens: every group would be refused",
                advice=f"set it to {max(self.prompts)} or more",
            )

    def describe(self) -> str:
        """Describe the lengths in words."""
        return (
            f"{len(self.prompts)} prompts of {min(self.prompts)} to {max(self.prompts)} tokens,"
            f" answers of up to {max(self.answers, default=0)}"
        )


def _round_up(tokens: float) -> int:
    return -(-int(tokens) // _STEP) * _STEP
