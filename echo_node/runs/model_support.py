"""Engine classes that can run a model at a run's lengths.

Others are refused by name. Only config.json is read: no engine is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from echo_node.errors import ConfigError, EngineError
from echo_node.models.families import check_family, check_length, read_config
from protocol.manifest import EngineTolerance


def check_model(folder: Path, longest: int) -> None:
    """Refuse a model whose family, or positions at `longest`, are not right."""
    config = read_config(folder)
    check_family(config)
    check_length(config, longest)


def fitting_engines(
    engines: Sequence[EngineTolerance],
    folder: Path,
    longest: int,
    *,
    named: bool,
    note: Callable[[str], None],
) -> tuple[EngineTolerance, ...]:
    """Return the classes that can run the model.

    One that cannot is an error where the run's file named it, and left out with a note otherwise.
    """
    fitting = []
    for each in engines:
        why = _why_not(each.engine, folder, longest)
        if why is None:
            fitting.append(each)
        elif named:
            raise ConfigError(f"engines: {each.engine}: {why.what}", advice=why.advice)
        else:
            note(f"{each.engine} may not sample in this run: {why.what}")
    return tuple(fitting)


def _why_not(engine_class: str, folder: Path, longest: int) -> EngineError | None:
    medium, _, kind = engine_class.partition("/")
    if medium != "llama":
        return None
    from echo_node.engine.gguf_map import read_plan  # noqa: PLC0415 - only where such a class is at hand

    try:
        plan = read_plan(folder, kind)
    except EngineError as error:
        return error
    if longest > plan.context:
        return EngineError(
            f"llama.cpp is right for this model up to {plan.context} tokens, and prompt and completion take up to"
            f" {longest}",
            advice="use the torch engine, or set lower sampling.max_prompt and sampling.max_tokens",
        )
    return None
