"""Two hostile acts against the doors of a node: a crowd of idle keys, and false addresses."""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import AsyncExitStack
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import HostException
from libp2p.identity.identify_push.identify_push import push_identify_to_peers
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.errors import EchoError
from echo_node.net.dht.wire import write_kad
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import Libp2pNetwork
from echo_node.net.swarm import BROKEN, id_of
from protocol import Identity, topics

CROWD: Final = 40
"""Idle keys at once; then the oldest is given up for a new one."""
NAMED: Final = 20
"""Peers that each false answer names."""
PAUSE: Final = 0.5


async def crowd(network: Libp2pNetwork, did: Counter[str]) -> None:
    """Connect throwaway keys to every known node and keep them idle."""
    kept: list[AsyncExitStack] = []
    try:
        while True:
            host, stack = build_host(Identity.generate()), AsyncExitStack()
            await stack.enter_async_context(running(host, []))
            kept.append(stack)
            for peer, ways in network.known().items():
                plain = [Multiaddr(each) for each in ways if "p2p-circuit" not in each]
                if not plain:
                    continue
                try:
                    with trio.fail_after(5):
                        await host.connect(PeerInfo(id_of(peer), plain))
                    did["idle keys"] += 1
                except (*BROKEN, HostException, EchoError):
                    did["idle keys turned away"] += 1
            if len(kept) > CROWD:
                await kept.pop(0).aclose()
            await trio.sleep(0.05)
    finally:
        with trio.CancelScope(shield=True):
            for stack in kept:
                await stack.aclose()


async def misdirect(network: Libp2pNetwork, did: Counter[str]) -> None:
    """Answer every question of the DHT, and identify, with ports where nobody of the swarm is."""

    def ways() -> list[Multiaddr]:
        ports = [1 + secrets.randbelow(65_535) for _ in range(8)]
        return [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}") for port in ports]

    async def serve(stream: INetStream) -> None:
        await stream.read(4_096)
        made = {id_of(Identity.generate().public): ways() for _ in range(NAMED)}
        answer = write_kad("get-providers", b"k", made, made)
        await stream.write(write_length(len(answer)) + answer)
        did["false addresses told"] += 8 * NAMED

    network.host.set_stream_handler(TProtocol(topics.KAD_PROTOCOL), serve)
    network.host.set_addrs_factory(lambda _: ways())
    while True:
        with trio.move_on_after(5):
            await push_identify_to_peers(network.host)
        did["false addresses pushed"] += 8
        await trio.sleep(PAUSE)
