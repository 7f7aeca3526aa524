"""The program of each rank in a test, by the name of a story.

Only rank 0 writes, and before anything is torn down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
from safetensors.torch import save_file

from echo_node.errors import ConfigError, DefectError, EngineError
from echo_node.models import embedded
from echo_node.runs.algorithm import GrpoSettings, StepSettings
from echo_node.trainer import distributed
from echo_node.trainer.checkpoint import Checkpoint, newest_checkpoint, write_checkpoint
from echo_node.trainer.tree_packing import TrainingGroup
from tests.records import columns

SETTINGS = StepSettings(
    learning_rate=2e-4, warm_up=5, micro_batch_tokens=64, row_tokens=32, grpo=GrpoSettings(kl=0.01)
)


def batch(seed, groups=6):
    """Groups of many sizes and lengths, with claims that are off."""
    draws, found = np.random.default_rng(seed), []
    for size in range(1, groups + 1):
        completions = []
        for _ in range(size):
            ids = draws.integers(0, 16, draws.integers(1, 10))
            completions.append((ids, -draws.exponential(3.0, len(ids)), draws.random()))
        found.append(TrainingGroup(draws.integers(0, 16, draws.integers(1, 12)), *columns(completions)))
    return found


def follow(step, folder, steps):
    """Take half of the steps, reload a checkpoint file, and take the other half.

    Then adopt the published weights again.
    """
    figures = []
    for number in range(int(steps)):
        if number == int(steps) // 2:
            write_checkpoint(folder, step.checkpoint())
            step.step(batch(1000))
            step.restore(newest_checkpoint(folder))
        figures.append(step.step(batch(number)))
    published = step.published()
    save_file(published, folder / "published.safetensors")
    curve = [[each.loss, each.gradient_norm, each.tally.tokens, each.tally.clipped] for each in figures]
    before = step.checkpoint().tensors
    adopted = step.adopt(published), step.adopt(published, version=77), step.version
    left = all(bool((before[name] == tensor).all()) for name, tensor in step.checkpoint().tensors.items())
    (folder / "curve.json").write_text(json.dumps({"steps": curve, "adopted": adopted, "left": left}))


def refuse(step, folder):
    """What cannot be done is refused on every rank, and all of them go on."""
    refused = []
    for wrong in (lambda: step.step([]), lambda: step.restore(Checkpoint(0, {})), lambda: step.adopt({})):
        try:
            wrong()
        except (ConfigError, DefectError) as error:
            refused.append(type(error).__name__)
    after = step.step(batch(0)).updated
    (folder / "refused.json").write_text(json.dumps([refused, after]))


def lose(step, folder):
    """The other rank is killed; what is asked next says so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends us too, and we have something to write
    step.step(batch(0))
    for sibling in psutil.Process(os.getppid()).children():
        if sibling.pid != os.getpid():
            sibling.kill()
            sibling.wait()
    try:
        step.step(batch(1))
    except EngineError as error:
        (folder / "error.txt").write_text(str(error))
        raise


def wait(_step, folder):
    """Be there until somebody ends it."""
    (folder / "ready").write_text(" ".join(str(each.pid) for each in psutil.Process(os.getppid()).children()))
    signal.pause()


def idle(step, folder):
    """Say nothing for longer than a rank waits for another, as a trainer does that has no batch."""
    threading.Event().wait(2.0 * distributed.DEADLINE_SECONDS)
    (folder / "idle").write_text(str(step.step(batch(0)).updated))


def hang(_step, folder):
    """Be there, and say nothing more."""
    (folder / "hanging").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def opened(ranks):
    return ranks.open_step(embedded.folder(), SETTINGS, threads=1, device="cpu")


def reign(ranks, folder, times):
    """Lead, stand by, and lead again, with the same steps from the beginning."""
    losses = []
    for _ in range(int(times)):
        with opened(ranks) as step:
            losses.append([step.step(batch(number)).loss for number in range(2)])
    (folder / "reigns.json").write_text(json.dumps(losses))


def stand_by(ranks, folder):
    """Be idle for longer than a rank waits for another, as a standby trainer is."""
    threading.Event().wait(2.0 * distributed.DEADLINE_SECONDS)
    reign(ranks, folder, 1)


def main(folder, *stories):
    distributed.STAY_SECONDS = 0.2  # keep-alives between all other orders
    if {"idle", "stand-by", "hang"} & {*stories}:
        distributed.DEADLINE_SECONDS = 20.0
    if distributed.rank() != 0:
        distributed.serve_rank()
        return
    with distributed.lead_ranks() as ranks:
        run_stories(ranks, folder, stories)


def run_stories(ranks, folder, stories):
    if stories[0].startswith("reign"):
        reign(ranks, folder, stories[0].partition(":")[2])
        return
    if stories == ("stand-by",):
        stand_by(ranks, folder)
        return
    with opened(ranks) as step:
        for story in stories:
            name, *more = story.split(":")
            {"follow": follow, "refuse": refuse, "lose": lose, "wait": wait, "idle": idle, "hang": hang}[
                name
            ](step, folder, *more)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
