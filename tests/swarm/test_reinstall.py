"""A reinstall with real processes: only the paper key is left, and credit is found again."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.swarm.processes import swarm_in
from tests.swarm.test_arriving import echo_node
from tests.swarm.test_swarm import LLAMA, VERIFIER, trainer_words


def credit(node) -> dict:
    return node.last("progress").get("credit", {})


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_volunteer_that_comes_back_with_its_paper_sees_what_it_had_earned(tmp_path):
    secret, paper = tmp_path / "secret", tmp_path / "paper"
    secret.write_text("four words of mine\n")
    async with swarm_in(tmp_path, algorithm={"batch_groups": 8}, sampling={"group_size": 4}) as swarm:
        home = swarm.state_of("volunteer")
        await swarm.start("trainer", *trainer_words())
        await swarm.start("verifier", *VERIFIER)
        first = await swarm.start("volunteer", *LLAMA, "--slots", "8")
        await first.until(lambda node: credit(node).get("tokens", 0) > 0, within=300)
        echo_node("keys", "backup", "--state", home, "--out", paper, "--passphrase-file", secret)
        await first.stop()
        earned = credit(first)["tokens"]

        shutil.rmtree(home)
        echo_node("keys", "restore", paper, "--state", home, "--passphrase-file", secret)
        again = await swarm.start("volunteer", *LLAMA, "--slots", "8")
        await again.until(lambda node: credit(node).get("attested", {}).get("tokens", 0) > 0, within=200)
        assert again.peer_id == first.peer_id
        told = json.loads(echo_node("status", "--state", home, "--json"))["progress"]["credit"]["attested"]
        assert told["tokens"] >= earned
        assert {each["role"] for each in told["by"]} <= {"verifier", "trainer"}
