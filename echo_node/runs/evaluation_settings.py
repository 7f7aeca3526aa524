"""Settings of the evaluations inside a run, from the run's file and its manifest.

They are under `evaluation` in the parameters of the algorithm; a run without them has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_node.errors import ConfigError
from protocol import Manifest, limits
from protocol.manifest import Sampling

EVALUATION: Final = "evaluation"
"""Name of the settings among the algorithm's parameters."""
_ADVICE: Final = "change it under [evaluation] in the run's file"


class EvaluationTable(BaseModel):
    """Evaluation of versions on held-out prompts by the leading trainer, during a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    every: int = Field(ge=1, le=1_000_000)
    """Steps between two evaluations; the first version is evaluated as well."""
    prompts: int = Field(default=64, ge=1, le=100_000)
    """Held-out prompts, each with one completion."""
    temperature: float | None = Field(default=None, ge=0.01, le=100.0)
    """Of the draws; that of the run's samplers if left out."""
    max_tokens: int | None = Field(default=None, ge=1, le=limits.TOKENS)
    """Most tokens of a completion; that of the run's samplers if left out."""
    seconds: float = Field(default=600.0, ge=1.0, le=86_400.0)
    """Longest evaluation in seconds; one that takes longer is given up, and reported as such."""

    def resolved(self, sampling: Sampling) -> EvaluationTable:
        """Return the settings with what was left out taken from the run's sampling."""
        if self.max_tokens is not None and self.max_tokens > sampling.max_tokens:
            raise ConfigError(
                f"evaluation.max_tokens is {self.max_tokens}, and completions of the run have at most"
                f" {sampling.max_tokens}",
                advice="lower it, or leave it out",
            )
        return self.model_copy(
            update={
                "temperature": sampling.temperature if self.temperature is None else self.temperature,
                "max_tokens": sampling.max_tokens if self.max_tokens is None else self.max_tokens,
            }
        )


def evaluation_params(table: EvaluationTable | None, sampling: Sampling) -> dict[str, Any]:
    """Return the algorithm's parameters for a table; none without one."""
    return {} if table is None else {EVALUATION: table.resolved(sampling).model_dump()}


def evaluation_settings(manifest: Manifest) -> EvaluationTable | None:
    """Read the settings of a manifest; None for a run without evaluations."""
    given = manifest.algorithm.params.get(EVALUATION)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"evaluation is {given!r}, and not a table", advice=_ADVICE)
    try:
        table = EvaluationTable.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in (EVALUATION, *first["loc"]))
        raise ConfigError(f"{name}: {first['msg']}", advice=_ADVICE) from None
    return table.resolved(manifest.sampling)


def check_evaluation(manifest: Manifest) -> None:
    """Refuse evaluations on more held-out rows than the data set has."""
    settings = evaluation_settings(manifest)
    if settings is None or not manifest.data:
        return
    held_out = sum(each.held_out for each in manifest.data)
    if not held_out:
        raise ConfigError(
            "evaluation: the data set holds out no row, so there is nothing to evaluate on",
            advice="raise data.held_out, or give more rows",
        )
    if settings.prompts > held_out:
        raise ConfigError(
            f"evaluation.prompts is {settings.prompts}, and the data set holds out {held_out} rows",
            advice=f"set it to {held_out} or less, or raise data.held_out",
        )
