"""Seeds: what people write, and what names stand for. A name that leads nowhere stops nobody."""

from __future__ import annotations

import logging
import socket
from contextlib import asynccontextmanager

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo_node.errors import ConfigError
from echo_node.net.discovery import seeds as seeds_module
from echo_node.net.discovery.seeds import (
    ANSWERS,
    ResolvedSeed,
    SeedError,
    parse_seed,
    parse_seeds,
    parse_valid_seeds,
    resolve,
)
from protocol import Identity

ONE, TWO = Identity(b"1" * 32), Identity(b"2" * 32)
AT_ONE = f"/ip4/192.0.2.1/tcp/4001/p2p/{ONE.peer_id}"


@pytest.mark.parametrize(
    ("text", "kind", "named"),
    [
        (AT_ONE, "ip4", False),
        (f"  {AT_ONE}\n", "ip4", False),
        (f"/ip6/2001:db8::1/tcp/4001/p2p/{ONE.peer_id}", "ip6", False),
        (f"/dns4/seed.example/tcp/4001/p2p/{ONE.peer_id}", "dns4", True),
        (f"/dns6/seed.example/tcp/4001/p2p/{ONE.peer_id}", "dns6", True),
        (f"/dns/localhost/tcp/4001/p2p/{ONE.peer_id}", "dns", True),
        (f"/ip4/192.0.2.1/tcp/4001/p2p/{TWO.peer_id}/p2p-circuit/p2p/{ONE.peer_id}", "ip4", False),
        (f"/dnsaddr/seed.example/p2p/{ONE.peer_id}", "dnsaddr", True),
    ],
)
def test_every_form_is_read(text, kind, named):
    seed = parse_seed(text)
    assert (seed.kind, seed.is_named, seed.public) == (kind, named, ONE.public)


def test_a_list_of_records_needs_no_peer_id():
    assert parse_seed("/dnsaddr/seed.example").public is None


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "write it like /ip4/"),
        ("seed.example:4001", "the peer id is missing"),
        ("/ip4/192.0.2.1/tcp/4001", "the peer id is missing"),
        (f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{ONE.peer_id}", "write it like"),
        (f"/ip4/192.0.2.300/tcp/4001/p2p/{ONE.peer_id}", "write it like"),
        (f"/ip4/0.0.0.0/tcp/4001/p2p/{ONE.peer_id}", "write it like"),
        (f"/ip4/192.0.2.1/tcp/99999/p2p/{ONE.peer_id}", "write it like"),
        (f"/dns4/seed.example/tcp/0/p2p/{ONE.peer_id}", "ports go from 1 to 65535"),
        (f"/dns4/seed..example/tcp/1/p2p/{ONE.peer_id}", "write it like"),
        (f"/dns4/{'a' * 64}.example/tcp/1/p2p/{ONE.peer_id}", "write it like"),
        (AT_ONE[:-1], "copy the peer id"),
        (AT_ONE[:-1] + "0", "copy the peer id"),
        ("/ip4/192.0.2.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "copy the peer id"),
        (AT_ONE + "\x1b[2J", "write it like"),
    ],
)
def test_what_cannot_be_read_says_what_to_write(text, advice):
    with pytest.raises(ConfigError) as caught:
        parse_seed(text)
    assert advice in caught.value.advice
    assert str(caught.value).isprintable()


@given(
    st.text(max_size=400) | st.from_regex(r"/(dns4|dnsaddr|ip4|ip6)/[a-z.0-9:-]{0,300}(/tcp/\d+)?(/p2p/\w*)?")
)
def test_no_text_does_anything_but_parse_or_fail(text):
    try:
        parse_seed(text)
    except ConfigError:
        return


def test_a_person_is_told_and_a_manifest_is_skimmed(caplog):
    with pytest.raises(ConfigError):
        parse_seeds([AT_ONE, "rubbish"])
    with caplog.at_level(logging.WARNING):
        assert [seed.text for seed in parse_valid_seeds([AT_ONE, "rubbish", AT_ONE])] == [AT_ONE]
    assert len(caplog.records) == 1


async def test_a_number_stands_for_itself():
    assert await resolve(parse_seed(AT_ONE)) == [ResolvedSeed(ONE.public, ("/ip4/192.0.2.1/tcp/4001",))]


async def test_localhost_is_a_name_like_any_other():
    (place,) = await resolve(parse_seed(f"/dns4/localhost/tcp/4001/p2p/{ONE.peer_id}"))
    assert place == ResolvedSeed(ONE.public, ("/ip4/127.0.0.1/tcp/4001",))


async def test_a_name_has_several_answers(monkeypatch):
    async def answers(*_):
        await trio.lowlevel.checkpoint()
        ips = [
            ("192.0.2.1", 1),
            ("2001:db8::1", 1, 0, 0),
            ("192.0.2.1", 1),
            ("0.0.0.0", 1),  # noqa: S104 - an answer, which nobody binds to
            ("fe80::1%2", 1, 0, 2),
        ]
        return [(0, 0, 0, "", ip) for ip in ips]

    monkeypatch.setattr(trio.socket, "getaddrinfo", answers)
    (place,) = await resolve(parse_seed(f"/dns/seed.example/tcp/4001/p2p/{ONE.peer_id}"))
    assert place.addresses == ("/ip4/192.0.2.1/tcp/4001", "/ip6/2001:db8::1/tcp/4001")


async def test_a_name_that_does_not_exist_is_said_in_plain_words(monkeypatch):
    async def nothing(*_):
        await trio.lowlevel.checkpoint()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(trio.socket, "getaddrinfo", nothing)
    with pytest.raises(
        SeedError, match=r"the name no\.example cannot be resolved: Name or service not known"
    ):
        await resolve(parse_seed(f"/dns4/no.example/tcp/4001/p2p/{ONE.peer_id}"))


async def test_a_resolver_that_hangs_is_left_behind(monkeypatch):
    async def hang(*_):
        await trio.sleep_forever()

    monkeypatch.setattr(trio.socket, "getaddrinfo", hang)
    monkeypatch.setattr(seeds_module, "RESOLVE_SECONDS", 0.05)
    with pytest.raises(SeedError, match=r"was not resolved within 0\.05 s"):
        await resolve(parse_seed(f"/dns4/slow.example/tcp/4001/p2p/{ONE.peer_id}"))


@asynccontextmanager
async def name_server(records):
    """A name server on loopback with these TXT records, and a resolver that asks it."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))

        async def serve():
            while True:
                data, asker = await sock.recvfrom(4096)
                question = dns.message.from_wire(data)
                name = question.question[0].name
                answer = dns.message.make_response(question)
                if texts := records.get(name.to_text(omit_final_dot=True)):
                    quoted = [
                        " ".join(f'"{text[i : i + 200]}"' for i in range(0, len(text), 200)) for text in texts
                    ]
                    answer.answer.append(dns.rrset.from_text(name, 60, "IN", "TXT", *quoted))
                else:
                    answer.set_rcode(dns.rcode.NXDOMAIN)
                await sock.sendto(answer.to_wire(max_size=65_000), asker)

        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = sock.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield resolver
            nursery.cancel_scope.cancel()


async def test_records_hold_several_seeds_and_names_within_names():
    records = {
        "_dnsaddr.seed.example": [
            f"dnsaddr={AT_ONE}",
            f"dnsaddr=/dns4/localhost/tcp/4002/p2p/{ONE.peer_id}",
            "dnsaddr=/dnsaddr/more.example",
            "dnsaddr=rubbish",
            "v=spf1 -all",
        ],
        "_dnsaddr.more.example": [f"dnsaddr=/ip4/192.0.2.2/tcp/4001/p2p/{TWO.peer_id}"],
    }
    async with name_server(records) as resolver:
        found = {
            place.public: place.addresses
            for place in await resolve(parse_seed("/dnsaddr/seed.example"), resolver=resolver)
        }
        assert set(found[ONE.public]) == {"/ip4/192.0.2.1/tcp/4001", "/ip4/127.0.0.1/tcp/4002"}
        assert found[TWO.public] == ("/ip4/192.0.2.2/tcp/4001",)
        only = await resolve(parse_seed(f"/dnsaddr/seed.example/p2p/{TWO.peer_id}"), resolver=resolver)
        assert [place.public for place in only] == [TWO.public]


async def test_a_name_that_leads_to_itself_ends():
    records = {"_dnsaddr.loop.example": ["dnsaddr=/dnsaddr/loop.example"] * 3}
    async with name_server(records) as resolver:
        with pytest.raises(SeedError, match="from name to name"):
            await resolve(parse_seed("/dnsaddr/loop.example"), resolver=resolver)


async def test_a_name_without_records_is_said_in_plain_words():
    async with name_server({}) as resolver:
        with pytest.raises(SeedError, match=r"the records of no\.example cannot be had"):
            await resolve(parse_seed("/dnsaddr/no.example"), resolver=resolver)


async def test_very_many_records_are_cut():
    many = [
        f"dnsaddr=/ip4/192.0.2.1/tcp/{4000 + n}/p2p/{Identity(n.to_bytes(32)).peer_id}" for n in range(1, 200)
    ]
    async with name_server({"_dnsaddr.many.example": many}) as resolver:
        found = await resolve(parse_seed("/dnsaddr/many.example"), resolver=resolver)
    assert len(found) == ANSWERS
