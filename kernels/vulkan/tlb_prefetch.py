"""TLB prefetch: after each step, a dispatch that nothing waits for reads one word of every page of what a step a little later
will read, so that its address translations are in the GPU's TLBs by then.

An H200's TLBs cover about 4096 pages of 2 MiB. In a model of more bytes every weight misses once a token: a page-table
walk at the start of the dispatch that waits for it. H200, 27B q4_0 (15.6 GB), us a layer: 101.9, with TLB prefetch 96.7.

A large KV cache costs more page-table walks than it saves, since a step reads the blocks of its sequences only: caches of
up to POOL are touched.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from hybrid.core.plan import Plan, Step
from hybrid.kernels.vulkan.memory import MIB, Slice
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

PAGE = 2 * MIB  # what drivers map large allocations in
AHEAD = 3  # steps between the prefetch and the use: page-table walks take about as long as a short dispatch
SLICES = 8  # that a dispatch of tlb_prefetch takes
POOL = 64 * MIB  # of a KV cache: larger ones are not touched


class TlbPrefetch:
    """Of one plan. `copies`: workgroups for each slice, by the tuning table (0: none)."""

    def __init__(self, rec: Recorder, plan: Plan, tensors: Mapping[str, DeviceTensor]) -> None:
        self.rec = rec
        weights = [_read(plan, tensors, step, "weight") for step in plan.steps]
        state = [[s for s in _read(plan, tensors, step, "state") if s.size <= POOL] for step in plan.steps]
        self.slices = [w + s for w, s in zip(weights, state, strict=True)]
        total = sum(s.size for s in {(id(s.buffer), s.offset): s for slices in weights for s in slices}.values())
        self.copies = rec.device.tuning.choose("tlb_prefetch", {"copies": 0}, mib=total // MIB, rows=plan.rows)[
            "copies"
        ]

    def record(self, steps: range) -> None:
        """After these steps, the prefetch of what those AHEAD of them read; plans run again and again, so that the
        first step follows the last."""
        if self.copies:
            ahead = [self.slices[(index + AHEAD) % len(self.slices)] for index in steps]
            prefetch(self.rec, [s for slices in ahead for s in slices], self.copies)


def prefetch(rec: Recorder, slices: Sequence[Slice], copies: int, page: int = PAGE) -> None:
    """Record a read of one word of every page (`page` bytes) of the largest of these slices, by `copies` workgroups
    each; nothing where there are none. Small slices share their pages with others."""
    slices = sorted((s for s in slices if s.size >= 4), key=lambda s: -s.size)[:SLICES]
    if not slices:
        return
    words = [s.size // 4 for s in slices] + [1] * (SLICES - len(slices))
    bound = slices + slices[-1:] * (SLICES - len(slices))
    rec.dispatch(
        rec.kernel("tlb_prefetch"),
        bound,
        [rec.counters(1)],
        struct.pack(f"<{2 + SLICES}I", len(slices), page // 4, *words),
        (len(slices) * copies,),
    )


def _read(plan: Plan, tensors: Mapping[str, DeviceTensor], step: Step, kind: str) -> list[Slice]:
    """What a step reads once a pass; activations are used again and again, so that their pages stay in the TLBs."""
    kept = [tensors[n] for n in dict.fromkeys(step.args.values()) if plan.tensors[n].kind == kind]
    return [part for tensor in kept for chunk in tensor.chunks for part in chunk.parts]
