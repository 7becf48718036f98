"""Host side of NPU attention: splits rows into query tiles, updates the gathered cache view, and finds the key tiles
that each query tile sees.

Scores are in bfloat16 (`attention`) or int8 (`attention_i8`: each query and key vector quantised by its largest
element, products exact in int32; values and probabilities stay bfloat16). Both use the same design. The cache sizes fix
a small set of designs (`designs_of`): key tiles are sent from the view's beginning, in powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.designs import causal, flash_attention
from hybrid.kernels.npu.designs.attention import CORES, Attention, Scores
from hybrid.kernels.npu.layout import bf16, int8_rows, real
from hybrid.kernels.npu.tiles import tile_queries, untile_results
from hybrid.kernels.npu.views import KeyViews
from hybrid.kernels.npu.xrt import Job

SHORTEST = 8  # key tiles of the shortest span


class Npu(Protocol):
    @property
    def views(self) -> KeyViews: ...

    def run(self, jobs: Sequence[Job]) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows and visible key tiles of one sequence. runs: rows at consecutive positions, one per query tile. seen: key
    tiles [first, end) of each run. base: first key tile of the view, at most the first one seen."""

    runs: tuple[np.ndarray, ...]
    seen: tuple[tuple[int, int], ...]
    base: int

    @property
    def ends(self) -> list[int]:
        """Of each block of CORES query tiles: the key tiles from the view's beginning to the last that it sees."""
        return [max(end for _, end in self.seen[i : i + CORES]) - self.base for i in range(0, len(self.seen), CORES)]


def attention(npu: Npu, **args: Any) -> tuple[np.ndarray]:
    return _attention(npu, "bf16", **args)


def attention_i8(npu: Npu, **args: Any) -> tuple[np.ndarray]:
    return _attention(npu, "i8", **args)


def _attention(
    npu: Npu,
    scores: Scores,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    scale: float,
    window: int,
    **_: Any,
) -> tuple[np.ndarray]:
    """Jobs per slot: update its view, and cut its rows into runs of consecutive positions."""
    kv_heads, d = k_cache.shape[2:]
    group = group_of(q.shape[1] // d // kv_heads, d)
    heads = q.shape[1] // d // group  # a KV head is streamed again for each part of its group
    shape = shape_of(heads, group, d, scores)
    shape = replace(shape, tiles=capacity(shape, window, *k_cache.shape[:2], *block_table.shape))
    most = rounded(-(-len(q) // rows_of(shape)), 1)
    o, jobs = np.empty(q.shape, np.float32), list[tuple[Attention, Plan, np.ndarray, Job]]()
    for slot in np.unique(slots):
        rows = np.flatnonzero(slots == slot)
        rows = rows[np.argsort(positions[rows], kind="stable")]
        view = npu.views.of(k_cache, v_cache, int(slot), shape)
        for i, part in enumerate(_fitting(plan(rows, positions[rows], window, shape), shape.tiles)):
            if i:  # the view is about to move
                _run(npu, jobs, o)
            of_part = np.concatenate(part.runs)
            length = int(positions[of_part].max()) + 1
            view.update(block_table[slot], part.base, int(positions[of_part].min()), length)
            for j in range(0, len(part.runs), most * CORES):
                p = Plan(part.runs[j : j + most * CORES], part.seen[j : j + most * CORES], view.base)
                a = fitted(shape, p, shape.tiles)
                tiles = np.zeros((a.blocks * CORES, heads, group, a.LQ // group, d), np.float32)
                for n, run in enumerate(p.runs):
                    tiles[n, :, :, : len(run)] = q[run].reshape(len(run), heads, group, d).transpose(1, 2, 0, 3)
                header = headers(p, a, positions, length, window)
                result = np.empty(tiles.size, np.uint16)
                job = Job(_design(a), {"q": _queries(tiles, header, scale, a), "kv": view.room}, {"o": result})
                jobs.append((a, p, result, job))
    _run(npu, jobs, o)
    return (o,)


def _run(npu: Npu, jobs: list[tuple[Attention, Plan, np.ndarray, Job]], o: np.ndarray) -> None:
    npu.run([job for *_, job in jobs])
    for a, p, result, _job in jobs:
        back = real(untile_results(result, a))
        for i, run in enumerate(p.runs):
            o[run] = back[i, :, :, : len(run)].transpose(2, 0, 1, 3).reshape(len(run), -1)
    jobs.clear()


def _queries(tiles: np.ndarray, header: np.ndarray, scale: float, a: Attention) -> np.ndarray:
    """Query tiles of the design, with the score scale applied."""
    if a.scores == "bf16":
        return tile_queries(bf16(tiles * np.float32(scale)), header, a)
    q, q_scale = int8_rows(tiles.reshape(-1, a.D))
    return tile_queries(q.reshape(tiles.shape), header, a, (q_scale * np.float32(scale)).reshape(tiles.shape[:-1]))


def plan(rows: np.ndarray, positions: np.ndarray, window: int, a: Attention) -> Plan:
    """Rows (sorted by position) dealt out to query tiles, and the key tiles that each of those sees. Without a window
    the base is key tile 0: all of the sequence stays in the view."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    most = a.LQ // a.group
    runs, seen = [], []
    for part in np.split(np.arange(len(rows)), breaks):
        for i in range(0, len(part), most):
            index = part[i : i + most]
            first, last = int(positions[index[0]]), int(positions[index[-1]])
            runs.append(rows[index])
            seen.append((max(0, first - window + 1) // a.LK if window > 0 else 0, last // a.LK + 1))
    return Plan(tuple(runs), tuple(seen), min(first for first, _ in seen))


def _fitting(p: Plan, tiles: int) -> Iterator[Plan]:
    """The plan, cut where its rows are further apart than a view of so many key tiles."""
    begin = 0
    for i in range(1, len(p.runs) + 1):
        if i == len(p.runs) or p.seen[i][1] - p.seen[begin][0] > tiles:
            yield Plan(p.runs[begin:i], p.seen[begin:i], p.seen[begin][0])
            begin = i


def headers(p: Plan, a: Attention, positions: np.ndarray, length: int, window: int) -> np.ndarray:
    """int32 [blocks*CORES, 7], as aie/softmax.h has it. A query tile without rows lets every key tile pass."""
    out = np.zeros((a.blocks * CORES, 7), np.int32)
    for i in range(len(out)):
        begin, count = a.span(i // CORES)
        begin += p.base
        if i >= len(p.runs):
            out[i, 3] = count
            continue
        first, end = p.seen[i]
        out[i] = positions[p.runs[i][0]], length, window, first - begin, end - first, begin + count - end, first * a.LK
    return out


def fitted(shape: Attention, p: Plan, tiles: int | None = None) -> Attention:
    """The design for a plan on a view of `tiles` (default: what the plan needs). A prompt's first rows send each block
    of query tiles the key tiles up to its own; any others send every block the same number, rounded up to a power of
    two. A core skips tiles that no row sees."""
    blocks, ends = rounded(len(p.ends), 1), p.ends
    tiles = rounded(max(ends)) if tiles is None else tiles
    a = replace(shape, blocks=blocks, tiles=tiles)
    first = causal(a)
    if blocks > 1 and p.base == 0 and all(end <= count for end, (_, count) in zip(ends, first.spans, strict=False)):
        return first
    return replace(a, spans=((0, min(tiles, rounded(max(ends)))),) * blocks)


def designs_of(scores: Scores, bind: Mapping[str, int], window: int) -> Iterator[Attention]:
    """Every design that passes of up to bind["T"] rows can run, whatever their positions."""
    group = group_of(bind["HQ"] // bind["HK"], bind["D"])
    shape = shape_of(bind["HQ"] // group, group, bind["D"], scores)
    tiles = capacity(shape, window, bind["B"], bind["BS"], bind["S"], bind["MB"])
    most = rounded(-(-bind["T"] // rows_of(shape)), 1)
    blocks = 1
    while blocks <= most:
        a = replace(shape, blocks=blocks, tiles=tiles)
        if blocks > 1:
            yield causal(a)
        count = rounded(1)
        while count < tiles:
            yield replace(a, spans=((0, count),) * blocks)
            count *= 2
        yield replace(a, spans=((0, tiles),) * blocks)
        blocks *= 2


def capacity(shape: Attention, window: int, blocks: int, size: int, slots: int, table: int) -> int:
    """Key tiles of a slot's view: the whole table's positions, or, of a window, those of the ring of blocks that a slot
    has."""
    whole = rounded(-(-table * size // shape.LK))
    if window <= 0:
        return whole
    ring = max(blocks // slots * size, window + rows_of(shape) // CORES)
    return min(whole, rounded(-(-ring // shape.LK) + 1))


def rows_of(a: Attention) -> int:
    """Rows of a block of query tiles."""
    return CORES * a.LQ // a.group


def rounded(count: int, least: int = SHORTEST) -> int:
    """Rounded up to a power of two, at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())


def group_of(group: int, d: int) -> int:
    """The most query heads of a KV head whose tile of queries fits a core beside its results and sums: 4096 numbers."""
    return next(g for g in range(group, 0, -1) if group % g == 0 and math.lcm(8, g) * d <= 4096)


def shape_of(heads: int, group: int, d: int, scores: Scores = "bf16") -> Attention:
    """The fabric's sizes: tiles that fit a core; one block and one key tile, until a plan says how many."""
    unit = math.lcm(8, group)
    lq, lk = min(32, 4096 // d), 32 if d <= 128 else 16 if d <= 256 else 8
    columns = next(c for c in (4, 3, 2, 1) if heads % c == 0)
    return Attention(heads, 1, 1, d, max(unit, lq // unit * unit), lk, group, columns, scores)


# Designs are compared and hashed on every run: the same one is kept.
_design: Callable[[Attention], Design] = lru_cache(maxsize=256)(flash_attention)
