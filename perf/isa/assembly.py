"""Statistics of a kernel's gfx11 assembly: counts by kind of instruction, and its hot loop.

The hot loop is the innermost loop with the most multiply-adds; what it issues for each multiply-add bounds a kernel
that is not bound by memory. A wave32 vector instruction takes one cycle of its SIMD, a WMMA 32 (16x16x16 products), a
transcendental 4 (RDNA3 ISA guide; WMMA from its rate of 512 operations per CU and clock).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(BB\d+):")
_INSTRUCTION = re.compile(r"^\s+([a-z]\w*)([^;]*)")
_TARGET = re.compile(r"\b(BB\d+)\b")
LANES = 32
KINDS = {
    "dot4": r"v_dot4_",
    "wmma": r"v_wmma_",
    "load_128": r"(global|buffer|flat)_load_(b128|dwordx4)",
    "load_narrow": r"(global|buffer|flat)_load_(?!b128|dwordx4)",
    "store": r"(global|buffer|flat)_store_",
    "lds_access": r"ds_",
    "scalar_load": r"s_(buffer_)?load_",
    "wait": r"s_waitcnt",
    "barrier": r"s_barrier",
    "valu": r"v_",
    "salu": r"s_(?!waitcnt|barrier|buffer_load|load|clause|delay_alu|nop|branch|cbranch|endpgm)",
    "branch": r"s_c?branch",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
# Multiply-adds of one instruction and lane.
_MACS = (
    (re.compile(r"v_dot4_"), 4.0),
    (re.compile(r"v_wmma_"), 16 * 16 * 16 / LANES),
    (re.compile(r"v_(dot2_|pk_fma_|dual_fma)"), 2.0),
    (re.compile(r"v_(fma|fmac|mad|mac)(_|aak|amk)"), 1.0),
)


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of the hot loop and wave: SIMD cycles of vector instructions, and multiply-adds of all lanes."""

    cycles: float
    macs: float


def mix(names: Sequence[str]) -> dict[str, int]:
    """Instructions by kind; `valu` counts dot4 and wmma too."""
    return {kind: sum(bool(p.match(n)) for n in names) for kind, p in _PATTERNS.items()}


def parse(text: str) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """(mnemonics, label -> index of its first instruction, (index, target) of every branch)."""
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := _INSTRUCTION.match(line):
            if target := (_TARGET.search(found[2]) if "branch" in found[1] else None):
                branches.append((len(names), target[1]))
            names.append(found[1])
    return names, labels, branches


def macs_of(names: Sequence[str]) -> float:
    return LANES * sum(next((n for p, n in _MACS if p.match(name)), 0.0) for name in names)


def cycles_of(names: Sequence[str]) -> float:
    def cost(name: str) -> float:
        if name.startswith("v_wmma_"):
            return 32.0
        return 4.0 if _TRANSCENDENTAL.match(name) else float(name.startswith("v_"))

    return sum(map(cost, names))


def hot_loop(text: str) -> Loop | None:
    """The loop (without the loops inside it), or the straight line, with the most multiply-adds; None where nothing is
    multiplied. A kernel whose loop is unrolled away does its work in the straight line."""
    names, labels, branches = parse(text)
    loops = {(labels[t], i + 1) for i, t in branches if labels.get(t, i + 1) <= i} | {(0, len(names))}
    found = []
    for a, b in loops:
        inside = [(c, d) for c, d in loops if (c, d) != (a, b) and a <= c and d <= b]
        own = [n for i, n in enumerate(names[a:b], a) if not any(c <= i < d for c, d in inside)]
        found.append(Loop(cycles_of(own), macs_of(own)))
    return max((loop for loop in found if loop.macs), key=lambda loop: loop.macs, default=None)


def summary(kernel: Mapping[str, object]) -> dict[str, object]:
    """The line of a kernel in perf/gfx1103: the compiler's numbers under plain names, the mix, the hot loop."""
    text = str(kernel["assembly"])
    names, _, _ = parse(text)
    loop = hot_loop(text)
    row: dict[str, object] = {"spirv": kernel["spirv"]}
    row |= {ours: kernel[theirs] for ours, theirs in _STATISTICS.items()}
    row |= mix(names)
    row["loop"] = None if loop is None else {"cycles": loop.cycles, "macs": loop.macs}
    return row


_STATISTICS = {
    "instructions": "Instructions",
    "vgprs": "VGPRs",
    "sgprs": "SGPRs",
    "spilled_vgprs": "Spilled VGPRs",
    "spilled_sgprs": "Spilled SGPRs",
    "scratch": "Scratch size",
    "lds": "LDS size",
    "code_bytes": "Code size",
    "waves": "Subgroups per SIMD",
    "latency": "Latency",
    "inverse_throughput": "Inverse Throughput",
}
