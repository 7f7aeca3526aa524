"""The address book: survives restarts, kills and damage, and keeps good peers in a flood."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.net.discovery import address_book
from echo_node.net.discovery.address_book import AddressBook
from protocol import Identity, limits, peer_id

KEYS = [Identity(bytes([n // 256, n % 256]) * 16).public for n in range(1, 900)]
GOOD, OTHER = KEYS[:2]
HERE = "/ip4/198.51.100.7/tcp/4001"


def private(number: int) -> str:
    return f"/ip4/10.{number // 65536}.{number // 256 % 256}.{number % 256}/tcp/4001"


def test_who_was_good_is_there_after_a_restart(tmp_path):
    book = AddressBook(tmp_path / "peers", clock=lambda: 100.0)
    book.reached(GOOD, HERE)
    book.signed(GOOD, [f"/ip4/198.51.100.8/tcp/4001/p2p/{peer_id(GOOD)}", HERE])
    book.signed(OTHER, ["/ip6/2001:db9::1/tcp/4001"])
    before = list(book)
    book.close()
    again = AddressBook(tmp_path / "peers")
    assert set(again) == set(before)
    assert again.get(GOOD).addresses == (HERE, "/ip4/198.51.100.8/tcp/4001")
    assert [entry.public for entry in again.best(9)] == [GOOD, OTHER], "who was reached goes first"
    again.close()


def test_without_a_path_it_is_kept_in_memory():
    book = AddressBook(None)
    book.reached(GOOD, HERE)
    assert book.best(1)[0].addresses == (HERE,)
    book.close()


def test_a_flood_of_strangers_pushes_nobody_out_that_was_reached(tmp_path):
    book = AddressBook(tmp_path / "peers", most=32)
    for number, public in enumerate(KEYS[:20]):
        book.reached(public, private(number))
        for _ in range(address_book.FAILURES_BEFORE_LAST):
            book.failed(public)  # not even when they are away for a while
    for number, public in enumerate(KEYS[20:]):
        book.signed(public, [private(1000 + number)])
    assert len(book) == 32
    assert set(KEYS[:20]) <= {entry.public for entry in book}
    book.close()
    again = AddressBook(tmp_path / "peers", most=32)
    assert len(again) == 32, "the file is as bounded as the memory"
    again.close()


def test_one_network_does_not_own_the_book():
    book = AddressBook(None)
    book.reached(GOOD, "/ip4/198.50.1.1/tcp/4001")
    for number, public in enumerate(KEYS[1:200]):
        book.reached(public, f"/ip4/203.0.114.{number % 250}/tcp/{4001 + number}")
    assert len(book) == address_book.PER_SUBNET + 1
    assert book.get(GOOD)


def test_the_worst_goes_first():
    now = iter(range(1000))
    book = AddressBook(None, most=3, clock=lambda: float(next(now)))
    for number, public in enumerate(KEYS[:3]):
        book.reached(public, private(number))
    for _ in range(address_book.FAILURES_BEFORE_LAST):
        book.failed(KEYS[1])
    book.reached(KEYS[3], private(3))
    assert {entry.public for entry in book} == {KEYS[0], KEYS[2], KEYS[3]}
    book.reached(KEYS[4], private(4))
    assert {entry.public for entry in book} == {KEYS[2], KEYS[3], KEYS[4]}, (
        "then who was not seen for longest"
    )


def test_a_peer_with_ten_thousand_addresses_takes_no_more_than_its_place():
    book = AddressBook(None)
    book.reached(GOOD, HERE)
    book.signed(GOOD, [private(number) for number in range(10_000)])
    assert len(book.get(GOOD).addresses) == limits.ADDRESSES
    assert book.get(GOOD).addresses[0] == HERE


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/1.2.3.4/udp/4001/quic-v1",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/70000",
        "/ip4/224.0.0.251/tcp/5353",
        "/ip6/fe80::1/tcp/4001",
        "/dns4/example.org/tcp/4001",
        "/ip4/1.2.3.4/tcp/4001/p2p/" + peer_id(OTHER),
        "/ip4/1.2.3.4/tcp/4001" + "/p2p-circuit" * 40,
    ],
)
def test_what_leads_nowhere_is_not_written_down(address):
    book = AddressBook(None)
    book.signed(GOOD, [address])
    book.reached(GOOD, address)
    assert len(book) == 0


@given(st.lists(st.text(max_size=300), max_size=20))
def test_no_text_of_a_peer_breaks_it(addresses):
    book = AddressBook(None)
    book.signed(GOOD, addresses)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"not a database, and long enough to look at" * 100,
        b"SQLite format 3\0" + b"\xff" * 5000,
    ],
)
def test_a_broken_file_is_set_aside_and_begun_anew(tmp_path, caplog, rubbish):
    path = tmp_path / "peers"
    path.write_bytes(rubbish)
    with caplog.at_level(logging.WARNING):
        book = AddressBook(path)
    book.reached(GOOD, HERE)
    book.close()
    assert len(caplog.records) == 1
    assert "begun anew" in caplog.text
    assert (tmp_path / "peers.broken").read_bytes() == rubbish
    again = AddressBook(path)
    assert len(again) == 1
    again.close()


def test_a_file_with_torn_pages_is_set_aside(tmp_path, caplog):
    path = tmp_path / "peers"
    book = AddressBook(path)
    for number, public in enumerate(KEYS[:400]):
        book.reached(public, private(number))
    book.close()
    data = bytearray(path.read_bytes())
    assert len(data) > 5 * 4096
    data[4096 : 3 * 4096] = os.urandom(2 * 4096)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = AddressBook(path)
    assert len(again) == 0
    assert "begun anew" in caplog.text
    again.close()


def test_rows_that_nobody_here_wrote_are_no_book(tmp_path, caplog):
    path = tmp_path / "peers"
    AddressBook(path).close()
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO peers VALUES (?, ?, ?, ?, ?, ?)", (b"short", "[]", "[]", 1.0, 1, 0))
    file.close()
    book = AddressBook(path)
    assert len(book) == 0
    assert "begun anew" in caplog.text
    book.close()


def test_another_format_is_set_aside(tmp_path, caplog):
    path = tmp_path / "peers"
    file = sqlite3.connect(path)
    file.execute("PRAGMA user_version = 9")
    file.close()
    AddressBook(path).close()
    assert "has version 9" in caplog.text


def test_a_folder_that_cannot_be_written_costs_one_line_and_no_more(tmp_path, caplog):
    book = AddressBook(tmp_path / "missing" / "peers")
    book.reached(GOOD, HERE)
    book.reached(OTHER, HERE)
    assert len(book) == 2
    assert len(caplog.records) == 1
    assert "kept in memory" in caplog.text


def test_a_book_that_somebody_else_locks_goes_on_in_memory(tmp_path, caplog):
    path = tmp_path / "peers"
    book = AddressBook(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    book.reached(GOOD, HERE)
    book.reached(OTHER, HERE)
    assert len(book) == 2
    assert len(caplog.records) == 1
    assert "goes on in memory" in caplog.text
    other.close()


WRITER = """
import itertools, pathlib, sys
from echo_node.net.discovery.address_book import AddressBook
from protocol import Identity
book = AddressBook(pathlib.Path(sys.argv[1]))
for number in itertools.count():
    book.reached(Identity(number.to_bytes(32)).public, f"/ip4/10.0.{number // 250 % 250}.{number % 250}/tcp/4001")
    print(number, flush=True)
"""


def kill_while_writing(path, lines: int) -> int:
    """How many peers a process had written when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        for _ in range(lines):
            last = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        for line in writer.stdout:
            last = int(line) if line.strip().isdigit() else last
    return last + 1


def test_what_was_written_is_there_after_kill_9(tmp_path, caplog):
    for lines in (1, 7, 60, 300):
        path = tmp_path / f"peers {lines}"
        written = kill_while_writing(path, lines)
        book = AddressBook(path)
        kept = {entry.public for entry in book}
        newest = [Identity(number.to_bytes(32)).public for number in range(max(0, written - 50), written)]
        assert set(newest) <= kept
        book.close()
    assert not caplog.records, "a kill breaks no book"
