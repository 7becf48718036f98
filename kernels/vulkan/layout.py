"""Layout of weight blocks in device memory (layout.slang).

Row-major, except for q4_0 whose rows fill whole tiles. A tile has 8 rows by 8 blocks; the 8 blocks of a row are
contiguous. So a workgroup's read is contiguous (8 rows' codes in 1024 bytes, their scales in 128), and a read along one
row gets lines of 128 bytes. Rows count from the first row of their chunk. The last tiles are padded with rows that are
read but not used.
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
    """Rows that a tensor's memory holds: rounded up to whole tiles where it is tiled."""
    rows = shape[0] if shape else 1
    return -(-rows // TILE_ROWS) * TILE_ROWS if tiled(dtype, shape) else rows


def pieces(host: np.ndarray, first: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """(byte of a tiled part, view of `host` whose bytes, in axis order, are stored from there on) for host u8 [rows,
    bytes]. first: first row. size: bytes of the part per block. Partly covered tiles come one by one, the rest at
    once."""
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
