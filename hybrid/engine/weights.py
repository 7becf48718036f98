"""Weights on their way from a checkpoint to a device: converted where asked, joined where a plan fuses them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hybrid.checkpoint import Checkpoint
from hybrid.checkpoint.classes import AS_STORED, class_of
from hybrid.checkpoint.families import is_exact
from hybrid.cli.progress import progress_bar
from hybrid.core.device import Device
from hybrid.core.dtypes import DTYPES, WEIGHT_TYPES, WRITABLE_TYPES
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.planning.expand import WeightInfo
from hybrid.quant.codec import dequantise, quantise, row_blocks
from hybrid.quant.native import NATIVE, computed, native
from hybrid.quant.reencode import Reencoded, reencode, summary

_ELEMENTS = 1 << 23  # made at once
_AT_ONCE = 1 << 19  # converted at once by a thread: 2 MB in float32


def stored_types(checkpoint: Checkpoint, weights: str | None, backend: str = "cpu") -> dict[str, WeightInfo]:
    """Dtype and shape of every tensor as the device will hold it: matrices in type `weights`, else as in the file, else
    (a type that the backend does not compute with) in the one near it.

    Vectors and the smallest matrices stay float32, and `weights` does not mean the classes AS_STORED. Raises ValueError
    for an unknown type or rows that are not whole blocks.
    """
    makes = [t for t in WRITABLE_TYPES if t in computed(backend)]
    if weights is not None and weights not in WEIGHT_TYPES:
        raise ValueError(f"unknown weight type {weights!r}: use one of {', '.join(makes)}")
    if weights is not None and weights not in makes:
        raise ValueError(f"weights cannot be made {weights!r} for {backend}: use one of {', '.join(makes)}")
    found = {}
    for name in checkpoint.names:
        dtype, shape = checkpoint.dtype(name), tuple(checkpoint.shape(name))
        if is_exact(name, shape):
            found[name] = WeightInfo(dtype, shape)
            continue
        if weights is not None and class_of(name) not in AS_STORED:
            if shape[1] % DTYPES[weights].block:
                raise ValueError(f"{name} {list(shape)} cannot be {weights}: its rows are not multiples of 32")
            dtype = weights
        else:
            dtype = native(dtype, backend)
        found[name] = WeightInfo(dtype, shape)
    return found


def upload(
    checkpoint: Checkpoint,
    device: Device,
    decls: Iterable[TensorDecl],
    types: Mapping[str, WeightInfo],
    progress: bool = True,
    stored: Callable[[], object] = lambda: None,
) -> tuple[Reencoded, ...]:
    """Store every weight on the device, one after another; each source is read when it is stored, and converted to its
    dtype in `types` a few rows at a time. Returns what was re-encoded because the device does not compute with a file's
    type.

    Above one second a progress bar in bytes appears on a terminal, elsewhere a line now and then. `stored` is called
    after each tensor.
    """
    changed: dict[str, float] = {}
    decls = list(decls)
    total = sum(d.nbytes for d in decls)
    with contextlib.ExitStack() as held:
        advance = held.enter_context(progress_bar(total, "weights", False, "B", after=1.0)) if progress else None
        with device.loading(sum(d.data_bytes for d in decls)):
            for decl in decls:
                sources = decl.sources or (decl.name,)
                makers = [m for s in sources for m in _makers(checkpoint, s, types[s].dtype, changed)]
                device.store(decl, parts=makers)
                stored()
                if advance is not None:
                    advance(decl.nbytes)
    return summary((checkpoint.dtype(n), types[n].dtype, types[n].shape, rounding) for n, rounding in changed.items())


def _makers(checkpoint: Checkpoint, name: str, dtype: str, changed: dict[str, float]) -> Iterator[Source]:
    """What makes the rows of a tensor as `dtype`, one after another. Re-encoding notes its rounding in `changed`."""
    stored = checkpoint.dtype(name)
    if stored == dtype:
        yield lambda: checkpoint.packed(name) or checkpoint.tensor(name)
        return
    changes, (n, width) = NATIVE.get(stored) == dtype, checkpoint.shape(name)

    def make(start: int, stop: int) -> Tensor:
        out = Tensor.empty(dtype, (stop - start, width))
        with ThreadPoolExecutor() as threads:  # NumPy lets go of the interpreter
            roundings = list(
                threads.map(lambda span: fill(out, start, *span), row_blocks(stop - start, width, _AT_ONCE))
            )
        if changes:
            changed[name] = max(changed.get(name, 0.0), *roundings)
        return out

    def fill(out: Tensor, start: int, first: int, last: int) -> float:
        rows = checkpoint.rows(name, start + first, start + last)
        try:
            made, rounding = reencode(rows) if changes else (convert(rows, dtype), 0.0)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: tensor {name}: {error}") from None
        for to, part in zip(out.parts, made.parts, strict=True):
            to[first:last] = part
        return rounding

    for start, stop in row_blocks(n, width, _ELEMENTS):
        yield partial(make, start, stop)


def convert(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in another storage type, through float32."""
    return quantise(dequantise(tensor), dtype)
