"""What the suite says of itself: the quick selection, and where the part ran that needs matrix units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance import profile, units
from perf.record import Record

RECORD: dict[str, Any] = {
    "schema": 1, "device": "NVIDIA H200", "driver": "580", "clock": "not locked", "commit": "4564b6f", "date": "2026-11-20",
    "kernels": "0123",
    "conformance": {"command": "python -m pytest conformance/test_ops.py conformance/test_tuning.py", "passed": 900, "failed": 0,
                    "kernels": "0123"},
    "runs": [{"model": "gemma3-27b", "dtype": "q4_0", "phase": "decode", "tokens_per_second": 1.0, "command": "x"}],
}  # fmt: skip


def made(**changes: Any) -> Record:
    return Record.model_validate(RECORD | changes, strict=False)


def item(nodeid: str, *marks: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name in marks or None)


def test_quick_keeps_two_parameters_of_each_test_and_backend_and_nothing_slow() -> None:
    names = [f"f.py::test_a[{op}-{b}-x]" for b in ("cpu", "vulkan") for op in "abcdef"]
    every = [item("f.py::test_b"), item("f.py::test_c", "slow"), *map(item, names), item("f.py::test_d[one]")]
    kept = [i.nodeid for i in profile.quick(every)]
    assert kept == ["f.py::test_b", *[f"f.py::test_a[{op}-{b}-x]" for b in ("cpu", "vulkan") for op in "ad"], "f.py::test_d[one]"]


def test_skips_for_want_of_matrix_units_are_counted() -> None:
    reasons = ["Skipped: llvmpipe has no matrix units", "Skipped: llvmpipe lacks f16_matrices: it never runs this kernel", "no g++"]
    assert units.left_out(reasons) == 2


@pytest.mark.parametrize(
    ("records", "kernels", "words"),
    [
        ([], "0123", "has no campaign on a device that has them"),
        ([made()], "0123", "1 time so far, last 2026-11-20 on NVIDIA H200 (test_ops, test_tuning: 900 passed; these kernels)"),
        ([made(), made(date="2026-11-21")], "9", "2 times so far, last 2026-11-21 on NVIDIA H200 (test_ops, test_tuning: 900 passed; "
                                                 "kernels 0123, not these (9): prove them anew)"),
    ],
)  # fmt: skip
def test_the_last_campaign_that_ran_them_is_named(records: list[Record], kernels: str, words: str) -> None:
    line = units.elsewhere(111, records, kernels)
    assert line.startswith("matrix units: 111 tests left out") and words in line
