"""Block tables of sequences that keep their place: which physical block holds a position. All entries of a sequence are
set when it is admitted, so no token needs a host write; a local layer's blocks are a ring, which the table repeats. The
blocks are those of the engine's pools (blocks.py), which scheduled sequences take theirs from as they grow. Sizes:
planning/cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hybrid.core.errors import ContextExceeded, NoFreeSlot
from hybrid.engine.blocks import Blocks
from hybrid.planning.cache import CacheShape


class BlockTables:
    """Host copy of both block tables, int32 [slots, table]. A free slot's entries are stale and must not be used."""

    def __init__(self, shape: CacheShape, blocks: Blocks) -> None:
        self.shape, self.blocks = shape, blocks
        self.tables = {g: np.zeros((shape.slots, shape.table), np.int32) for g in ("global", "local")}
        self.free = list(range(shape.slots - 1, -1, -1))
        """Slots of no sequence; the scheduler takes its own from here too."""
        self.owned: dict[int, dict[str, list[int]]] = {}
        """Slot -> its blocks, of sequences that keep their place."""
        self.make_room: Callable[[], bool] = lambda: False
        """Asked for a slot or blocks where there are none: a scheduled sequence gives its own up, or (False) there is
        none."""

    def admit(self, length: int, slot: int | None = None) -> int:
        """Give a sequence of at most `length` positions a slot and all its blocks; returns the slot."""
        if not 1 <= length <= self.shape.ctx:
            raise ContextExceeded(
                f"a sequence of {length} tokens does not fit in the context of {self.shape.ctx}: "
                "shorten it or load the model with a larger ctx"
            )
        need = -(-length // self.shape.block)
        wanted = {"global": need, "local": min(need, self.shape.ring)}
        while True:
            try:
                slot, blocks = self._taken(slot, {g.name: wanted[g.name] for g in self.blocks.groups})
                break
            except NoFreeSlot:
                if not self.make_room():
                    raise
        self.free.remove(slot)
        self.owned[slot] = blocks
        for group, own in blocks.items():
            self.tables[group][slot] = 0
            self.tables[group][slot, :need] = np.resize(np.array(own, np.int32), need)
        return slot

    def fitting(self, lengths: Sequence[int]) -> int:
        """How many of these sequences, one after another, have a slot and blocks now; at least 1."""
        room = {p.group.name: p.available for p in self.blocks.pools}
        for n, length in enumerate(lengths[: max(1, len(self.free))]):
            need = -(-length // self.shape.block)
            room = {
                name: left - (need if name == "global" else min(need, self.shape.ring)) for name, left in room.items()
            }
            if n and min(room.values()) < 0:
                return n
        return max(1, min(len(lengths), len(self.free)))

    def _taken(self, slot: int | None, wanted: dict[str, int]) -> tuple[int, dict[str, list[int]]]:
        if slot is None:
            if not self.free:
                raise NoFreeSlot(
                    f"all {self.shape.slots} slots are in use by sequences of the engine: end or close what holds one"
                )
            slot = min(self.free)
        if slot not in self.free:
            raise ValueError(f"slot {slot} is in use or outside 0..{self.shape.slots - 1}")
        return slot, self.blocks.reserve(wanted)

    def release(self, slot: int) -> None:
        """Return a sequence's blocks; its slot may be admitted again."""
        blocks = self.owned.pop(slot, None)
        if blocks is None:
            raise ValueError(f"slot {slot} holds no sequence")
        self.blocks.give_back(blocks)
        self.free.append(slot)

    def row(self, group: str, slot: int) -> np.ndarray:
        """The slot's table as int32 [1, table], to write to the device."""
        return self.tables[group][slot : slot + 1].copy()
