"""Statistics of a generation: bytes per token by declared cost, and the derived rates."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint.families import tensors
from hybrid.engine.stats import Stats
from hybrid.planning.cache import BLOCK
from hybrid.spec.devicesheet import DeviceSheet
from hybrid.spec.load import validate

MADE = Stats("none", (), {"weights": ("f32",)}, 40, 11, "length", 0.5, 2.5, 4_000_000_000)


def test_bytes_per_token_are_those_of_the_sequences_mean_length(tmp_path: Path) -> None:
    """Every matrix once, and of a global layer's cache the blocks that half of the generated tokens reach."""
    hp = tiny()
    with hybrid.load(write_hf(tmp_path, hp, dtype="f32"), "cpu", precision="exact") as model:
        found = {}
        for prompt, tokens in ((2, 2), (20, 100), (90, 8)):
            "".join(model.generate([2, *range(30, 29 + prompt)], tokens, ignore_eos=True))
            found[prompt] = model.stats.bytes_per_token
    block = sum(hp.layer_is_global) * 2 * BLOCK * hp.layers[0].n_kv_heads * hp.layers[0].head_dim * 4  # keys and values
    assert found[20] - found[2] == 2 * block  # 70 positions are three blocks, 20 are one and 120 are four
    assert found[90] - found[20] == 0  # 94 positions
    weights = 4 * sum(map(prod, tensors(hp).values()))
    assert weights < found[2] - block < 1.1 * weights


def test_rates_are_of_the_time_that_they_name() -> None:
    assert MADE.prompt_per_second == 80 and MADE.tokens_per_second == 5 and MADE.gb_per_second == 20
    assert MADE.share_of_peak is None  # no sheet lists the device
    assert replace(MADE, tokens=1).tokens_per_second == 0 == replace(MADE, tokens=0).tokens_per_second
    assert replace(MADE, tokens=2).tokens_per_second == 0.5
    instant = replace(MADE, first_token_seconds=0.0, total_seconds=0.0)
    assert instant.prompt_per_second == 0 == instant.tokens_per_second


def test_the_share_of_peak_is_of_the_sheet_that_knows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = {"bandwidth_gb_s": {"value": 80.0, "provenance": "published", "source": "made up"}}
    sheet = validate(
        "s.toml", {"schema": 1, "device": {"name": "s", "kind": "cpu", "match": "."}, "peak": peak}, DeviceSheet
    )
    monkeypatch.setattr("hybrid.engine.stats.sheet_for", lambda name: sheet)
    assert MADE.share_of_peak == 0.25
    assert "20 GB/s (25.0 % of peak) | length" in MADE.line()
    assert MADE.as_dict()["share_of_peak"] == 0.25 and MADE.as_dict()["gb_per_second"] == 20


def test_lines_report_skipped_devices_and_cached_tokens() -> None:
    line = replace(MADE, device="cpu", passed_over=("vulkan: no driver",), cached_tokens=7).line()
    assert line.startswith(
        "cpu (fallback) | prompt 40 tokens after 7 in the cache, 80.0 tok/s | generated 11, 5.0 tok/s | "
    )
    assert "after" not in MADE.line() and "fallback" not in MADE.line() and "first token 500 ms" in MADE.line()
    assert replace(MADE, passed_over=("vulkan: no driver",)).reasons() == ["passed over: vulkan: no driver"]


def test_details_name_what_a_token_moves_and_where_memory_is() -> None:
    held = {"weights": 2 << 20, "kv": 0, "left_in_files": 3 << 20}
    lines = replace(
        MADE, per_pass={"bytes_up": 2.0, "submits": 1.5}, memory=held, notes=("odd",), carried="1 MB"
    ).details()
    assert lines == [
        "precision: weights f32",
        "per decode pass: bytes up 2, submits 1.5; 4000.00 MB by declared cost",
        "between devices: 1 MB",
        "memory: weights 2.00 MiB; weights read from their file at every use: 3.00 MiB",
        "checkpoint: odd",
    ]
    assert replace(MADE, memory={"weights": 1 << 20}).details()[-1] == "memory: weights 1.00 MiB"
    away = replace(MADE, bytes_elsewhere={"cpu": 1_500_000, "npu": 10_000}).details()[1]
    assert away.endswith(" by declared cost, 1.50 of it from host memory, 0.01 of it from npu")
