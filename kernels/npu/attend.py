"""Attention's host side: rows cut into query tiles, the cache gathered into key tiles, and which tiles each of them sees.

Scores in bfloat16 (`attention`) or in int8 (`attention_i8`: every query and key vector quantised by its own largest element,
products exact in int32; values and probabilities stay bfloat16). Both run the same design.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.designs import flash_attention
from hybrid.kernels.npu.designs.attention import CORES, Attention, Scores
from hybrid.kernels.npu.layout import bf16, int8_rows, real
from hybrid.kernels.npu.tiles import tile_keys, tile_queries, untile_results
from hybrid.kernels.npu.xrt import Job


class Npu(Protocol):
    def run(self, jobs: Sequence[Job]) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sees what, of one sequence. runs: rows at consecutive positions, one for each query tile; seen: the key tiles
    [first, end) of each; spans: [first, end) of each block of CORES query tiles; base: the first key tile that anybody sees."""

    runs: tuple[np.ndarray, ...]
    seen: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    base: int


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
    """One job for each slot: its blocks gathered into tiles, its rows cut into runs of consecutive positions."""
    kv_heads, d = k_cache.shape[2:]
    group = group_of(q.shape[1] // d // kv_heads, d)
    heads = q.shape[1] // d // group  # a KV head is streamed again for each part of its group
    shape = shape_of(heads, group, d, scores)
    o, jobs = np.empty(q.shape, np.float32), []
    for slot in np.unique(slots):
        rows = np.flatnonzero(slots == slot)
        rows = rows[np.argsort(positions[rows], kind="stable")]
        p = plan(rows, positions[rows], window, shape)
        a = fitted(shape, p)
        length = int(positions[rows].max()) + 1
        where = np.arange(p.base * a.LK, length)
        keys, values = (_gathered(c, block_table[slot], where, heads // kv_heads) for c in (k_cache, v_cache))
        tiles = np.zeros((a.blocks * CORES, heads, group, a.LQ // group, d), np.float32)
        for i, run in enumerate(p.runs):
            tiles[i, :, :, : len(run)] = q[run].reshape(len(run), heads, group, d).transpose(1, 2, 0, 3)
        inputs = _operands(tiles, headers(p, a, positions, length, window), keys, values, scale, a)
        result = np.empty(tiles.size, np.uint16)
        jobs.append((a, p, result, Job(_design(a), inputs, {"o": result})))
    npu.run([job for *_, job in jobs])
    for a, p, result, _job in jobs:
        back = real(untile_results(result, a))
        for i, run in enumerate(p.runs):
            o[run] = back[i, :, :, : len(run)].transpose(2, 0, 1, 3).reshape(len(run), -1)
    return (o,)


def _operands(
    tiles: np.ndarray, header: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, a: Attention
) -> dict[str, np.ndarray]:
    """The design's inputs; the queries bring the scale of the scores with them."""
    if a.scores == "bf16":
        return {"q": tile_queries(bf16(tiles * np.float32(scale)), header, a), "kv": tile_keys(bf16(keys), bf16(values), a)}
    (q, q_scale), (k, k_scale) = (int8_rows(x.reshape(-1, a.D)) for x in (tiles, keys))
    return {
        "q": tile_queries(q.reshape(tiles.shape), header, a, (q_scale * np.float32(scale)).reshape(tiles.shape[:-1])),
        "kv": tile_keys(k.reshape(keys.shape), bf16(values), a, k_scale.reshape(keys.shape[:-1])),
    }


def plan(rows: np.ndarray, positions: np.ndarray, window: int, a: Attention) -> Plan:
    """Rows (sorted by position) dealt out to query tiles, and the key tiles that each of those sees."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    most = a.LQ // a.group
    runs, seen = [], []
    for part in np.split(np.arange(len(rows)), breaks):
        for i in range(0, len(part), most):
            index = part[i : i + most]
            first, last = int(positions[index[0]]), int(positions[index[-1]])
            runs.append(rows[index])
            seen.append((max(0, first - window + 1) // a.LK if window > 0 else 0, last // a.LK + 1))
    spans = [
        (min(s[0] for s in block), max(s[1] for s in block))
        for block in (seen[i : i + CORES] for i in range(0, len(seen), CORES))
    ]
    return Plan(tuple(runs), tuple(seen), tuple(spans), min(first for first, _ in spans))


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


def fitted(shape: Attention, p: Plan) -> Attention:
    """The design for a plan. A span's length is rounded up to one of four in each octave: a fabric has an instruction stream
    for each tuple of spans, and a tile that nobody sees passes by without being computed. (So is the cache's: buffers are kept.)"""
    spans = tuple((first - p.base, rounded(end - first)) for first, end in p.spans)
    return replace(shape, blocks=len(spans), tiles=rounded(max(first + count for first, count in spans)), spans=spans)


def rounded(count: int) -> int:
    """Up to 8, then 10, 12, 14, 16, 20, 24, ..."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // unit) * unit


def _gathered(cache: np.ndarray, table: np.ndarray, where: np.ndarray, times: int) -> np.ndarray:
    """A sequence's positions out of its blocks, float32 [positions, heads, D]; every head `times` times."""
    size = cache.shape[1]
    return np.repeat(cache[table[where // size], where % size].astype(np.float32), times, axis=1)


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
_design: Callable[[Attention], Design] = lru_cache(maxsize=64)(flash_attention)
