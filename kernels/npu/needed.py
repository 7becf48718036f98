"""Requirements of a plan on an NPU: designs to build, and bytes of resident operands.

designs(plan, seen)       each design that some step may run with any number of live rows, once
resident_bytes(plan)      {what: bytes}: weights in the designs' order, views of caches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

from hybrid.core.plan import Plan, Step
from hybrid.kernels.npu import ops
from hybrid.kernels.npu.attend import capacity, designs_of, group_of, shape_of
from hybrid.kernels.npu.design import Design
from hybrid.kernels.npu.designs import flash_attention
from hybrid.kernels.npu.designs.attention import Scores
from hybrid.kernels.npu.designs.gemm import Gemm, Weights

BACKEND = "npu"
SCORES: dict[str, Scores] = {"attention": "bf16", "attention_i8": "i8"}


def steps_of(plan: Plan, own: bool) -> Iterator[Step]:
    """The steps of a plan that the NPU runs: those placed there, or all of a plan that is its own."""
    return (s for s in plan.steps if (own or s.device == BACKEND) and s.op in ops.OPS)


def designs(plan: Plan, seen: set[Any], own: bool = False) -> Iterator[Design]:
    """Of the steps on the NPU, without those in `seen`, which grows: layers have the same. own: every step is there."""
    for step in steps_of(plan, own):
        for size, make in _sizes(step, plan):
            if size not in seen:
                yield make()
                seen.add(size)


def _sizes(step: Step, plan: Plan) -> Iterator[tuple[Any, Callable[[], Design]]]:
    """(what tells a design from others, how to make it)."""
    bind = step.bind
    if step.op in SCORES:
        for a in designs_of(SCORES[step.op], bind, int(step.attrs.get("window", 0))):
            yield a, lambda a=a: flash_attention(a)  # type: ignore[misc]
    elif step.op == "rmsnorm":
        eps = float(step.attrs["eps"])
        for n in dict.fromkeys(ops.norm_of(t, bind["H"]) for t in range(1, bind["T"] + 1)):
            yield (n, eps), lambda n=n: ops._norm(n, eps)  # type: ignore[misc]
    else:
        weights, out = _kind(step, plan)
        for g in dict.fromkeys(ops.choose(t, bind["K"], bind["N"], weights, out) for t in range(1, bind["T"] + 1)):
            yield g, lambda g=g: ops._gemm(g)  # type: ignore[misc]


def _kind(step: Step, plan: Plan) -> tuple[Weights, Literal["i32", "f32"]]:
    if step.op == "matmul_blocks":
        return ("q4_0" if plan.tensors[step.args["w"]].dtype == "q4_0" else "q8_0"), "f32"
    return "i8", "i32"


def resident_bytes(plan: Plan, own: bool = False) -> dict[Any, int]:
    """By what the operands are made of. Of weights, each order that the plan's numbers of rows ask for; of caches, a
    view for each slot."""
    found: dict[Any, int] = {}
    for step in steps_of(plan, own):
        if step.op == "rmsnorm":
            continue
        bind = step.bind
        if step.op in SCORES:
            group = group_of(bind["HQ"] // bind["HK"], bind["D"])
            a = shape_of(bind["HQ"] // group, group, bind["D"], SCORES[step.op])
            tiles = capacity(a, int(step.attrs.get("window", 0)), bind["B"], bind["BS"], bind["S"], bind["MB"])
            found[step.args["k_cache"], a.scores, tiles] = bind["S"] * a.heads * tiles * a.key_bytes
            continue
        weights, out = _kind(step, plan)
        for g in cast(
            "dict[Gemm, None]", dict.fromkeys(ops.choose(t, bind["K"], bind["N"], weights, out) for t in (1, bind["T"]))
        ):
            found[step.args["w"], g.weights, g.k, g.n] = ops.weight_bytes(g)
    return found
