"""Window of versions that a verifier holds, under which groups are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from echo_node.errors import PeerError
from echo_node.weights.chain_log import Head
from echo_node.weights.puller import Puller


async def pull_window(puller: Puller, heads: Sequence[Head]) -> list[Head]:
    """Pull the last of consecutive heads and those before; return the buildable.

    A sampler needs only the newest version; a verifier needs each that groups may be drawn under.
    A version that was jumped over cannot be built later, so a verifier that is a few behind pulls
    one after the other; one that is further behind jumps.
    """
    for head in _missing(puller.held, heads):
        try:
            await puller.pull(head.id)
        except PeerError:
            break  # a version that nobody has any longer must not block the newest
    await puller.pull(heads[-1].id)
    return await puller.buildable(heads)


def _missing(held: Head | None, heads: Sequence[Head]) -> Sequence[Head]:
    """Return the heads after `held`, if it is in or just before the window."""
    known = {each.id for each in heads} | {heads[0].message.previous}
    if held is None or held.id not in known:
        return ()
    return [each for each in heads[:-1] if each.message.version > held.message.version]
