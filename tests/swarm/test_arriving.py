"""A volunteer who has nothing but a link: no manifest, no model, no weights."""

from __future__ import annotations

import subprocess
import sys

import pytest

from echo_node.runs.spec import read_manifest
from tests.swarm.processes import ROOT, swarm_in
from tests.swarm.test_swarm import LLAMA, TORCH, trainer_words


def echo_node(*words) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "echo_node", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.timeout(300)
async def test_with_a_link_an_id_or_an_open_run_a_newcomer_works_within_moments(tmp_path):
    algorithm = {"batch_groups": 8}
    async with swarm_in(tmp_path, algorithm=algorithm, sampling={"group_size": 4}) as swarm:
        seed = swarm.nodes[0].first("listening")["addresses"][0]
        trainer = await swarm.start("trainer", *trainer_words())
        await swarm.start("llama", *LLAMA, "--slots", "8")
        await trainer.until(lambda node: len(node.all("step")) >= 3, within=200)

        run = swarm.run
        swarm.run = echo_node("run", "link", run, "--state", swarm._folder / "trainer", "--seed", seed)
        linked = await swarm.start("by a link", *TORCH, "--slots", "4", "--yes")
        await linked.until(lambda node: node.last("progress").get("accepted", 0) > 0)
        assert linked.first("found")["run"] == read_manifest(run).id.hex()
        model = swarm._folder / "by a link" / "runs" / linked.first("found")["run"] / "model"
        assert {file.name for file in model.iterdir()} >= {
            "config.json",
            "tokenizer.json",
            "model.safetensors",
        }

        await linked.stop()
        swarm.run = read_manifest(run).id.hex()
        again = await swarm.start("by a link", *LLAMA, "--slots", "4", "--yes")
        await again.until(lambda node: node.last("progress").get("accepted", 0) > 0)
        assert again.peer_id == linked.peer_id
        assert not again.all("fetching"), "what was fetched is still there"

        echo_node("run", "open", run, "--state", swarm._folder / "trainer")
        swarm.run = None
        volunteer = await swarm.start("by nothing", *LLAMA, "--slots", "4", "--yes")
        await volunteer.until(lambda node: node.last("progress").get("accepted", 0) > 0)

        unasked = await swarm.start("unasked", *TORCH)
        unasked.killed = True
        await unasked.process.wait()
        assert unasked.process.returncode == 2
        assert "--yes" in str(unasked.failure("of its own"))
