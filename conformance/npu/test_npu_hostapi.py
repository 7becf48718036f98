"""The host's aie_api, primitive by primitive, against NumPy and exact arithmetic; and its compile-time refusals."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.devices import need_cxx
from hybrid.core.errors import SpecError
from hybrid.harness import values
from hybrid.kernels.npu import compile as npu
from hybrid.kernels.npu.compile import (
    ROUNDING,
    SATURATION,
    CompileError,
    Kernel,
    KernelTrap,
    NoCompiler,
    aligned,
    buffer,
)
from hybrid.kernels.npu.layout import bf16, nibbles, real

HERE = Path(__file__).resolve().parent
TILES = [
    ("mmul_i8_488", 4, 8, 8),
    ("mmul_i8_288", 2, 8, 8),
    ("mmul_i8i4_4168", 4, 16, 8),
    ("mmul_i16i8_484", 4, 8, 4),
    ("mmul_i16i8_448", 4, 4, 8),
    ("mmul_i16i8_288", 2, 8, 8),
    ("mmul_i16_444", 4, 4, 4),
    ("mmul_i16_248", 2, 4, 8),
    ("mmul_i16_428", 4, 2, 8),
]


def primitive(name: str) -> Kernel:
    return npu.kernel(name, folder=HERE)


def run(name: str, *inputs: Any, modes: tuple[str, str] = ("conv_even", "none")) -> list[np.ndarray]:
    """The outputs of a primitive; arrays first, scalars last, outputs allocated here."""
    k, given = primitive(name), list(inputs)
    k.modes = modes
    outs, args = [], []
    sizes = k.entry.sizes()
    for arg, a in k.args.items():
        if a.access == "out":
            outs.append(buffer(sizes[arg], a.numpy, 77))
            args.append(outs[-1])
        else:
            value = given.pop(0)
            args.append(value if a.scalar else aligned(np.asarray(value).astype(a.numpy).reshape(-1)))
            if a.access == "inout":
                outs.append(args[-1])
    k(*args)
    return outs


def rounded(x: Fraction, mode: str) -> int:
    """An integer rounded by the mode's name, from its definition."""
    down = math.floor(x)
    rest, sign = x - down, 1 if x > 0 else -1
    if rest == 0:
        return down
    always = {
        "floor": down,
        "ceil": down + 1,
        "symmetric_floor": down + (sign < 0),
        "symmetric_ceil": down + (sign > 0),
    }
    if mode in always:
        return always[mode]
    if rest != Fraction(1, 2):
        return down + (rest > Fraction(1, 2))
    even = down if down % 2 == 0 else down + 1
    return {
        "negative_inf": down,
        "positive_inf": down + 1,
        "symmetric_zero": down + (sign < 0),
        "symmetric_inf": down + (sign > 0),
        "conv_even": even,
        "conv_odd": 2 * down + 1 - even,
    }[mode]


def saturated(x: int, bits: int, mode: str) -> int:
    high = 2 ** (bits - 1) - 1
    if mode == "none":
        return (x + high + 1) % 2**bits - high - 1
    return min(max(x, -high if mode == "symmetric" else -high - 1), high)


@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize("saturation", SATURATION)
def test_shift_round_saturate(mode: str, saturation: str) -> None:
    edges = [2**31 - 1, -(2**31), 1000, -1000, 1016, 1018, 1020, -1022, -1018, -1026, 14, -14, 1, -1]
    x = np.concatenate([np.arange(-9, 9) * 4, edges])
    (got,) = run("srs_i8", x, 3, modes=(mode, saturation))
    assert got.tolist() == [saturated(rounded(Fraction(int(v), 8), mode), 8, saturation) for v in x]
    wide = values.integers(1, "srs", (16,), -(2**28), 2**28)
    (got,) = run("srs_i16", wide, 19, modes=(mode, saturation))  # acc64, lanes times 2^8
    assert got.tolist() == [saturated(rounded(Fraction(int(v) * 256, 2**19), mode), 16, saturation) for v in wide]


@pytest.mark.parametrize("mode", ROUNDING)
def test_conversion_to_bfloat16_obeys_the_rounding_mode(mode: str) -> None:
    # Above 2^7 a bfloat16's step is 1: rounding to it is rounding to an integer.
    ties, rest = np.array([128.5, 129.5, 141.5]), np.array([200.25, 200.75, 131.0])
    x = np.concatenate([ties, -ties, rest, -rest, [255.5, 0.0, 140.125, 3.0]])
    (got,) = run("to_bf16", x, modes=(mode, "none"))
    assert real(got).tolist() == [float(rounded(Fraction(v), mode)) for v in x.tolist()]


@pytest.mark.parametrize("mode", ROUNDING)
def test_bfloat16_keeps_nan_and_infinity(mode: str) -> None:
    """A NaN is cut in every mode, not rounded; one whose upper fraction is 0 becomes the smallest NaN."""
    nans = {0x7F800001: 0x7F81, 0xFF80FFFF: 0xFF81, 0x7F8A8000: 0x7F8A, 0xFFD00001: 0xFFD0, 0x7FFFFFFF: 0x7FFF}
    x = np.array([*nans, 0x7F800000, 0xFF800000, 0x7F7FD000, 0xFF7FD000, *[0x3F800000] * 7], np.uint32).view(np.float32)
    (got,) = run("to_bf16", x, modes=(mode, "none"))
    assert got[:7].tolist() == [*nans.values(), 0x7F80, 0xFF80]
    down = {"floor": (True, False), "ceil": (False, True), "symmetric_floor": (True, True)}.get(mode, (False, False))
    assert got[7:9].tolist() == [(0x7F80, 0x7F7F)[down[0]], (0xFF80, 0xFF7F)[down[1]]]


def test_a_tile_starts_in_floor_and_keeps_its_modes() -> None:
    k = npu.kernel("set_modes", folder=HERE)
    assert k.modes == ("floor", "none")
    k(ROUNDING.index("conv_odd"), SATURATION.index("symmetric"))
    assert k.modes == ("conv_odd", "symmetric")
    fresh = npu.kernel("srs_i8", folder=HERE)
    out = buffer(32, np.int8)
    fresh(buffer(32, np.int32, -1), out, 1)
    assert (out == -1).all(), "the mode of one tile has reached another"


@pytest.mark.parametrize(("name", "m", "k", "n"), TILES)
def test_integer_tiles(name: str, m: int, k: int, n: int) -> None:
    wide, right = "_i16" in name, name.removeprefix("mmul_").split("_")[0]
    a = values.integers(2, name, (m, k), *((-32768, 32767) if wide else (-128, 127)))
    b = values.integers(
        3, name, (k, n), *((-8, 7) if right.endswith("i4") else (-32768, 32767) if right == "i16" else (-128, 127))
    )
    if right == "i16":
        b //= 64  # the sum leaves through int32
    c = values.integers(4, name, (m, n), -(2**20), 2**20)
    stored = nibbles(b.astype(np.int8)) if right.endswith("i4") else b
    (got,) = run(name, a, stored, c)
    assert (got.reshape(m, n) == c + a @ b).all()


def test_integer_sums_wrap() -> None:
    (got,) = run("mmul_i8_488", np.full(32, 127), np.full(64, 127), np.full(32, 2**31 - 1))
    assert (got == np.int64(2**31 - 1 + 8 * 127 * 127 - 2**32)).all()


def exponent(x: float) -> int:
    return max(math.frexp(x)[1] - 1, -126)


def to_float32(x: Fraction) -> float:
    if x == 0:
        return 0.0
    step = Fraction(2) ** (x.numerator.bit_length() - x.denominator.bit_length() - 24)
    while abs(x) >= step * 2**24:
        step *= 2
    return float(rounded(x / step, "conv_even") * step)


def aligned_sum(start: float, factors: list[tuple[float, float]]) -> float:
    """Every term rounded to 24 bits at the largest exponent, a product's being its factors' sum; then an exact sum."""
    terms = [Fraction(start), *(Fraction(x) * Fraction(y) for x, y in factors)]
    largest = [exponent(start)] * (start != 0) + [exponent(x) + exponent(y) for x, y in factors if x and y]
    if not largest:
        return 0.0
    step = Fraction(2) ** (max(largest) - 23)
    return to_float32(Fraction(sum(rounded(t / step, "conv_even") * step for t in terms)))


@pytest.mark.parametrize("spread", [0, 6, 20])
def test_bfloat16_tile_aligns_its_terms(spread: int) -> None:
    """Terms of very different size: bits below 24 of the largest are lost before the sum, as on the core."""
    a, b, c = (values.normal(5, f"{n}{spread}", s) for n, s in (("a", (4, 8)), ("b", (8, 4)), ("c", (4, 4))))
    a *= np.exp2(values.integers(6, "e", (4, 8), -spread, spread))
    a, b, c = real(bf16(a)), real(bf16(b)), c.astype(np.float32)
    (got,) = run("mmul_bf16_484", bf16(a), bf16(b), c)
    left, right = a.tolist(), b.T.tolist()
    wanted = [
        [aligned_sum(float(c[i, j]), list(zip(left[i], right[j], strict=True))) for j in range(4)] for i in range(4)
    ]
    assert got.reshape(4, 4).tolist() == wanted
    if spread:
        assert (got.reshape(4, 4) != (c.astype(np.float64) + a.astype(np.float64) @ b).astype(np.float32)).any()


def tile_bits(rows: list[list[int]], column: list[int], start: list[int] | None = None) -> list[int]:
    """Bits of the first column of a bfloat16 tile, of bits: rows of A by one column of B, from `start`."""
    a = np.array([row + [0] * (8 - len(row)) for row in rows], np.uint16)
    b = np.zeros((8, 4), np.uint16)
    b[: len(column), 0] = column
    c = np.zeros((4, 4), np.uint32)
    c[:, 0] = start or 0
    return run("mmul_bf16_484", a, b, c.view(np.float32).reshape(-1))[0].view(np.uint32).reshape(4, 4)[:, 0].tolist()


ONE, TWO, INF, NAN, MOST, LEAST = 0x3F80, 0x4000, 0x7F80, 0x7FC0, 0x7F7F, 0x0080
MINUS = 0x8000


def test_bfloat16_tile_aligns_at_the_exponents_of_the_factors() -> None:
    """1.5 x 1.5 = 2.25 has the exponent 0, 2 x 1.5 = 3 the exponent 1: beside it two terms of 2^-23 are lost."""
    rows = [[0x3FC0, 0x3400, 0x3400], [TWO, 0x3400, 0x3400], [0x3FC0], [TWO]]
    assert tile_bits(rows, [0x3FC0, ONE, ONE]) == [0x40100001, 0x40400000, 0x40100000, 0x40400000]


def test_bfloat16_sums_overflow_once_and_have_no_denormals() -> None:
    """Products beyond float32 cancel; what is left of them overflows to its own sign's infinity. A sum below the
    smallest normal number is zero."""
    rows = [[MOST, MOST | MINUS, ONE], [MOST, MOST, ONE], [MOST | MINUS, MOST | MINUS, ONE], [LEAST, LEAST | MINUS, 0]]
    assert tile_bits(rows, [TWO, TWO, ONE]) == [0, 0x7F800000, 0xFF800000, 0]
    tiny = [[LEAST], [LEAST], [LEAST | MINUS], [0x0001]]
    assert tile_bits(tiny, [ONE], [0, 0x80400000, 0x00400000, 0]) == [0x00800000, 0, 0, 0]


def test_bfloat16_tile_with_infinity_and_nan() -> None:
    """An infinity absorbs what is finite. A NaN has exponent 255, the sum's sign and fraction, and the lowest bit."""
    rows = [[INF, MOST | MINUS], [INF, INF | MINUS], [INF | MINUS, ONE], [0, INF]]
    assert tile_bits(rows, [ONE, ONE]) == [0x7F800000, 0x7F800001, 0xFF800000, 0x7F800000]
    assert tile_bits(rows, [0, ONE]) == [0xFFFF0001, 0xFF800001, 0x7F800001, 0x7F800000]
    rows = [[NAN, ONE], [NAN | MINUS, ONE], [ONE, ONE], [ONE, ONE]]
    start = [0, 0, 0xFF800000, 0x7FC00000]
    assert tile_bits(rows, [0x3E80, ONE], start) == [0x7FC00001, 0xFFC00001, 0xFF800000, 0x7F800001]


def test_lanes_move_as_documented() -> None:
    a, b, bits = np.arange(32), np.arange(100, 132), 0x0F0F3355
    (out,) = run("moves", a, b, bits)
    parts = out.reshape(-1, 32)
    zipped = np.stack([a.reshape(8, 4), b.reshape(8, 4)], axis=1).reshape(2, 32)
    mask = (bits >> np.arange(32)) & 1
    assert (parts[0] == a.reshape(4, 8).T.reshape(-1)).all()
    assert (parts[1:3] == zipped).all()
    assert (parts[3] == np.roll(a, -5)).all()
    assert (parts[4] == np.concatenate([a.reshape(4, 8)[::2].reshape(-1), b[16:]])).all()
    assert (parts[5] == np.where(mask, b, a)).all()
    assert (parts[6] == np.concatenate([a[:16], b[:16]])).all()


def test_integer_lanes() -> None:
    a, b = values.integers(7, "a", (16,), -32768, 32767), values.integers(7, "b", (16,), -32768, 32767)
    small, large = run("integers", a, b)
    with np.errstate(over="ignore"):
        x, y = a.astype(np.int16), b.astype(np.int16)
        wanted = [x + y, x - y, -x, np.maximum(x, y), np.minimum(x, y)]
    assert (small.reshape(5, 16) == np.stack(wanted)).all()
    assert (large[:16] == a * b).all()
    for at, sign in ((16, 1), (32, -1)):
        assert large[at : at + 16].tolist() == [
            rounded(Fraction(10**9 + sign * int(p), 16), "conv_even") for p in a * b
        ]
    assert large[48] == np.sum(x.view(np.int32), dtype=np.int32)
    assert large[49:].tolist() == [x.max(), x.min()]


def test_real_lanes() -> None:
    a, b = (real(bf16(values.normal(8, n, (16,), 4))) for n in "ab")
    c = values.normal(8, "c", (16,)).astype(np.float32)
    small, large = run("reals", bf16(a), bf16(b), c)
    assert (
        small.reshape(4, 16) == np.stack([bf16(a + b), bf16(a - b), bf16(np.maximum(a, b)), bf16(np.minimum(a, b))])
    ).all()
    for at, sign in ((0, 1), (16, -1)):
        wanted = [aligned_sum(float(z), [(sign * float(x), float(y))]) for x, y, z in zip(a, b, c, strict=True)]
        assert large[at : at + 16].tolist() == wanted
    assert (large[32:48] == c - a).all()
    tree = c.copy()
    while len(tree) > 1:
        tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
    assert large[48] == tree[0]
    assert large[49] == np.float32(1) / c[0]


def test_conversion_to_fixed_point_rounds_down() -> None:
    x = real(bf16(np.array([0.0, 1.25, -1.25, 2.999, -0.001, -127.0, 100.5, 1e-3, *values.normal(9, "x", (8,), 9)])))
    (got,) = run("to_fixed", bf16(x), 8, modes=("ceil", "none"))
    assert got.tolist() == np.floor(x.astype(np.float64) * 256).astype(int).tolist()
    (back,) = run("to_float", got.astype(np.int32), 8)
    assert (back == got / np.float32(256)).all()
    with pytest.raises(KernelTrap, match="lane 3 does not fit"):
        run("to_fixed", bf16(np.where(np.arange(16) == 3, -129.0, 1.0)), 8)


def test_lookup_reads_four_copies_and_depends_on_the_rounding_mode() -> None:
    table = bf16(np.arange(64.0))
    lines = np.repeat(table.reshape(8, 1, 8), 2, axis=1)
    keys = values.integers(10, "keys", (16,), 0, 64 * 256 - 1)
    (got,) = run("fetch", lines, lines, keys, 8, modes=("floor", "none"))
    assert (real(got) == keys // 256).all()
    wrapped = [
        (rounded(Fraction(int(k), 64), "ceil") % 256) // 4 for k in keys
    ]  # the address counts quarters of a value
    (got,) = run("fetch", lines, lines, keys, 8, modes=("ceil", "none"))
    assert real(got).tolist() == wrapped
    for copy in range(4):
        broken = [lines.copy(), lines.copy()]
        broken[copy // 2][:, copy % 2] = 0
        (got,) = run("fetch", *broken, np.full(16, 9 * 256), 8, modes=("floor", "none"))
        assert real(got).tolist() == [0.0 if i % 4 == copy else 9.0 for i in range(16)]


def test_misaligned_vectors_trap() -> None:
    k = primitive("load_at")
    x, out = aligned(np.arange(96).astype(np.int8)), buffer(32, np.int8)
    k(x, out, 32)
    assert (out == np.arange(32, 64)).all() and (k.counts["load"], k.counts["store"]) == (1, 1)
    with pytest.raises(KernelTrap, match="load_v: address is 16 bytes beyond a multiple of 32"):
        k(x, out, 16)
    store, target = primitive("store_at"), buffer(64, np.int8)
    store(aligned(np.ones(16, np.int8)), target, 16)  # a vector of 128 bits needs 16 bytes
    with pytest.raises(KernelTrap, match="store_v: address is 8 bytes beyond a multiple of 16"):
        store(aligned(np.ones(16, np.int8)), target, 24)


REFUSED = {
    "shape": ("aie::mmul<8, 8, 8, int8, int8> m;", "no such shape on XDNA1"),
    "bf16 shape": ("aie::mmul<8, 8, 4, bfloat16, bfloat16> m;", "no such shape on XDNA1"),
    "int4 shape": ("aie::mmul<4, 8, 8, int8, int4> m;", "no such shape on XDNA1"),
    "float tile": ("aie::mmul<4, 8, 4, float, float> m;", "XDNA1 multiplies int8 x int8"),
    "float multiply": ("aie::vector<float, 16> v; auto a = aie::mul(v, v); (void)a;", "no float32 vector multiply"),
    "float sum": (
        "aie::vector<float, 16> v; aie::accum<accfloat, 16> a; a = aie::mac(a, v, v);",
        "no float32 vector multiply",
    ),
    "float maximum": ("aie::vector<float, 16> v; v = aie::max(v, v);", "not float32"),
    "mixed multiply": (
        "aie::vector<bfloat16, 16> v; aie::vector<int16, 16> w; auto a = aie::mul(v, w); (void)a;",
        "do not mix",
    ),
    "exp2": ("aie::vector<bfloat16, 16> v; aie::exp2(v);", "no such instruction on XDNA1"),
    "tanh": ("aie::vector<bfloat16, 16> v; aie::tanh(v);", "no such instruction on XDNA1"),
    "invsqrt": ("float x = aie::invsqrt(2.0f); (void)x;", "no core links"),
    "unaligned": ("int8 x[64]; aie::load_unaligned_v(x);", "lay the data out in aligned vectors"),
    "register": ("aie::vector<int8, 24> v;", "no such number of lanes"),
    "long register": ("aie::vector<int32, 64> v;", "no such number of lanes"),
    "real to integer": ("aie::accum<accfloat, 16> a; auto v = a.to_vector<int16>(); (void)v;", "use to_fixed"),
}


def test_unsupported_xdna1_features_do_not_compile(tmp_path: Path) -> None:
    """Each refusal names the missing feature, at its own line; the lines before it all compile."""
    path = tmp_path / "refused.cc"
    lines = ["#include <aie_api/aie.hpp>", "void sound() { aie::mmul<4, 8, 8, int8, int8> m; (void)m; }"]
    lines += [f"void f{i}() {{ {text} }}" for i, (text, _) in enumerate(REFUSED.values())]
    path.write_text("\n".join(lines) + "\n")
    command = [
        npu._compiler()[0],
        "-std=c++17",
        "-fsyntax-only",
        "-fdiagnostics-color=never",
        "-I",
        str(npu.HOSTAPI),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "refused.cc:2:" not in done.stderr
    for at, (name, (_, words)) in enumerate(REFUSED.items(), start=3):
        assert words in done.stderr and f"refused.cc:{at}:" in done.stderr, f"{name}: {done.stderr[:4000]}"


def test_calls_are_checked() -> None:
    k = primitive("store_at")
    x, out = buffer(16, np.int8), buffer(64, np.int8)
    for args, error, words in (
        ((x, out), TypeError, "takes x, out, at"),
        ((x.astype(np.uint8), out, 0), TypeError, "x is an array of int8"),
        ((out, out, 0), ValueError, "x has 16 contiguous elements"),
        ((buffer(32, np.int8)[::2], out, 0), ValueError, "x has 16 contiguous elements"),
        ((x, out, 1.5), TypeError, "at is an int32"),
        ((x, out, 2**31), ValueError, "does not fit"),
    ):
        with pytest.raises(error, match=words):
            k(*args)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        k(x, out, 0)
    with pytest.raises(SpecError, match="did you mean 'gemm_i8'"):
        npu.kernel("gem_i8")
    with pytest.raises(SpecError, match="no macro 'DIMM'"):
        npu.kernel("gemm_i8", DIMM=8)
    with pytest.raises(SpecError, match="not a positive multiple of 8"):
        npu.kernel("gemm_i8", DIM_M=12)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Compilers are detected again, with an empty cache of their own; restored afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    npu._compiler.cache_clear()
    yield monkeypatch
    npu._compiler.cache_clear()


UNLINKED = "ld.gold: error: cannot open libstdc++.so: No such file or directory"


def failing(folder: Path, name: str, when: str) -> Path:
    """A compiler that works like the real one, but fails where `when` (a shell pattern) matches its command."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"""#!/bin/sh
case "$*" in *{when}*) echo '{UNLINKED}' >&2; exit 1;; esac
exec {shlex.quote(npu.gxx())} "$@"
""")
    (folder / name).chmod(0o755)
    return folder / name


def test_a_missing_compiler_is_reported(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompiler, match="not CXX='no-such-compiler': on Debian: apt-get install g\\+\\+"):
        npu.kernel("gemm_i8_zero", DIM_M=8, DIM_K=8, DIM_N=160)


def test_a_compiler_that_cannot_link_is_skipped(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next in PATH is used, whatever its name; without another, the error holds each compiler's message."""
    need_cxx()
    first, second = (failing(tmp_path / "bin", name, "-shared") for name in ("g++", "clang++"))
    rest = os.environ["PATH"]
    anew.setenv("PATH", str(first.parent))
    npu._compiler.cache_clear()
    with pytest.raises(NoCompiler) as caught:
        npu.kernel("gemm_i8_zero", DIM_M=8, DIM_K=8, DIM_N=160)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("there is none of g++, c++, clang++ in PATH: on Debian: apt-get install g++ (or set CXX)")
    assert lines[1:] == [f"  {path}: {UNLINKED}" for path in (first, second)]
    anew.setenv("PATH", f"{first.parent}{os.pathsep}{rest}")
    assert npu.gxx() not in (str(first), str(second)) and npu.kernel("gemm_i8_zero", DIM_M=8, DIM_K=8, DIM_N=176).counts
    anew.setenv("CXX", str(first))  # the user's choice
    npu._compiler.cache_clear()
    with pytest.raises(NoCompiler, match="cannot open libstdc"):
        npu.gxx()


@pytest.mark.skipif(shutil.which("ld.gold") is None, reason="no linker but the compiler's own")
def test_a_compiler_that_does_not_work_with_gold_links_with_its_own(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_cxx()
    anew.setenv("CXX", str(failing(tmp_path / "bin", "g++", "-fuse-ld=gold")))
    npu._compiler.cache_clear()
    path, _, linker = npu._compiler()
    assert path == os.environ["CXX"] and linker == () and npu.kernel("gemm_i8_zero", DIM_M=8, DIM_K=8, DIM_N=208).counts


def test_a_declaration_that_differs_from_the_source_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cxx()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "k.cc").write_text(
        '#include <aie_api/aie.hpp>\nextern "C" void k(const int8 *a, int16 *b) { *b = *a; }\n'
    )
    args = 'a = { dtype = "i8", size = 1, access = "in" }\nb = { dtype = "i32", size = 1, access = "out" }\n'
    (tmp_path / "k.toml").write_text(
        f'schema = 1\nsource = "k.cc"\n[macros]\n[entry.k]\nsummary = ""\n[entry.k.args]\n{args}'
    )
    with pytest.raises(CompileError, match="differ from its declaration"):
        npu.kernel("k", folder=tmp_path)


def test_digest_follows_source_and_macros() -> None:
    one = npu.digest("gemm_i8", DIM_K=64)
    assert one == npu.digest("gemm_i8", DIM_K=64) != npu.digest("gemm_i8", DIM_K=128)
    assert npu.digest("rmsnorm") not in (one, npu.digest("attention_tile"))
