"""An engine's configuration is checked when it is made, and against the model when it is used."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.support.synthetic import tiny
from hybrid.engine.loading import EngineConfig, sizes_for
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.planning.cache import DEFAULT_CTX


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("precision", "half", "unknown precision 'half': use one of auto, exact, fast"),
        ("kv", "q4_0", "unknown kv 'q4_0': use one of auto, f32, f16, q8_0"),
        ("slots", 0, r"slots must be 1\.\.256, not 0"),
        ("slots", 257, r"slots must be 1\.\.256, not 257"),
        ("chunk", 0, "chunk must be a positive integer, or None for the default, not 0"),
        ("chunk", 2.5, "chunk must be a positive integer, or None for the default, not 2.5"),
        ("ctx", "64", "ctx must be a positive integer, or None for the default, not '64'"),
        ("n_tokens", -1, "n_tokens must be a positive integer, or None for the default, not -1"),
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        EngineConfig(**{field: value})


def test_the_context_is_the_models_at_most() -> None:
    hp = tiny(context_length=2 * DEFAULT_CTX)
    assert (
        EngineConfig().context(hp) == DEFAULT_CTX and EngineConfig(ctx=2 * DEFAULT_CTX).context(hp) == 2 * DEFAULT_CTX
    )
    assert EngineConfig().context(tiny(context_length=64)) == 64
    for ctx in (0, 65):
        with pytest.raises(
            ValueError, match=rf"^ctx {ctx} is outside 1\.\.64, the context that the model was made for$"
        ):
            EngineConfig(ctx=ctx).context(tiny(context_length=64))


def test_row_counts_follow_from_the_configuration() -> None:
    hp, device = tiny(context_length=4096), CpuDevice()
    assert sizes_for(EngineConfig(ctx=100, chunk=40, slots=3), hp, device).rows == (1, 8, 32, 40)
    assert sizes_for(EngineConfig(ctx=16, slots=3), hp, device).rows == (1, 8, 32, 48), "no more than all contexts hold"
    assert sizes_for(EngineConfig(deterministic=True), hp, device).rows == (1,)
    with pytest.raises(ValueError, match="deterministic on cpu runs one sequence at a time, not 2"):
        sizes_for(EngineConfig(deterministic=True, slots=2), hp, device)
