"""Peer exchange on the stream `/echo/peers/1`: what this node tells others, and what it hears, sifted.

Told is whom we are connected to and who can be dialled, and never an address that means something else to the asker than
to us. What is heard is hearsay, and good only once connected. It keeps nothing of it and dials nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.asking import Asking
from echo_node.net.base import RequestError
from echo_node.net.meeting.places import Scope, usable
from protocol import PeerPlace, PeersAnswer, PeersQuestion, ProtocolError, decode, encode, limits
from protocol.topics import PEERS_STREAM

ASK_SECONDS: Final = 10.0
ANSWER_EVERY: Final = 1.0
"""Seconds between two answers to one peer; who asks more often is refused."""


class HearsayError(PeerError):
    """A peer that tells of no peers."""


class Exchange:
    """One node's talk about peers."""

    def __init__(
        self,
        me: bytes,
        asking: Asking,
        dialable: Callable[[], Mapping[bytes, Sequence[str]]],
        nearest: Callable[[bytes], Scope],
    ) -> None:
        """`nearest` says how far an address must lead to mean the same here and at a peer."""
        self._me = me
        self._asking = asking
        self._dialable = dialable
        self._nearest = nearest
        self._answered: dict[bytes, float] = {}
        self._luck = random.SystemRandom()

    async def answer(self, asker: bytes, question: bytes) -> bytes:
        """Some of the peers that we are connected to. The `Handler` of the stream."""
        await trio.lowlevel.checkpoint()
        wanted = decode(PeersQuestion, question).wanted
        now = trio.current_time()
        self._answered = {peer: when for peer, when in self._answered.items() if now - when < ANSWER_EVERY}
        if asker in self._answered:
            raise HearsayError("asked again too soon")
        self._answered[asker] = now
        least = self._nearest(asker)
        places = [
            PeerPlace(public, tuple(ways))
            for public, addresses in self._dialable().items()
            if public not in {asker, self._me}
            and (ways := usable(addresses, public, least=least, most=limits.PEER_ADDRESSES))
        ]
        chosen = self._luck.sample(places, min(wanted, len(places)))
        return encode(PeersAnswer(tuple(sorted(chosen, key=lambda place: place.key))))

    async def ask(self, peer: bytes, wanted: int, least: Scope) -> list[PeerPlace]:
        """What a connected peer tells: at most `wanted` peers, ourselves left out, with addresses that lead far enough."""
        question = encode(PeersQuestion(wanted))
        try:
            with trio.fail_after(ASK_SECONDS):
                said = await self._asking.ask(peer, PEERS_STREAM, question, limits.PEERS_ANSWER_BYTES)
            places = decode(PeersAnswer, said).peers
        except trio.TooSlowError:
            raise HearsayError(f"no answer within {ASK_SECONDS:g} s") from None
        except (RequestError, ProtocolError) as error:
            raise HearsayError(str(error)) from error
        return [
            PeerPlace(place.key, tuple(ways))
            for place in places[:wanted]
            if place.key != self._me
            and (ways := usable(place.addresses, place.key, least=least, most=limits.PEER_ADDRESSES))
        ]
