"""q4_0 in tiles of 8 rows by 8 blocks: the address of each block, by the host's code and by the loader's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from conformance.support.devices import GUARD, Devices
from hybrid.core.hostmemory import NotShareable
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Packed, Tensor
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.device import VulkanDevice
from hybrid.kernels.vulkan.layout import padded_rows, pieces, tiled
from hybrid.kernels.vulkan.tensors import chunk_rows, cut, part_bytes, split_rows
from hybrid.quant.codec import from_ggml

SIZES = (16, 2)
"""Bytes of a block in each part."""


@pytest.fixture
def device(devices: Devices) -> Iterator[VulkanDevice]:
    made = cast(VulkanDevice, devices.get("vulkan", guard=GUARD))
    made.reset()
    yield made
    assert made.check_guards() == []
    made.reset()


def place(row: int, block: int, blocks: int) -> int:
    if blocks % 8:
        return row * blocks + block
    return (row - row % 8) * blocks + (block - block % 8) * 8 + row % 8 * 8 + block % 8


def raw(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Blocks of a file u8 [n * k / 32, 18] with finite scales."""
    made = np.random.default_rng(seed).integers(0, 256, (n * k // 32, 18), dtype=np.uint8)
    made[:, 1] &= 0xBF
    return made


def packed(blocks: np.ndarray, n: int, k: int) -> Packed:
    flat = blocks.reshape(-1)

    def read_into(at: int, out: np.ndarray) -> None:
        out[:] = flat[at : at + out.size]

    return Packed("q4_0", (n, k), read_into, lambda a, b: from_ggml(flat, "q4_0", (n, k)).rows(a, b))


def memory(device: VulkanDevice, name: str = "w") -> list[tuple[int, list[np.ndarray]]]:
    """(rows, bytes of each part) of every chunk, as stored."""
    device.wait()
    found = []
    for chunk in device.tensor(name).chunks:
        parts = [np.empty(p.size, np.uint8) for p in chunk.parts]
        for piece, out in zip(chunk.parts, parts, strict=True):
            device.transfer.download(piece, out)
        found.append((chunk.rows, parts))
    return found


def assert_lies(device: VulkanDevice, want: Tensor) -> None:
    """Assert every block of every chunk at its address."""
    first, blocks = 0, want.shape[1] // 32
    for rows, parts in memory(device):
        at = np.array([place(r, b, blocks) for r in range(rows) for b in range(blocks)])
        for part, host, size in zip(parts, want.rows(first, first + rows).parts, SIZES, strict=True):
            np.testing.assert_array_equal(
                part.reshape(-1, size)[at], np.ascontiguousarray(host).view(np.uint8).reshape(-1, size)
            )
        first += rows
    assert first == want.shape[0]


@pytest.mark.parametrize(("n", "k"), [(16, 256), (37, 512), (5, 768), (48, 256), (37, 288)])
def test_the_layout_is_the_formula(n: int, k: int) -> None:
    blocks = k // 32
    at = np.array([[place(r, b, blocks) for b in range(blocks)] for r in range(n)])
    held = padded_rows("q4_0", (n, k))
    assert tiled("q4_0", (n, k)) == (k != 288) and held == (n if k == 288 else -(-n // 8) * 8)
    assert len(np.unique(at)) == at.size and at.max() < held * blocks
    assert part_bytes("q4_0", (n, k)) == [held * blocks * size for size in SIZES]
    assert not tiled("q8_0", (n, k)) and part_bytes("q8_0", (n, k)) == [n * k, n * blocks * 2]
    if tiled("q4_0", (n, k)):
        for first, stop in ((0, n), (3, n), (n // 2, n // 2 + 1)):
            host = np.arange((stop - first) * blocks, dtype="<u2").view(np.uint8).reshape(stop - first, -1)
            part = np.full(held * blocks * 2, 255, np.uint8)
            for start, view in pieces(host, first, 2):
                part[start : start + view.size] = view.reshape(-1)
            want = np.full(held * blocks, 65535, np.uint16)
            want[at[first:stop].reshape(-1)] = np.arange((stop - first) * blocks)
            np.testing.assert_array_equal(part.view(np.uint16), want)


def test_chunks_are_whole_tiles_within_a_range() -> None:
    decl = TensorDecl("w", "q4_0", (100, 512), "weight")
    for limit in (2048, 4095, 4096, 9000, 20000):
        chunks = split_rows(decl, limit)
        assert all(row % 8 == 0 and max(part_bytes("q4_0", (rows, 512))) <= limit for row, rows in chunks)
        assert chunks[-1][0] + chunks[-1][1] == 100
    with pytest.raises(VulkanError, match="w: 8 rows, which are stored in tiles, are larger"):
        chunk_rows(decl, 2047)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("k", [512, 288])
def test_rows_are_written_and_read_in_ranges(
    device: VulkanDevice, monkeypatch: pytest.MonkeyPatch, k: int, mapped: bool
) -> None:
    n = 53
    want = from_ggml(raw(n, k).reshape(-1), "q4_0", (n, k))
    device.store(TensorDecl("w", "q4_0", (n, k), "weight"), want)
    if not mapped:
        for chunk in device.tensor("w").chunks:
            for part in chunk.parts:
                monkeypatch.setattr(part.buffer, "view", None)
    for seed, (first, stop) in enumerate(((0, 1), (5, 12), (15, 49), (16, 32), (30, 53), (7, 7), (52, 53)), 1):
        some = from_ggml(raw(stop - first, k, seed).reshape(-1), "q4_0", (stop - first, k))
        for part, new in zip(want.parts, some.parts, strict=True):
            part[first:stop] = new
        device.write("w", some, first)
        assert_lies(device, want)
        for a, b in ((0, n), (first, stop), (3, 40)):
            for got, host in zip(device.read("w", a, b).parts, want.rows(a, b).parts, strict=True):
                assert got.tobytes() == host.tobytes()


@pytest.mark.parametrize("slot", [1 << 20, 1000])
@pytest.mark.parametrize("limit", [None, 16 * 24 * 16])
@pytest.mark.parametrize("k", [768, 288])
def test_the_loader_puts_blocks_where_the_host_does(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, k: int, limit: int | None, slot: int
) -> None:
    """Sources of odd row counts, in slots that end within a row, in several chunks."""
    device = cast(VulkanDevice, devices.get("vulkan", guard=GUARD))
    device.reset()
    if limit is not None:
        monkeypatch.setattr(device, "max_range", limit)
    counts = (21, 1, 31)
    files = [raw(n, k, n) for n in counts]
    want = from_ggml(np.concatenate(files).reshape(-1), "q4_0", (sum(counts), k))
    decl = TensorDecl("w", "q4_0", want.shape, "weight")
    with device.loading(slot):
        device.store(decl, parts=[lambda f=f, n=n: packed(f, n, k) for f, n in zip(files, counts, strict=True)])
    assert len(device.tensor("w").chunks) == (1 if limit is None else 4 if k == 768 else 2)
    assert_lies(device, want)
    device.drop("w")
    device.store(decl, want)
    assert_lies(device, want)
    assert device.check_guards() == []
    device.reset()


def test_chunks_are_cut_at_tiles_and_pages_are_not_taken(device: VulkanDevice) -> None:
    want = from_ggml(raw(40, 256).reshape(-1), "q4_0", (40, 256))
    decl = TensorDecl("w", "q4_0", (40, 256), "weight")
    device.store(decl, want)
    (chunk,) = device.tensor("w").chunks
    part = cut(chunk, 16, 20, 256)
    assert (part.row, part.rows) == (16, 20)
    assert [(p.offset - q.offset, p.size) for p, q in zip(part.parts, chunk.parts, strict=True)] == [
        (2048, 3072),
        (256, 384),
    ]
    with pytest.raises(ValueError, match="cannot be cut at row 12"):
        cut(chunk, 12, 16, 256)
    device.guard, guard = 0, device.guard
    try:
        with pytest.raises(NotShareable, match="v is stored in tiles"):
            device.adopt(TensorDecl("v", "q4_0", (40, 256), "state"), want)
    finally:
        device.guard = guard
