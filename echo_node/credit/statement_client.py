"""Client of credit statements, signed by verifiers and trainers.

Each is asked at the start and then rarely, and its signed statement is kept on disk. A sampler
restored from its paper key alone thus finds what it has earned. Only keys of the manifest are
asked, each within its own role.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.base import Network
from echo_node.runs.run import Run
from echo_node.storage import files
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
"""Seconds for one request."""
AT_ONCE: Final = 4
"""Concurrent requests."""
EVERY_SECONDS: Final = 1_800.0
"""Mean seconds between two requests to a peer that answers, jittered by half."""
PAUSES: Final = (2.0, 5.0, 15.0, 60.0, 300.0)
"""Seconds before a failed request is repeated: the peer may be starting, or an older program."""
SETTLE_SECONDS: Final = 2.0
"""Longest random delay, in seconds, before a peer that just connected is asked."""
SHOWN: Final = 16
"""Statements listed in the status."""
_MOST: Final = limits.SMALL_BYTES + limits.ENVELOPE_BYTES
"""Bytes of a sealed statement."""
_FILE_BYTES: Final = 2 * limits.KEYS * (_MOST + 8)
"""Bytes of the file that holds all statements."""


class StatementClient:
    """Statements about one sampler of one run, kept in `file`."""

    def __init__(self, run: Run, sampler: Identity, file: Path) -> None:
        self._run = run
        self._me = sampler.public
        self._file = file
        self._luck = random.Random(sampler.public)  # noqa: S311 - spreads questions, keeps no secret
        self._places = trio.CapacityLimiter(AT_ONCE)
        self._writing = trio.Lock()
        roles = (*run.manifest.verifiers, *run.manifest.trainers)
        self._asked = [key for key in dict.fromkeys(roles) if key != self._me]
        self._came = {key: trio.Event() for key in self._asked}
        self._kept = self._read()

    def status(self) -> dict[str, Any]:
        """Return the highest verifier's and trainer's figures, and each statement.

        Nothing is summed, since two may have checked the same groups; no peer counts beyond its
        role.
        """
        manifest = self._run.manifest
        by = [(key, self._kept[key].message) for key in self._asked if key in self._kept]
        tokens, groups = max(
            ((each.tokens, each.verified) for key, each in by if key in manifest.verifiers), default=(0, 0)
        )
        return {
            "tokens": tokens,
            "groups": groups,
            "learnt": max((each.learnt for key, each in by if key in manifest.trainers), default=0),
            "by": [self._to_json(key, each) for key, each in by[:SHOWN]],
        }

    async def work(self, network: Network) -> None:
        """Request statements repeatedly, until cancelled."""
        async with network.watch() as events, trio.open_nursery() as nursery:
            for peer in self._asked:
                nursery.start_soon(self._keep_asking, network, peer)
            async for event in events:
                if event.joined and event.public in self._came:
                    self._came[event.public].set()

    async def ask(self, network: Network, peer: bytes) -> None:
        """Fetch and keep one peer's statement.

        Raises `PeerError`, or `ProtocolError`, for which the peer is scored.
        """
        async with self._places:
            sealed = await network.request(
                peer, topics.CREDIT_STREAM, self._run.id, deadline=ASK_SECONDS, most=_MOST
            )
        try:
            statement = open_statement(sealed, self._run.id, signer=peer, sampler=self._me)
        except ProtocolError as error:
            network.score(peer, error.reason)
            raise
        if _is_regression(statement.message, self._kept.get(peer)):
            log.info("%s attests fewer groups than before: the earlier statement is kept", peer_id(peer))
            return
        await self._keep(peer, statement)

    async def _keep_asking(self, network: Network, peer: bytes) -> None:
        failures = 0
        while True:
            came = self._came[peer] = trio.Event()
            pause = EVERY_SECONDS
            try:
                await self.ask(network, peer)
                failures = 0
            except PeerError as error:
                log.debug("no statement from %s: %s", peer_id(peer), error)
                pause = (*PAUSES, EVERY_SECONDS)[min(failures, len(PAUSES))]
                failures += 1
            except ProtocolError as error:  # to ask it more often would not make it honest
                log.info("invalid statement from %s: %s", peer_id(peer), error)
                failures = 0
            with trio.move_on_after(pause * (0.5 + self._luck.random())):
                if not failures:
                    await trio.sleep_forever()
                await came.wait()
                await trio.sleep(self._luck.random() * SETTLE_SECONDS)  # it may serve nothing yet
                failures = 0

    def _to_json(self, key: bytes, statement: CreditStatement) -> dict[str, Any]:
        roles = [
            name
            for name, keys in (
                ("verifier", self._run.manifest.verifiers),
                ("trainer", self._run.manifest.trainers),
            )
            if key in keys
        ]
        return {
            "peer_id": peer_id(key),
            "role": " and ".join(roles),
            "tokens": statement.tokens,
            "groups": statement.verified,
            "learnt": statement.learnt,
            "condemned": statement.condemned,
            "refused": {each.reason: each.groups for each in statement.refused},
            "since": statement.since_ms / 1000,
            "at": statement.at_ms / 1000,
        }

    # On disk

    def _read(self) -> dict[bytes, Opened[CreditStatement]]:
        """Read the kept statements; ignore a damaged file, since all can be refetched."""
        found: dict[bytes, Opened[CreditStatement]] = {}
        if not self._file.exists():
            return found
        try:
            for each in read_batch(files.read_whole(self._file, _FILE_BYTES), most=_FILE_BYTES):
                if each.signer in self._came:
                    found[each.signer] = open_statement(
                        each.sealed, self._run.id, signer=each.signer, sampler=self._me
                    )
        except (StoreError, ProtocolError) as error:
            log.warning("kept statements not readable, fetching them again: %s", error)
        return found

    async def _keep(self, peer: bytes, statement: Opened[CreditStatement]) -> None:
        """Write a statement to disk, then show it.

        If that fails, a restart fetches it again.
        """

        def write() -> None:
            files.write_whole(self._file, data, durable=True)
            files.sync_folder(self._file.parent, durable=True)

        async with self._writing:
            kept = {**self._kept, peer: statement}
            data = write_batch([each.sealed for each in kept.values()], most=_FILE_BYTES)
            try:
                await trio.to_thread.run_sync(write)
            except StoreError as error:
                log.warning("statement not written to disk: %s", error)
            self._kept = kept


def _is_regression(statement: CreditStatement, before: Opened[CreditStatement] | None) -> bool:
    """Return whether the signer counts fewer groups than before.

    That looks as if it had lost its files. Condemning or refusing a group moves it between sums, so
    the total never falls otherwise.
    """
    return before is not None and _groups(statement) < _groups(before.message)


def _groups(statement: CreditStatement) -> int:
    refused = sum(each.groups for each in statement.refused)
    return statement.verified + statement.learnt + statement.condemned + refused
