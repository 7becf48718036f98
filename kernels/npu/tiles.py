"""Operand layouts of the designs. Keys and values: views.py."""

from __future__ import annotations

import numpy as np

from hybrid.kernels.npu.designs.attention import CORES, HEAD, Attention
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.layout import limbs, nibbles


def tile_weights(codes: np.ndarray, g: Gemm, scales: np.ndarray | None = None) -> np.ndarray:
    """int8 codes [N, K] as B of a design, flat bytes: [columns][N/(columns n)][K/k] tiles of [k/s][n/t][s][t].

    q4_0's codes (-8..7) are packed two to a byte. With blocks each tile ends with its multipliers and units, from `scales` [N,
    K/32]."""
    blocks = g.N // (g.columns * g.n)
    w = codes.reshape(blocks, g.columns, g.n // g.t, g.t, g.K // g.k, g.k // g.s, g.s)
    cut = np.ascontiguousarray(w.transpose(1, 0, 4, 5, 2, 6, 3)).reshape(g.columns, blocks, g.K // g.k, g.k * g.n)
    if g.weights == "i8":
        return cut.reshape(-1)
    if scales is None:
        raise ValueError(f"{g.weights} weights have a scale for every 32")
    m, unit = limbs(scales, g.k // 32)
    m = m.reshape(blocks, g.columns, g.n // g.t, g.t, g.K // g.k, g.k // 32, 2).transpose(1, 0, 4, 5, 2, 6, 3)
    s = unit.reshape(blocks, g.columns, g.n, g.K // g.k).transpose(1, 0, 3, 2)
    packed = nibbles(cut) if g.weights == "q4_0" else cut
    flat = [
        np.ascontiguousarray(part).reshape(g.columns, blocks, g.K // g.k, -1).view(np.uint8) for part in (packed, m, s)
    ]
    return np.concatenate(flat, axis=-1).reshape(-1)


def tile_queries(q: np.ndarray, header: np.ndarray, a: Attention, scales: np.ndarray | None = None) -> np.ndarray:
    """[blocks*CORES, heads, group, LQ/group, D] as query tiles, flat, each with its words `header` [blocks*CORES, 7]
    behind it. bfloat16 bits; or int8 codes with scales [blocks*CORES, heads, group, LQ/group] in front of the header:
    then bytes."""
    n = a.blocks * CORES
    rows = q.transpose(1, 0, 2, 3, 4).reshape(a.heads, n, a.LQ // 4, 4, a.D // 8, 8).transpose(0, 1, 2, 4, 3, 5)
    words = np.zeros((a.heads, n, HEAD // 4), np.int32)
    words[..., : header.shape[1]] = header
    parts = [np.ascontiguousarray(rows).reshape(a.heads, n, -1), words]
    if scales is not None:
        parts.insert(1, np.ascontiguousarray(scales.transpose(1, 0, 2, 3)).reshape(a.heads, n, a.LQ))
    flat = np.concatenate([p.view(np.uint8) for p in parts], axis=-1).reshape(-1)
    return flat.view(np.uint16) if scales is None else flat


def untile_results(o: np.ndarray, a: Attention) -> np.ndarray:
    """The design's result as bfloat16 bits [blocks*CORES, heads, group, LQ/group, D]."""
    return o.reshape(a.heads, a.blocks * CORES, a.group, a.LQ // a.group, a.D).transpose(1, 0, 2, 3, 4)
