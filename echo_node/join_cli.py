"""`echo-node join`: take part in a run, in a role, on the real network. The room behind it is imported when it runs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_node.keys_cli import State


def join(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder, or its manifest's file. A bootstrap needs none.",
            metavar="[RUN]",
            show_default=False,
        ),
    ] = None,
    *,
    role: Annotated[str, typer.Option(help="sampler, trainer, verifier or bootstrap.", show_default=False)],
    state: State = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            "--seed", help="A node to meet others at, as a multiaddress with its peer id. May be repeated."
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Where to listen, as a multiaddress; any free port if left out. May be repeated."),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            help="An address that others can dial, where this machine does not know it. May be repeated."
        ),
    ] = None,
    lan: Annotated[bool, typer.Option(help="Also look for nodes on the local network (mDNS).")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model: a folder, a hub's owner/name, a .gguf file; the run's own if left out."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Sampler: the class of its engine, such as llama/f16; the best that runs if left out."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="How many threads compute.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=512, help="Sampler: groups that are made together.")] = 16,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Trainer: steps to take; until it is stopped if left out.")
    ] = None,
    first_samplers: Annotated[
        int, typer.Option(min=1, help="Trainer: how many samplers must have joined before it begins.")
    ] = 1,
    nproc: Annotated[
        int,
        typer.Option(min=1, max=64, help="Trainer: in how many processes it computes, under torchrun."),
    ] = 1,
    promote: Annotated[
        bool,
        typer.Option(
            help="Trainer: ask the electors to lead as soon as the leader's lease is over. Only needed where fewer than"
            " three electors are named: else a trainer that stands by asks by itself."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say what happens as lines of JSON on standard output.")
    ] = False,
) -> None:
    """Take part in a run: sample for it, train it or verify it. Or be a seed, by which nodes find each other.

    Ctrl-C or SIGTERM ends it in order; a second one at once. The key, the weights and whatever is not delivered yet are
    kept in the state's folder, and the next start goes on from there.
    """
    from echo_node.config import state_home
    from echo_node.errors import ConfigError
    from echo_node.joining import ROLES, Events, Wishes
    from echo_node.joining import join as take_part

    chosen = next((each for each in ROLES if each == role), None)
    if chosen is None:
        raise ConfigError(f"there is no role {role!r}", advice=f"take one of {', '.join(ROLES)}")
    wishes = Wishes(
        role=chosen,
        state=(state or state_home()).absolute(),
        run=run,
        model=model,
        seeds=tuple(seeds or ()),
        listen=tuple(listen or ("/ip4/0.0.0.0/tcp/0",)),
        announce=tuple(announce or ()),
        lan=lan,
        engine=engine,
        threads=threads,
        slots=slots,
        steps=steps,
        first_samplers=first_samplers,
        promote=promote,
    )
    if nproc > 1 and chosen != "trainer":
        raise ConfigError(f"a {chosen} computes in one process", advice="--nproc is for trainers")
    if chosen == "trainer" and not _is_the_peer(nproc):
        return
    take_part(wishes, Events(as_json, typer.echo))


def _is_the_peer(nproc: int) -> bool:
    """Whether this process is the node: the first of those that were started. The others compute for it, and are done here."""
    from echo_node.trainer.launching import rank, ranks, relaunch

    if ranks() == 1 and nproc > 1:
        raise typer.Exit(relaunch(nproc, ["-m", "echo_node.cli", *_without_nproc(sys.argv[1:])]))
    if rank() == 0:
        return True
    from echo_node.trainer.ranks import serve_rank

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # who leads hears it too, and says when it is over
    serve_rank()
    return False


def _without_nproc(words: list[str]) -> list[str]:
    """`torchrun` would take it for a word of its own, short for another; how many there are, it tells the processes itself."""
    left = iter(words)
    kept = []
    for word in left:
        if word == "--nproc":
            next(left, None)
        elif not word.startswith("--nproc="):
            kept.append(word)
    return kept
