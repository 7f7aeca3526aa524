"""`echo-node run eval` and `run export`: measure versions, and write the best one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_node.cli.keys import State
from echo_node.runtime.console import path_for, say

if TYPE_CHECKING:
    from echo_node.runs.run import Run
    from echo_node.storage.state_dir import StateDir
    from echo_node.telemetry.evaluations import Evaluation

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
        typer.Option("--version", help="Which version; the newest held one if left out. May be repeated."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=100_000, help="Number of held-out prompts.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, max=100.0, help="Of the draws; the run's own if left out.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="The engine's class; the best that runs here if left out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, where the run's folder does not say.")] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Measure versions on held-out prompts and keep the results.

    Training never uses held-out prompts. Works on this node's copy of the run, while no node runs
    on that state.
    """
    from contextlib import closing

    from echo_node.engine.engine_classes import EngineSpec, best_class
    from echo_node.engine.worker.client import WorkerEngine
    from echo_node.errors import StoreError
    from echo_node.runs.evaluation import AT_ONCE, held_out_prompts
    from echo_node.runs.evaluation import evaluate as measure
    from echo_node.runs.run import read_model
    from echo_node.telemetry.evaluations import append_evaluation
    from echo_node.weights.store import WeightsStore
    from echo_node.weights.tensors import layout_of

    with _locked_state(state) as place, closing(_opened(place, run, model)) as opened:
        folder = _held(place, opened.id)
        layout = layout_of(read_model(opened.folder))
        kind = engine or best_class({each.engine for each in opened.manifest.engines})
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
            with closing(WorkerEngine(spec)) as worker, closing(opened.for_evaluation()) as measured:
                worker.start()
                chosen = held_out_prompts(measured, prompts)
                for version in wanted:
                    with _bar(f"version {version}", len(chosen), hidden=as_json) as on_progress:
                        found = measure(
                            measured,
                            store,
                            held[version],
                            worker,
                            chosen,
                            temperature=temperature,
                            on_progress=on_progress,
                        )
                    append_evaluation(folder, found)
                    _print_evaluation(found, as_json=as_json)


def show_evaluations(run: Named, *, state: State = None, as_json: Json = False) -> None:
    """List the evaluations of this node's copy of a run, and the best version.

    A running node is not disturbed.
    """
    from echo_node.config import state_home
    from echo_node.runs.resolve import find_local_run
    from echo_node.runs.spec import read_manifest
    from echo_node.telemetry.evaluations import best_of, read_evaluations

    place = (state or state_home()).absolute()
    named = find_local_run(run, place)
    found = read_evaluations(place / "runs" / read_manifest(named).id.hex())
    best = best_of(found)
    for each in found:
        if as_json:
            say(json.dumps({**each.plain(), "best": each is best}))
        else:
            _print_evaluation(each, as_json=False, mark=" ◀ best" if each is best else "")
    if not found and not as_json:
        say("no version was measured here yet: [evaluation] in the run's file, or echo-node run eval")


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
        int | None,
        typer.Option(
            help="Which version; the best that was measured, during the run or by `run eval`, if left out."
        ),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Of a LoRA run: the whole model, with the adapter merged into it."),
    ] = False,
    model: Annotated[str | None, typer.Option(help="The model, where the run's folder does not say.")] = None,
    state: State = None,
) -> None:
    """Write a version as a Hugging Face folder: the best one, or the one named.

    Of a LoRA run it is an adapter as PEFT opens it, unless --merged is given.
    """
    from contextlib import closing

    from echo_node.errors import ConfigError
    from echo_node.runs.run import read_model
    from echo_node.telemetry.evaluations import best_of, read_evaluations
    from echo_node.weights.export import export_version
    from echo_node.weights.tensors import layout_of

    with _locked_state(state) as place, closing(_opened(place, run, model)) as opened:
        folder = place.place_of(opened.id)
        if version is None:
            measured = read_evaluations(folder)
            if (best := best_of(measured)) is None:
                raise ConfigError(
                    "no version of that run was measured here, so none is known to be the best",
                    advice="measure some with echo-node run eval, or name one with --version",
                )
            version = best.version
            say(f"version {version} is the best of {len(measured)}: {best.reward:.3f} ± {best.error:.3f}")
        layout = layout_of(read_model(opened.folder))
        done = export_version(
            _held(place, opened.id) / "weights",
            to,
            opened.manifest,
            opened.rules,
            layout,
            version=version,
            model=opened.folder,
            merged=merged,
        )
        say(f"version {done.version} is in {to}: {done.size / 1e6:,.1f} MB of weights")


def _held(place: StateDir, run: bytes) -> Path:
    """Return the run's folder in the state; refuse if there is none.

    Opening a store that is missing would create it.
    """
    from echo_node.errors import StoreError

    folder = place.place_of(run)
    if not (folder / "weights" / "heads").is_dir():
        raise StoreError(
            "this node holds no version of that run", advice="join the run first, or give another --state"
        )
    return folder


@contextmanager
def _bar(what: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _locked_state(state: Path | None) -> Iterator[StateDir]:
    """Lock the state; refuse while a node runs on it.

    Only one process may open a store for repair.
    """
    from echo_node.config import state_home
    from echo_node.errors import StoreError
    from echo_node.storage.state_dir import is_in_use, opened

    place = (state or state_home()).absolute()
    if is_in_use(place):
        raise StoreError(
            f"a node runs on {place}, and its weights are in use",
            advice="stop it first with echo-node leave, or do this on another machine that has joined the run",
        )
    with opened(place) as found:
        yield found


def _print_evaluation(found: Evaluation, *, as_json: bool, mark: str = "") -> None:
    if as_json:
        say(json.dumps(found.plain()))
        return
    say(
        f"version {found.version} (step {found.step}): reward {found.reward:.3f} ± {found.error:.3f}"
        f" on {found.prompts} held-out prompts{mark}"
    )


def _opened(place: StateDir, run: str, model: str | None) -> Run:
    """Open a run of this machine, if the person has consented to its code."""
    from echo_node.cli.code_consent import check_code_consent
    from echo_node.runs.resolve import find_local_run
    from echo_node.runs.spec import open_run, read_manifest

    named = find_local_run(run, place.path)
    check_code_consent(place, read_manifest(named), ())
    return open_run(named, model)
