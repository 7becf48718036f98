"""Decode attention in all variants: one KV split and many, merged by the last workgroup or by a separate dispatch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import GUARD, left_zero, open_backend
from conformance.support.profile import LONG
from hybrid.core.tensor import Tensor
from hybrid.harness import prepare, run_case
from hybrid.harness.cases import Case
from hybrid.harness.fixed import covering, variant
from hybrid.harness.inputs import make
from hybrid.harness.sizes import base_bind
from hybrid.spec import load_op

pytestmark = pytest.mark.width

SPEC = load_op("decode_attention")
TYPES, RESULTS = SPEC.tensors["k_cache"].dtype, SPEC.outputs["o"].dtype
# KV splits shorter than a step, of about one and of several; the maximum count; heads of a group in separate
# workgroups; fewer subgroups than heads to norm.
FORMS = {
    "last arrival": {"merge": 1, "groups": 4096, "min_split": 5},
    "own dispatch": {"merge": 0, "groups": 4096, "min_split": 5},
    "few stretches": {"merge": 1, "groups": 24, "min_split": 37, "heads": 1, "subgroups": 4},
    "one stretch": {"merge": 1, "groups": 1, "subgroups": 2},
    "dealt out": {"dealt": 1, "groups": 12, "min_split": 16, "subgroups": 1},
    "dealt out, scores apart": {"dealt": 1, "groups": 12, "min_split": 37, "subgroups": 2, "spread": 1, "heads": 1},
    "dealt out, own dispatch": {"dealt": 1, "groups": 1, "min_split": 5, "merge": 0},
    "parts waited for": {"merge": 2, "groups": 4096, "min_split": 5, "ahead": 2},
    "parts waited for, many subgroups": {"merge": 2, "groups": 264, "min_split": 32, "subgroups": 16, "ahead": 4},
}
SIZES: tuple[Mapping[str, int], ...] = (
    {"T": 3, "HQ": 4, "HK": 2, "D": 64, "S": 3, "BS": 16, "MB": 20},
    {"T": 2, "HQ": 8, "HK": 2, "D": 128, "S": 4, "BS": 8, "MB": 11},
    {"T": 1, "HQ": 3, "HK": 1, "D": 96, "S": 1, "BS": 7, "MB": 13},
    {"T": 2, "HQ": 4, "HK": 1, "D": 80, "S": 2, "BS": 7, "MB": 13},
    {"T": 2, "HQ": 16, "HK": 1, "D": 32, "S": 2, "BS": 16, "MB": 20},
    {"T": 1, "HQ": 2, "HK": 1, "D": 256, "S": 2, "BS": 32, "MB": 5},
)


NUMBERS = ("own dispatch", "few stretches", "one stretch", "parts waited for")
"""Variants without int8 results in the short profile; at least one of similar variants has them."""


def cases(form: str) -> list[Case]:
    """Every size with every combination of types. In the short profile, where each is compiled, one of the sizes:
    numbers in the cache and in the result, or int8 results; variants alternate over types and sizes."""
    nth, found = list(FORMS).index(form), list[Case]()
    for i, sizes in enumerate(SIZES):
        for j, dtypes in enumerate(covering(SPEC, "vulkan")):
            kv, o = TYPES.index(dtypes["k_cache"]), RESULTS.index(dtypes["o"])
            if LONG or ((i + nth) % 2, kv, o) == (0, (i + nth) % 3, (kv + nth) % 3):
                found.append(variant(SPEC, {**base_bind(SPEC), **sizes}, dtypes, 10 * i + j))
    numbers = [c for c in found if c.dtypes["o"] != "q8_act" and c.dtypes["k_cache"] != "q8_0"]
    if LONG:
        return found
    return [numbers[nth // 2 % len(numbers)]] if form in NUMBERS else [c for c in found if c.dtypes["o"] == "q8_act"]


@pytest.fixture(scope="module", params=list(FORMS))
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    from hybrid.kernels.vulkan.ops import BINDINGS
    from hybrid.kernels.vulkan.ops.decode_attention import record

    form = functools.partial(record, **FORMS[request.param])
    opened = open_backend("vulkan", guard=GUARD, bindings={**BINDINGS, "decode_attention": form})
    yield opened
    opened.close()  # type: ignore[attr-defined]


@pytest.fixture
def own(device: Any, request: pytest.FixtureRequest) -> list[Case]:
    """The cases of the device's variant, in the style with the longest contexts."""
    return [replace(c, style="full") for c in cases(request.node.callspec.params["device"])]


@pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param(form, c, id=f"{form}-D={c.bind['D']},{c.dtypes['k_cache']},{c.dtypes['o']}")
        for form in FORMS
        for c in cases(form)
    ],
    indirect=["device"],
    scope="module",
)
def test_variants(device: Any, case: Case) -> None:
    for style in ("ragged", "full", "empty"):
        run_case(SPEC, device, replace(case, style=style))


def test_every_type_occurs_in_a_variant() -> None:
    """In the long profile every variant. All pairs of types occur in test_ops.py, in one variant."""
    for form in FORMS:
        ran = {(c.dtypes["k_cache"], c.dtypes["o"]) for c in cases(form)}
        assert ran == set(itertools.product(TYPES, RESULTS)) if LONG else len(ran) == 1
    every = [c for form in FORMS for c in cases(form)]
    assert {c.dtypes["k_cache"] for c in every} == set(TYPES) and {c.dtypes["o"] for c in every} == set(RESULTS)
    assert {tuple(c.bind[a] for a in sizes) for c in every for sizes in SIZES[:1]} == {tuple(s.values()) for s in SIZES}


@pytest.mark.parametrize("device", list(FORMS) if LONG else NUMBERS, indirect=True, scope="module")
def test_zero_partials_are_published(device: Any, own: list[Case]) -> None:
    """The merge waits until a partial is nonzero, and a computed partial may be zero."""
    case = next(c for c in own if c.dtypes["k_cache"] != "q8_0" and c.dtypes["o"] != "q8_act")
    values = make(SPEC, case)
    values["v_cache"] = Tensor.of(np.zeros_like(values["v_cache"].array))
    heads = values["qkv"].array.reshape(-1, case.bind["HQ"] + 2 * case.bind["HK"], case.bind["D"])
    heads[:, -case.bind["HK"] :] = 0
    program = prepare(SPEC, device, case, values, 0xFF)
    device.wait(program.submit(2))
    assert not device.read("o").rows(0, case.rows).array.any()


def test_memory_between_workgroups_is_zero_again(device: Any, own: list[Case]) -> None:
    """Counters and partials are zero for the next run."""
    case = own[0]
    program = prepare(SPEC, device, case, make(SPEC, case), 0xFF)
    device.wait(program.submit(2))
    assert left_zero(device, program)


def test_every_run_gives_the_same_bits(device: Any, own: list[Case]) -> None:
    """Whichever workgroup is last; and the counters are back at zero each time."""
    case = next((c for c in own if c.dtypes["o"] == "q8_act"), own[0])
    program = prepare(SPEC, device, case, make(SPEC, case), 0xFF)
    results: list[Tensor] = []
    for times in (1, 3, 1):
        device.wait(program.submit(times))
        results.append(device.read("o").rows(0, case.rows))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0].parts, other.parts, strict=True))
