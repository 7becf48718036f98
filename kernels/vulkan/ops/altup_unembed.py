"""Binding of altup_unembed: the streams split, then a product for each."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.ops._linear import linear
from hybrid.kernels.vulkan.recorder import Live, Recorder
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor, cut


def record(rec: Recorder, step: Step, t: Mapping[str, DeviceTensor]) -> None:
    """z f32 [T,(A-1)*H]: columns (i-1)*H .. i*H are stream i of streams f32 [T,A*H] by rows (i-1)*H .. i*H of w."""
    rows, hidden, streams = step.bind["T"], step.bind["H"], step.bind["A"]
    size, width = 4 * rows * hidden, (streams - 1) * hidden
    parts = rec.scratch((streams - 1) * size)
    push = struct.pack("<4I", CONTROL[step.extent], rows, hidden // 4, streams)
    rec.dispatch(
        rec.kernel("altup_split"),
        reads=t["streams"].parts,
        writes=[parts],
        push=push,
        grid=(-(-width // 256), Live(step.extent, cap=rows), 1),
    )
    for i in range(streams - 1):
        piece = Chunk(0, rows, (Slice(parts.buffer, parts.offset + i * size, size),), "f32")
        x = DeviceTensor("stream", "f32", (rows, hidden), (piece,))
        own = tuple(_cut(t["w"], i * hidden, (i + 1) * hidden))
        w = DeviceTensor(t["w"].name, t["w"].dtype, (width, hidden), own)
        linear(rec, x, w, t["z"].parts[0], rows=rows, extent=step.extent)


def _cut(w: DeviceTensor, start: int, stop: int) -> Iterator[Chunk]:
    """Rows start..stop of a matrix, as parts of its chunks."""
    for chunk in w.chunks:
        first, last = max(start, chunk.row), min(stop, chunk.row + chunk.rows)
        if first < last:
            yield cut(chunk, first - chunk.row, last - first, w.shape[-1])
