"""A seed as its operator runs it: a real process."""

from __future__ import annotations

import configparser
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil

import bootstrap
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from tests.net.behaviour import IDENTITIES, KEY, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MEMORY = 150 * 1024 * 1024


@contextmanager
def seed(folder, *arguments):
    """A running seed, and the address to reach it at."""
    command = [
        sys.executable,
        "-m",
        "bootstrap",
        "--json",
        "--listen",
        *LOOPBACK,
        "--data",
        str(folder),
        *arguments,
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = child.stdout.readline()
        assert line, child.stderr.read().decode()
        yield child, json.loads(line)["addresses"][0]
    finally:
        child.kill()
        child.communicate(timeout=20)


async def test_nodes_that_know_only_the_seed_find_each_other(tmp_path):
    with seed(tmp_path) as (_child, address):
        settings = SwarmSettings(listen=LOOPBACK, seeds=(address,))
        async with join_swarm(IDENTITIES[0], settings) as one, join_swarm(IDENTITIES[1], settings) as two:
            await until(lambda: one.peers() and two.peers())
            await one.provide(KEY)
            assert await two.find(KEY, 1) == [one.public]
            assert one.public in two.peers()


async def test_a_seed_is_small(tmp_path):
    with seed(tmp_path) as (child, address):
        async with join_swarm(IDENTITIES[0], SwarmSettings(listen=LOOPBACK, seeds=(address,))) as one:
            await until(one.peers)
            assert psutil.Process(child.pid).memory_info().rss < MEMORY


def test_a_seed_keeps_its_address_and_ends_in_peace(tmp_path):
    ids = set()
    for told in (signal.SIGTERM, signal.SIGINT):
        with seed(tmp_path) as (child, address):
            ids.add(address.rsplit("/", 1)[1])
            child.send_signal(told)
            assert child.wait(timeout=20) == 0
            assert child.stderr.read() == b""
    assert len(ids) == 1


def test_an_address_that_cannot_be_had_is_one_clear_line(tmp_path):
    command = [sys.executable, "-m", "bootstrap", "--data", str(tmp_path), "--listen"]
    for wrong in ("/ip4/192.0.2.1/tcp/1", "nonsense"):
        ended = subprocess.run([*command, wrong], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert wrong in ended.stderr


def test_the_public_seeds_and_the_unit_can_be_read():
    assert isinstance(bootstrap.public_seeds(), tuple)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(Path(bootstrap.__file__).with_name("echo-seed.service"))
    assert "-m bootstrap" in unit["Service"]["ExecStart"]
