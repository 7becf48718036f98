"""Memory shared by two devices: the order of methods, refusals with reasons, and real imports."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine.test_hybrid import drivers_memory
from conformance.npu.test_npu_surface import MANIFEST
from conformance.support.devices import for_model, open_backend, own_memory
from conformance.support.paths import ATTENTION
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy
from hybrid.checkpoint import open_checkpoint
from hybrid.core.hostmemory import NotShareable, over, pages
from hybrid.core.plan import TensorDecl
from hybrid.core.tensor import Tensor
from hybrid.devices import transfers
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.kernels.npu import xrt_sim
from hybrid.kernels.npu.device import NpuDevice
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.kernels.vulkan.api import check, ffi, lib, vk
from hybrid.kernels.vulkan.hostmemory import OPAQUE_FD, import_fd
from hybrid.spec.schedule import named_schedule

DECL = TensorDecl("t", "f32", (5, 1000), "io")
DMA_BUF = "VK_EXT_external_memory_dma_buf"


pytestmark = pytest.mark.usefixtures("sim_machine")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", tiny(n_layers=2, head_dim=32, layer_is_global=(False, True)))


@contextmanager
def opened(folder: Path, backend: str, depth: int) -> Iterator[tuple[Engine, Any]]:
    """An engine with attention on sim-npu1, and its devices; `depth` prompt passes overlap."""
    found = named_schedule(ATTENTION)
    schedule = found.model_copy(update={"schedule": found.schedule.model_copy(update={"pipeline": depth})})
    with open_checkpoint(folder) as checkpoint, closing(for_model(backend, schedule).device) as device:
        config = EngineConfig(ctx=256, chunk=32, slots=2)
        yield Engine(checkpoint, device, config, schedule=schedule), device


def texts(engine: Engine) -> list[Any]:
    """Logits of one prompt, then the texts of two that run together."""
    ids = [np.random.default_rng(n).integers(6, 300, n).tolist() for n in (70, 40)]
    logits = engine.logits(ids[0]).tobytes()
    return [logits, *[handle.result().ids for handle in [ask(engine, prompt, 3) for prompt in ids]]]


def memfd(nbytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, nbytes)
    return fd, mmap.mmap(fd, nbytes)


# --- the exporter


def test_the_current_binding_cannot_export() -> None:
    assert MANIFEST["absent"] == {"bo": ["export_buffer"]} and not hasattr(xrt_sim.bo, "export_buffer")
    with NpuDevice("sim") as device:
        with pytest.raises(NotShareable, match=r"sim-npu1 exports no dma-buf: pyxrt's bo has no export_buffer"):
            device.export(DECL)
        assert device.host.counters.buffers == 0


class Stand:
    """A binding with export_buffer, and its buffers in memfds: only the protocol, which no driver would import."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given, self.open = 0, set[int]()
        """Descriptors: the number created, and the open ones."""
        init = xrt_sim.bo.__init__

        def made(bo: Any, owner: Any, size: int, *more: int) -> None:
            init(bo, owner, size, *more)
            if not isinstance(owner, xrt_sim.bo):
                bo.fd, room = memfd(size)
                bo._host = np.frombuffer(room, np.uint8)

        def export(bo: Any) -> int:
            fd = os.dup(bo.fd)
            self.given += 1
            self.open.add(fd)
            return fd

        def close(fd: int) -> None:
            shut(fd)
            self.open.discard(fd)

        shut = os.close
        monkeypatch.setattr(os, "close", close)
        monkeypatch.setattr(xrt_sim.bo, "__init__", made)
        monkeypatch.setattr(xrt_sim.bo, "export_buffer", export, raising=False)


def test_a_buffer_that_is_exported_is_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    decl = TensorDecl("t", "q8_0", (3, 64), "io")  # two parts with separate descriptors
    with NpuDevice("sim") as device:
        exported = device.export(decl)
        assert len(exported.fds) == len(exported.value.parts) == 2 and device.host.counters.buffers == 2
        for fd, part in zip(exported.fds, exported.value.parts, strict=True):
            seen = np.frombuffer(mmap.mmap(fd, pages(part.nbytes)), part.dtype)[: part.size]
            assert not seen.any()
            part.reshape(-1)[-1] = 7
            assert seen[-1] == 7
            os.close(fd)
    assert stand.given == 2 and not stand.open


# --- the order


class Importer(CpuDevice):
    """A main device that rejects anonymous pages and imports descriptors by mapping them: its memory is not the
    exporter's mapping."""

    refuses = False

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        if not fds:
            raise NotShareable("no host pages here")
        if self.refuses:
            raise NotShareable("no descriptors either")
        left = list(fds)
        super().adopt(decl, over(decl, lambda nbytes: mmap.mmap(left.pop(0), nbytes)))


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.slow
def test_a_dma_buf_is_taken_where_pages_are_refused_and_a_copy_where_both_are(
    refuses: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder, "cpu", 2) as (engine, device):
        wanted = texts(engine)
        plain = device.transfers.counts
        assert (plain.dma_bufs, plain.copies, plain.why_not) == (0, 0, "") and plain.shared > 0
    stand = Stand(monkeypatch)
    monkeypatch.setattr(Importer, "refuses", refuses)
    monkeypatch.setattr("hybrid.kernels.oracle.device.CpuDevice", Importer)
    with opened(folder, "cpu", 2) as (engine, device):
        assert isinstance(device.main, Importer)
        assert texts(engine) == wanted
        found = device.transfers.counts
        if refuses:
            assert (found.shared, found.dma_bufs) == (0, 0) and found.copies > 0
            assert found.why_not == "no host pages here; no descriptors either"
        else:
            assert (found.shared, found.copies, found.why_not) == (plain.shared, 0, "")
            assert found.dma_bufs >= found.shared and f", {found.dma_bufs} dma-bufs)" in str(found)
            xrt_sim.faults.vanish_after = 1  # the contents of its buffers outlive the device
            assert len(greedy(engine, [5, 6, 7], 3)) == 3
            assert device.failures and not device.others
    assert stand.given and not stand.open, "importers keep descriptors of their own"


def test_without_an_exporter_every_reason_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "anonymous", drivers_memory)
    with opened(folder, "vulkan", 1) as (_, device):
        why = device.transfers.counts.why_not
        assert device.transfers.counts.shared == 0 and "; sim-npu1 exports no dma-buf" in why


# --- Vulkan


def test_a_device_without_the_extension_refuses_to_import() -> None:
    opened: Any = open_backend("vulkan")
    with opened as device:
        if device.has(DMA_BUF):
            pytest.skip(f"this driver has {DMA_BUF}: it would take a real dma-buf, and there is none to be had here")
        fd, room = memfd(pages(20000))
        value = over(DECL, lambda nbytes: room)
        with pytest.raises(NotShareable, match=f"the device lacks {DMA_BUF}"):
            device.adopt(DECL, value, (fd,))
        assert "t" not in device._tensors and not device.memory_pool.imported
        os.fstat(fd)
        os.close(fd)


def exported_by(device: Any, nbytes: int) -> tuple[Any, Any, int, np.ndarray]:
    """(memory, buffer, descriptor, mapping) of a device's own memory, as a driver exports it to another device of its
    kind."""
    memory = device.memory_pool
    handle = memory.buffer(nbytes, vk.VkExternalMemoryBufferCreateInfo(handleTypes=OPAQUE_FD))
    need = vk.vkGetBufferMemoryRequirements(memory.device, handle)
    may = vk.VkExportMemoryAllocateInfo(handleTypes=OPAQUE_FD)
    info = vk.VkMemoryAllocateInfo(pNext=may, allocationSize=need.size, memoryTypeIndex=memory.types["device"])
    out, fd, mapped = ffi.new("VkDeviceMemory *"), ffi.new("int *"), ffi.new("void **")
    check(lib.vkAllocateMemory(memory.device, ffi.addressof(info), ffi.NULL, out), "allocating")
    vk.vkBindBufferMemory(memory.device, handle, out[0], 0)
    ask = ffi.cast("PFN_vkGetMemoryFdKHR", lib.vkGetDeviceProcAddr(memory.device, b"vkGetMemoryFdKHR"))
    wanted = vk.VkMemoryGetFdInfoKHR(memory=out[0], handleType=OPAQUE_FD)
    check(ask(memory.device, ffi.addressof(wanted), fd), "exporting")
    check(lib.vkMapMemory(memory.device, out[0], 0, nbytes, 0, mapped), "mapping")
    return out[0], handle, fd[0], np.frombuffer(ffi.buffer(mapped[0], nbytes), np.uint8)


def test_memory_of_one_vulkan_device_is_imported_by_another() -> None:
    """Import by descriptor as drivers here support it: opaque ones, of the same driver. A kernel of the importing
    device (a fill) writes; the exporter's mapping shows it."""
    first, second = open_backend("vulkan"), open_backend("vulkan")
    with first as one, second as two:  # type: ignore[attr-defined]
        if own_memory(one) or not one.has("VK_KHR_external_memory_fd"):
            pytest.skip(
                f"{one.name} has memory of its own or lacks VK_KHR_external_memory_fd: nothing to export and map here"
            )
        nbytes = pages(20000)
        memory, buffer, fd, seen = exported_by(one, nbytes)
        seen[:] = 1
        try:
            piece = import_fd(two.memory_pool, two.has, fd, seen, "io", OPAQUE_FD)
            assert two.memory_pool.held["io"] == nbytes and len(two.memory_pool.imported) == 1
            two.transfer.fill(piece, 0x5A)
            two.wait()
            assert (seen == 0x5A).all(), "the same memory"
            two.memory_pool.release(piece, "io")
            assert not two.memory_pool.imported and two.memory_pool.held["io"] == 0
            os.fstat(fd)
            with pytest.raises(NotShareable, match="lacks VK_KHR_external_memory_fd"):
                import_fd(two.memory_pool, lambda name: False, fd, seen, "io", OPAQUE_FD)
        finally:
            os.close(fd)
            vk.vkDestroyBuffer(one.handle, buffer, None)
            vk.vkFreeMemory(one.handle, memory, None)
