"""The figures for Prometheus: they parse, they add up, and nobody's text breaks them."""

import dataclasses
import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from echo_node.dashboard.prometheus import MOST_LABELS
from echo_node.telemetry.events import Events, StepEvents
from echo_node.telemetry.metrics import StepRecord
from echo_node.telemetry.snapshot import MOST_STEPS, Snapshot
from tests.dashboard.page_client import served
from tests.dashboard.sample_node import ME, Story, a_long_story

GRAFANA = Path(__file__).parents[2] / "examples" / "grafana.json"


async def figures(board: Snapshot) -> dict[str, dict[tuple, float]]:
    """Every sample, by its name and its labels."""
    async with served(board) as page:
        answer = await page.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def test_a_trainers_figures_are_those_of_its_board():
    story = a_long_story("trainer", 50)
    found = await figures(story.board)
    told = story.board.snapshot()
    steps = told["steps"]
    assert found["echo_node_step"] == {(): 50}
    assert found["echo_node_version"] == {(): 50}
    assert found["echo_node_reward"] == {(): told["progress"]["reward"]}
    assert found["echo_node_step_loss"] == {(): steps[-1]["loss"]}
    assert found["echo_node_tokens_per_second"] == {(): told["progress"]["tokens_per_second"]}
    assert found["echo_node_received_bytes_total"] == {(): sum(step["bytes_in"] for step in steps)}
    assert found["echo_node_sent_bytes_total"] == {(): sum(step["bytes_out"] for step in steps)}
    assert found["echo_node_full_weights_bytes_total"] == {(): 50 * told["run"]["model_bytes"]}
    assert found["echo_node_groups_dropped_total"] == {
        (("reason", name),): count for name, count in told["progress"]["dropped"].items()
    }
    assert found["echo_node_phase"][("phase", "working"),] == 1
    assert sum(found["echo_node_phase"].values()) == 1
    assert dict(next(iter(found["echo_node_info"])))["peer_id"] == ME
    assert found["echo_node_known_peers"][("role", "verifier"), ("state", "connected")] == 2
    young = sum(step["staleness"].get("0", 0) + step["staleness"].get("1", 0) for step in steps)
    every = sum(sum(step["staleness"].values()) for step in steps)
    assert found["echo_node_staleness_steps_bucket"][("le", "1.0"),] == young
    assert found["echo_node_staleness_steps_count"] == {(): every}


NOT_OF_A_STEP = {
    "step": "echo_node_step is the node's, which hears of steps that it did not take",
    "version": "the same holds for echo_node_version",
    "waiting": "the same holds for echo_node_waiting, which moves between steps",
    "policy_step": "one less than the step, or the same",
    "number": "how often a batch was drawn, for the records",
    "at_seconds": "when: Prometheus has its own clock",
}


async def test_every_number_that_is_recorded_of_a_step_is_exposed_or_known_not_to_be():
    numbers = [each.name for each in dataclasses.fields(StepRecord) if each.type in {"int", "float"}]
    assert len(numbers) > 20
    values = {name: 101 + place for place, name in enumerate(numbers)}
    board = Snapshot()
    record = StepRecord(**values, head=bytes(32), groups=(), dropped={"stale": 3})
    StepEvents(Events(as_json=True, write=lambda _line: None, board=board)).write(record)
    found = {value for samples in (await figures(board)).values() for value in samples.values()}
    assert {name for name, value in values.items() if value not in found} == NOT_OF_A_STEP.keys()


async def test_a_sampler_and_a_verifier_have_their_own_figures_and_no_others():
    sampler = a_long_story("sampler", 40)
    found = await figures(sampler.board)
    assert found["echo_node_groups_accepted_total"] == {(): sampler.accepted}
    assert found["echo_node_groups_refused_total"][("reason", "full"),] == sampler.counts["refused"]["full"]
    assert "echo_node_reward" not in found
    verifier = a_long_story("verifier", 40)
    found = await figures(verifier.board)
    assert found["echo_node_verdicts_total"][("result", "honest"),] == verifier.counts["verdicts"]["honest"]
    assert "echo_node_groups_accepted_total" not in found


async def test_a_node_that_has_said_nothing_yet_has_figures_too():
    found = await figures(Snapshot())
    assert found["echo_node_phase"][("phase", "starting"),] == 1
    assert found["echo_node_steps_total"] == {(): 0}


async def test_text_of_strangers_is_a_label_and_cannot_be_more():
    board = Snapshot()
    evil = 'x"} 1\necho_node_reward 9\n# "\\'
    board.describe_run({"name": evil})
    board.record(
        "progress", "", {"refused": {evil: 3}, "reward": float("nan"), "accepted": "many", "version": None}
    )
    found = await figures(board)
    assert dict(next(iter(found["echo_node_info"])))["name"] == evil.replace("\n", r"\n")
    assert found["echo_node_groups_refused_total"] == {(("reason", evil.replace("\n", r"\n")),): 3}
    assert "echo_node_version" not in found
    assert "echo_node_groups_accepted_total" not in found


async def test_made_up_reasons_are_a_bounded_number_of_series():
    board = Snapshot()
    board.record("progress", "", {"dropped": {f"reason-{number}": number for number in range(1000)}})
    found = await figures(board)
    assert len(found["echo_node_groups_dropped_total"]) == MOST_LABELS
    assert found["echo_node_groups_dropped_total"][("reason", "reason-999"),] == 999


async def test_sums_never_fall_though_the_board_forgets():
    story = Story("trainer")
    seen = []
    async with served(story.board) as page:
        for _ in range(4):
            for _ in range(MOST_STEPS - 100):
                story.turn()
            text = (await page.ask("/metrics")).text
            seen.append(
                float(re.search(r"^echo_node_tokens_trained_total ([\d.e+]+)$", text, re.MULTILINE)[1])
            )
    assert seen == sorted(seen)
    assert seen[-1] > 3.5 * seen[0]


async def test_every_figure_that_the_grafana_dashboard_asks_for_exists():
    names = set()
    for each in ("trainer", "sampler", "verifier"):
        names |= set(await figures(a_long_story(each, 30).board))
    expressions = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', GRAFANA.read_text())
    asked = {name for text in expressions for name in re.findall(r"\becho_node_\w+", text)}
    assert len(asked) >= 12
    assert asked <= names, asked - names
    assert {panel["type"] for panel in json.loads(GRAFANA.read_text())["panels"]} >= {"timeseries", "stat"}
