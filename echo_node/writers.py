"""Records for those who watch runs elsewhere: TensorBoard, trackio, wandb, each where it is installed.

A writer gets the figures of each step by name. It is chosen by name, and what is missing is said once, when the run begins.
Nothing here is needed to train, and none of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.metrics import StepRecord, Writer

_LEFT_OUT: Final = frozenset({"step", "head", "groups", "dropped", "staleness", "by_sampler", "number"})


def figures(record: StepRecord) -> dict[str, float]:
    """The numbers of a step, flat: what a curve can be drawn of."""
    told = record.plain()
    flat = {f"train/{name}": float(told[name]) for name in sorted(told.keys() - _LEFT_OUT)}
    flat |= {f"dropped/{reason}": float(count) for reason, count in sorted(record.dropped.items())}
    ages = record.staleness
    flat |= {f"staleness/{age}": count / ages.total() for age, count in sorted(ages.items())}
    if ages:
        flat["staleness/mean"] = sum(age * count for age, count in ages.items()) / ages.total()
    flat["samplers"] = float(len(record.by_sampler))
    return flat


class TensorBoardWriter:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, run: str, folder: Path) -> None:
        module = _installed("torch.utils.tensorboard", "tensorboard")
        with boundary(StoreError, f"opening {folder}"):
            self._events = module.SummaryWriter(log_dir=str(folder / "tensorboard" / run))

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, "writing to TensorBoard"):
            for name, value in figures(record).items():
                self._events.add_scalar(name, value, record.number)

    def close(self) -> None:
        self._events.close()


class _Tracker:
    """trackio and wandb have one interface: `init`, `log`, `finish`."""

    def __init__(self, package: str, run: str, **options: Any) -> None:
        self._package = package
        self._module = _installed(package, package)
        with boundary(ConfigError, f"starting {package}", advice=f"does `{package}` work by itself here?"):
            self._module.init(project="echo-node", name=run, **options)

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, f"writing to {self._package}"):
            self._module.log(figures(record), step=record.number)

    def close(self) -> None:
        with boundary(StoreError, f"closing {self._package}"):
            self._module.finish()


_MADE: Final[dict[str, Callable[[str, Path], Writer]]] = {
    "tensorboard": TensorBoardWriter,
    "trackio": lambda run, _folder: _Tracker("trackio", run),
    "wandb": lambda run, folder: _Tracker("wandb", run, dir=str(folder)),
}
WRITERS: Final = tuple(_MADE)


def open_writer(name: str, run: str, folder: Path) -> Writer:
    """The writer of that name, for a run whose files may lie in a folder."""
    if name not in _MADE:
        raise ConfigError(f"there is no writer called {name!r}", advice=f"take one of {', '.join(_MADE)}")
    return _MADE[name](run, folder)


def _installed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{package} is not installed", advice=f"pip install {package}") from None
