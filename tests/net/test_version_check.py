"""A peer of another major version of the wire is told of in words, and a stranger is not."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net.discovery.version_check import MOST, VersionCheck, describe, other_major
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm import id_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity
from protocol.topics import KAD_PROTOCOL, PEERS_STREAM, STREAMS
from tests.net.discovery_nodes import LOOPBACK, until

SOMEBODY = Identity(b"s" * 32)
NEWER = [each.rpartition("/")[0] + "/3" for each in STREAMS]


async def no_answer(stream):
    await stream.reset()


async def test_two_nodes_that_share_no_version_hear_of_it_in_words(caplog):
    newer = build_host(SOMEBODY)
    for name in NEWER:
        newer.set_stream_handler(name, no_answer)
    settings = SwarmSettings(listen=(LOOPBACK,), lan=False)
    with caplog.at_level(logging.WARNING):
        async with join_swarm(Identity.generate(), settings) as network, running(newer, [LOOPBACK]):
            ways = [Multiaddr(way) for way in network.addresses]
            await newer.connect(PeerInfo(id_of(network.public), ways))
            await until(lambda: network.counts().get("of another major version"))
    assert caplog.text.count("install a newer echo-node") == 1
    assert (
        f"{SOMEBODY.peer_id} speaks version 3 of the protocol, and this node speaks version 2" in caplog.text
    )


@pytest.mark.parametrize(
    ("protocols", "major"),
    [
        ([], None),
        (["/ipfs/id/1.0.0", "/meshsub/1.1.0"], None),
        (STREAMS, None),
        ([*STREAMS, *NEWER], None),
        (NEWER, 3),
        (["/echo/kad/7.0.0"], 7),
        (["/echo/peers/3", "/echo/peers/4"], 4),
        (["/echo/peers/0", "/echo/peers/x", "/echo//3", "x/echo/peers/3", "/echo/peers/3\n"], None),
        (["/echo/peers/" + "9" * 50], None),
    ],
)
def test_what_a_peer_speaks_decides(protocols, major):
    assert other_major(protocols) == major


@given(st.lists(st.text()))
def test_whatever_it_says_is_a_number_or_nothing(protocols):
    major = other_major(protocols)
    assert major is None or 0 < major < 10**6
    assert other_major([*protocols, PEERS_STREAM]) is None
    assert other_major([*protocols, KAD_PROTOCOL]) is None


def test_each_side_reads_who_has_to_do_something():
    assert describe(SOMEBODY.public, 3).endswith("install a newer echo-node to work with it")
    assert describe(SOMEBODY.public, 0).endswith("whoever runs it has to install a newer echo-node")


def test_a_liar_gets_few_lines(caplog):
    versions = VersionCheck()
    for n in range(3, 51):
        for _ in range(2):
            assert versions.check(SOMEBODY.public, [f"/echo/peers/{n}"])
    assert len(caplog.records) == MOST
