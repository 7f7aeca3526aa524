"""Delivery between real processes over real sockets: each item of an outbox arrives once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from protocol import Identity
from tests.net.delivery_fixtures import ids, items
from tests.net.namespaces import internet

SENDER, RECEIVER = 41, 42
LONG = 90.0
BURST = 1_000


class Child:
    """A node as a process, and the last that it said of each thing."""

    def __init__(self, command, **told):
        self.told = {}
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*command, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            with self._news:
                self.told |= json.loads(line)
                self._news.notify_all()

    def put(self, first, end):
        self.process.stdin.write(json.dumps({"put": [first, end]}).encode() + b"\n")
        self.process.stdin.flush()

    def until(self, holds):
        """Wait until what it last said will do."""
        with self._news:
            if not self._news.wait_for(lambda: holds(self.told), LONG):
                raise AssertionError(f"it did not come true: {str(self.told)[:500]}; {self.process.poll()}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)


@contextmanager
def child(run, **told):
    started = Child(run(sys.executable, "-m", "tests.net.delivery_node"), **told)
    try:
        started.until(lambda said: "addresses" in said)
        yield started
    finally:
        started.kill()


def here(*words):
    return list(words)


def sender(run, folder, address, seeds):
    to = Identity(bytes([RECEIVER]) * 32).public.hex()
    return child(run, seed=SENDER, listen=address, seeds=seeds, path=str(folder / "outbox"), to=to)


def receiver(run, folder, address, seeds=()):
    return child(run, seed=RECEIVER, listen=address, seeds=list(seeds), path=str(folder / "arrivals"))


def arrived(count):
    """All of them, each once."""
    wanted = sorted(each.hex() for each in ids(items(count)))
    return lambda said: sorted(said.get("waiting", ())) == wanted


def test_a_burst_arrives_whole_although_its_receiver_is_killed_in_the_middle(tmp_path):
    with receiver(here, tmp_path, "/ip4/127.0.0.1/tcp/0") as first:
        address = first.told["addresses"][0]
        with sender(here, tmp_path, "/ip4/127.0.0.1/tcp/0", [address]) as post:
            post.until(lambda said: said.get("peers"))
            post.put(0, BURST)
            first.until(lambda said: len(said.get("waiting", ())) >= 100)
            first.kill()
            post.until(lambda said: said.get("put") == BURST)
            post.until(lambda said: said["pending"] > 0)  # it was the middle; what it says is a moment old
            with receiver(here, tmp_path, address.partition("/p2p/")[0]) as second:
                second.until(arrived(BURST))
                post.until(lambda said: said["pending"] == 0)


def test_what_a_killed_sender_had_put_is_delivered_by_its_next_life(tmp_path):
    with receiver(here, tmp_path, "/ip4/127.0.0.1/tcp/0") as there:
        address = there.told["addresses"][0]
        with sender(
            here, tmp_path, "/ip4/127.0.0.1/tcp/0", []
        ) as alone:  # it knows nobody, so all of it waits
            alone.put(0, 200)
            alone.until(lambda said: said.get("put") == 200)
        with sender(here, tmp_path, "/ip4/127.0.0.1/tcp/0", [address]) as again:
            there.until(arrived(200))
            again.until(lambda said: said["pending"] == 0)


def test_two_homes_without_a_route_to_each_other_deliver_through_a_seed_that_relays(tmp_path):
    with internet() as net:
        middle, one, two = net.public(), net.home(), net.home()
        listen = "/ip4/0.0.0.0/tcp/4001"
        with child(
            middle.command, seed=43, listen=listen, seeds=[], path=str(tmp_path / "middle"), public=True
        ) as seed:
            (way,) = [each for each in seed.told["addresses"] if middle.address in each]
            with (
                receiver(two.command, tmp_path, listen, [way]) as there,
                sender(one.command, tmp_path, listen, [way]) as post,
            ):
                post.put(0, 200)
                there.until(arrived(200))
                post.until(lambda said: said["pending"] == 0 and said["peers"] == 2)


def part_and_heal(folder, seconds):
    """Two machines, a cut between them, and posts before, during and after it."""
    with internet() as net:
        one, two = net.public(), net.public()
        listen = "/ip4/0.0.0.0/tcp/4001"
        with receiver(two.command, folder, listen) as there:
            (way,) = [each for each in there.told["addresses"] if two.address in each]
            with sender(one.command, folder, listen, [way]) as post:
                post.put(0, 100)
                there.until(arrived(100))
                net.cut(two)
                post.put(100, 300)
                post.until(lambda said: said.get("put") == 300)
                time.sleep(seconds)  # the cut itself is what is tried
                assert len(there.told["waiting"]) == 100
                net.heal(two)
                there.until(arrived(300))
                post.put(300, 400)
                there.until(arrived(400))
                post.until(lambda said: said["pending"] == 0)


def test_a_partition_heals_by_itself_and_nothing_in_the_outbox_is_lost(tmp_path):
    part_and_heal(tmp_path, 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_partition_of_a_minute_heals_by_itself_and_nothing_in_the_outbox_is_lost(tmp_path):
    part_and_heal(tmp_path, 60)
