"""What it is worth to have two prefill chunks in flight, one on each device (python -m perf.npu --pipeline). Modelled.

One after another, a chunk takes the sum of what its segments take on either device; with two in flight a device goes on
with the other chunk, and a long prompt takes what the busier device has to do. Segments are gemma3-npu-prefill's: four
products of a layer on the NPU, attention and what stands between them on the iGPU. Both devices are given their own rates
throughout: what they take from each other's memory bandwidth is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.perf.npu.cycles import MODELS, Product, placement, rates, run_times
from hybrid.spec.devicesheet import find_sheet

Segments = tuple[tuple[str, float], ...]
"""(device, seconds) in the order in which one chunk runs them."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds of a prompt, and of each device's share of it."""

    model: str
    tokens: int
    chunks: int
    in_turn: float
    in_flight: float
    npu: float
    gpu: float
    gpu_alone: float
    """Everything on the iGPU."""


def makespan(chunks: list[Segments], lanes: int) -> float:
    """Seconds until all chunks are through: a segment begins when the one before it is done, its device is free, and, for a
    chunk's first, a lane is. Of those that could begin, the oldest chunk's goes first."""
    free = dict.fromkeys({device for segments in chunks for device, _ in segments}, 0.0)
    at, ready = [0] * len(chunks), [0.0] * len(chunks)
    ended: list[float] = []
    while len(ended) < len(chunks):
        flying = [c for c in range(len(chunks)) if at[c] < len(chunks[c])][:lanes]
        starts = {c: max(ready[c], free[chunks[c][at[c]][0]]) for c in flying}
        c = min(flying, key=lambda c: (starts[c], c))
        device, seconds = chunks[c][at[c]]
        ready[c] = free[device] = starts[c] + seconds
        at[c] += 1
        if at[c] == len(chunks[c]):
            ended.append(ready[c])
            if c + lanes < len(chunks):
                ready[c + lanes] = ready[c]
    return max(ended)


def between(width: int, heads_width: int, ffn: int, rows: int, seen: float) -> dict[str, float]:
    """Seconds on the iGPU before each product of a layer: attention's products over `seen` positions, else what a pass over
    the activations takes, and a dispatch."""
    gpu = find_sheet("radeon-780m")
    flops, memory = gpu.reached.f16_tflops or gpu.peak.f16_tflops, gpu.reached.bandwidth_gb_s or gpu.peak.bandwidth_gb_s
    wait = gpu.costs.dependent_dispatch_us
    assert flops and memory and wait
    byte, dispatch = 1 / (memory.value * 1e9), wait.value * 1e-6
    return {
        "qkv": 16 * rows * width * byte + dispatch,  # two sums and norms, float32 in and out
        "attn_output": 4 * rows * seen * heads_width / (flops.value * 1e12) + 2 * dispatch,
        "gate_up": 16 * rows * width * byte + dispatch,
        "down": 12 * rows * ffn * byte + dispatch,
    }


def gain(model: str, chunks: int = 8, tokens: int = 512, lanes: int = 2) -> Gain:
    """A prompt of `chunks` passes of `tokens` rows. Global layers see every position so far, local ones at most 1024."""
    layers, parts = MODELS[model]
    sizes = {part: (k, n) for part, k, n in parts}
    width, (heads_width, _), (ffn, _) = sizes["qkv"][0], sizes["attn_output"], sizes["down"]
    tiled = (64, 128, 64)
    on_npu = {p: run_times(Product(tiled, (-(-tokens // 256) * 256, k, n)), rates(), chained=True).total for p, k, n in parts}
    on_gpu = {row.part: row.gpu_ms * 1e-3 for row in placement(tokens) if (row.model, row.phase) == (model, "prefill")}
    passes: list[Segments] = []
    alone = 0.0
    for c in range(chunks):
        found: list[tuple[str, float]] = []
        for layer in range(layers):
            context = (c + 0.5) * tokens
            seen = context if layer % 6 == 5 else min(context, 1024.0)
            rest = between(width, heads_width, ffn, tokens, seen)
            for part in on_npu:
                found += [("gpu", rest[part]), ("npu", on_npu[part])]
                alone += rest[part] + on_gpu[part]
        passes.append(tuple(found))
    share = {d: sum(s for p in passes for device, s in p if device == d) for d in ("npu", "gpu")}
    return Gain(model, tokens, chunks, makespan(passes, 1), makespan(passes, lanes), share["npu"], share["gpu"], alone)


def table(tokens: int = 512) -> str:
    lines = [
        "modelled, never measured: a prompt in chunks by gemma3-npu-prefill, seconds; in turn: one chunk after another, in",
        "flight: two at a time (pipeline = 2); of it at least what the busier device has to do. iGPU alone: everything there.",
        f"{'model':<6}{'prompt':>8}{'in turn':>9}{'in flight':>11}{'gain':>7}{'NPU busy':>10}{'iGPU busy':>11}{'iGPU alone':>12}",
    ]
    for model in MODELS:
        for chunks in (1, 2, 8):
            g = gain(model, chunks, tokens)
            lines.append(
                f"{model:<6}{g.chunks * tokens:>8}{g.in_turn:>9.2f}{g.in_flight:>11.2f}{g.in_turn / g.in_flight:>7.2f}"
                f"{g.npu / g.in_flight:>10.0%}{g.gpu / g.in_flight:>11.0%}{g.gpu_alone:>12.2f}"
            )
    lines.append(
        "Overlap hides the smaller share and no more: with all four products on the NPU that is the iGPU's, and the prompt still "
        "takes longer than on the iGPU alone."
    )
    return "\n".join(lines)
