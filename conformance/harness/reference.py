"""Reference of a case: the oracle's float64 results and the error bound of each element."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import compare, values
from hybrid.harness.cases import Case, live
from hybrid.harness.compare import UNIT, Disagreement, Verdict
from hybrid.harness.sampled import choose, take
from hybrid.harness.scales import Call, scale, scales
from hybrid.kernels.oracle import ORACLE, argument, step
from hybrid.spec import OpSpec

Tensors = Mapping[str, Tensor]


def expect(spec: OpSpec, case: Case, inputs: Tensors, matrices: bool = False) -> Call:
    """The oracle's results for the live rows; of a large case for the rows that sampled.choose draws. `matrices`: the
    device has matrix units, which may round operands."""
    rows = choose(spec, case)
    cut = {name: take(spec, name, cut_live(spec, case, name, t), rows) for name, t in inputs.items()}
    state = {name: values.real(cut[name]).copy() for name in spec.state}
    args = {name: argument(cut[name]) for name in spec.inputs} | state
    middle = {"h_dtype": case.dtypes["h"]} if "h" in spec.scratch else {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        results = ORACLE[case.op](**args, **case.attrs, **middle, real=np.float64)
        if not isinstance(results, tuple) or len(results) != len(spec.outputs):
            what = f"a tuple of {len(results)}" if isinstance(results, tuple) else type(results).__name__
            raise TypeError(
                f"{ORACLE[case.op].__module__}.{case.op} returned {what}: return a tuple of {len(spec.outputs)}, "
                f"one array for each of {', '.join(spec.outputs)}"
            )
        refs = dict(zip(spec.outputs, results, strict=True)) | state
        refs |= {n: _made(case, n, args, {})[0] for n in spec.scratch}
    return Call(cut, {name: values.real(t) for name, t in cut.items()}, case.attrs, refs, case.dtypes, matrices)


def check(spec: OpSpec, case: Case, label: str, call: Call, after: Tensors) -> dict[str, Verdict]:
    """Check every output, scratch and state tensor of `after`. Raises Disagreement."""
    judged: dict[str, Verdict] = {}
    rows = choose(spec, case)
    names = (*spec.scratch, *spec.outputs, *spec.state)
    results = {n: take(spec, n, cut_live(spec, case, n, after[n]), rows) for n in names}
    for name, got in results.items():
        at = f"{label}: {name}"
        if got.dtype in ("i32", "u32"):
            compare.same(at, got.array, np.asarray(call.refs[name]).astype(got.array.dtype))
            judged[name] = Verdict(0.0, 0.0)
        elif name in spec.state:
            judged[name] = _state(spec, case, at, name, call, got)
        else:
            judged[name] = _real(spec, case, at, name, call, got, _reference(spec, case, name, call, results))
    return judged


def allowed(spec: OpSpec, case: Case, name: str, call: Call, ref: np.ndarray, dtype: str | None = None) -> np.ndarray:
    """f64, shape of `ref`: the spec's bound for each element, before any quantisation to int8 codes. `dtype`: the
    result's, if not the case's."""
    dtype = dtype or case.dtypes[name]
    tol = spec.tolerance_of(name, dtype)
    if tol.metric == "exact":
        return np.zeros_like(ref)
    beside: np.ndarray | float = 0.0
    if tol.scale == "abs":
        found = scales(case.op, call)
        terms, beside = found[name], found.get(f"{name}.steps", 0.0)
    elif tol.scale == "values":
        terms = scale(case.op, f"{name}.values", call)
    elif tol.scale == "softmax":
        terms = scale(case.op, name, call) + 7 * scale(case.op, f"{name}.values", call)
    elif tol.scale == "head_max":
        heads = np.abs(ref).reshape(*ref.shape[:-1], -1, case.bind["D"])
        terms = np.broadcast_to(heads.max(-1, keepdims=True), heads.shape).reshape(ref.shape)
    else:
        terms = np.abs(ref)
    out = dtype if dtype in UNIT else "f32"
    acc = spec.numerics.accumulate
    limit = compare.bound(ref, terms, float(tol.reduction.eval(case.bind)), out, acc, tol.c, tol.c_out) + beside
    return (
        limit + UNIT["f16"] * terms if call.matrices and tol.scale == "abs" and _on_matrix_units(spec, case) else limit
    )


def _on_matrix_units(spec: OpSpec, case: Case) -> bool:
    """Whether matrix units may compute this case."""
    units = spec.numerics.matrices
    return (
        units is not None
        and all(case.dtypes[t] in d for t, d in units.dtypes.items())
        and bool(units.when.eval(case.bind))
    )


def _real(spec: OpSpec, case: Case, at: str, name: str, call: Call, got: Tensor, ref: np.ndarray) -> Verdict:
    tol = spec.tolerance_of(name, got.dtype)
    if tol.metric == "codes":
        return compare.codes(
            at, (got.parts[0], got.parts[1]), ref, allowed(spec, case, name, call, ref), tol.tie or 0.0
        )
    real = values.real(got)
    if tol.metric == "exact" or (case.mode == "exact" and spec.numerics.exact):
        compare.same(at, real, values.real(values.rounded(ref, got.dtype)))
        return Verdict(0.0, 0.0)
    return compare.within(at, real, ref, allowed(spec, case, name, call, ref), vacuous_ok=_nothing(ref))


def _state(spec: OpSpec, case: Case, at: str, name: str, call: Call, got: Tensor) -> Verdict:
    """Check numeric state: elements that the oracle changed within bounds, all others bit for bit."""
    ref, held = call.refs[name], call.values[name]
    changed = (ref != held) & ~(np.isnan(ref) & np.isnan(held))
    if not changed.any() and case.bind.get("KV") != 0:  # an operation that appends nothing must change nothing
        raise Disagreement(f"{at}: the case changes nothing: it proves nothing")
    if got.type.quantised:
        changed[...] = changed.any(-1, keepdims=True)  # whole heads are written
    for part, a, b in zip(got.type.parts, got.parts, call.tensors[name].parts, strict=True):
        written = changed[..., :: changed.shape[-1] // a.shape[-1]]
        compare.same_bits(f"{at} (untouched positions, {part.name})", np.where(written, 0, a), np.where(written, 0, b))
    if not changed.any():
        return Verdict(0.0, 0.0)
    limit = allowed(spec, case, name, call, ref)
    if got.type.quantised:
        heads = changed[..., 0]
        tie = spec.tolerance_of(name, got.dtype).tie or 0.0
        return compare.codes(at, (got.parts[0][heads], got.parts[1][heads]), ref[heads], limit[heads], tie)
    where = np.where(changed)
    return compare.within(at, values.real(got)[where], ref[where], limit[where], vacuous_ok=_nothing(ref[where]))


def _nothing(ref: np.ndarray) -> bool:
    """Whether all results are 0, or -infinity (masked or zero probability), by construction."""
    return not np.any(ref[~np.isneginf(ref)])


def _reference(spec: OpSpec, case: Case, name: str, call: Call, results: Tensors) -> np.ndarray:
    """The oracle's result. Where the spec lists `given`, it starts from the device's own earlier results, so that a
    rounding difference there is not counted twice."""
    given = spec.tensors[name].given
    if not given:
        return call.refs[name]
    own = {n: values.real(results[n]) if n in spec.state else argument(results[n]) for n in given}
    return _made(case, name, {n: argument(call.tensors[n]) for n in spec.inputs}, own)[0]


def _made(case: Case, name: str, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """A result by its own definition from its inputs."""
    definition, every = step(case.op, name), {**inputs, **case.attrs, **given}
    parameters = inspect.signature(definition).parameters
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return definition(**{n: v for n, v in every.items() if others or n in parameters}, real=np.float64)


def cut_live(spec: OpSpec, case: Case, name: str, tensor: Tensor) -> Tensor:
    """The live rows of a tensor."""
    count = live(spec, case, name)
    return tensor if count is None else tensor.rows(0, count)
