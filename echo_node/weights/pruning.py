"""What may go: all blobs but those that a version needs which is still worth having. Decides; removes nothing.

The chain of blobs is cut at an anchor: the newest that is here whole, that enough others hold or one newer than it,
and that is old enough for every version that may still be asked for to be built from it. Whoever follows may have jumped
over it on the way to such a version: then the cut is made at an older one.
"""

from __future__ import annotations

from echo_node.weights.account import account_of
from echo_node.weights.journal import Head
from echo_node.weights.truth import Truth


def needed(truth: Truth, tip: Head | None, *, versions: int, settled: bytes | None) -> set[bytes] | None:
    """Blobs that have to stay. None: all of them, as long as no head in `settled` says that others hold an anchor."""
    chain = truth.journal.follower.heads
    anchor = truth.journal.known.get(settled) if settled is not None else None
    if anchor is None or tip is None or all(tip.id != head.id for head in chain):
        return None
    oldest = min(tip.message.version - versions + 1, anchor.message.version)
    worth = {head.id for head in chain if head.message.version >= oldest and truth.can_build(head.id)}
    first = next(
        (
            at
            for at in range(len(chain) - 1, -1, -1)
            if chain[at].message.version <= oldest
            and (route := chain[at].message.anchor) is not None
            and truth.is_whole(route)
            and worth <= _built_over(truth, chain[at:])
        ),
        None,
    )
    return None if first is None else _leading_to(truth, chain[first:])


def _built_over(truth: Truth, heads: tuple[Head, ...]) -> set[bytes | None]:
    """Which of these heads can be built over no others than these."""
    built: set[bytes | None] = {None}
    for head in heads:
        if any(route.base in built and truth.is_whole(route) for route in head.message.routes):
            built.add(head.id)
    return built


def _leading_to(truth: Truth, heads: tuple[Head, ...]) -> set[bytes]:
    """Everything that leads to these heads from one another, or from an anchor."""
    inside = {None, *(head.id for head in heads)}
    names = {head.message.roster for head in heads}
    names.update(blob for head in heads if (blob := account_of(head.message)) is not None)
    for head in heads:
        for route in head.message.routes:
            if route.base in inside:
                names.update(truth.names_of(route))
    return names
