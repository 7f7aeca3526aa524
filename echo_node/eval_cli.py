"""`echo-node run eval` and `run export`: which version is good, and that one as a folder. Commands import their rooms when they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_node.given import path_for
from echo_node.keys_cli import State
from echo_node.saying import say

if TYPE_CHECKING:
    from echo_node.evaluating import Evaluation
    from echo_node.state import StateFolder

Named = Annotated[
    str,
    typer.Argument(
        help="A run's folder or its manifest's file; or, for what this node holds, the first digits of its id, or its link.",
        metavar="RUN",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


def evaluate(
    run: Named,
    *,
    versions: Annotated[
        list[int] | None,
        typer.Option("--version", help="Which version; the one that is held if left out. May be repeated."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=100_000, help="How many held-out prompts.")] = 200,
    engine: Annotated[
        str | None, typer.Option(help="The engine's class; the best that runs here if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, where the run's folder does not say.")] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Measure versions on held-out prompts, which no training ever sees, and keep what was found.

    It works on what this node holds of the run, while no node runs on that state.
    """
    from contextlib import closing

    from echo_node.engine.kinds import EngineSpec, best_class
    from echo_node.engine.worker import WorkerEngine
    from echo_node.errors import StoreError
    from echo_node.evaluating import AT_ONCE, remember
    from echo_node.evaluating import evaluate as measure
    from echo_node.run import read_model
    from echo_node.runfile import open_run
    from echo_node.seeking import on_this_machine
    from echo_node.weights.state import layout_of
    from echo_node.weights.store import WeightsStore

    with _at_rest(state) as place, closing(open_run(on_this_machine(run, place.path), model)) as opened:
        folder = _held(place, opened.id)
        layout = layout_of(read_model(opened.folder))
        kind = engine or best_class({each.engine for each in opened.told.engines})
        spec = EngineSpec(kind, opened.folder, rows=AT_ONCE)
        with WeightsStore.open(folder / "weights", opened.rules, layout) as store:
            held = {head.message.version: head for head in store.follower.heads}
            if store.tip is None:
                raise StoreError(
                    "this node holds no version of that run yet", advice="let it fetch one: echo-node join"
                )
            wanted = versions or [store.tip.message.version]
            missing = sorted(set(wanted) - held.keys())
            if missing:
                raise StoreError(
                    f"version {missing[0]} is not in this chain", advice=f"the newest is {max(held)}"
                )
            with closing(WorkerEngine(spec)) as worker:
                worker.start()
                for version in wanted:
                    with _bar(f"version {version}", prompts, hidden=as_json) as tell:
                        found = measure(opened, store, held[version], worker, prompts=prompts, tell=tell)
                    remember(folder, found)
                    _print_evaluation(found, as_json=as_json)


def export(
    run: Named,
    to: Annotated[
        Path,
        typer.Argument(
            parser=path_for("TO"), help="The folder to write; it must not exist.", show_default=False
        ),
    ],
    *,
    version: Annotated[
        int | None, typer.Option(help="Which version; the best that was measured by `run eval` if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, where the run's folder does not say.")] = None,
    state: State = None,
) -> None:
    """Write a version as a Hugging Face folder, which `transformers` opens: the best one, or the one that is named."""
    from contextlib import closing

    from echo_node.errors import ConfigError
    from echo_node.evaluating import remembered
    from echo_node.run import read_model
    from echo_node.runfile import open_run
    from echo_node.seeking import on_this_machine
    from echo_node.weights.export import export_version
    from echo_node.weights.state import layout_of

    with _at_rest(state) as place, closing(open_run(on_this_machine(run, place.path), model)) as opened:
        folder = place.place_of(opened.id)
        if version is None:
            measured = remembered(folder)
            if not measured:
                raise ConfigError(
                    "no version of that run was measured here, so none is known to be the best",
                    advice="measure some with echo-node run eval, or name one with --version",
                )
            best = max(measured, key=lambda each: each.reward)
            version = best.version
            say(f"version {version} is the best of {len(measured)}: {best.reward:.3f} ± {best.error:.3f}")
        layout = layout_of(read_model(opened.folder))
        done = export_version(
            _held(place, opened.id) / "weights",
            to,
            opened.told,
            opened.rules,
            layout,
            version=version,
            model=opened.folder,
        )
        say(f"version {done.version} is in {to}: {done.size / 1e6:,.1f} MB of weights")


def _held(place: StateFolder, run: bytes) -> Path:
    """What the node holds of a run. Opening a store that is not there would make one."""
    from echo_node.errors import StoreError

    folder = place.place_of(run)
    if not (folder / "weights" / "heads").is_dir():
        raise StoreError(
            "this node holds no version of that run", advice="join the run first, or give another --state"
        )
    return folder


@contextmanager
def _bar(what: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _at_rest(state: Path | None) -> Iterator[StateFolder]:
    """The state, while no node runs on it: a store has one reader that may mend it."""
    from echo_node.config import state_home
    from echo_node.errors import StoreError
    from echo_node.state import is_in_use, opened

    place = (state or state_home()).absolute()
    if is_in_use(place):
        raise StoreError(
            f"a node runs on {place}, and its weights are in use",
            advice="stop it first with echo-node leave, or do this on another machine that has joined the run",
        )
    with opened(place) as found:
        yield found


def _print_evaluation(found: Evaluation, *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        say(json.dumps(asdict(found)))
        return
    say(
        f"version {found.version} (step {found.step}): reward {found.reward:.3f} ± {found.error:.3f}"
        f" on {found.prompts} held-out prompts"
    )
