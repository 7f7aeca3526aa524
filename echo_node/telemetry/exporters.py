"""Exporters of step records to TensorBoard, trackio and wandb, where installed.

A writer is chosen by name; a missing package is an error when the run begins. None is imported
before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from echo_node.errors import ConfigError, StoreError, boundary
from echo_node.telemetry.evaluations import Evaluation
from echo_node.telemetry.metrics import StepRecord, Writer

_LEFT_OUT: Final = frozenset({"step", "head", "groups", "dropped", "staleness", "by_sampler", "number"})


def figures(record: StepRecord) -> dict[str, float]:
    """Return the scalar figures of a step by metric name."""
    fields = record.plain()
    flat = {f"train/{name}": float(fields[name]) for name in sorted(fields.keys() - _LEFT_OUT)}
    flat |= {f"dropped/{reason}": float(count) for reason, count in sorted(record.dropped.items())}
    ages = record.staleness
    flat |= {f"staleness/{age}": count / ages.total() for age, count in sorted(ages.items())}
    if ages:
        flat["staleness/mean"] = sum(age * count for age, count in ages.items()) / ages.total()
    flat["samplers"] = float(len(record.by_sampler))
    return flat


def evaluation_figures(found: Evaluation) -> dict[str, float]:
    """Return the scalar figures of an evaluation by metric name."""
    names = ("reward", "error", "prompts", "seconds", "version", "step")
    return {f"evaluation/{name}": float(getattr(found, name)) for name in names}


class TensorBoardWriter:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, run: str, folder: Path) -> None:
        module = _installed("tensorboard")
        with boundary(StoreError, f"opening {folder}"):
            self._events = module.SummaryWriter(log_dir=str(folder / "tensorboard" / run))

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, "writing to TensorBoard"):
            for name, value in figures(record).items():
                self._events.add_scalar(name, value, record.number)

    def write_evaluation(self, found: Evaluation) -> None:
        with boundary(StoreError, "writing to TensorBoard"):
            for name, value in evaluation_figures(found).items():
                self._events.add_scalar(name, value, found.step)

    def close(self) -> None:
        self._events.close()


class _Tracker:
    """Exporter for trackio and wandb: both have `init`, `log` and `finish`."""

    def __init__(self, package: str, run: str, **options: Any) -> None:
        self._package = package
        self._number = 0
        """Number of the last step that was logged."""
        module = _installed(package)
        with (
            boundary(ConfigError, f"starting {package}", advice=f"does `{package}` work by itself here?"),
            redirect_stdout(sys.stderr),  # trackio prints, and standard output is for events
        ):
            self._run = module.init(project="echo-node", name=run, **options)

    def write(self, record: StepRecord) -> None:
        with boundary(StoreError, f"writing to {self._package}"):
            self._run.log(figures(record), step=record.number)
        self._number = record.number

    def write_evaluation(self, found: Evaluation) -> None:
        """Log an evaluation under the last step; its figures name its own step.

        A tracker takes no earlier step.
        """
        with boundary(StoreError, f"writing to {self._package}"):
            self._run.log(evaluation_figures(found), step=self._number)

    def close(self) -> None:
        with boundary(StoreError, f"closing {self._package}"), redirect_stdout(sys.stderr):
            self._run.finish()


_MADE: Final[dict[str, Callable[[str, Path], Writer]]] = {
    "tensorboard": TensorBoardWriter,
    "trackio": lambda run, _folder: _Tracker("trackio", run),
    "wandb": lambda run, folder: _Tracker("wandb", run, dir=str(folder)),
}
WRITERS: Final = tuple(_MADE)
_MODULES: Final = {
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
    "trackio": ("trackio", "init"),
    "wandb": ("wandb", "init"),
}
"""Module of each exporter, and a name in it that shows that it is the real package."""


def open_writer(name: str, run: str, folder: Path) -> Writer:
    """Open the exporter of that name; its files, if it writes any, go into the folder."""
    check_exporter(name)
    return _MADE[name](run, folder)


def check_exporter(name: str) -> None:
    """Refuse an unknown exporter, or one whose package is not installed."""
    if name not in _MODULES:
        raise ConfigError(f"there is no exporter {name!r}", advice=f"take one of {', '.join(_MODULES)}")
    _installed(name)


def _installed(name: str) -> Any:
    module, entry = _MODULES[name]
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    if not hasattr(found, entry):  # a folder ./wandb, which wandb itself makes, is importable too
        raise ConfigError(f"{name} is not installed", advice=f"pip install {name}")
    return found
