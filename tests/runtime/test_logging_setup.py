"""Log lines: one line each, as text for people and as JSON for programs."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from echo_node.runtime import logging_setup


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    """Set logging up on a stream of our own; afterwards everything is as it was."""
    root, ours = logging.getLogger(), logging.getLogger("echo_node")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(ours, "level", ours.level)

    def set_up(stream, level="warning"):
        monkeypatch.setattr(sys, "stderr", stream)
        logging_setup.set_up(level)
        logging.Logger.manager._clear_cache()
        return lambda: stream.getvalue().splitlines()

    yield set_up
    monkeypatch.undo()
    logging.Logger.manager._clear_cache()


def test_for_a_person_a_line_is_plain_words(lines):
    written = lines(Terminal())
    logging.getLogger("echo_node.net").warning("peer %s went away", "Ann")
    assert written() == ["warning: peer Ann went away"]


def test_for_a_program_a_line_is_one_json_object(lines):
    written = lines(io.StringIO())
    logging.getLogger("echo_node.net").error("peer %s went away", "Ann")
    (line,) = written()
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {"level": "error", "from": "echo_node.net", "what": "peer Ann went away"}


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_text_from_a_peer_stays_on_its_line_and_touches_no_terminal(lines, stream):
    written = lines(stream())
    logging.getLogger("echo_node").warning("it said: %s", "\x1b[31mred\r\nerror: all is lost\x00\u202e")
    (line,) = written()
    assert line.isprintable()
    assert "\x1b" not in line


def test_a_peer_that_says_very_much_is_cut_short(lines):
    written = lines(io.StringIO())
    logging.getLogger("echo_node").warning("it said: %s", "a" * 100_000)
    assert len(written()[0]) < 1_000


def test_our_own_lines_follow_the_level_and_others_speak_only_of_errors(lines):
    written = lines(Terminal(), level="info")
    for name in ("echo_node.trainer", "libp2p", "transformers"):
        logging.getLogger(name).debug("debug of %s", name)
        logging.getLogger(name).info("info of %s", name)
        logging.getLogger(name).warning("warning of %s", name)
    logging.getLogger("libp2p").error("broken")
    assert written() == [
        "info: info of echo_node.trainer",
        "warning: warning of echo_node.trainer",
        "error: broken",
    ]


def test_an_error_with_a_traceback_is_still_one_line(lines):
    written = lines(io.StringIO())
    try:
        raise ZeroDivisionError  # noqa: TRY301 - to have a traceback
    except ZeroDivisionError as error:
        logging.getLogger("echo_node").warning("a bug", exc_info=error)
    assert len(written()) == 1


def test_setting_up_twice_does_not_say_everything_twice(lines):
    stream = Terminal()
    lines(stream)
    written = lines(stream)
    logging.getLogger("echo_node").warning("once")
    assert written() == ["warning: once"]
