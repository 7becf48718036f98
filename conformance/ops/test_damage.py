"""NaN propagates: if a row holds a NaN, every operation gives that row a nonfinite result, and all other rows finite
ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from conformance.support.devices import BACKENDS, Devices
from conformance.support.profile import LONG
from hybrid.harness import POISON, execute, values
from hybrid.harness.fixed import one_each, variant
from hybrid.harness.inputs import make
from hybrid.harness.reference import expect
from hybrid.harness.sizes import base_bind
from hybrid.spec import OpSpec, load_ops
from hybrid.spec.fields import BackendName

OF_ROWS = ("f32", "f16", "q8_act")


def damaged() -> Iterator[tuple[str, str]]:
    """(operation, input) of all operations with one result row for each row of numbers."""
    for name, spec in load_ops().items():
        token, results = spec.token_axis, [spec.tensors[n] for n in (*spec.outputs, *spec.scratch)]
        if token is None or "out_rows" in spec.inputs or not any(str(t.shape[0]) == token for t in results):
            continue
        for key, t in spec.inputs.items():
            if t.role == "activation" and str(t.shape[0]) == token and set(t.dtype) <= set(OF_ROWS):
                yield name, key


def finite(spec: OpSpec, name: str, array: np.ndarray, rows: int) -> list[bool]:
    """For each live row, whether all its results are finite; for state, which has no rows of the pass, each number."""
    found = np.isfinite(array if name in spec.state else array[:rows].reshape(rows, -1))
    return (found.ravel() if name in spec.state else found.all(axis=1)).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("op", "key"), [pytest.param(*d, id=".".join(d)) for d in damaged()])
def test_a_nan_stays_in_its_row(devices: Devices, backend: BackendName, op: str, key: str) -> None:
    """In that result in which the definition has it. The bounds of `nonfinite = "propagate"` check which numbers."""
    spec = load_ops()[op]
    if not spec.runs_on(backend):
        pytest.skip(f"{backend} has no {op}")
    choices, token = spec.dtype_choices(backend), str(spec.token_axis)
    for dtypes in one_each(choices) if LONG else choices[:1]:
        case = variant(spec, {**base_bind(spec), token: 5}, dtypes, 1, frozenset({token}))
        for attrs in ({}, {"sparsity": 0.8}) if "sparsity" in spec.attributes else ({},):
            one = replace(case, attrs={**case.attrs, **attrs}, kinds={key: "nan"})
            inputs = make(spec, one, backend=backend)
            with np.errstate(all="ignore"):
                refs, run = expect(spec, one, inputs).refs, execute(spec, devices.get(backend), one, inputs, POISON[0])
            for name, ref in refs.items():
                if name in spec.state or str(spec.tensors[name].shape[0]) == token:
                    wanted, got = (finite(spec, name, a, one.rows) for a in (ref, values.real(run[name])))
                    assert got == wanted, f"{one}: {name}"
