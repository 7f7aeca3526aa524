"""One child process of the demo: its events are read, its output is kept, and it can be ended."""

import sys

import pytest
import trio

from echo_node.demo.subprocesses import Child, end_all

SAYS = 'import sys; print("no event"); print("[1]"); print(\'{"event": "step", "step": 1}\', flush=True)'
STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    ' print(\'{"event": "ready"}\', flush=True); time.sleep(600)'
)
DIES = 'import sys; sys.stderr.write(\'{"level": "error", "what": "no room"}\\n  | ----\\nplain\\x1b[31m words\\n\'); sys.exit(3)'


class Heard(list):
    """Events, and one to wait for the first of them."""

    def __init__(self):
        super().__init__()
        self.first = trio.Event()

    def hear(self, event):
        self.append(event)
        self.first.set()


@pytest.fixture
def start(tmp_path):
    """Starts a small program in place of a node."""

    def begin(program):
        heard = Heard()
        return Child("node", [sys.executable, "-c", program], tmp_path / "node.log", heard.hear), heard

    return begin


async def test_events_are_heard_and_kept_and_other_lines_are_none(start, tmp_path):
    child, heard = start(SAYS)
    with trio.fail_after(30):
        await child.listen()
        assert await child.ended() == 0
    assert [event["step"] for event in heard] == [1]
    assert child.silent.is_set()
    assert b"no event" in (tmp_path / "node.jsonl").read_bytes()
    await end_all([child], 1.0)


async def test_what_a_dead_one_wrote_last_is_told_as_plain_words(start):
    child, _ = start(DIES)
    with trio.fail_after(30):
        await child.listen()
        await child.ended()
    assert child.how_it_ended() == "it ended with exit code 3"
    assert child.last_words() == ["error: no room", "plain\\x1b[31m words"]
    await end_all([child], 1.0)


async def test_one_that_does_not_end_in_order_is_ended(start):
    child, heard = start(STUBBORN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.listen)
        with trio.fail_after(30):
            await heard.first.wait()
            await end_all([child], 0.2)
    assert child.how_it_ended() == "it was ended by SIGKILL"
