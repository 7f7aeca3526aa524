"""Of which versions a verifier can look at groups: it takes each that groups may be drawn under, where a sampler is content with
the newest.

Whoever jumps over a version has nothing to build it from later. One that is a few behind takes them one after the other; one
that is further behind jumps, and says which it has missed. It knows no groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo_node.errors import PeerError
from echo_node.weights.journal import Head
from echo_node.weights.pull import Puller


async def hold(puller: Puller, heads: Sequence[Head]) -> list[Head]:
    """Hold the last of these heads, which follow each other, and come by the others; those whose state can be built."""
    for head in _between(puller.held, heads):
        try:
            await puller.pull(head.id)
        except PeerError:
            break  # what nobody has any longer must not keep it from the newest
    await puller.pull(heads[-1].id)
    return await puller.buildable(heads)


def _between(held: Head | None, heads: Sequence[Head]) -> Sequence[Head]:
    """The heads between the one that is held and the last, if it is one of them, or just before them."""
    known = {each.id for each in heads} | {heads[0].message.previous}
    if held is None or held.id not in known:
        return ()
    return [each for each in heads[:-1] if each.message.version > held.message.version]
