"""Two nodes on one LAN find each other with no seed; garbage on the LAN does no harm."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from zeroconf import ServiceInfo

from echo_node.net.discovery import mdns as lan_module
from echo_node.net.discovery.mdns import ADDRESSES, SERVICE, LanError, MdnsDiscovery
from protocol import Identity
from tests.net.discovery_nodes import until
from tests.net.namespaces import internet

ROOT = Path(__file__).parents[2]
ME, OTHER = Identity(b"m" * 32), Identity(b"o" * 32)
HERE = "/ip4/192.168.7.7/tcp/4001"


@contextmanager
def node(machine, listen="/ip4/0.0.0.0/tcp/0"):
    """A node as a process on a machine: its lines so far, and a way to end it."""
    command = machine.command(sys.executable, "-m", "tests.net.lan_node", listen)
    lines: list[str] = []
    errors: list[str] = []

    def read(pipe, into):
        for line in iter(pipe.readline, ""):
            into.append(line.strip())

    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        readers = [
            threading.Thread(target=read, args=pair)
            for pair in ((process.stdout, lines), (process.stderr, errors))
        ]
        for reader in readers:
            reader.start()
        try:
            yield process, lines, errors
        finally:
            process.stdin.close()
            try:
                process.wait(15)
            finally:
                process.kill()
            for reader in readers:
                reader.join(5)


def name_of(lines) -> str:
    return next((line.removeprefix("here ") for line in lines if line.startswith("here ")), "")


async def test_two_nodes_on_one_lan_find_each_other_with_no_seed():
    with internet() as net, node(net.public()) as (_, one, said), node(net.public()) as (other, two, _):
        await until(lambda: name_of(one) and name_of(two), 60)
        took = await until(lambda: f"peer {name_of(two)}" in one and f"peer {name_of(one)}" in two, 30)
        assert took < 15
        other.stdin.close()
        await until(lambda: "gone" in two, 15)  # zeroconf's thread is closed and keeps nothing alive
        assert not [line for line in said if "error" in line.lower()]


async def test_without_a_lan_it_says_so_once_and_goes_on():
    with internet() as net:
        alone = net._namespace("alone")  # loopback and nothing else
        machine = type(net.public())(alone, "127.0.0.1", "127.0.0.1")
        with node(machine) as (process, lines, said):
            await until(lambda: any("LAN" in line for line in said) and name_of(lines), 60)
            assert process.poll() is None
            assert name_of(lines)
        assert "gone" in lines
        assert len([line for line in said if "LAN" in line]) == 1


def heard(record, public=ME.public):
    """What a node makes of an announcement."""
    found = []
    info = ServiceInfo(SERVICE, f"x.{SERVICE}", port=1, properties=record)
    MdnsDiscovery(public, list)._report(info, lambda *place: found.append(place))
    return found


def test_an_announcement_is_read_back():
    own = MdnsDiscovery(OTHER.public, list)._service_info([HERE, "/ip6/fd00::7/tcp/4001"])
    found = []
    MdnsDiscovery(ME.public, list)._report(own, lambda *place: found.append(place))
    assert found == [(OTHER.public, [HERE, "/ip6/fd00::7/tcp/4001"])]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"id": "nobody", "a0": HERE},
        {"id": ME.peer_id, "a0": HERE},  # ourselves
        {"id": OTHER.peer_id},
        {"id": OTHER.peer_id, "a0": "/ip4/127.0.0.1/tcp/22"},
        {"id": OTHER.peer_id, "a0": "/dns4/victim.example/tcp/443"},
        {"id": OTHER.peer_id, "a0": b"\xff\xfe\x00"},
        {"id": b"\xff" * 52, "a0": HERE},
    ],
)
def test_rubbish_on_the_lan_finds_nobody(record):
    assert heard(record) == []


def test_an_announcement_of_very_many_addresses_is_cut():
    many = {f"a{index}": f"/ip4/10.0.0.{index + 1}/tcp/4001" for index in range(200)}
    ((_, ways),) = heard({"id": OTHER.peer_id} | many)
    assert len(ways) == ADDRESSES


def test_a_node_on_loopback_alone_is_not_announced():
    assert MdnsDiscovery(ME.public, lambda: ["/ip4/127.0.0.1/tcp/4001"])._announced(["192.168.1.2"]) == []
    assert MdnsDiscovery(ME.public, lambda: ["/ip4/0.0.0.0/tcp/9"])._announced(["192.168.1.2"]) == [
        "/ip4/192.168.1.2/tcp/9"
    ]


async def test_a_machine_without_multicast_costs_one_line(monkeypatch, caplog):
    def refuse(*_):
        raise OSError(19, "No such device")

    monkeypatch.setattr(lan_module, "Zeroconf", refuse)
    monkeypatch.setattr(lan_module, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(lan_module, "interfaces", lambda: ["192.168.1.2"])
    with caplog.at_level(logging.INFO, logger="echo_node"), trio.move_on_after(0.3):
        await MdnsDiscovery(ME.public, lambda: ["/ip4/0.0.0.0/tcp/9"]).run(lambda *_: None)
    assert len(caplog.records) == 1
    assert "No such device" in caplog.text


async def test_a_call_that_hangs_is_left_behind():
    hang = threading.Event()
    with pytest.raises(LanError, match=r"took more than 0\.05 s"):
        await lan_module._in_thread("hanging", lambda: hang.wait(20), 0.05)
    hang.set()


async def test_a_flood_of_names_keeps_the_newest_and_no_more():
    wakeup, names = lan_module._Wakeup(), deque(maxlen=lan_module.NAMES)
    shouted = threading.Thread(target=lambda: [(names.append(str(n)), wakeup.set()) for n in range(20_000)])
    shouted.start()
    await wakeup.wait()
    shouted.join()
    assert len(names) == lan_module.NAMES
    assert names[-1] == "19999"
