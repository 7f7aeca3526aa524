"""The messages of the DHT: round trips, limits, and noise."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from echo_node.net.dht.wire import (
    KEY_BYTES,
    MESSAGE_BYTES,
    PEERS,
    KadError,
    read_addresses,
    read_kad,
    write_kad,
)
from protocol import limits

KINDS = ("add-provider", "get-providers", "find-node", "ping")
addresses = st.builds(
    lambda host, port: Multiaddr(f"/ip4/10.0.{host}.1/tcp/{port}"),
    st.integers(0, 255),
    st.integers(1, 65_535),
)
ids = st.binary(min_size=34, max_size=38).map(ID)
peers = st.dictionaries(ids, st.lists(addresses, max_size=3).map(tuple), max_size=5)
LONGEST = Multiaddr("/dns4/" + ".".join(["a" * 59] * 4) + "/tcp/4001")


def crowd(count, addresses):
    return {ID(n.to_bytes(38)): tuple(addresses) for n in range(count)}


@given(st.sampled_from(KINDS), st.binary(max_size=KEY_BYTES), peers, peers)
def test_a_message_comes_back_as_it_was(kind, key, closer, providers):
    found = read_kad(write_kad(kind, key, closer, providers))
    assert (found.kind, found.key, found.closer, found.providers) == (kind, key, closer, providers)


def test_an_answer_without_a_key_is_one():
    """Go and JavaScript answer `find-node` so."""
    assert read_kad(write_kad("find-node", closer=crowd(1, ()))).closer == crowd(1, ())


def test_values_are_no_part_of_it():
    for kind in (Message.PUT_VALUE, Message.GET_VALUE):
        with pytest.raises(KadError):
            read_kad(Message(type=kind, key=b"key").SerializeToString())


def test_a_key_too_long_is_refused():
    with pytest.raises(KadError):
        read_kad(write_kad("find-node", bytes(KEY_BYTES + 1)))


@pytest.mark.parametrize("where", ["closerPeers", "providerPeers"])
def test_too_many_peers_are_refused(where):
    message = Message(type=Message.FIND_NODE, key=b"key")
    for n in range(PEERS + 1):
        getattr(message, where).add(id=n.to_bytes(38))
    with pytest.raises(KadError):
        read_kad(message.SerializeToString())


def test_however_much_is_known_what_is_written_can_be_read():
    everything = crowd(2 * PEERS, [LONGEST] * 2 * limits.ADDRESSES)
    written = write_kad("get-providers", b"k" * KEY_BYTES, everything, everything)
    assert MESSAGE_BYTES - 5_000 < len(written) <= MESSAGE_BYTES
    found = read_kad(written)
    assert list(found.closer) == list(everything)[: len(found.closer)], "the closest first"
    assert len(found.closer) >= 5
    assert len(found.providers) >= 5
    assert all(len(each) == limits.ADDRESSES for each in found.providers.values())


def test_peers_that_need_little_room_are_all_written_up_to_the_bound():
    found = read_kad(write_kad("get-providers", b"key", crowd(20, [LONGEST]), crowd(2 * PEERS, [LONGEST])))
    assert (len(found.closer), len(found.providers)) == (20, PEERS)


def test_addresses_that_cannot_be_read_are_left_out_and_those_beyond_the_bound_too():
    good = Multiaddr("/ip4/10.0.0.1/tcp/4001")
    odd = [b"", b"\xff", b"\xff\xff\xff\xff\x7f", bytes(limits.ADDRESS_BYTES + 1)]
    assert read_addresses([*odd, good.to_bytes()]) == (good,)
    assert len(read_addresses([good.to_bytes()] * 2 * limits.ADDRESSES)) == limits.ADDRESSES


@given(st.binary(max_size=300))
def test_noise_is_a_message_or_a_kad_error(data):
    with contextlib.suppress(KadError):
        read_kad(data)


@given(st.sampled_from(KINDS), st.binary(max_size=KEY_BYTES), peers, peers, st.data())
def test_a_message_with_damage_is_a_message_or_a_kad_error(kind, key, closer, providers, data):
    damaged = bytearray(write_kad(kind, key, closer, providers) or b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(KadError):
        read_kad(bytes(damaged))


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_no_bytes_of_an_address_get_further(noise):
    for each in read_addresses(noise):
        assert str(each)
