"""KV blocks: reference counts, the prefix cache, and eviction.

Every group of layers has its own pool of physical blocks. A block is held (reference count > 0), idle (unreferenced, but
in the prefix cache) or free. Layers with a window hold blocks like others and free those behind the window.

A full block is found by its key, a hash of its tokens chained to the key of the block before, so that a key stands for
everything up to the block's end. A prefix of n blocks can be reused where all n are there in groups that see the whole
context, and the window before position n * block in the others. Whole blocks only: a block that is still written to has
one holder.

Idle blocks are evicted by rank, within a rank least recently used first (a branch from its end):

    0  freed by a window in the middle of a branch
    1  the last window of a prompt or of a branch; all blocks of groups that see the whole context

Plain host code for one thread.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat

from hybrid.planning.cache import CacheShape

Write = tuple[int, int, int, int]
"""A change of a block table: number of the group, slot, index, block."""
RANKS = 2


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables. blocks: physical ones of each layer. window: positions that a row sees, its own
    included; 0: all."""

    name: str
    blocks: int
    window: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"group {self.name}: blocks must be positive, not {self.blocks}")
        if self.window < 0:
            raise ValueError(f"group {self.name}: window must be 0 or more, not {self.window}")

    def first(self, position: int, block: int) -> int:
        """The first block that a row at `position` sees."""
        return max(0, position - self.window + 1) // block if self.window else 0

    def need(self, positions: int, block: int, rows: int = 1) -> int:
        """Blocks that a sequence of so many positions holds at least, while so many of its rows run."""
        whole = -(-positions // block)
        return min(whole, (self.window + rows + block - 3) // block + 1) if self.window else whole


def groups_of(cache: CacheShape) -> tuple[Group, ...]:
    """The groups of a cache: `global`, and `local` where layers have a window."""
    local = (Group("local", cache.local_blocks, cache.window),) if cache.window else ()
    return (Group("global", cache.global_blocks), *local)


@dataclass(slots=True)
class Held:
    """The blocks of one sequence. tables: by group, its block table; entries below `first` are freed. sealed: leading
    blocks with a key in the prefix cache. content, spans: as in Request."""

    tables: list[list[int]]
    first: list[int]
    keys: list[bytes] = field(default_factory=list)
    sealed: int = 0
    content: Mapping[int, int] = field(default_factory=dict)
    spans: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        return len(self.tables[0])


class Pool:
    """The physical blocks of one group."""

    def __init__(self, group: Group) -> None:
        n = group.blocks
        self.group = group
        self.refs = [0] * n
        self.keys: list[bytes | None] = [None] * n
        self.born = [0] * n
        """The pass that fills a keyed block; later passes may read it."""
        self.rank = [0] * n
        self.by_key: dict[bytes, int] = {}
        self.free = list(range(n - 1, -1, -1))
        self.idle: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(RANKS))

    @property
    def available(self) -> int:
        """Free and evictable blocks."""
        return len(self.free) + sum(map(len, self.idle))

    @property
    def used(self) -> int:
        return self.group.blocks - self.available

    def hold(self, block: int) -> None:
        """Add a reference to a keyed block."""
        if not self.refs[block]:
            for idle in self.idle:
                idle.pop(block, None)
        self.refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each."""
        refs, keys = self.refs, self.keys
        for block in blocks:
            refs[block] -= 1
            if not refs[block]:
                if keys[block] is None:
                    self.free.append(block)
                else:
                    self.idle[self.rank[block]][block] = None

    def name(self, block: int, key: bytes, born: int) -> None:
        """Enter a held block into the prefix cache for passes after `born`, unless the key is taken."""
        if key not in self.by_key:
            self.by_key[key], self.keys[block], self.born[block] = block, key, born

    def forget(self, key: bytes) -> None:
        """Remove a key from the prefix cache; frees an unreferenced block."""
        block = self.by_key.pop(key, None)
        if block is None:
            return
        self.keys[block], self.rank[block] = None, 0
        if not self.refs[block]:
            for idle in self.idle:
                idle.pop(block, None)
            self.free.append(block)


def _content(held: Held, ids: Sequence[int], begin: int, end: int) -> bytes:
    """What KV rows `begin` to `end` depend on beyond earlier blocks: their tokens or content keys, and the whole of every
    span that overlaps them."""
    spans = [(a, b) for a, b in held.spans if a < end and b > begin]
    words = [held.content.get(i, i) for i in ids[begin : max([end, *(b for _, b in spans)])]]
    if not spans and words == list(ids[begin:end]):
        return array("i", words).tobytes()  # the key of plain tokens
    return array("q", [*words, *(word for span in spans for word in span)]).tobytes()


class Blocks:
    """All groups of one engine. block: positions of a block. salt: separates caches of different models. reuse: whether the
    prefix cache is on."""

    def __init__(self, groups: Sequence[Group], block: int, salt: bytes = b"", reuse: bool = True) -> None:
        if not groups or block < 1:
            raise ValueError(f"a cache needs a group of layers and a positive block, not {groups} and {block}")
        self.pools = [Pool(g) for g in sorted(groups, key=lambda g: g.window > 0)]
        """By number: groups of full context first, as begin_pass's tables."""
        self.block, self.reuse = block, reuse
        self.evictions = 0
        """Evicted blocks."""
        self.given = 0
        """Counts frees: a request that did not fit may fit after one."""
        self._root = blake2b(salt, digest_size=16).digest()

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(p.group for p in self.pools)

    @property
    def used(self) -> dict[str, int]:
        """Referenced blocks by group."""
        return {p.group.name: p.used for p in self.pools}

    @property
    def free(self) -> dict[str, int]:
        """Free and evictable blocks by group."""
        return {p.group.name: p.available for p in self.pools}

    @property
    def cached(self) -> dict[str, int]:
        """Keyed blocks by group."""
        return {p.group.name: len(p.by_key) for p in self.pools}

    def held(self, content: Mapping[int, int] | None = None, spans: Sequence[tuple[int, int]] = ()) -> Held:
        """Block tables of a new sequence."""
        return Held([[] for _ in self.pools], [0] * len(self.pools), content=content or {}, spans=spans)

    # --- finding prefixes --------------------------------------------------------------------------------------------

    def key(self, held: Held, ids: Sequence[int], index: int) -> bytes:
        """The key of a sequence's block `index`, all of whose tokens are known."""
        keys, block = held.keys, self.block
        while len(keys) <= index:
            n = len(keys)
            begin, end = n * block, (n + 1) * block
            if held.content or held.spans:
                tokens = _content(held, ids, begin, end)
            else:
                tokens = array("i", ids[begin:end]).tobytes()
            keys.append(blake2b((keys[-1] if n else self._root) + tokens, digest_size=16).digest())
        return keys[index]

    def match(self, held: Held, ids: Sequence[int], most: int, now: int) -> tuple[int, bool]:
        """(n, coming): the sequence's first n blocks (at most `most`, at least held.size) are computed or cached; coming:
        whether pass `now` computes the next one for another sequence."""
        start, block = held.size, self.block
        runs = [start] * len(self.pools)  # by group: consecutive cached blocks up to i
        best, coming = start, False
        for i in range(start, most if self.reuse else start):
            key = self.key(held, ids, i)
            found = [p.by_key.get(key) for p in self.pools]
            if any(b is None and not p.group.window for p, b in zip(self.pools, found, strict=True)):
                break
            if any(b is not None and p.born[b] >= now for p, b in zip(self.pools, found, strict=True)):
                coming = best == i
                break
            runs = [0 if b is None else run + 1 for run, b in zip(runs, found, strict=True)]
            if all(run > i - p.group.first((i + 1) * block, block) for run, p in zip(runs, self.pools, strict=True)):
                best = i + 1
        return best, coming

    def adopt(self, held: Held, n: int, slot: int, writes: list[Write]) -> None:
        """Reference the cached blocks that `match` found, up to block n."""
        start = held.size
        for g, pool in enumerate(self.pools):
            table, first = held.tables[g], pool.group.first(n * self.block, self.block)
            self._pass(held, g, min(first, start))
            table.extend([-1] * (max(first, start) - start))
            for i in range(max(first, start), n):
                block = pool.by_key[held.keys[i]]
                pool.hold(block)
                table.append(block)
                writes.append((g, slot, i, block))
            held.first[g] = max(held.first[g], first)
        held.sealed = n

    def seal(self, held: Held, ids: Sequence[int], positions: int, born: int) -> None:
        """Enter the full blocks below `positions` into the prefix cache for passes after `born`."""
        for i in range(held.sealed, positions // self.block):
            key = self.key(held, ids, i)
            for g, pool in enumerate(self.pools):
                if i >= held.first[g]:
                    pool.name(held.tables[g][i], key, born)
            held.sealed = i + 1

    def anchor(self, held: Held, n: int) -> None:
        """Give the window before block n a late eviction rank: a prompt or a branch ends there."""
        if not 0 < n <= held.sealed:
            return
        for g, pool in enumerate(self.pools):
            for i in range(max(held.first[g], pool.group.first(n * self.block, self.block)), n):
                block = held.tables[g][i]
                pool.rank[block] = RANKS - 1

    # --- allocating and freeing --------------------------------------------------------------------------------------

    def available(self) -> int:
        """Blocks that every group can still allocate."""
        return min(p.available for p in self.pools)

    def grow(self, held: Held, n: int, slot: int, writes: list[Write]) -> bool:
        """Grow to n blocks in every group; False, and nothing changed, where there are too few."""
        start = held.size
        if n - start > 0:
            if self.available() < n - start:
                return False
            for g in range(len(self.pools)):
                self._take(held, g, start, n, slot, writes)
        return True

    def begin(self, held: Held, n: int, position: int, slot: int, writes: list[Write]) -> bool:
        """Allocate n blocks for a new sequence whose next row is at `position`; in windowed groups only those in sight.
        False, and nothing changed, where there are too few."""
        firsts = [p.group.first(position, self.block) for p in self.pools]
        if any(p.available < n - first for p, first in zip(self.pools, firsts, strict=True)):
            return False
        for g, first in enumerate(firsts):
            held.tables[g], held.first[g] = [-1] * first, first
            self._take(held, g, first, n, slot, writes)
        return True

    def slide(self, held: Held, position: int) -> None:
        """Free blocks out of sight of rows from `position` on."""
        for g, pool in enumerate(self.pools):
            if pool.group.window:
                self._pass(held, g, min(pool.group.first(position, self.block), held.size))

    def release(self, held: Held) -> None:
        """Free all blocks; their keys stay in the prefix cache."""
        self.anchor(held, held.sealed)
        for g, pool in enumerate(self.pools):
            table = held.tables[g]
            pool.drop(reversed(table[held.first[g] :]))  # the end of a branch is evicted before its beginning
            table.clear()
            held.first[g] = 0
        held.sealed = 0
        self.given += 1

    def clear(self, since: int = 0) -> None:
        """Remove keys of blocks filled by pass `since` or later."""
        for pool in self.pools:
            for key in [key for key, block in pool.by_key.items() if pool.born[block] >= since]:
                self._forget(pool, key)

    def _pass(self, held: Held, g: int, first: int) -> None:
        """Free a group's blocks before `first`."""
        pool, table = self.pools[g], held.tables[g]
        passed = slice(held.first[g], first)
        if first > held.first[g]:
            pool.drop(table[passed])
            table[passed] = [-1] * (first - held.first[g])
            held.first[g] = first
            self.given += 1

    def _take(self, held: Held, g: int, start: int, n: int, slot: int, writes: list[Write]) -> None:
        """Extend a group's table from `start` to n blocks: free ones, else the first evictable ones."""
        pool, count = self.pools[g], n - start
        while len(pool.free) < count:
            block = next(iter(next(idle for idle in pool.idle if idle)))
            key = pool.keys[block]
            assert key is not None
            self.evictions += 1
            self._forget(pool, key)
        at = len(pool.free) - count
        taken = pool.free[at:][::-1]
        del pool.free[at:]
        for block in taken:
            pool.refs[block], pool.rank[block] = 1, 0
        held.tables[g] += taken
        writes.extend(zip(repeat(g), repeat(slot), range(start, n), taken))

    def _forget(self, pool: Pool, key: bytes) -> None:
        """Evict a key: from its group, and from all groups if that one sees the whole context."""
        for other in [pool] if pool.group.window else self.pools:
            other.forget(key)

    # --- proof -------------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Held]) -> None:
        """AssertionError unless every block is accounted for, given all sequences that hold any."""
        holders = list(holders)
        for g, pool in enumerate(self.pools):
            name, n = pool.group.name, pool.group.blocks
            for held in holders:
                assert len(held.tables[g]) == held.size, f"{name}: tables of one sequence differ in length"
                assert all(b == -1 for b in held.tables[g][: held.first[g]]), f"{name}: a block given up is in a table"
            counted = Counter(b for h in holders for b in h.tables[g][h.first[g] :])
            assert all(0 <= b < n for b in counted), f"{name}: a table names a block that is none"
            assert pool.refs == [counted[b] for b in range(n)], f"{name}: references {pool.refs}, counted {counted}"
            places = Counter(pool.free)
            for idle in pool.idle:
                places.update(idle.keys())
            assert places == Counter(b for b in range(n) if not counted[b]), (
                f"{name}: a block is lost, or in two places"
            )
            keyed = {k: b for b, k in enumerate(pool.keys) if k is not None}
            assert keyed == pool.by_key, f"{name}: keys and blocks differ"
            assert len(keyed) == n - pool.keys.count(None), f"{name}: two blocks have one key"
            assert all(pool.keys[b] is None for b in pool.free), f"{name}: a free block has a key"
            assert all(pool.keys[b] is not None for idle in pool.idle for b in idle), (
                f"{name}: an idle block has no key"
            )
        for held in holders:  # what is still written to has one holder
            for g, pool in enumerate(self.pools):
                for i in range(max(held.sealed, held.first[g]), held.size):
                    assert pool.refs[held.tables[g][i]] == 1, f"{pool.group.name}: a block that is written to is shared"
