"""Flags of `echo-node join`: name, help and panel of each."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

RunArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="An echo: link, a run's id, its folder, its manifest's file or its TOML file; one of the open runs if"
        " left out. A bootstrap needs none.",
        metavar="RUN",
        show_default=False,
    ),
]
RoleFlag: TypeAlias = Annotated[
    str, typer.Option(help="sampler, trainer, verifier or bootstrap.", show_default=False)
]
SeedsFlag: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--seed",
        help="A node to meet others at, as a multiaddress with its peer id. May be repeated.",
        rich_help_panel="Network",
    ),
]
ListenFlag: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Where to listen, as a multiaddress; any free port if left out. May be repeated.",
        rich_help_panel="Network",
    ),
]
AnnounceFlag: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="An address that others can dial, where this machine does not know it. May be repeated.",
        rich_help_panel="Network",
    ),
]
LanFlag: TypeAlias = Annotated[
    bool,
    typer.Option("--lan", help="Also look for nodes on the local network (mDNS).", rich_help_panel="Network"),
]
BulkPortFlag: TypeAlias = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="The TCP port for large blobs (TLS); 0 for the one after the port of --listen, or any that is free.",
        show_default=False,
        rich_help_panel="Network",
    ),
]
ModelFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(help="The model: a folder, a hub's owner/name, a .gguf file; the run's own if left out."),
]
EngineFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The class of its engine, such as llama/f16; the best that fits if left out.",
        rich_help_panel="Sampler",
    ),
]
ThreadsFlag: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="How many threads compute.", rich_help_panel="This machine"),
]
SlotsFlag: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=512,
        help="Groups that are made together; as many as fit, up to 16, if left out.",
        rich_help_panel="Sampler",
    ),
]
StepsFlag: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000_000,
        help="Steps to take; until it is stopped if left out.",
        rich_help_panel="Trainer",
    ),
]
FirstSamplersFlag: TypeAlias = Annotated[
    int,
    typer.Option(
        min=1,
        help="How many samplers must have joined before it begins.",
        rich_help_panel="Trainer",
    ),
]
NprocFlag: TypeAlias = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="In how many processes it computes, under torchrun.",
        rich_help_panel="Trainer",
    ),
]
LogFlag: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Also write the metrics of every step to wandb, tensorboard or trackio. May be repeated. The package"
        " must be installed, as by pip install wandb.",
        metavar="NAME",
        show_default=False,
        rich_help_panel="Trainer",
    ),
]
PromoteFlag: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--promote",
        help="Ask the electors to lead as soon as the leader's lease is over. Only needed where fewer than"
        " three electors are named: else a trainer that stands by asks by itself.",
        rich_help_panel="Trainer",
    ),
]
DeviceFlag: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Where the engine, or a trainer's step, computes: auto, cpu, cuda or mps.",
        show_default=False,
        rich_help_panel="This machine",
    ),
]
MaxMemoryFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The most that the engine may take, such as 4GB.",
        show_default=False,
        rich_help_panel="This machine",
    ),
]
MaxDiskFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The most that the state may take, such as 20GB.",
        show_default=False,
        rich_help_panel="This machine",
    ),
]
MaxUpFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The most of weights that is sent a second, such as 2MB.",
        show_default=False,
        rich_help_panel="This machine",
    ),
]
MaxDownFlag: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The most of weights that is fetched a second, such as 5MB.",
        show_default=False,
        rich_help_panel="This machine",
    ),
]
NiceFlag: TypeAlias = Annotated[
    int,
    typer.Option(
        min=0,
        max=19,
        help="How far to give way to the machine's other work, up to 19.",
        rich_help_panel="This machine",
    ),
]
BatteryFlag: TypeAlias = Annotated[
    bool,
    typer.Option("--battery", help="Go on while the machine is on battery.", rich_help_panel="This machine"),
]
UnsafeNoJailFlag: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--unsafe-no-jail",
        help="Run the contract although this system cannot isolate it. It may then read your files.",
        rich_help_panel="This machine",
    ),
]
PageFlag: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="The port of the page about this node, on this machine only; 0 for any. On a terminal it is 8420.",
        show_default=False,
        rich_help_panel="Page",
    ),
]
NoPageFlag: TypeAlias = Annotated[bool, typer.Option("--no-page", help="No page.", rich_help_panel="Page")]
PageButtonsFlag: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--page-buttons",
        help="Let the page pause the node, for whoever has the address that is printed.",
        rich_help_panel="Page",
    ),
]
YesFlag: TypeAlias = Annotated[
    bool, typer.Option("--yes", help="Work for a run that was found on the network without asking.")
]
AllowCodeFlag: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="HASH",
        help="Consent to the code of this hash that travels with a run. --yes never does. May be repeated.",
        show_default=False,
    ),
]
AsJsonFlag: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Say what happens as lines of JSON on standard output.")
]
