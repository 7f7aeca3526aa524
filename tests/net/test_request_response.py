"""What every medium does with questions and answers."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.errors import DefectError, EchoError
from protocol.errors import BadSignatureError
from tests.net.behaviour import (
    SOON,
    STRANGER,
    STREAM,
    refused,
)


async def test_a_question_gets_its_answer_and_the_handler_knows_who_asks(pair):
    one, two = pair

    async def handler(peer, data):
        await trio.lowlevel.checkpoint()
        return peer + data[::-1]

    with two.serve(STREAM, handler, most=10):
        assert await one.request(two.public, STREAM, b"abc", deadline=SOON, most=100) == one.public + b"cba"


async def test_many_questions_at_once_each_get_their_own_answer(pair):
    one, two = pair
    gate, answers = trio.Event(), {}

    async def handler(_peer, data):
        if data == b"9":
            gate.set()
        await gate.wait()
        return data * 2

    async def ask(data):
        answers[data] = await one.request(two.public, STREAM, data, deadline=SOON, most=10)

    with two.serve(STREAM, handler, most=10):
        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(ask, b"%d" % n)
    assert answers == {b"%d" % n: b"%d%d" % (n, n) for n in range(10)}


async def test_a_request_that_cannot_be_answered_says_why(pair):
    one, two = pair
    error = await refused(one.request(STRANGER, STREAM, b"", deadline=SOON, most=1))
    assert error.reason == "unknown-peer"
    error = await refused(one.request(one.public, STREAM, b"", deadline=SOON, most=1))
    assert error.reason == "unknown-peer"
    error = await refused(one.request(two.public, STREAM, b"", deadline=SOON, most=1))
    assert error.reason == "no-handler"


async def test_a_question_too_large_never_reaches_the_handler_nor_an_answer_too_large_the_asker(pair):
    one, two = pair
    asked = []

    async def handler(_peer, data):
        await trio.lowlevel.checkpoint()
        asked.append(data)
        return b"12345"

    with two.serve(STREAM, handler, most=3):
        error = await refused(one.request(two.public, STREAM, b"1234", deadline=SOON, most=9))
        assert (error.reason, asked) == ("too-large", [])
        error = await refused(one.request(two.public, STREAM, b"123", deadline=SOON, most=4))
        assert (error.reason, asked) == ("too-large", [b"123"])
        assert await one.request(two.public, STREAM, b"123", deadline=SOON, most=5) == b"12345"


async def test_a_handler_refuses_in_its_own_words_and_hides_its_bugs(pair):
    one, two = pair
    errors = {
        b"protocol": BadSignatureError("not yours"),
        b"echo": EchoError("no such version\x1b[2J" + "x" * 1000),
        b"group": ExceptionGroup("nursery", [EchoError("from a nursery")]),
        b"bug": ValueError("secret detail"),
    }

    async def handler(_peer, data):
        await trio.lowlevel.checkpoint()
        if data in errors:
            raise errors[data]
        return bytearray(b"fine") if data == b"wrong type" else b"fine"

    async def ask(data):
        return await one.request(two.public, STREAM, data, deadline=SOON, most=10)

    with two.serve(STREAM, handler, most=10):
        error = await refused(ask(b"protocol"))
        assert error.reason == "refused"
        assert "bad-signature: not yours" in str(error)
        error = await refused(ask(b"echo"))
        assert "no such version" in str(error)
        assert str(error).isprintable()
        assert len(str(error)) < 400
        assert "from a nursery" in str(await refused(ask(b"group")))
        for data in (b"bug", b"wrong type"):
            error = await refused(ask(data))
            assert error.reason == "internal-error"
            assert "internal error" in str(error)
            assert "secret" not in str(error)
        assert await ask(b"") == b"fine"
    assert two.counts()["contained"] == 2


async def test_an_asker_does_not_wait_beyond_its_deadline_and_the_handler_is_let_go(pair):
    one, two = pair
    let_go = trio.Event()

    async def handler(_peer, _data):
        try:
            await trio.sleep_forever()
        finally:
            let_go.set()

    with two.serve(STREAM, handler, most=10):
        error = await refused(one.request(two.public, STREAM, b"", deadline=1.0, most=1))
        assert error.reason == "deadline"
        with trio.fail_after(SOON):
            await let_go.wait()


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan")])
async def test_a_request_without_an_end_is_a_bug(pair, deadline):
    one, two = pair
    with pytest.raises(DefectError, match="deadline"):
        await one.request(two.public, STREAM, b"", deadline=deadline, most=1)


async def test_a_handler_may_ask_in_turn(pair):
    one, two = pair

    async def back(_peer, data):
        await trio.lowlevel.checkpoint()
        return data + b"!"

    async def handler(peer, data):
        return await two.request(peer, STREAM + "/back", data, deadline=SOON, most=10)

    with one.serve(STREAM + "/back", back, most=10), two.serve(STREAM, handler, most=10):
        assert await one.request(two.public, STREAM, b"a", deadline=SOON, most=10) == b"a!"


async def test_a_stream_has_one_handler_and_none_after_its_context(pair):
    one, two = pair

    async def handler(_peer, _data):
        await trio.lowlevel.checkpoint()
        return b"ok"

    with two.serve(STREAM, handler, most=1):
        with pytest.raises(DefectError, match="two handlers"), two.serve(STREAM, handler, most=1):
            pass
        assert await one.request(two.public, STREAM, b"", deadline=SOON, most=2) == b"ok"
    error = await refused(one.request(two.public, STREAM, b"", deadline=SOON, most=2))
    assert error.reason == "no-handler"
