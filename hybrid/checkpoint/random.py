"""Checkpoints with a published model's shape and random weights, for benchmarks without the model's files.

Weights are noise with finite logits. A pool of ggml blocks is drawn for each type and row length, and each tensor
repeats it from another offset; norms are 1. Devices load them like files: same types, same bytes, a buffer for every
tensor. The tokenizer is the demonstration model's, padded with made-up pieces to Gemma's size.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from hybrid.checkpoint.base import Checkpoint, Entry, Generation
from hybrid.checkpoint.classes import class_of
from hybrid.checkpoint.families import family_of, is_exact, is_index, tensors
from hybrid.checkpoint.gguf_file import open_gguf
from hybrid.core.dtypes import DTYPES, FILE_TYPES, WEIGHT_TYPES, fitting
from hybrid.core.errors import nearest
from hybrid.core.hparams import HParams
from hybrid.core.places import DEMO
from hybrid.core.tensor import Packed, Tensor
from hybrid.quant.codec import from_ggml
from hybrid.spec.model import find_model
from hybrid.text.tokenizer import NORMAL, SPACE, Tokenizer

PIECES = 262144  # of Gemma 3's tokenizer; its embedding has a few more rows
POOL_BYTES = 8 << 20
_HEAD = ("embed", "head", "table")  # classes
_STREAMS = "bf16"  # type of matrices that quantised files leave unquantised


def random_checkpoint(
    name: str, kind: str = "q4_0", head: str | None = None, layers: int | None = None, vocab: int | None = None
) -> Checkpoint:
    """An open checkpoint of model sheet `name` (specs/models). kind: type of matrices; head: of embedding and output
    matrix (default: q6_k); rows that are no whole blocks take the type that hybrid.convert takes; layers: use only the
    first; vocab: number of tokens. ValueError for invalid values."""
    hp = random_shape(name, layers, vocab)
    kinds = random_types(hp, kind, head)
    entries = {n: _entry(n, kinds[n], shape) for n, shape in tensors(hp).items()}
    return Checkpoint(
        path=Path("random") / name,
        hparams=hp,
        entries=entries,
        file_bytes=0,
        chat_template=None,
        generation=Generation(),
        make_tokenizer=lambda: demo_tokenizer(min(PIECES, hp.vocab)),
        name=f"{name} (random)",
        notes=("random weights: fit for measuring speed, not for reading",),
        prompts=family_of(hp).prompts,
    )


def random_shape(name: str, layers: int | None = None, vocab: int | None = None) -> HParams:
    """The sheet's hyper-parameters, with only the first layers or another vocabulary size if given."""
    hp = find_model(name).hparams()
    if layers is not None:
        if not 1 <= layers <= hp.n_layers:
            raise ValueError(f"--layers {layers} is outside 1..{hp.n_layers}")
        hp = hp.first(layers)
    if vocab is not None:
        if not 32 <= vocab <= hp.vocab:
            raise ValueError(f"--vocab {vocab} is outside 32..{hp.vocab}")
        hp = replace(hp, vocab=vocab, per_layer_vocab=min(hp.per_layer_vocab, vocab))
    return hp


def random_types(
    hparams: HParams, kind: str, head: str | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, str]:
    """Storage type of every tensor by name. shapes: instead of the tensors that plans use. ValueError for an unknown
    type."""
    found = {}
    for name, shape in (tensors(hparams) if shapes is None else shapes).items():
        if is_exact(name, shape):
            found[name] = "i32" if is_index(name) else "f32"
            continue
        option, wanted = ("head", head or "q6_k") if class_of(name) in _HEAD else ("type", kind)
        if class_of(name) == "streams" and wanted in DTYPES and DTYPES[wanted].quantised:
            wanted = _STREAMS
        if wanted not in WEIGHT_TYPES:
            raise ValueError(f"--{option}: {wanted!r} is no storage type{nearest(wanted, WEIGHT_TYPES)}")
        found[name] = fitting(wanted, shape[1])
    return found


@dataclass(frozen=True, slots=True)
class _Noise:
    """The bytes of one tensor: its pool, repeated, from offset `first`."""

    dtype: str
    shape: tuple[int, ...]
    pool: np.ndarray
    first: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> _Noise:
        pool, block = random_rows(dtype, shape[-1], POOL_BYTES), DTYPES[dtype].nbytes((DTYPES[dtype].block,))
        return cls(dtype, shape, pool, zlib.crc32(name.encode()) % (pool.size // block) * block)

    def read_into(self, at: int, out: np.ndarray) -> None:
        pool, done = self.pool, 0
        while done < out.size:
            start = (self.first + at + done) % pool.size
            n = min(out.size - done, pool.size - start)
            out[done : done + n] = pool[start : start + n]
            done += n

    def rows(self, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self.shape[1:])
        raw = np.empty(DTYPES[self.dtype].nbytes(shape), np.uint8)
        self.read_into(start * DTYPES[self.dtype].nbytes(self.shape[1:]), raw)
        return from_ggml(raw, self.dtype, shape)

    def load(self) -> Tensor:
        return self.rows(0, self.shape[0])


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    if is_index(name):
        return Entry(dtype, shape, lambda: Tensor.of(np.arange(shape[0], dtype=np.int32)))
    if len(shape) == 1:
        return Entry(dtype, shape, lambda: Tensor.of(np.ones(shape, np.float32)))
    noise = _Noise.of(name, dtype, shape)
    return Entry(dtype, shape, noise.load, noise.rows, Packed(dtype, shape, noise.read_into, noise.rows))


def random_packed(name: str, dtype: str, shape: tuple[int, ...]) -> Packed:
    """A matrix of noise in a file's encoding; its offset in the noise depends on the name."""
    noise = _Noise.of(name, dtype, shape)
    return Packed(dtype, shape, noise.read_into, noise.rows)


@cache
def random_rows(dtype: str, width: int, piece_bytes: int) -> np.ndarray:
    """uint8 [at most piece_bytes]: whole ggml blocks of values with standard deviation width ** -0.5, which preserves
    activation magnitudes (width 0: norm weights, 1)."""
    kind, rng = DTYPES[dtype], np.random.default_rng(width)
    size = kind.nbytes((kind.block,))
    count = piece_bytes // size
    if not kind.quantised:
        values = (
            np.ones(count, np.float32)
            if not width
            else np.float32(width**-0.5) * rng.standard_normal(count, np.float32)
        )
        if dtype == "bf16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        return values.astype(kind.parts[0].dtype).view(np.uint8)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    scale, minimum = kind.noise
    step = (1 + 0.25 * rng.random((count, 1), np.float32)) * np.float32(width**-0.5 / scale)
    at = 0
    for part in map(kind.part, FILE_TYPES[dtype].order):
        nbytes = part.count * part.dtype.itemsize
        if part.dtype == np.float16:
            both = np.concatenate([step, minimum * step], axis=1)[:, : part.count]
            blocks[:, at : at + nbytes] = both.astype(np.float16).view(np.uint8)
        at += nbytes
    return blocks.reshape(-1)


@lru_cache(maxsize=1)  # published sizes have one size of vocabulary
def demo_tokenizer(size: int) -> Tokenizer:
    """The demonstration model's tokenizer, padded with pieces that ordinary text does not contain."""
    with open_gguf(DEMO) as demo:
        tokenizer = demo.tokenizer
    v = tokenizer.vocabulary.first(size)
    more = range(len(v.pieces), size)
    lowest = min(v.scores)
    filled = replace(
        v,
        pieces=(*v.pieces, *(f"{SPACE}piece{i:06}" for i in more)),
        scores=(*v.scores, *(lowest - 1 - i for i in more)),
        types=(*v.types, *(NORMAL for _ in more)),
    )
    return Tokenizer(filled, tokenizer.eos_ids)
