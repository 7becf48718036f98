"""Encode tensors in blocks of rows, concurrently, with results in order.

Memory is a few blocks for each worker. NumPy and file reads release the GIL.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hybrid.checkpoint import Checkpoint, CheckpointError
from hybrid.checkpoint.families import is_norm
from hybrid.core.dtypes import DTYPES
from hybrid.quant.codec import dequantise, quantise, row_blocks, to_ggml

BLOCK_ELEMENTS = 1 << 22  # 16 MB in float32
MAX_JOBS = 8  # more are limited by the disk or by hashing


def default_jobs() -> int:
    return min(MAX_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def encoded(
    source: Checkpoint, kinds: Mapping[str, str], jobs: int, norm_offset: float
) -> Generator[tuple[str, np.ndarray], None, None]:
    """Yield (tensor, its next bytes as uint8 [n]) for `kinds` (name -> type to write), in order.

    norm_offset: subtracted from norm weights. CheckpointError names a tensor with invalid values.
    """
    pending: deque[tuple[str, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(jobs, "encode") as pool:
        try:
            for name, start, stop in _blocks(source, kinds):
                pending.append((name, pool.submit(_encode, source, name, kinds[name], start, stop, norm_offset)))
                if len(pending) > jobs:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _blocks(source: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        shape = source.shape(name)
        width = 1 if len(shape) == 1 else shape[-1]
        rows = [(0, shape[0])] if len(shape) == 1 else row_blocks(shape[0], width, BLOCK_ELEMENTS)
        yield from ((name, start, stop) for start, stop in rows)


def _encode(source: Checkpoint, name: str, dtype: str, start: int, stop: int, norm_offset: float) -> np.ndarray:
    tensor = source.rows(name, start, stop)
    offset = norm_offset if is_norm(name) else 0.0
    if tensor.dtype == dtype and not offset:
        return to_ggml(tensor).reshape(-1)
    values = dequantise(tensor, np.float32)
    if offset:
        values = values - np.float32(offset)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{source.path}: tensor {name} holds NaN or infinity: fetch the checkpoint again")
    try:
        coded = quantise(values, dtype)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: tensor {name}: {error}. Try --type bf16") from None
    if DTYPES[dtype].parts[0].dtype.kind == "f" and not np.isfinite(coded.array).all():
        raise CheckpointError(f"{source.path}: tensor {name} has values beyond {dtype}'s range. Try --type bf16")
    return to_ggml(coded).reshape(-1)
