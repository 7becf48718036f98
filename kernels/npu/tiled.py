"""Weights in the order in which a design reads them: stripes of columns, blocks of n, tiles over K, the matrix unit's tiles."""

from __future__ import annotations

import numpy as np

from kernels.npu.designs.gemm import Gemm


def tile_weights(codes: np.ndarray, g: Gemm) -> np.ndarray:
    """int8 [N, K] as B of a design, flat: [columns][N/(columns n)][K/k][k/s][n/t][s][t]; two 4-bit codes of one row of t to
    a byte, the lower first. Weights of a layer are stored in this form only."""
    blocks = g.N // (g.columns * g.n)
    w = codes.reshape(blocks, g.columns, g.n // g.t, g.t, g.K // g.k, g.k // g.s, g.s)
    flat = np.ascontiguousarray(w.transpose(1, 0, 4, 5, 2, 6, 3)).reshape(-1)
    if g.packing == 1:
        return flat
    nibbles = flat.view(np.uint8) & 15
    return nibbles[::2] | nibbles[1::2] << 4
