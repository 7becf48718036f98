"""Tests of the suite: the quick selection, and the report of where matrix unit tests ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.support import profile, ties, units
from hybrid.perf.record.schema import Record

RECORD: dict[str, Any] = {
    "schema": 1,
    "device": "NVIDIA H200",
    "driver": "580",
    "clock": "not locked",
    "commit": "4564b6f",
    "date": "2026-11-20",
    "kernels": "0123",
    "conformance": {
        "command": "python -m pytest conformance/ops/test_ops.py conformance/ops/test_tuning.py",
        "passed": 900,
        "failed": 0,
        "kernels": "0123",
    },
    "runs": [{"model": "gemma3-27b", "dtype": "q4_0", "phase": "decode", "tokens_per_second": 1.0, "command": "x"}],
}


def made(**changes: Any) -> Record:
    return Record.model_validate(RECORD | changes, strict=False)


def item(nodeid: str, *marks: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name in marks or None)


def test_quick_keeps_one_parameter_of_each_test_and_backend_and_nothing_slow() -> None:
    names = [f"f.py::test_a[{op}-{b}-x]" for b in ("cpu", "vulkan") for op in "abcdef"]
    every = [item("f.py::test_b"), item("f.py::test_c", "slow"), *map(item, names), item("f.py::test_d[one]")]
    kept = [i.nodeid for i in profile.quick(every)]
    assert kept == [
        "f.py::test_b",
        *[f"f.py::test_a[{op}-{b}-x]" for b in ("cpu", "vulkan") for op in "a"],
        "f.py::test_d[one]",
    ]


def test_skips_for_want_of_matrix_units_are_counted() -> None:
    skips = [
        ("conformance/ops/test_gemm_parts.py::test_a[b]", "Skipped: llvmpipe has no matrix units"),
        ("conformance/ops/test_tuning.py::test_c", "Skipped: llvmpipe lacks f16_matrices: nothing asks for gemm there"),
        ("conformance/npu/test_npu_build.py::test_d", "no g++"),
    ]
    assert units.left_out(skips) == {"test_gemm_parts": 1, "test_tuning": 1}


LAST = "last 2026-11-21 on NVIDIA H200: test_ops, test_tuning, 900 passed, "


@pytest.mark.parametrize(
    ("changes", "kernels", "words"),
    [
        ([], "0123", "; perf/records has no campaign on a device that has them"),
        (
            [{"date": "2026-11-21"}],
            "0123",
            f". Campaigns on devices that have them: 1, {LAST}these kernels; not in it: test_x",
        ),
        ([{}, {"date": "2026-11-21"}], "9", f": 2, {LAST}kernels 0123, not these (9); not in it: test_x"),
        ([{"device": "llvmpipe"}], "0123", "has no campaign"),
    ],
)
def test_the_last_campaign_that_ran_them_is_named(changes: list[dict[str, str]], kernels: str, words: str) -> None:
    records = [made(**c) for c in changes]
    line = units.elsewhere({"test_tuning": 100, "test_x": 11}, records, kernels)
    assert line.startswith("matrix units: 111 tests left out for want of them") and words in line
    assert not records or "not in it" not in units.elsewhere({"test_tuning": 1}, records, kernels)


def test_texts_agree_up_to_a_near_tie_and_no_further() -> None:
    leads = np.array([1.0, 2.0, 0.1, 3.0])
    ties.agree([1, 2, 3, 4], [1, 2, 3, 4], leads, near=0.05)
    ties.agree([1, 2, 9, 9], [1, 2, 3, 4], leads, near=0.2, at_least=2)
    for ours, near, at_least in (
        ([1, 9, 3, 4], 0.2, 2),
        ([1, 2, 9, 4], 0.05, 2),
        ([1, 2, 3, 4], 0.2, 3),
        ([1, 2, 3], 0.05, 2),
    ):
        with pytest.raises(AssertionError):
            ties.agree(ours, [1, 2, 3, 4], leads, near, at_least)


def test_a_margin_is_compared_with_the_rounding_of_its_row() -> None:
    wanted = np.zeros((2, 100))
    wanted[:, 7] = 1.0
    noise = np.where(np.arange(100) % 2, 1.0, -1.0)
    ours = wanted + np.stack([0.05 * noise, 0.2 * noise])
    assert ties.lead(wanted).tolist() == [1.0, 1.0]
    assert ties.clear(ours, wanted).tolist() == [True, False]
