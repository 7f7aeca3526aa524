"""GRPO as a pure function: log-probabilities, claims and rewards in; a loss and what is worth knowing of it out.

π_θ is the policy that is trained, π_old the same at the start of the step, μ the sampler's own log-probability of what
it drew. By default the ratio π_θ/μ is clipped, so that groups of a few versions ago still teach. This module knows
nothing of models, padding, optimisers or peers: whoever calls it has run the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

import torch
from torch import Tensor

SPREAD_FLOOR = 1e-6  # under the spread of a group's rewards when it divides
LARGEST_LOG_RATIO = 20.0  # e^20 is beyond every ratio of sense; more would be infinite in float32


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """The numbers of the loss; a run's manifest fixes them. w is π_old/μ.

    importance           "direct": the clip is on π_θ/μ; "decoupled": it is on π_θ/π_old, and each token is
                         weighted by min(w, tis_cap)
    clip_low, clip_high  outside of them the ratio pushes no further
    dual_clip            what a ratio counts at most where the advantage is negative: μ is a claim, and a claimed μ near
                         zero would else let one completion own the gradient
    tis_cap              where decoupled: the largest weight
    icepop               whether tokens with w outside of icepop_low to icepop_high are masked out
    geometric            whether completions of the version that is trained are masked out when |mean log w| is above
                         max(geometric_floor, geometric_sigmas · σ/√T), σ being their engine class's spread and T their
                         length; of older versions never, since policy lag is no mismatch of engines. In a run σ follows from
                         the mean distance that the manifest allows the class (`settings.SPREAD`); of narrow classes it is
                         so small that the floor counts
    veto                 a completion with any token's w below this is dropped and counted
    advantage            "mean": reward − the group's mean; "normalised": that, divided by the group's spread
    zero_advantage       groups of equal rewards: "keep" them, for entropy and kl act on them; "skip" them
    entropy              weight of the bonus for an undecided policy
    kl                   weight of the divergence from the policy that the run began with; 0: it is not measured
    normalise            "token": every token weighs the same; "sequence": every completion weighs the same

    What is masked out, dropped or skipped counts nowhere: not in a term and not in what the sum is divided by.
    """

    clip_low: float = 0.8
    clip_high: float = 1.28
    dual_clip: float = 3.0
    entropy: float = 0.01
    advantage: Literal["mean", "normalised"] = "mean"
    normalise: Literal["token", "sequence"] = "token"
    veto: float = 1e-4
    kl: float = 0.0
    importance: Literal["direct", "decoupled"] = "direct"
    tis_cap: float = 2.0
    icepop: bool = False
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    geometric: bool = False
    geometric_floor: float = 0.01
    geometric_sigmas: float = 4.0
    zero_advantage: Literal["keep", "skip"] = "keep"

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {' or '.join(map(repr, words))}, not {getattr(self, name)!r}")
        if not 0.0 <= self.clip_low <= 1.0 <= self.clip_high < math.inf:
            raise ValueError(f"the clip [{self.clip_low}, {self.clip_high}] must hold the ratio 1")
        if not self.clip_high <= self.dual_clip:
            raise ValueError(f"dual_clip {self.dual_clip} must not be below clip_high {self.clip_high}")
        if not 0.0 < self.icepop_low <= 1.0 <= self.icepop_high:
            raise ValueError(
                f"the icepop band [{self.icepop_low}, {self.icepop_high}] must hold the weight 1"
            )
        if not self.tis_cap >= 1.0:
            raise ValueError(f"tis_cap {self.tis_cap} must not be below 1")
        for name, end in (("veto", 1.0), ("kl", math.inf), *dict.fromkeys(_GEOMETRIC, math.inf).items()):
            if not 0.0 <= getattr(self, name) < end:  # a veto at 1 would drop all that there is to learn from
                raise ValueError(f"{name} is {getattr(self, name)}, and must be from 0 to below {end:g}")
        if not math.isfinite(self.entropy):
            raise ValueError(f"entropy is {self.entropy}, and must be a number")


_GEOMETRIC = ("geometric_floor", "geometric_sigmas")
_WORDS = {
    "importance": ("direct", "decoupled"),
    "advantage": ("mean", "normalised"),
    "normalise": ("token", "sequence"),
    "zero_advantage": ("keep", "skip"),
}


@dataclass(frozen=True, slots=True)
class GrpoTally:
    """Sums; tallies of micro-batches add up to that of the batch.

    Of completions: how many there were, and of them vetoed, masked out by the geometric mask (`mistrusted`) and in
    groups of equal rewards that were skipped. Of tokens in what is left: those that icepop `masked`, and those that
    were learnt from, over which the rest is summed: `clipped` by the clip, `truncated` by the cap on w, and sums of
    π_θ/μ, its square, its mismatch, the entropy and the divergence from the reference.
    """

    completions: int = 0
    vetoed: int = 0
    mistrusted: int = 0
    skipped: int = 0
    masked: int = 0
    tokens: int = 0
    clipped: int = 0
    truncated: int = 0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    mismatch: float = 0.0
    entropy: float = 0.0
    divergence: float = 0.0

    def __add__(self, other: GrpoTally) -> GrpoTally:
        return GrpoTally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def of(cls, sums: Sequence[float]) -> GrpoTally:
        """From numbers in the order of the fields: counts are whole again."""
        kinds = [type(each) for each in astuple(cls())]
        return cls(*(kind(each) for kind, each in zip(kinds, sums, strict=True)))

    @property
    def clip_share(self) -> float:
        """The share of tokens whose gradient the clip has cut."""
        return self._per_token(self.clipped)

    @property
    def mask_share(self) -> float:
        """The share of tokens that icepop has masked out, of those that it looked at."""
        return self.masked / (self.tokens + self.masked) if self.masked else 0.0

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
    def kl(self) -> float:
        """The divergence from the policy that the run began with, per token, where it is measured."""
        return self._per_token(self.divergence)

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


def teaches(rewards: Sequence[float], settings: GrpoSettings) -> bool:
    """Whether a group is learnt from at all. That it is of equal rewards is seen by them, not by rounded differences."""
    return settings.zero_advantage == "keep" or min(rewards) != max(rewards)


def grpo_loss(
    settings: GrpoSettings,
    *,
    log_probs: Tensor,
    entropies: Tensor,
    mu: Tensor,
    mask: Tensor,
    advantage: Tensor,
    reference: Tensor | None = None,
    old: Tensor | None = None,
    current: Tensor | None = None,
    sigma: Tensor | None = None,
) -> GrpoLoss:
    """The loss of completions [B] of at most T tokens; all tensors are [B, T] but `advantage`, `current` and `sigma`.

    `log_probs` and `entropies` are the policy's, and carry the gradient. `mask` is true at sampled tokens;
    what stands elsewhere is ignored, whatever it is. `old` is the policy's at the start of the step; where a batch is
    stepped on once, that is the policy itself, and nothing need be given. `current` [B] says which completions are of
    the version that is trained, and `sigma` [B] how far their engine class's log-probabilities spread from ours.
    """
    if settings.kl and reference is None:
        raise ValueError("kl is not 0, so the reference's log-probabilities are needed")
    mask = mask.bool()
    log_ratio = _between(log_probs, mu, mask)
    ratio = log_ratio.exp()
    log_weight = log_ratio.detach() if old is None else _between(old.detach(), mu, mask)
    weight = ratio.detach() if old is None else log_weight.exp()

    vetoed = (mask & (weight < settings.veto)).any(dim=1)
    looked_at = mask & ~vetoed[:, None]
    mistrusted = torch.zeros_like(vetoed)
    if settings.geometric:
        mistrusted = ~vetoed & _mistrusted(settings, log_weight, mask, current, sigma)
        looked_at = looked_at & ~mistrusted[:, None]
    kept = looked_at
    if settings.icepop:
        kept = looked_at & (weight >= settings.icepop_low) & (weight <= settings.icepop_high)

    moved = ratio
    if settings.importance == "decoupled":
        moved = _between(log_probs, log_probs.detach() if old is None else old.detach(), mask).exp()
    pushed = advantage[:, None]
    capped = torch.where(pushed < 0, moved.clamp(max=settings.dual_clip), moved)
    plain, bounded = capped * pushed, moved.clamp(settings.clip_low, settings.clip_high) * pushed
    term = -torch.minimum(plain, bounded)
    if settings.importance == "decoupled":
        term = term * weight.clamp(max=settings.tis_cap)
    term = term - settings.entropy * torch.where(kept, entropies, 0.0)
    divergence = 0.0
    if reference is not None and settings.kl:
        away = _between(reference, log_probs, kept)
        apart = away.exp() - 1.0 - away
        term = term + settings.kl * apart
        divergence = float(apart.detach()[kept].double().sum())
    term = torch.where(kept, term, 0.0)

    lengths = kept.sum(dim=1)
    if settings.normalise == "sequence":
        total, divisor = (term.sum(dim=1) / lengths.clamp(min=1)).sum(), int((lengths > 0).sum())
    else:
        total, divisor = term.sum(), int(lengths.sum())

    with torch.no_grad():
        outside = (moved < settings.clip_low) | (moved > settings.dual_clip)
        cut = torch.where(pushed > 0, moved > settings.clip_high, outside & (pushed < 0))
        seen, log_seen = ratio[kept].double(), log_ratio[kept].double()
        tokens = int(lengths.sum())
        tally = GrpoTally(
            completions=int(mask.any(dim=1).sum()),
            vetoed=int(vetoed.sum()),
            mistrusted=int(mistrusted.sum()) if settings.geometric else 0,
            masked=int(looked_at.sum()) - tokens if settings.icepop else 0,
            tokens=tokens,
            clipped=int((cut & kept).sum()),
            truncated=int((kept & (weight > settings.tis_cap)).sum())
            if settings.importance == "decoupled"
            else 0,
            ratio=float(seen.sum()),
            ratio_squared=float((seen * seen).sum()),
            mismatch=float((torch.expm1(log_seen) - log_seen).sum()),
            entropy=float(entropies[kept].double().sum()),
            divergence=divergence,
        )
    return GrpoLoss(loss=total / max(divisor, 1), total=total, weight=divisor, tally=tally)


def _between(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """The log of a ratio, 0 outside of the mask, and never so large that its exponential is infinite."""
    return torch.where(mask, above - below, 0.0).clamp(max=LARGEST_LOG_RATIO)


def _mistrusted(
    settings: GrpoSettings, log_weight: Tensor, mask: Tensor, current: Tensor | None, sigma: Tensor | None
) -> Tensor:
    """Completions of the trained version whose engine computes too differently for what its class may."""
    if current is None or sigma is None:
        raise ValueError("geometric is on, so it must be said which completions are current, and their sigma")
    lengths = mask.sum(dim=1).clamp(min=1)
    bound = (settings.geometric_sigmas * sigma / lengths.sqrt()).clamp(min=settings.geometric_floor)
    return current.bool() & ((log_weight.sum(dim=1) / lengths).abs() > bound)
