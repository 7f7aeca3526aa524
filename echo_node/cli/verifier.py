"""`echo-node verifier calibrate`: measure honest distances and propose tolerances.

For authors of manifests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from echo_node.runtime.console import path_for, printable, say
from echo_node.runtime.signals import INTERRUPTED

if TYPE_CHECKING:
    from echo_node.models.progress import Progress
    from echo_node.verifier.calibration import Calibration, Drawn, Task

app = typer.Typer(no_args_is_help=True, help="Measure what honest sampling looks like.")

JUDGE: Final = "torch/f32"
_HEAD: Final = bytes(32)
_ROWS: Final = 16
_FEW: Final = 16
"""Fewest completions that must differ: with fewer, the worst case is unknown."""
_NOTHING: Final = 1e-8
"""Value that stands for a distance of zero on a logarithmic axis."""


@app.callback()
def verifier() -> None:
    """Measure what honest sampling looks like."""


@app.command()
def calibrate(
    *,
    model: Annotated[
        str | None,
        typer.Option(help="A folder, hub id, .gguf file or package:name; the embedded model if left out."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Measure this class alone, such as llama/f16. May be repeated."),
    ] = None,
    completions: Annotated[int, typer.Option(min=4, max=100_000, help="Completions per class.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, max=65_536, help="The most tokens of a completion.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=100.0, help="Sampling temperature of the run.")
    ] = 1.0,
    out: Annotated[
        Path,
        typer.Option(parser=path_for("--out"), help="Folder for the tolerances, the rows and the plot."),
    ] = Path("runs/calibration"),
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each class.")] = False,
) -> None:
    """Measure honest bands of each engine class and propose tolerances.

    The tolerances are for the manifest of a run. Engines of each class sample, a torch/f32 engine
    checks every completion by one prefill, and simulated forgers show what the proposed bands
    catch. Exits with 1 if no class could be measured.
    """
    from echo_node.engine.engine_classes import CLASSES, check_class, kinds
    from echo_node.engine.host_resources import free_cores
    from echo_node.errors import ConfigError, StoreError, boundary
    from echo_node.models import embedded
    from echo_node.models.model_source import open_model
    from echo_node.verifier.calibration import Task

    if unknown := sorted(set(engine or ()) - set(CLASSES)):
        raise ConfigError(f"there is no engine {unknown[0]!r}", advice=f"take one of {', '.join(CLASSES)}")
    check_class(JUDGE)
    with boundary(StoreError, f"making the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(engine or [kind.engine_class for kind in kinds() if kind.installed]))
    try:
        with _progress_bar() as progress:
            folder = embedded.folder() if model is None else open_model(model, progress=progress)
            task = Task.of(folder, completions=completions, tokens=tokens, temperature=temperature)
            threads = free_cores()
            drawn, problems = _draw(wanted, folder, task, threads, progress)
            found = _judge(drawn, folder, task, threads, progress) if drawn else []
    except KeyboardInterrupt:
        say("echo-node: stopped, nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    named = "the embedded model" if model is None else folder.name if Path(model).exists() else model
    title = f"{named}, {completions} completions of up to {task.limits.max_tokens} tokens"
    title += f" at temperature {temperature:g}{'' if task.prose else ', prompts of random ids'}"
    toml = _toml(title, found)
    rows = [_row(each) for each in found]
    rows += [{"engine": name, "problem": problem} for name, problem in problems.items()]
    picture = _write(out, title, toml, rows, found) if found else ""
    if as_json:
        for row in rows:
            say(json.dumps(row))
    else:
        _print(title, rows, toml, picture)
    if not found:
        raise typer.Exit(1)


def _draw(
    wanted: Sequence[str], folder: Path, task: Task, threads: int, progress: Progress
) -> tuple[list[Drawn], dict[str, str]]:
    """Sample with each class in turn; return the samples and problems by class."""
    from echo_node.engine.engine_classes import EngineSpec
    from echo_node.engine.worker.client import WorkerEngine
    from echo_node.errors import EngineError
    from echo_node.verifier.calibration import draw
    from echo_node.weights.open_store import read_folder

    drawn, problems = [], {}
    for name in wanted:
        spec = EngineSpec(name, folder, rows=_ROWS, threads=threads)

        def show(doing: str, name: str = name) -> None:
            progress(f"{name}: {doing}", 0, 0)

        def watch(done: int, total: int, name: str = name) -> None:
            progress(f"{name}: drawing", done, total)

        try:
            with WorkerEngine(spec, progress=show) as sampler:
                sampler.load(_HEAD, read_folder(folder))
                show("drawing")
                drawn.append(draw(sampler, task, watch))
        except EngineError as error:
            problems[name] = str(error)
    return drawn, problems


def _judge(
    drawn: Sequence[Drawn], folder: Path, task: Task, threads: int, progress: Progress
) -> list[Calibration]:
    from echo_node.engine.engine_classes import EngineSpec
    from echo_node.engine.worker.client import WorkerEngine
    from echo_node.verifier.calibration import calibrate as look
    from echo_node.weights.open_store import read_folder

    def show(doing: str) -> None:
        progress(f"the judge, {JUDGE}: {doing}", 0, 0)

    found = []
    with WorkerEngine(EngineSpec(JUDGE, folder, rows=1, threads=threads), progress=show) as judge:
        judge.load(_HEAD, read_folder(folder))
        for each in drawn:

            def watch(done: int, total: int, name: str = each.engine_class) -> None:
                progress(f"{name}: judging", done, total)

            found.append(look(judge, each, task.limits, watch))
    return found


def _row(found: Calibration) -> dict[str, Any]:
    from dataclasses import asdict

    from echo_node.verifier.evidence import Evidence
    from echo_node.verifier.tolerance import Tolerance

    together = sum(found.honest, Evidence())
    return {
        "engine": found.tolerance.engine,
        "completions": len(found.honest),
        "tokens": together.tokens,
        "d_mean": together.d_mean,
        "d_mean_worst": max(each.d_mean / Tolerance.scale(each.tokens) for each in found.honest),
        "d_most": together.d_most,
        "z_mean": together.z_mean,
        "z_mean_worst": max(each.z_mean / Tolerance.scale(each.tokens) for each in found.honest),
        "z_most": together.z_most,
        "logprob_gap": together.gap_mean,
        "logprob_gap_most": together.gap_most,
        "honest_off": found.off,
        "honest_refused": found.refused,
        "caught": {name: round(share, 3) for name, share in found.caught.items()},
        "tolerance": asdict(found.tolerance),
    }


def _toml(title: str, found: Sequence[Calibration]) -> str:
    """Return the tolerances as lines to paste into a run's file."""
    from dataclasses import replace

    from echo_node.errors import one_line

    lines = [f"# {one_line(title)}"]
    filling = _filling(found)
    for each in sorted(found, key=lambda each: each.tolerance.engine):
        tolerance = each.tolerance
        if each.off < _FEW or each.refused:
            lines.append(
                f"# Too few to know the worst: {each.off} of {len(each.honest)} honest completions differ from the"
                " judge's draw at all. More --completions tell more."
            )
        if tolerance.engine == filling and tolerance.share < 1.0:
            lines.append(
                "# Wide. It may fill a batch because no narrower class was measured: a swarm of it must learn."
            )
            tolerance = replace(tolerance, share=1.0)
        lines += ["[[engines]]", f'engine = "{tolerance.engine}"']
        names = ("d_mean", "d_most", "gap_most", "z_mean", "z_most", "share")
        lines += [f"{name} = {getattr(tolerance, name)!r}" for name in names]
        lines.append("")
    return "\n".join(lines)


def _filling(found: Sequence[Calibration]) -> str | None:
    """Return the class to let fill a batch alone; None if one may already."""
    if not found or any(each.tolerance.share >= 1.0 for each in found):
        return None
    return min(found, key=lambda each: each.tolerance.d_mean).tolerance.engine


def _write(
    out: Path, title: str, toml: str, rows: Sequence[dict[str, Any]], found: Sequence[Calibration]
) -> str:
    """Write all results into the folder; return a sentence about the plot."""
    from echo_node.errors import ConfigError, StoreError, boundary

    with boundary(StoreError, f"writing into {out}"):
        (out / "tolerances.toml").write_text(toml, "utf-8")
        (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        try:
            _plot(found, title, out / "calibration.png")
        except ConfigError as error:  # keep hours of measurements even without a plot
            return f"No plot: {error}"
    return f"The plot is {out / 'calibration.png'}"


def _plot(found: Sequence[Calibration], title: str, file: Path) -> None:
    """Plot mean distances per class, honest and forged, scaled to 64 tokens."""
    from echo_node.errors import ConfigError
    from echo_node.verifier.tolerance import Tolerance

    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("the plot needs matplotlib", advice="pip install 'echo-node[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(found), figsize=(9, 1 + 2.4 * len(found)), dpi=120, sharex=True, squeeze=False
    )
    for axes, each in zip(panels[:, 0], found, strict=True):
        rows = {"honest": each.honest, **each.forged}
        for place, (name, several) in enumerate(rows.items()):
            means = [max(_NOTHING, one.d_mean / Tolerance.scale(one.tokens)) for one in several]
            spread = [place + 0.6 * (n / len(means) - 0.5) for n in range(len(means))]
            axes.scatter(spread, means, s=9, alpha=0.6, color="tab:green" if name == "honest" else "tab:red")
        axes.axhline(
            each.tolerance.d_mean, linestyle="--", linewidth=1, color="black", label="the band proposed"
        )
        axes.set(yscale="log", ylabel=f"{each.tolerance.engine}\nmean d", ylim=(_NOTHING / 2, 1))
        axes.set_xticks(range(len(rows)), list(rows))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _print(title: str, rows: Sequence[dict[str, Any]], toml: str, picture: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from echo_node.config import no_color

    console = Console(no_color=no_color(), highlight=False)
    measured = [row for row in rows if "problem" not in row]
    if measured:
        _say(console, title)
        table = Table(box=None, pad_edge=False)
        table.add_column("engine", no_wrap=True)
        for name in ("mean d", "worst", "token", "refused", *measured[0]["caught"]):
            table.add_column(name, justify="right", no_wrap=True)
        for row in measured:
            numbers = (f"{row[name]:.1e}" for name in ("d_mean", "d_mean_worst", "d_most"))
            caught = (f"{share:.0%}" for share in row["caught"].values())
            table.add_row(row["engine"], *numbers, str(row["honest_refused"]), *caught)
        console.print(table)
        _say(
            console,
            "mean d: of all tokens. worst: of completions, as if of 64 tokens. token: the worst one. refused: honest"
            " completions outside the bands that the other half of them gives. The rest: how many of a forger's completions,"
            " each alone, are caught.\n",
        )
        _say(console, toml)
        _say(console, picture)
    for row in rows:
        if "problem" in row:
            _say(console, f"{row['engine']} was not measured: {row['problem']}")


def _say(console: Any, text: str) -> None:
    console.print(printable(text), markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show progress on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from echo_node.config import no_color

    console = Console(stderr=True, no_color=no_color())
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("looking for the model", total=None)

        def show(doing: str, done: int, total: int) -> None:
            bars.update(task, description=doing, completed=done, total=total or None)

        yield show
