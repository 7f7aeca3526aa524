"""Exporters with the real packages, offline. Each test is skipped where its package is missing.

`pip install 'echo-node[log]'` brings all three.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest

from echo_node.errors import ConfigError
from echo_node.telemetry.exporters import check_exporter

SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from echo_node.telemetry.exporters import open_writer
from echo_node.telemetry.metrics import Records
from tests.telemetry.test_metrics import record
import trio

async def write(name, folder):
    records = Records()
    opened = await trio.to_thread.run_sync(partial(open_writer, name, "a-run", folder))  # as a node does
    with records.writing_to(opened):
        for number in (1, 2, 3):
            records.add(record(number, number=number, reward=number / 4))

trio.run(write, sys.argv[1], Path(sys.argv[2]))
"""
REWARDS = [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.fixture
def exported(tmp_path):
    def run(name):
        pytest.importorskip(name)
        env = {
            **os.environ,
            "HOME": str(tmp_path),
            "WANDB_MODE": "offline",
            "TRACKIO_DIR": str(tmp_path / "trackio"),
        }
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", SCRIPT, name, str(tmp_path)]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert not done.stdout, "standard output is for events"
        return tmp_path

    return run


def test_tensorboard_has_the_reward_of_every_step(exported):
    folder = exported("tensorboard") / "tensorboard" / "a-run"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/reward")] == REWARDS


def test_trackio_has_the_reward_of_every_step(exported):
    file = exported("trackio") / "trackio" / "echo-node.db"
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'a-run' ORDER BY step")
        found = [(step, json.loads(metrics)["train/reward"]) for step, metrics in rows]
    database.close()
    assert found == REWARDS


def test_wandb_has_the_reward_of_every_step(exported):
    (file,) = (exported("wandb") / "wandb").glob("offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in leveldb_records(file.read_bytes()):
        row = wandb_internal_pb2.Record()
        row.ParseFromString(data)
        if row.WhichOneof("record_type") == "history":
            figures = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in row.history.item
            }
            found.append((figures["_step"], figures["train/reward"]))
    assert found == REWARDS


def leveldb_records(data: bytes) -> list[bytes]:
    """Split a LevelDB log of one block: each record has a checksum, a length and a type."""
    assert len(data) < 32_768
    place, records = 7, []
    while place < len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        assert kind == 1, "a whole record"
        records.append(data[place + 7 : place + 7 + length])
        place += 7 + length
    return records


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_folder_of_that_name_is_not_the_package(name, tmp_path, monkeypatch):
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    (tmp_path / name).mkdir()  # as wandb leaves one where it was run
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is not installed"):
        check_exporter(name)
    sys.modules.pop(name, None)
