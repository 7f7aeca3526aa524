"""Refuse runs that fit a manifest but could never take a step.

Every batch of such a run would wait for ever for verdicts or groups that cannot come.
"""

from __future__ import annotations

from echo_node.contract import prompt_of
from echo_node.errors import ConfigError
from echo_node.runs.algorithm import training_settings
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.evaluation_settings import check_evaluation
from echo_node.runs.run import Run
from protocol import Manifest, peer_id


def check_learnable(run: Run) -> None:
    """Refuse a run that could never take a step."""
    training_settings(run.manifest)
    check_evaluation(run.manifest)
    _check_verifiers(run.manifest)
    _check_engine_shares(run.manifest)
    _check_prompts(run)


def _check_verifiers(manifest: Manifest) -> None:
    """Check that enough verifiers remain: a leader's own verdicts do not count."""
    verification = manifest.verification
    if verification.policy == "self" or (verification.policy == "sampled" and verification.share >= 1.0):
        return
    needed = verification.quorum if verification.policy == "quorum" else 1
    for trainer in manifest.trainers:
        others = len({*manifest.verifiers} - {trainer})
        if others >= needed:
            continue
        if not manifest.verifiers:
            raise ConfigError(
                f"verification.policy is {verification.policy} with a share of {verification.share:g}, and there are no"
                " verifiers: every batch would wait for verdicts for ever",
                advice="name verifiers, or take the policy self, or a share of 1",
            )
        raise ConfigError(
            f"{peer_id(trainer)} is trainer and verifier, and a leader's verdicts on its own batches do not count: {others} of"
            f" the {needed} verifiers that verification.policy {verification.policy} needs are left",
            advice="name another verifier",
        )


def _check_engine_shares(manifest: Manifest) -> None:
    shares = ClassShares(manifest.engines)
    if not shares.bounded:
        return
    batch = training_settings(manifest).batch_groups
    if not shares.can_fill([each.engine for each in manifest.engines], batch):
        raise ConfigError(
            f"the engine classes of this run cannot fill a batch between them: {shares.describe(batch)}",
            advice="allow a class that may fill all of it, such as torch/f32",
        )


def _check_prompts(run: Run) -> None:
    """Check `max_prompt` against the prompts of the contract's pinned vectors."""
    most = run.manifest.sampling.max_prompt
    lengths = [len(run.ids_of(prompt_of(run.contract, each.key))) for each in run.manifest.contract.vectors]
    if min(lengths) > most:
        raise ConfigError(
            f"sampling.max_prompt is {most}, and of {len(lengths)} prompts of {run.contract.name} the shortest has"
            f" {min(lengths)} tokens: every group would be refused",
            advice=f"set it to {max(lengths)} or more",
        )
