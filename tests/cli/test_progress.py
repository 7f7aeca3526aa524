"""Progress of the first download: on a terminal, as lines, and as events."""

from __future__ import annotations

import io
import json

from rich.console import Console

from echo_node.cli.progress import LINE_SECONDS, shown
from echo_node.telemetry.events import Events
from echo_node.weights.progress import PullProgress


def told(*, terminal, as_json=False):
    """Return the screen and the lines written during a whole download."""
    lines, screen, seconds = [], io.StringIO(), [0.0]
    console = Console(file=screen, force_terminal=terminal, width=100)
    with shown(Events(as_json, lines.append), console, clock=lambda: seconds[0]) as tell:
        for done in range(0, 5_000_000, 500_000):
            tell(PullProgress("fetching", version=7, done=done, total=4_500_000, sources=2))
            seconds[0] += LINE_SECONDS / 4
        tell("nobody has it; next try in 1 s")
    return screen.getvalue(), lines


def test_on_a_terminal_a_bar_shows_what_is_fetched_and_how_much_of_it():
    screen, lines = told(terminal=True)
    assert "version 7: fetching" in screen
    assert "4.5/4.5 MB" in screen
    assert "/s" in screen
    assert not [line for line in lines if "fetching" in line], "the bar is enough"


def test_elsewhere_it_is_a_line_a_second():
    screen, lines = told(terminal=False)
    assert not screen
    assert len(lines) == 3
    assert lines[1] == "version 7: fetching 2.0 of 4.5 MB (44 %) from 2"


def test_programs_get_events_even_at_a_terminal():
    screen, lines = told(terminal=True, as_json=True)
    assert not screen
    assert [json.loads(line)["event"] for line in lines] == ["fetching"] * 3
    assert "2.0 of 4.5 MB" in json.loads(lines[1])["text"]
