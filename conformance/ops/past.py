"""Regression cases. The name says what was wrong."""

from __future__ import annotations

from hybrid.harness.cases import Case

PAST: dict[str, Case] = {
    # 127/max|x| overflows float32 where a block's values are below 2^-119: codes must not become NaN.
    "quantize_act.subnormal_block": Case(
        "quantize_act", {"T": 5, "K": 64}, {"x": "f32", "y": "q8_act"}, rows=5, kinds={"x": "tiny"}, scale=2.0**-64
    )
}
