"""Weights on their way from a checkpoint to a device: converted where asked, joined where a plan fuses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from hybrid.checkpoint import Checkpoint
from hybrid.expand import WeightInfo
from hybrid.spec.device import Device
from hybrid.spec.dtypes import DTYPES, WEIGHT_TYPES
from hybrid.spec.plan import TensorDecl
from hybrid.spec.tensor import Tensor


def stored_types(checkpoint: Checkpoint, weights: str | None) -> dict[str, WeightInfo]:
    """Dtype and shape of every tensor as the device will hold it: as in the file, or matrices in type `weights`.

    Norm weights (one axis) stay float32. Raises ValueError for an unknown type or rows that are not whole blocks.
    """
    if weights is not None and weights not in WEIGHT_TYPES:
        raise ValueError(f"unknown weight type {weights!r}: use one of {', '.join(WEIGHT_TYPES)}")
    found = {}
    for name in checkpoint.names:
        dtype, shape = checkpoint.dtype(name), tuple(checkpoint.shape(name))
        if weights is not None and len(shape) == 2:
            if shape[1] % DTYPES[weights].block:
                raise ValueError(f"{name} {list(shape)} cannot be {weights}: its rows are not multiples of 32")
            dtype = weights
        found[name] = WeightInfo(dtype, shape)
    return found


def upload(checkpoint: Checkpoint, device: Device, decls: Iterable[TensorDecl], progress: bool = True) -> None:
    """Store every weight on the device; each source is read (and converted) when its turn comes.

    Above one second a progress bar in bytes appears on stderr.
    """
    decls = list(decls)
    bar = _Bar(sum(d.nbytes for d in decls)) if progress else None
    try:
        for decl in decls:
            makers = [_maker(checkpoint, s, decl.dtype) for s in decl.sources or (decl.name,)]
            device.store(decl, parts=makers)
            if bar is not None:
                bar.add(decl.nbytes)
    finally:
        if bar is not None:
            bar.close()


def _maker(checkpoint: Checkpoint, name: str, dtype: str) -> Callable[[], Tensor]:
    def make() -> Tensor:
        tensor = checkpoint.tensor(name)
        return tensor if tensor.dtype == dtype else convert(tensor, dtype)

    return make


def convert(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in another storage type, through float32."""
    from kernels.oracle.quant import dequantise, quantise  # NumPy code that only conversions need

    return quantise(dequantise(tensor), dtype)


def bytes_by_dtype(infos: Mapping[str, WeightInfo]) -> dict[str, int]:
    """Bytes of matrices by storage type, largest first: what a model's weights are."""
    sizes: dict[str, int] = {}
    for info in infos.values():
        if len(info.shape) == 2:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + DTYPES[info.dtype].nbytes(info.shape)
    return dict(sorted(sizes.items(), key=lambda kv: -kv[1]))


class _Bar:
    """tqdm, but only for loads that take longer than a second."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.bar = None

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.bar is None and time.monotonic() - self.start > 1:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, initial=self.done, unit="B", unit_scale=True, desc="weights", leave=False)
        elif self.bar is not None:
            self.bar.update(nbytes)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
