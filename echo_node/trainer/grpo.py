"""GRPO as a pure function: log-probabilities, claims and rewards in; a loss and what is worth knowing of it out.

π_θ is the policy that is trained, μ the sampler's own log-probability of what it drew. The ratio π_θ/μ is
clipped, so that groups of a few versions ago still teach. This module knows nothing of models, padding,
optimisers or peers: whoever calls it has run the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SPREAD_FLOOR = 1e-6  # under the spread of a group's rewards when it divides
LARGEST_LOG_RATIO = 20.0  # e^20 is beyond every ratio of sense; more would be infinite in float32


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """The numbers of the loss; a run's manifest fixes them.

    clip_low, clip_high  outside of them the ratio π_θ/μ pushes no further
    dual_clip            what a ratio counts at most where the advantage is negative: μ is a claim, and a claimed μ near
                         zero would else let one completion own the gradient
    entropy              weight of the bonus for an undecided policy
    advantage            "mean": reward − the group's mean; "normalised": that, divided by the group's spread
    normalise            "token": every token weighs the same; "sequence": every completion weighs the same
    veto                 a completion with any token's ratio below this is dropped and counted
    kl                   weight of the divergence from a reference policy; 0: there is none
    """

    clip_low: float = 0.8
    clip_high: float = 1.28
    dual_clip: float = 3.0
    entropy: float = 0.01
    advantage: Literal["mean", "normalised"] = "mean"
    normalise: Literal["token", "sequence"] = "token"
    veto: float = 1e-4
    kl: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0 <= self.clip_high:
            raise ValueError(f"the clip [{self.clip_low}, {self.clip_high}] must hold the ratio 1")
        if self.dual_clip < self.clip_high:
            raise ValueError(f"dual_clip {self.dual_clip} must not be below clip_high {self.clip_high}")
        if self.advantage not in {"mean", "normalised"}:
            raise ValueError(f"advantage is 'mean' or 'normalised', not {self.advantage!r}")
        if self.normalise not in {"token", "sequence"}:
            raise ValueError(f"normalise is 'token' or 'sequence', not {self.normalise!r}")
        if self.veto < 0.0 or self.kl < 0.0:
            raise ValueError(f"veto {self.veto} and kl {self.kl} must not be negative")


@dataclass(frozen=True, slots=True)
class GrpoTally:
    """Sums over the tokens that were learnt from; tallies of micro-batches add up to that of the batch."""

    completions: int = 0
    vetoed: int = 0
    tokens: int = 0
    clipped: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    mismatch: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: GrpoTally) -> GrpoTally:
        return GrpoTally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def clip_share(self) -> float:
        """The share of tokens whose gradient the clip has cut."""
        return self._per_token(self.clipped)

    @property
    def mean_ratio(self) -> float:
        """Near 1 while the samplers' claims fit the policy."""
        return self._per_token(self.ratio)

    @property
    def effective_sample_share(self) -> float:
        """(Σ ratio)² / (n · Σ ratio²): 1 when on policy, towards 0 when few tokens carry all the weight."""
        return self._per_token(self.ratio**2 / self.ratio_squared) if self.ratio_squared else 0.0

    @property
    def mismatch_kl(self) -> float:
        """An estimate of KL(μ ‖ π_θ) per token that is never negative: ratio − 1 − log ratio."""
        return self._per_token(self.mismatch)

    @property
    def mean_entropy(self) -> float:
        """Of the policy, in nats per token."""
        return self._per_token(self.entropy)

    def _per_token(self, amount: float) -> float:
        return amount / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """`loss` is `total / weight`.

    Micro-batches differ in weight, and the veto makes it known only afterwards: they go backward from
    `total`, add up `weight`, and divide the gradient once.
    """

    loss: Tensor
    total: Tensor
    weight: int
    tally: GrpoTally


def advantages(rewards: Sequence[float], kind: Literal["mean", "normalised"]) -> list[float]:
    """How much better than its group's mean each completion did. A group of equals teaches nothing."""
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    spread = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (spread + SPREAD_FLOOR) for value in centred]


def grpo_loss(
    settings: GrpoSettings,
    *,
    log_probs: Tensor,
    entropies: Tensor,
    mu: Tensor,
    mask: Tensor,
    advantage: Tensor,
    reference: Tensor | None = None,
) -> GrpoLoss:
    """The loss of completions [B] of at most T tokens; all tensors are [B, T] but `advantage` [B].

    `log_probs` and `entropies` are the policy's, and carry the gradient. `mask` is true at sampled tokens;
    what stands elsewhere is ignored, whatever it is. The veto looks at the policy that it is given, which is
    that of the start, since a batch is stepped on once.
    """
    if settings.kl and reference is None:
        raise ValueError("kl is not 0, so the reference's log-probabilities are needed")
    mask = mask.bool()
    log_ratio = torch.where(mask, log_probs - mu, 0.0).clamp(max=LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    vetoed = (mask & (ratio.detach() < settings.veto)).any(dim=1)
    kept = mask & ~vetoed[:, None]

    pushed = advantage[:, None]
    capped = torch.where(pushed < 0, ratio.clamp(max=settings.dual_clip), ratio)
    plain, bounded = capped * pushed, ratio.clamp(settings.clip_low, settings.clip_high) * pushed
    term = -torch.minimum(plain, bounded) - settings.entropy * torch.where(kept, entropies, 0.0)
    if reference is not None and settings.kl:
        away = torch.where(kept, reference - log_probs, 0.0).clamp(max=LARGEST_LOG_RATIO)
        term = term + settings.kl * (away.exp() - 1.0 - away)
    term = torch.where(kept, term, 0.0)

    lengths = kept.sum(dim=1)
    if settings.normalise == "sequence":
        total, weight = (term.sum(dim=1) / lengths.clamp(min=1)).sum(), int((lengths > 0).sum())
    else:
        total, weight = term.sum(), int(lengths.sum())

    with torch.no_grad():
        outside = (ratio < settings.clip_low) | (ratio > settings.dual_clip)
        cut = torch.where(pushed > 0, ratio > settings.clip_high, outside & (pushed < 0))
        seen, log_seen = ratio[kept].double(), log_ratio[kept].double()
        tally = GrpoTally(
            completions=int(mask.any(dim=1).sum()),
            vetoed=int(vetoed.sum()),
            tokens=int(lengths.sum()),
            clipped=int((cut & kept).sum()),
            ratio=float(seen.sum()),
            ratio_squared=float((seen * seen).sum()),
            mismatch=float((torch.expm1(log_seen) - log_seen).sum()),
            entropy=float(entropies[kept].double().sum()),
        )
    return GrpoLoss(loss=total / max(weight, 1), total=total, weight=weight, tally=tally)
