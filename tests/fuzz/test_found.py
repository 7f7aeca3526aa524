"""What fuzzing found, input by input. Each was a hang or a foreign error before it was mended."""

from __future__ import annotations

import pytest
from libp2p.crypto.exceptions import CryptographyError
from libp2p.crypto.pb.crypto_pb2 import PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.crypto.rsa import create_new_key_pair as create_rsa
from libp2p.crypto.serialization import deserialize_public_key

from echo_node.net.host import build_host
from tests.fuzz.local_targets import PORT
from tests.fuzz.targets import everywhere
from tests.fuzz.wires import ME, PEER, Wire
from tests.net.hostile import field, framed

TARGETS = {name: target for name, (_, target) in everywhere().items()}
ASKED = f"HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\n".encode()


async def test_an_introduction_whose_words_are_no_text_is_held_against_its_peer():
    host = build_host(ME)
    for message in (field(3, b"\xff\xfe"), field(6, b"\xff\xfe") + field(3, b"/ok")):
        await host._handle_push(Wire(b"\0" + framed(message)))
    faults = host.scores.scores()
    assert set(faults) == {PEER.public}
    assert set(faults[PEER.public]) == {"malformed-identify"}


def test_a_key_that_is_dear_to_look_at_is_not_looked_at_before_its_owner_has_shown_who_it_is():
    build_host(ME)
    private = create_rsa(
        2048
    ).private_key.to_bytes()  # the library takes it for a public one, and tests its primes
    with pytest.raises(CryptographyError, match="no place here"):
        deserialize_public_key(PublicKey(key_type=0, data=private).SerializeToString())
    with pytest.raises(CryptographyError, match="no place here"):
        RSAPublicKey.from_bytes(private)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / "
        + ASKED
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"GET /metrics " + ASKED + b"Connection: close\r\n\r\n\n\n\n\n\n",
        b"GET /api/events " + ASKED + b"\r\nand more that nobody reads\r\n\r\n",
    ],
    ids=[
        "an upgrade to HTTP/2",
        "HTTP/2 at once",
        "lines behind a last question",
        "words behind a question for news",
    ],
)
def test_a_connection_of_the_page_ends_when_its_reader_has_gone(request_):
    with TARGETS["page"].open() as feed:
        feed(request_)  # what does not end is a BugError
