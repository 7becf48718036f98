"""NPU or iGPU: each matrix and attention alone on either, and which steps of a schedule gain beside the other
(--placement).

Modelled, never measured, but for the host's share, which is measured on the machine that host.toml names. A step that a
plan runs on the NPU is a submit of its own: that is what the engine does, and what is priced.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.perf.npu import attention as npu_attention
from hybrid.perf.npu.cycles import ISSUE, Product, rates, run_times
from hybrid.perf.npu.host import figures, host_ms, switch_ms
from hybrid.spec.devicesheet import find_sheet

# model: layers, then (part, K, N); bits of a weight on the iGPU (q4_0 with its scales).
MODELS: dict[str, tuple[int, tuple[tuple[str, int, int], ...]]] = {
    "27b": (62, (("qkv", 5376, 8192), ("attn_output", 4096, 5376), ("gate_up", 5376, 43008), ("down", 21504, 5376))),
    "e2b": (30, (("qkv", 2048, 3072), ("attn_output", 2048, 2048), ("gate_up", 2048, 16384), ("down", 8192, 2048))),
}
Q4_BYTES = 4.5 / 8


@dataclass(frozen=True, slots=True)
class Placed:
    """Milliseconds of one layer's step alone. host_ms: of npu's host side, which the NPU waits for."""

    model: str
    phase: str
    part: str
    npu_ms: float
    host_ms: float
    gpu_ms: float

    @property
    def best(self) -> str:
        return "npu" if self.npu_ms + self.host_ms < self.gpu_ms else "gpu"


def on_npu(part: str, model: str, tokens: int, before: int = 0, window: int = 0) -> float:
    """Seconds of a step on the NPU, a submit of its own: int8 weights, or attention with scores in bfloat16 as the
    schedules ask for, of `tokens` rows after `before` positions."""
    if part == "attention":
        heads, group, d, _ = npu_attention.MODELS[model]
        return npu_attention.work(heads, group, d, tokens, before, window, "bf16", rates()).total
    k, n = next((k, n) for name, k, n in MODELS[model][1] if name == part)
    m = 64 if tokens > 64 else 16
    size = (-(-tokens // (4 * m)) * 4 * m, k, n)
    held = Gemm(*size, m, 128, 64).repeat
    return run_times(Product((m, 128, 64), size, issue=ISSUE["i8"], held=held), rates()).total


def on_gpu(part: str, model: str, tokens: int, before: int = 0, window: int = 0) -> float:
    """Seconds of a step on the iGPU: q4_0 weights, an f16 cache."""
    gpu = find_sheet("radeon-780m")
    memory, flops = (getattr(gpu.reached, k) or getattr(gpu.peak, k) for k in ("bandwidth_gb_s", "f16_tflops"))
    wait = gpu.costs.dependent_dispatch_us
    if part == "attention":
        heads, group, d, _ = npu_attention.MODELS[model]
        context = before + tokens
        pairs = tokens * (before + context + 1) / 2 if not window else tokens * min(window, context)
        moved = 4.0 * min(context, window + tokens if window else context) * heads * d + 6 * tokens * heads * group * d
        work = 4 * pairs * heads * group * d
    else:
        k, n = next((k, n) for name, k, n in MODELS[model][1] if name == part)
        moved, work = k * n * Q4_BYTES + tokens * (k + 4 * n), 2.0 * tokens * k * n
    return max(moved / (memory.value * 1e9), work / (flops.value * 1e12)) + (wait.value * 1e-6 if wait else 0)


def placement(tokens: int = 512) -> list[Placed]:
    """Every step of a layer alone on each device, in prefill of `tokens` rows and in decode of one row after as
    many."""
    found = []
    for model, (_, parts) in MODELS.items():
        for phase, t in (("prefill", tokens), ("decode", 1)):
            for part in (*(name for name, _, _ in parts), "attention"):
                times = (f(part, model, t, tokens - t) for f in (on_npu, on_gpu))
                npu, gpu = (1e3 * s for s in times)
                found.append(Placed(model, phase, part, npu, host_ms(model, part, t), gpu))
    return found


def placement_table(tokens: int = 512) -> str:
    lines = [
        f"modelled, never measured: one layer's matrices and attention, {tokens} tokens of prefill, and one of decode over as many "
        "positions; ms alone on each device.",
        f"NPU: the sheet's 1.0 GHz, the memory rate fitted there, the open compiler's issue rate ({ISSUE['i8']}; attention "
        f"{ISSUE['bf16']}), a submit for each step ({rates().dispatch_us.value:g} us). iGPU: its sheet's rates.",
        f"Host: measured, {figures()['machine']['text']}.",
        f"{'model':<6}{'phase':<9}{'step':<14}{'NPU':>9}{'+ host':>9}{'= NPU side':>12}{'iGPU':>9}  the quicker",
    ]
    table = placement(tokens)
    for row in table:
        lines.append(
            f"{row.model:<6}{row.phase:<9}{row.part:<14}{row.npu_ms:>9.3f}{row.host_ms:>9.3f}{row.npu_ms + row.host_ms:>12.3f}"
            f"{row.gpu_ms:>9.3f}  {row.best}"
        )
    for model, (layers, _) in MODELS.items():
        for phase in ("prefill", "decode"):
            of = [r for r in table if (r.model, r.phase) == (model, phase)]
            npu, host, gpu = (layers * sum(getattr(r, f"{d}_ms") for r in of) for d in ("npu", "host", "gpu"))
            shares = [1 / (1 / side + 1 / gpu) for side in (npu, npu + host)]
            lines.append(
                f"{model} {phase}: {layers} layers {npu:.0f} ms on the NPU, {host:.0f} on the host for it, {gpu:.0f} on the "
                f"iGPU; shared in the best proportion, memory permitting, {gpu / shares[0]:.2f} x the iGPU alone without the "
                f"host's share, {gpu / shares[1]:.2f} x with it"
            )
    lines.append("No step is quicker on the NPU. In decode nothing is gained: each step waits for the one before it.")
    lines.append(
        "In prefill what is gained is what the iGPU need not do while another chunk keeps it busy: --pipeline."
    )
    return "\n".join(lines)


def fabric(part: str, model: str) -> tuple[str, int]:
    """Which configuration of the array a step needs: products of one K share one."""
    return (
        ("attention", 0)
        if part == "attention"
        else ("product", next(k for name, k, _ in MODELS[model][1] if name == part))
    )


def switches(parts: tuple[str, ...], model: str) -> dict[str, float]:
    """Seconds before each of a layer's steps on the NPU, in their order, for a change of fabric; layers follow one
    another."""
    needed = [fabric(part, model) for part in parts]
    return {part: 1e-3 * switch_ms() * (needed[i] != needed[i - 1]) for i, part in enumerate(parts)}
