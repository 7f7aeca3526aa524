"""Whether a run can learn at all: what an author may put together that fits a manifest, and of which nothing would come.

Every batch of such a run would wait for somebody who does not exist. It is said when the run is made, not after days.
"""

from __future__ import annotations

from importlib.util import find_spec

from echo_node.contract import prompt_of
from echo_node.errors import ConfigError
from echo_node.run import Run
from echo_node.trainer.classes import ClassShares
from protocol import Manifest, peer_id


def check_learnable(run: Run) -> None:
    """Refuse a run that could never take a step."""
    _check_algorithm(run.told)
    _check_vouchers(run.told)
    _check_classes(run.told)
    _check_prompts(run)


def _check_algorithm(told: Manifest) -> None:
    """Names and types of its numbers are the trainer's, which needs torch: on a machine without, it is the first to see them."""
    numbers = told.algorithm.params.items()
    if all(name == "batch_groups" and type(value) is int for name, value in numbers):
        return  # what has a range has been looked at
    if find_spec("torch") is not None:
        from echo_node.trainer.settings import training_settings  # noqa: PLC0415 - torch, for few runs

        training_settings(told)


def _check_vouchers(told: Manifest) -> None:
    """The word of a trainer that leads does not count for what it trains on."""
    verification = told.verification
    if verification.policy == "self" or (verification.policy == "sampled" and verification.share >= 1.0):
        return
    needed = verification.quorum if verification.policy == "quorum" else 1
    for trainer in told.trainers:
        others = len({*told.verifiers} - {trainer})
        if others >= needed:
            continue
        if not told.verifiers:
            raise ConfigError(
                f"verification.policy is {verification.policy} with a share of {verification.share:g}, and there are no"
                " verifiers: a batch would wait for ever for what somebody vouches for",
                advice="name verifiers, or take the policy self, or a share of 1",
            )
        raise ConfigError(
            f"{peer_id(trainer)} is trainer and verifier, and who leads does not vouch for its own groups: {others} of"
            f" the {needed} verifiers that verification.policy {verification.policy} needs are left",
            advice="name another verifier",
        )


def _check_classes(told: Manifest) -> None:
    shares = ClassShares(told.engines)
    if not shares.bounded:
        return
    from echo_node.trainer.settings import training_settings  # noqa: PLC0415 - torch, for few runs

    batch = training_settings(told).batch_groups
    if not shares.can_fill([each.engine for each in told.engines], batch):
        raise ConfigError(
            f"the engine classes of this run cannot fill a batch between them: {shares.told(batch)}",
            advice="allow a class that may fill all of it, such as torch/f32",
        )


def _check_prompts(run: Run) -> None:
    """By the prompts of the manifest's own checks of the contract."""
    most = run.told.sampling.max_prompt
    lengths = [len(run.ids_of(prompt_of(run.contract, each.key))) for each in run.told.contract.vectors]
    if min(lengths) > most:
        raise ConfigError(
            f"sampling.max_prompt is {most}, and of {len(lengths)} prompts of {run.contract.name} the shortest has"
            f" {min(lengths)} tokens: every group would be refused",
            advice=f"set it to {max(lengths)} or more",
        )
