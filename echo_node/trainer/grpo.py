"""GRPO loss as a pure function of log-probabilities, claims and rewards.

π_θ is the policy that is trained, π_old the same at the start of the step, μ the sampler's own
log-probability of the tokens that it sampled. By default the ratio π_θ/μ is clipped, so that groups
that are a few versions old can still be learnt from. The caller runs the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from echo_node.runs.algorithm import GrpoSettings

SPREAD_FLOOR = 1e-6  # added to the spread of a group's rewards before it divides
LARGEST_LOG_RATIO = 20.0  # beyond every sensible ratio; much more would be infinite in float32


@dataclass(frozen=True, slots=True)
class GrpoTally:
    """Sums over completions and tokens; tallies of micro-batches add up.

    Of completions: how many there were, and of them vetoed, masked out by the geometric mask
    (`mistrusted`), in groups of equal rewards that were skipped, and `overlong` ones that were
    filtered out. Of tokens in what is left:
    those that icepop `masked`, and those that were learnt from, over which the rest is summed:
    `clipped` by the clip, `truncated` by the cap on w, and sums of π_θ/μ, its square, its mismatch,
    the entropy and the divergence from the reference.
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
    overlong: int = 0

    def __add__(self, other: GrpoTally) -> GrpoTally:
        return GrpoTally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def of(cls, sums: Sequence[float]) -> GrpoTally:
        """Return the tally of numbers in the order of the fields; counts become int again."""
        kinds = [type(each) for each in astuple(cls())]
        return cls(*(kind(each) for kind, each in zip(kinds, sums, strict=True)))

    @property
    def clip_share(self) -> float:
        """Return the share of tokens whose gradient the clip has cut."""
        return self._per_token(self.clipped)

    @property
    def mask_share(self) -> float:
        """Return the share of considered tokens that icepop has masked out."""
        return self.masked / (self.tokens + self.masked) if self.masked else 0.0

    @property
    def mean_ratio(self) -> float:
        """Return the mean ratio, near 1 while the samplers' claims fit the policy."""
        return self._per_token(self.ratio)

    @property
    def effective_sample_share(self) -> float:
        """Return (Σ ratio)² / (n · Σ ratio²).

        It is 1 when on policy, and goes towards 0 when few tokens carry all the weight.
        """
        return self._per_token(self.ratio**2 / self.ratio_squared) if self.ratio_squared else 0.0

    @property
    def mismatch_kl(self) -> float:
        """Return a non-negative estimate of KL(μ ‖ π_θ) per token: ratio − 1 − log ratio."""
        return self._per_token(self.mismatch)

    @property
    def kl(self) -> float:
        """Return the KL from the run's initial policy per token, where it is measured."""
        return self._per_token(self.divergence)

    @property
    def mean_entropy(self) -> float:
        """Return the policy's entropy in nats per token."""
        return self._per_token(self.entropy)

    def _per_token(self, amount: float) -> float:
        return amount / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The loss, `total / weight`, and its parts.

    Micro-batches differ in weight, and the veto makes it known only afterwards: they go backward
    from `total`, add up `weight`, and divide the gradient once.
    """

    loss: Tensor
    total: Tensor
    weight: int
    tally: GrpoTally


def advantages(rewards: Sequence[float], kind: Literal["mean", "normalised"]) -> list[float]:
    """Return the advantage of each completion over its group's mean reward.

    A group of equal rewards has no gradient.
    """
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    spread = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (spread + SPREAD_FLOOR) for value in centred]


def shaped_rewards(
    rewards: Sequence[float], lengths: Sequence[int], settings: GrpoSettings
) -> Sequence[float]:
    """Return rewards less DAPO's soft penalty for completions near the longest."""
    if not settings.overlong_buffer:
        return rewards
    free = settings.completion_limit - settings.overlong_buffer
    return [
        reward - settings.overlong_penalty * min(1.0, max(0, length - free) / settings.overlong_buffer)
        for reward, length in zip(rewards, lengths, strict=True)
    ]


def teaches(rewards: Sequence[float], settings: GrpoSettings) -> bool:
    """Return whether a group is learnt from at all.

    Equal rewards are detected on the rewards themselves, not on rounded differences.
    """
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
    gap_cap: Tensor | None = None,
) -> GrpoLoss:
    """Return the loss of completions [B] of at most T tokens.

    All tensors are [B, T] but `advantage`, `current`, `sigma` and `gap_cap`. `log_probs` and
    `entropies` are the policy's, and carry the gradient. `mask` is true at sampled tokens; values
    elsewhere are ignored. `old` is the policy's at the start of the step; where a batch is stepped
    on once, that is the policy itself, and nothing need be given. `current` [B] says which
    completions are of the version that is trained, and `sigma` [B] how far their engine class's
    log-probabilities spread from ours; `gap_cap` [B] is how far one of them may be off
    (`clamp_mu`).
    """
    if settings.kl and reference is None:
        raise ValueError("kl is not 0, so the reference's log-probabilities are needed")
    mask = mask.bool()
    own = (log_probs if old is None else old).detach()
    claimed, mu = mu, clamp_mu(mu, own, current, gap_cap)
    log_ratio = _log_ratio(log_probs, mu, mask)
    ratio = log_ratio.exp()
    log_weight = log_ratio.detach() if old is None else _log_ratio(old.detach(), mu, mask)
    weight = ratio.detach() if old is None else log_weight.exp()

    vetoed = (mask & (weight < settings.veto)).any(dim=1)
    considered = mask & ~vetoed[:, None]
    mistrusted = torch.zeros_like(vetoed)
    if settings.geometric:
        mistrusted = ~vetoed & _mistrusted(settings, _log_ratio(own, claimed, mask), mask, current, sigma)
        considered = considered & ~mistrusted[:, None]
    kept = considered
    if settings.icepop:
        kept = considered & (weight >= settings.icepop_low) & (weight <= settings.icepop_high)

    moved = ratio
    if settings.importance == "decoupled":
        moved = _log_ratio(log_probs, log_probs.detach() if old is None else old.detach(), mask).exp()
    if settings.ratio == "sequence":
        moved = _geometric_mean(moved, mask)
    advantage_column = advantage[:, None]
    term = _policy_term(settings, moved, log_probs, advantage_column)
    if settings.importance == "decoupled":
        term = term * weight.clamp(max=settings.tis_cap)
    term = term - settings.entropy * torch.where(kept, entropies, 0.0)
    divergence = 0.0
    if reference is not None and settings.kl:
        log_reference = _log_ratio(reference, log_probs, kept)
        kl_terms = log_reference.exp() - 1.0 - log_reference
        term = term + settings.kl * kl_terms
        divergence = float(kl_terms.detach()[kept].double().sum())
    term = torch.where(kept, term, 0.0)

    lengths = kept.sum(dim=1)
    if settings.normalise == "sequence":
        total, divisor = (term.sum(dim=1) / lengths.clamp(min=1)).sum(), int((lengths > 0).sum())
    elif settings.normalise == "limit":
        total, divisor = term.sum() / settings.completion_limit, int((lengths > 0).sum())
    else:
        total, divisor = term.sum(), int(lengths.sum())

    with torch.no_grad():
        cut = _clipped(settings, moved, advantage_column)
        seen, log_seen = ratio[kept].double(), log_ratio[kept].double()
        tokens = int(lengths.sum())
        tally = GrpoTally(
            completions=int(mask.any(dim=1).sum()),
            vetoed=int(vetoed.sum()),
            mistrusted=int(mistrusted.sum()) if settings.geometric else 0,
            masked=int(considered.sum()) - tokens if settings.icepop else 0,
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


def _policy_term(settings: GrpoSettings, ratio: Tensor, log_probs: Tensor, advantage: Tensor) -> Tensor:
    """Return the policy's part of the loss at each token, before masks."""
    if settings.clip == "cispo":
        return -ratio.detach().clamp(max=settings.clip_high) * advantage * log_probs
    capped = torch.where(advantage < 0, ratio.clamp(max=settings.dual_clip), ratio)
    bounded = ratio.clamp(settings.clip_low, settings.clip_high)
    return -torch.minimum(capped * advantage, bounded * advantage)


def _clipped(settings: GrpoSettings, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the tokens on which the clip acts."""
    above = ratio > settings.clip_high
    if settings.clip == "cispo":
        return above
    outside = (ratio < settings.clip_low) | (ratio > settings.dual_clip)
    return torch.where(advantage > 0, above, outside & (advantage < 0))


def _geometric_mean(ratio: Tensor, mask: Tensor) -> Tensor:
    """Give all tokens of a completion the geometric mean of their ratios."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, ratio, 1.0).log().sum(dim=1, keepdim=True) / lengths
    return mean.exp().expand_as(ratio)


def clamp_mu(mu: Tensor, own: Tensor, current: Tensor | None, gap_cap: Tensor | None) -> Tensor:
    """Clamp sampler log-probabilities to the policy's own ± `gap_cap`.

    Only groups of the current version are clamped. Only the version that sampled a completion can
    correct it: newer weights would erase the importance ratio of honest stale groups.
    """
    if current is None or gap_cap is None:
        return mu
    cap = gap_cap[:, None]
    return torch.where(current.bool()[:, None], mu.clamp(own - cap, own + cap), mu)


def _log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """Return the log of a ratio, 0 outside of the mask, with a finite exponential."""
    return torch.where(mask, above - below, 0.0).clamp(max=LARGEST_LOG_RATIO)


def _mistrusted(
    settings: GrpoSettings, log_weight: Tensor, mask: Tensor, current: Tensor | None, sigma: Tensor | None
) -> Tensor:
    """Return the completions of the trained version that deviate beyond their class."""
    if current is None or sigma is None:
        raise ValueError("geometric is on: name the current completions and their sigma")
    lengths = mask.sum(dim=1).clamp(min=1)
    bound = (settings.geometric_sigmas * sigma / lengths.sqrt()).clamp(min=settings.geometric_floor)
    return current.bool() & ((log_weight.sum(dim=1) / lengths).abs() > bound)
