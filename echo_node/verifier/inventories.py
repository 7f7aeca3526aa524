"""The leader's inventories at a verifier: groups listed, and groups seen.

A group is seen once this verifier has drawn its lot over it. An inventory is acknowledged as soon
as its groups were looked for, and again whenever fewer of them are lacking. It says which of them
were drawn, since the leader uses none of those before their verdicts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from echo_node.runtime.change_signal import ChangeSignal
from protocol import Identity, Inventory, InventoryAck, Opened, seal

SEEN: Final = 65_536
"""Most groups that are remembered as seen."""
KEPT: Final = 256
"""Most inventories with lacking groups that are kept, to be acknowledged again."""


class InventoryLog:
    """Which groups this verifier has drawn lots over, and which inventories lack some."""

    def __init__(self, run: bytes, identity: Identity) -> None:
        self._run = run
        self._identity = identity
        self._seen: OrderedDict[bytes, bool] = OrderedDict()
        """Groups over which lots were drawn, and whether they were drawn."""
        self._incomplete: OrderedDict[bytes, tuple[tuple[bytes, ...], frozenset[bytes]]] = OrderedDict()
        """Groups of inventories, and those of them that the last acknowledgement lacked."""
        self._handled: OrderedDict[bytes, None] = OrderedDict()
        self.changed = ChangeSignal()
        """Notified when groups were seen."""
        self.counts: Counter[str] = Counter()
        """Groups that the leader listed, that were fetched from it, and that it did not serve."""

    def saw(self, group: bytes, *, drawn: bool) -> None:
        """Record that a lot was drawn over a group, and whether a verdict on it follows."""
        self._seen[group] = drawn
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        self.changed.notify()

    def has_seen(self, group: bytes) -> bool:
        return group in self._seen

    def missing(self, groups: Iterable[bytes]) -> list[bytes]:
        """Return the groups over which no lot was drawn yet."""
        return [group for group in groups if group not in self._seen]

    def is_new(self, inventory: Opened[Inventory]) -> bool:
        """Return whether an inventory was not handled before; a replay is handled once."""
        if inventory.id in self._handled:
            return False
        self._handled[inventory.id] = None
        if len(self._handled) > KEPT:
            self._handled.popitem(last=False)
        return True

    def acknowledge(self, inventory: bytes, groups: tuple[bytes, ...]) -> bytes:
        """Return a sealed acknowledgement; keep the inventory while groups lack."""
        lacking = self.missing(groups)
        self._incomplete.pop(inventory, None)
        if lacking:
            self._incomplete[inventory] = (groups, frozenset(lacking))
            if len(self._incomplete) > KEPT:
                self._incomplete.popitem(last=False)
        drawn = [group for group in groups if self._seen.get(group)]
        ack = InventoryAck(drawn=b"".join(drawn), inventory=inventory, lacking=b"".join(lacking))
        return seal(ack, self._identity, self._run)

    def acknowledge_again(self) -> list[bytes]:
        """Return new acknowledgements of inventories that now lack fewer groups."""
        better = {
            inventory: groups
            for inventory, (groups, lacking) in self._incomplete.items()
            if any(group in self._seen for group in lacking)
        }
        return [self.acknowledge(inventory, groups) for inventory, groups in better.items()]
