"""Guarantees of a tile kernel that operations do not test, and mutants that break only those.

Operations never give a key tile with fewer positions than its rows' own, judge results within a bound, and start sums
at zero. So k_len, the integer maximum and the saturation mode are proved here, on the kernel itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.profile import LONG
from hybrid.kernels.npu import compile as npu
from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.build import build_sim
from hybrid.kernels.npu.catalogue import AIE
from hybrid.kernels.npu.designs import gemm_i8
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.layout import bf16, real, tiled
from hybrid.kernels.npu.tiles import tile_weights
from hybrid.kernels.npu.xrt import Job, NpuError, open_host

pytestmark = pytest.mark.slow

L, D = 16, 32  # rows, keys and head size of a tile
Proof = Callable[[Path | None], None]


def _tile(source: Path | None, q_pos: int, k_len: int, junk: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(out [L, D], m [L]) of one key tile; keys and values from k_len on hold `junk`."""
    macros = {"LQ": L, "LK": L, "DIM_D": D, "GROUP": 1, "SCALE": 0.5}
    names = ("attention_start", "attention_tile", "attention_finish")
    start, tile, finish = (npu.kernel(n, source=source, **macros) for n in names)
    rng = np.random.default_rng(seed)
    q, k, v = (bf16(rng.standard_normal((L, D)).astype(np.float32)) for _ in range(3))
    k[k_len:] = v[k_len:] = bf16(np.array([junk]))[0]
    o, sums, m = (
        npu.buffer(L * D, np.float32, np.nan),
        npu.buffer(L * 8, np.float32, np.nan),
        npu.buffer(L * 8, np.uint16, 0x7FC1),
    )
    s, p, y = (
        npu.buffer(8 * L, np.float32, np.nan),
        npu.buffer(8 * L, np.uint16, 0x7FC1),
        npu.buffer(L * D, np.uint16, 0x7FC1),
    )
    start(o, m, sums)
    left, right, values = (npu.aligned(tiled(x, r, c)) for x, r, c in ((q, 4, 8), (k, 4, 8), (v, 8, 4)))
    tile(left, right, values, o, m, sums, s, p, q_pos, 0, k_len, 0)
    finish(o, sums, y)
    return real(y), real(m).reshape(L, 8)[:, 0]


def prove_k_len(source: Path | None = None) -> None:
    """Rows at positions beyond k_len see only the k_len valid keys."""
    for k_len in (5, 8, 13):
        plain, junk = (_tile(source, 20, k_len, value, k_len)[0] for value in (0.0, 48.0))
        assert (plain == junk).all(), k_len


def prove_maximum(source: Path | None = None) -> None:
    """The running maximum is an integer, at or above every score by less than one: so rescaling by 2^(before - now) is
    exact."""
    _, m = _tile(source, 0, L, 0.0, 3)
    assert (m == np.rint(m)).all() and len(np.unique(m)) > 2


def prove_sums(source: Path | None = None) -> None:
    """int32 sums are stored unchanged, the lowest too, in whatever mode an earlier kernel left the tile."""
    k = npu.kernel("gemm_i8", source=source, DIM_M=8, DIM_K=8, DIM_N=16)
    a, b = npu.buffer(64, np.int8), npu.buffer(128, np.int8)
    for mode in ("none", "saturate", "symmetric"):
        c = npu.buffer(128, np.int32, -(2**31))
        k.modes = ("floor", mode)
        k(a, b, c)
        assert (c == -(2**31)).all(), mode


def prove_exp2_below(source: Path | None = None) -> None:
    """2^x for every bfloat16 from -120 down to the lowest."""
    x = np.arange(0xC2F0, 0xFF80).astype(np.uint16)
    size = -(-len(x) // 32) * 32
    given, y = npu.buffer(size, np.uint16), npu.buffer(size, np.uint16, 0x7FC1)
    given[: len(x)] = x
    npu.kernel("exp2_bf16", source=source, SIZE=size)(given, y)
    step = np.rint(np.maximum(real(x).astype(np.float64), -200) * 256) / 256
    whole = np.floor(step)
    assert (real(y)[: len(x)] == np.where(step < -126, 0, np.exp2(whole) * real(bf16(np.exp2(step - whole))))).all()


PROOFS: dict[str, tuple[Proof, str]] = {
    "k_len": (prove_k_len, "attention.cc"),
    "maximum": (prove_maximum, "attention.cc"),
    "sums": (prove_sums, "gemm_i8.cc"),
    "exp2": (prove_exp2_below, "exp2.cc"),
}
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "k_len ignored": ("k_len", "softmax.h", "return causal < stored ? causal : stored;", "return causal + 0 * stored;"),
    "one key too many": ("k_len", "softmax.h", "stored = k_len - k_pos;", "stored = k_len + 1 - k_pos;"),
    "the maximum not rounded up": ("maximum", "softmax.h", "ceiling(row_max(top))", "row_max(top)"),
    "no saturation mode set": (
        "sums",
        "gemm_i8.cc",
        "aie::set_saturation(aie::saturation_mode::none); // int32",
        "// int32",
    ),
    "a clamp one too high": ("exp2", "exp2_table.h", "32>(-127.5f)", "32>(-125.5f)"),
}


@pytest.mark.parametrize("name", PROOFS)
def test_a_kernel_keeps_its_promise(name: str) -> None:
    PROOFS[name][0](None)


def _changed(folder: Path, kernel: str, file: str, find: str, becomes: str) -> Path:
    """The kernel's source in `folder`, with one file changed."""
    for path in [*AIE.glob("*.cc"), *AIE.glob("*.h")]:
        shutil.copy(path, folder)
    text = (AIE / file).read_text()
    assert text.count(find) == 1, find
    (folder / file).write_text(text.replace(find, becomes))
    return folder / kernel


@pytest.mark.parametrize(
    "name", [name for name in MUTANTS if LONG or name != "k_len ignored"]
)  # one key too many counts less
def test_a_mutant_that_breaks_it_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    of, *change = MUTANTS[name]
    prove, kernel = PROOFS[of]
    with pytest.raises(AssertionError):
        prove(_changed(tmp_path, kernel, *change))


def test_a_clamp_of_exp2_at_126_and_a_half_is_equivalent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: mutants/attention.toml, beside the mutants of exp2_table.h. Here on every bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prove_exp2_below(_changed(tmp_path, "exp2.cc", "exp2_table.h", "32>(-127.5f)", "32>(-126.5f)"))


@pytest.mark.usefixtures("sim_machine")
@pytest.mark.parametrize("end", ["first", "last"])
def test_an_output_that_is_written_in_part_is_found(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that completes and leaves either end of its output unwritten: both stamps are checked."""
    g = Gemm(64, 64, 32, 16, 32, 16, 1)
    build_sim(gemm_i8(g), tmp_path)
    whole = xrt_sim.Interpreter.run
    left = slice(0, 512) if end == "first" else slice(-512, None)

    def in_part(self: Any, memory: Any, *more: Any) -> Any:
        before = memory["C"][left].copy()
        counts = whole(self, memory, *more)
        memory["C"][left] = before
        return counts

    rng = np.random.default_rng(1)
    a, w = (rng.integers(-128, 128, (n, g.K)).astype(np.int8) for n in (g.M, g.N))
    made = Job(gemm_i8(g), {"A": a, "B": tile_weights(w, g)}, {"C": np.zeros((g.M, g.N), np.int32)})
    host = open_host("sim", tmp_path)
    host.run([made])
    monkeypatch.setattr(xrt_sim.Interpreter, "run", in_part)
    with pytest.raises(NpuError) as error:
        host.run([made])
    assert error.value.kind == "silent"
