"""Comparison of results: an elementwise scaled bound, equality of integers, and the int8 activation code metric.

The bound for reals is |e| <= u_out*|ref| + c*sqrt(reduction)*u_acc*scale for each element, where `scale` is the same
operation applied to absolute values. A normalised mean square error is reported beside it and never decides: it passes
bf16 accumulation and one zero in 2100.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f64": 2.0**-53}
# Below these a device may flush to zero (float32) or has no finer step.
_SMALLEST = {"f32": 2.0**-126, "f16": 2.0**-24, "bf16": 2.0**-126, "f64": 0.0}
_TINY_BLOCK = 2.0**-119  # 127/max|x| is beyond float32: codes of such a block mean nothing


class Disagreement(AssertionError):
    """A device's result differs from the oracle's by more than the spec allows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Summary of one comparison: the worst element's share of its bound, and the normalised mean square error."""

    passes: float
    nmse: float


def bound(
    ref: np.ndarray, scale: np.ndarray, reduction: float, out: str, acc: str, c: float, c_out: float
) -> np.ndarray:
    """f64, same shape as `ref`: the error allowed for each element."""
    rounding = c_out * (UNIT[out] * np.abs(ref) + _SMALLEST[out])
    return rounding + c * np.sqrt(max(reduction, 1.0)) * UNIT.get(acc, 0.0) * scale


def within(label: str, got: np.ndarray, ref: np.ndarray, allowed: np.ndarray, vacuous_ok: bool = False) -> Verdict:
    """Check every element of `got` within `allowed` of `ref`; non-finite values must be equal on both sides.

    Raises Disagreement naming the worst element, and also when the bound is too loose to detect any error (`vacuous_ok`
    is for results that are zero by construction).
    """
    got = np.asarray(got, np.float64)
    if got.shape != ref.shape:
        raise Disagreement(f"{label}: shape {got.shape}, the oracle's is {ref.shape}")
    if not got.size:
        raise Disagreement(f"{label}: no elements compared")
    finite = np.isfinite(ref)
    strange = np.where(finite, ~np.isfinite(got), ~((got == ref) | (np.isnan(got) & np.isnan(ref))))
    if strange.any():
        at = np.unravel_index(int(np.argmax(strange)), ref.shape)
        raise Disagreement(
            f"{label}: {int(strange.sum())} of {ref.size} non-finite values differ, first at "
            f"{_index(at)}: got {got[at]}, oracle {ref[at]}"
        )
    if not finite.any():
        if vacuous_ok:
            return Verdict(0.0, 0.0)
        raise Disagreement(f"{label}: the oracle has no finite element: this case proves nothing")
    error = np.abs(np.where(finite, got - np.where(finite, ref, 0), 0))
    peak = float(np.abs(ref[finite]).max())
    if not vacuous_ok and not float(allowed[finite].max()) < peak:
        raise Disagreement(f"{label}: bound {allowed[finite].max():.3g} is not below max|ref| {peak:.3g}: vacuous")
    power = float(np.square(ref[finite]).sum())
    nmse = float(np.square(error).sum()) / power if power else float(np.square(error).sum())
    ratio = np.where(finite, error / np.where(allowed > 0, allowed, 1), 0)
    ratio = np.where((allowed <= 0) & (error > 0), np.inf, ratio)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    if ratio[worst] > 1:
        raise Disagreement(
            f"{label}: {int((ratio > 1).sum())} of {ref.size} elements beyond the bound; worst at {_index(worst)}: got "
            f"{got[worst]:.9g}, oracle {ref[worst]:.9g}, error {error[worst]:.3g} = {ratio[worst]:.3g} x the bound "
            f"{allowed[worst]:.3g}; NMSE {nmse:.3g}"
        )
    return Verdict(float(ratio[worst]), nmse)


def same(label: str, got: np.ndarray, ref: np.ndarray) -> None:
    """Check equality of value (NaN equals NaN, -0 equals 0): integers, exact mode, copies."""
    if got.shape != ref.shape:
        raise Disagreement(f"{label}: shape {got.shape}, expected {ref.shape}")
    differs = got != ref
    if np.issubdtype(got.dtype, np.floating) and np.issubdtype(ref.dtype, np.floating):
        differs &= ~(np.isnan(got) & np.isnan(ref))
    if differs.any():
        at = np.unravel_index(int(np.argmax(differs)), got.shape)
        raise Disagreement(
            f"{label}: {int(differs.sum())} of {got.size} elements differ where equality is demanded, "
            f"first at {_index(at)}: got {got[at]}, expected {ref[at]}"
        )


def same_bits(label: str, got: np.ndarray, ref: np.ndarray) -> None:
    """Check equality of every byte (-0 differs from 0, and NaNs with other bits differ)."""
    flat_got, flat_ref = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (got, ref))
    if np.array_equal(flat_got, flat_ref):
        return
    a, b = (np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.dtype.itemsize) for x in (got, ref))
    differs = (a != b).any(axis=-1)
    if differs.any():
        at = np.unravel_index(int(np.argmax(differs)), got.shape)
        raise Disagreement(
            f"{label}: {int(differs.sum())} of {got.size} elements have other bits, first at "
            f"{_index(at)}: {got[at]!r} against {ref[at]!r}"
        )


def same_files(got: Path, ref: Path, last: int = 0) -> None:
    """Check equality of two files, or of their `last` bytes. An `assert` on megabytes would make pytest print a diff
    for minutes where CI is set."""
    a, b = got.read_bytes()[-last:], ref.read_bytes()[-last:]
    if a != b:
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise Disagreement(f"{got} and {ref}: {len(a)} bytes differ from {len(b)}, first at {at}")


def codes(
    label: str, got: tuple[np.ndarray, np.ndarray], ref: np.ndarray, allowed: np.ndarray, slack: float
) -> Verdict:
    """Check int8 activations, or blocks of q8_0, against the real values that they encode.

    got: codes i8[..., K] and (scale, scale*sum) pairs f32[..., K/16] or scales f16[..., K/32]; ref f64[..., K]; allowed
    f64[..., K]: error of the unquantised value; slack: how near to a half-integer, in codes, a value may be for its
    code to be one off.
    """
    code, pair = got
    half = pair.dtype == np.float16
    grid = (*ref.shape[:-1], ref.shape[-1] // 32, 32)
    x, tolerance, code = ref.reshape(grid), allowed.reshape(grid), code.reshape(grid).astype(np.float64)
    pair = pair.reshape(*grid[:-1], -1)
    scale, peak = pair[..., 0], np.abs(x).max(-1)
    near = 3 * UNIT["f32"] * peak / 127 + tolerance.max(-1) / 127 + _SMALLEST["f32"]
    if half:
        near += UNIT["f16"] * peak / 127 + _SMALLEST["f16"]
    verdict = within(f"{label}.scale", scale, peak / 127, near, vacuous_ok=peak.max() < _TINY_BLOCK)
    if not half:
        same(f"{label}.sum", pair[..., 1], scale * code.astype(np.float32).sum(-1, dtype=np.float32))
    inverse = np.divide(127.0, peak, out=np.zeros_like(peak), where=peak > 0)[..., None]
    wanted = np.where(
        np.isfinite(peak)[..., None], x * inverse, code
    )  # where the scale is damaged, codes are undefined
    # A code may differ only where the real value, moved by its own error, crosses a half-integer.
    reach = 0.5 + slack + tolerance * inverse + np.abs(wanted) * (tolerance.max(-1, keepdims=True) * inverse / 127)
    reach[((peak > 0) & (peak < _TINY_BLOCK)) | ~np.isfinite(peak)] = 255
    return Verdict(
        max(verdict.passes, within(f"{label}.codes", code, wanted, reach, vacuous_ok=True).passes), verdict.nmse
    )


def _index(at: tuple) -> str:
    return "[" + ", ".join(str(int(i)) for i in at) + "]"
