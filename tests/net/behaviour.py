"""What the tests of every medium share: names, nodes' keys, and waits that end."""

from __future__ import annotations

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, RequestError
from protocol import Identity

TOPIC, STREAM, KEY = "/echo/1/test/groups", "/echo/test/1", b"\x1e\x20" + bytes(32)
SOON = 5.0
IDENTITIES = tuple(Identity(bytes([n]) * 32) for n in range(1, 6))
STRANGER = Identity(b"s" * 32).public


def accept(_message):
    return ACCEPT


async def until(condition):
    with trio.fail_after(SOON):
        while not condition():  # noqa: ASYNC110 -- what is waited for may happen in another process
            await trio.sleep(0.001)


async def next_of(inbox):
    with trio.fail_after(SOON):
        return await inbox.receive()


async def refused(asking):
    with pytest.raises(RequestError) as caught:
        await asking
    assert isinstance(caught.value, PeerError)
    return caught.value
