"""The page's server in the node's loop: it streams updates, blocks nothing, ends with the node."""

import gc
import logging
import math
import socket
from functools import partial

import pytest
import trio

from echo_node import dashboard
from echo_node.dashboard import server
from echo_node.dashboard.server import MOST_CONNECTIONS
from echo_node.dashboard.sse import MOST_LISTENERS, Listeners
from echo_node.errors import LONGEST, ConfigError
from echo_node.telemetry.snapshot import MOST_STEPS, Snapshot
from tests.dashboard.page_client import served
from tests.dashboard.sample_node import Story, a_long_story

SESAME = "open-1234"
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202eevil\x00\n"


async def test_a_snapshot_is_the_boards_with_sums_beside_it():
    story = a_long_story("trainer", 30)
    async with served(story.board) as page:
        told = (await page.ask("/api/snapshot")).json()
    own = story.board.snapshot()
    assert {
        name: told[name]
        for name in ("format", "sequence", "phase", "node", "run", "peers", "progress", "steps", "log")
    } == {
        name: own[name]
        for name in ("format", "sequence", "phase", "node", "run", "peers", "progress", "steps", "log")
    }
    assert told["totals"]["steps"] == told["totals"]["versions"] == 30
    assert told["totals"]["tokens"] == sum(step["tokens"] for step in own["steps"])
    assert told["totals"]["groups"] == sum(sum(step["staleness"].values()) for step in own["steps"])


async def test_a_node_knows_its_own_role_and_whom_it_has_muted():
    board = Snapshot()
    board.record("started", "", {"role": "sampler"})
    board.describe_swarm(
        [
            {"peer_id": "a", "role": "peer", "me": True},
            {"peer_id": "b", "role": "sampler", "muted": None},
            {"peer_id": "d", "muted": "flood"},
        ],
        "",
    )
    board.record("progress", "", {"muted": {"b": "skipped-slots", "c": "wrong-reward", "d": "x"}})
    async with served(board) as page:
        told = (await page.ask("/api/snapshot")).json()["peers"]
    assert [(peer["peer_id"], peer["role"], peer["muted"]) for peer in told] == [
        ("a", "sampler", None),
        ("b", "sampler", "skipped-slots"),
        ("d", "peer", "flood"),
        ("c", "sampler", "wrong-reward"),
    ]


async def test_text_of_strangers_is_one_printable_line_and_what_is_no_number_is_none():
    board = Snapshot()
    board.describe_run({"name": HOSTILE, "id": "a" * 9999, "model_bytes": 10**400})
    board.describe_swarm([{"peer_id": HOSTILE, "muted": HOSTILE}], HOSTILE)
    board.record(
        "progress", "", {"refused": {HOSTILE: 1}, "reward": float("nan"), "deep": [[[[[[[["x"]]]]]]]]}
    )
    board.record(HOSTILE, HOSTILE, {})
    async with served(board) as page:
        told = (await page.ask("/api/snapshot")).json()
        text = (await page.ask("/api/snapshot")).text
    assert text.isprintable()
    clean = r"<img src=x onerror=alert(1)>\x1b[31m\u202eevil\x00\n"
    assert told["run"]["name"] == told["reach"] == told["log"][0]["words"] == told["log"][0]["event"] == clean
    assert told["peers"][0] == {"peer_id": clean, "role": "peer", "muted": clean}
    assert told["progress"]["refused"] == {clean: 1}
    assert told["progress"]["reward"] is None
    assert len(told["run"]["id"]) == LONGEST


async def test_who_listens_hears_everything_once_and_then_what_is_new():
    story = a_long_story("trainer", 20)
    async with served(story.board) as page, page.listen() as listener:
        first = await listener.next()
        assert dict(listener.head.headers)[b"content-type"].startswith(b"text/event-stream")
        assert first["whole"] is True
        assert len(first["steps"]) == 20
        story.turn()
        story.board.record("note", "a line", {})
        second = await listener.next()
        assert second["whole"] is False
        assert [step["step"] for step in second["steps"]] == [21]
        assert [line["words"] for line in second["log"]] == ["a line"]
        assert second["progress"]["step"] == 21


async def test_a_flood_of_news_is_few_pieces_that_lose_nothing():
    story = Story("trainer")
    heard, pieces = [], 0
    async with served(story.board) as page, page.listen() as listener:
        await listener.next()
        for _ in range(10):
            for _ in range(30):
                story.turn()
            await trio.sleep(0.05)
        while len(heard) < 300:
            heard += [step["step"] for step in (await listener.next())["steps"]]
            pieces += 1
    assert heard == list(range(1, 301))
    assert pieces <= 4


async def test_only_so_many_listen_and_a_place_that_is_left_is_free_again():
    board = Snapshot()
    async with served(board) as page, trio.open_nursery() as nursery:
        scopes = []

        async def listen(task_status):
            with trio.CancelScope() as scope:
                async with page.listen() as listener:
                    await listener.next()
                    task_status.started(scope)
                    await trio.sleep_forever()

        for _ in range(MOST_LISTENERS):
            scopes.append(await nursery.start(listen))  # noqa: PERF401 - one after the other
        refused = await page.ask("/api/events")
        assert refused.status == 503
        assert "close one" in refused.text
        assert (await page.ask("/api/snapshot")).status == 200, "looking still works"
        scopes[0].cancel()
        while (answer := await _first_line(page)).startswith(b"HTTP/1.1 503"):
            pass
        assert answer.startswith(b"HTTP/1.1 200")
        nursery.cancel_scope.cancel()


async def _first_line(page) -> bytes:
    async with page.listen() as listener:
        return await listener.stream.receive_some(40)


async def test_connections_are_bounded_and_idle_ones_are_given_up(monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 1)
    async with served() as page:
        idle = [await trio.open_tcp_stream("127.0.0.1", page.port) for _ in range(MOST_CONNECTIONS)]
        one_more = await trio.open_tcp_stream("127.0.0.1", page.port)
        with trio.fail_after(5):
            assert await _ended(one_more)
        with trio.fail_after(20):
            assert await _ended(idle[0])
        for stream in (*idle, one_more):
            await stream.aclose()
        assert (await page.ask("/")).status == 200


async def _ended(stream: trio.SocketStream) -> bool:
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


def a_board_of_many_megabytes() -> Snapshot:
    board = Snapshot()
    peers = {f"peer-{number:060}": 1 for number in range(400)}
    for number in range(250):
        board.record("step", "", {"step": number, "reward": 0.5, "samplers": peers})
    return board


async def a_reader_that_stops(page) -> trio.SocketStream:
    """It has asked for the news, read the first of it, and reads no more."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow = trio.SocketStream(trio.socket.from_stdlib_socket(raw))
    await slow.socket.connect(("127.0.0.1", page.port))
    await slow.send_all(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
    assert await slow.receive_some(1000)
    return slow


async def the_rest(stream: trio.SocketStream) -> int:
    """How many bytes still come."""
    got = 0
    with trio.fail_after(10):
        try:
            while data := await stream.receive_some(2**20):
                got += len(data)
        except trio.BrokenResourceError:
            pass
    return got


async def test_a_reader_that_stops_reading_holds_up_neither_the_node_nor_its_end(monkeypatch):
    monkeypatch.setattr(server, "SEND_SECONDS", math.inf)  # the end must not wait for it
    board = a_board_of_many_megabytes()
    async with served(board) as page:
        whole = len((await page.ask("/api/snapshot")).body)
        slow = await a_reader_that_stops(page)
        for number in range(250, 270):
            board.record("step", "", {"step": number, "reward": 0.5})
            await trio.sleep(0.01)
        assert (await page.ask("/api/snapshot")).json()["steps"][-1]["step"] == 269
    with pytest.raises(OSError, match="failed"):
        await trio.open_tcp_stream("127.0.0.1", page.port)
    got = await the_rest(slow)
    await slow.aclose()
    assert got < whole - 2000, "else nothing was held back, and the test shows nothing"


async def test_a_reader_that_stops_reading_is_given_up_and_its_place_is_free(monkeypatch):
    monkeypatch.setattr(server, "SEND_SECONDS", 2.0)
    monkeypatch.setattr(server, "Listeners", partial(Listeners, 1))
    async with served(a_board_of_many_megabytes()) as page, await a_reader_that_stops(page):
        assert (await _first_line(page)).startswith(b"HTTP/1.1 503")
        with trio.fail_after(30):
            # Nobody tells when the place is free, and too many connections are hung up on.
            while not (await _first_line(page)).startswith(b"HTTP/1.1 200"):  # noqa: ASYNC110
                await trio.sleep(0.1)


async def test_a_port_in_use_is_one_line_with_advice():
    async with served() as page:
        with pytest.raises(ConfigError) as caught:
            await dashboard.serve_page(Snapshot(), port=page.port)
        assert str(caught.value) == (
            f"the page cannot listen on port {page.port} of 127.0.0.1: another program uses it"
            " (choose another with --page PORT, or leave the page out with --no-page)"
        )


@pytest.mark.parametrize("port", [-1, 70_000])
async def test_a_number_that_is_no_port_is_one_line_with_advice(port):
    with pytest.raises(ConfigError, match=r"cannot listen on port .*--page PORT"):
        await dashboard.serve_page(Snapshot(), port=port)


async def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(dashboard, "_NEEDED", ("starlette", "a_package_that_nobody_has"))
    with pytest.raises(ConfigError, match=r"needs a_package_that_nobody_has .*echo-node\[page\]"):
        await dashboard.serve_page(Snapshot(), port=0)


async def test_an_end_leaves_nothing_running_and_the_port_free():
    board = Snapshot()
    async with served(board) as page, page.listen() as listener:
        await listener.next()
        port = page.port
    gc.collect()  # a socket or a generator that was forgotten would warn, and warnings are errors
    async with served(board, port=port) as again:
        assert again.port == port
        assert (await again.ask("/api/snapshot")).status == 200


async def test_a_defect_behind_one_request_is_the_end_of_that_request(caplog):
    class Broken:
        def pause(self):
            raise RuntimeError("a bug")

        def resume(self):
            raise NotImplementedError

    with caplog.at_level(logging.ERROR):
        async with served(token=SESAME, control=Broken()) as page:
            answer = await page.ask("/api/pause", method="POST", headers={"X-Echo-Token": SESAME})
            assert answer.status == 500
            assert "a bug" not in answer.text
            assert (await page.ask("/")).status == 200
    assert "a bug" in caplog.text


@pytest.mark.parametrize(
    "bytes_sent",
    [b"\x00" * 50, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff"],
)
async def test_garbage_ends_its_own_connection(bytes_sent):
    async with served() as page:
        async with await trio.open_tcp_stream("127.0.0.1", page.port) as stream:
            with trio.move_on_after(2):
                await stream.send_all(bytes_sent)
                await stream.receive_some()
        assert (await page.ask("/")).status == 200


async def test_a_board_that_is_full_is_told_whole_and_its_sums_go_on():
    story = Story("trainer")
    async with served(story.board) as page:
        for _ in range(5):
            for _ in range(MOST_STEPS // 2):
                story.turn()
            told = (await page.ask("/api/snapshot")).json()
    assert len(told["steps"]) == MOST_STEPS
    assert told["totals"]["steps"] == 5 * (MOST_STEPS // 2)


async def test_the_address_is_told_when_it_can_be_asked():
    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(dashboard.serve_page, Snapshot(), port=0))
        assert url.startswith("http://127.0.0.1:")
        nursery.cancel_scope.cancel()
