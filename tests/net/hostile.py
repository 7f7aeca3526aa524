"""Fixtures of the attack tests: a victim, an honest neighbour, and an attacker with a bare host."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net.base import ACCEPT, Reject
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm import id_of
from echo_node.net.swarm_settings import SwarmSettings
from tests.net.behaviour import IDENTITIES, STREAM, TOPIC

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
VICTIM, HONEST, ILL = IDENTITIES[:3]
SOON = 15.0
"""Attacks cost time, and these tests are not about how much."""


def varint(number, value):
    return write_length(number << 3) + write_length(value)


def field(number, data):
    """A field of a protobuf that holds bytes."""
    return write_length(number << 3 | 2) + write_length(len(data)) + data


def framed(body):
    return write_length(len(body)) + body


async def until(condition):
    with trio.fail_after(SOON):
        while not condition():  # noqa: ASYNC110 -- what is waited for is nobody's event
            await trio.sleep(0.005)


class Scene:
    """A victim that serves an echo and reads a topic; messages starting with `bad` are refused."""

    def __init__(self, victim, honest, ill, inbox):
        self.victim = victim
        self.honest = honest
        self.ill = ill
        self.inbox = inbox

    @property
    def port(self):
        return int(Multiaddr(self.victim.addresses[0]).value_for_protocol("tcp"))

    @property
    def faults(self):
        """What the victim holds against the ill peer."""
        return self.victim.scores().get(ILL.public, {})

    async def open(self, protocol):
        return await self.ill.new_stream(id_of(VICTIM.public), [TProtocol(protocol)])

    async def send(self, protocol, data):
        stream = await self.open(protocol)
        await stream.write(data)
        return stream

    async def connect(self, host):
        with trio.fail_after(SOON):
            await host.connect(PeerInfo(id_of(VICTIM.public), [Multiaddr(self.victim.addresses[0])]))

    async def check(self):
        """The victim answers an honest peer and hears it, and blames nobody but the ill one."""
        token = secrets.token_bytes(16)
        answer = await self.honest.request(VICTIM.public, STREAM, token, deadline=SOON, most=16)
        assert answer == token
        await self.honest.publish(TOPIC, token)
        with trio.fail_after(SOON):
            while (await self.inbox.receive()).data != token:
                pass
        assert self.victim.scores().keys() <= {ILL.public}
        assert HONEST.public in self.victim.peers()


@asynccontextmanager
async def scene(*, settings=SwarmSettings(listen=LISTEN)):  # noqa: B008 -- it is frozen
    async def echo(_peer, data):
        await trio.lowlevel.checkpoint()
        return data

    def validate(message):
        return Reject("malformed") if message.data.startswith(b"bad") else ACCEPT

    async with join_swarm(VICTIM, settings) as victim:
        near = SwarmSettings(listen=LISTEN, seeds=(victim.addresses[0],))
        ill = build_host(ILL)
        async with (
            join_swarm(HONEST, near) as honest,
            running(ill, LISTEN),
            victim.subscribe(TOPIC, validate) as inbox,
        ):
            with victim.serve(STREAM, echo, most=1024):
                here = Scene(victim, honest, ill, inbox)
                await here.connect(ill)
                await until(lambda: {HONEST.public, ILL.public} <= victim.peers())
                await here.check()
                yield here
                await here.check()
