"""What this node has heard and taken of the chain, on disk in the order in which it was taken. Knows no weights.

Each head and grant is a file that never changes, synced before it counts. Opening the journal takes them again, one
after the other, by the same rules and with every signature checked, and so ends where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from echo_node.errors import StoreError, boundary
from echo_node.weights import disk
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


class Journal:
    """The chain as this node took it. What is refused raises, and is not written."""

    def __init__(self, folder: Path, rules: Rules, floor: Floor | None, *, durable: bool) -> None:
        self._folder = folder
        self._rules = rules
        self._durable = durable
        self._count = 0
        self.known: dict[bytes, Head] = {}
        """Every head that was ever taken, those of branches too that were left."""
        self.follower = Follower.newcomer(rules, floor)
        self._replay(floor)

    def keep_head(self, head: Head) -> bool:
        """Take a head: append it, or convict its signer by it. False: it changes nothing."""
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
        """Convict a key of two heads that somebody else heard. False: it was convicted."""
        after = self.follower.convict(proof)
        if after is self.follower:
            return False
        self._write("proof", proof.first.sealed, proof.second.sealed)
        self._took(after, ())
        return True

    def _took(self, after: Follower, heads: Sequence[Head]) -> None:
        self.follower = after
        self.known |= {head.id: head for head in heads}

    def _write(self, kind: str, *told: Any) -> None:
        """The next entry. If the disk fails, what is taken next stands in its place: nobody has heard of this one."""
        data = canonical.encode([kind, *told], most=ENTRY_BYTES)
        path = self._folder / f"{self._count:0{_DIGITS}}"
        try:
            disk.write_whole(path, data, durable=self._durable)
            disk.sync_folder(self._folder, durable=self._durable)
        except StoreError:
            with suppress(StoreError):
                disk.remove(path)
            raise
        self._count += 1

    def _replay(self, floor: Floor | None) -> None:
        entries = sorted(path for path in self._folder.iterdir() if path.suffix != disk.BESIDE)
        if not entries and floor:
            self._write("floor", *floor)
            return
        for number, path in enumerate(entries):
            if path.name != f"{number:0{_DIGITS}}":
                raise StoreError(f"entry {number} of the chain in {self._folder} is missing", advice=_ADVICE)
            with boundary(StoreError, f"taking {path} again", advice=_ADVICE):
                entry: Any = canonical.decode(disk.read_whole(path, ENTRY_BYTES), most=ENTRY_BYTES)
                self._take(*entry)
            self._count += 1

    def _take(self, kind: str, *told: Any) -> None:
        if kind == "head":
            head = self._opened(*told)
            self._took(self.follower.accept(head), (head,))
        elif kind == "grant":
            grant, sealed = told
            branch = [self._opened(each) for each in sealed]
            self._took(self.follower.grant(decode(TermGrant, grant), branch), branch)
        elif kind == "proof":
            first, second = map(self._opened, told)
            self._took(self.follower.convict(Equivocation(first, second)), ())
        elif kind == "floor":
            term, version, head_id = told
            self.follower = Follower.newcomer(self._rules, (term, version, head_id))
        else:
            raise StoreError(f"an entry of the kind {kind[:16]!r}, which this program does not write")

    def _opened(self, sealed: bytes) -> Head:
        return open_sealed(sealed, WeightsHead, self._rules.run)
