"""Matrix fragment layout of 32 lanes on NVIDIA's units (probe_lanes.slang queries a device's operand layout), and
products."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

LANES = 32


@cache
def places(rows: int, columns: int, use: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, int64 [lanes, elements], of a matrix of this use (0 A, 1 B, 2 accumulator)."""
    if rows != 16 or columns not in (8, 16) or (use == 0 and columns != 16):
        raise ValueError(f"no unit multiplies matrices of {rows} x {columns}")
    lane, e = np.arange(LANES)[:, None], np.arange(rows * columns // LANES)[None]
    if use == 0:  # 16 rows by 16 k
        return lane // 4 + e // 4 * 8, 2 * (lane % 4) + e % 2 + e // 2 % 2 * 8
    if use == 1:  # 16 k by 16 or 8 columns
        return 2 * (lane % 4) + e % 2 + e // 2 % 2 * 8, lane // 4 + e // 4 * 8
    return lane // 4 + e // 2 % 2 * 8, 2 * (lane % 4) + e % 2 + e // 4 * 8


@cache
def _order(rows: int, columns: int, use: int) -> np.ndarray:
    """For each element in row-major order, its index in [lanes * elements]."""
    row, column = places(rows, columns, use)
    found = np.empty(rows * columns, np.int64)
    found[(row * columns + column).ravel()] = np.arange(rows * columns)
    return found


def dense(value: np.ndarray, lanes: int, shape: tuple[int, int, int]) -> np.ndarray:
    """[subgroups, rows, columns] from the lanes' fragments."""
    whole = np.broadcast_to(value, (lanes, value.shape[1])).reshape(lanes // LANES, -1)
    return whole[:, _order(*shape)].reshape(-1, shape[0], shape[1])


def held(value: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Fragments of a dense matrix: the inverse of `dense`."""
    row, column = places(*shape)
    return value[:, row, column].reshape(-1, row.shape[1])


def product(a: Any, b: Any, c: Any, lanes: int, shapes: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """a times b plus c, accumulated in float32."""
    x, y, z = (dense(v, lanes, s).astype(np.float32) for v, s in zip((a, b, c), shapes, strict=True))
    return held((x @ y + z).astype(np.asarray(c).dtype), shapes[2])
