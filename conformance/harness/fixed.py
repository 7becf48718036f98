"""Fixed cases from the specs: edge cases, named workloads, every dtype combination, every kernel variant, split
weights."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from hybrid.core.dtypes import DTYPES
from hybrid.harness.cases import Case, context
from hybrid.harness.kinds import STYLE, TOGETHER
from hybrid.harness.sizes import attributes, base_bind, complete, granule, rounded_up, tile_of, whole
from hybrid.spec import OpSpec
from hybrid.spec.axes import roles
from hybrid.spec.expr import Expr
from hybrid.spec.fields import Edge

WORKLOAD_FLOPS, WORKLOAD_BYTES = 60_000_000, 12_000_000  # largest named workload of the short profile
NOT_F16 = ("large", "outlier", "max_scale_block", "saturated", "tiny")  # float16 results cannot hold these


def edge_cases(
    spec: OpSpec, backend: str, choices: tuple[Mapping[str, str], ...] = (), start: int | None = None
) -> Iterator[tuple[str, Case]]:
    """(the spec's text, case) for every edge case that the spec lists, cycling through the dtype combinations (all, or
    `choices`), or each with the start-th one that supports it."""
    choices = choices or spec.dtype_choices(backend)
    excepted = spec.backend(backend).except_edges
    for i, text in enumerate(spec.edges):
        if text in excepted:
            continue
        settings = Edge.settings(text)
        fixed = frozenset(n for n, _ in settings if n in spec.axes)
        kinds = {n: v for name, v in settings if name in spec.tensors for n in TOGETHER.get(v, (name,))}
        bind = base_bind(spec)
        for name, value in settings:
            if name in spec.axes:
                size = (
                    roles()[spec.axes[name].role].prime or 0  # there is one: hybrid/spec/opcheck.py
                    if value == "prime"
                    else Expr(value).eval({**bind, "tile": tile_of(spec, name)})
                )
                bind[name] = int(size)
        suited = _suited(spec, choices, kinds, i if start is None else start)
        dtypes = next((c for c in suited if all(bind[a] % granule(spec, a, c) == 0 for a in fixed)), None)
        if dtypes is None:  # none has blocks of this size
            continue
        bind = complete(spec, rounded_up(spec, bind, dtypes, fixed), fixed)
        attrs = attributes(spec, bind, i if fixed else 0)
        if "window" in attrs and "window_edge" in kinds.values():
            attrs["window"] = 2 * bind["BS"] - 1
        if "window" in attrs and "ring" in kinds.values() and spec.state:
            attrs["window"] = -(-bind["MB"] // 2) * bind["BS"]  # appended positions overwrite those outside of it
        for name, value in settings:
            if name in spec.attributes:
                number = Expr(value).eval({**bind, **attrs})
                attrs[name] = int(number) if spec.attributes[name].type == "int" else float(number)
        style = next((STYLE[v] for v in kinds.values() if v in STYLE), "ragged")
        yield text, whole(spec, bind, dtypes, attrs, seed=i, kinds=kinds, style=style)


def workload_cases(spec: OpSpec, backend: str, long: bool) -> Iterator[tuple[str, Case]]:
    """(id, case) for the spec's named workloads: the demonstration model's, and in the long profile all that fit a
    small machine."""
    for w in spec.workload:
        small = spec.flops(w.bind, w.attrs) <= WORKLOAD_FLOPS * (40 if long else 1)
        small &= spec.nbytes(w.bind, w.dtypes, w.attrs) <= WORKLOAD_BYTES * (20 if long else 1)
        if small and (long or "demo" in w.tags):
            dtypes = next((c for c in spec.dtype_choices(backend) if all(c[k] == v for k, v in w.dtypes.items())), None)
            if dtypes is not None:
                style = "decode" if w.bind.get("T", 1) <= w.bind.get("S", 1) else "empty"
                yield w.id, whole(spec, w.bind, dtypes, spec.attrs(w.bind, w.attrs), seed=7, style=style)


def dtype_cases(spec: OpSpec, dtypes: Mapping[str, str]) -> Iterator[Case]:
    """For one dtype combination: one row (decode kernels), few rows with one dead, and more than a tile (prefill
    kernels)."""
    base, axis = base_bind(spec), spec.token_axis
    for seed, rows in enumerate((1, 3, 2 * tile_of(spec, axis) + 3) if axis else (1,)):
        yield variant(spec, {**base, axis: rows} if axis else base, dtypes, seed, turn=seed)
    if axis and "sparsity" in spec.attributes:  # sparse rows have their own kernels
        case = variant(spec, {**base, axis: 3}, dtypes, 3)
        sparse = replace(case, attrs={**case.attrs, "sparsity": 0.8})
        yield sparse
        yield replace(
            sparse, kinds={next(iter(spec.inputs)): "nan"}
        )  # damaged elements must not be ones that a threshold drops


def variant_cases(spec: OpSpec, backend: str) -> Iterator[tuple[str, Case]]:
    """(sizes as text, case) for each of the backend's variants, with every dtype of every tensor at least once."""
    choices = one_each(spec.dtype_choices(backend))
    for i, sizes_ in enumerate(spec.backend(backend).sizes()):
        for j, dtypes in enumerate(choices):
            bind = base_bind(spec) | {k: int(v) for k, v in sizes_.items() if k in spec.axes}
            case = variant(spec, bind, dtypes, 10 * i + j, turn=i + j)
            attrs = {k: v for k, v in sizes_.items() if k in spec.attributes}
            yield ",".join(f"{k}={v}" for k, v in sizes_.items()), replace(case, attrs={**case.attrs, **attrs})


def split_cases(spec: OpSpec, backend: str, few: tuple[int, ...] = (2, 5)) -> Iterator[tuple[str, Case]]:
    """(weight type, case): weights larger than SPLIT_RANGE, which must be cut into chunks of rows."""
    wide = {n: role.split for n, a in spec.axes.items() if (role := roles()[a.role]).split}
    if not any(t.role == "weight" and len(t.shape) > 1 for t in spec.inputs.values()):
        return
    bind = base_bind(spec) | wide
    for i, dtypes in enumerate(one_each(spec.dtype_choices(backend))):
        for rows in few:
            sized = bind | ({spec.token_axis: rows} if spec.token_axis else {})
            case = variant(spec, sized, dtypes, 10 * i + rows)
            fits_ = all(_bytes(spec, case, n) <= SPLIT_RANGE for n, t in spec.tensors.items() if t.role != "weight")
            if fits_ and all(
                _bytes(spec, case, n) > SPLIT_RANGE for n, t in spec.tensors.items() if t.role == "weight"
            ):
                yield f"rows={rows}", case


SPLIT_RANGE = 21504  # device options for split_cases


def _bytes(spec: OpSpec, case: Case, name: str) -> int:
    return DTYPES[case.dtypes[name]].nbytes(spec.shape(name, case.bind))


def variant(
    spec: OpSpec,
    bind: Mapping[str, int],
    dtypes: Mapping[str, str],
    seed: int,
    fixed: frozenset[str] = frozenset(),
    turn: int = 0,
) -> Case:
    """A case of these sizes, with the attributes of a turn (`sizes.attributes`) and one dead row."""
    bind = complete(spec, rounded_up(spec, bind, dtypes, fixed), fixed)
    attrs = attributes(spec, bind, turn)
    if "window" in attrs:
        attrs["window"] = 1 + context(bind) // 2 if seed % 2 else 0
    if "sparsity" in attrs:  # sparse rows have their own kernels (dtype_cases)
        attrs["sparsity"] = 0.0
    case = whole(spec, bind, dtypes, attrs, seed=seed)
    return replace(case, rows=max(1, case.rows - 1), outs=max(1, case.outs - 1))


def covering(spec: OpSpec, backend: str, most: int = 24) -> tuple[Mapping[str, str], ...]:
    """A subset of the dtype combinations in which all dtypes of every two tensors still occur together. Regions have
    hundreds of combinations. Pairs that no kernel reads together are left out: two weights, or rows of different inner
    axes. Combinations whose scratch has an input's type, where steps may be fused, count as dtypes of their own."""
    choices = spec.dtype_choices(backend)
    if len(choices) <= most:
        return choices

    weights = {n for n, t in spec.tensors.items() if t.role == "weight"}
    inner = {n: str(t.shape[-1]) for n, t in spec.tensors.items() if t.shape}

    def met(a: str, b: str) -> bool:
        of = len({a, b} & weights)
        return of == 0 or (of == 1 and inner.get(a.partition("=")[0]) == inner.get(b.partition("=")[0]))

    def pairs(c: Mapping[str, str]) -> set[object]:
        fused = [(f"{i}={s}", c[s]) for s in spec.scratch for i in spec.inputs if c[i] == c[s]]
        every = itertools.combinations(sorted([*c.items(), *fused]), 2)
        return {(a, b) for a, b in every if met(a[0], b[0])}

    return tuple(choices[i] for i in _picked([pairs(c) for c in choices]))


def one_each(choices: tuple[Mapping[str, str], ...]) -> tuple[Mapping[str, str], ...]:
    """A subset in which every dtype of every tensor occurs."""
    return tuple(choices[i] for i in _picked([c.items() for c in choices]))


def _picked(sets: Sequence[Collection[object]]) -> list[int]:
    """Indices of sets that together hold all elements, each time of the one with the most new ones."""
    bits: dict[object, int] = {}
    masks = [sum(1 << bits.setdefault(element, len(bits)) for element in found) for found in sets]
    left, picked = (1 << len(bits)) - 1, list[int]()
    while left:
        picked.append(max(range(len(masks)), key=lambda i: (left & masks[i]).bit_count()))
        left &= ~masks[picked[-1]]
    return picked


def _suited(
    spec: OpSpec, choices: tuple[Mapping[str, str], ...], kinds: Mapping[str, str], start: int
) -> Iterator[Mapping[str, str]]:
    """Dtype combinations that support kinds of values, beginning at the start-th."""
    results = [n for n in spec.tensors if n not in spec.inputs]
    for i in range(len(choices)):
        c = choices[(start + i) % len(choices)]
        if any(kind in NOT_F16 for kind in kinds.values()) and any(c[n] == "f16" for n in results):
            continue
        if any(kind.endswith("_block") and not DTYPES[c[n]].quantised for n, kind in kinds.items()):
            continue
        yield c
