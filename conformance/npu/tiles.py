"""Operations of the specs through the NPU's tile kernels: cut into tiles here, as a design's DMA does on the NPU.

    op, run = RUNS["attention_i8"]        run(spec, case, Kernels()) raises Disagreement

Inputs are first converted to the NPU's types (bfloat16, int8 with a scale for each row, int4 with two-level scales);
the oracle gets the same numbers. Integer sums are compared for equality with NumPy's integers, real results within the
spec's bound. Memory starts as NaN or as junk, and rows missing from a tile hold finite junk wherever the kernels mask
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import compare, values
from hybrid.harness.cases import Case
from hybrid.harness.inputs import make
from hybrid.harness.reference import allowed, cut_live
from hybrid.harness.scales import Call
from hybrid.kernels.npu.compile import Kernel, aligned, buffer, kernel
from hybrid.kernels.npu.layout import (
    bf16,
    from_limbs,
    int8_rows,
    limbs,
    nibbles,
    padded,
    real,
    tiled,
    two_parts,
    untiled,
)
from hybrid.kernels.oracle import ORACLE
from hybrid.quant.blocks import integers
from hybrid.spec import OpSpec

JUNK = 48.0  # in keys and values beyond the last one
LK = 16
GEMM = {"DIM_M": 16, "DIM_K": 64, "DIM_N": 32}


@dataclass
class Kernels:
    """Compiled entry points. `sources`: other texts of a source file, by its name. `modes`: a tile's state before each
    call; results may not depend on it. `options`: of the compiler."""

    sources: Mapping[str, Path] = field(default_factory=dict)
    modes: tuple[str, str] = ("ceil", "symmetric")
    options: tuple[str, ...] = ()
    _made: dict[Any, Kernel] = field(default_factory=dict)

    def get(self, name: str, file: str, **macros: int | float) -> Callable[..., None]:
        key = (name, *sorted(macros.items()))
        if key not in self._made:
            self._made[key] = kernel(name, source=self.sources.get(file), options=self.options, **macros)
        made = self._made[key]

        def call(*args: Any) -> None:
            made.modes = self.modes
            made(*args)

        return call


def rmsnorm(spec: OpSpec, case: Case, kernels: Kernels) -> compare.Verdict:
    inputs = _live(spec, case)
    x, w = bf16(values.real(inputs["x"])), two_parts(values.real(inputs["w"]))
    call = _call(spec, case, {"x": real(x), "w": real(w[0]) + real(w[1])})
    norm = kernels.get("rmsnorm", "rmsnorm.cc", ROWS=2, DIM_H=case.bind["H"], EPS=float(case.attrs["eps"]))
    weights, y = aligned(w), np.empty(x.shape, np.uint16)
    for i in range(0, len(x), 2):
        out = buffer((2, x.shape[1]), np.uint16, 0x7FC1)
        norm(aligned(padded(x[i : i + 2], 2, 1)), weights, out)
        y[i : i + 2] = out[: len(x) - i]
    return _judge(spec, case, call, "y", real(y), "bf16")


def linear_i8(spec: OpSpec, case: Case, kernels: Kernels) -> compare.Verdict:
    """W8A8 with a scale for each row of x and each row of w."""
    inputs = _live(spec, case)
    x, x_scale = int8_rows(values.real(inputs["x"]))
    w, w_scale = int8_rows(values.real(inputs["w"]))
    call = _call(
        spec, case, {"x": x * x_scale[:, None].astype(np.float64), "w": w * w_scale[:, None].astype(np.float64)}
    )
    zero, step, scale = (kernels.get(f"gemm_i8{n}", "gemm_i8.cc", **GEMM) for n in ("_zero", "", "_scale"))
    y = np.empty((len(x), len(w)), np.float32)
    for rows, columns in _blocks(*y.shape):
        a, b = padded(x[rows], GEMM["DIM_M"], GEMM["DIM_K"]), padded(w[columns].T, GEMM["DIM_K"], GEMM["DIM_N"])
        c, out = (buffer((GEMM["DIM_M"] // 4, GEMM["DIM_N"] // 8, 4, 8), t, 77) for t in (np.int32, np.float32))
        zero(c)
        for k in range(0, a.shape[1], GEMM["DIM_K"]):
            step(aligned(tiled(a[:, k : k + GEMM["DIM_K"]], 4, 8)), aligned(tiled(b[k : k + GEMM["DIM_K"]], 8, 8)), c)
        compare.same(f"{case}: int32 sums", untiled(c), (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32))
        down, across = padded(x_scale[rows], GEMM["DIM_M"]), padded(w_scale[columns], GEMM["DIM_N"])
        scale(c, aligned(down), aligned(across), out)
        y[rows, columns] = untiled(out)[: len(x[rows]), : len(w[columns])]
    return _judge(spec, case, call, "y", y, "f32")


def linear_i4(spec: OpSpec, case: Case, kernels: Kernels) -> compare.Verdict:
    """W4A8: q4_0's codes and scales, a scale for each row of x, which the kernel applies too."""
    inputs = _live(spec, case)
    x, x_scale = int8_rows(values.real(inputs["x"]))
    call = _call(spec, case, {"x": x * x_scale[:, None].astype(np.float64)})
    y = _blockwise(spec, case, kernels, x, "gemm_i8i4")
    rows, out = kernels.get("gemm_i8i4_rows", "gemm_i8i4.cc", **GEMM), np.empty_like(y)
    for r, c in _blocks(*y.shape):
        scaled = buffer((GEMM["DIM_M"] // 4, GEMM["DIM_N"] // 8, 4, 8), np.float32, np.nan)
        down = aligned(padded(x_scale[r], GEMM["DIM_M"]))
        rows(aligned(tiled(padded(y[r, c], GEMM["DIM_M"], GEMM["DIM_N"]), 4, 8)), down, scaled)
        out[r, c] = untiled(scaled)[: len(x[r]), : y[r, c].shape[1]]
    return _judge(spec, case, call, "y", out, "f32")


def linear_q8(spec: OpSpec, case: Case, kernels: Kernels) -> compare.Verdict:
    """W8A8 with q8_0's codes and scales; the scales of x's rows are the host's."""
    x, x_scale = int8_rows(values.real(_live(spec, case)["x"]))
    call = _call(spec, case, {"x": x * x_scale[:, None].astype(np.float64)})
    return _judge(spec, case, call, "y", _blockwise(spec, case, kernels, x, "gemm_i8q8") * x_scale[:, None], "f32")


def _blockwise(spec: OpSpec, case: Case, kernels: Kernels, x: np.ndarray, stem: str) -> np.ndarray:
    """codes x @ w.T with a scale for every 32; first with integers for scales, where equality is required."""
    w = _live(spec, case)["w"]
    (n, depth), groups, tiles = w.shape, GEMM["DIM_K"] // 32, -(-w.shape[1] // GEMM["DIM_K"])
    codes = integers(w.dtype, [p.reshape(-1, p.shape[-1] // (depth // 32)) for p in w.parts]).reshape(n, depth)
    m, unit = limbs(padded(w.parts[1].astype(np.float64), 1, groups), groups)
    spread = np.abs(w.parts[1].astype(np.float64))
    if (spread[spread > 0].min(initial=1) >= spread.max(initial=1) / 4096).all():
        compare.same(f"{case}: scales", from_limbs(m, unit)[:, : depth // 32], w.parts[1].astype(np.float64))
    for which, size in enumerate((2.0**-12, 1.0)):  # only the upper multipliers, then the lower ones
        small = np.zeros_like(m)
        small[..., which] = np.clip(m[..., which], -3, 3)
        wanted = x.astype(np.int64) @ (codes * np.repeat(small[..., which].astype(np.int64), 32, axis=1)[:, :depth]).T
        got = _multiplied(kernels, stem, x, codes, small, np.full((n, tiles), size, np.float32))
        compare.same(f"{case}: integer sums", got, wanted.astype(np.float32))
    return _multiplied(kernels, stem, x, codes, m, unit)


def _multiplied(
    kernels: Kernels, stem: str, x: np.ndarray, w: np.ndarray, m: np.ndarray, unit: np.ndarray
) -> np.ndarray:
    zero, step = (kernels.get(f"{stem}{n}", f"{stem}.cc", **GEMM) for n in ("_zero", ""))
    y, groups, deep = np.empty((len(x), len(w)), np.float32), GEMM["DIM_K"] // 32, 16 if stem == "gemm_i8i4" else 8
    for rows, columns in _blocks(*y.shape):
        a, b = padded(x[rows], GEMM["DIM_M"], GEMM["DIM_K"]), padded(w[columns].T, GEMM["DIM_K"], GEMM["DIM_N"])
        by = padded(m[columns], GEMM["DIM_N"], 1, 1).reshape(GEMM["DIM_N"] // 8, 8, -1, 2).transpose(2, 0, 3, 1)
        one = padded(unit[columns].T, 1, GEMM["DIM_N"])
        c = buffer((GEMM["DIM_M"] // 4, GEMM["DIM_N"] // 8, 4, 8), np.float32, np.nan)
        zero(c)
        for i, k in enumerate(range(0, a.shape[1], GEMM["DIM_K"])):
            codes = tiled(b[k : k + GEMM["DIM_K"]], deep, 8)
            step(
                aligned(tiled(a[:, k : k + GEMM["DIM_K"]], 4, deep)),
                aligned(nibbles(codes) if deep == 16 else codes),
                aligned(np.ascontiguousarray(by[i * groups : (i + 1) * groups])),
                aligned(one[i]),
                c,
            )
        y[rows, columns] = untiled(c)[: len(x[rows]), : len(w[columns])]
    return y


def attention(spec: OpSpec, case: Case, kernels: Kernels, int8: bool = False) -> compare.Verdict:
    """Runs of consecutive positions of a sequence, tile by tile, from its first key on (tiles outside a window
    included)."""
    inputs, d = _live(spec, case), case.bind["D"]
    group = case.bind["HQ"] // case.bind["HK"]
    q, k, v = (bf16(values.real(inputs[n])) for n in ("q", "k_cache", "v_cache"))
    forms = {
        "q": real(q).astype(np.float64),
        "k_cache": real(k).astype(np.float64),
        "v_cache": real(v).astype(np.float64),
    }
    q_codes, k_codes = (int8_rows(forms[n].reshape(-1, d)) for n in ("q", "k_cache"))
    if int8:
        for name, (codes, scale) in (("q", q_codes), ("k_cache", k_codes)):
            forms[name] = (codes * scale[:, None].astype(np.float64)).reshape(forms[name].shape)
    call = _call(spec, case, forms)
    lq = math.lcm(8, group) * (2 if math.lcm(8, group) < 16 else 1)
    stem = "attention_i8" if int8 else "attention"
    macros = {"LQ": lq, "LK": LK, "DIM_D": d, "GROUP": group, "SCALE": float(case.attrs["scale"])}
    start, tile, finish = (kernels.get(f"{stem}_{n}", f"{stem}.cc", **macros) for n in ("start", "tile", "finish"))
    dots = kernels.get("attention_i8_dots", "attention_i8.cc", **macros) if int8 else None
    slots, positions, table = (inputs[n].array for n in ("slots", "positions", "block_table"))
    size, junk, out = case.bind["BS"], bf16(np.array([JUNK]))[0], np.empty((len(q), case.bind["HQ"], d), np.float32)
    heads = (len(q), case.bind["HQ"], d)
    q, q8, qs = q.reshape(heads), q_codes[0].reshape(heads), q_codes[1].reshape(heads[:2])
    k8, ks = k_codes[0].reshape(k.shape), k_codes[1].reshape(k.shape[:3])
    for members in _runs(slots, positions, lq // group):
        slot, first = slots[members[0]], int(positions[members[0]])
        length = int(positions[slots == slot].max()) + 1
        keys = np.arange(length)
        where = (table[slot, keys // size], keys % size)
        for h in range(case.bind["HK"]):
            own = slice(h * group, (h + 1) * group)
            o, sums = buffer(lq * d, np.float32, np.nan), buffer(lq * 8, np.float32, np.nan)
            m, s, p = (
                buffer(lq * 8, np.uint16, 0x7FC1),
                buffer(8 * LK, np.float32, np.nan),
                buffer(8 * LK, np.uint16, 0x7FC1),
            )
            y = buffer((lq // 4, d // 4, 4, 4), np.uint16, 0x7FC1)
            rows = [_rows(x[members, own], lq) for x in (q, q8, qs[..., None])]
            start(o, m, sums)
            for at in range(0, length, LK):
                index = tuple(w[at : at + LK] for w in where)
                values_ = aligned(tiled(_more(v[index][:, h], junk), 8, 4))
                ends = (o, m, sums, s, p, first, at, length, int(case.attrs["window"]))
                if dots is None:
                    tile(
                        aligned(tiled(rows[0], 4, 8)), aligned(tiled(_more(k[index][:, h], junk), 4, 8)), values_, *ends
                    )
                    continue
                codes = _more(k8[index][:, h], 99)
                left, right = aligned(tiled(rows[1], 4, 8)), aligned(tiled(codes, 8, 8))
                exact = buffer((lq // 4, LK // 8, 4, 8), np.int32, 77)
                dots(left, right, exact)
                wanted = rows[1].astype(np.int32) @ codes.astype(np.int32).T
                compare.same(f"{case}: int32 scores", untiled(exact), wanted)
                key_scales = aligned(_more(ks[index][:, h, None], 1).reshape(-1))
                tile(left, right, aligned(rows[2].reshape(-1)), key_scales, values_, *ends)
            finish(o, sums, y)
            got = real(untiled(y)).reshape(group, lq // group, d)[:, : len(members)]
            out[members, own] = got.swapaxes(0, 1)
    return _judge(spec, case, call, "o", out.reshape(len(q), -1), "bf16")


def attention_i8(spec: OpSpec, case: Case, kernels: Kernels) -> compare.Verdict:
    return attention(spec, case, kernels, int8=True)


RUNS: dict[str, tuple[str, Callable[[OpSpec, Case, Kernels], compare.Verdict]]] = {
    "rmsnorm": ("rmsnorm", rmsnorm),
    "gemm_i8": ("linear", linear_i8),
    "gemm_i8i4": ("linear", linear_i4),
    "gemm_i8q8": ("linear", linear_q8),
    "attention": ("attention", attention),
    "attention_i8": ("attention", attention_i8),
}
"""Kernel file -> (operation, function that runs it)."""


def _rows(x: np.ndarray, lq: int) -> np.ndarray:
    """[rows, group, D] -> [LQ, D]: head after head, missing rows zero."""
    n, group, d = x.shape
    out = np.zeros((group, lq // group, d), x.dtype)
    out[:, :n] = x.swapaxes(0, 1)
    return out.reshape(lq, d)


def _more(x: np.ndarray, junk: Any) -> np.ndarray:
    """[n, D] -> [LK, D], the end filled with `junk`."""
    out = np.full((LK, x.shape[1]), junk, x.dtype)
    out[: len(x)] = x
    return out


def _runs(slots: np.ndarray, positions: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Rows of one sequence at consecutive positions, at most `most` at a time."""
    order = np.lexsort((positions, slots))
    breaks = np.flatnonzero((np.diff(slots[order]) != 0) | (np.diff(positions[order]) != 1)) + 1
    for run in np.split(order, breaks):
        yield from (run[i : i + most] for i in range(0, len(run), most))


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    for i in range(0, rows, GEMM["DIM_M"]):
        for j in range(0, columns, GEMM["DIM_N"]):
            yield slice(i, i + GEMM["DIM_M"]), slice(j, j + GEMM["DIM_N"])


def _live(spec: OpSpec, case: Case) -> dict[str, Tensor]:
    """The case's inputs, live rows only."""
    return {name: cut_live(spec, case, name, t) for name, t in make(spec, case, backend="npu").items()}


def _call(spec: OpSpec, case: Case, forms: Mapping[str, np.ndarray]) -> Call:
    """The oracle's results for inputs that are `forms` (the others as drawn)."""
    tensors = _live(spec, case)
    real_values = {n: values.real(t) for n, t in tensors.items()} | {
        n: np.asarray(f, np.float64) for n, f in forms.items()
    }
    refs = ORACLE[case.op](**real_values, **case.attrs, real=np.float64)
    dtypes = {**case.dtypes, **dict.fromkeys(forms, "f32")}
    return Call(tensors, real_values, case.attrs, dict(zip(spec.outputs, refs, strict=True)), dtypes)


def _judge(spec: OpSpec, case: Case, call: Call, name: str, got: np.ndarray, dtype: str) -> compare.Verdict:
    ref = call.refs[name]
    judged = spec.judged_on("npu") if dtype == "bf16" else spec
    limit = allowed(judged, replace(case, dtypes=call.dtypes), name, call, ref, dtype)
    return compare.within(f"npu tiles: {case}: {name}", got, ref, limit, vacuous_ok=not ref.any())
