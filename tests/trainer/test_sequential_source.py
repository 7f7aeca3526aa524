"""Sequential pull: a batch of exactly the requested slots, whatever samplers send."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.net.base import RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.admission import Admission
from echo_node.runs.engine_shares import ClassShares
from echo_node.trainer.batch_source import BatchRequest, NobodyAnswersError
from echo_node.trainer.group_admission import GroupAdmission
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.request_deadlines import CEILING, SLACK, SLOWEST, START_SECONDS, RequestDeadlines
from echo_node.trainer.sequential_source import EMPTY_SECONDS, PART_SECONDS, SequentialSource
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.trainer.work_split import LEAST_PATIENCE, SpeedSplit
from protocol import RolloutRequest, Roster, canonical, limits, open_sealed, topics, write_batch
from tests.crafting import SAMPLERS, STRANGER, TRAINER, Chain, forged, open_run, roster, sealed_group

RUN = open_run("sequential")
ROUGH = "llama/q8_0"


class Swarm:
    """A trainer that asks, and samplers that answer as their handlers do."""

    def __init__(
        self, batch: int, *, spread=None, weather=None, rough=(), group_tokens=512, **handlers
    ) -> None:
        """Those named `rough` have an engine class that may fill a quarter of a batch."""
        self.asked: list[tuple[bytes, range]] = []
        self.samplers = dict(zip(handlers, SAMPLERS, strict=False))
        self._handlers = handlers
        self._batch = batch
        self._spread = spread
        self.questions = 0
        self.deadlines = RequestDeadlines(group_tokens)
        self._rough = {self.samplers[name].public for name in rough}
        self.memory = MemorySwarm(**(weather or {}))
        self._chain = Chain(RUN)
        self._admission = Admission(RUN)
        self._source: SequentialSource | None = None

    def publish(self):
        """The next head, for all of them."""
        self.roster = roster(*self.samplers.values())
        self.roster = Roster(
            tuple(
                replace(each, engine=ROUGH) if each.key in self._rough else each
                for each in self.roster.members
            )
        )
        self.head = self._chain.next(*self.samplers.values())
        self._admission.published(self.head, self.roster)

    async def __aenter__(self):
        self._open = AsyncExitStack()
        swarm = await self._open.enter_async_context(self.memory)
        for name, handler in self._handlers.items():
            network = await self._open.enter_async_context(swarm.join(self.samplers[name]))
            if handler:
                service = network.serve(
                    topics.ROLLOUT_STREAM, self._answer(name, handler), most=limits.SMALL_BYTES
                )
                self._open.enter_context(service)
        trainer = await self._open.enter_async_context(swarm.join(TRAINER))
        self.receipts = Receipts(trainer, TRAINER, RUN.id)
        self._source = SequentialSource(
            trainer,
            TRAINER,
            RUN.id,
            self._batch,
            self._admission,
            self.receipts,
            spread=self._spread,
            shares=ClassShares([replace(RUN.manifest.engines[0], engine=ROUGH, share=0.25)]),
            deadlines=self.deadlines,
        )
        self.publish()
        return self

    async def __aexit__(self, *error):
        return await self._open.__aexit__(*error)

    def _answer(self, name, handler):
        requests = set()

        async def answer(peer, asked):
            request = open_sealed(asked, RolloutRequest, RUN.id, signer=TRAINER.public).message
            assert peer == TRAINER.public
            self.questions += 1
            asked = request.head, name, range(request.first, request.first + request.count)
            if asked not in requests:  # and not a question for a further part
                requests.add(asked)
                self.asked.append(asked[1:])
            return await handler(self.samplers[name], request.head, request.slots)

        return answer

    async def next_batch(self):
        batch = await self._source.next_batch(BatchRequest(1, 0, self.head, self.roster))
        assert len(batch) == self._batch
        assert list(batch) == sorted(batch, key=lambda group: group.order)
        filled = [(group.sampler, group.message.slot) for group in batch]
        assert len(set(filled)) == len(filled), "no slot is filled twice"
        assert {group.message.heads for group in batch} == {(self.head.id,)}
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


def answering(answer):
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
            batch = await swarm._source.next_batch(BatchRequest(1, 0, swarm.head, swarm.roster))
            ids.append([group.id for group in batch])
    assert ids[0] == ids[1]


def old_head(sampler, _head, slots):
    return groups(sampler, b"?" * 32, slots)


BAD = {
    "too many": sending(lambda who, head, slots: groups(who, head, [*slots, slots[-1] + 1])),
    "one slot twice": sending(lambda who, head, slots: groups(who, head, [slots[0], *slots[:-1]])),
    "other slots": sending(lambda who, head, slots: groups(who, head, [slot + 100 for slot in slots])),
    "another head": sending(old_head),
    "another sampler's": sending(lambda _, head, slots: groups(STRANGER, head, slots)),
    "forged": sending(lambda who, head, slots: [forged(one) for one in groups(who, head, slots)]),
    "empty": answering(b""),
    "garbage": answering(b"\xc1 garbage"),
    "no envelopes": answering(canonical.encode([b"garbage"])),
    "too long": answering(b"x" * (limits.ANSWER_BYTES + 1)),
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
        assert autojump_clock.current_time() <= PART_SECONDS + 1


async def test_who_has_signed_a_group_that_is_refused_is_told_why():
    async with Swarm(6, ann=BAD["another head"], bob=BAD["forged"], cat=well) as swarm:
        await swarm.next_batch()
        assert set(swarm.receipts._refused.values()) == {"stale"}, "and of what is forged nobody hears"


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
    assert autojump_clock.current_time() <= PART_SECONDS + 1


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
    async with Swarm(batch, group_tokens=1, ann=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == list(range(batch))
        assert [len(slots) for _, slots in swarm.asked] == [limits.BATCH, 88]


# By speed: work goes to who is fast, and is given to others when somebody is late.


def at(groups_per_second, hold=20.0):
    """A sampler that fills its slots one after the other, and hands out each as it ends."""
    begun = {}

    async def handler(sampler, head, slots):
        key = sampler.public, head, slots[-1]
        if key not in begun:
            begun[key] = trio.current_time(), slots
        began, whole = begun[key]
        ends = {slot: began + (index + 1) / groups_per_second for index, slot in enumerate(whole)}
        with trio.move_on_after(hold):
            await trio.sleep_until(ends[slots[0]])
        ready = [slot for slot in slots if ends[slot] <= trio.current_time()]
        return canonical.pack(groups(sampler, head, ready))

    return handler


def by_turns(*moods):
    """Another mood at each request; the last one stays."""
    left, now = list(moods), {}

    async def handler(sampler, head, slots):
        request = head, slots[-1]
        if request not in now:
            now[request] = left.pop(0) if len(left) > 1 else left[0]
        return await now[request](sampler, head, slots)

    return handler


async def test_at_first_everybody_has_an_equal_share_and_then_one_by_its_speed(autojump_clock):
    async with Swarm(12, spread=SpeedSplit(), ann=at(9), bob=at(3)) as swarm:
        filled = await swarm.next_batch()
        assert (len(swarm.share(filled, "ann")), len(swarm.share(filled, "bob"))) == (6, 6)
        assert autojump_clock.current_time() == pytest.approx(2, abs=0.1)
        swarm.publish()
        filled = await swarm.next_batch()
        shares = len(swarm.share(filled, "ann")), len(swarm.share(filled, "bob"))
        assert shares in {(8, 4), (9, 3)}, "one group each, and the rest by speed"
        assert autojump_clock.current_time() < 2 + 1.5, "and both are done at about the same time"


async def test_a_newcomer_is_expected_to_be_like_the_others(autojump_clock):  # noqa: ARG001 - it jumps
    moods = {"cat": refusing}

    async def cat(*asked):
        return await moods["cat"](*asked)

    async with Swarm(12, spread=SpeedSplit(), ann=at(4), bob=at(4), cat=cat) as swarm:
        await swarm.next_batch()
        moods["cat"] = at(4)
        swarm.publish()
        filled = await swarm.next_batch()
        assert [len(swarm.share(filled, name)) for name in swarm.samplers] == [4, 4, 4]


async def test_what_a_late_sampler_does_not_fill_others_fill_in_slots_of_their_own(autojump_clock):
    spread = SpeedSplit()
    async with Swarm(8, spread=spread, ann=by_turns(at(4), never), bob=at(4)) as swarm:
        await swarm.next_batch()
        swarm.publish()
        began = autojump_clock.current_time()
        filled = await swarm.next_batch()
        assert swarm.share(filled, "bob") == list(range(8))
        assert swarm.share(filled, "ann") == []
        assert LEAST_PATIENCE <= autojump_clock.current_time() - began < LEAST_PATIENCE + 3
        for _ in range(2):
            swarm.publish()
            assert swarm.share(await swarm.next_batch(), "bob") == list(range(8))
        shares = [len(slots) for name, slots in swarm.asked if name == "ann"]
        assert shares[:2] == [4, 4]
        assert 1 <= shares[2] < 4, "it has another chance, with less to lose"
        assert len(shares) == 3, "and then it rests, as one that failed"


async def test_a_late_answer_that_comes_first_is_taken_and_nothing_counts_twice(autojump_clock):  # noqa: ARG001 - it jumps
    late = LEAST_PATIENCE + 0.5

    async def slow(sampler, head, slots):
        await trio.sleep(late)
        return await well(sampler, head, slots)

    async def slower(sampler, head, slots):
        await trio.sleep(60 - late)
        return await well(sampler, head, slots)

    async with Swarm(
        8, spread=SpeedSplit(), ann=by_turns(at(4), slow), bob=by_turns(at(4), at(4), slower)
    ) as swarm:
        await swarm.next_batch()
        swarm.publish()
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == [0, 1, 2, 3]
        assert swarm.share(filled, "bob") == [0, 1, 2, 3], (
            "the slots that it was asked for meanwhile are not needed"
        )
        assert swarm.slots_asked_of("bob")[-4:] == [4, 5, 6, 7]
        before = len(swarm.asked)
        swarm.publish()
        await swarm.next_batch()
        asked = {name for name, _ in swarm.asked[before:]}
        assert asked == {"ann", "bob"}, "who came late, or was not needed, is not left alone for it"


async def test_of_a_late_answer_only_what_is_missing_is_taken_by_the_lowest_slots(autojump_clock):  # noqa: ARG001 - it jumps
    async def late(sampler, head, slots):
        await trio.sleep(LEAST_PATIENCE + 1)
        return await well(sampler, head, slots)

    async def ever_slower(sampler, head, slots):
        await trio.sleep(0.5 if slots[0] == 0 else 30)
        return await well(sampler, head, slots)

    async def quick(sampler, head, slots):
        await trio.sleep(0.5)
        return await well(sampler, head, slots)

    async with Swarm(
        9,
        spread=SpeedSplit(),
        ann=by_turns(at(4), late),
        bob=by_turns(at(4), ever_slower),
        cat=by_turns(at(4), quick),
    ) as swarm:
        await swarm.next_batch()
        swarm.publish()
        filled = await swarm.next_batch()
        assert swarm.share(filled, "bob") == [0, 1, 2]
        assert len(swarm.share(filled, "cat")) > 3, "its slots in place of the late one's came in time"
        left = 9 - 3 - len(swarm.share(filled, "cat"))
        assert swarm.share(filled, "ann") == list(range(left))


async def test_a_sampler_that_is_cut_off_is_replaced_and_comes_back(autojump_clock):  # noqa: ARG001 - it jumps
    weather = {"delay": (0.05, 0.4)}
    async with Swarm(8, spread=SpeedSplit(), weather=weather, ann=at(20), bob=at(20), cat=at(20)) as swarm:
        assert len({signer for signer, _ in await swarm.next_batch()}) == 3
        swarm.memory.partition([swarm.samplers["ann"].public])
        for _ in range(4):
            swarm.publish()
            assert swarm.share(await swarm.next_batch(), "ann") == []
        swarm.memory.heal()
        for _ in range(8):
            swarm.publish()
            filled = await swarm.next_batch()
        assert swarm.share(filled, "ann"), "after a rest it is asked again"


async def test_a_sampler_that_answers_now_and_then_does_not_make_every_other_step_wait(autojump_clock):
    """It answers every second request, so that its failures never come in a row."""
    calls = []

    async def now_and_then(sampler, head, slots):
        calls.append(slots)
        return await (never if len(calls) % 2 else well)(sampler, head, slots)

    async with Swarm(8, ann=now_and_then, bob=well) as swarm:
        began = autojump_clock.current_time()
        for _ in range(64):
            await swarm.next_batch()
            swarm.publish()
        waited = autojump_clock.current_time() - began
    assert waited <= 8 * PART_SECONDS, "of 64 steps"


# Slow: as long as groups come, they are waited for; words are no groups.


async def idle(_sampler, _head, _slots):
    """Say that no group has ended yet, as soon as asked."""
    await trio.lowlevel.checkpoint()
    return canonical.encode([])


async def test_a_group_that_takes_longer_than_any_question_is_answered_and_asked_for_once(autojump_clock):
    """2,048 tokens at 20 a second and more: 819 s a group, where a question ends after 60."""
    async with Swarm(4, group_tokens=8 * 2_048, ann=at(20 / (8 * 2_048)), bob=at(20 / (8 * 2_048))) as swarm:
        for step in range(1, 3):
            filled = await swarm.next_batch()
            assert {name: swarm.share(filled, name) for name in swarm.samplers} == {
                "ann": [0, 1],
                "bob": [0, 1],
            }
            sizes = [1, 1, 1, 1] if step == 1 else [1, 1, 1, 1, 2, 2]
            assert [len(slots) for _, slots in swarm.asked] == sizes, "nothing is asked twice"
            assert autojump_clock.current_time() == pytest.approx(step * 2 * 819.2, rel=0.01)
            swarm.publish()


async def test_the_status_says_how_far_the_batch_is_and_how_long_the_slowest_needs():
    clock = trio.testing.MockClock()  # by hand

    async def watch():
        async with Swarm(6, group_tokens=8 * 2_048, ann=at(1 / 60), bob=at(1 / 600)) as swarm:
            source = swarm._source
            assert source.progress is None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(swarm.next_batch)
                await trio.testing.wait_all_tasks_blocked()
                assert source.progress == "2 of 6 groups requested, 0 delivered, 2 not measured yet"
                for _ in range(130):
                    clock.jump(1)
                    await trio.testing.wait_all_tasks_blocked()
                assert source.progress == "2 of 6 groups requested, 1 delivered, 1 not measured yet"
                nursery.cancel_scope.cancel()
            assert source.progress is None

    await trio.to_thread.run_sync(lambda: trio.run(watch, clock=clock))


async def test_a_sampler_that_says_it_is_slow_and_sends_nothing_is_left_out(autojump_clock):
    """Others have filled their share; its own is theirs after thrice their time."""
    async with Swarm(6, ann=idle, bob=at(0.1), cat=at(0.1)) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == []
        assert len(swarm.share(filled, "bob")) == len(swarm.share(filled, "cat")) == 3
        took = 20.0 + max(START_SECONDS, CEILING * 20.0) + 10.0
        assert autojump_clock.current_time() <= took
        assert swarm.questions <= took / EMPTY_SECONDS + 12, "and it is not asked in a frenzy"


async def test_a_sampler_alone_that_sends_nothing_is_left_out_by_the_limits_of_the_run(autojump_clock):
    async with Swarm(4, ann=idle) as swarm:
        with pytest.raises(NobodyAnswersError):
            await swarm.next_batch()
        assert autojump_clock.current_time() <= START_SECONDS + SLACK * 4 * 512 / SLOWEST + 1


async def test_one_that_trickles_a_group_an_hour_does_not_hold_a_step_open(autojump_clock):
    async with Swarm(6, ann=at(1 / 3_600), bob=at(0.1), cat=at(0.1)) as swarm:
        for _ in range(2):
            began = autojump_clock.current_time()
            filled = await swarm.next_batch()
            assert swarm.share(filled, "ann") == []
            assert autojump_clock.current_time() - began <= 20 + max(START_SECONDS, CEILING * 20) + 30
            swarm.publish()
        began = autojump_clock.current_time()
        await swarm.next_batch()
        assert autojump_clock.current_time() - began <= 31, "and rests as one that failed"


async def test_even_alone_a_trickle_ends_by_the_slowest_speed_that_is_waited_for(autojump_clock):
    async with Swarm(64, group_tokens=64, ann=at(1 / 200)) as swarm:
        with pytest.raises(NobodyAnswersError):
            await swarm.next_batch()
        assert autojump_clock.current_time() <= START_SECONDS + SLACK * 64 * 64 / SLOWEST + 1


async def test_what_came_before_a_sampler_fell_silent_counts(autojump_clock):  # noqa: ARG001 - it jumps
    async def first_half(sampler, head, slots):
        await trio.lowlevel.checkpoint()
        if slots[0] > 1:
            await trio.sleep_forever()
        return canonical.pack(groups(sampler, head, slots[:2]))

    async with Swarm(8, ann=first_half, bob=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == [0, 1]
        assert swarm.share(filled, "bob") == [0, 1, 2, 3, 4, 5]


def twice(who, head, slots):
    """The same slot again in the second part."""
    return groups(who, head, slots[:1] if slots[0] == 0 else [0])


PARTS = {
    "one slot again": twice,
    "another slot": lambda who, head, slots: groups(who, head, slots[:1] if slots[0] == 0 else [9]),
    "another's": lambda who, head, slots: groups(who if slots[0] == 0 else STRANGER, head, slots[:1]),
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS.keys())
async def test_parts_that_come_twice_or_hold_other_slots_count_once_or_not_at_all(autojump_clock, change):  # noqa: ARG001 - it jumps
    async with Swarm(6, ann=sending(change), bob=well) as swarm:
        filled = await swarm.next_batch()
        assert swarm.share(filled, "ann") == [0], "its first part was good"
        assert swarm.share(filled, "bob") == [0, 1, 2, 3, 4]


async def test_parts_in_any_order_are_taken(autojump_clock):  # noqa: ARG001 - it jumps
    async with Swarm(4, ann=sending(lambda who, head, slots: groups(who, head, slots[-1:]))) as swarm:
        assert swarm.share(await swarm.next_batch(), "ann") == [0, 1, 2, 3]
        assert len(swarm.asked) == 1


async def test_an_unmeasured_sampler_shows_its_speed_on_few_long_groups_first():
    deadlines = RequestDeadlines(8 * 32_768)
    assert deadlines.most_groups(b"ann") == 1
    deadlines.record(b"ann", 1, 1_000, 10.0)
    assert deadlines.most_groups(b"ann") == limits.BATCH


# Engine classes that may fill a part of a batch


async def roughly(sampler, head, slots):
    await trio.lowlevel.checkpoint()
    made = [sealed_group(RUN, head, sampler, slot, engine=ROUGH) for slot in slots]
    return write_batch(made, most=limits.ANSWER_BYTES)


async def roughly_and_late(sampler, head, slots):
    await trio.sleep(3 * LEAST_PATIENCE)
    return await roughly(sampler, head, slots)


async def test_a_class_with_a_share_is_asked_for_that_much_and_the_others_for_the_rest():
    async with Swarm(12, rough=("ann", "bob"), ann=roughly, bob=roughly, cat=well) as swarm:
        filled = await swarm.next_batch()
        assert (swarm.share(filled, "ann"), swarm.share(filled, "bob")) == ([0, 1], [0])
        assert swarm.share(filled, "cat") == list(range(9))
        assert len(swarm.asked) == 3, "and nobody for what would be of no use"


async def test_samplers_of_a_class_with_a_share_alone_are_not_asked_and_it_is_said_why():
    async with Swarm(8, rough=("ann", "bob"), ann=roughly, bob=roughly) as swarm:
        with pytest.raises(
            NobodyAnswersError, match="class llama/q8_0: llama/q8_0 may fill 2 of the 8 groups"
        ):
            await swarm.next_batch()
        assert swarm.asked == []


async def test_when_all_others_fail_the_ask_ends_and_says_who_is_left():
    async with Swarm(8, rough=("ann",), ann=roughly, bob=refusing) as swarm:
        with pytest.raises(NobodyAnswersError, match="llama/q8_0 may fill 2 of the 8 groups"):
            await swarm.next_batch()
        assert swarm.slots_asked_of("ann") == [0, 1], "whose share is full, and who is not asked again"


@pytest.mark.usefixtures("autojump_clock")
async def test_a_share_that_comes_late_is_filled_by_others_and_never_twice():
    """A late sampler's groups are asked of another of its class, up to the share."""
    spread = SpeedSplit()
    spread.took(SAMPLERS[2].public, 8, 1.0)
    async with Swarm(
        8, spread=spread, rough=("ann", "bob"), ann=roughly_and_late, bob=roughly, cat=well
    ) as swarm:
        filled = await swarm.next_batch()
        assert len(swarm.share(filled, "ann") + swarm.share(filled, "bob")) <= 2
        assert len(swarm.share(filled, "cat")) >= 6


async def test_who_rests_is_asked_when_those_who_do_not_could_not_fill_a_batch():
    calls = []

    async def first_refusing(sampler, head, slots):
        calls.append(sampler)
        return await (refusing if len(calls) == 1 else well)(sampler, head, slots)

    async with Swarm(8, rough=("ann",), ann=roughly, bob=first_refusing) as swarm:
        with pytest.raises(NobodyAnswersError):
            await swarm.next_batch()
        swarm.publish()
        assert len(swarm.share(await swarm.next_batch(), "bob")) == 6


class Accounted(Swarm):
    """The same with the admission of a trainer that keeps account of slots."""

    def __init__(self, batch: int, **handlers) -> None:
        super().__init__(batch, **handlers)
        self.policy = VerdictPolicy(RUN, TRAINER)
        enforcer = SimpleNamespace(apply=lambda _consequences: None)
        self._checks = self._admission
        self._admission = GroupAdmission(self._checks, self.policy, enforcer, Counter())
        self._admission.published = self._checks.published


async def test_requests_that_a_sampler_leaves_unanswered_are_holes():
    """It draws what it was asked for, and answers when it likes what it sees."""
    asked = []

    async def choosy(sampler, head, slots):
        asked.append(head)
        if len(asked) % 2:
            raise PeerError("not today")
        return await well(sampler, head, slots)

    async with Accounted(4, ann=choosy, bob=well) as swarm:
        for _ in range(24):
            swarm.publish()
            await swarm.next_batch()
        for _ in range(4):
            swarm.publish()
        await swarm.next_batch()
        ann, bob = (swarm.samplers[name].public for name in ("ann", "bob"))
        share = swarm.policy.announced.kept_share(ann)
        kept = sum(swarm.policy.announced.trusts_next(ann) for _ in range(100))
    assert len(asked) >= 4
    assert share < 0.8
    assert kept == pytest.approx(100 * share, abs=2)
    assert swarm.policy.announced.kept_share(bob) == 1.0


async def test_a_sampler_that_is_late_when_others_have_filled_the_batch_has_left_a_hole(autojump_clock):  # noqa: ARG001 - it jumps
    async with Accounted(4, ann=never, bob=well) as swarm:
        await swarm.next_batch()
        swarm.publish()
        swarm.publish()
        swarm.publish()
        await swarm.next_batch()
        shares = {
            name: swarm.policy.announced.kept_share(swarm.samplers[name].public) for name in ("ann", "bob")
        }
    assert shares["ann"] < 1.0
    assert shares["bob"] == 1.0
