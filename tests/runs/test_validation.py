"""What could never learn is refused when it is made; what could, however slowly, is not."""

from __future__ import annotations

import dataclasses

import pytest

from echo_node.errors import ConfigError
from echo_node.runs.validation import check_learnable
from protocol.manifest import Verification
from tests.crafting import SAMPLERS, TRAINER, changed_run, open_run

RUN = open_run()
ONE, TWO = (each.public for each in SAMPLERS[:2])


def vouched_for(policy, share=0.0, quorum=1):
    return Verification(policy=policy, quorum=quorum, share=share)


@pytest.mark.parametrize(
    "changes",
    [
        {"verification": vouched_for("self")},
        {"verification": vouched_for("sampled", share=1.0)},
        {"verification": vouched_for("sampled"), "verifiers": (ONE,)},
        {"verification": vouched_for("quorum", quorum=2), "verifiers": (ONE, TWO)},
        {"verification": vouched_for("quorum"), "verifiers": (ONE, TRAINER.public)},
    ],
)
def test_a_run_that_somebody_can_vouch_for_is_taken(changes):
    check_learnable(changed_run(RUN, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verification": vouched_for("sampled", share=0.99)}, "there are no verifiers"),
        ({"verification": vouched_for("sampled"), "verifiers": (TRAINER.public,)}, "0 of the 1 verifiers"),
        (
            {"verification": vouched_for("quorum", quorum=2), "verifiers": (ONE, TRAINER.public)},
            "1 of the 2 verifiers",
        ),
        (
            {"verification": vouched_for("sampled"), "trainers": (TRAINER.public, ONE), "verifiers": (ONE,)},
            "is trainer and verifier",
        ),
    ],
)
def test_a_run_for_which_too_few_can_ever_vouch_is_refused_in_one_line(changes, says):
    with pytest.raises(ConfigError, match=says) as refused:
        check_learnable(changed_run(RUN, **changes))
    assert "\n" not in str(refused.value)


def test_engine_classes_that_cannot_fill_a_batch_between_them_are_refused():
    """A batch of this run has four groups."""

    def with_shares(*shares):
        pairs = zip(RUN.manifest.engines, shares, strict=True)
        return changed_run(
            RUN, engines=tuple(dataclasses.replace(each, share=share) for each, share in pairs)
        )

    check_learnable(with_shares(0.5, 0.25, 0.25))
    check_learnable(with_shares(0.0, 0.0, 1.0))
    with pytest.raises(
        ConfigError, match=r"cannot fill a batch between them: .* may fill 1 .* of the 4 groups"
    ):
        check_learnable(with_shares(0.49, 0.49, 0.49))


def test_a_bound_on_prompts_that_some_of_them_keep_is_taken_and_one_that_none_does_is_not():
    check_learnable(changed_run(RUN, sampling=dataclasses.replace(RUN.manifest.sampling, max_prompt=7)))
    with pytest.raises(ConfigError, match=r"the shortest has 7 tokens.*set it to 7 or more"):
        check_learnable(changed_run(RUN, sampling=dataclasses.replace(RUN.manifest.sampling, max_prompt=6)))
