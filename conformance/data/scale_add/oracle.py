"""scale_add: y = a*x + b."""

from __future__ import annotations

from hybrid.quant.codec import Real, Value


def scale_add(x: Value, a: float, b: float, real: Real) -> tuple[Value, ...]:
    return (real(a) * x.astype(real) + real(b),)
