"""Every operation x backend x dtype: fixed cases from the specs, cases drawn by hypothesis, every kernel variant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings

from conformance.ops.past import PAST
from conformance.ops.strategies import MAX_FLOPS, cases
from conformance.support.devices import BACKENDS, GUARD, OP_BACKENDS, Devices
from conformance.support.profile import LONG
from hybrid.harness import run_case
from hybrid.harness.cases import Case
from hybrid.harness.fixed import (
    SPLIT_RANGE,
    covering,
    dtype_cases,
    edge_cases,
    one_each,
    split_cases,
    variant_cases,
    workload_cases,
)
from hybrid.harness.sizes import fits
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.spec import OpSpec, load_ops
from hybrid.spec.axes import roles
from hybrid.spec.fields import Edge

SPECS = load_ops()
PRIME = roles()["tokens"].prime or 0
SUPPORTED = [(op, b) for op, spec in SPECS.items() for b in OP_BACKENDS if spec.runs_on(b)]


AS_LINEAR = ("logits",)
"""Operations whose products on Vulkan are `linear`'s modules with one constant that differs."""


def combinations(op: str, backend: str) -> tuple[Mapping[str, str], ...]:
    """The dtype combinations to run: all. Of a region's many, in the short profile: every pair of dtypes that occurs in
    a kernel, or every dtype of each tensor where `linear` has every pair on the same modules."""
    if LONG:
        return SPECS[op].dtype_choices(backend)
    return (
        one_each(SPECS[op].dtype_choices(backend))
        if backend == "vulkan" and op in AS_LINEAR
        else covering(SPECS[op], backend)
    )


def _ids(op: str, backend: str, dtypes: Mapping[str, str]) -> str:
    inputs = ".".join(f"{n}:{dtypes[n]}" for n, t in SPECS[op].tensors.items() if len(t.dtype) > 1)
    return f"{op}-{backend}-{inputs or 'only'}"


def _grouped(
    source: Callable[[OpSpec, str], Iterable[tuple[str, Case]]], backends: tuple[str, ...] = OP_BACKENDS
) -> Iterator:
    """One parameter for each (op, backend, name), with all its cases."""
    for op, backend in SUPPORTED:
        if backend in backends:
            named: dict[str, list[Case]] = {}
            for name, case in source(SPECS[op], backend):
                if fits(SPECS[op], backend, case.bind, case.attrs, case.dtypes):
                    named.setdefault(name, []).append(case)
            for name, found in named.items():
                yield pytest.param(op, backend, found, id=f"{op}-{backend}-{name.replace(' ', '')}")


DTYPES = [pytest.param(op, b, d, id=_ids(op, b, d)) for op, b in SUPPORTED for d in combinations(op, b)]


# A CPU driver compiles each kernel in 0.5 to 2 s. In the short profile, products alternate sizes over the types, since
# each type of weights and rows is a kernel for each size. `linear`, whose modules the other products share, always has
# tiles where a GPU runs it. Drawn cases keep axes that are a kernel's constants.
ALTERNATING = [n for n, spec in SPECS.items() if spec.matrices]
CONSTANTS = {"decode_attention": ("HQ", "HK", "D", "BS", "R", "KV")}


def _type_index(spec: OpSpec, dtypes: Mapping[str, str]) -> int:
    """The same index for an activation and a weight type in every product."""
    weight = next(n for n, t in spec.inputs.items() if t.role == "weight" and len(t.shape) > 1)
    return sum(spec.inputs[n].dtype.index(dtypes[n]) for n in (next(iter(spec.inputs)), weight))


def on_gpu(device: Any) -> bool:
    """Whether kernels are compiled in milliseconds."""
    return device.backend == "vulkan" and device.info.kind != "cpu"


@lru_cache(maxsize=8)
def in_short_profile(op: str) -> frozenset[str]:
    """Of a region's combinations those that a CPU driver runs in the short profile: every dtype of each tensor, and a
    sixth of the rest, which changes with the kernels. `linear` covers every pair of dtypes, and runs all."""
    every = combinations(op, "vulkan")
    if LONG or op not in ALTERNATING or op == "linear":
        return frozenset(_ids(op, "vulkan", d) for d in every)
    least, digest = one_each(every), kernels_digest()
    rest = [_ids(op, "vulkan", d) for d in every if d not in least]
    rest.sort(key=lambda name: hashlib.sha256((digest + name).encode()).digest())
    return frozenset([*(_ids(op, "vulkan", d) for d in least), *rest[::6]])


def sized(op: str, device: Any, dtypes: Mapping[str, str]) -> list[Case]:
    """Decode, small and prefill sizes of one dtype combination, or alternately one of them; on cpu too, except for
    `linear`."""
    spec, found = SPECS[op], list(dtype_cases(SPECS[op], dtypes))
    if LONG or op not in ALTERNATING or device.backend not in ("vulkan", "" if op == "linear" else "cpu"):
        return found
    pick = _type_index(spec, dtypes) % len(found)
    return [found[min(pick, 1)], found[2]] if op == "linear" and on_gpu(device) else [found[pick]]


def kept(op: str, device: Any, found: list[Case]) -> Mapping[str, int]:
    """Axes that drawn cases of a combination with sizes `found` keep: constants of its kernels; of products also the
    rows, so that the same kernels run where compiling is slow."""
    if LONG:
        return {}
    spec, backend = SPECS[op], device.backend
    constants = CONSTANTS.get(op) or [n for n, a in spec.axes.items() if a.role == "streams"]
    fixed = {a: found[0].bind[a] for a in (constants if backend == "vulkan" else spec.backend(backend).static)}
    if backend != "vulkan" or op not in ALTERNATING or not spec.token_axis:
        return fixed
    if not on_gpu(device):
        sizes, axis = found[0].bind, spec.token_axis
        kinds = (
            (sizes[axis],) if sizes[axis] < 8 else (PRIME, 8)
        )  # of some types the smallest tile is too large to be drawn
        return fixed | {
            axis: next(n for n in kinds if n <= 8 or spec.flops({**sizes, axis: n}, found[0].attrs) <= MAX_FLOPS)
        }
    few = (
        op != "linear" or _type_index(spec, found[0].dtypes) % 2
    )  # the tiles are its own: it draws for both kinds of kernels
    return fixed | {spec.token_axis: min(8, found[0].bind[spec.token_axis]) if few else PRIME}


@pytest.mark.parametrize(("op", "backend", "dtypes"), DTYPES)
def test_dtypes(devices: Devices, op: str, backend: str, dtypes: Mapping[str, str]) -> None:
    """Its sizes, then drawn cases."""
    device, spec, ran = devices.get(backend, guard=GUARD), SPECS[op], 0
    if backend == "vulkan" and not on_gpu(device) and _ids(op, backend, dtypes) not in in_short_profile(op):
        pytest.skip(f"{device.name} compiles each kernel for a second: outside this profile's share")
    for case in (found := sized(op, device, dtypes)):
        run_case(spec, device, case)

    @settings(max_examples=settings().max_examples if LONG else min(2, settings().max_examples))
    @given(cases(spec, backend, dtypes, kept(op, device, found)))
    def prove(case: Case) -> None:
        nonlocal ran
        run_case(SPECS[op], device, case)
        ran += 1

    prove()
    assert ran, f"{op} on {backend}: no case was drawn"


VARIED = {
    op: (narrow, "D=256", "D=512", "HQ=HK", "HK=1", "R=8")
    for op, narrow in (("attention", "D=16"), ("decode_attention", "D=16, window=0, positions=full_cache"))
}
"""Edge cases on Vulkan that test_variant or test_decode_attention.py covers too, with each of these head and group
sizes; and one of two partly rotated heads."""
ONE_TYPE = ("decode_attention",)
"""Operations most of whose edge cases are runtime numbers of a kernel. All their dtype combinations, each a kernel that
a CPU driver compiles for two seconds, run in test_dtypes."""


def _edges(spec: OpSpec, backend: str) -> Iterator[tuple[str, Case]]:
    """All in the long profile. Else without edge cases of axes that are constants of the NPU's kernels, where each size
    is compiled: fixed and drawn sizes cover them. On Vulkan without those whose kernels test_variant covers; some
    operations have all with one combination of dtypes, alternating."""
    static, varied = (
        ((), ()) if LONG else (spec.backend(backend).static, VARIED.get(spec.name, ()) if backend == "vulkan" else ())
    )
    choices = combinations(spec.name, backend) if spec.name in AS_LINEAR else ()
    start = int(kernels_digest(), 16) if backend == "vulkan" and spec.name in ONE_TYPE and not LONG else None
    found = edge_cases(spec, backend, choices, start)
    return (f for f in found if f[0] not in varied and not any(n in static for n, _ in Edge.settings(f[0])))


@pytest.mark.width
@pytest.mark.parametrize(("op", "backend", "found"), list(_grouped(_edges)))
def test_edge(devices: Devices, op: str, backend: str, found: list[Case]) -> None:
    for case in found:
        run_case(SPECS[op], devices.get(backend, guard=GUARD), case)


@pytest.mark.parametrize(("op", "backend", "found"), list(_grouped(lambda s, b: workload_cases(s, b, LONG))))
def test_workload(devices: Devices, op: str, backend: str, found: list[Case]) -> None:
    for case in found:
        run_case(SPECS[op], devices.get(backend, guard=GUARD), case)


def _variants(spec: OpSpec, backend: str) -> Iterator[tuple[str, Case]]:
    """All in the long profile. Else, since each is compiled: every second head size for each kind of scores of the
    NPU's attention; every sixth of decode attention, covered by test_decode_attention.py too; of attention a third of
    those not for matrix units, such that each head size, group and number of rows occurs."""
    found = list(variant_cases(spec, backend))
    names = list(dict.fromkeys(name for name, _ in found))
    if LONG or "attention" not in spec.name:
        return iter(found)
    if backend == "npu":
        names = names[spec.name == "attention_i8" :: 2]
    elif spec.name == "decode_attention":
        names = names[::6]
    else:
        rows = {name: case.bind["T"] for name, case in found}
        names = [n for i, n in enumerate(names) if rows[n] > 35 or i % 3 == i // 6 % 3]
    return (f for f in found if f[0] in names)


@pytest.mark.parametrize(("op", "backend", "found"), list(_grouped(_variants)))
def test_variant(devices: Devices, op: str, backend: str, found: list[Case]) -> None:
    """Sizes that select another kernel. In the short profile the dtypes alternate over the sizes, on a GPU for
    attention only."""
    device = devices.get(backend, guard=GUARD)
    pick = found[0].seed // 10 % len(found)
    for case in found if LONG or (on_gpu(device) and "attention" not in op) else found[pick:][:1]:
        run_case(SPECS[op], device, case)


def _splits(spec: OpSpec, backend: str) -> Iterator[tuple[str, Case]]:
    """In the short profile five rows, as most other cases' kernels: two rows are separate kernels."""
    return split_cases(spec, backend) if LONG else split_cases(spec, backend, (5,))


@pytest.mark.parametrize(("op", "backend", "found"), list(_grouped(_splits, ("vulkan",))))
@pytest.mark.slow
def test_split_weight(devices: Devices, op: str, backend: str, found: list[Case]) -> None:
    """Weights larger than a storage buffer's limit are split into chunks of rows."""
    device = devices.get(backend, guard=GUARD, max_range=SPLIT_RANGE)
    for case in found:
        run_case(SPECS[op], device, case)


@pytest.mark.width
@pytest.mark.parametrize(
    ("backend", "case"), [pytest.param(b, c, id=f"{b}-{n}") for n, c in PAST.items() for b in BACKENDS]
)
def test_past_failure(devices: Devices, backend: str, case: Case) -> None:
    """Every regression case."""
    run_case(SPECS[case.op], devices.get(backend, guard=GUARD), case)


def test_every_combination_is_tested() -> None:
    """Zero cases for a supported (operation, backend, dtype) is a failure, not a green run."""
    tested = {(p.values[0], p.values[1], tuple(p.values[2].items())) for p in DTYPES}
    for op, spec in SPECS.items():
        for backend in OP_BACKENDS:
            if not spec.runs_on(backend):
                continue
            choices = spec.dtype_choices(backend)
            assert choices, f"{op} on {backend}: no dtype combination"
            for name in spec.tensors:
                wanted = {c[name] for c in choices}
                ran = {dict(d)[name] for o, b, d in tested if (o, b) == (op, backend)}
                assert ran == wanted, f"{op} on {backend}: {name} is never {wanted - ran}"
            for dtypes in combinations(op, backend):
                assert list(dtype_cases(spec, dtypes))
