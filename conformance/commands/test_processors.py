"""The requested NumPy kernels are those that run; the stand-in for other kernels is as exact as they are."""

from __future__ import annotations

import os

import numpy as np
import pytest
import threadpoolctl

from conformance.ops.test_decode_attention import FORMS
from conformance.support import rough
from hybrid.kernels.oracle import attention, linear
from tools import processors


@pytest.mark.blas
def test_the_kernels_that_were_asked_for_are_those_that_run() -> None:
    """OpenBLAS silently uses other kernels for an unknown name."""
    wanted, threads = os.environ.get("OPENBLAS_CORETYPE"), os.environ.get("OPENBLAS_NUM_THREADS")
    found = [lib for lib in threadpoolctl.threadpool_info() if lib["internal_api"] == "openblas"]
    if not found or not (
        wanted or threads
    ):  # tools/processors.py requests kernels; elsewhere there is nothing to compare
        pytest.skip("NumPy uses another library than OpenBLAS, or no kernel was requested")
    assert wanted is None or [lib["architecture"] for lib in found] == [wanted]
    assert threads is None or {lib["num_threads"] for lib in found} <= {min(int(threads), os.cpu_count() or 1)}


@pytest.mark.blas
@pytest.mark.skipif("NPY_DISABLE_CPU_FEATURES" not in os.environ, reason="no feature of NumPy is left out")
def test_features_that_were_left_out_are_not_used() -> None:
    core = np._core._multiarray_umath if hasattr(np, "_core") else np.core._multiarray_umath
    left_out = os.environ["NPY_DISABLE_CPU_FEATURES"].split()
    assert left_out and not [f for f in left_out if core.__cpu_features__[f]]


@pytest.mark.blas
def test_rough_products_are_installed_where_they_are_asked_for() -> None:
    expected = rough.product if rough.wanted() else np.matmul
    assert linear.matmul is attention.matmul is expected


def test_rough_products_are_exact_to_rounding_and_differ_by_the_number_of_rows() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 333), np.float32), rng.standard_normal((333, 64), np.float32)
    whole = rough.product(a, b)
    true = a.astype(np.float64) @ b
    assert np.abs(whole - true).max() <= 333**0.5 * 2**-23 * (np.abs(a) @ np.abs(b)).max()
    assert (whole[:7] != rough.product(a[:7], b)).any() and (whole == rough.product(a, b)).all()
    out = np.empty_like(whole)
    assert rough.product(a, b, out=out) is out and (out == whole).all()
    assert (
        rough.product(a.astype(np.float64), b.astype(np.float64)) == a.astype(np.float64) @ b.astype(np.float64)
    ).all()


def test_kinds_stand_for_processors_that_this_one_can_be() -> None:
    haswell = next(k for k in processors.KINDS if k.name == "haswell-2")
    env = haswell.environment()
    assert (env["OPENBLAS_CORETYPE"], env["OPENBLAS_NUM_THREADS"]) == ("Haswell", "2")
    kept = set(processors.dispatched()) - set(env.get("NPY_DISABLE_CPU_FEATURES", "").split())
    assert not any(f.startswith(("AVX512", "X86_V4")) for f in kept)
    if haswell.x86 and not haswell.lacks(frozenset({"avx2"})):
        assert "avx2" in haswell.lacks(frozenset({"sse4_2"}))


def test_every_kernel_thread_count_and_width_is_in_the_short_profile() -> None:
    every = [k.name for k in processors.KINDS]
    assert processors.usual(frozenset({"avx2", "sse4_2"}), long=True) == every
    short = processors.usual(frozenset({"avx2", "sse4_2"}), long=False)
    assert set(processors.SHORT) <= set(short) <= set(every)
    assert {n.split("-")[0] for n in short} | {"own"} == {n.split("-")[0] for n in every}
    assert {"own-2", "own-rough"} <= set(processors.usual(frozenset(), long=False))
    run = {words for k in processors.KINDS if k.name in short for words in (k.env.get("OPENBLAS_NUM_THREADS"),)}
    assert {"1", "2"} <= run


def test_wide_subgroups_run_both_ways_to_merge_kv_splits() -> None:
    run = [form for form in FORMS if any(word in f"{form}-D" for word in processors.MERGES)]
    assert {FORMS[form]["merge"] for form in run} == {1, 2}


def test_a_kind_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [processors.Kind(name, {}) for name in ("good", "bad")]
    said = {"good": (0, "1 passed"), "bad": (1, "1 failed")}
    monkeypatch.setattr(processors, "prove", lambda k: (k, *said[k.name], 1.0))
    assert processors.run(kinds[:1], 2) and not processors.run(kinds, 2)
    assert "bad: 1 failed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        processors.main(["--only", "haswel"])
