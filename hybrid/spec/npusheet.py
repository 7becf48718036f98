"""The [npu] table of a device sheet: limits of each kind of tile, fields of buffer descriptors, and rates.

Every number has its source. kernels/npu/check.py refuses designs beyond these limits; perf.npu uses the rates.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hybrid.spec.load import Model

Source = Annotated[str, Field(min_length=1)]


class Count(Model):
    """A hardware limit and its source."""

    value: int = Field(gt=0)
    source: Source


class Rate(Model):
    value: float = Field(gt=0)
    source: Source


class Descriptor(Model):
    """Fields of a buffer descriptor (BD). Words are 4 bytes, the smallest unit that a DMA addresses."""

    words: Count
    """Longest transfer."""
    dimensions: Count
    """Nested (size, stride) pairs, the innermost included; on a shim tile the fourth is the iteration."""
    wrap: Count
    """Largest size of a dimension except the outermost, which the length bounds; the innermost in words."""
    step: Count
    """Largest stride, in words."""
    iterations: Count
    """Largest size of the outermost dimension if it is the iteration counter."""


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
    """Mem tiles: even channels can use this many first descriptors, odd ones the rest."""
    locks: Count
    lock_max: Count
    """Largest value of a lock."""
    queue: Count | None = None
    """Shim tiles: tasks of a channel's queue, the running one included. A push to a full queue is dropped."""
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
    """Cycles to load, add to and store one element of C in each step over K, without the size-dependent part."""
    accumulate_cycles_per_byte: Rate
    ddr_gb_s: Rate
    """Bandwidth of the whole array with a GEMM's access pattern."""
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
    """Size of the driver's device heap, which holds instruction buffers of all contexts."""
    arguments: Count
    """Most buffer arguments of an xclbin's kernel."""
    repeat: Count
    """Most repetitions of a shim task: its outermost size with stride 0."""
    packet_id: Count
    core: TileLimits
    mem: TileLimits
    shim: TileLimits
    rates: Rates
