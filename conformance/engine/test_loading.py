"""Loading weights: a device repacks as the host does, damage is named, and no memory or file leaks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import hybrid
from conformance.support.devices import GUARD, Devices, open_backend
from conformance.support.synthetic import tiny
from hybrid import generate
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.files import OpenFile
from hybrid.checkpoint.stored import Stored
from hybrid.core.dtypes import DTYPES, FILE_TYPES, WEIGHT_TYPES
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Packed, Tensor
from hybrid.engine.loading import resident, stored_types, upload
from hybrid.kernels.vulkan.device import VulkanDevice
from hybrid.kernels.vulkan.memory import Buffer, Memory
from hybrid.kernels.vulkan.repack import REPACKED
from hybrid.quant.codec import from_ggml
from tools import make_random_gguf
from tools.make_random_gguf import random_file


def raw_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes as in a file, with finite float16 scales (NaN and denormals of plain types stay)."""
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    raw = rng.integers(0, 256, kind.nbytes(shape), dtype=np.uint8)
    if kind.quantised:
        blocks, at = raw.reshape(-1, kind.nbytes((kind.block,))), 0
        for name in FILE_TYPES[dtype].order:
            part = next(p for p in kind.parts if p.name == name)
            size = part.count * part.dtype.itemsize
            if part.dtype == np.float16:
                for high in range(at + 1, at + size, 2):
                    blocks[:, high] &= 0xBF  # below 2, with subnormal numbers and -0
            at += size
    return raw


def stored(path: Path, dtype: str, shape: tuple[int, ...], raw: np.ndarray, before: bytes = b"") -> Stored:
    """A tensor in a separate file, after `before`."""
    path.write_bytes(before + raw.tobytes())
    return Stored(path, "blk.0.ffn_up.weight", dtype, shape, OpenFile(path), len(before))


def same(a: Tensor, b: Tensor) -> bool:
    """Assert equal bits."""
    pairs = zip(a.parts, b.parts, strict=True)
    return a.dtype == b.dtype and all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pairs)


@pytest.mark.parametrize("slot", [1 << 20, 2048], ids=["large", "tiny"])
@pytest.mark.parametrize("split", [None, 8192], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_repacked_rows_are_those_of_the_host(
    devices: Devices, tmp_path: Path, dtype: str, split: int | None, slot: int
) -> None:
    """Two sources of odd row counts, at an odd offset of the file, in chunks and through slots that end anywhere."""
    device = devices.get("vulkan", max_range=split, guard=GUARD)
    device.reset()
    width = 3 * 256
    files = [
        stored(tmp_path / f"{rows}", dtype, (rows, width), raw_tensor(dtype, (rows, width), rows), b"x" * 7)
        for rows in (37, 5, 1)
    ]
    decl = TensorDecl("w", dtype, (43, width), "weight")
    up = device.counters.copy()
    with device.loading(slot):
        device.store(decl, parts=[lambda f=f: f.packed() for f in files])
    up = device.counters.minus(up)
    assert up.bytes_up == DTYPES[dtype].nbytes((43, width))
    assert bool(up.dispatches) == (dtype in REPACKED)
    got, at = device.read("w"), 0
    for file in files:
        want = from_ggml(file.raw(), dtype, file.shape)
        assert same(got.rows(at, at + want.shape[0]), want), file.path.name
        at += want.shape[0]
    assert device.check_guards() == []
    device.reset()


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_memory_that_is_not_host_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    """As on a discrete GPU: device memory is not mapped, slots are copied before they are repacked."""
    create = Memory._create

    def unmapped(memory: Memory, size: int, pool: str) -> Buffer:
        made = create(memory, size, pool)
        made.view = made.view if pool != "device" else None
        return made

    monkeypatch.setattr(Memory, "_create", unmapped)
    shape = (43, 768)
    file = stored(tmp_path / "f", dtype, shape, raw_tensor(dtype, shape))
    with cast(VulkanDevice, open_backend("vulkan", max_range=8192)) as device:
        with device.loading(4096):
            assert device.loader is not None
            device.loader.direct = False
            device.store(TensorDecl("w", dtype, shape, "weight"), parts=[file.packed])
        assert same(device.read("w"), file.load())


def weights(device: Any) -> int:
    return device.memory()["weights"]


def blocks(device: Any) -> dict[str, list[int]]:
    """Sizes of the driver's allocations."""
    return {pool: [b.size for b in held] for pool, held in device.memory_pool.blocks.items()}


@pytest.mark.parametrize("dtype", REPACKED)
@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_a_scale_that_is_not_finite_is_named(devices: Devices, tmp_path: Path, backend: str, dtype: str) -> None:
    shape, kind = (40, 512), DTYPES[dtype]
    raw = raw_tensor(dtype, shape)
    size = kind.nbytes((kind.block,))
    fields = {"q4_1": 4, "q5_1": 4, "q6_k": 210, "q3_k": 110, "q2_k": 84}.get(dtype, 2)  # the last float16 ends here
    block = 29 * 512 // kind.block + 1
    raw.reshape(-1, size)[block, fields - 2 : fields] = np.array([np.nan if dtype == "q8_0" else -np.inf], "<f2").view(
        np.uint8
    )
    file = stored(tmp_path / "f", dtype, shape, raw)
    device = devices.get(backend)
    device.reset()
    staging = device.memory().get("staging", 0)
    want = (
        f"f: tensor blk.0.ffn_up.weight of {dtype} is damaged: the (scale|minimum) of row 29, elements {kind.block} to"
    )
    with pytest.raises(CheckpointError, match=want):
        device.store(TensorDecl("w", dtype, shape, "weight"), parts=[file.packed])
    # Within a load the error may come late, but it names the right tensor.
    good = stored(tmp_path / "g", dtype, shape, raw_tensor(dtype, shape))
    with pytest.raises(CheckpointError, match=want), device.loading(4096):
        device.store(TensorDecl("v", dtype, shape, "weight"), parts=[good.packed])
        device.store(TensorDecl("w", dtype, shape, "weight"), parts=[file.packed])
        device.store(TensorDecl("x", dtype, shape, "weight"), parts=[good.packed])
    assert backend == "cpu" or (weights(device) == 0 and device.memory()["staging"] == staging)
    device.reset()


@pytest.mark.parametrize("dtype", ["q4_0", "f16", "q4_k"])
@pytest.mark.parametrize("backend", ["cpu", "vulkan"])
def test_a_file_that_is_cut_during_the_load_is_refused(
    devices: Devices, tmp_path: Path, backend: str, dtype: str
) -> None:
    shape = (64, 512)
    file = stored(tmp_path / "f", dtype, shape, raw_tensor(dtype, shape))
    device = devices.get(backend)
    device.reset()
    held = dict(device.memory())

    def cut() -> Packed:
        with open(file.path, "r+b") as f:
            f.truncate(1000)
        return file.packed()

    with (
        pytest.raises(CheckpointError, match=r"f changed while it was open: it had .* load it again"),
        device.loading(1 << 16),
    ):
        device.store(TensorDecl("w", dtype, shape, "weight"), parts=[cut])
    assert backend == "cpu" or device.memory() == held
    device.reset()


def test_an_error_between_two_sources_leaves_nothing(devices: Devices, tmp_path: Path) -> None:
    """The first is still being read when the second fails."""
    file = stored(tmp_path / "f", "q4_0", (64, 512), raw_tensor("q4_0", (64, 512)))
    device = devices.get("vulkan")
    device.reset()

    def fails() -> Tensor:
        raise CheckpointError("no such tensor")

    with device.loading(1 << 16):
        with pytest.raises(CheckpointError, match="no such tensor"):
            device.store(TensorDecl("w", "q4_0", (128, 512), "weight"), parts=[file.packed, fails])
        assert weights(device) == 0
        device.store(TensorDecl("w", "q4_0", (64, 512), "weight"), parts=[file.packed])
    assert same(device.read("w"), file.load())
    device.reset()


def test_reading_during_a_load_sees_what_was_stored(devices: Devices, tmp_path: Path) -> None:
    file = stored(tmp_path / "f", "q6_k", (64, 512), raw_tensor("q6_k", (64, 512)))
    device = devices.get("vulkan")
    device.reset()
    with device.loading(1 << 16):
        device.store(TensorDecl("w", "q6_k", (64, 512), "weight"), parts=[file.packed])
        assert same(device.read("w"), file.load())
    device.reset()


def test_loading_again_takes_no_more_memory(devices: Devices, tmp_path: Path) -> None:
    files = [stored(tmp_path / t, t, (96, 2048), raw_tensor(t, (96, 2048))) for t in ("q4_0", "q6_k", "bf16", "f32")]
    device = devices.get("vulkan")
    device.reset()
    staging = device.memory()["staging"]  # the ring for small copies: mapped devices hardly need it
    seen = []
    for _ in range(3):
        with device.loading(sum(f.packed().nbytes for f in files)):
            for f in files:
                device.store(TensorDecl(f.dtype, f.dtype, f.shape, "weight"), parts=[f.packed])
        assert device.memory()["staging"] == staging
        seen.append((dict(device.memory()), blocks(device)))
        device.reset()
    assert seen[1] == seen[2]


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell a process's peak memory"
)
def test_a_load_holds_little_on_the_host(devices: Devices, tmp_path: Path) -> None:
    """Beyond the device's memory (which is the host's on a CPU driver) and its staging: no copy, no mapped page."""
    shape = tiny(n_layers=1, hidden=1024, ffn=131072, n_heads=4, n_kv_heads=1, head_dim=256, vocab=8192)
    random_file(tmp_path / "wide.gguf", shape, "q4_0", "q6_k", piece_bytes=1 << 22)
    device = devices.get("vulkan")
    device.reset()
    pool = device.memory_pool
    shared = pool.types["read"] == pool.types["device"]
    with open_checkpoint(tmp_path / "wide.gguf") as checkpoint:
        types = stored_types(checkpoint, None, "vulkan")
        decls = [TensorDecl(n, t.dtype, t.shape, "weight") for n, t in types.items()]
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before, most = resident(), 0

        def sample(share: float) -> None:
            nonlocal most
            most = max(most, sum(device.memory().values()) if shared else device.memory()["staging"])

        up = device.counters.bytes_up
        upload(checkpoint, device, decls, types, sample)
        peak = resident()["peak"] - before["anonymous"] - before["file"] - before["shared"] - most
        assert device.counters.bytes_up - up > 220e6
        assert checkpoint.file_bytes > 220e6 and peak < checkpoint.file_bytes / 8 + (16 << 20), f"{peak / 1e6:.0f} MB"
    device.reset()


@pytest.mark.slow
def test_load_times_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--device", "cpu", "-n", "1", "--stats"]) == 0
    line = next(x for x in capsys.readouterr().err.splitlines() if x.startswith("load: "))
    for phase in ("open", "tokenizer", "device", "plan", "weights", "pipelines", "GB/s", "peak host memory"):
        assert phase in line
    assert generate.main(["--device", "cpu", "-n", "1", "--json"]) == 0
    load = json.loads(capsys.readouterr().out)["load"]
    assert load["bytes_up"] > 9e6 and load["peak_host"] > 1e7 and sum(load["seconds"].values()) > 0


@pytest.mark.slow
def test_random_files_may_have_fewer_layers_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.gguf"
    assert make_random_gguf.main(["gemma3-270m", str(out), "--layers", "1", "--vocab", "640", "--head", "q4_0"]) == 0
    with open_checkpoint(out) as c:
        assert (c.hparams.n_layers, c.hparams.vocab, c.tokenizer.n_tokens) == (1, 640, 640)
        assert c.dtype("token_embd.weight") == "q4_0" and c.shape("token_embd.weight") == (640, 640)
    assert make_random_gguf.main(["gemma3-270m", str(tmp_path / "x.gguf"), "--vocab", "1000000"]) == 1
    assert "--vocab 1000000 is outside 32.." in capsys.readouterr().err


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_random_files_are_models(tmp_path: Path, dtype: str) -> None:
    """The benchmark models for loading: they open, and compute numbers of a sane size."""
    shape = tiny(n_layers=2, hidden=256, ffn=512, n_heads=2, n_kv_heads=1, head_dim=128, vocab=8192)
    random_file(tmp_path / "r.gguf", shape, dtype, dtype, piece_bytes=1 << 16)
    with hybrid.load(tmp_path / "r.gguf", "cpu") as model:
        logits = model.logits([2, 100, 200])
        assert np.isfinite(logits).all() and 0.2 < logits.std() < 50, logits.std()
