"""`echo-node join`: take part in a run, in a role, on the real network."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from echo_node.cli.confirm import agree, choose, offer_backup
from echo_node.cli.keys import State
from echo_node.runtime.console import say

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks


def join(
    run: Annotated[
        str | None,
        typer.Argument(
            help="An echo: link, a run's id, its folder, its manifest's file or its TOML file; one of the open runs if"
            " left out. A bootstrap needs none.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    *,
    role: Annotated[str, typer.Option(help="sampler, trainer, verifier or bootstrap.", show_default=False)],
    state: State = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            "--seed",
            help="A node to meet others at, as a multiaddress with its peer id. May be repeated.",
            rich_help_panel="Network",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to listen, as a multiaddress; any free port if left out. May be repeated.",
            rich_help_panel="Network",
        ),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            help="An address that others can dial, where this machine does not know it. May be repeated.",
            rich_help_panel="Network",
        ),
    ] = None,
    lan: Annotated[
        bool,
        typer.Option(
            "--lan", help="Also look for nodes on the local network (mDNS).", rich_help_panel="Network"
        ),
    ] = False,
    bulk_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="The TCP port for large blobs (TLS); 0 for the one after the port of --listen, or any that is free.",
            show_default=False,
            rich_help_panel="Network",
        ),
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model: a folder, a hub's owner/name, a .gguf file; the run's own if left out."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="The class of its engine, such as llama/f16; the best that fits if left out.",
            rich_help_panel="Sampler",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="How many threads compute.", rich_help_panel="This machine"),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=512,
            help="Groups that are made together; as many as fit, up to 16, if left out.",
            rich_help_panel="Sampler",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000_000,
            help="Steps to take; until it is stopped if left out.",
            rich_help_panel="Trainer",
        ),
    ] = None,
    first_samplers: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many samplers must have joined before it begins.",
            rich_help_panel="Trainer",
        ),
    ] = 1,
    nproc: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="In how many processes it computes, under torchrun.",
            rich_help_panel="Trainer",
        ),
    ] = 1,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Also write the metrics of every step to wandb, tensorboard or trackio. May be repeated. The package"
            " must be installed, as by pip install wandb.",
            metavar="NAME",
            show_default=False,
            rich_help_panel="Trainer",
        ),
    ] = None,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote",
            help="Ask the electors to lead as soon as the leader's lease is over. Only needed where fewer than"
            " three electors are named: else a trainer that stands by asks by itself.",
            rich_help_panel="Trainer",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="Where the engine, or a trainer's step, computes: auto, cpu, cuda or mps.",
            show_default=False,
            rich_help_panel="This machine",
        ),
    ] = "auto",
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="The most that the engine may take, such as 4GB.",
            show_default=False,
            rich_help_panel="This machine",
        ),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            help="The most that the state may take, such as 20GB.",
            show_default=False,
            rich_help_panel="This machine",
        ),
    ] = None,
    max_up: Annotated[
        str | None,
        typer.Option(
            help="The most of weights that is sent a second, such as 2MB.",
            show_default=False,
            rich_help_panel="This machine",
        ),
    ] = None,
    max_down: Annotated[
        str | None,
        typer.Option(
            help="The most of weights that is fetched a second, such as 5MB.",
            show_default=False,
            rich_help_panel="This machine",
        ),
    ] = None,
    nice: Annotated[
        int,
        typer.Option(
            min=0,
            max=19,
            help="How far to give way to the machine's other work, up to 19.",
            rich_help_panel="This machine",
        ),
    ] = 0,
    battery: Annotated[
        bool,
        typer.Option(
            "--battery", help="Go on while the machine is on battery.", rich_help_panel="This machine"
        ),
    ] = False,
    unsafe_no_jail: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-jail",
            help="Run the contract although this system cannot isolate it. It may then read your files.",
            rich_help_panel="This machine",
        ),
    ] = False,
    page: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="The port of the page about this node, on this machine only; 0 for any. On a terminal it is 8420.",
            show_default=False,
            rich_help_panel="Page",
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page.", rich_help_panel="Page")] = False,
    page_buttons: Annotated[
        bool,
        typer.Option(
            "--page-buttons",
            help="Let the page pause the node, for whoever has the address that is printed.",
            rich_help_panel="Page",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Work for a run that was found on the network without asking.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say what happens as lines of JSON on standard output.")
    ] = False,
) -> None:
    """Take part in a run as sampler, trainer or verifier, or be a bootstrap node of the network.

    A volunteer needs a link and nothing else: echo-node join --role sampler echo:…

    Ctrl-C or SIGTERM stops the node in order: finished groups are delivered first. A second one
    stops it at once. The key, the weights and undelivered groups stay in the state folder, and the
    next start goes on from there.
    """
    from echo_node.cli.join_options import JoinOptions, accept, check_flags, no_backup
    from echo_node.cli.session import join as take_part
    from echo_node.config import state_home
    from echo_node.engine.engine_classes import check_torch
    from echo_node.runtime.resource_limits import ResourceLimits, amount
    from echo_node.telemetry.events import Events

    chosen = check_flags(role=role, nproc=nproc, device=device, page=page, no_page=no_page, log=log)
    if chosen == "trainer":
        check_torch("a trainer")
    options = JoinOptions(
        role=chosen,
        state=(state or state_home()).absolute(),
        run=run,
        model=model,
        seeds=tuple(seeds or _public_seeds(run)),
        listen=tuple(listen or ("/ip4/0.0.0.0/tcp/0",)),
        announce=tuple(announce or ()),
        lan=lan,
        bulk_port=bulk_port,
        engine=engine,
        threads=threads,
        slots=slots,
        steps=steps,
        first_samplers=first_samplers,
        promote=promote,
        log=tuple(dict.fromkeys(log or ())),
        allowance=ResourceLimits(
            memory=amount(max_memory, "--max-memory"),
            disk=amount(max_disk, "--max-disk"),
            up=amount(max_up, "--max-up"),
            down=amount(max_down, "--max-down"),
            device=device,
        ),
        unsafe=unsafe_no_jail,
        battery=not battery,
        page=_page(page, no_page=no_page, as_json=as_json),
        page_token=page_buttons,
        agree=accept if yes else agree,
        choose=choose,
        offer_backup=no_backup if yes or as_json else offer_backup,
    )
    os.nice(nice)
    # Bound to standard output as it is now: exporters redirect it while they print.
    events = Events(as_json, partial(say, file=sys.stdout), aside=partial(say, err=True))
    with _ranks(nproc) if chosen == "trainer" else nullcontext() as ranks:
        take_part(options, events, ranks)


def _public_seeds(run: str | None) -> tuple[str, ...]:
    """Return the public seeds, unless the run is a folder, file or link, which name their own."""
    if run is not None and not _is_id(run.strip()):
        return ()
    from bootstrap import public_seeds

    return public_seeds()


def _is_id(run: str) -> bool:
    return len(run) == 64 and not set(run.lower()) - set("0123456789abcdef")


def _page(port: int | None, *, no_page: bool, as_json: bool) -> int | None:
    """Return the page's port; without a flag there is a page only on a terminal."""
    from echo_node.dashboard import free_port

    if no_page or port is not None:
        return port
    return free_port() if sys.stdout.isatty() and not as_json else None


@contextmanager
def _ranks(nproc: int) -> Iterator[Ranks | None]:
    """Start a trainer's processes under torchrun: yield in rank 0, which is the node.

    Every other rank computes for rank 0 and exits here.
    """
    from echo_node.trainer.torchrun import rank, ranks, relaunch

    if ranks() == 1:
        if nproc > 1:
            raise typer.Exit(relaunch(nproc, ["-m", "echo_node", *sys.argv[1:]]))
        yield None
        return
    from echo_node.trainer.distributed import lead_ranks, serve_rank

    if rank() != 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 gets it too, and ends the others
        serve_rank()
        raise typer.Exit
    with lead_ranks() as led:
        yield led
