"""Modelled times of attention on the NPU: python -m perf.npu --attention. No measurement of attention was fitted or is
predicted.

A core's cycles for one key tile follow from the instructions that the tile kernel issues (compiled for this computer
and counted): at best one vector operation, two loads, one store, one move in a cycle, of which the open compiler filled
0.485 on a bfloat16 product (measured.toml); that rate is taken. Only key tiles that somebody sees are computed; of
those that are sent there are as many as the design's span has (kernels/npu/attend.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hybrid.kernels.npu.attend import fitted, plan, shape_of
from hybrid.kernels.npu.catalogue import find
from hybrid.kernels.npu.compile import buffer, compiled
from hybrid.kernels.npu.designs import flash_attention
from hybrid.kernels.npu.designs.attention import CORES, HEAD, Attention, Scores
from hybrid.perf.npu.cycles import ISSUE
from hybrid.spec.npusheet import Rates

MODELS = {
    "27b": (16, 2, 128, 1024),
    "e2b": (2, 4, 256, 512),
}  # KV heads, query heads of each, head size, window of local layers
CASES = (
    ("prefill of 512, global", 512, 0, False),
    ("prefill of 512 at 8192, local", 512, 8192, True),
    ("decode at 8192, global", 1, 8192, False),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's attention over all KV heads. Seconds are modelled."""

    tiles: int
    """Key tiles computed, over all query tiles and heads."""
    square: int
    """Were every query tile to walk over every key tile of the cache."""
    cores: float
    streams: float
    channels: float
    ddr: float
    dispatch: float

    @property
    def total(self) -> float:
        return max(self.cores, self.streams, self.channels, self.ddr) + self.dispatch

    @property
    def bound(self) -> str:
        return max(("cores", "streams", "channels", "ddr"), key=lambda k: getattr(self, k))


def bundles(counts: dict[str, int]) -> float:
    """Cycles of a call whose instructions fill every slot: vector unit, two loads, store, moves and look-ups."""
    vector = sum(n for unit, n in counts.items() if unit.startswith("mac_")) + counts["alu"]
    return max(vector, counts["load"] / 2, counts["store"], counts["srs"] + counts["shuffle"] + counts["lookup"])


@lru_cache(maxsize=16)
def calls(a: Attention) -> tuple[float, float]:
    """(cycles of a key tile that every row sees, cycles of a query tile's start and end)."""
    found = []
    for kernel in flash_attention(a).kernels:
        k = compiled(
            find(kernel.name), dict(kernel.macros), options=("-O0",)
        )  # to be counted: it compiles in a third of the time
        sizes = k.entry.sizes(k.macros)
        args: dict[str, Any] = {n: buffer(sizes[n], arg.numpy) for n, arg in k.args.items()}
        if "q" in args:  # far behind keys without end: nothing is masked
            args["q"].view(np.uint8)[-HEAD:].view(np.int32)[:3] = 1 << 20, 1 << 21, 0
        k(*args.values())
        found.append(
            bundles(k.counts) / ISSUE["bf16"]
        )  # the rate of kernels whose scores are int8 is not known to be another
    start, tile, finish = found
    return tile, start + finish


def work(heads: int, group: int, d: int, rows: int, start: int, window: int, scores: Scores, r: Rates) -> Work:
    """`rows` new positions from `start` on."""
    shape = shape_of(heads, group, d, scores)
    positions = np.arange(start, start + rows)
    p = plan(positions - start, positions, window, shape)
    a = fitted(shape, p)
    tile, ends = calls(shape)
    per, hertz = heads // a.columns, r.clock_ghz.value * 1e9
    arriving = a.key_bytes / r.stream_bytes.value
    objects = 2 if scores == "bf16" else 1
    # Keys and values in bfloat16 fill a core: the next tile arrives when this one is done with. In int8 there is room
    # for two.
    step = tile + r.object_cycles.value * objects + (arriving if scores == "bf16" else 0)
    cores = streams = kv_bytes = 0.0
    for block in range(a.blocks):
        seen = [end - first for first, end in p.seen[block * CORES : (block + 1) * CORES]]
        sent = a.span(block)[1]  # of blocks behind the last row too: they let all of it pass
        seen = seen or [0]
        cores += (
            max(seen) * step + ends + (sent - max(seen)) * (arriving if scores == "bf16" else r.object_cycles.value)
        )
        streams += sent * arriving
        kv_bytes += sent * a.key_bytes
    q_bytes = a.blocks * CORES * (a.query_bytes + 2 * a.LQ * a.D)
    return Work(
        tiles=heads * sum(end - first for first, end in p.seen),
        square=heads * len(p.seen) * -(-(start + rows) // a.LK),
        cores=per * cores / hertz,
        streams=per * streams / hertz,
        channels=per * kv_bytes / (r.channel_gb_s.value * 1e9),
        ddr=heads * (kv_bytes + q_bytes) / (r.ddr_gb_s.value * 1e9),
        dispatch=r.dispatch_us.value * 1e-6 + r.dispatch_cycles.value / hertz,  # a submit of its own, as a step's is
    )


def table(r: Rates) -> str:
    return "\n".join(_lines(r))


def _lines(r: Rates) -> Iterator[str]:
    share = f"{ISSUE['bf16']} of a bundle's slots filled"
    yield f"modelled, never measured, at {r.clock_ghz.value} GHz and {share}: one layer's attention"
    yield f"{'model':<6}{'case':<32}{'scores':<8}{'key tiles':>10}{'of square':>11}{'ms':>9}  bound by"
    for model, (heads, group, d, window) in MODELS.items():
        for case, rows, start, local in CASES:
            kinds: tuple[Scores, ...] = ("bf16", "i8")
            for scores in kinds:
                w = work(heads, group, d, rows, start, window if local else 0, scores, r)
                yield (
                    f"{model:<6}{case:<32}{scores:<8}{w.tiles:>10}{w.tiles / w.square:>11.2f}{1e3 * w.total:>9.3f}  {w.bound}"
                )
