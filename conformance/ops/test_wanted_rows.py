"""Attention over the rows whose logits are wanted: their count is another control word than that of the pass's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.support.devices import GUARD, Devices
from hybrid.harness import run_case
from hybrid.harness.fixed import one_each, variant
from hybrid.harness.sizes import base_bind
from hybrid.spec import load_op

pytestmark = pytest.mark.width


@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
@pytest.mark.parametrize("op", ["qk_norm_rope_append", "attention", "decode_attention"])
def test_live_rows_are_those_wanted(devices: Devices, op: str, backend: str) -> None:
    spec = load_op(op)
    for seed, dtypes in enumerate(one_each(spec.dtype_choices(backend))):
        for rows in (3, 35):
            sizes = base_bind(spec) | {"T": rows, "S": 4} | ({"KV": 0} if "KV" in spec.axes else {})
            case = variant(spec, sizes, dtypes, seed, frozenset({"KV"} & spec.axes.keys()))
            run_case(spec, devices.get(backend, guard=GUARD), replace(case, wanted=True))
