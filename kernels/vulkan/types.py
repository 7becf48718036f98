"""Lists of storage types that shaders are built for. A sidecar names them: `W = "weights"`, `W = ["f16", "quantised"]`."""

from __future__ import annotations

from hybrid.core.dtypes import ACTIVATION_TYPES, CACHE_TYPES

PLAIN = ("f32", "f16", "bf16")
QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_1", "q6_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs")
SCALED = ("q8_0", "q4_0")
"""Codes and one scale per block: types stored by columns, and multiplied within larger kernels."""
LISTS = {
    "plain": PLAIN,
    "quantised": QUANTISED,
    "scaled": SCALED,
    "weights": (*PLAIN, *QUANTISED),
    "activations": ACTIVATION_TYPES,
    "cache": CACHE_TYPES,
}
