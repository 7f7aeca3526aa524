"""The network between the machines of a chaos run: one process that forwards IP packets.

It holds the far end of every machine's only link (a TUN device) and forwards packets by their
destination. Faults are rules: a packet is dropped, delayed, or overtaken. A partition is a rule
that drops everything.

As a program it is the relay, told what to do on stdin, a line of JSON each; `Weather` is the hand
that starts and tells it. It knows machines by number: number n has the address that ends in n + 1.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
DEVICE: Final = "wan"
MTU: Final = 9000
"""Large packets: a program in Python passes on so many a second, and not more."""
MOST_HELD: Final = 20_000
"""Packets that are under way; what comes on top is lost, as in any queue."""
AT_ONCE: Final = 32
ANSWER_SECONDS: Final = 20.0
OVERTAKEN_SECONDS: Final = 0.05
"""By which a packet that is overtaken comes later."""
_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_NEW_NETWORK: Final = 0x40000000


class WeatherError(RuntimeError):
    """The relay does not run, or does not answer."""


@dataclass(frozen=True)
class Rule:
    """A rule for packets from some machines to others.

    Rules add up; `drop` and `overtaken` are shares of packets.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    drop: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    overtaken: float = 0.0


class Weather:
    """The hand on the relay."""

    def __init__(self, namespaces: Sequence[str], prefix: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.chaos.weather", prefix, str(seed), *namespaces]
        self._relay = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._rest = b""
        self._rules = 0
        self._hear()

    def add(self, rule: Rule) -> int:
        """From now on this holds; the number takes it back."""
        self._rules += 1
        self._tell({"add": self._rules, "rule": asdict(rule)})
        return self._rules

    def remove(self, number: int) -> None:
        self._tell({"remove": number})

    def counts(self) -> dict[str, int]:
        """Packets and bytes passed on, and packets lost."""
        return self._tell({"counts": True})

    def close(self) -> None:
        if self._relay.stdin is not None:
            self._relay.stdin.close()  # it ends by itself, as it would if this process died
        try:
            self._relay.wait(10)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait(10)
        if self._relay.stdout is not None:
            self._relay.stdout.close()

    def _tell(self, what: dict[str, Any]) -> dict[str, int]:
        try:
            os.write(self._relay.stdin.fileno(), json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise WeatherError(f"the relay is gone: {error}") from error
        return self._hear()

    def _hear(self) -> dict[str, int]:
        deadline, pipe = time.monotonic() + ANSWER_SECONDS, self._relay.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe, 65_536) if ready else b""
            if not chunk:
                raise WeatherError(f"the relay does not answer (return code {self._relay.poll()})")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


class Relay:
    """Passes packets on, until its stdin ends."""

    def __init__(self, devices: Sequence[int], prefix: bytes, luck: random.Random) -> None:
        self._devices = devices
        self._prefix = prefix
        self._luck = luck
        self._rules: dict[int, Rule] = {}
        self._between: dict[tuple[int, int], Rule] = {}
        self._held: list[tuple[float, int, int, bytes]] = []
        self._last: dict[tuple[int, int], float] = {}
        """When the packet before goes out, for each pair: delays alone change no order."""
        self._counts = Counter({"packets": 0, "bytes": 0, "dropped": 0, "overtaken": 0})

    def run(self) -> None:
        poll = select.epoll()
        senders = {device: number for number, device in enumerate(self._devices)}
        for each in (0, *self._devices):
            poll.register(each, select.EPOLLIN)
        words = b""
        while True:
            wait = -1 if not self._held else max(0.0, self._held[0][0] - time.monotonic())
            for file, _ in poll.poll(wait):
                if file:
                    self._take(file, senders[file])
                    continue
                chunk = os.read(0, 65_536)
                if not chunk:
                    return
                *lines, words = (words + chunk).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._let_go()

    def _take(self, device: int, sender: int) -> None:
        """Packets that a machine has sent, some of them: the others have theirs waiting too."""
        for _ in range(AT_ONCE):
            try:
                packet = os.read(device, 65_536)
            except OSError:
                return
            if packet[16:19] != self._prefix or not 0 < packet[19] <= len(self._devices):
                continue  # broadcasts, and the questions of IPv6
            pair = sender, packet[19] - 1
            rule = self._between.get(pair)
            if rule is None:
                self._pass(pair[1], packet)
            else:
                self._weather(pair, rule, packet)

    def _weather(self, pair: tuple[int, int], rule: Rule, packet: bytes) -> None:
        luck = self._luck
        if luck.random() < rule.drop or len(self._held) >= MOST_HELD:
            self._counts["dropped"] += 1
            return
        due = time.monotonic() + rule.delay + rule.jitter * luck.random()
        due = self._last[pair] = max(due, self._last.get(pair, 0.0))
        if luck.random() < rule.overtaken:
            self._counts["overtaken"] += 1
            due += OVERTAKEN_SECONDS
        heapq.heappush(self._held, (due, self._counts["packets"] + len(self._held), pair[1], packet))

    def _let_go(self) -> None:
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._held)
            self._pass(receiver, packet)

    def _pass(self, receiver: int, packet: bytes) -> None:
        try:
            os.write(self._devices[receiver], packet)
        except OSError:  # its queue is full, or the machine is gone
            self._counts["dropped"] += 1
            return
        self._counts["packets"] += 1
        self._counts["bytes"] += len(packet)

    def _obey(self, command: dict[str, Any]) -> None:
        if "add" in command:
            self._rules[command["add"]] = Rule(**command["rule"])
        self._rules.pop(command.get("remove", 0), None)
        self._between = together(self._rules.values())
        _answer(dict(self._counts))


def together(rules: Iterable[Rule]) -> dict[tuple[int, int], Rule]:
    """For each ordered pair that any rule is about, all of them as one."""
    pairs: dict[tuple[int, int], Rule] = {}
    for rule in rules:
        for pair in ((one, other) for one in rule.senders for other in rule.receivers if one != other):
            so_far = pairs.get(pair, Rule((), ()))
            pairs[pair] = Rule(
                (),
                (),
                drop=1 - (1 - so_far.drop) * (1 - rule.drop),
                delay=so_far.delay + rule.delay,
                jitter=so_far.jitter + rule.jitter,
                overtaken=1 - (1 - so_far.overtaken) * (1 - rule.overtaken),
            )
    return pairs


def _answer(counts: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


def link_of(namespace: str) -> int:
    """Open a TUN device in a namespace, which this process enters for good.

    Whoever holds the file is the other end of the wire.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(there, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
    finally:
        os.close(there)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    return device


def main() -> None:
    prefix, seed, *namespaces = sys.argv[1:]
    devices = [link_of(each) for each in namespaces]
    _answer({})
    Relay(devices, bytes(map(int, prefix.split("."))), random.Random(int(seed))).run()


if __name__ == "__main__":
    main()
