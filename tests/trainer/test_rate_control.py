"""Rate control in a simulation: samplers with latency, and a trainer."""

import random

import pytest

from echo_node.trainer.rate_control import RateControl

BATCH = 32


class World:
    """Samplers whose calls last, a trainer whose steps last, and time in between."""

    def __init__(self, speeds, step_seconds, staleness=4):
        self.wanting = RateControl(BATCH)
        self.speeds = speeds
        """Groups a second that each sampler could bring."""
        self.step_seconds = step_seconds
        self.staleness = staleness
        self.rate = None
        self.waiting = []
        """Steps of the policies of the groups that wait."""
        self.luck = random.Random(0)
        self.credit = [self.luck.uniform(0, 8) for _ in speeds]
        self.late = []
        """What is under way: when it arrives, its policy, and how many."""
        self.now = self.waited = 0.0
        self.step = self.stale = 0

    def pass_by(self, seconds):
        ticks = max(1, round(seconds / 0.01))
        for _ in range(ticks):
            self.now += 0.01
            for number, speed in enumerate(self.speeds):
                wanted = speed if self.rate is None else min(speed, self.rate)
                self.credit[number] += 0.01 * wanted
                if self.credit[number] >= 8:
                    self.credit[number] -= 8 * self.luck.uniform(0.75, 1.25)
                    self.late.append((self.now + 0.3, self.step, 8))
            arrived = [each for each in self.late if each[0] <= self.now]
            self.late = [each for each in self.late if each[0] > self.now]
            for _, policy, count in arrived:
                self.waiting += [policy] * count

    def take_step(self):
        while True:
            fresh = [policy for policy in self.waiting if self.step - policy <= self.staleness]
            self.stale += len(self.waiting) - len(fresh)
            self.waiting = sorted(fresh)
            if len(self.waiting) >= BATCH:
                break
            self.rate = self.wanting.starving()
            self.pass_by(0.05)
            self.waited += 0.05
        del self.waiting[:BATCH]
        self.pass_by(self.step_seconds)
        self.step += 1
        self.rate = self.wanting.stepped(self.step_seconds, len(self.speeds), len(self.waiting))


@pytest.mark.parametrize(
    "speeds",
    [
        pytest.param([100.0] * 8, id="all are fast"),
        pytest.param([30.0] * 8, id="just enough and a bit"),
        pytest.param([400.0, *[2.0] * 7], id="one is fast and the others are slow"),
        pytest.param([20.0] * 16, id="many"),
    ],
)
def test_a_trainer_hardly_waits_and_little_grows_stale(speeds):
    world = World(speeds, step_seconds=0.2)
    for _ in range(30):
        world.take_step()
    began, waited, stale = world.now, world.waited, world.stale
    for _ in range(200):
        world.take_step()
    assert world.waited - waited < 0.1 * (world.now - began)
    assert world.stale - stale < 0.1 * 200 * BATCH


def test_samplers_that_are_too_slow_are_asked_for_ever_more_up_to_a_bound():
    world = World([4.0], step_seconds=0.2)
    rates = []
    for _ in range(40):
        world.take_step()
        rates.append(world.rate)
    assert rates[2] < rates[6] < rates[-1] <= 1.3 * 8 * BATCH / 0.2
    assert rates[-1] == rates[-2]


def test_the_more_is_waiting_the_less_is_wanted():
    wanting = RateControl(BATCH)
    rates = [wanting.stepped(1.0, 1, waiting) for waiting in (0, BATCH, 2 * BATCH, 3 * BATCH, 9 * BATCH)]
    assert rates == pytest.approx([1.3 * BATCH, BATCH, 0.7 * BATCH, 0.5 * BATCH, 0.5 * BATCH])


def test_nothing_is_known_before_the_first_step():
    wanting = RateControl(BATCH)
    assert wanting.seconds is None
    assert wanting.starving() is None
    assert wanting.starting(BATCH, samplers=4) is None
    assert wanting.starting(2 * BATCH, samplers=4) == pytest.approx(BATCH / 10 / 4)
