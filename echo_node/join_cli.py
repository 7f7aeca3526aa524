"""`echo-node join`: take part in a run, in a role, on the real network. The room behind it is imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from echo_node.keys_cli import State
from echo_node.saying import say

if TYPE_CHECKING:
    from echo_node.joining import Role
    from echo_node.state import StateFolder
    from echo_node.trainer.ranks import Ranks
    from protocol import Manifest, Opened

DEVICES: Final = ("auto", "cpu", "cuda", "mps")
_TRIES: Final = 3
"""How often a person may mistype a passphrase, or a number."""


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
    """Take part in a run: sample for it, train it or verify it. Or be a seed, by which nodes find each other.

    A volunteer needs a link and nothing else: echo-node join --role sampler echo:…

    Ctrl-C or SIGTERM ends it in order: what is made is delivered first; a second one ends it at once. The key, the weights and
    whatever is not delivered are kept in the state's folder, and the next start goes on from there.
    """
    from echo_node.allowance import Allowance, amount
    from echo_node.config import state_home
    from echo_node.engine.kinds import check_torch
    from echo_node.events import Events
    from echo_node.joining import Wishes
    from echo_node.joining import join as take_part

    chosen = check_words(role=role, nproc=nproc, device=device, page=page, no_page=no_page)
    if chosen == "trainer":
        check_torch("a trainer")
    wishes = Wishes(
        role=chosen,
        state=(state or state_home()).absolute(),
        run=run,
        model=model,
        seeds=tuple(seeds or _public_seeds(run)),
        listen=tuple(listen or ("/ip4/0.0.0.0/tcp/0",)),
        announce=tuple(announce or ()),
        lan=lan,
        engine=engine,
        threads=threads,
        slots=slots,
        steps=steps,
        first_samplers=first_samplers,
        promote=promote,
        allowance=Allowance(
            memory=amount(max_memory, "--max-memory"),
            disk=amount(max_disk, "--max-disk"),
            up=amount(max_up, "--max-up"),
            down=amount(max_down, "--max-down"),
            device=device,
        ),
        battery=not battery,
        page=_page(page, no_page=no_page, as_json=as_json),
        page_token=page_buttons,
        agree=_say_yes if yes else agree,
        choose=choose,
        offer_backup=_offer_nothing if yes or as_json else offer_backup,
    )
    os.nice(nice)
    with _ranks(nproc) if chosen == "trainer" else nullcontext() as ranks:
        take_part(wishes, Events(as_json, say, aside=partial(say, err=True)), ranks)


def check_words(*, role: str, nproc: int, device: str, page: int | None, no_page: bool) -> Role:
    """What can be said of these words before anything else is known; and the role."""
    from echo_node.errors import ConfigError
    from echo_node.joining import ROLES

    chosen = next((each for each in ROLES if each == role), None)
    if chosen is None:
        raise ConfigError(f"there is no role {role!r}", advice=f"take one of {', '.join(ROLES)}")
    if nproc > 1 and chosen != "trainer":
        raise ConfigError(f"a {chosen} computes in one process", advice="--nproc is for trainers")
    if device not in DEVICES:
        raise ConfigError(f"there is no device {device!r}", advice=f"take one of {', '.join(DEVICES)}")
    if nproc > 1 and device == "mps":
        raise ConfigError(
            "mps computes in one process", advice="--nproc is for the CPU, or for several of cuda"
        )
    if no_page and page is not None:
        raise ConfigError("--page and --no-page contradict each other", advice="leave one of them out")
    return chosen


def _public_seeds(run: str | None) -> tuple[str, ...]:
    """Where to knock when the person names nobody: a run's folder or link has its own."""
    if run is not None and not _is_id(run.strip()):
        return ()
    from bootstrap import public_seeds

    return public_seeds()


def _is_id(run: str) -> bool:
    return len(run) == 64 and not set(run.lower()) - set("0123456789abcdef")


def _page(port: int | None, *, no_page: bool, as_json: bool) -> int | None:
    """The page's port. Nobody looks at a page that no terminal has named."""
    from echo_node.dashboard import free_port

    if no_page or port is not None:
        return port
    return free_port() if sys.stdout.isatty() and not as_json else None


def _say_yes(manifest: Opened[Manifest]) -> bool:  # noqa: ARG001 - whatever it is
    return True


def agree(manifest: Opened[Manifest]) -> bool:
    """Show whose run it is and what code it brings to this machine, and ask."""
    from echo_node.errors import ConfigError, one_line
    from protocol import peer_id

    told = manifest.message
    say(f"run {manifest.id.hex()}: {one_line(told.name)}", err=True)
    say(f"  by {peer_id(manifest.signer)}", err=True)
    say(
        f"  its prompts and rewards are made by the contract {one_line(told.contract.name)}"
        f" {one_line(told.contract.version)}, installed on this machine, in a jail",
        err=True,
    )
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to agree to this run", advice="add --yes")
    return _said_yes("Work for it?")


def _said_yes(question: str) -> bool:
    try:
        return typer.confirm(question, default=True, err=True)
    except typer.Abort as end:
        say(err=True)
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None  # it is no answer: the person wants to be rid of all of it
        return False  # Ctrl-D: nobody said yes


def _offer_nothing(place: StateFolder) -> None:
    """Nobody is to be asked; a line reminds them."""


def offer_backup(place: StateFolder) -> None:
    """Ask a person, once, whether a key that was just made shall have its backup now."""
    from echo_node.errors import ConfigError
    from echo_node.keys_cli import NoPassphraseError, keep_backup

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    say(f"The key in {place.key} is new, and only it says who this node is.", err=True)
    if not _said_yes("Make a backup of it now, encrypted by a passphrase?"):
        return
    for _ in range(_TRIES):
        try:
            keep_backup(place, place.path / f"backup-{place.identity().peer_id[-8:]}.txt")
        except NoPassphraseError as error:
            say(f"no backup: {error.what}", err=True)
            return
        except ConfigError as error:
            say(f"no backup: {error}", err=True)
        else:
            return


def choose(runs: Sequence[Opened[Manifest]]) -> Opened[Manifest]:
    """Which of the open runs a person means."""
    from echo_node.errors import ConfigError, one_line

    if len(runs) == 1:
        return runs[0]
    for number, run in enumerate(runs, 1):
        say(f"{number:>3}  {one_line(run.message.name)}  {run.id.hex()}", err=True)
    if not sys.stdin.isatty():
        raise ConfigError("several runs are open, and nobody chooses", advice="give the id of one of them")
    nothing = "nothing was fetched and nothing was run"
    for _ in range(_TRIES):
        try:
            wanted: str = typer.prompt("Which one?", type=str, default="1", err=True)
        except typer.Abort as end:
            say(err=True)
            if isinstance(end.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise ConfigError("no run was chosen", advice=nothing) from None  # Ctrl-D
        if wanted.isdecimal() and 1 <= int(wanted[:9]) <= len(runs):
            return runs[int(wanted[:9]) - 1]
        say(f"that is no number from 1 to {len(runs)}", err=True)
    raise ConfigError("no run was chosen", advice=nothing)


@contextmanager
def _ranks(nproc: int) -> Iterator[Ranks | None]:
    """The processes of a trainer, of which the first is the node, if there are several. The others compute for it, and end here."""
    from echo_node.trainer.launching import rank, ranks, relaunch

    if ranks() == 1:
        if nproc > 1:
            raise typer.Exit(relaunch(nproc, ["-m", "echo_node.cli", *_without_nproc(sys.argv[1:])]))
        yield None
        return
    from echo_node.trainer.ranks import lead_ranks, serve_rank

    if rank() != 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # who leads hears it too, and says when it is over
        serve_rank()
        raise typer.Exit
    with lead_ranks() as led:
        yield led


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
