"""Operands in the order in which designs read them. What is stored for long, weights and the gathered cache, is stored so."""

from __future__ import annotations

import numpy as np

from kernels.npu.designs.attention import CORES, HEAD, Attention
from kernels.npu.designs.gemm import Gemm
from kernels.npu.layout import nibbles, two_level


def tile_weights(codes: np.ndarray, g: Gemm, scales: np.ndarray | None = None) -> np.ndarray:
    """int8 codes [N, K] as B of a design, flat bytes: [columns][N/(columns n)][K/k] tiles of [k/s][n/t][s][t].

    4-bit codes (-8..7) lie two to a byte; each tile ends with its multipliers and floats, from `scales` [N, K/32]."""
    blocks = g.N // (g.columns * g.n)
    w = codes.reshape(blocks, g.columns, g.n // g.t, g.t, g.K // g.k, g.k // g.s, g.s)
    cut = np.ascontiguousarray(w.transpose(1, 0, 4, 5, 2, 6, 3)).reshape(g.columns, blocks, g.K // g.k, g.k * g.n)
    if g.weights == "i8":
        return cut.reshape(-1)
    if scales is None:
        raise ValueError("4-bit weights have a scale for every 32")
    m, unit = two_level(scales, g.k // 32)
    m = m.reshape(blocks, g.columns, g.n, g.K // g.k, g.k // 32).transpose(1, 0, 3, 4, 2)
    s = unit.reshape(blocks, g.columns, g.n, g.K // g.k).transpose(1, 0, 3, 2)
    flat = [np.ascontiguousarray(part).reshape(g.columns, blocks, g.K // g.k, -1).view(np.uint8) for part in (nibbles(cut), m, s)]
    return np.concatenate(flat, axis=-1).reshape(-1)


def tile_keys(k: np.ndarray, v: np.ndarray, a: Attention) -> np.ndarray:
    """bfloat16 bits [positions, heads, D] of one sequence as the KV stream, flat: [heads][tiles][K, V] tiles; zeros behind the
    last position (masked by the kernel, which needs them finite)."""
    out = np.zeros((a.heads, a.tiles, 2, a.LK * a.D), np.uint16)
    for which, cache in enumerate((k, v)):
        full = np.zeros((a.tiles * a.LK, a.heads, a.D), np.uint16)
        full[: len(cache)] = cache
        r, c = (4, 8) if which == 0 else (8, 4)
        cut = full.reshape(a.tiles, a.LK // r, r, a.heads, a.D // c, c).transpose(3, 0, 1, 4, 2, 5)
        out[:, :, which] = cut.reshape(a.heads, a.tiles, a.LK * a.D)
    return out.reshape(-1)


def tile_queries(q: np.ndarray, positions: np.ndarray, length: int, window: int, a: Attention) -> np.ndarray:
    """bfloat16 bits [blocks*CORES, heads, group, LQ/group, D], consecutive positions from `positions` on, as query tiles, flat."""
    tiles = np.zeros((a.heads, a.blocks * CORES, a.LQ * a.D + HEAD), np.uint16)
    rows = q.transpose(1, 0, 2, 3, 4).reshape(a.heads, a.blocks * CORES, a.LQ // 4, 4, a.D // 8, 8)
    tiles[..., :-HEAD] = rows.transpose(0, 1, 2, 4, 3, 5).reshape(a.heads, a.blocks * CORES, -1)
    head = tiles[..., -HEAD:].view(np.int32)
    head[..., 0], head[..., 1], head[..., 2] = positions, length, window
    return tiles.reshape(-1)


def untile_results(o: np.ndarray, a: Attention) -> np.ndarray:
    """The design's result as bfloat16 bits [blocks*CORES, heads, group, LQ/group, D]."""
    return o.reshape(a.heads, a.blocks * CORES, a.group, a.LQ // a.group, a.D).transpose(1, 0, 2, 3, 4)
