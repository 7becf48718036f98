"""Quantised Hugging Face directories: compressed-tensors, fp8, Gemma's packed integers; values by their definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.convert import convert
from hybrid.quant.codec import dequantise

HP = {"hidden": 64, "ffn": 96, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32}
Tensors = dict[str, tuple[str, np.ndarray]]
RNG = np.random.default_rng(5)


def write(path: Path, tensors: Tensors) -> None:
    """safetensors with types that the package's NumPy half lacks."""
    header, data, at = {}, b"", 0
    for name, (kind, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        data, at = data + raw, at + len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def directory(
    folder: Path,
    method: dict[str, Any],
    made: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]],
    only: str = "proj",
) -> tuple[Path, dict[str, np.ndarray]]:
    """A random model whose projections are what `made` says, and the values that they stand for."""
    write_hf(folder, tiny(**HP), dtype="f32")
    tensors: Tensors = {}
    want = {}
    for name, array in load_file(folder / "model.safetensors").items():
        if array.ndim == 2 and only in name:
            more, want[name] = made(name.removesuffix(".weight"), array)
            tensors |= more
        else:
            tensors[name] = ("F32", array)
    write(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, want


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def of_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of codes from 0 up, the first one in the lowest bits."""
    per = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // per), np.int64)
    for i in range(codes.shape[1]):
        words[:, i // per] |= (codes[:, i].astype(np.int64) + 2 ** (bits - 1)) << bits * (i % per)
    return words.astype(np.uint32).view(np.int32)


def codes_of(array: np.ndarray, bits: int) -> np.ndarray:
    return RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), array.shape)


def pack_quantized(bits: int, group: int | None, scale_type: str = "BF16") -> Callable:
    def made(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes, groups = codes_of(array, bits), array.shape[1] // group if group else 1
        scale = RNG.uniform(0.001, 0.01, (len(array), groups)).astype(np.float32)
        scale = of_bf16(bf16(scale)) if scale_type == "BF16" else scale.astype(np.float16).astype(np.float32)
        stored = bf16(scale) if scale_type == "BF16" else scale.astype(np.float16)
        return {
            f"{name}.weight_packed": ("I32", packed(codes, bits)),
            f"{name}.weight_scale": (scale_type, stored),
            f"{name}.weight_shape": ("I64", np.array(array.shape)),
        }, codes * np.repeat(scale, array.shape[1] // groups, axis=1)

    return made


def int8(shape: str) -> Callable:
    def made(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes = codes_of(array, 8).astype(np.int8)
        rows, across = {"channel": (len(array), 1), "group": (len(array), array.shape[1] // 32), "tensor": (1, 1)}[
            shape
        ]
        scale = (
            of_bf16(bf16(RNG.uniform(0.001, 0.01, (rows, across)))) if shape != "tensor" else np.float32([[0.0078125]])
        )
        stored = scale.reshape(-1) if shape == "tensor" else scale
        return {f"{name}.weight": ("I8", codes), f"{name}.weight_scale": ("F32", stored)}, codes * np.repeat(
            np.broadcast_to(scale, (len(array), across)), array.shape[1] // across, axis=1
        )

    return made


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
    return -size if code & 128 else size


def fp8(shape: str) -> Callable:
    def made(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes = RNG.integers(0, 256, array.shape).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        rows, columns = {"block": (48, 64), "channel": (1, array.shape[1]), "tensor": array.shape}[shape]
        scale = RNG.uniform(0.5, 2, (-(-array.shape[0] // rows), -(-array.shape[1] // columns))).astype(np.float32)
        whole = np.repeat(np.repeat(scale, rows, 0)[: len(array)], columns, 1)[:, : array.shape[1]]
        values = np.array([e4m3(c) for c in range(256)], np.float32)[codes]
        called = "weight_scale_inv" if shape == "block" else "weight_scale"
        stored = scale.reshape(()) if shape == "tensor" else scale
        return {f"{name}.weight": ("F8_E4M3", codes), f"{name}.{called}": ("F32", stored)}, values * whole

    return made


def mobile(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """transformers' integrations/gemma_quant.py: int2, int4 and int8 side by side, and scales of activations."""
    bits = 2 if "gate" in name else 8 if "down" in name else 4
    codes = codes_of(array, bits)
    stored = codes.astype(np.int8) if bits == 8 else packed(codes, bits).view(np.uint8)
    scale = RNG.uniform(0.25, 1, (len(array), 1)).astype(np.float16).astype(np.float32)
    table = "embed" in name
    return {
        f"{name}.{'embedding_quantized' if table else 'weight'}": ("I8" if bits == 8 else "U8", stored),
        f"{name}.{'embedding_scale' if table else 'weight_scale'}": ("F32", scale),
        f"{name}.input_activation_scale": ("F32", np.float32(0.1)),
    }, codes * scale


PACK = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
CASES: dict[str, tuple[dict[str, Any], Callable, str, str, str]] = {
    "int4 in groups": (
        PACK,
        pack_quantized(4, 32),
        "proj",
        "q4_0",
        "of int4 are read as q4_0, 4.5 bits a weight: exact",
    ),
    "int4, f16 scales": (PACK, pack_quantized(4, 32, "F16"), "proj", "q4_0", "exact"),
    "int4 by channel": (PACK, pack_quantized(4, None), "proj", "q4_0", "exact"),
    "int8 packed": (PACK, pack_quantized(8, 32), "proj", "q8_0", "of int8 are read as q8_0"),
    "int8 by channel": ({**PACK, "format": "int-quantized"}, int8("channel"), "proj", "q8_0", "of int8"),
    "int8 in groups": ({**PACK, "format": "int-quantized"}, int8("group"), "proj", "q8_0", "of int8"),
    "int8, one scale": ({**PACK, "format": "int-quantized"}, int8("tensor"), "proj", "q8_0", "of int8"),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 64]}, fp8("block"), "proj", "q8_0", "of fp8"),
    "fp8 by channel": ({"quant_method": "fbgemm_fp8"}, fp8("channel"), "proj", "q8_0", "of fp8"),
    "fp8, one scale": ({**PACK, "format": "float-quantized"}, fp8("tensor"), "proj", "q8_0", "of fp8"),
    "mobile": ({"quant_method": "gemma", "num_bits": 4}, mobile, "", "", "scales of activations are left out"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_the_definition(tmp_path: Path, case: str) -> None:
    method, made, only, dtype, said = CASES[case]
    folder, want = directory(tmp_path / "hf", method, made, only)
    with open_checkpoint(folder) as source:
        assert any(said in note for note in source.notes) and not any(
            "left out, tensors are taken" in n for n in source.notes
        )
        found = [n for n in source.names if len(source.shape(n)) == 2 and (not only or n != "token_embd.weight")]
        assert len(found) == len(want)
        for name in found:
            got = dequantise(source.tensor(name))
            expected = want[_hf_name(name)]
            noise = 0.0048 if "fp8" in case else 0.0  # half a code of 127, and a float16 scale
            assert np.abs(got - expected).max() <= noise * np.abs(expected).max(), name
            first, last = len(got) // 2, len(got) - 1  # over the end of a block
            assert np.array_equal(dequantise(source.rows(name, first, last)), got[first:last])
            assert not dtype or source.dtype(name) == dtype
        if case in ("int4 in groups", "mobile"):
            convert(source, tmp_path / "m.gguf", "same")
            with hybrid.load(folder, "cpu") as a, hybrid.load(tmp_path / "m.gguf", "cpu") as b:
                assert np.array_equal(a.logits([2, 5, 7]), b.logits([2, 5, 7]))


def _hf_name(name: str) -> str:
    called = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{called[part]}.weight"


def _changed(change: Callable[[str, Tensors], None]) -> Callable:
    def made(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
        tensors, values = pack_quantized(4, 32)(name, array)
        change(name, tensors)
        return tensors, values

    return made


def _put(last: str, kind: str, value: Any) -> Callable:
    return _changed(lambda name, t: t.__setitem__(f"{name}.{last}", (kind, np.asarray(value))))


BAD = {
    "zero points": (_put("weight_zero_point", "I32", np.zeros((1, 1), np.int32)), "asymmetric codes are not read"),
    "another order": (_put("weight_g_idx", "I32", np.zeros(64, np.int32)), "columns in another order are not read"),
    "4-bit floats": (_put("weight_global_scale", "F32", np.ones(1, np.float32)), "4-bit floats are not read"),
    "a wrong shape": (_put("weight_shape", "I64", [64, 1 << 40]), "holds no codes of 2, 4 or 8 bits"),
    "a negative shape": (_put("weight_shape", "I64", [-64, -64]), "holds no codes"),
    "another scale": (
        _put("weight_scale", "F32", np.ones((7, 2), np.float32)),
        r"shape \[7, 2\], which gives no scale",
    ),
    "small groups": (pack_quantized(4, 16), "groups of 16 codes are not read"),
    "no scale": (_changed(lambda name, t: t.pop(f"{name}.weight_scale")), "weight_scale of .* is missing"),
    "no shape": (_changed(lambda name, t: t.pop(f"{name}.weight_shape")), "needs weight_shape"),
    "no numbers": (_put("weight_scale", "I8", np.ones((64, 2), np.int8)), "is missing, or is not float"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, case: str) -> None:
    made, words = BAD[case]
    folder, _ = directory(tmp_path / "hf", PACK, made)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(folder)
    assert "model.safetensors" in str(error.value) and "\n" not in str(error.value)


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder, _ = directory(tmp_path / "hf", PACK, _put("weight_scale", "F32", np.full(1, np.inf, np.float32)))
    with open_checkpoint(folder) as source, pytest.raises(CheckpointError, match=r"q_proj.weight_packed: .*infinite"):
        source.tensor("blk.0.attn_q.weight")


def test_codes_that_do_not_fill_their_shape_are_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "hf", PACK, pack_quantized(4, 32))[0] / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n.endswith("q_proj.weight_packed"))
    header[name]["shape"][0] *= 2
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(CheckpointError, match=r"q_proj.weight_packed has \d+ bytes for shape"):
        open_checkpoint(tmp_path / "hf")
