"""Cost and detection of the default verification policy, and of skipped slots.

Both are played with the verifier's own bookkeeping and drawn numbers; no model is run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.runtime.reputation import LEAST_RATE, Trust
from echo_node.verifier.skipped_slots import SkippedSlots
from protocol.verdict import drawn

_PEER: Final = b"p" * 32
_HEAD: Final = b"h" * 32
_TRIALS: Final = 2000
_ORDERS: Final = 300
_WITHIN: Final = 500
_SETTLED: Final = 200
_CHEATS: Final = 0.1
_LOST: Final = 0.2


def policy(verify_over_generate: float) -> dict[str, float]:
    """Return the cost for settled peers and newcomers, and the detection rate."""
    luck = np.random.default_rng(0)
    found = 0
    for _ in range(_TRIALS):
        trust = Trust()
        for _ in range(_SETTLED):  # a peer that has earned its trust before it cheats
            trust.honest(_PEER, 0.0)
        found += _is_found(trust, luck)
    return {
        "policy_share_of_sampling": round(LEAST_RATE * verify_over_generate, 4),
        "policy_share_of_first_1000_groups": round(_looks(luck, 1000) / 1000 * verify_over_generate, 4),
        "condemned_within_500": found / _TRIALS,
    }


def _is_found(trust: Trust, luck: np.random.Generator) -> bool:
    for _ in range(_WITHIN):
        if drawn(luck.bytes(64), trust.rate(_PEER, 0.0)):
            if luck.random() < _CHEATS:
                return True
            trust.honest(_PEER, 0.0)
    return False


def _looks(luck: np.random.Generator, groups: int) -> float:
    """Return how many of an honest newcomer's first groups are checked."""
    trials, looks = 50, 0
    for _ in range(trials):
        trust = Trust()
        for _ in range(groups):
            if drawn(luck.bytes(64), trust.rate(_PEER, 0.0)):
                trust.honest(_PEER, 0.0)
                looks += 1
    return looks / trials


def skipped_slots(worth: Sequence[float]) -> dict[str, object]:
    """Return slots of one head after which 99 % of skippers of bad halves are found.

    Beside it how often somebody is taken for one of them who loses a fifth of its slots whatever
    they are worth.
    """
    if max(worth) == min(worth):
        return {"needed": "not detectable", "why": "every group is worth the same: there is no luck to find"}
    luck, middle = np.random.default_rng(0), float(np.median(worth))
    values = np.array(worth)
    orders = [luck.permutation(values)[:256] for _ in range(_ORDERS)]
    cheats = sorted(_until_found(order, order > middle) for order in orders)
    honest = [_until_found(order, luck.random(order.size) >= _LOST) for order in orders]
    needed = cheats[int(np.ceil(0.99 * _ORDERS)) - 1]
    return {
        "needed": needed if needed <= len(orders[0]) else "not detectable",
        "false_alarms": float(np.mean([slots <= len(orders[0]) for slots in honest])),
        "gain": round(float(values[values > middle].mean() - values.mean()), 3),
    }


def _until_found(worth: NDArray[np.float64], sent: NDArray[np.bool_]) -> int:
    """Return slots until the holes count against the peer; one too many if never."""
    holes = SkippedSlots()
    for slot in np.flatnonzero(sent):
        holes.record(_HEAD, _PEER, int(slot), float(worth[slot]))
        audited = holes.suspicious(_HEAD, _PEER)
        if audited and holes.worth_less(_HEAD, _PEER, [float(worth[hole]) for hole in audited]):
            return int(slot) + 1
    return len(worth) + 1
