"""Gossip validation of groups at a verifier: only what passes its own checks is forwarded."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT, IGNORE, Message
from echo_node.net.memory import MemorySwarm
from echo_node.runs.run import Run
from echo_node.verifier.loop import VerifierLoop
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import topics, write_batch
from protocol.errors import BadSignatureError, WrongRunError
from tests.crafting import (
    SAMPLERS,
    STRANGER,
    TRAINER,
    Chain,
    forged,
    identity,
    open_run,
    roster,
    sealed_group,
)
from tests.sampler.test_delivery import LAYOUT

RUN = open_run(staleness=1)
GROUPS = topics.topic(RUN.id, topics.GROUPS)
ANN, BOB, NEW = SAMPLERS[:3]
VERIFIER = identity("verifier")


@asynccontextmanager
async def verifier():
    async with MemorySwarm() as swarm, swarm.join(VERIFIER) as network:
        with WeightsStore.temporary(RUN.rules, LAYOUT) as store:
            loop = VerifierLoop(RUN, network, VERIFIER, None, Puller(network, store))
            loop.head = Chain(RUN).next(ANN, BOB)
            loop._admission.published(loop.head, roster(ANN, BOB))
            yield loop


def message(*sealed, sender=BOB):
    return Message(GROUPS, write_batch(sealed), sender.public)


async def test_what_is_honest_is_passed_on_and_what_is_of_strangers_alone_is_not():
    async with verifier() as loop:
        own, strangers = (sealed_group(RUN, loop.head.id, who, 0) for who in (ANN, STRANGER))
        assert loop._look_at(message(own)) is ACCEPT
        assert loop._look_at(message(own, strangers)) is ACCEPT
        assert loop._look_at(message(strangers)) is IGNORE


async def test_what_is_forged_is_held_against_who_passed_it_on():
    """Even in the name of a sampler unknown here: it may have joined where this would count."""
    async with verifier() as loop:
        own = sealed_group(RUN, loop.head.id, ANN, 0)
        for who in (ANN, NEW):
            with pytest.raises(BadSignatureError):
                loop._look_at(message(own, forged(sealed_group(RUN, loop.head.id, who, 1))))
        with pytest.raises(WrongRunError):
            loop._look_at(message(own, sealed_group(open_run(staleness=2), loop.head.id, ANN, 1)))


async def test_it_is_never_held_against_a_trainer_of_the_run():
    async with verifier() as loop:
        bad = forged(sealed_group(RUN, loop.head.id, ANN, 0))
        assert loop._look_at(message(bad, sender=TRAINER)) is IGNORE


async def test_others_are_heard_while_the_prompts_of_groups_are_made(monkeypatch):
    async with verifier() as loop, trio.open_nursery() as nursery:
        asked, may_go_on, prompts = trio.Event(), threading.Event(), Run.prompts

        def slow(run, keys):
            trio.from_thread.run_sync(asked.set)
            assert may_go_on.wait(60)
            return prompts(run, keys)

        sealed = [sealed_group(RUN, loop.head.id, ANN, slot) for slot in range(3)]
        async with loop._network.subscribe(GROUPS, loop._look_at) as groups:
            monkeypatch.setattr(Run, "prompts", slow)
            groups.put(message(*sealed))
            nursery.start_soon(loop._hear, groups)
            with trio.fail_after(30):
                await asked.wait()
            may_go_on.set()
            with trio.fail_after(30):
                while len(loop._admission._filled) < 3:  # noqa: ASYNC110 -- it has no event
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
