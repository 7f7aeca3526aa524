"""What the run's verifiers and trainers attest of this sampler's account: asked of each at joining and then rarely, and kept.

So a sampler that comes back with nothing but its key, from paper, finds again what it has earned. Only keys of the manifest are
asked and believed, each about what is its own to say; what was signed stays on disk. It counts nothing itself.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.base import Network
from echo_node.run import Run
from echo_node.weights import disk
from protocol import (
    CreditStatement,
    Identity,
    Opened,
    ProtocolError,
    limits,
    open_statement,
    peer_id,
    read_batch,
    topics,
    write_batch,
)

log = logging.getLogger(__name__)
ASK_SECONDS: Final = 10.0
AT_ONCE: Final = 4
"""Peers that are asked together."""
EVERY_SECONDS: Final = 1_800.0
"""Between two questions to one who has answered; half as long to half as long again."""
PAUSES: Final = (2.0, 5.0, 15.0, 60.0, 300.0)
"""Before somebody is asked again who has not answered: it may only just have begun, or be an older program."""
SETTLE_SECONDS: Final = 2.0
"""After somebody has come who was not there: within so long, at a moment of one's own, it is asked."""
SHOWN: Final = 16
"""Of those who attest something."""
_MOST: Final = limits.SMALL_BYTES + limits.ENVELOPE_BYTES
_FILE_BYTES: Final = 2 * limits.KEYS * (_MOST + 8)


class Attested:
    """What others attest to one sampler of one run. `file` is where it is kept."""

    def __init__(self, run: Run, sampler: Identity, file: Path) -> None:
        self._run = run
        self._me = sampler.public
        self._file = file
        self._luck = random.Random(sampler.public)  # noqa: S311 - spreads questions, keeps no secret
        self._places = trio.CapacityLimiter(AT_ONCE)
        self._writing = trio.Lock()
        told = run.told
        self._asked = [key for key in dict.fromkeys((*told.verifiers, *told.trainers)) if key != self._me]
        self._came = {key: trio.Event() for key in self._asked}
        self._kept = self._read()

    def status(self) -> dict[str, Any]:
        """The most that one verifier has verified and one trainer has learnt from, and what each of them says.

        Nothing is added up, since two may have looked at the same groups; and nobody counts beyond its role.
        """
        told = self._run.told
        by = [(key, self._kept[key].message) for key in self._asked if key in self._kept]
        tokens, groups = max(
            ((each.tokens, each.verified) for key, each in by if key in told.verifiers), default=(0, 0)
        )
        return {
            "tokens": tokens,
            "groups": groups,
            "learnt": max((each.learnt for key, each in by if key in told.trainers), default=0),
            "by": [self._plain(key, each) for key, each in by[:SHOWN]],
        }

    async def work(self, network: Network) -> None:
        """Ask, and ask again, until cancelled."""
        async with network.watch() as events, trio.open_nursery() as nursery:
            for peer in self._asked:
                nursery.start_soon(self._keep_asking, network, peer)
            async for event in events:
                if event.joined and event.public in self._came:
                    self._came[event.public].set()

    async def ask(self, network: Network, peer: bytes) -> None:
        """Have one peer's statement, or say why not: a `PeerError`, or a `ProtocolError` for which it is scored."""
        async with self._places:
            sealed = await network.request(
                peer, topics.CREDIT_STREAM, self._run.id, deadline=ASK_SECONDS, most=_MOST
            )
        try:
            said = open_statement(sealed, self._run.id, signer=peer, sampler=self._me)
        except ProtocolError as error:
            network.score(peer, error.reason)
            raise
        if _forgets(said.message, self._kept.get(peer)):
            log.info("%s has forgotten what it attested before, which stands", peer_id(peer))
            return
        await self._keep(peer, said)

    async def _keep_asking(self, network: Network, peer: bytes) -> None:
        failures = 0
        while True:
            came = self._came[peer] = trio.Event()
            pause = EVERY_SECONDS
            try:
                await self.ask(network, peer)
                failures = 0
            except PeerError as error:
                log.debug("no account from %s: %s", peer_id(peer), error)
                pause = (*PAUSES, EVERY_SECONDS)[min(failures, len(PAUSES))]
                failures += 1
            except ProtocolError as error:  # to ask it more often would not make it honest
                log.info("an account that is none from %s: %s", peer_id(peer), error)
                failures = 0
            with trio.move_on_after(pause * (0.5 + self._luck.random())):
                if not failures:
                    await trio.sleep_forever()
                await came.wait()
                await trio.sleep(self._luck.random() * SETTLE_SECONDS)  # it may serve nothing yet
                failures = 0

    def _plain(self, key: bytes, told: CreditStatement) -> dict[str, Any]:
        roles = [
            name
            for name, keys in (("verifier", self._run.told.verifiers), ("trainer", self._run.told.trainers))
            if key in keys
        ]
        return {
            "peer_id": peer_id(key),
            "role": " and ".join(roles),
            "tokens": told.tokens,
            "groups": told.verified,
            "learnt": told.learnt,
            "condemned": told.condemned,
            "refused": {each.reason: each.groups for each in told.refused},
            "since": told.since_ms / 1000,
            "at": told.at_ms / 1000,
        }

    # On disk

    def _read(self) -> dict[bytes, Opened[CreditStatement]]:
        """What is there of this sampler. Whatever is wrong with it, it can be asked for again."""
        found: dict[bytes, Opened[CreditStatement]] = {}
        if not self._file.exists():
            return found
        try:
            for each in read_batch(disk.read_whole(self._file, _FILE_BYTES), most=_FILE_BYTES):
                if each.signer in self._came:
                    found[each.signer] = open_statement(
                        each.sealed, self._run.id, signer=each.signer, sampler=self._me
                    )
        except (StoreError, ProtocolError) as error:
            log.warning("what others attested is asked for again: %s", error)
        return found

    async def _keep(self, peer: bytes, said: Opened[CreditStatement]) -> None:
        """On disk before it is shown. Where that cannot be, a restart has to ask again, which is no reason to end."""

        def write() -> None:
            disk.write_whole(self._file, data, durable=True)
            disk.sync_folder(self._file.parent, durable=True)

        async with self._writing:
            kept = {**self._kept, peer: said}
            data = write_batch([each.sealed for each in kept.values()], most=_FILE_BYTES)
            try:
                await trio.to_thread.run_sync(write)
            except StoreError as error:
                log.warning("what others attested is not kept: %s", error)
            self._kept = kept


def _forgets(said: CreditStatement, before: Opened[CreditStatement] | None) -> bool:
    """Whether the signer has lost its files: to condemn or refuse a group moves it, and the groups in all grow no fewer."""
    return before is not None and _groups(said) < _groups(before.message)


def _groups(told: CreditStatement) -> int:
    return told.verified + told.learnt + told.condemned + sum(each.groups for each in told.refused)
