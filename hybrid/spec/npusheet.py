"""The [npu] table of a device sheet: what one tile of each kind has, the fields of its buffer descriptors, and rates.

Every number carries its source. kernels/npu/check.py refuses a design beyond these limits; perf.npu computes from the
rates.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hybrid.spec.load import Model

Source = Annotated[str, Field(min_length=1)]


class Count(Model):
    """A limit of the hardware and where it is written down."""

    value: int = Field(gt=0)
    source: Source


class Rate(Model):
    value: float = Field(gt=0)
    source: Source


class Descriptor(Model):
    """Fields of a buffer descriptor (BD). Words are 4 bytes: no DMA addresses anything smaller."""

    words: Count
    """Longest transfer."""
    dimensions: Count
    """Nested (size, stride) pairs, the innermost included; on a shim tile the fourth is the iteration."""
    wrap: Count
    """Largest size of any dimension but the outermost, which the length bounds; innermost in words."""
    step: Count
    """Largest stride, in words."""
    iterations: Count
    """Largest size of the outermost dimension where that is the iteration counter."""


class TileLimits(Model):
    data_bytes: Count | None = None
    banks: Count | None = None
    program_bytes: Count | None = None
    channels_in: Count
    """Stream to memory (S2MM)."""
    channels_out: Count
    """Memory to stream (MM2S)."""
    bds: Count
    bds_per_parity: Count | None = None
    """Mem tiles: even channels reach the first so many descriptors, odd ones the rest."""
    locks: Count
    lock_max: Count
    """Largest value of a lock."""
    queue: Count | None = None
    """Shim tiles: tasks that a channel holds, the running one included. A push on a full queue is dropped."""
    bd: Descriptor


class Rates(Model):
    clock_ghz: Rate
    macs_i8: Rate
    """Multiply-adds per cycle and core tile: int8 x int8."""
    macs_i8_i4: Rate
    macs_bf16: Rate
    stream_bytes: Rate
    """Bytes per cycle of one stream."""
    load_bytes: Rate
    """Bytes per cycle of one load unit; a core has two."""
    store_bytes: Rate
    accumulate_cycles: Rate
    """Cycles to load, add to and store one element of C in each step over K, without the part that grows with its
    size."""
    accumulate_cycles_per_byte: Rate
    ddr_gb_s: Rate
    """What the whole array gets when tiles are read as a GEMM reads them."""
    channel_gb_s: Rate
    """One shim channel in one direction."""
    object_cycles: Rate
    """Acquire, release and BD switch of one object of a fifo."""
    dispatch_cycles: Rate
    """Lock wait at the start and end of a run."""
    dispatch_us: Rate
    """Host cost of one run."""
    chained_dispatch_us: Rate
    """Host cost of one run inside a command chain."""


class Npu(Model):
    columns: Count
    core_rows: Count
    contexts: Count
    """Hardware contexts open at once."""
    heap_bytes: Count
    """Of the driver's device heap: instruction buffers of all contexts lie in it."""
    arguments: Count
    """Buffers that a kernel of an xclbin takes."""
    repeat: Count
    """Times that a shim task may send the same: its outermost size where the stride is 0."""
    packet_id: Count
    core: TileLimits
    mem: TileLimits
    shim: TileLimits
    rates: Rates
