"""perf.accesses: instructions and memory accesses of kernels, counted by the interpreter."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybrid.harness.interpreter import watch
from hybrid.perf import accesses

LANE = np.arange(32, dtype=np.int64)


@pytest.mark.parametrize(
    ("offsets", "size", "taken", "least"),
    [
        (4 * LANE, 4, 1, 1),
        (4 * LANE[::-1], 4, 1, 1),
        (0 * LANE, 4, 1, 1),  # one word for all
        (8 * LANE, 4, 2, 1),  # every second bank
        (128 * LANE, 4, 32, 1),  # one bank
        (2 * LANE, 2, 1, 1),  # two halves of a word
        (16 * LANE, 16, 4, 4),
        (32 * LANE, 16, 8, 4),
        (8 * LANE, 8, 2, 2),
    ],
)
def test_a_wavefront_takes_one_word_of_each_bank(offsets: np.ndarray, size: int, taken: int, least: int) -> None:
    assert watch.wavefronts(offsets[None], size) == (taken, least)


@pytest.mark.parametrize(
    ("offsets", "size", "taken", "least"),
    [(4 * LANE, 4, 4, 4), (32 * LANE, 4, 32, 4), (16 * LANE, 16, 16, 16), (0 * LANE, 4, 1, 1)],
)
def test_sectors_are_of_32_bytes(offsets: np.ndarray, size: int, taken: int, least: int) -> None:
    assert watch.sectors(offsets[None], size) == (taken, least)


@pytest.mark.slow
def test_a_product_of_few_rows_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the compiler does, the kernel multiplies, reads and writes, and no count is below its minimum."""
    asked = [
        "linear",
        "--workload",
        "gemma3-1b.attn_output.decode",
        "--set",
        "T=8",
        "--set",
        "x=f16",
        "--set",
        "w=q4_0",
        "--set",
        "N=512",
        "--set",
        "K=512",
        "--workgroups",
        "2",
    ]
    assert accesses.main([*asked, "--json"]) == 0
    (one, *_) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ".gemm.q4_0.f16." in one["kernel"] and one["subgroups"] > 0
    assert one["instructions"]["matrix products"] > 0 and one["buffers"] and one["shared"]
    for access in (*one["shared"], *one["buffers"]):
        unit = access.get("wavefronts", access.get("sectors"))
        assert unit >= access["least"] > 0 and access["requests"] > 0
    assert accesses.main(asked) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("  instructions of a subgroup: ") and " of the least" in out


def test_a_wrong_setting_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert accesses.main(["linear", "--set", "Q=4"]) == 1
    assert "--set Q: linear has no such axis or tensor" in capsys.readouterr().err
