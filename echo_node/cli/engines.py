"""`echo-node engines`: time the engine classes of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from echo_node.runtime.console import printable, say

if TYPE_CHECKING:
    from echo_node.engine.base import Description, SlotRequest
    from echo_node.engine.engine_classes import Kind
    from echo_node.models.progress import Progress

_HEAD: Final = bytes(32)
_GROUP: Final = 16
_PROMPT: Final = 8  # tokens
_LONGEST: Final = 64  # tokens of a completion


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of trying one engine: how it ran, or the problem."""

    kind: Kind
    cores: int
    memory: int
    ran: Description | None
    problem: str = ""


def engines(
    *,
    model: Annotated[
        str | None,
        typer.Option(help="A folder, hub id, .gguf file or package:name; the embedded model if left out."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that each engine generates.")] = 2.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Try this class alone, such as llama/f16. May be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each engine.")] = False,
) -> None:
    """Time every engine class on this machine. Exits with 1 if none runs."""
    from echo_node.engine.engine_classes import CLASSES, best_class, kinds
    from echo_node.engine.host_resources import free_cores
    from echo_node.errors import ConfigError
    from echo_node.models import embedded
    from echo_node.models.model_source import open_model

    if unknown := sorted(set(only or ()) - set(CLASSES)):
        raise ConfigError(f"there is no engine {unknown[0]!r}", advice=f"take one of {', '.join(CLASSES)}")
    with _progress_bar() as progress:
        folder = embedded.folder() if model is None else open_model(model, progress=progress)
        cores = free_cores()
        wanted = [kind for kind in kinds() if not only or kind.engine_class in only]
        trials = [_try(kind, folder, seconds, cores, progress) for kind in wanted]
    running = [trial.kind.engine_class for trial in trials if trial.ran]
    chosen = best_class(running) if running else None
    if as_json:
        for trial in trials:
            say(json.dumps(_row(trial, chosen)))
    else:
        _print_table(trials, chosen)
    if chosen is None:
        raise typer.Exit(1)


def _try(kind: Kind, folder: Path, seconds: float, cores: int, progress: Progress) -> Trial:
    from echo_node.engine.base import EngineStoppedError
    from echo_node.engine.engine_classes import EngineSpec
    from echo_node.engine.worker.client import WorkerEngine
    from echo_node.errors import EchoError
    from echo_node.weights.open_store import read_folder

    if not kind.installed:
        return Trial(kind, cores, 0, None, kind.why_not)

    def show(doing: str) -> None:
        progress(f"{kind.engine_class}: {doing}", 0, 0)

    spec = EngineSpec(kind.engine_class, folder, threads=cores)
    try:
        with WorkerEngine(spec, progress=show) as engine:
            engine.load(_HEAD, read_folder(folder))
            context = engine.describe().context
            for _ in engine.generate(_requests(folder, context, 1)):
                pass  # the first steps reserve memory and choose kernels
            show("generating")
            end = time.monotonic() + seconds
            with suppress(EngineStoppedError):
                for _ in engine.generate(_requests(folder, context), stop=lambda: time.monotonic() > end):
                    pass
            ran = engine.describe()
            return Trial(kind, cores, engine.memory_seen or ran.memory_bytes, ran)
    except EchoError as error:
        return Trial(kind, cores, 0, None, str(error))


def _requests(folder: Path, context: int | None, most: int | None = None) -> Iterator[SlotRequest]:
    """Yield slot requests, at most `most` of them.

    No token ends a completion, so that every engine does the same work.
    """
    import numpy as np

    from echo_node.engine.base import SamplingLimits, SlotRequest
    from echo_node.errors import ConfigError, boundary

    with boundary(ConfigError, f"reading the size of the vocabulary in {folder / 'config.json'}"):
        vocabulary = int(json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"])
    room = _LONGEST if context is None else min(_LONGEST, context - _PROMPT)
    limits = SamplingLimits(room, temperature=1.0, end_tokens=frozenset(), vocab_size=vocabulary)
    number = 0
    while most is None or number < most:
        prompt = np.arange(number, number + _PROMPT, dtype=np.int64) % vocabulary
        yield SlotRequest(prompt, number.to_bytes(32), _GROUP, limits)
        number += 1


def _row(trial: Trial, chosen: str | None) -> dict[str, Any]:
    kind, ran = trial.kind, trial.ran
    return {
        "engine": kind.engine_class,
        "installed": kind.installed,
        "runs": ran is not None,
        "device": ran.device if ran else kind.device,
        "cores": trial.cores,
        "memory_bytes": trial.memory,
        "tokens_per_second": round(ran.tokens_per_second or 0.0, 1) if ran else None,
        "chosen": kind.engine_class == chosen,
        "problem": trial.problem,
        "install": "" if kind.installed else kind.install,
    }


def _print_table(trials: list[Trial], chosen: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from echo_node.config import no_color
    from echo_node.engine.engine_classes import llama_offloads

    console = Console(no_color=no_color(), highlight=False)
    table = Table(title="Engines of this machine")
    for name in ("engine", "device", "cores", "memory", "tokens/s"):
        table.add_column(name, justify="left" if name in {"engine", "device"} else "right")
    for trial in trials:
        row = _row(trial, chosen)
        if trial.ran:
            table.add_row(
                f"{row['engine']}{' ◀' if row['chosen'] else ''}",
                row["device"],
                str(row["cores"]),
                f"{row['memory_bytes'] / 1e6:,.0f} MB",
                f"{row['tokens_per_second']:,.0f}",
                style="bold" if row["chosen"] else "",
            )
        else:
            table.add_row(row["engine"], row["device"], "", "", "–", style="dim")
    console.print(table)
    missing = {trial.kind.install: trial.problem for trial in trials if not trial.kind.installed}
    broken = [trial for trial in trials if trial.kind.installed and not trial.ran]
    for trial in broken:
        _say(console, f"{trial.kind.engine_class} does not run: {trial.problem}")
    for install, needs in missing.items():
        names = ", ".join(trial.kind.engine_class for trial in trials if trial.kind.install == install)
        _say(console, f"{names} {'is' if ',' not in names else 'are'} not installed ({needs}): {install}")
    if (offloads := llama_offloads()) is not None:
        _say(console, f"This build of llama.cpp {'can' if offloads else 'cannot'} use a GPU.")
    _say(
        console,
        f"`echo-node join` chooses {chosen}, if the run takes it." if chosen else "No engine runs here.",
    )


def _say(console: Any, line: str) -> None:
    console.print(printable(line), markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show progress on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from echo_node.config import no_color

    console = Console(stderr=True, no_color=no_color())
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading this machine's resources", total=None)

        def show(doing: str, done: int, total: int) -> None:
            bars.update(task, description=doing, completed=done, total=total or None)

        yield show
