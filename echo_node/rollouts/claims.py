"""Check claimed rewards against the contract's; decide which are lies.

Nothing is selected, learnt or credited by a claim. Where the manifest says that the contract is
pure, a claim that differs refuses its group. It is a lie only if two fresh jail processes give one
and the same other value: a time-out on a loaded machine is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_node.contract import Score
from echo_node.errors import ContractError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import episodes_of
from echo_node.runs.run import Run, Scorable

SLACK: Final = 1e-6
"""Absolute difference between a claimed and a computed reward that is ignored."""
FRESH: Final = 2
"""Jail processes, each started for it, that must agree before a claim is a lie."""


def differ(group: RolloutRecord, rewards: Sequence[float]) -> bool:
    """Return whether a group claims other rewards than these; False if it claims none."""
    claimed = group.message.rewards
    return claimed is not None and any(
        abs(one - other) > SLACK for one, other in zip(claimed, rewards, strict=True)
    )


def find_lie(run: Run, group: RolloutRecord) -> str | None:
    """Return a group's proven lie about rewards, in words; None without. Blocks.

    It starts jails.
    """
    claimed = group.message.rewards
    if claimed is None:
        return None
    completions = group.message.completions()
    try:
        answers: Sequence[Scorable] = [each.ids for each in completions]
        if run.turn_rules is not None:
            answers = episodes_of(run, group.prompt, completions)
        attempts = [run.fresh_results(group.prompt, answers) for _ in range(FRESH)]
    except ContractError:  # this machine's jail, not the sampler
        return None
    for claim, *results in zip(claimed, *attempts, strict=True):
        values = {each.value if isinstance(each, Score) else None for each in results}
        value = values.pop()
        if not values and value is not None and abs(value - claim) > SLACK:
            return f"claimed reward {claim:g}, the contract gives {value:g}"
    return None
