"""Log of the chain on disk: heads and grants in the order of their arrival.

Each is an immutable file, synced before it counts. Opening the log takes them again by the same
rules, with every signature checked, and so ends where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from echo_node.errors import StoreError, boundary
from echo_node.storage import files
from protocol import (
    Equivocation,
    Follower,
    Opened,
    Rules,
    TermGrant,
    WeightsHead,
    canonical,
    decode,
    encode,
    open_sealed,
)

Head: TypeAlias = Opened[WeightsHead]
Floor: TypeAlias = tuple[int, int, bytes]
"""Term, version and id of the head at which a chain begins, as a link says."""
ENTRY_BYTES: Final = 16 * 1024 * 1024
_DIGITS: Final = 12
_ADVICE: Final = "is it another run's? else move the store away, and this node fetches what it needs"


class ChainLog:
    """Chain as this node took it. What the rules refuse raises, and is not written."""

    def __init__(self, folder: Path, rules: Rules, floor: Floor | None, *, durable: bool) -> None:
        self._folder = folder
        self._rules = rules
        self._durable = durable
        self._count = 0
        self.known: dict[bytes, Head] = {}
        """Every head ever taken, also those of abandoned branches."""
        self.follower = Follower.newcomer(rules, floor)
        self._replay(floor)

    def keep_head(self, head: Head) -> bool:
        """Take a head: append it, or convict its signer by it.

        Return False if nothing changed.
        """
        after = self.follower.accept(head)
        if after is self.follower:
            return False
        self._write("head", head.sealed)
        self._took(after, (head,))
        return True

    def keep_grant(self, grant: TermGrant, branch: Sequence[Head] = ()) -> None:
        """Enter the next term."""
        after = self.follower.grant(grant, branch)
        self._write("grant", encode(grant), [head.sealed for head in branch])
        self._took(after, branch)

    def keep_proof(self, proof: Equivocation) -> bool:
        """Convict a key of two conflicting heads; return False if it was convicted before."""
        after = self.follower.convict(proof)
        if after is self.follower:
            return False
        self._write("proof", proof.first.sealed, proof.second.sealed)
        self._took(after, ())
        return True

    def _took(self, after: Follower, heads: Sequence[Head]) -> None:
        self.follower = after
        self.known |= {head.id: head for head in heads}

    def _write(self, kind: str, *values: Any) -> None:
        """Write the next entry. After a disk failure the next one takes its place.

        Nobody has heard of the failed one.
        """
        data = canonical.encode([kind, *values], most=ENTRY_BYTES)
        path = self._folder / f"{self._count:0{_DIGITS}}"
        try:
            files.write_whole(path, data, durable=self._durable)
            files.sync_folder(self._folder, durable=self._durable)
        except StoreError:
            with suppress(StoreError):
                files.remove(path)
            raise
        self._count += 1

    def _replay(self, floor: Floor | None) -> None:
        entries = sorted(path for path in self._folder.iterdir() if path.suffix != files.BESIDE)
        if not entries and floor:
            self._write("floor", *floor)
            return
        for number, path in enumerate(entries):
            if path.name != f"{number:0{_DIGITS}}":
                raise StoreError(f"entry {number} of the chain in {self._folder} is missing", advice=_ADVICE)
            with boundary(StoreError, f"taking {path} again", advice=_ADVICE):
                entry: Any = canonical.decode(files.read_whole(path, ENTRY_BYTES), most=ENTRY_BYTES)
                self._take(*entry)
            self._count += 1

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "head":
            head = self._opened(*values)
            self._took(self.follower.accept(head), (head,))
        elif kind == "grant":
            grant, sealed = values
            branch = [self._opened(each) for each in sealed]
            self._took(self.follower.grant(decode(TermGrant, grant), branch), branch)
        elif kind == "proof":
            first, second = map(self._opened, values)
            self._took(self.follower.convict(Equivocation(first, second)), ())
        elif kind == "floor":
            term, version, head_id = values
            self.follower = Follower.newcomer(self._rules, (term, version, head_id))
        else:
            raise StoreError(f"an entry of the kind {kind[:16]!r}, which this program does not write")

    def _opened(self, sealed: bytes) -> Head:
        return open_sealed(sealed, WeightsHead, self._rules.run)
