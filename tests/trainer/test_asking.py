"""Sequential pull: a batch of exactly the slots that were dealt, whatever some samplers send instead."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from echo_node.admission import Admission
from echo_node.errors import PeerError
from echo_node.net.base import RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.trainer.asking import ROLLOUT_SECONDS, SequentialSource
from protocol import RolloutRequest, canonical, limits, open_sealed, topics, write_batch
from tests.crafting import SAMPLERS, STRANGER, TRAINER, Chain, forged, open_run, roster, sealed_group

RUN = open_run("sequential")


class Swarm:
    """A trainer that asks, and samplers that answer as their handlers do."""

    def __init__(self, batch: int, **handlers) -> None:
        self.asked: list[tuple[bytes, range]] = []
        self.samplers = dict(zip(handlers, SAMPLERS, strict=False))
        self._handlers = handlers
        self._batch = batch
        self._chain = Chain(RUN)
        self._admission = Admission(RUN)
        self._source: SequentialSource | None = None

    def publish(self):
        """The next head, for all of them."""
        self.roster = roster(*self.samplers.values())
        self.head = self._chain.next(*self.samplers.values())
        self._admission.published(self.head, self.roster)

    async def __aenter__(self):
        self._open = AsyncExitStack()
        swarm = await self._open.enter_async_context(MemorySwarm())
        for name, handler in self._handlers.items():
            network = await self._open.enter_async_context(swarm.join(self.samplers[name]))
            if handler:
                service = network.serve(
                    topics.ROLLOUT_STREAM, self._answer(name, handler), most=limits.SMALL_BYTES
                )
                self._open.enter_context(service)
        trainer = await self._open.enter_async_context(swarm.join(TRAINER))
        self._source = SequentialSource(trainer, TRAINER, RUN.id, self._batch, self._admission.judge)
        self.publish()
        return self

    async def __aexit__(self, *error):
        return await self._open.__aexit__(*error)

    def _answer(self, name, handler):
        async def answer(peer, asked):
            request = open_sealed(asked, RolloutRequest, RUN.id, signer=TRAINER.public).message
            assert peer == TRAINER.public
            slots = range(request.first, request.first + request.count)
            self.asked.append((name, slots))
            return await handler(self.samplers[name], request.head, slots)

        return answer

    async def next_batch(self):
        batch = await self._source.next_batch(self.head, self.roster)
        assert len(batch) == self._batch
        assert list(batch) == sorted(batch, key=lambda group: group.order)
        filled = [(group.group.signer, group.group.message.slot) for group in batch]
        assert len(set(filled)) == len(filled), "no slot is filled twice"
        assert {group.group.message.heads for group in batch} == {(self.head.id,)}
        return filled

    def slots_asked_of(self, name) -> list[int]:
        return [slot for who, slots in self.asked for slot in slots if who == name]

    def share(self, filled, name) -> list[int]:
        return [slot for signer, slot in filled if signer == self.samplers[name].public]


def groups(sampler, head, slots) -> list[bytes]:
    return [sealed_group(RUN, head, sampler, slot) for slot in slots]


async def well(sampler, head, slots):
    await trio.lowlevel.checkpoint()
    return write_batch(groups(sampler, head, slots), most=limits.ANSWER_BYTES)


async def never(_sampler, _head, _slots):
    await trio.sleep_forever()


async def refusing(_sampler, _head, _slots):
    raise PeerError("not today")


async def crashing(_sampler, _head, _slots):
    raise ZeroDivisionError


def saying(answer):
    async def handler(_sampler, _head, _slots):
        await trio.lowlevel.checkpoint()
        return answer

    return handler


def sending(change):
    """Honest groups, of which the change makes something else."""

    async def handler(sampler, head, slots):
        await trio.lowlevel.checkpoint()
        return write_batch(change(sampler, head, list(slots)), most=limits.ANSWER_BYTES)

    return handler


async def test_slots_are_dealt_in_turn_and_each_is_filled_once():
    async with Swarm(10, ann=well, bob=well, cat=well) as swarm:
        filled = await swarm.next_batch()
        assert {name: swarm.share(filled, name) for name in swarm.samplers} == {
            "ann": [0, 1, 2, 3],
            "bob": [0, 1, 2],
            "cat": [0, 1, 2],
        }
        assert len(swarm.asked) == 3


async def test_with_fewer_slots_than_samplers_some_are_not_asked():
    async with Swarm(2, ann=well, bob=well, cat=well) as swarm:
        await swarm.next_batch()
        assert sorted(name for name, _ in swarm.asked) == ["ann", "bob"]


async def test_every_head_has_its_own_slots_from_the_first():
    async with Swarm(4, ann=well, bob=well) as swarm:
        for _ in range(3):
            filled = await swarm.next_batch()
            assert sorted(slot for _, slot in filled) == [0, 0, 1, 1]
            swarm.publish()


async def test_the_batch_does_not_depend_on_who_is_faster(autojump_clock):  # noqa: ARG001 - it jumps
    def after(seconds):
        async def handler(sampler, head, slots):
            await trio.sleep(seconds)
            return await well(sampler, head, slots)

        return handler

    ids = []
    for first, second in ((1, 5), (5, 1)):
        async with Swarm(6, ann=after(first), bob=after(second)) as swarm:
            batch = await swarm._source.next_batch(swarm.head, swarm.roster)
            ids.append([group.group.id for group in batch])
    assert ids[0] == ids[1]


def old_head(sampler, _head, slots):
    return groups(sampler, b"?" * 32, slots)


BAD = {
    "too few": sending(lambda who, head, slots: groups(who, head, slots)[:-1]),
    "too many": sending(lambda who, head, slots: groups(who, head, [*slots, slots[-1] + 1])),
    "one slot twice": sending(lambda who, head, slots: groups(who, head, [slots[0], *slots[:-1]])),
    "other slots": sending(lambda who, head, slots: groups(who, head, [slot + 100 for slot in slots])),
    "another head": sending(old_head),
    "another sampler's": sending(lambda _, head, slots: groups(STRANGER, head, slots)),
    "forged": sending(lambda who, head, slots: [forged(one) for one in groups(who, head, slots)]),
    "no groups": saying(canonical.encode([])),
    "empty": saying(b""),
    "garbage": saying(b"\xc1 garbage"),
    "no envelopes": saying(canonical.encode([b"garbage"])),
    "too long": saying(b"x" * (limits.ANSWER_BYTES + 1)),
    "refusing": refusing,
    "crashing": crashing,
    "never": never,
    "not serving": None,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_the_share_of_a_sampler_that_answers_badly_goes_to_the_others(autojump_clock, bad):
    async with Swarm(6, ann=bad, bob=well, cat=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == []
        assert sorted(swarm.share(filled, "bob") + swarm.share(filled, "cat")) == [0, 0, 1, 1, 2, 2]
        assert len(swarm.slots_asked_of("bob")) == len(set(swarm.slots_asked_of("bob"))) == 3
        assert sum(name == "ann" for name, _ in swarm.asked) == (bad is not None), "and is not asked again"
        assert autojump_clock.current_time() <= ROLLOUT_SECONDS + 1


async def test_at_the_next_head_everybody_has_another_chance():
    moods = iter((BAD["garbage"], well))

    async def moody(*asked):
        return await next(moods)(*asked)

    async with Swarm(4, ann=moody, bob=well) as swarm:
        assert swarm.share(await swarm.next_batch(), "ann") == []
        swarm.publish()
        assert swarm.share(await swarm.next_batch(), "ann") == [0, 1]


async def test_who_fails_again_and_again_is_asked_less_and_less():
    asked = []

    async def failing(_sampler, head, _slots):
        await trio.lowlevel.checkpoint()
        asked.append(head)
        return b"garbage"

    async with Swarm(4, ann=failing, bob=well) as swarm:
        steps = []
        for step in range(12):
            swarm.publish()
            before = len(asked)
            assert swarm.share(await swarm.next_batch(), "bob") == [0, 1, 2, 3]
            steps += [step] if len(asked) > before else []
    assert steps == [0, 1, 3, 7]


async def test_groups_of_another_of_the_roster_neither_count_nor_spoil_that_others_slots():
    """Ann got hold of what Bob has sealed, and is faster. Bob's own answer must still be taken."""

    async def thief(_sampler, head, slots):
        await trio.lowlevel.checkpoint()
        return write_batch(groups(SAMPLERS[1], head, slots), most=limits.ANSWER_BYTES)

    async def slow(sampler, head, slots):
        await trio.testing.wait_all_tasks_blocked()  # until the trainer has read what the thief has sent
        return await well(sampler, head, slots)

    async with Swarm(4, ann=thief, bob=slow) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "bob") == [0, 1, 2, 3]
        assert swarm.share(filled, "ann") == []


async def test_when_the_others_fail_one_after_the_other_the_last_fills_everything(autojump_clock):  # noqa: ARG001 - it jumps
    fails = {"left": 3}

    async def sometimes(sampler, head, slots):
        if fails["left"]:
            fails["left"] -= 1
            raise PeerError("busy")
        return await well(sampler, head, slots)

    async with Swarm(12, ann=BAD["garbage"], bob=never, cat=sometimes, dan=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "dan") == list(range(12))


@pytest.mark.parametrize("bad", [BAD["garbage"], BAD["never"], BAD["refusing"], BAD["not serving"]])
async def test_when_nobody_answers_it_is_one_clear_error_by_one_deadline(autojump_clock, bad):
    async with Swarm(4, ann=bad, bob=bad) as swarm:
        with pytest.raises(PeerError, match="no sampler of the roster answers") as caught:
            await swarm.next_batch()
    assert not isinstance(caught.value, RequestError)
    assert "start one" in caught.value.advice
    assert autojump_clock.current_time() <= ROLLOUT_SECONDS + 1


async def test_with_nobody_in_the_roster_nobody_is_waited_for():
    async with Swarm(4) as swarm:
        with pytest.raises(PeerError, match="no sampler of the roster answers"):
            await swarm.next_batch()


async def test_a_sampler_that_leaves_while_it_is_asked_is_left_out():
    async with Swarm(4, ann=never, bob=well) as swarm, trio.open_nursery() as nursery:

        async def leave():
            await trio.testing.wait_all_tasks_blocked()
            memory = swarm._source._network._swarm
            memory._leave(memory._nodes[SAMPLERS[0].public])

        nursery.start_soon(leave)
        with trio.fail_after(5):
            filled = await swarm.next_batch()
        assert swarm.share(filled, "bob") == [0, 1, 2, 3]


async def test_a_share_that_is_too_large_for_one_question_is_asked_for_in_several():
    batch = limits.BATCH + 88
    async with Swarm(batch, ann=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == list(range(batch))
        assert [len(slots) for _, slots in swarm.asked] == [limits.BATCH, 88]
