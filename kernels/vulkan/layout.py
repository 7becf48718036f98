"""How the blocks of a weight are stored in device memory (layout.slang).

Row by row, but q4_0 of rows of whole tiles: tiles of 8 rows by 8 blocks, a row's 8 blocks one after the other, so that
what a workgroup reads at a time is contiguous (8 rows' codes in 1024 bytes, their scales in 128) and one that goes
along a row finds lines of 128 bytes. Rows count from the first one of their chunk, and the last tiles are whole: what is
stored after the last row is read, but not used.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.core.dtypes import DTYPES
from hybrid.core.numeric import np

TILE_ROWS, TILE_BLOCKS = 8, 8  # as in layout.slang
TILED = "q4_0"


def tiled(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix [N, K] of this type is stored in tiles."""
    return dtype == TILED and len(shape) == 2 and shape[1] % (TILE_BLOCKS * DTYPES[TILED].block) == 0


def padded_rows(dtype: str, shape: tuple[int, ...]) -> int:
    """Rows that a tensor's memory holds: those of whole tiles where it is stored in tiles."""
    rows = shape[0] if shape else 1
    return -(-rows // TILE_ROWS) * TILE_ROWS if tiled(dtype, shape) else rows


def pieces(host: np.ndarray, first: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """(byte of a tiled part, a view of `host` whose bytes, in its axes' order, are stored from there on) for all of host u8
    [rows, bytes]: rows first.. of a part of `size` bytes a block. Rows of tiles that are not all covered come tile by
    tile, the others at once."""
    rows, width = host.shape
    run = TILE_BLOCKS * size
    runs = host.reshape(rows, -1, run)
    at = 0
    while at < rows:
        within = (first + at) % TILE_ROWS
        base = (first + at - within) * width
        count = min(TILE_ROWS - within, rows - at)
        if count < TILE_ROWS:
            for tile in range(runs.shape[1]):
                yield base + (tile * TILE_ROWS + within) * run, runs[at : at + count, tile]
        else:
            count = (rows - at) // TILE_ROWS * TILE_ROWS
            yield base, runs[at : at + count].reshape(-1, TILE_ROWS, *runs.shape[1:]).transpose(0, 2, 1, 3)
        at += count
