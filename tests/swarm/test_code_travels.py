"""A contract that only the operator has installed: others get its code with the run."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from echo_node.contract.code_folder import code_hash
from echo_node.runs.spec import read_manifest
from echo_node.storage.state_dir import prepared
from tests.swarm.processes import ROOT, swarm_in
from tests.swarm.test_arriving import echo_node
from tests.swarm.test_swarm import LLAMA, TORCH, trainer_words

CONTRACT = """
from echo_contract_words import END
from echo_node.contract import Contract, Prompt, Score, random_from

class Twice(Contract):
    name, version = "twice", "1"
    def prompt(self, key):
        digit = random_from(key).between(0, 9)
        return Prompt(f"r{digit}{digit}=", {"answer": str(digit)})
    def score(self, prompt, completion):
        right = sum(letter == prompt.data["answer"] for letter in completion[:2])
        return Score(right / 2, f"{right} of 2")
    def answer(self, prompt):
        return prompt.data["answer"] * 2 + END
"""


@contextmanager
def operators_machine(folder):
    """Install the contract and its library for the commands of this block alone."""
    for name, version, requires, files in (
        (
            "echo_contract_twice",
            "1.2",
            ("echo-contract-words>=2", "echo-node"),
            {"echo_contract_twice.py": CONTRACT},
        ),
        ("echo_contract_words", "2.0", (), {"echo_contract_words/__init__.py": 'END = "$"\n'}),
    ):
        facts = folder / f"{name}-{version}.dist-info"
        facts.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        if name.endswith("twice"):
            (facts / "entry_points.txt").write_text(
                "[echo_node.contracts]\ntwice@1 = echo_contract_twice:Twice\n"
            )
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        (facts / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def seal(folder, run) -> None:
    trainer, verifier = (prepared(folder / name).identity().peer_id for name in ("trainer", "verifier"))
    file = folder / "twice.toml"
    file.write_text(
        f'name = "twice"\ncontract = "twice@1"\ntrainers = ["{trainer}"]\nverifiers = ["{verifier}"]\n'
        "algorithm = { batch_groups = 4 }\n[sampling]\ngroup_size = 4\n"
    )
    with operators_machine(folder / "site"):
        echo_node("run", "new", file, "--out", run, "--state", folder / "trainer")


@pytest.mark.timeout(400)
async def test_samplers_and_verifiers_score_with_code_that_they_got_with_the_run(tmp_path):
    async with swarm_in(tmp_path, make=lambda run: seal(tmp_path, run)) as swarm:
        run = read_manifest(swarm.run)
        wheels = run.message.contract.wheel
        assert [(wheel.name, wheel.version) for wheel in wheels] == [
            ("echo-contract-twice", "1.2"),
            ("echo-contract-words", "2.0"),
        ]
        code = code_hash(wheels).hex()
        trainer = await swarm.start("trainer", *trainer_words())
        await trainer.said("listening")
        swarm.run = run.id.hex()
        consent = ("--yes", "--allow-code", code)
        verifier = await swarm.start("verifier", "--role", "verifier", "--threads", "1", *consent)
        torch = await swarm.start("torch", *TORCH, "--slots", "2", *consent)
        await trainer.until(lambda node: len(node.all("step")) >= 2, within=200)
        await torch.until(lambda node: node.last("progress").get("accepted", 0) > 0)
        await verifier.until(lambda node: sum(node.last("progress").get("verdicts", {}).values()) > 0)
        held = swarm.state_of("torch") / "runs" / run.id.hex()
        assert len(list((held / "wheels").iterdir())) == 2
        assert (held / "code" / code / "echo_contract_twice.py").is_file()
        await torch.stop()
        again = await swarm.start("torch", *TORCH, "--slots", "2", "--yes")
        await again.said("found")  # consent is remembered

        unasked = await swarm.start("unasked", *LLAMA, "--yes")
        unasked.killed = True
        await unasked.process.wait()
        assert unasked.process.returncode == 2
        assert f"--allow-code {code}" in str(unasked.failure("of its own"))
        assert not (swarm.state_of("unasked") / "runs" / run.id.hex() / "wheels").exists()


def test_the_contract_is_on_the_operators_machine_alone():
    command = [sys.executable, "-m", "echo_node", "contract", "list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ})
    assert "twice" not in done.stdout
