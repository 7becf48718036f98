"""Types of GGUF files that are read as others: their numbers, their files, their damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import hybrid
from conformance.files.broken import head, tensor, value
from conformance.support.gguf_files import finish
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.checkpoint.gguf_metadata import write_metadata
from hybrid.convert import convert
from hybrid.core.dtypes import DTYPES
from hybrid.quant.codec import dequantise
from hybrid.quant.foreign import FOREIGN, Foreign

SCALE_AT = {"tq1_0": 52, "tq2_0": 64}  # of the block's float16; elsewhere it comes first
LARGEST = {"exact": 0.0, "scales of a few groups rounded": 2e-4, "scales rounded to float16": 2e-3}
"""Largest error by what a note says, in parts of the largest number; else of noise: 1 %, root mean square."""


def blocks(kind: Foreign, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes]: any codes, with scales near 0.01."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
    scales = (0.01 * (1 + rng.random(count))).astype(np.float16)
    if kind.name == "mxfp4":
        raw[:, 0] = rng.integers(108, 122, count)
    elif kind.name == "nvfp4":
        raw[:, :4] = rng.integers(0x28, 0x40, (count, 4))
    elif kind.name == "iq1_m":  # in the upper bits of four words
        words = raw[:, 48:].view(np.uint16)
        words &= np.uint16(0x0FFF)
        words |= (scales.view(np.uint16)[:, None] >> np.uint16([0, 4, 8, 12]) & np.uint16(15)) << np.uint16(12)
    else:
        at = SCALE_AT.get(kind.name, 0)
        raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    if kind.name == "tq1_0":  # digits of base 3
        numbers = rng.integers(-1, 2, (count, 256)) * scales[:, None].astype(np.float32)
        raw = gguf.quants.quantize(numbers.astype(np.float32), GGMLQuantizationType.TQ1_0)
    return raw


def numbers(kind: Foreign, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw.reshape(-1, kind.nbytes), GGMLQuantizationType(kind.number))


@pytest.mark.parametrize("name", FOREIGN)
def test_numbers_are_those_of_the_reference_but_for_what_the_note_says(name: str) -> None:
    from hybrid.quant.foreign import read

    kind = FOREIGN[name]
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] == (kind.block, kind.nbytes)
    assert GGMLQuantizationType[name.upper()] == kind.number
    raw = blocks(kind, 64)
    want = numbers(kind, raw).reshape(4, -1)
    got = read(kind, raw, (4, want.shape[1]))
    assert got.dtype == kind.target and np.array_equal(dequantise(got.rows(1, 2)), dequantise(got)[1:2])
    error = dequantise(got) - want
    if kind.loss in LARGEST:
        assert np.abs(error).max() <= LARGEST[kind.loss] * np.abs(want).max()
    else:
        assert 0 < np.sqrt(np.square(error).mean() / np.square(want).mean()) < 0.011
    zeros = raw.copy()
    if name not in ("iq1_m", "tq1_0", "tq2_0"):
        zeros[:, : 4 if name == "nvfp4" else 1 if name == "mxfp4" else 2] = 0
        assert np.abs(dequantise(read(kind, zeros, (4, want.shape[1])))).max() < 1e-6


def write(folder: Path, kind: Foreign, damage: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    """A random model whose feed-forward is of this type, and those numbers."""
    hp = tiny(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)
    found, path = {}, folder / "m.gguf"
    with open_checkpoint(write_hf(folder / "hf", hp, dtype="f32")) as source:
        writer = gguf.GGUFWriter(path, "gemma3")
        write_metadata(writer, source, "f32")
        for i, name in enumerate(source.names):
            if "ffn_" in name and not name.endswith("norm.weight"):
                raw = blocks(kind, 256 * 256 // kind.block, i).reshape(256, -1)
                found[name] = numbers(kind, raw).reshape(256, 256)
                if damage:
                    at = SCALE_AT.get(kind.name, 0)
                    raw[7, at : at + 2] = 0xFF if kind.name == "mxfp4" else np.array([np.inf], "<f2").view(np.uint8)
                writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType(kind.number))
                if kind.name == "nvfp4":  # llama.cpp's converter keeps the tensor's scale apart
                    stem = name.removesuffix(".weight")
                    writer.add_tensor(f"{stem}.scale", np.float32([0.5 + i]))
                    writer.add_tensor(f"{stem}.input_scale", np.float32([3]))
                    found[name] = found[name] * np.float32(0.5 + i)
            else:
                writer.add_tensor(name, dequantise(source.tensor(name), np.float32))
        finish(writer)
    return path, found


@pytest.mark.parametrize("name", ["iq3_xxs", "iq2_s", "tq2_0", "mxfp4", "nvfp4"])
def test_a_file_loads_says_so_and_is_converted(tmp_path: Path, name: str) -> None:
    kind = FOREIGN[name]
    path, want = write(tmp_path, kind)
    with open_checkpoint(path) as source:
        (note,) = (n for n in source.notes if name in n)
        assert note.startswith(f"9 tensors of {name} are read as {kind.target}: {DTYPES[kind.target].bits:.4g} bits")
        for tensor_name, values in want.items():
            assert source.dtype(tensor_name) == kind.target
            got = dequantise(source.tensor(tensor_name))
            assert np.abs(got - values).max() < 0.01 * np.abs(values).max()
            assert np.array_equal(dequantise(source.rows(tensor_name, 3, 9)), got[3:9])
        convert(source, tmp_path / "same.gguf", "same")
    with hybrid.load(path, "cpu") as ours, hybrid.load(tmp_path / "same.gguf", "cpu") as again:
        assert np.array_equal(ours.logits([2, 5, 7]), again.logits([2, 5, 7]))


@pytest.mark.parametrize("name", ["iq3_s", "tq1_0", "mxfp4"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    path, want = write(tmp_path, FOREIGN[name], damage=True)
    with (
        open_checkpoint(path) as source,
        pytest.raises(CheckpointError, match=rf"m.gguf: tensor {next(iter(want))} of {name}: .*(not finite|float16)"),
    ):
        source.tensor(next(iter(want)))


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    arch = value("general.architecture", 8, (6).to_bytes(8, "little") + b"gemma3")
    for shape, words in (((200, 2), "iq3_s has rows that are no multiple of 256"), ((256, 1 << 20), "cut short")):
        path.write_bytes(head([arch], [tensor("t", shape, 0, kind=21)]))
        with pytest.raises(CheckpointError, match=words):
            read_gguf(path)
