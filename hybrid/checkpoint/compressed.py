"""Quantised matrices of Hugging Face directories, read as q4_0 or q8_0: compressed-tensors, fp8, and Gemma's packed integers.

A matrix is a tensor of codes and one of scales: `X.weight_packed` (int32 words, with `X.weight_shape`), `X.weight` (int8,
uint8 of packed codes, float8) or `X.embedding_quantized`; `X.weight_scale`, `X.weight_scale_inv` or `X.embedding_scale`. In
words and bytes the first code has the lowest bits; codes are stored from 0 up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import CheckpointError
from hybrid.checkpoint.decoder import METHODS
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.stored import Stored
from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import BLOCK, dequantise, quantise
from hybrid.quant.search import f16_scale

_PACKED = "int2 or int4"  # uint8 of so many codes as rows turn out to have
_FP8_BLOCK = 128
_OF_ACTIVATIONS = (
    "input_scale",
    "output_scale",
    "input_scale_ub",
    "input_activation_scale",
    "output_activation_scale",
    "k_scale",
    "v_scale",
    "k_cache_scale",
    "v_cache_scale",
)
_REFUSED = {
    "weight_zero_point": "asymmetric codes",
    "weight_g_idx": "columns in another order",
    "weight_global_scale": "4-bit floats",
}


def _e4m3() -> np.ndarray:
    """Values of the 256 codes of float8 e4m3fn: no infinities, one NaN of each sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3()


@dataclass(frozen=True, slots=True)
class Scaled(Stored):
    """A matrix of codes with scales. dtype: the type it is read as; foreign: what it is in the file."""

    bits: int = 8
    signed: bool = False
    """int8 as it is; else codes are stored from 0 up."""
    real: bool = False
    """float8."""
    scales: Stored | None = None
    columns: int = 0
    """Elements of one scale along a row; 0: all."""
    rows: int = 1
    """Rows of one scale; 0: all."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.bits // 8

    def load(self) -> Tensor:
        return self.read_rows(0, self.shape[0])

    def read_rows(self, start: int, stop: int) -> Tensor:
        """A copy of rows start..stop. CheckpointError for a scale that is not finite or beyond float16."""
        assert self.file is not None
        width = self.shape[1]
        per = width * self.bits // 8
        raw = np.empty((stop - start, per), np.uint8)
        self.file.read_into(self.offset + start * per, raw.reshape(-1))
        scale = self._scale(start, stop)
        try:
            if self.real:
                return quantise(_E4M3[raw] * np.repeat(scale, self.columns or width, axis=1)[:, :width], self.dtype)
            d = f16_scale(np.repeat(scale, (self.columns or width) // BLOCK, axis=1), self.dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {self.name}: {error}; fetch it again") from None
        shape = (stop - start, width)
        if self.bits == 8:
            codes = raw.view(np.int8) if self.signed else (raw ^ np.uint8(128)).view(np.int8)
            return Tensor(self.dtype, shape, (codes, d))
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        codes = (raw[:, :, None] >> shifts & np.uint8(2**self.bits - 1)) + np.uint8(8 - 2 ** (self.bits - 1))
        halves = codes.reshape(-1, 2, BLOCK // 2)
        return Tensor(self.dtype, shape, ((halves[:, 0] | halves[:, 1] << np.uint8(4)).reshape(len(raw), -1), d))

    def of_width(self, width: int) -> Scaled:
        """With rows of `width` codes, which decide how many bits a code of a uint8 tensor has."""
        if self.foreign != _PACKED:
            return self
        stored = self.shape[1] * self.bits // 8
        bits = next((b for b in (2, 4) if stored * 8 == width * b), self.bits)
        shape = (self.shape[0], stored * 8 // bits)
        assert self.scales is not None
        return _scaled(replace(self, bits=bits, shape=shape), self.scales, None)

    def _scale(self, start: int, stop: int) -> np.ndarray:
        """f32 [rows, scales of a row]."""
        assert self.scales is not None
        s, flat = self.scales, len(self.scales.shape) < 2
        if self.rows == 0:
            return np.broadcast_to(dequantise(s.load()).reshape(1, 1), (stop - start, 1))
        first, last = start // self.rows, -(-stop // self.rows)
        read = dequantise(s.load()).reshape(-1, 1)[first:last] if flat else dequantise(s.read_rows(first, last))
        return np.repeat(read, self.rows, axis=0)[start - first * self.rows :][: stop - start]


def unpacked(path: Path, config: Fields, stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """(the tensors with quantised matrices as single ones, notes). Unchanged for other methods. CheckpointError names a
    tensor that does not fit."""
    quantised = config.sub("quantization_config")
    if not quantised.values:
        quantised = config.sub("text_config").sub("quantization_config")
    method = quantised.get("quant_method")
    if method not in METHODS:
        return dict(stored), []
    block = quantised.get("weight_block_size", [_FP8_BLOCK, _FP8_BLOCK])
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in block)):
        raise quantised.error("weight_block_size", "must be two sizes")
    files: dict[Path, OpenFile] = {}
    out, left = dict(stored), 0
    kinds: Counter[tuple[str, str, str]] = Counter()
    for key, found in stored.items():
        stem, _, last = key.rpartition(".")
        if last in _REFUSED:
            raise CheckpointError(
                f"{found.path}: tensor {found.name}: {_REFUSED[last]} are not read; take the unquantised checkpoint, or a GGUF file"
            )
        if last in _OF_ACTIVATIONS:
            left += 1
            del out[key]
            continue
        if last not in ("weight_packed", "weight", "embedding_quantized") or found.dtype not in _CODES:
            continue
        whole = "embedding_scale" if last == "embedding_quantized" else "weight_scale"
        scale = next((stored[k] for k in (f"{stem}.{whole}", f"{stem}.{whole}_inv") if k in stored), None)
        if scale is None or scale.file is None:
            raise CheckpointError(f"{found.path}: tensor {stem}.{whole} of {found.name} is missing, or is not float")
        if found.path not in files:
            files[found.path] = OpenFile(found.path)
        name, bits, target = _CODES[found.dtype]
        shape = found.shape
        if last == "weight_packed":
            shape, bits = _shape(found, stored.get(f"{stem}.weight_shape"), files)
            name, target = f"int{bits}", "q4_0" if bits < 8 else "q8_0"
            out.pop(f"{stem}.weight_shape")
        elif found.dtype == "U8":
            shape = (*shape[:-1], shape[-1] * 2)
        if len(shape) != 2:
            raise CheckpointError(
                f"{found.path}: tensor {found.name} has shape {list(found.shape)}, not rows and columns"
            )
        for k in (key, f"{stem}.{whole}", f"{stem}.{whole}_inv"):
            out.pop(k, None)
        made = Scaled(
            found.path,
            found.name,
            target,
            shape,
            files[found.path],
            found.offset,
            name,
            bits=bits,
            signed=found.dtype == "I8",
            real=found.dtype == "F8_E4M3",
        )
        out[f"{stem}.weight"] = _scaled(made, scale, block if made.real else None)
        kinds[name, target, scale.dtype] += 1
    notes = [_note(n, *kind) for kind, n in kinds.items()]
    if left:
        notes.append(
            f"{left} scales of activations are left out: activations are quantised as they come, each 32 alone"
        )
    return out, notes


_CODES = {"I32": ("", 0, ""), "I8": ("int8", 8, "q8_0"), "U8": (_PACKED, 4, "q4_0"), "F8_E4M3": ("fp8", 8, "q8_0")}
"""Types of codes in safetensors: their name, bits, and the type they are read as."""


def _note(count: int, name: str, target: str, scale: str) -> str:
    if name == "fp8":
        lost = "0.6 % of noise, root mean square"
    else:
        lost = "scales rounded to float16" if scale == "f32" else "exact"
    return f"{count} matrices of {name} are read as {target}, {DTYPES[target].bits:.4g} bits a weight: {lost}"


def _shape(found: Stored, declared: Stored | None, files: Mapping[Path, OpenFile]) -> tuple[tuple[int, ...], int]:
    """Shape and bits of packed codes, from the tensor that declares the shape."""
    where = f"{found.path}: tensor {found.name}"
    if found.dtype != "I32" or len(found.shape) != 2:
        raise CheckpointError(f"{where} is {found.dtype} {list(found.shape)}: only int32 words of rows are read")
    if declared is None or declared.dtype != "I64" or declared.shape != (2,):
        raise CheckpointError(f"{where} needs weight_shape beside it, two int64")
    file = files.get(declared.path) or OpenFile(declared.path)
    shape = tuple(np.frombuffer(file.read(declared.offset, 16), "<i8").tolist())
    rows, words = found.shape
    bits = next((b for b in (2, 4, 8) if shape[0] == rows and shape[1] * b == 32 * words and words), None)
    if bits is None:
        raise CheckpointError(
            f"{where} of shape {list(found.shape)} holds no codes of 2, 4 or 8 bits of a matrix {list(shape)}"
        )
    return shape, bits


def _scaled(codes: Scaled, scale: Stored, block: list[int] | None) -> Scaled:
    """`codes` with their scales, whose shape says what each is for."""
    rows, width = codes.shape
    shape = scale.shape
    across = shape[1] if len(shape) == 2 else 1
    wanted = BLOCK if not codes.real else 1
    if prod(shape) == 1:
        made = replace(codes, scales=scale, rows=0, columns=0)
    elif len(shape) in (1, 2) and shape[0] == rows and across and width % across == 0:
        made = replace(codes, scales=scale, rows=1, columns=0 if across == 1 else width // across)
    elif block is not None and shape == (-(-rows // block[0]), -(-width // block[1])):
        made = replace(codes, scales=scale, rows=block[0], columns=block[1])
    else:
        raise CheckpointError(
            f"{scale.path}: tensor {scale.name} has shape {list(shape)}, which gives no scale to each part of a matrix "
            f"{list(codes.shape)}"
        )
    if width % BLOCK or made.columns % wanted:
        raise CheckpointError(
            f"{codes.path}: tensor {codes.name}: groups of {made.columns or width} codes are not read, only multiples of {BLOCK}"
        )
    return made
