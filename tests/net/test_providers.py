"""Provider records: bounded per key, per provider and in all, and gone when they are old."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

import trio
from multiaddr import Multiaddr

from echo_node.net.dht import provider_records as rules
from echo_node.net.dht.provider_records import PER_KEY, SECONDS, Providers

WHERE = (Multiaddr("/ip4/10.0.0.1/tcp/4001"),)


def number(n):
    return n.to_bytes(32)


async def test_a_record_is_found_until_it_is_old(autojump_clock):
    known = Providers()
    known.add(b"key", b"one", WHERE)
    await trio.sleep(SECONDS - 1)
    known.add(b"key", b"two", ())
    assert known.of(b"key") == {b"two": (), b"one": WHERE}
    await trio.sleep(1)
    assert known.of(b"key") == {b"two": ()}
    assert len(known) == 1
    await trio.sleep(SECONDS)
    known.expire()
    assert len(known) == 0
    assert known._by_key == known._keys_of == known._counts == {}, "nothing is left of them"


async def test_who_says_it_again_is_newest_with_the_newest_addresses(autojump_clock):
    known = Providers()
    known.add(b"key", b"one", ())
    known.add(b"key", b"two", ())
    await trio.sleep(SECONDS / 2)
    known.add(b"key", b"one", WHERE)
    assert list(known.of(b"key").items()) == [(b"one", WHERE), (b"two", ())]
    await trio.sleep(SECONDS / 2)
    assert known.of(b"key") == {b"one": WHERE}


async def test_a_key_with_many_providers_keeps_the_newest(autojump_clock):
    known = Providers()
    for n in range(PER_KEY + 5):
        known.add(b"key", number(n), WHERE)
    assert list(known.of(b"key")) == [number(n) for n in reversed(range(5, PER_KEY + 5))]
    assert len(known) == PER_KEY


async def test_a_provider_of_many_keys_keeps_its_newest(autojump_clock, monkeypatch):
    monkeypatch.setattr(rules, "PER_PROVIDER", 10)
    known = Providers()
    for n in range(25):
        known.add(number(n), b"greedy", WHERE)
    assert [n for n in range(25) if known.of(number(n))] == list(range(15, 25))


async def test_when_all_is_full_whoever_has_the_most_makes_room(autojump_clock, monkeypatch):
    monkeypatch.setattr(rules, "RECORDS", 100)
    known = Providers()
    for n in range(5):
        known.add(number(n), b"modest", WHERE)
    for n in range(1_000):
        known.add(number(n), b"greedy", WHERE)
    assert len(known) == 100
    for n in range(50):
        known.add(b"one", number(n), WHERE)
    assert len(known) == 100
    assert all(b"modest" in known.of(number(n)) for n in range(5))
    assert len(known.of(b"one")) == 50


async def test_a_key_that_nobody_named_has_no_providers(autojump_clock):
    assert Providers().of(b"key") == {}
