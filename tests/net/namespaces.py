"""An internet for a test: a network namespace per machine, with real NAT for homes.

`with internet() as net:` gives machines that all can reach (`net.public`) and machines at home
behind a router that masquerades (`net.home`); two homes have no route to each other. Everything is
gone afterwards, also when the test failed; what a killed run left behind, the next one takes away.
NAT is asked of the kernel directly, so that neither `iptables` nor `nft` has to be installed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest

PREFIX = "echo-test"
WORLD = "11.22.33"  # an address of the real internet, which these namespaces have no route to
HOME = "192.168.1"


@dataclass(frozen=True)
class Machine:
    """A namespace; `address` is what it has itself, `seen` is what others see."""

    namespace: str
    address: str
    seen: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs a program on this machine."""
        return ["ip", "netns", "exec", self.namespace, *words]


class Internet:
    """A switch in a namespace of its own, and what is plugged into it."""

    def __init__(self) -> None:
        self._name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []
        self._plugged = 0
        self._switch = self._namespace("switch")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")

    def public(self) -> Machine:
        """A machine with an address of its own that every other can dial."""
        namespace = self._namespace("public")
        address = self._plug_in(namespace)
        return Machine(namespace, address, address)

    def home(self) -> Machine:
        """Add a machine behind a router with NAT.

        All homes use the same private addresses, as homes do.
        """
        router, inside = self._namespace("router"), self._namespace("home")
        seen = self._plug_in(router)
        _ip("-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", inside)
        for namespace, device, address in ((router, "lan", f"{HOME}.1"), (inside, "eth0", f"{HOME}.2")):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", inside, "route", "add", "default", "via", f"{HOME}.1")
        try:
            _run("ip", "netns", "exec", router, sys.executable, __file__)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no NAT on this machine: {error.stderr.strip().splitlines()[-1]}")
        return Machine(inside, f"{HOME}.2", seen)

    def cut(self, machine: Machine) -> None:
        """Pull the plug of a public machine: nothing reaches it, and it reaches nobody."""
        _ip("-n", self._switch, "link", "set", self._port(machine), "down")

    def heal(self, machine: Machine) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", self._port(machine), "up")

    def _port(self, machine: Machine) -> str:
        return f"port{machine.seen.rpartition('.')[2]}"

    def close(self) -> None:
        """Take everything away; the devices go with their namespaces."""
        for namespace in reversed(self._made):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=20)
        self._made.clear()

    def _plug_in(self, namespace: str) -> str:
        self._plugged += 1
        address, port = f"{WORLD}.{self._plugged}", f"port{self._plugged}"
        _ip(
            "-n", namespace, "link", "add", "wan", "type", "veth", "peer", "name", port, "netns", self._switch
        )
        _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "wan")
        _ip("-n", namespace, "link", "set", "wan", "up")
        return address

    def _namespace(self, what: str) -> str:
        name = f"{self._name}-{what}{len(self._made)}"
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name


@contextmanager
def internet() -> Iterator[Internet]:
    """The internet of one test. Skips the test where the machine does not let it make one."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the `ip` command of iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    _sweep()
    try:
        net = Internet()
    except subprocess.CalledProcessError as error:
        _sweep(ours=True)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    try:
        yield net
    finally:
        net.close()


def _sweep(*, ours: bool = False) -> None:
    """Take away namespaces of runs that have died."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True, timeout=20)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        gone = owner.isdigit() and (not psutil.pid_exists(int(owner)) or (ours and int(owner) == os.getpid()))
        if name.startswith(f"{PREFIX}-") and gone:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def masquerade() -> None:
    """Make this namespace a router with NAT: what it forwards leaves under its own address.

    In nft's words:
    `table ip nat { chain out { type nat hook postrouting priority 100; masquerade; } }`
    """
    with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as switch:  # noqa: PTH123 -- no file
        switch.write("1")
    new_table, new_chain, new_rule = 0, 3, 6
    table, chain, masq = b"nat\0", b"out\0", b"masq\0"
    hook = _attribute(1, struct.pack(">I", 4)) + _attribute(
        2, struct.pack(">I", 100)
    )  # postrouting, after routing
    expression = _nested(1, _attribute(1, masq) + _nested(2, b""))
    batch = [
        _message(0x10, b"\0\0" + struct.pack(">H", 10)),
        _nft(new_table, _attribute(1, table)),
        _nft(
            new_chain,
            _attribute(1, table) + _attribute(3, chain) + _nested(4, hook) + _attribute(7, b"nat\0"),
        ),
        _nft(new_rule, _attribute(1, table) + _attribute(2, chain) + _nested(4, expression)),
        _message(0x11, b"\0\0" + struct.pack(">H", 10)),
    ]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netfilter:  # NETLINK_NETFILTER
        netfilter.settimeout(5)
        netfilter.bind((0, 0))
        netfilter.send(b"".join(batch))
        for _ in range(3):  # each of the three asked for an acknowledgement
            answer = netfilter.recv(65_536)
            (error,) = struct.unpack_from("=i", answer, 16)
            if error:
                raise OSError(-error, f"the kernel makes no NAT: {os.strerror(-error)}")


def _nft(kind: int, attributes: bytes) -> bytes:
    create_append_acknowledge = 0x400 | 0x800 | 4
    return _message((10 << 8) | kind, b"\2\0\0\0" + attributes, create_append_acknowledge)


def _message(kind: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 1 | flags, 0, 0) + body


def _nested(kind: int, body: bytes) -> bytes:
    return _attribute(kind | 0x8000, body)


def _attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


if __name__ == "__main__":
    masquerade()
