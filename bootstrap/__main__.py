"""`python -m bootstrap`: run a bootstrap node and print its address and status."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
import typer

from echo_node.errors import StoreError, boundary
from echo_node.identity.keyfile import load_or_create
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.runtime import exit_codes
from echo_node.runtime.console import path_for
from protocol import Identity

SECONDS = 60.0
"""Seconds between two status lines."""


def seed(
    *,
    listen: Annotated[
        list[str],
        typer.Option(help="Where to listen, as a multiaddress. May be repeated."),
    ] = ["/ip4/0.0.0.0/tcp/4001"],  # noqa: B006 - typer reads the default, nobody changes it
    data: Annotated[
        Path, typer.Option(parser=path_for("--data"), help="Where the key and the known peers are kept.")
    ] = Path("seed-data"),
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            "--seed", help="Another seed to know, as a multiaddress with its peer id. May be repeated."
        ),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            help="An address that others can dial, where this machine does not know it. May be repeated."
        ),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask", help="Let others find out whether this machine can be dialled; a seed should be."
        ),
    ] = False,
    lan: Annotated[bool, typer.Option(help="Also look for nodes on the local network (mDNS).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say everything as lines of JSON.")] = False,
) -> None:
    """Run a seed of the network: other nodes find each other through it.

    It serves the DHT, relays connections for nodes behind NAT and tells newcomers of other peers.
    It needs no model and no GPU. Its key is made at the first start; keep a copy, since its
    address contains it.
    """
    settings = SwarmSettings(
        listen=tuple(listen),
        seeds=tuple(seeds or ()),
        book=data / "peers.sqlite",
        lan=lan,
        announce=tuple(announce or ()),
    ).for_seed(public=None if ask else True)
    with boundary(StoreError, f"making the folder {data}", advice="give another with --data"):
        data.mkdir(parents=True, exist_ok=True)
    trio.run(partial(_run, load_or_create(data / "key"), settings, as_json=as_json))


async def _run(identity: Identity, settings: SwarmSettings, *, as_json: bool) -> None:
    async with exit_codes.until_stop_signal(), join_swarm(identity, settings) as network:
        if as_json:
            typer.echo(json.dumps({"peer_id": identity.peer_id, "addresses": network.addresses}))
        else:
            typer.echo(f"This seed is {identity.peer_id}. Others reach it with one of:")
            for address in network.addresses:
                typer.echo(f"  --seed {address}")
        while True:
            await trio.sleep(SECONDS)
            typer.echo(_status_line(network, as_json=as_json))


def _status_line(network: Libp2pNetwork, *, as_json: bool) -> str:
    peers, muted = len(network.peers()), len(network.mutes())
    if as_json:
        return json.dumps({"peers": peers, "muted": muted, "counts": dict(network.counts())})
    return f"{peers} peers connected, {muted} muted. {network.reachability.one_line()}"


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(seed)
    exit_codes.main(app, "bootstrap")


if __name__ == "__main__":
    main()
