"""Events of a node: its progress as text, and each muted peer once for as long as that lasts."""

from __future__ import annotations

import json

import trio

from echo_node.net.memory import MemorySwarm
from echo_node.telemetry.events import Events, _in_words, report_mutes
from echo_node.trainer.sender_quota import PATIENCE, SenderQuota
from tests.crafting import SAMPLERS


async def test_a_peer_that_is_muted_is_told_of_once_with_what_it_did(autojump_clock):  # noqa: ARG001
    ann, bob = SAMPLERS[:2]
    told = []
    events = Events(as_json=True, write=lambda line: told.append(json.loads(line)))
    async with MemorySwarm() as swarm, swarm.join(ann) as network, trio.open_nursery() as nursery:
        nursery.start_soon(report_mutes, network.mutes, events)
        await trio.sleep(2)
        assert told == []
        for _ in range(9):
            network.score(bob.public, "malformed")
        await trio.sleep(5)
        assert [(each["event"], each["peer_id"], each["reasons"]) for each in told] == [
            ("muted", bob.peer_id, {"malformed": 9})
        ]
        assert told[0]["seconds"] > 0
        await trio.sleep(3600)
        for _ in range(20):
            network.score(bob.public, "malformed")
        await trio.sleep(5)
        assert len(told) == 2, "it was heard in between"
        nursery.cancel_scope.cancel()


async def test_a_sampler_whose_groups_are_not_looked_at_is_told_of_once_a_time_with_what_was_wrong(
    autojump_clock,  # noqa: ARG001 - it jumps
):
    ann = SAMPLERS[0]
    told = []
    events = Events(as_json=True, write=lambda line: told.append(json.loads(line)))
    waste = SenderQuota(clock=trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(report_mutes, waste.mutes, events)
        for _ in range(3):
            waste.handed(ann.public, "over-limit", int(PATIENCE))
            await trio.sleep(5)
        assert [(each["event"], each["peer_id"]) for each in told] == [("muted", ann.peer_id)]
        assert told[0]["reasons"] == {"over-limit": PATIENCE}
        await trio.sleep(3600)
        waste.handed(ann.public, "wrong-prompt", int(PATIENCE))
        await trio.sleep(5)
        assert [each["reasons"] for each in told[1:]] == [{"wrong-prompt": PATIENCE}]
        nursery.cancel_scope.cancel()


def test_words_about_progress_leave_tables_within_tables_to_programs():
    credit = {"tokens": 5, "refused": {"stale": 1}, "attested": {"tokens": 9, "by": [{"tokens": 9}]}}
    assert _in_words({"peers": 2, "refused": {"stale": 1}, "credit": credit}) == (
        "peers 2, refused (1 stale), credit (5 tokens)"
    )
