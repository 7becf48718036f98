"""A sequence's keys and values in the layout of attention's designs, in a resident buffer object.

A view holds key tiles base..base + tiles of one slot of one cache. A pass brings what it has appended to the cache (its
own rows' positions), and what the view lacks; nothing else of the cache is read. Of a layer with a window the view
slides by whole tiles when its end is reached, and keeps what is still seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hybrid.kernels.npu.designs.attention import Attention
from hybrid.kernels.npu.layout import bf16, int8_rows
from hybrid.kernels.npu.resident import Resident


class KeyView:
    """Of the cache (k, v), each [blocks, positions of a block, heads, D], for designs of `shape`, whose `tiles` is the
    capacity in key tiles. Positions base * LK to `end` are the cache's."""

    def __init__(self, k: np.ndarray, v: np.ndarray, shape: Attention, room: Resident) -> None:
        self.k, self.v, self.shape, self.room = k, v, shape, room
        self.base = self.end = 0
        self.stale: set[int] = set()
        """Blocks of the cache that were written by something else than a pass."""
        self._table = np.full(0, -1, np.int64)
        room.bytes.fill(0)  # masked by the kernel, which needs numbers that are finite
        room.changed(0, room.bytes.size, 0)
        a, i8 = shape, shape.scores == "i8"
        tiles = room.bytes.reshape(a.heads, a.tiles, a.key_bytes)
        width, rows, codes = (1, 8, np.int8) if i8 else (2, 4, np.uint16)
        keys, scales = a.LK * a.D * width, 4 * a.LK if i8 else 0
        self._k = _cut(tiles[..., :keys].view(codes), rows, 8, a)
        self._s = tiles[..., keys : keys + scales].view(np.float32).transpose(1, 2, 0) if i8 else None
        self._v = _cut(tiles[..., keys + scales :].view(np.uint16), 8, 4, a)
        self._tiles = tiles

    def forget(self) -> None:
        """Nothing that it holds is known to be the cache's any more."""
        self.base = self.end = 0
        self.stale.clear()

    def update(self, table: np.ndarray, first: int, appended: int, length: int) -> None:
        """Hold key tiles `first` on to position `length` - 1 of the sequence whose blocks `table` names; `appended`:
        the first position that this pass has written. ValueError for more than the view holds."""
        lk, size = self.shape.LK, self.k.shape[1]
        if -(-length // lk) - first > self.shape.tiles:
            raise ValueError(f"key tiles {first} to {-(-length // lk)} do not fit a view of {self.shape.tiles}")
        if first < self.base or first * lk >= self.end:
            self.base, self.end = first, first * lk
        elif -(-length // lk) - self.base > self.shape.tiles:
            self._slide(first)
        begin = min(self.end, max(appended, self.base * lk))
        blocks = np.asarray(table[: -(-length // size)], np.int64)
        held = np.arange(self.base * lk // size, -(-begin // size))  # blocks of what is there already
        if begin > self.base * lk:
            other = self._table[held] != blocks[held]
            if self.stale:
                other |= np.isin(blocks[held], list(self.stale))
            if other.any():
                begin = max(self.base * lk, int(held[other][0]) * size)
        self.stale.clear()
        self._table = blocks.copy()
        self._append(blocks, begin, length)
        self.end = length

    def _slide(self, first: int) -> None:
        kept = -(-self.end // self.shape.LK) - first
        self._tiles[:, :kept] = self._tiles[:, first - self.base : first - self.base + kept]
        self.base = first
        self._changed(0, kept, self.shape.key_bytes * kept)

    def _append(self, blocks: np.ndarray, begin: int, length: int) -> None:
        """Positions begin..length out of their blocks: whole tiles at once, the rest row by row."""
        a, size = self.shape, self.k.shape[1]
        where = np.arange(begin, length)
        at = blocks[where // size], where % size
        times = a.heads // self.k.shape[2]
        k, v = self.k[at].astype(np.float32), bf16(self.v[at])
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        if self._s is not None:
            codes, scales = int8_rows(k.reshape(-1, a.D))
            parts += [(self._k, codes.reshape(k.shape)), (self._s, scales.reshape(k.shape[:2]))]
        else:
            parts.append((self._k, bf16(k)))
        parts.append((self._v, v))
        for target, value in parts:
            rows = np.repeat(value, times, axis=1) if times > 1 else value
            self._put(target, rows, begin, length)
        first, last = begin // a.LK - self.base, -(-length // a.LK) - self.base
        self._changed(first, last, a.key_bytes * (length - begin) // a.LK)

    def _put(self, target: np.ndarray, rows: np.ndarray, begin: int, length: int) -> None:
        """rows [positions, heads, ...] into a target [tiles, ..., heads, ...]."""
        a, r = self.shape, target.shape[2] if target.ndim == 6 else self.shape.LK
        offset = self.base * a.LK
        start = min(-(-begin // a.LK) * a.LK, length)
        stop = max(length // a.LK * a.LK, start)
        inner = target.shape[3:] if target.ndim == 6 else target.shape[2:]
        if stop > start:
            whole = target[(start - offset) // a.LK : (stop - offset) // a.LK]
            whole[...] = rows[start - begin : stop - begin].reshape(whole.shape)
        for one, other in ((begin, start), (stop, length)):
            if other > one:
                p = np.arange(one, other) - offset
                index = (p // a.LK, p % a.LK // r, p % r) if target.ndim == 6 else (p // a.LK, p % a.LK)
                target[index] = rows[one - begin : other - begin].reshape(-1, *inner)

    def _changed(self, first: int, last: int, written: int) -> None:
        """Tiles first..last of every head; `written` bytes of each head."""
        a = self.shape
        for h in range(a.heads):
            self.room.changed((h * a.tiles + first) * a.key_bytes, (h * a.tiles + last) * a.key_bytes, written)


def _cut(part: np.ndarray, r: int, c: int, a: Attention) -> np.ndarray:
    """[heads, tiles, LK * D] in r x c tiles as [tiles, LK / r, r, heads, D / c, c]: the same memory."""
    return part.reshape(a.heads, a.tiles, a.LK // r, a.D // c, r, c).transpose(1, 2, 4, 0, 3, 5)


class KeyViews:
    """The views of a device, by cache, slot and kind of scores. room: makes a buffer object that stays."""

    def __init__(self, room: Callable[[int], Resident]) -> None:
        self._room = room
        self._views: dict[tuple[int, int, int, str, int], KeyView] = {}

    def of(self, k: np.ndarray, v: np.ndarray, slot: int, shape: Attention) -> KeyView:
        """The view of a slot, made when it is first asked for; `shape.tiles` is its capacity."""
        key = (k.ctypes.data, v.ctypes.data, slot, shape.scores, shape.tiles)
        if key not in self._views:
            self._views[key] = KeyView(k, v, shape, self._room(shape.heads * shape.tiles * shape.key_bytes))
        return self._views[key]

    def __iter__(self) -> Any:
        return iter(self._views.values())

    def on(self, address: int) -> list[KeyView]:
        """Those of a cache that has its keys or its values at an address."""
        return [view for key, view in self._views.items() if address in key[:2]]

    def keep(self, addresses: Iterable[int]) -> None:
        """Drop the views of all other caches."""
        known = set(addresses)
        self._views = {key: view for key, view in self._views.items() if known.issuperset(key[:2])}

    def clear(self) -> None:
        self._views.clear()
