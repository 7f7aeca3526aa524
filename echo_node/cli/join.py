"""`echo-node join`: take part in a run, in a role, on the real network."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import typer

from echo_node.cli.confirm import agree, choose, offer_backup
from echo_node.cli.join_flags import (
    AllowCodeFlag,
    AnnounceFlag,
    AsJsonFlag,
    BatteryFlag,
    BulkPortFlag,
    DeviceFlag,
    EngineFlag,
    FirstSamplersFlag,
    LanFlag,
    ListenFlag,
    LogFlag,
    MaxDiskFlag,
    MaxDownFlag,
    MaxMemoryFlag,
    MaxUpFlag,
    ModelFlag,
    NiceFlag,
    NoPageFlag,
    NprocFlag,
    PageButtonsFlag,
    PageFlag,
    PromoteFlag,
    RoleFlag,
    RunArgument,
    SeedsFlag,
    SlotsFlag,
    StepsFlag,
    ThreadsFlag,
    UnsafeNoJailFlag,
    YesFlag,
)
from echo_node.cli.keys import State
from echo_node.runtime.console import say

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks


def join(
    run: RunArgument = None,
    *,
    role: RoleFlag,
    state: State = None,
    seeds: SeedsFlag = None,
    listen: ListenFlag = None,
    announce: AnnounceFlag = None,
    lan: LanFlag = False,
    bulk_port: BulkPortFlag = 0,
    model: ModelFlag = None,
    engine: EngineFlag = None,
    threads: ThreadsFlag = None,
    slots: SlotsFlag = None,
    steps: StepsFlag = None,
    first_samplers: FirstSamplersFlag = 1,
    nproc: NprocFlag = 1,
    log: LogFlag = None,
    promote: PromoteFlag = False,
    device: DeviceFlag = "auto",
    max_memory: MaxMemoryFlag = None,
    max_disk: MaxDiskFlag = None,
    max_up: MaxUpFlag = None,
    max_down: MaxDownFlag = None,
    nice: NiceFlag = 0,
    battery: BatteryFlag = False,
    unsafe_no_jail: UnsafeNoJailFlag = False,
    page: PageFlag = None,
    no_page: NoPageFlag = False,
    page_buttons: PageButtonsFlag = False,
    yes: YesFlag = False,
    allow_code: AllowCodeFlag = None,
    as_json: AsJsonFlag = False,
) -> None:
    """Take part in a run as sampler, trainer or verifier, or be a bootstrap node.

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
        allow_code=tuple(allow_code or ()),
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
    """Return the public seeds, or none for a folder, file or link.

    Those name their own seeds.
    """
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
