"""Configuration: a TOML file, `--set a=b` on top, validated by pydantic.

The resolved copy is written back. The environment is read here and nowhere else.
"""

from __future__ import annotations

import io
import json
import os
import pwd
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from echo_node.errors import ConfigError, boundary
from echo_node.storage.files import read_given

M = TypeVar("M", bound=BaseModel)
_PROBLEMS = {
    "missing": "{name} is missing",
    "extra_forbidden": "there is no setting {name}",
    "model_type": "{name} is a table, and not {given}",
    "dict_type": "{name} is a table, and not {given}",
}
_MOST_BYTES = 1_000_000
"""Most bytes of a TOML file; a device file has no end."""


SMOLLM2_RECIPE: Final[Mapping[str, Any]] = {
    "steps": 60,
    "staleness": 2,
    "batch_groups": 8,
    "algorithm": {"learning_rate": 5e-6, "warm_up": 0, "entropy": 0.0},
}
"""Defaults of `echo-node demo --model smollm2`: a batch is 8 prompts with 8 completions each."""


GUESS_RECIPE: Final[Mapping[str, Any]] = {
    "steps": 200,
    "algorithm": {"learning_rate": 4e-4, "entropy": 0.003},
}
"""Defaults of `echo-node demo --task guess-number`."""
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm2": SMOLLM2_RECIPE,
    "guess-number": GUESS_RECIPE,
}


class DemoConfig(BaseModel):
    """Settings of `echo-node demo`: a swarm on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Literal["embedded", "smollm2"] = "embedded"
    """embedded: 0.36 million parameters, reverses digits. smollm2: a pretrained language model of
    135 million parameters, names the larger of two numbers.
    """
    task: Literal["guess-number"] | None = None
    """guess-number: a second embedded model finds a number in four guesses, with an environment
    that says higher or lower. None: the model's own task.
    """
    mode: Literal["sequential", "async"] = "async"
    steps: int = Field(default=220, ge=1, le=100_000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    samplers: int = Field(default=2, ge=1, le=16)
    staleness: int = Field(default=4, ge=0, le=8)
    batch_groups: int = Field(default=32, ge=1, le=512)
    group_size: int = Field(default=8, ge=2, le=64)
    temperature: float = Field(default=1.0, ge=0.1, le=10.0)
    engine: str = "auto"
    """Only this engine class may sample, such as torch/f32. auto: the best that each sampler
    runs.
    """
    in_flight: bool = False
    """Load new weights in the middle of completions."""
    hostile: bool = False
    """Add two samplers that cheat."""
    in_memory: bool = False
    """One process without a network, only trainer and samplers. Sequential runs then repeat
    exactly.
    """
    algorithm: dict[str, int | float | str] = Field(default_factory=dict)
    """Settings of the algorithm that differ from their defaults, by name."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_recipe(cls, values: Any) -> Any:
        """Take the defaults of the model's recipe, where nothing else is given."""
        if not isinstance(values, dict):
            return values
        named = values.get("task") or values.get("model")
        recipe = RECIPES.get(named) if isinstance(named, str) else None
        given = values.get("algorithm", {})
        if recipe is None or not isinstance(given, dict):
            return values
        return {**recipe, **values, "algorithm": {**recipe["algorithm"], **given}}


def load_config(
    model: type[M], /, file: Path | None = None, overrides: Sequence[str] = (), **given: Any
) -> M:
    """Load a model from the file, then `name=value` overrides, then flags."""
    values: dict[str, Any] = {}
    if file is not None:
        with boundary(ConfigError, f"reading {file}", advice="it must be a TOML file"):
            values = tomllib.loads(_text(file))
    for word in overrides:
        _set(values, word)
    values |= {name: value for name, value in given.items() if value is not None}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        where = f"{file}: " if file is not None else ""
        what = _PROBLEMS.get(first["type"], "{name}: {msg}").format(
            name=name, msg=first["msg"], given=repr(first["input"])[:40]
        )
        raise ConfigError(f"{where}{what}", advice=_known(model, first["loc"][:-1])) from None


def write_resolved(config: BaseModel, file: Path) -> None:
    """Write the resolved configuration as TOML."""
    lines, tables = [], []
    for name, value in config.model_dump(exclude_none=True).items():
        if isinstance(value, dict):
            tables += [f"\n[{name}]", *(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items())]
        else:
            lines.append(f"{name} = {_toml(value)}")
    file.write_text("\n".join([*lines, *tables]) + "\n", "utf-8")


def home() -> Path:
    """Return the home folder: HOME, or the user database where HOME is empty.

    A container may run as a user that the database lacks.
    """
    try:
        return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigError(
            "this user has no home folder", advice="set HOME, or XDG_STATE_HOME, or give --state"
        ) from None


def state_home() -> Path:
    """Return the default state folder (XDG base directories)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    place = Path(base) if Path(base).is_absolute() else home() / ".local" / "state"
    return place / "echo-node"


def one_thread_environment() -> dict[str, str]:
    """Return an environment with one OpenMP thread.

    For processes that share the cores: several thread pools on the same cores slow each other
    down.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def config_home() -> Path:
    """Return the folder of configuration files (XDG base directories).

    Services are such files.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(base) if Path(base).is_absolute() else home() / ".config"


def no_color() -> bool:
    """Return whether NO_COLOR is set (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def _text(file: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark."""
    data = read_given(file, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{file} is too long for settings", advice="is it the right file?")
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()


def _known(model: type[BaseModel], tables: Sequence[int | str]) -> str:
    """List the settings of the table in which the problem is."""
    for table in tables:
        field = model.model_fields.get(str(table))
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return f"the settings are {', '.join(model.model_fields)}"


def _toml(value: Any) -> str:
    """Format a plain value or a quoted key as TOML.

    TOML is JSON here, except for tables and U+007F.
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(key)} = {_toml(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _set(table: dict[str, Any], word: str) -> None:
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"--set takes name=value, not {word!r}",
            advice="such as steps=5; table.name=5 for what is in a table",
        )
    with boundary(ConfigError, f"reading --set {word!r}", advice="write it in UTF-8"):
        word.encode()  # an unpaired surrogate cannot be written to a file
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):  # not TOML, or a number or nesting without end
        value = text
    *tables, name = path.split(".")
    for key in tables:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {word}: {key} is a value, not a table", advice=f"write {key}=… for all of it"
            )
    table[name] = value
