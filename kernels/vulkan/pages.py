"""Pages ahead of their use, and the loop that records a plan's steps.

A GPU's caches hold the addresses of so many pages: an H200's about 4096 of 2 MiB. A model of more bytes meets each weight
with a walk through the page tables, once a token, at the start of the dispatch that waits for it. So after each step a
dispatch that nothing waits for reads one word of every page of what a step a little later will read.

H200, driver 580.159.04, gemma3-27b q4_0 (15.6 GB), decode at 512, us a layer of 7 dispatches, recorded chain of all layers:
  24 of its layers (5.6 GB) 94.4; 28 (6.5) 95.3; 32 (7.4) 96.7; 36 (8.4) 98.4; 40 (9.3) 100.4; all 62 (14.4) 101.9
  all 62 with pages touched: after every step, 3 steps ahead 96.7 (8 copies); 2 ahead 98.0; 1 ahead 97.6
    once a layer, the next one's, beside ffn_up 97.4; beside other dispatches 98.3 to 100.2; before a dispatch instead of
    after it 98.2 to 102; every 256 KiB 110
  changed nothing: allocations of 32 MiB to 4 GiB; descriptor sets, dynamic offsets, pushed descriptors, descriptor buffers
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from hybrid.core.plan import Plan
from hybrid.kernels.vulkan import runs
from hybrid.kernels.vulkan.memory import MIB, Slice
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

PAGE = 2 * MIB  # what drivers map large allocations in
AHEAD = 3  # steps between the touch and the use: the walks take about as long as a short dispatch
SLICES = 8  # that a dispatch of touch_pages takes


def record_steps(rec: Recorder, plan: Plan, tensors: Mapping[str, DeviceTensor], binding: Callable[[str], Any]) -> None:
    """Record every step of a plan, and between their dispatches what touches pages."""
    far = [_far(plan, tensors, index) for index in range(len(plan.steps))]
    total = sum(s.size for s in {(id(s.buffer), s.offset): s for slices in far for s in slices}.values())
    copies = rec.device.tuning.choose("touch_pages", {"copies": 0}, mib=total // MIB, rows=plan.rows)["copies"]
    for taken in runs.record(rec, plan.steps, tensors, binding):
        if copies:  # plans run again and again: after the last step comes the first
            touch(rec, [s for index in taken for s in far[(index + AHEAD) % len(far)]], copies)


def touch(rec: Recorder, slices: list[Slice], copies: int) -> None:
    """Read a word of every page of the largest of these slices, `copies` times on the device; nothing where there are
    none. Small ones lie in pages that others touch."""
    slices = sorted((s for s in slices if s.size >= 4), key=lambda s: -s.size)[:SLICES]
    if not slices:
        return
    words = [s.size // 4 for s in slices] + [1] * (SLICES - len(slices))
    bound = slices + slices[-1:] * (SLICES - len(slices))
    rec.dispatch(rec.kernel("touch_pages"), bound, [rec.counters(1)],
                 struct.pack(f"<{2 + SLICES}I", len(slices), PAGE // 4, *words), (len(slices) * copies,))


def _far(plan: Plan, tensors: Mapping[str, DeviceTensor], index: int) -> list[Slice]:
    """Weights and state that a step names: a pass reads them once, and everything else before it comes back to them."""
    names = dict.fromkeys(plan.steps[index].args.values())
    kept = [tensors[n] for n in names if plan.tensors[n].kind in ("weight", "state")]
    return [part for tensor in kept for chunk in tensor.chunks for part in chunk.parts]
