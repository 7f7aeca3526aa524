"""A node of the LAN tests, as a process: prints its peer id, then each connected peer.

It has no seed and no book. It ends when its stdin does.
"""

from __future__ import annotations

import sys

import trio

from echo_node.net.discovery.dialer import Dialer
from echo_node.net.discovery.mdns import MdnsDiscovery
from echo_node.net.host import build_host, running
from echo_node.runtime import logging_setup
from protocol import Identity, peer_id


async def say_peers(discovery):
    said = set()
    while True:
        for public in discovery._peers.connected() - said:
            said.add(public)
            print(f"peer {peer_id(public)}", flush=True)  # noqa: T201 -- it talks to the test
        await trio.sleep(0.02)


async def main(listen):
    identity = Identity.generate()
    host = build_host(identity)
    async with running(host, [listen]), trio.open_nursery() as nursery:
        lan = MdnsDiscovery(identity.public, lambda: [str(each) for each in host.get_transport_addrs()])
        discovery = Dialer(host, lan=lan)
        nursery.start_soon(discovery.run)
        nursery.start_soon(say_peers, discovery)
        print(f"here {identity.peer_id}", flush=True)  # noqa: T201 -- it talks to the test
        async for _ in trio.wrap_file(sys.stdin):
            pass
        nursery.cancel_scope.cancel()
    print("gone", flush=True)  # noqa: T201 -- it talks to the test


if __name__ == "__main__":
    logging_setup.set_up("info")
    trio.run(main, sys.argv[1])
