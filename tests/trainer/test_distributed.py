"""One trainer of many processes: same curve, same refusals, and one end for all."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from echo_node.errors import ConfigError
from echo_node.net.memory import MemorySwarm
from echo_node.node.context import NodeContext
from echo_node.node.trainer_role import TrainerRole
from echo_node.runs.algorithm import training_settings
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import ResourceLimits
from echo_node.telemetry.metrics import Records
from echo_node.trainer import distributed
from echo_node.trainer.step import TrainStep
from tests.crafting import TRAINER, open_run
from tests.trainer import distributed_program

PROGRAM = ("-m", "tests.trainer.distributed_program")


def alone(folder, *stories):
    """The same stories in this process."""
    threads = torch.get_num_threads()
    try:
        distributed_program.main(folder, *stories)
    finally:
        torch.set_num_threads(threads)


def curve(folder):
    return json.loads((folder / "curve.json").read_text())


def same_curve(one, many):
    """Return whether the same steps were taken, up to the order of additions."""
    for (loss, norm, *counts), (their_loss, their_norm, *their_counts) in zip(
        one["steps"], many["steps"], strict=True
    ):
        assert their_loss == pytest.approx(loss, abs=1e-5)
        assert their_norm == pytest.approx(norm, rel=1e-3)
        assert their_counts == counts
    assert many["adopted"] == one["adopted"] == [0, 0, 77]
    assert many["left"] is one["left"] is True


def same_weights(one, many):
    """Nearly all are the same bits; the rest is a rounding away."""
    ours, theirs = (load_file(folder / "published.safetensors") for folder in (one, many))
    assert ours.keys() == theirs.keys()
    apart = total = 0
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=2**-7, atol=1e-5)
        apart += int((theirs[name] != weight).sum())
        total += weight.numel()
    assert apart < total / 1000


@pytest.fixture
def folders(tmp_path):
    found = tmp_path / "one", tmp_path / "many"
    for folder in found:
        folder.mkdir()
    return found


def test_two_ranks_follow_the_curve_of_one_and_refuse_what_one_refuses(folders):
    one, many = folders
    alone(one, "follow:20", "refuse")
    assert distributed.relaunch(2, [*PROGRAM, str(many), "follow:20", "refuse"]) == 0
    same_curve(curve(one), curve(many))
    same_weights(one, many)
    refused = [["DefectError", "ConfigError", "ConfigError"], True]
    assert json.loads((one / "refused.json").read_text()) == refused
    assert json.loads((many / "refused.json").read_text()) == refused


def test_after_a_reign_the_ranks_are_there_for_the_next(tmp_path):
    assert distributed.relaunch(2, [*PROGRAM, str(tmp_path), "reign:2"]) == 0
    first, second = json.loads((tmp_path / "reigns.json").read_text())
    assert first == second


def test_a_rank_that_dies_ends_all_with_an_error_that_says_so(tmp_path):
    assert distributed.relaunch(2, [*PROGRAM, str(tmp_path), "lose"]) != 0
    error_text = (tmp_path / "error.txt").read_text()
    assert "the ranks at ACCUMULATE" in error_text
    assert "resumed from its checkpoint" in error_text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
def test_many_ranks_follow_the_curve_of_one_for_long(folders, monkeypatch, size):
    """Rounding to bf16 makes small differences grow.

    How far, another split of the batches in one process shows. With three ranks, the pieces of a
    weight are not of one size.
    """
    one, many = folders
    other = one / "other cut"
    other.mkdir()
    alone(one, "follow:80")
    with monkeypatch.context() as patch:
        patch.setattr(
            distributed_program,
            "SETTINGS",
            dataclasses.replace(distributed_program.SETTINGS, micro_batch_tokens=100),
        )
        alone(other, "follow:80")
    assert distributed.relaunch(size, [*PROGRAM, str(many), "follow:80"]) == 0

    def apart(folder):
        pairs = zip(curve(one)["steps"], curve(folder)["steps"], strict=True)
        return max(abs(ours[0] - theirs[0]) for ours, theirs in pairs)

    assert 0 < apart(other) < 1e-3
    assert apart(many) < max(1e-5, 3 * apart(other))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_wait_as_long_as_rank_0_has_nothing_for_them(tmp_path):
    assert distributed.relaunch(2, [*PROGRAM, str(tmp_path), "idle"]) == 0
    assert (tmp_path / "idle").read_text() == "True"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_wait_as_long_as_rank_0_stands_by(tmp_path):
    assert distributed.relaunch(2, [*PROGRAM, str(tmp_path), "stand-by"]) == 0
    assert len(json.loads((tmp_path / "reigns.json").read_text())) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_end_when_rank_0_says_nothing_any_more(tmp_path):
    assert distributed.relaunch(2, [*PROGRAM, str(tmp_path), "hang"]) != 0
    assert (tmp_path / "hanging").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_launcher_is_ended_no_rank_goes_on(tmp_path, end):
    command = (sys.executable, "-m", "echo_node.trainer.torchrun", "2", *PROGRAM, str(tmp_path), "wait")
    os.mkfifo(tmp_path / "ready")  # to read it is to wait for who writes it
    with subprocess.Popen(command) as launcher:
        started = [psutil.Process(int(pid)) for pid in (tmp_path / "ready").read_text().split()]
        launcher.send_signal(end)
        assert launcher.wait(timeout=120) != 0
    assert len(started) == 2
    assert not psutil.wait_procs(started, timeout=60)[1]


def test_one_process_has_the_step_itself():
    with distributed.lead_ranks() as ranks, distributed_program.opened(ranks) as step:
        assert type(step) is TrainStep
    assert distributed.rank() == 0


@pytest.mark.parametrize("nproc", [0, -1, 65])
def test_a_number_of_processes_without_sense_is_refused(nproc):
    with pytest.raises(ConfigError, match="processes"):
        distributed.relaunch(nproc, ["nothing.py"])


def test_a_batch_goes_to_the_ranks_and_keeps_its_bits():
    sent = [
        dataclasses.replace(group, current=True, sigma=0.1, gap_cap=0.25)
        for group in distributed_program.batch(3)
    ]
    read = distributed.read_batch(distributed.write_batch(sent))
    assert len(read) == len(sent)
    for ours, theirs in zip(sent, read, strict=True):
        assert np.array_equal(ours.prompt_ids, theirs.prompt_ids)
        rest = (ours.current, ours.sigma, ours.gap_cap)
        assert rest == (theirs.current, theirs.sigma, theirs.gap_cap), "or ranks compute different losses"
        for left, right in zip(ours.ids, theirs.ids, strict=True):
            assert np.array_equal(left, right)
        for left, right in zip(ours.mu, theirs.mu, strict=True):
            assert left.tobytes() == right.tobytes()
        assert ours.rewards == theirs.rewards


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
async def test_a_trainer_computes_where_its_person_says(device):
    class Asked(distributed.Ranks):
        @contextmanager
        def open_step(self, folder, settings, *, threads, device="nobody said"):
            assert settings == training_settings(run.manifest).step
            yield folder, threads, device

    run = open_run()
    node = NodeContext(
        run,
        TRAINER,
        MemorySwarm().join,
        folder=None,
        gate=PauseGate(),
        allowance=ResourceLimits(device=device),
    )
    role = TrainerRole(
        node, Records(), luck=bytes, spread="even", ranks=Asked(), threads=3, checkpoint_every=None
    )
    async with role.open_step() as asked:
        assert asked == (run.folder, 3, device)
