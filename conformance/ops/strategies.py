"""Drawn cases: a hypothesis strategy over an operation's axes, attributes, values and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import assume
from hypothesis import strategies as st

from hybrid.harness.cases import Case
from hybrid.harness.sizes import attribute_choices, complete, fits, sizes
from hybrid.spec import OpSpec

# Scores of values four times as large have errors in bfloat16 that no bound below the result allows.
SCALES_OF = {None: (1.0, 0.125, 4.0), "bf16": (1.0, 0.125)}
MAX_FLOPS = 4_000_000  # limit of a drawn case: it runs in milliseconds on a CPU driver


def _sizes(spec: OpSpec, backend: str, axis: str, dtypes: Mapping[str, str]) -> list[int]:
    """Every size worth drawing; three of them where each needs a compiled kernel."""
    every = sizes(spec, axis, dtypes)
    return sorted({every[0], every[len(every) // 2], every[-1]}) if axis in spec.backend(backend).static else every


@st.composite
def cases(
    draw: st.DrawFn,
    spec: OpSpec,
    backend: str,
    dtypes: Mapping[str, str],
    fixed: Mapping[str, int] = MappingProxyType({}),
) -> Case:
    """Small valid cases of one dtype combination, with sizes around the backend's tiles; `fixed`: axes that are not
    drawn."""
    drawn = {n: fixed[n] if n in fixed else draw(st.sampled_from(_sizes(spec, backend, n, dtypes))) for n in spec.axes}
    bind = complete(spec, drawn)
    attrs = {name: draw(st.sampled_from(attribute_choices(spec, name, bind))) for name in spec.attributes}
    exact = spec.numerics.exact and draw(st.booleans())
    if exact:
        attrs |= {k: v for k, v in (("scale", 16.0), ("softcap", 0.0)) if k in attrs}
    assume(fits(spec, backend, bind, attrs, dtypes) and spec.flops(bind, attrs) <= MAX_FLOPS)
    rows = draw(st.sampled_from(sorted({bind.get("T", 1), 1, max(1, bind.get("T", 1) - 1)}, reverse=True)))
    most = min(bind.get("O", 1), rows if "slots" in spec.inputs else bind.get("O", 1))
    return Case(
        spec.name,
        bind,
        dict(dtypes),
        attrs,
        rows=rows,
        outs=draw(st.sampled_from(sorted({most, 1}, reverse=True))),
        seed=draw(st.integers(0, 2**32 - 1)),
        mode="exact" if exact else "random",
        scale=1.0 if exact else draw(st.sampled_from(SCALES_OF[spec.backend(backend).accumulate])),
        style=draw(st.sampled_from(("ragged", "decode", "mixed", "empty", "full", "edge"))),
    )
