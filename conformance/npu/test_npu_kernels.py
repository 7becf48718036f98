"""The NPU's tile kernels against the oracle: cases of the specs, drawn cases, every entry point, and mutants that must
fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from conformance.mutation.mutate import FOLDERS, Mutant, case_of, load
from conformance.npu.tiles import RUNS, Kernels
from conformance.ops.strategies import cases
from conformance.support.profile import LONG
from hybrid.harness import values
from hybrid.harness.cases import Case
from hybrid.harness.compare import Disagreement
from hybrid.harness.fixed import edge_cases, variant, workload_cases
from hybrid.harness.sizes import base_bind
from hybrid.kernels.npu import compile as npu
from hybrid.kernels.npu.catalogue import AIE, entries
from hybrid.kernels.npu.layout import bf16, from_limbs, limbs, nibbles, real, tiled, two_parts, untiled
from hybrid.perf.npu.cycles import BLOCKS
from hybrid.spec import load_ops

SPECS = load_ops()
# The declared types from which a tile kernel's own numbers are made.
DTYPES = {
    "rmsnorm": {"y": "f32"},
    "gemm_i8": {"x": "f32", "w": "q8_0"},
    "gemm_i8i4": {"x": "f32", "w": "q4_0"},
    "gemm_i8q8": {"x": "f32", "w": "q8_0"},
    "attention": {"k_cache": "f32", "o": "f32"},
    "attention_i8": {"k_cache": "f16", "o": "f32"},
}
KERNELS = Kernels()
FILES = list(RUNS)
AIE_MUTANTS = [s for s in load() if s.kind == "aie"]
# Each takes a compiler a second: all of them in the long profile, else the first of each kernel.
TRIED = AIE_MUTANTS if LONG else [*{s.case["options"]["kernel"]: s for s in reversed(AIE_MUTANTS)}.values()]


def fits(file: str, case: Case) -> Case | None:
    """The case with the kernel's dtypes, None where their blocks do not fit its sizes."""
    spec = SPECS[RUNS[file][0]]
    case = replace(case, dtypes=dict(spec.dtypes(DTYPES[file])))
    sizes = [spec.shape(n, case.bind)[-1] % 32 for n, d in case.dtypes.items() if d in ("q8_0", "q4_0")]
    return None if any(sizes) else case


@pytest.mark.parametrize("file", FILES)
def test_edge_cases(file: str) -> None:
    """Every edge case of the spec, whatever modes the tile was left in. (Each head size is a kernel to compile: in the
    short profile the drawn cases cover those.)"""
    op, run = RUNS[file]
    skipped = () if LONG else ("D=", "HQ=", "HK=")
    found = [
        c
        for n, case in edge_cases(SPECS[op], "npu")
        if (c := fits(file, case)) is not None and not n.startswith(skipped)
    ]
    assert len(found) > 10
    for case in found:
        run(SPECS[op], case, KERNELS)


@pytest.mark.parametrize("file", FILES)
def test_drawn_cases(file: str) -> None:
    op, run = RUNS[file]
    ran = 0

    @settings(
        max_examples=1 if "attention" in file and not LONG else settings().max_examples
    )  # each is a kernel to compile
    @given(cases(SPECS[op], "npu" if SPECS[op].runs_on("npu") else "cpu", SPECS[op].dtypes(DTYPES[file])))
    def prove(case: Case) -> None:
        nonlocal ran
        run(SPECS[op], case, KERNELS)
        ran += 1

    prove()
    assert ran, f"{file}: no case was drawn"


@pytest.mark.parametrize("file", FILES)
def test_workloads(file: str) -> None:
    """The demonstration model's shapes; in the long profile other shapes that fit."""
    op, run = RUNS[file]
    found = [
        replace(c, dtypes=dict(SPECS[op].dtypes(DTYPES[file])))
        for _, case in workload_cases(SPECS[op], "cpu", LONG)
        if (c := fits(file, case)) is not None
    ]
    assert found
    for case in found:
        run(SPECS[op], case, KERNELS)


@pytest.mark.parametrize("modes", [("floor", "none"), ("symmetric_ceil", "saturate")])
@pytest.mark.parametrize("file", FILES)
def test_modes_are_set_by_the_kernels(file: str, modes: tuple[str, str]) -> None:
    """A tile starts in floor, and another kernel may have left any mode: the kernels depend on neither."""
    op, run = RUNS[file]
    case = variant(SPECS[op], base_bind(SPECS[op]), SPECS[op].dtypes(DTYPES[file]), 1)
    assert run(SPECS[op], case, Kernels(modes=modes)) == run(SPECS[op], case, KERNELS)


def prove_requantisation(source: Path | None = None) -> None:
    """int32 to int8 for every shift: ties to even, clamped, whatever mode the tile was left in."""
    size = 8 * 32
    k = npu.kernel("gemm_i8_requant", source=source, DIM_M=8, DIM_K=8, DIM_N=32)
    c, out = npu.buffer(size, np.int32), npu.buffer(size, np.int8)
    for shift in range(32):
        k.modes = ("ceil", "none")
        half = 1 << max(shift - 1, 0)
        c[:128] = values.integers(shift, "requant", (128,), -(2**31), 2**31 - 1)
        c[128:] = np.clip(np.arange(-64, 64, dtype=np.int64) * half, -(2**31), 2**31 - 1)
        k(c, out, shift)
        assert (out == np.clip(np.rint(c / 2.0**shift), -128, 127)).all(), shift


def test_requantisation_is_exact() -> None:
    prove_requantisation()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("conv_even);\n    aie::set_sat", "positive_inf);\n    aie::set_sat"),
        ("mode::saturate", "mode::symmetric"),
        ("to_vector<int8>(shift)", "to_vector<int8>(shift + 1)"),
    ],
)
def test_another_requantisation_is_seen(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (AIE / "gemm_i8.cc").read_text()
    assert text.count(change[0]) == 1
    (tmp_path / "gemm_i8.cc").write_text(text.replace(*change))
    with pytest.raises(AssertionError):
        prove_requantisation(tmp_path / "gemm_i8.cc")


@pytest.mark.parametrize(("stem", "depth", "code", "deep"), [("gemm_i8i4", 512, -8, 16), ("gemm_i8q8", 2048, -127, 8)])
def test_sums_of_blocks_at_their_limit(stem: str, depth: int, code: int, deep: int) -> None:
    """The largest codes and multipliers over the largest tile do not overflow."""
    macros = {"DIM_M": 8, "DIM_K": depth, "DIM_N": 16}
    zero, step = (npu.kernel(n, **macros) for n in (f"{stem}_zero", stem))
    c = npu.buffer((2, 2, 4, 8), np.float32, np.nan)
    zero(c)
    a, w = tiled(np.full((8, depth), 127, np.int8), 4, deep), tiled(np.full((depth, 16), code, np.int8), deep, 8)
    m = np.full((depth // 32, 2, 2, 8), -2048, np.int16)
    step(npu.aligned(a), npu.aligned(nibbles(w) if deep == 16 else w), npu.aligned(m), npu.buffer(16, np.float32, 1), c)
    assert (c == np.float32(depth * 127 * code * -2048 * 4097)).all()


def prove_exp2(source: Path | None = None) -> None:
    """Every bfloat16 from -128 to 0: the argument rounded to 8 bits of fraction, then the table's own rounding."""
    x = np.arange(0x8000, 0xC301).astype(np.uint16)  # -0 to -128
    size = -(-len(x) // 32) * 32
    k = npu.kernel("exp2_bf16", source=source, SIZE=size)
    given_, y = npu.buffer(size, np.uint16), npu.buffer(size, np.uint16, 0x7FC1)
    given_[: len(x)] = x
    k(given_, y)
    got, step = real(y)[: len(x)].astype(np.float64), np.rint(real(x).astype(np.float64) * 256) / 256
    normal = step >= -126
    assert np.abs(got[normal] / np.exp2(step[normal]) - 1).max() <= 2**-8
    assert (got[step < -126] == 0).all() and got[0] == 1
    given_[:] = bf16(np.array([-3.0e38]))
    k(given_, y)
    assert (y == 0).all()


def test_exp2_is_within_its_bound_everywhere() -> None:
    prove_exp2()


@pytest.mark.parametrize("entry", ["0x3f80 + (f == 77)", "0x3f80 - (f == 200)"])
def test_one_wrong_table_entry_is_seen(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one unit in the last place of bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = (AIE / "exp2_table.h").read_text()
    assert text.count("return 0x3f80 ") == 1
    (tmp_path / "exp2_table.h").write_text(text.replace("return 0x3f80 ", f"return {entry} "))
    with pytest.raises(AssertionError):
        prove_exp2(Path(shutil.copy(AIE / "exp2.cc", tmp_path)))


def test_rmsnorm_of_a_row_that_overflows_nothing() -> None:
    """The largest hidden size of the family, through a real tile: 5376 elements."""
    k = npu.kernel("rmsnorm", ROWS=1, DIM_H=5376)
    x, w = bf16(values.normal(1, "x", (5376,), 30.0)), two_parts(values.normal(1, "w", (5376,)))
    y = npu.buffer(5376, np.uint16, 0x7FC1)
    k(npu.aligned(x), npu.aligned(w), y)
    exact = real(x).astype(np.float64)
    ref = exact / np.sqrt((exact**2).mean() + 1e-6) * (real(w[0]).astype(np.float64) + real(w[1]))
    assert np.abs(real(y) - ref).max() <= np.abs(ref).max() * 2**-8
    assert k.counts["load"] == 5376 // 32 * 8 and k.counts["store"] == 5376 // 32 * 2


def counts(name: str, **macros: int) -> dict[str, int]:
    """Nonzero counts of one call on zeros."""
    k = npu.kernel(name, **macros)
    sizes = k.entry.sizes(macros)
    scalars = {"q_pos": macros.get("LK"), "k_len": macros.get("LK")}
    k(*(scalars.get(n) or 0 if a.scalar else npu.buffer(sizes[n], a.numpy) for n, a in k.args.items()))
    return {c: v for c, v in k.counts.items() if v}


@pytest.mark.slow
def test_counts_follow_from_the_sizes() -> None:
    """Used by the cycle model: instructions of one call."""
    for m, k, n in ((16, 64, 32), (32, 128, 64)) if LONG else ((16, 128, 64),):
        blocks = m * n // 128  # of 2 x 2 tiles of 4 x 8
        assert counts("gemm_i8", DIM_M=m, DIM_K=k, DIM_N=n) == {
            "mac_i8": m * k * n // 256,
            "load": blocks * (k // 8 * 6 + 16),
            "store": blocks * 16,
            "srs": blocks * 8,
        }
        tiles = m * n // 32
        i4, q8 = (counts(name, DIM_M=m, DIM_K=k, DIM_N=n) for name in ("gemm_i8i4", "gemm_i8q8"))
        assert i4["mac_i8i4"] == m * k * n // 512 and q8["mac_i8"] == m * k * n // 256
        assert i4["load"] == tiles * (k // 32 * 7 + 5) and q8["load"] == tiles * (k // 32 * 13 + 5)
        assert i4["store"] == q8["store"] == tiles * 4
        for name, found in (("q4_0", i4), ("q8_0", q8)):
            per_block, per_tile = BLOCKS[name]
            assert found["mac_vector"] + found["alu"] == tiles * (k // 32 * per_block + per_tile), name
    lq, lk, d = 16, 16, 32
    tile = counts("attention_tile", LQ=lq, LK=lk, DIM_D=d)
    assert tile["mac_bf16"] == 2 * lq * lk * d // 128
    assert tile["lookup"] == 2 * 2 * (lq // 4) * (lk // 8 + 1)


def test_sources_know_no_host() -> None:
    """The include path decides which aie.hpp is used: no #ifdef except for defaults of declared macros, no host
    headers."""
    own = "|".join(re.escape(p.name) for p in [*AIE.glob("*.h"), *AIE.glob("*.cc")])
    includes = re.compile(rf'#include (<aie_api/aie.hpp>|<aie_kernel_utils.h>|<limits>|"({own})")')
    declared = {m for e in entries().values() for m in e.macros}
    for path in [
        *AIE.glob("*.cc"),
        *(p for p in AIE.glob("*.h") if p.name != "hints.h"),
    ]:  # its macro names the compilers' own types
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if not line.lstrip().startswith("#") or line == "#pragma once":
                continue
            if line.startswith("#ifndef "):
                name = line.split()[1]
                default = lines[i + 1].startswith(f"#define {name} ") and lines[i + 2] == "#endif"
                assert name in declared and default, f"{path.name}: {line}"
            elif not line.startswith(("#define ", "#endif")):
                assert includes.fullmatch(line), f"{path.name}: {line}"
            else:
                assert lines[i - 1].startswith("#ifndef ") or lines[i - 2].startswith("#ifndef "), (
                    f"{path.name}: {line}"
                )
        assert "host::" not in path.read_text(), f"{path.name} uses the host's own names"


def test_defaults_in_sources_are_those_declared() -> None:
    for e in entries().values():
        text = e.source.read_text()
        others = [*re.findall(r'#include "(\w+\.cc)"', text), "softmax.h"]
        text += "".join((AIE / name).read_text() for name in others)
        for name, macro in e.macros.items():
            value = re.search(rf"#define {name} (\S+)", text)
            assert value and float(value[1].rstrip("f")) == macro.default, f"{e.source.name}: {name}"


def test_scales_in_two_multipliers_are_exact_within_their_range() -> None:
    """Every float16 within 2^-12 of the largest of its tile; below, to 2^-23 of the largest; units are powers of two."""
    every = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    scales = np.concatenate([every, -every, np.zeros(2)]).reshape(-1, 4)
    for pair in (scales, np.random.default_rng(3).permutation(scales.reshape(-1)).reshape(-1, 4)):
        m, unit = limbs(pair, 4)
        back, top = from_limbs(m, unit), np.abs(pair).max(axis=1, keepdims=True)
        near = np.abs(pair) >= top * 2**-12
        assert (back[near] == pair[near]).all() and (np.abs(back - pair) <= top * 2**-23).all()
        assert np.abs(m).max() == 2048 and (np.frexp(unit)[0] == 0.5).all()
    assert (limbs(np.zeros((2, 4)), 2)[0] == 0).all()


def test_layouts_are_undone() -> None:
    x = np.arange(16 * 32).reshape(16, 32)
    assert (untiled(tiled(x, 4, 8)) == x).all() and tiled(x, 4, 8)[1, 2, 3, 4] == x[4 + 3, 16 + 4]
    codes = values.integers(1, "codes", (3, 64), -8, 7).astype(np.int8)
    packed = nibbles(codes)  # adjacent, where ggml's are 16 apart
    assert packed.shape == (3, 32) and int(packed[0, 0]) == (int(codes[0, 0]) & 15) | (int(codes[0, 1]) & 15) << 4
    with pytest.raises(ValueError, match="not made of 5 x 8 tiles"):
        tiled(x, 5, 8)


def built(one: Mutant, folder: Path) -> Kernels:
    """The kernels with one file changed; its headers are beside the sources."""
    for path in [*AIE.glob("*.cc"), *AIE.glob("*.h")]:
        shutil.copy(path, folder)
    (folder / one.file).write_text(one.mutated())
    return Kernels(sources={p.name: p for p in folder.glob("*.cc")})


@pytest.mark.slow
@pytest.mark.parametrize("one", [pytest.param(s, id=f"{s.case['options']['kernel']}-{s.name}") for s in TRIED])
def test_mutants_are_caught(one: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = one.case["options"]["kernel"]
    op, run = RUNS[file]
    assert one.op == op
    case = fits(file, case_of(one, SPECS[op]))
    assert case is not None
    run(SPECS[op], case, KERNELS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "aie"
    sources.mkdir()
    with pytest.raises(Disagreement):
        run(SPECS[op], case, built(one, sources))


def test_every_kernel_has_mutants() -> None:
    for file in FILES:
        assert sum(s.case["options"]["kernel"] == file for s in AIE_MUTANTS) >= 2, f"{file}: two [[aie]] tables"
    assert {s.file for s in AIE_MUTANTS} >= {p.name for p in AIE.glob("*.h")} - {"hints.h"}  # which changes no result
    assert FOLDERS["aie"] == AIE


@pytest.mark.slow
def test_kernels_under_sanitisers(tmp_path: Path) -> None:
    """One case of every kernel (in the short profile of every sixth) with AddressSanitizer and UBSan, every array at
    the end of its allocation."""
    compiler = npu._compiler()[0]
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name=lib{n}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for n in ("asan", "ubsan", "stdc++")
    ]
    if not all(os.path.isabs(r) for r in runtimes[:2]):
        pytest.skip(f"{compiler} has no sanitiser runtimes (Debian: libasan, libubsan)")
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    files = FILES if LONG else FILES[::6]
    command = [sys.executable, "-m", "conformance.npu.sanitised", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=AIE.parents[2])
    assert done.returncode == 0 and done.stdout.split() == ["caught", *files], done.stdout + done.stderr[-4000:]
