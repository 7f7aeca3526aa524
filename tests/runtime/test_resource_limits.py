"""Amounts as people write them, and the limit on the state folder."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as some

from echo_node.errors import ConfigError
from echo_node.runtime import resource_limits
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import DISK, DISK_SECONDS, ResourceLimits, amount, watch_disk


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("2g", 2_000_000_000),
        ("1.5Gi", 3 * 2**29),
        ("64KiB", 65536),
        (" 3T ", 3 * 10**12),
    ],
)
def test_an_amount_is_read(text, size):
    assert amount(text, "--max-memory") == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "many", "1e9", "5 parsecs", "1.2.3GB", "9" * 400, "1000000T", "٣GB"]
)
def test_what_is_no_amount_is_refused_by_the_name_of_its_flag(text):
    with pytest.raises(ConfigError, match="--max-up"):
        amount(text, "--max-up")


def test_nothing_is_no_bound():
    assert amount(None, "--max-up") is None


@given(some.text(max_size=20))
def test_whatever_is_written_there_is_an_amount_or_one_clear_error(text):
    try:
        found = amount(text, "--max-down")
    except ConfigError as error:
        found, said = None, str(error)
    assert "--max-down" in said if found is None else 0 < found <= 10**15


async def test_work_pauses_while_the_folder_is_larger_than_the_limit(autojump_clock, monkeypatch):  # noqa: ARG001 - it jumps
    async def here(call):
        return call()

    monkeypatch.setattr(resource_limits, "run_abandonable", here)  # the clock would jump over a thread
    gate, taken, seen = PauseGate(), [100, 101, 100], []

    def size():
        seen.append(list(gate.reasons))
        return taken.pop(0) if taken else 100

    with trio.move_on_after(3.5 * DISK_SECONDS):
        await watch_disk(gate, size, ResourceLimits(disk=100))
    assert seen == [[], [], [DISK], []], "a folder of the limit's size is no larger"
    with trio.fail_after(1):
        await watch_disk(gate, size, ResourceLimits())
