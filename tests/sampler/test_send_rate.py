"""Send rate: limited by unanswered groups and the requested rate, and by nothing older."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from echo_node.sampler.send_rate import QUIET_SECONDS, SendRate
from protocol import Receipt, Refusal, limits

SLACK = 0.01


def ids(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32) for n in numbers]


def receipt(*accepted: int, rate: float | None = None, **refused: tuple[int, ...]) -> Receipt:
    refusals = tuple(Refusal(reason, b"".join(ids(*refused[reason]))) for reason in sorted(refused))
    return Receipt(
        accepted=b"".join(ids(*accepted)), head=b"h" * 32, rate=rate, refused=refusals, term=1, version=0
    )


async def seconds_until_more(send_rate: SendRate) -> float:
    start = trio.current_time()
    await send_rate.wait()
    return trio.current_time() - start


async def test_a_sampler_goes_until_too_many_groups_are_unanswered(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=3)
    send_rate.sent(ids(1, 2))
    with trio.fail_after(1):
        await send_rate.wait()
    send_rate.sent(ids(3))
    with trio.move_on_after(1_000) as scope:
        await send_rate.wait()
    assert scope.cancelled_caught


async def test_groups_that_were_asked_for_are_counted_and_hold_nothing_up(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1)
    send_rate.receipt(receipt(rate=0.001))
    send_rate.requested(ids(*range(100)))
    with trio.fail_after(1):
        await send_rate.wait()
    send_rate.new_head()
    send_rate.receipt(receipt(*range(98), 500, stale=(98, 501)))
    assert (send_rate.accepted, +send_rate.refused) == (98, {"stale": 1})


@pytest.mark.parametrize("answer", [receipt(2), receipt(full=(2,))])
async def test_an_answer_of_either_kind_lets_it_go_on(autojump_clock, answer):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=3)
    send_rate.sent(ids(1, 2, 3))
    went_on = trio.Event()

    async def go_on():
        await send_rate.wait()
        went_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        await trio.testing.wait_all_tasks_blocked()
        send_rate.receipt(receipt(77, stale=(88,)))
        await trio.testing.wait_all_tasks_blocked()
        assert not went_on.is_set(), "others' groups are others' business"
        send_rate.receipt(answer)
        with trio.fail_after(1):
            await went_on.wait()


async def test_it_counts_its_own_groups_once_and_nobody_elses(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=10)
    send_rate.sent(ids(1, 2, 3, 4))
    for _ in range(2):
        send_rate.receipt(receipt(1, 2, 50, stale=(3, 51), full=(52,)))
    assert send_rate.accepted == 2
    assert dict(+send_rate.refused) == {"stale": 1}


async def test_groups_of_older_heads_are_never_waited_for(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=3)
    send_rate.sent(ids(1, 2, 3))
    went_on = trio.Event()

    async def go_on():
        await send_rate.wait()
        went_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        await trio.testing.wait_all_tasks_blocked()
        assert not went_on.is_set()
        send_rate.new_head()
        with trio.fail_after(1):
            await went_on.wait()
    send_rate.sent(ids(4, 5))
    with trio.fail_after(1):
        await send_rate.wait()


async def test_answers_to_groups_of_older_heads_still_count(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=3)
    send_rate.sent(ids(1, 2, 3))
    send_rate.new_head()
    send_rate.receipt(receipt(1, 2, stale=(3,)))
    assert send_rate.accepted == 2
    assert dict(+send_rate.refused) == {"stale": 1}


async def test_what_is_never_answered_is_not_remembered_for_ever(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=4)
    for head in range(1_000):
        send_rate.sent(ids(*range(4 * head, 4 * head + 4)))
        send_rate.new_head()
    assert len(send_rate._waiting) + len(send_rate._older) < 1_000


@pytest.mark.parametrize(("unanswered", "remembered"), [(1, limits.BATCH), (limits.BATCH, 16 * limits.BATCH)])
async def test_a_sampler_that_may_have_more_unanswered_remembers_more(unanswered, remembered):
    send_rate = SendRate(unanswered=unanswered)
    send_rate.sent(ids(*range(17 * limits.BATCH)))
    send_rate.new_head()
    newest = 17 * limits.BATCH - remembered
    send_rate.receipt(receipt(newest - 1, newest))
    assert send_rate.accepted == 1, "the newest ones, and none before them"


async def test_without_a_rate_it_goes_as_fast_as_it_can(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    for n in range(20):
        send_rate.sent(ids(n))
        assert await seconds_until_more(send_rate) < SLACK


async def test_with_a_rate_so_many_groups_a_second_and_no_more(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=4.0))
    start = trio.current_time()
    for n in range(10):
        await send_rate.wait()
        send_rate.sent(ids(2 * n, 2 * n + 1))
    await send_rate.wait()
    assert trio.current_time() - start == pytest.approx(20 / 4.0, abs=SLACK)


async def test_the_time_that_generating_takes_is_part_of_the_rate(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=4.0))
    start = trio.current_time()
    for n in range(10):
        await send_rate.wait()
        await trio.sleep(0.3)
        send_rate.receipt(receipt(rate=4.0))
        await trio.sleep(0.1)
        send_rate.sent(ids(2 * n, 2 * n + 1))
    await send_rate.wait()
    assert trio.current_time() - start == pytest.approx(20 / 4.0, abs=SLACK)


async def test_a_long_pause_is_no_credit_for_a_burst(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=4.0))
    await trio.sleep(60)
    for n in range(3):
        await send_rate.wait()
        send_rate.sent(ids(2 * n, 2 * n + 1))
        assert await seconds_until_more(send_rate) == pytest.approx(0.5, abs=SLACK)
    await trio.sleep(60)
    send_rate.sent(ids(100, 101))
    assert await seconds_until_more(send_rate) < SLACK, "what took a minute was slow enough"
    send_rate.sent(ids(102, 103))
    assert await seconds_until_more(send_rate) == pytest.approx(0.5, abs=SLACK)


async def test_a_new_rate_counts_for_what_is_still_to_be_waited(autojump_clock):  # noqa: ARG001 - it jumps
    """A trainer that stalled asks for a trickle; once it resumes, so must its samplers."""
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=0.01))
    send_rate.sent(ids(*range(16)))

    async def speed_up():
        await trio.sleep(10)
        send_rate.receipt(receipt(rate=16.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speed_up)
        assert await seconds_until_more(send_rate) == pytest.approx(11, abs=0.1)


async def test_without_a_rate_any_more_nothing_is_left_to_wait_for(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=0.01))
    send_rate.sent(ids(*range(16)))
    send_rate.receipt(receipt(rate=None))
    assert await seconds_until_more(send_rate) < SLACK


async def test_a_rate_of_none_at_all_holds_until_another_is_told(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1_000)
    send_rate.receipt(receipt(rate=0.0))
    with trio.move_on_after(1_000) as scope:
        await send_rate.wait()
    assert scope.cancelled_caught, "0 a second is not as many as there are"
    send_rate.receipt(receipt(rate=5.0))
    assert await seconds_until_more(send_rate) < SLACK
    send_rate.receipt(receipt(rate=0.0))
    send_rate.new_head()
    assert await seconds_until_more(send_rate) < SLACK, "a new head may want groups of its own"


async def test_waiting_lets_others_run_even_if_there_is_nothing_to_wait_for(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await send_rate.wait()
    assert scope.cancelled_caught


async def test_a_sampler_that_is_muted_is_quiet_for_longer_each_time(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(unanswered=3)
    for number, quiet in enumerate((QUIET_SECONDS, 2 * QUIET_SECONDS, 4 * QUIET_SECONDS)):
        send_rate.sent(ids(2 * number, 2 * number + 1))
        send_rate.receipt(receipt(muted=(2 * number,)))
        send_rate.receipt(receipt(muted=(2 * number + 1,)))  # of the same time
        assert await seconds_until_more(send_rate) == pytest.approx(quiet, abs=SLACK)
    send_rate.receipt(receipt(muted=(99,)))
    assert await seconds_until_more(send_rate) == 0, "somebody else's"


async def test_with_luck_the_beat_is_uneven_and_the_rate_is_kept(autojump_clock):  # noqa: ARG001 - it jumps
    send_rate = SendRate(1000, luck=random.Random(0))
    send_rate.receipt(receipt(rate=4.0))
    began, beats = trio.current_time(), []
    for number in range(200):
        send_rate.sent(ids(2 * number, 2 * number + 1))
        beats.append(await seconds_until_more(send_rate))
        send_rate.new_head()
    assert min(beats) >= 0.75 * 2 / 4 - 1e-6
    assert max(beats) <= 1.25 * 2 / 4 + 1e-6
    assert max(beats) - min(beats) > 0.1
    assert 400 / (trio.current_time() - began) == pytest.approx(4.0, rel=0.05)
