"""Modelled gain of two prefill chunks in flight, one on each device: python -m perf.npu --pipeline.

One after another, a chunk takes the sum of what its segments take on either device; with two in flight a device runs
the other chunk meanwhile, and a long prompt takes what the busier device has to do. A segment on the NPU is the run, the
host's work for it (which the NPU waits for, in the one thread that feeds it) and a change of fabric where the last
run's was another. Both devices are given their own rates throughout: what they take from each other's memory bandwidth
is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.perf.npu.cycles import slower
from hybrid.perf.npu.host import figures, host_ms
from hybrid.perf.npu.placement import MODELS, on_gpu, on_npu, switches
from hybrid.spec.devicesheet import find_sheet

Segments = tuple[tuple[str, float], ...]
"""(device, seconds) in the order in which one chunk runs them."""
ORDER = ("qkv", "attention", "attn_output", "gate_up", "down")
WAYS: tuple[tuple[str, ...], ...] = (
    ("attention",),
    ("attn_output",),
    ("qkv",),
    ("down",),
    ("qkv", "attn_output"),
    ("attention", "attn_output"),
    ("qkv", "attn_output", "gate_up", "down"),
)
"""Steps of prefill that a schedule might place on the NPU."""
SHIPPED = {"gemma3-hybrid": ("down",)}
"""What the shipped schedules do place there (test_npu_cycles.py compares). None is a family's default: span()."""
GPU_SLOWER = 1.5
"""The rate of products on the iGPU is an assumption of its sheet; so many times slower is taken to be possible."""
GLOBAL = 6  # every so many layers sees the whole context


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

    @property
    def over_gpu(self) -> float:
        """How many times as quick as the iGPU alone."""
        return self.gpu_alone / self.in_flight


def makespan(chunks: list[Segments], lanes: int) -> float:
    """Seconds until all chunks are through: a segment begins when the one before it is done, its device is free, and,
    for a chunk's first, a lane is. Of those that could begin, the oldest chunk's goes first."""
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


def between(width: int, ffn: int, rows: int) -> dict[str, float]:
    """Seconds on the iGPU before each step of a layer that multiplies: a pass over the activations, and a dispatch."""
    gpu = find_sheet("radeon-780m")
    memory, wait = gpu.reached.bandwidth_gb_s or gpu.peak.bandwidth_gb_s, gpu.costs.dependent_dispatch_us
    assert memory and wait
    byte, dispatch = 1 / (memory.value * 1e9), wait.value * 1e-6
    sums = 16 * rows * width * byte + dispatch  # two sums and norms, float32 in and out
    return {
        "qkv": sums,
        "attention": dispatch,
        "attn_output": 0.0,
        "gate_up": sums,
        "down": 12 * rows * ffn * byte + dispatch,
    }


def span(model: str, chunks: int, tokens: int, parts: tuple[str, ...]) -> tuple[float, float]:
    """How many times as quick as the iGPU alone at worst and at best: with runs of the NPU as modelled or as far above
    it as the slowest published one of tiles like these, and the iGPU as assumed or slower."""
    found = [
        gain(model, chunks, tokens, parts=parts, npu=npu, gpu=gpu).over_gpu
        for npu in (1.0, slower(64, 64)[1])
        for gpu in (1.0, GPU_SLOWER)
    ]
    return min(found), max(found)


def gain(
    model: str,
    chunks: int = 8,
    tokens: int = 512,
    lanes: int = 2,
    parts: tuple[str, ...] = WAYS[-1],
    host: bool = True,
    npu: float = 1.0,
    gpu: float = 1.0,
) -> Gain:
    """A prompt of `chunks` passes of `tokens` rows with `parts` of each layer on the NPU. Global layers see every
    position so far, local ones a window. host: with the host's work and changes of fabric. npu, gpu: times of runs and
    of the iGPU's steps over those modelled."""
    layers, matrices = MODELS[model]
    sizes = {part: (k, n) for part, k, n in matrices}
    rest = between(sizes["qkv"][0], sizes["down"][0], tokens)
    window = {"27b": 1024, "e2b": 512}[model]
    parts = tuple(p for p in ORDER if p in parts)
    extra = dict.fromkeys(parts, 0.0)
    if host:
        extra = {p: 1e-3 * host_ms(model, p, tokens) + s for p, s in switches(parts, model).items()}
    passes: list[Segments] = []
    alone = 0.0
    for c in range(chunks):
        found: list[tuple[str, float]] = []
        for layer in range(layers):
            seen = 0 if layer % GLOBAL == GLOBAL - 1 else window
            queued = 0.0
            for part in ORDER:
                here = gpu * on_gpu(part, model, tokens, c * tokens, seen)
                alone += rest[part] + here
                queued += rest[part]
                if part in parts:
                    run = npu * _npu(part, model, tokens, c * tokens, seen) + extra[part]
                    found += [("gpu", queued), ("npu", run)]
                    queued = 0.0
                else:
                    queued += here
            found.append(("gpu", queued))
        passes.append(tuple(found))
    share = {d: sum(s for p in passes for device, s in p if device == d) for d in ("npu", "gpu")}
    return Gain(model, tokens, chunks, makespan(passes, 1), makespan(passes, lanes), share["npu"], share["gpu"], alone)


_times: dict[tuple[str, str, int, int, int], float] = {}


def _npu(part: str, model: str, tokens: int, before: int, window: int) -> float:
    key = (part, model, tokens, before if part == "attention" else 0, window if part == "attention" else 0)
    if key not in _times:
        _times[key] = on_npu(*key)
    return _times[key]


def table(tokens: int = 512) -> str:
    lines = [
        "modelled, never measured: a prompt in chunks, two in flight, with these steps of prefill on the NPU; how many times as",
        "quick as the iGPU alone, without the host's work and with it. NPU busy: with it. Above 1 something is gained.",
        f"From, to: with it, runs up to {slower(64, 64)[1]:.2f} times as long as modelled (the slowest published one with such "
        f"tiles), an iGPU up to {GPU_SLOWER} times slower than its sheet assumes.",
        f"Host: measured, {figures()['machine']['text']}.",
        f"{'model':<6}{'prompt':>7}  {'on the NPU':<34}{'iGPU alone s':>13}{'in flight s':>12}{'without':>9}{'with':>7}"
        f"{'NPU busy':>10}{'from':>7}{'to':>6}",
    ]
    best: dict[str, tuple[float, tuple[str, ...], tuple[float, float]]] = {}
    for model in MODELS:
        for chunks in (2, 8):
            for parts in WAYS:
                bare, g = (gain(model, chunks, tokens, parts=parts, host=h) for h in (False, True))
                ends = span(model, chunks, tokens, parts)
                best[model] = max(best.get(model, (0.0, (), ends)), (g.over_gpu, parts, ends))
                lines.append(
                    f"{model:<6}{g.chunks * tokens:>7}  {', '.join(parts):<34}{g.gpu_alone:>13.2f}{g.in_flight:>12.2f}"
                    f"{bare.over_gpu:>9.2f}{g.over_gpu:>7.2f}{g.npu / g.in_flight:>10.0%}{ends[0]:>7.2f}{ends[1]:>6.2f}"
                )
    for model, (over, parts, (least, most)) in best.items():
        where = f"{over:.2f} x, with {', '.join(parts)} there, between {least:.2f} and {most:.2f}"
        risk = "nothing is gained" if over <= 1 else "a loss is possible" if least < 1 else "a gain"
        lines.append(f"{model}: at most {where}: {risk}")
    lines.append(
        "With all four products there the prompt takes longer than on the iGPU alone: overlap hides the smaller share."
    )
    return "\n".join(lines)
