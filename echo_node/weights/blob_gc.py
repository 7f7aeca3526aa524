"""Choose the blobs that must be kept; removes nothing.

The chain of blobs is cut at an anchor: the newest that is complete here, that enough others hold
(or a newer one), and that is old enough to build every version still asked for. A follower may have
jumped over it on the way to such a version: then the cut is at an older anchor.
"""

from __future__ import annotations

from collections.abc import Collection

from echo_node.weights.chain_log import Head
from echo_node.weights.provenance_record import provenance_blob
from echo_node.weights.version_archive import NoWayError, VersionArchive


def needed(
    archive: VersionArchive,
    tip: Head | None,
    *,
    versions: int,
    settled: bytes | None,
    pinned: Collection[bytes] = (),
) -> set[bytes] | None:
    """Return the blobs to keep; None keeps all.

    All are kept while `settled` names no anchor that others hold. `pinned` are heads of older
    versions that must stay buildable.
    """
    chain = archive.journal.follower.heads
    anchor = archive.journal.known.get(settled) if settled is not None else None
    if anchor is None or tip is None or all(tip.id != head.id for head in chain):
        return None
    oldest = min(tip.message.version - versions + 1, anchor.message.version)
    worth = {head.id for head in chain if head.message.version >= oldest and archive.can_build(head.id)}
    first = next(
        (
            at
            for at in range(len(chain) - 1, -1, -1)
            if chain[at].message.version <= oldest
            and (route := chain[at].message.anchor) is not None
            and archive.is_whole(route)
            and worth <= _built_over(archive, chain[at:])
        ),
        None,
    )
    if first is None:
        return None
    kept = _leading_to(archive, chain[first:])
    return kept.union(*(_way_to(archive, head) for head in pinned))


def _way_to(archive: VersionArchive, head_id: bytes) -> set[bytes]:
    """Return the blobs of the cheapest way to a version; none if there is no way."""
    try:
        way = archive.way(head_id)
    except NoWayError:
        return set()
    names = {each for step in way for each in archive.names_of(step.route)}
    return names | {step.head.message.roster for step in way}


def _built_over(archive: VersionArchive, heads: tuple[Head, ...]) -> set[bytes | None]:
    """Return which of these heads can be built over these heads alone."""
    built: set[bytes | None] = {None}
    for head in heads:
        if any(route.base in built and archive.is_whole(route) for route in head.message.routes):
            built.add(head.id)
    return built


def _leading_to(archive: VersionArchive, heads: tuple[Head, ...]) -> set[bytes]:
    """Return all blobs that lead to these heads from each other or from an anchor."""
    inside = {None, *(head.id for head in heads)}
    names = {head.message.roster for head in heads}
    names.update(blob for head in heads if (blob := provenance_blob(head.message)) is not None)
    for head in heads:
        for route in head.message.routes:
            if route.base in inside:
                names.update(archive.names_of(route))
    return names
