"""A node of the reachability tests, as a process: JSON commands on stdin, answers on stdout.

{"do": "connect", "to": [address, …]}      {"do": "look"}
{"do": "send", "peer": id, "bytes": n}     {"do": "dial", "peer": id, "to": [address, …]}
"""

from __future__ import annotations

import hashlib
import json
import sys

import trio
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.errors import PeerError, boundary
from echo_node.net.host import build_host, running
from echo_node.net.reachability.reachability import Reachability
from protocol import Identity

ECHO = "/test/digest/1"
SECONDS = 40


async def digest(stream):
    """Answer with the SHA-256 of what comes."""
    left, seen = int.from_bytes(await exactly(stream, 8), "big"), hashlib.sha256()
    while left:
        piece = await stream.read(min(left, 65_536))
        seen.update(piece)
        left -= len(piece)
    await stream.write(seen.digest())
    await stream.close()


async def exactly(stream, count):
    got = b""
    while len(got) < count:
        got += await stream.read(count - len(got))
    return got


async def send(host, peer, count):
    """Whether so many bytes arrived as they were sent, and the answer came back."""
    data = bytes(range(256)) * (count // 256) + bytes(count % 256)
    stream = await host.new_stream(peer, [ECHO])
    await stream.write(count.to_bytes(8, "big"))
    for start in range(0, count, 65_536):
        await stream.write(data[start : start + 65_536])
    answer = await exactly(stream, 32)
    await stream.close()
    return answer == hashlib.sha256(data).digest()


async def obey(host, reach, order):
    match order["do"]:
        case "connect" | "dial":
            *_, last = order["to"][0].split("/")
            target = ID.from_string(order.get("peer", last))
            await host.connect(PeerInfo(target, [Multiaddr(each) for each in order["to"]]))
            return {"relayed": host.is_relayed(target)}
        case "send":
            return {"same": await send(host, ID.from_string(order["peer"]), order["bytes"])}
        case "look":
            return {
                "state": reach.state,
                "line": reach.one_line(),
                "addresses": [str(each) for each in reach.advertised()],
                "relays": len(host.circuits.slots),
                "circuits": reach.relay.circuits,
                "relayed": [str(each) for each in host.get_connected_peers() if host.is_relayed(each)],
            }


async def main(seed, listen, public):
    host = build_host(Identity(bytes([seed]) * 32))
    host.set_stream_handler(ECHO, digest)
    async with running(host, [listen]), trio.open_nursery() as nursery:
        reach = Reachability(host, public=public)
        nursery.start_soon(reach.run)
        print(json.dumps({"id": str(host.get_id())}), flush=True)  # noqa: T201 -- it talks to the test
        async for line in trio.wrap_file(sys.stdin):
            try:
                with boundary(PeerError, "obeying"), trio.fail_after(SECONDS):
                    answer = await obey(host, reach, json.loads(line))
            except PeerError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)  # noqa: T201 -- it talks to the test
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2], True if sys.argv[3] == "public" else None)
