"""TLB prefetch: behind each step, a dispatch that nothing waits for reads one word of every page of what a step a
little later will read, so that its address translations are in the GPU's TLBs by then.

An H200's TLBs cover about 4096 pages of 2 MiB. In a model of more bytes every weight misses once a token: a page-table
walk at the start of the dispatch that waits for it.

H200, driver 580.159.04, gemma3-27b q4_0 (15.6 GB), decode at 512, us a layer of 7 dispatches, recorded chain of all
layers:
  24 of its layers (5.6 GB) 94.4; 28 (6.5) 95.3; 32 (7.4) 96.7; 36 (8.4) 98.4; 40 (9.3) 100.4; all 62 (14.4) 101.9
  all 62 with TLB prefetch: after every step, 3 steps ahead 96.7 (8 copies); 2 ahead 98.0; 1 ahead 97.6
    once a layer, the next one's, beside ffn_up 97.4; beside other dispatches 98.3 to 100.2; before a dispatch instead
    of after it 98.2 to 102; a word every 256 KiB 110
  a pass that verifies five guesses (6 rows): 10.05 ms, with TLB prefetch 9.82; in the passes of a 1B draft (0.7 GB)
  1.05, with 1.10 no difference: allocations of 32 MiB to 4 GiB; descriptor sets, dynamic offsets, pushed descriptors,
  descriptor buffers

A KV cache is touched whole, so a large one costs more page-table walks than it saves: a pass reads the blocks of its
sequences, not all that there are. The same model, tokens a second of all sequences after 128 (H200s, each line one
call), caches touched, and not:
  2, 4, 8, 16, 32 of 256 slots, 168 MB a cache  284, 525, 1046, 1818, 2927;  289, 536, 1060, 1842, 2953
  32 slots of 3024 positions, 396 MB, after 128 and 3000  2771, 1945;  2890, 2000
  12B, 8 and 32 of 32 slots, 21 MB  1794, 4520;  1783, 4494. So those of up to POOL are touched; sizes between were not
  tried
Not kept: one word of each block that a live row sees, by its block table: 2, 8, 32, 64 of 256 slots 291, 1074, 2980,
3830 (289, 1066, 2960, 3848 of no cache), of 3024 positions 2862 and 1895, 32 requests of a server 2312 (2367).
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
