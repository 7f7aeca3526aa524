"""Client of a generate call: requests and updates in, completions out.

Answers what `worker.main` asks for while it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from echo_node.engine.base import (
    EngineStoppedError,
    Finished,
    Respond,
    SlotRequest,
    TurnEnd,
    Update,
    no_environment,
)
from echo_node.engine.worker.partial_draws import PartialDraws
from echo_node.engine.worker.rpc import RpcCall
from echo_node.engine.worker.serde import (
    pack_change,
    pack_reply,
    pack_request,
    unpack_finished,
    unpack_prefix,
    unpack_turn,
)
from echo_node.runtime.ipc import Message, PipeError, field

_ASK_SECONDS: Final = 0.1
"""Most seconds between two calls of `stop`."""


class GenerateCall:
    """Generate one batch; `updated` is called when an update is in.

    `partial` keeps what is drawn meanwhile.
    """

    def __init__(
        self,
        call: RpcCall,
        source: Iterator[SlotRequest],
        news: Callable[[], Update | None],
        updated: Callable[[Message], None],
        partial: PartialDraws,
        respond: Respond = no_environment,
    ) -> None:
        self._partial = partial
        self._sizes: list[int] = []
        """Completions of each request."""
        self._call = call
        self._source = source
        self._news = news
        self._updated = updated
        self._respond = respond
        self._ended: list[TurnEnd] = []
        """Turns that ended, until the word that they are to be answered."""
        self._update: Update | None = None
        """Update that is being sent."""

    def until(self, stop: Callable[[], bool]) -> Iterator[Finished]:
        """Completions as they end, up to the last, or to `EngineStoppedError`."""
        while True:
            if stop():
                raise EngineStoppedError("generation was stopped by whoever asked for it")
            message = self._call.hear(_ASK_SECONDS)
            if message is None:
                continue
            self._call.check(message)
            if message["kind"] == "finished":
                finished = unpack_finished(message)
                self._partial.finish(finished, self._sizes[finished.request])
                yield finished
            elif message["kind"] == "idle":
                if self._update is None:
                    return
            else:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        match message["kind"]:
            case "room":
                self._call.say("go", more=self._send_requests(field(message, "room", int)))
            case "partial":
                self._partial.add(field(message, "request", int), unpack_prefix(message))
            case "turn" | "turns?":
                self._take_turn(message)
            case "going":
                if self._update is None and field(message, "updatable", bool):
                    self._update = self._news()
                    if self._update is not None:
                        self._call.say("update", since=self._update.since, head_id=self._update.head_id)
            case "changes?" if self._update is not None:
                send_changes(self._call, self._update, message)
            case "updated":
                self._update = None
                self._updated(message)
            case other:
                raise PipeError(f"it sent {other!r} while generating")

    def _take_turn(self, message: Message) -> None:
        """Collect turns that ended; answer them together at the word that they are all."""
        if message["kind"] == "turn":
            self._ended.append(unpack_turn(message))
            return
        ended, self._ended = self._ended, []
        for turn, reply in zip(ended, self._respond(ended), strict=True):
            self._call.say("reply", **pack_reply(turn, reply))

    def _send_requests(self, room: int) -> bool:
        """Send as many requests as there is room for. Whether there may be more."""
        while room > 0:
            request = next(self._source, None)
            if request is None:
                return False
            self._sizes.append(request.group_size)
            self._call.say("request", **pack_request(self._partial.resumed(request)))
            room -= max(1, request.group_size)
        return True


def send_changes(call: RpcCall, update: Update, message: Message) -> None:
    """Send what an update changes, in the runs that the other side asked for."""
    granule = field(message, "granule", int)
    if granule < 1:
        raise PipeError(f"it wants changes in runs of {granule}")
    with update.changes(granule) as changes:
        call.send_all("change", (part for change in changes for part in pack_change(change, granule)))
