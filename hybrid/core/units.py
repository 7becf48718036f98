"""Parse and format byte sizes, counts and rates."""

from __future__ import annotations

import re

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`16GiB`, `500MB`, `2G`, `4096` -> bytes. ValueError for anything else, and for 0."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is no size: write it as 16GiB, 500MB or 4096")
    size = int(float(found[1]) * _FACTORS[found[2].lower()])
    if size < 1:
        raise ValueError(f"{text!r} is no size: it must be positive")
    return size


def show_bytes(size: int) -> str:
    """Bytes with a binary unit, three figures: `15.2 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}" if abs(size) < 10 * factor else f"{size / factor:.1f} {unit}"
    return f"{size} B"


def show_count(number: int) -> str:
    """`840`, `12.5k`, `3.25G`: an amount for progress bars."""
    for unit, least, factor in (("G", 10**9, 1e9), ("M", 10**6, 1e6), ("k", 10**4, 1e3)):
        if abs(number) >= least:
            return f"{number / factor:.4g}{unit}"
    return str(number)


def show_rate(per_second: float, unit: str) -> str:
    """Three figures with a decimal prefix: `337 MFLOPS`, `12.3 TFLOPS`, `0 FLOPS`."""
    prefix, factor = next(
        ((p, f) for p, f in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)) if abs(per_second) >= f), ("", 1.0)
    )
    value = per_second / factor
    return f"{value:.0f} {prefix}{unit}" if abs(value) >= 99.95 else f"{value:.3g} {prefix}{unit}"


def shortest(value: float) -> float:
    """The shortest decimal of a number stored as float32: 9.999999974752427e-07 -> 1e-06."""
    import numpy as np  # not at module level: other functions serve commands without NumPy

    return float(str(np.float32(value))) if float(np.float32(value)) == value else value
