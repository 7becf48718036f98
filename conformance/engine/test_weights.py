"""Weights before upload: spans, types, errors for damaged scales, and load times."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.support import synthetic
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.decoder import hf_name
from hybrid.checkpoint.finite import check_finite, check_scales
from hybrid.convert import convert
from hybrid.core.tensor import Source, Tensor
from hybrid.engine import loading
from hybrid.engine.loading import Load, LoadClock
from hybrid.quant.codec import quantise, row_blocks, to_ggml


def test_row_blocks_cover_every_row_once() -> None:
    assert list(row_blocks(10, 4, 12)) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(row_blocks(2, 100, 12)) == [(0, 1), (1, 2)]  # a row is never cut
    assert list(row_blocks(4, 3, 12)) == [(0, 4)]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f16"])
def test_a_matrix_that_is_made_in_parts_is_the_one_that_is_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """By rows that are made at once, and by rows that a thread converts at once."""
    monkeypatch.setattr(loading, "_ELEMENTS", 64 * 7)
    monkeypatch.setattr(loading, "_AT_ONCE", 64 * 3)
    name = "blk.1.ffn_up.weight"
    with open_checkpoint(write_hf(tmp_path, tiny(), dtype="f32")) as checkpoint:
        whole = loading.convert(checkpoint.tensor(name), dtype)
        made = [_take(source) for source in loading._makers(checkpoint, name, dtype, {})]
    assert [m.shape[0] for m in made] == [7] * 13 + [5]
    for i, part in enumerate(whole.parts):
        assert np.array_equal(np.concatenate([m.parts[i] for m in made]), part)


def _take(source: Source) -> Tensor:
    made = source() if callable(source) else source
    assert isinstance(made, Tensor)
    return made


def test_types_are_those_of_the_file_or_those_asked_for(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path, tiny(), dtype="f32")) as checkpoint:
        kept, asked = (loading.stored_types(checkpoint, given) for given in (None, "q4_0"))
        for name in checkpoint.names:
            matrix = len(checkpoint.shape(name)) == 2
            assert kept[name].dtype == "f32" and asked[name].dtype == ("q4_0" if matrix else "f32")
            assert kept[name].shape == asked[name].shape == tuple(checkpoint.shape(name))
        with pytest.raises(ValueError, match="unknown weight type 'q9'"):
            loading.stored_types(checkpoint, "q9")
        with pytest.raises(ValueError, match="weights cannot be made 'q4_k' for cpu"):
            loading.stored_types(checkpoint, "q4_k")
    with (
        open_checkpoint(write_hf(tmp_path / "odd", tiny(n_heads=3, n_kv_heads=1))) as checkpoint,
        pytest.raises(
            ValueError, match=r"attn_output.weight \[64, 48\] cannot be q8_0: its rows are not multiples of 32"
        ),
    ):
        loading.stored_types(checkpoint, "q8_0")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_infinite_is_named(value: float) -> None:
    raw = to_ggml(quantise(np.ones((4, 96), np.float32), "q8_0")).reshape(-1).copy()
    check_scales(Path("f"), "w", "q8_0", (4, 96), raw)
    raw.reshape(-1, 34)[7, :2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match=re.escape(f"the scale of row 12, elements 32 to 63, is {value}")):
        check_scales(Path("f"), "w", "q8_0", (4, 96), raw, first=10)
    with pytest.raises(CheckpointError, match="tensor n is damaged: element 2 is"):
        check_finite(Path("f"), "n", np.array([0.0, 1.0, value]))


@pytest.mark.parametrize(
    ("value", "words"), [(1e6, "has values beyond f16's range. Try --type bf16"), (np.nan, "holds NaN or infinity")]
)
def test_a_value_that_a_type_cannot_hold_is_refused(tmp_path: Path, value: float, words: str) -> None:
    name, (path, found) = "blk.1.ffn_up.weight", (tmp_path / "model.safetensors", synthetic.weights(tiny(), "f32"))
    write_hf(tmp_path, dtype="f32")
    found[hf_name(name)].array[5, 7] = value
    synthetic.write_safetensors(path, {f"model.{n}": t for n, t in found.items()})
    with open_checkpoint(tmp_path) as source:
        with pytest.raises(CheckpointError, match=f"tensor {name} {words}"):
            convert(source, tmp_path / "m.gguf", "f16")
        assert not (tmp_path / "m.gguf").exists()


def test_a_clock_adds_up_what_a_phase_took(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 20.0, 22.0, 30.0, 33.5])
    held = iter([5, 9, 7])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(loading, "resident", lambda: {"anonymous": next(held), "peak": 100})
    clock = LoadClock()
    for name in ("weights", "plan", "weights"):
        with clock.phase(name):
            pass
    monkeypatch.setattr(loading, "resident", lambda: {"peak": 100})
    assert clock.load() == Load({"weights": 4.5, "plan": 2.0}, 0, 100, 9)
    assert clock.load().total_seconds == 6.5


def test_load_times_are_one_line() -> None:
    line = Load({"plan": 0.5, "weights": 2.0}, 4_000_000_000, 3 << 30, 1 << 29).line()
    assert (
        line
        == "load: 2.50 s (plan 0.50, weights 2.00 (4.00 GB, 2.00 GB/s)), peak host memory 3.00 GiB, of it 0.50 its own"
    )
    assert Load({"weights": 0.0}, 5, 1 << 30, None).line() == "load: 0.00 s (weights 0.00), peak host memory 1.00 GiB"


def test_memory_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text(
        "Name:\tx\nVmHWM:\t  30 kB\nRssAnon:\t 10 kB\nRssFile:\t 12 kB\nRssShmem:\t 0 kB\nVmLck:\n"
    )
    monkeypatch.setattr(loading, "_STATUS", tmp_path / "status")
    assert loading.resident() == {"peak": 30 << 10, "anonymous": 10 << 10, "file": 12 << 10, "shared": 0}
    assert loading.peak_resident() == 30 << 10
    monkeypatch.setattr(loading, "_STATUS", tmp_path / "none")
    assert loading.resident() == {}
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setitem(sys.modules, "resource", usage)  # type: ignore[arg-type]
    for system, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr("sys.platform", system)
        assert loading.peak_resident() == 7 * unit
    monkeypatch.setitem(sys.modules, "resource", None)  # type: ignore[arg-type]
    assert loading.peak_resident() == 0
