"""Block tables of the KV cache: which physical block holds a position of a sequence.

All table entries of a sequence are set when it is admitted: no token needs a host write. Sizes: planning/cache.py.
"""

from __future__ import annotations

import numpy as np

from hybrid.core.errors import ContextExceeded, NoFreeSlot
from hybrid.planning.cache import CacheShape


class BlockPool:
    """Free physical blocks of one group, handed out lowest first."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks - 1, -1, -1))

    def take(self, n: int) -> list[int]:
        if n > len(self.free):
            raise NoFreeSlot(f"the KV cache has {len(self.free)} free blocks, the sequence needs {n}")
        return [self.free.pop() for _ in range(n)]

    def give(self, blocks: list[int]) -> None:
        self.free.extend(sorted(blocks, reverse=True))


class BlockTables:
    """Host copy of both block tables, int32 [slots, table]. A free slot's entries are 0 and must not be used."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.tables = {g: np.zeros((shape.slots, shape.table), np.int32) for g in ("global", "local")}
        self._pools = {"global": BlockPool(shape.global_blocks), "local": BlockPool(shape.local_blocks)}
        self._owned: dict[int, dict[str, list[int]]] = {}

    def admit(self, length: int, slot: int | None = None) -> int:
        """Give a sequence of at most `length` positions a slot and all its blocks; returns the slot."""
        if not 1 <= length <= self.shape.ctx:
            raise ContextExceeded(
                f"a sequence of {length} tokens does not fit in the context of {self.shape.ctx}: "
                "shorten it or load the model with a larger ctx"
            )
        if slot is None:
            slot = next((s for s in range(self.shape.slots) if s not in self._owned), None)
            if slot is None:
                raise NoFreeSlot(
                    f"all {self.shape.slots} slots are in use: end or close the generation or session that holds one"
                )
        if slot in self._owned or not 0 <= slot < self.shape.slots:
            raise ValueError(f"slot {slot} is in use or outside 0..{self.shape.slots - 1}")
        need = -(-length // self.shape.block)
        wanted = {"global": need, "local": min(need, self.shape.ring)}
        blocks = {group: self._pools[group].take(n) for group, n in wanted.items()}  # a free slot's are always there
        self._owned[slot] = blocks
        for group, own in blocks.items():
            self.tables[group][slot] = 0
            self.tables[group][slot, :need] = np.resize(np.array(own, np.int32), need)
        return slot

    def release(self, slot: int) -> None:
        """Return a sequence's blocks; its slot may be admitted again."""
        blocks = self._owned.pop(slot, None)
        if blocks is None:
            raise ValueError(f"slot {slot} holds no sequence")
        for group, own in blocks.items():
            self._pools[group].give(own)

    def row(self, group: str, slot: int) -> np.ndarray:
        """The slot's table as int32 [1, table], to write to the device."""
        return self.tables[group][slot : slot + 1].copy()
