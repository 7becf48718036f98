"""The host side of a run, through pyxrt's API; the same for the hardware (pyxrt) and for sim-npu1 (xrt_sim).

    host = open_host("sim", folder)
    host.run([Job(design, {"A": a, "B": b}, {"C": c})])      inputs are copied in, outputs copied out

Contexts, instruction buffers and data buffers are kept: a second run of a size allocates nothing. One xclbin serves
every size of a fabric through its instruction streams. Several jobs of one fabric go as one runlist where pyxrt has
runlists (XRT 2.20), else one after another. Operands that stay (resident.py) are brought to the device where they have
changed.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hybrid.core.hostmemory import NotShareable
from hybrid.kernels.npu.artefact import KERNEL, fabric_digest, find, stream_digest
from hybrid.kernels.npu.check import npu_limits
from hybrid.kernels.npu.design import DTYPES, Design
from hybrid.kernels.npu.resident import Resident

Reader = Callable[[np.ndarray], None]
"""Takes an output in place: the buffer's host copy, flat and typed, valid until it returns."""
RUNLISTS = (2, 20)
"""The XRT version whose pyxrt has `runlist` first."""
NEEDED = (
    "device",
    "xclbin",
    "hw_context",
    "kernel",
    "run",
    "bo",
    "xclBOSyncDirection",
    "ert_cmd_state",
    "xrt_info_device",
)
"""What of pyxrt nothing here works without."""
OPCODE, FIRST = 3, 3
STAMP = np.frombuffer(bytes((0xD1, 0x7E, 0x5A, 0xC3)) * 16, np.uint8)  # at both ends of every output before a run


class NpuError(RuntimeError):
    """The NPU or its driver refused or failed. `kind`: timeout, silent, gone, error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NpuUnavailable(RuntimeError):
    """There is no NPU, or not the software to use it; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Job:
    design: Design
    inputs: Mapping[str, np.ndarray | Resident]
    outputs: Mapping[str, np.ndarray | Reader]
    """Arrays are written in place."""

    def input(self, name: str) -> np.ndarray:
        """An input, flat, of the design's type. ValueError where it is of another type or size than declared."""
        given, array = self.inputs[name], self.design.argument(name)
        wanted = DTYPES[array.dtype]
        if isinstance(given, Resident):
            given = given.bytes.view(wanted) if given.bytes.size % wanted.itemsize == 0 else given.bytes
        if given.dtype != wanted or given.size != array.size:
            raise ValueError(
                f"{self.design.name}: {name} is {given.dtype} of {given.size}, declared {array.dtype} of {array.size}"
            )
        return np.ascontiguousarray(given).reshape(-1)

    def deliver(self, name: str, data: np.ndarray) -> None:
        """Pass a flat output to its callback."""
        out = self.outputs[name]
        if isinstance(out, np.ndarray):
            out.reshape(-1)[:] = data
        else:
            out(data)


@dataclass(slots=True)
class HostCounters:
    contexts: int = 0
    buffers: int = 0
    runs: int = 0
    runlists: int = 0
    bytes_up: int = 0
    """Brought to the device by sync: inputs, what changed of operands that stay, the stamps of outputs."""
    bytes_down: int = 0
    resident_bytes: int = 0
    """Of operands that stay."""


@dataclass(slots=True)
class _Loaded:
    """A fabric in a context of its own. Buffers go before the kernel, the kernel before the context."""

    context: Any
    kernel: Any
    streams: dict[str, Any] = field(default_factory=dict)
    free: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """Data buffers by argument and size."""

    def close(self) -> None:
        self.streams.clear()
        self.free.clear()
        self.kernel = None
        self.context = None


def open_host(kind: str, folder: Path) -> Host:
    """`sim` or `npu`. NpuUnavailable says what is missing; a simulator is never taken for want of an NPU."""
    if kind == "sim":
        return Host(importlib.import_module("hybrid.kernels.npu.xrt_sim"), folder)
    if kind != "npu":
        raise ValueError(f"--npu {kind}: npu or sim")
    try:
        module = importlib.import_module("pyxrt")
    except ImportError as error:
        raise NpuUnavailable(
            f"no pyxrt ({error}): it comes with XRT, for one version of Python; source /opt/xilinx/xrt/setup.sh; "
            "--npu sim asks for the simulator"
        ) from None
    except Exception as error:  # an extension module of another release may raise anything while it loads
        raise NpuUnavailable(f"pyxrt cannot be loaded: {type(error).__name__}: {error}") from None
    if lacks := [name for name in NEEDED if not hasattr(module, name)]:
        raise NpuUnavailable(f"pyxrt of XRT {shown_version()} lacks {', '.join(lacks)}: install XRT {MINIMUM} or newer")
    try:
        return Host(module, folder)
    except RuntimeError as error:
        raise NpuUnavailable(f"XRT opens no NPU: {error}; is the amdxdna driver loaded?") from None
    except Exception as error:  # an old binding: a name, or an overload, that it does not have
        why = f"{type(error).__name__}: {error}"
        raise NpuUnavailable(f"pyxrt of XRT {shown_version()}: {why}; install XRT {MINIMUM} or newer") from None


MINIMUM = ".".join(map(str, RUNLISTS))


def xrt_version() -> tuple[int, ...] | None:
    """Of the XRT that setup.sh points to, by its version.json; None where that does not say."""
    path = Path(os.environ.get("XILINX_XRT", "/opt/xilinx/xrt")) / "version.json"
    try:
        table = json.loads(path.read_text())
        return tuple(int(n) for n in str(table["BUILD_VERSION"]).split(".")[:3])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shown_version() -> str:
    version = xrt_version()
    return ".".join(map(str, version)) if version else "(no version.json says which)"


class Host:
    """One opened device. `module`: pyxrt, or what has its surface."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.xrt, self.folder = module, folder
        self.device = module.device(0)
        name = self.device.get_info(module.xrt_info_device.name)
        self.simulated = name.startswith("sim-")
        self.name = name if self.simulated else f"npu:0 ({name})"
        self.chains = hasattr(module, "runlist")
        """Whether several jobs of a fabric go as one runlist."""
        self.counters = HostCounters()
        self._loaded: dict[str, _Loaded] = {}

    def room(self, nbytes: int) -> Resident:
        """A buffer object for an operand that stays. It belongs to the device, and outlives contexts."""
        made = self.xrt.bo(self.device, nbytes, self.xrt.bo.host_only, 0)
        self.counters.buffers += 1
        self.counters.resident_bytes += nbytes
        return Resident(made, nbytes)

    def run(self, jobs: Sequence[Job]) -> None:
        """Execute jobs in order. NpuError for whatever does not complete and write; the caches are dropped with it."""
        at = 0
        while at < len(jobs):
            fabric = fabric_digest(jobs[at].design)
            same = at + 1
            while same < len(jobs) and fabric_digest(jobs[same].design) == fabric:
                same += 1
            failed = None
            try:
                self._batch(fabric, jobs[at:same])
            except (
                NpuError
            ) as error:  # its traceback would keep the context: one that goes late breaks those that came after
                failed = NpuError(error.kind, str(error))
            if failed is not None:
                self.drop()
                raise failed
            at = same

    def export(self, nbytes: int) -> tuple[Any, int]:
        """(a buffer that nothing runs on, its dma-buf). NotShareable where XRT's binding does not pass on what XRT
        can."""
        if not hasattr(self.xrt.bo, "export_buffer"):
            raise NotShareable(f"{self.name} exports no dma-buf: pyxrt's bo has no export_buffer, though XRT's has")
        buffer = self.xrt.bo(self.device, nbytes, self.xrt.bo.host_only, 0)
        self.counters.buffers += 1
        return buffer, int(buffer.export_buffer())

    def drop(self) -> None:
        """Close every context. One alone is never closed: on npu1 that breaks those that stay."""
        for loaded in self._loaded.values():
            loaded.close()
        self._loaded.clear()

    close = drop

    def _batch(self, fabric: str, jobs: Sequence[Job]) -> None:
        loaded = self._load(fabric, jobs[0].design)
        held = [self._buffers(loaded, job) for job in jobs]
        direction = self.xrt.xclBOSyncDirection
        for job, buffers in zip(jobs, held, strict=True):
            self._send(job, buffers, direction.XCL_BO_SYNC_BO_TO_DEVICE)
        try:
            self._execute(loaded, jobs, held)
        except RuntimeError as error:
            if isinstance(error, NpuError):
                raise
            gone = "No such device" in str(error)
            raise NpuError("gone" if gone else "error", f"{self.name}: {jobs[0].design.name}: {error}") from None
        for job, buffers in zip(jobs, held, strict=True):
            self._take(job, buffers, direction.XCL_BO_SYNC_BO_FROM_DEVICE)
            for key, buffer in buffers.items():
                if not isinstance(job.inputs.get(key[2]), Resident):
                    loaded.free.setdefault((key[0], key[1]), []).append(buffer)

    def _execute(self, loaded: _Loaded, jobs: Sequence[Job], held: Sequence[Mapping[Any, Any]]) -> None:
        if len(jobs) == 1 or not self.chains:
            for job, buffers in zip(jobs, held, strict=True):
                insts, nbytes = self._stream(loaded, job.design)
                run = loaded.kernel(OPCODE, insts, nbytes, *buffers.values())
                self.counters.runs += 1
                self._demand(run.wait(), run, job.design)
            return
        chain, runs = self.xrt.runlist(loaded.context), []
        for job, buffers in zip(jobs, held, strict=True):
            insts, nbytes = self._stream(loaded, job.design)
            run = self.xrt.run(loaded.kernel)
            for i, value in enumerate((OPCODE, insts, nbytes, *buffers.values())):
                run.set_arg(i, value)
            chain.add(run)
            runs.append(run)
        chain.execute()
        self.counters.runs += len(runs)
        self.counters.runlists += 1
        try:
            chain.wait()
        except RuntimeError:
            for run, job in zip(runs, jobs, strict=True):
                self._demand(run.state(), run, job.design)
            raise
        for run, job in zip(runs, jobs, strict=True):
            self._demand(run.state(), run, job.design)

    def _demand(self, state: Any, run: Any, design: Design) -> None:
        states = self.xrt.ert_cmd_state
        if state == states.ERT_CMD_STATE_COMPLETED:
            return
        name = getattr(state, "name", str(state))
        kind = "timeout" if state == states.ERT_CMD_STATE_TIMEOUT else "error"
        more = f": {run.message}" if getattr(run, "message", "") else ""
        raise NpuError(kind, f"{self.name}: {design.name}: the run ended in {name}{more}")

    def _load(self, fabric: str, design: Design) -> _Loaded:
        if fabric not in self._loaded:
            artefact = find(self.folder, design)
            if len(self._loaded) >= npu_limits().contexts.value:
                self.drop()
            binary = self.xrt.xclbin(str(artefact.xclbin))
            self.device.register_xclbin(binary)
            names = [k.get_name() for k in binary.get_kernels()]
            name = next((n for n in names if n.startswith(KERNEL)), None)
            if name is None:
                raise NpuError("error", f"{artefact.xclbin}: holds kernels {names}, none called {KERNEL}")
            try:
                context = self.xrt.hw_context(self.device, binary.get_uuid())
            except RuntimeError as error:
                gone = "No such device" in str(error)
                raise NpuError(
                    "gone" if gone else "error", f"{self.name}: no context for {design.name}: {error}"
                ) from None
            self._loaded[fabric] = _Loaded(context, self.xrt.kernel(context, name))
            self.counters.contexts += 1
        return self._loaded[fabric]

    def _stream(self, loaded: _Loaded, design: Design) -> tuple[Any, int]:
        key = stream_digest(design)
        if key not in loaded.streams:
            data = find(self.folder, design).stream.read_bytes()
            buffer = self.xrt.bo(self.device, len(data), self.xrt.bo.cacheable, loaded.kernel.group_id(1))
            memoryview(buffer.map())[: len(data)] = data
            buffer.sync(self.xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, len(data), 0)
            loaded.streams[key] = (buffer, len(data))
            self.counters.buffers += 1
        return loaded.streams[key]

    def _buffers(self, loaded: _Loaded, job: Job) -> dict[tuple[int, int, str], Any]:
        """A buffer for each argument, in order."""
        held: dict[tuple[int, int, str], Any] = {}
        for i, (name, array) in enumerate(job.design.arguments):
            given = job.inputs.get(name)
            if isinstance(given, Resident):
                held[i, array.nbytes, name] = given.buffer
                continue
            spare = loaded.free.get((i, array.nbytes))
            if spare:
                held[i, array.nbytes, name] = spare.pop()
                continue
            held[i, array.nbytes, name] = self.xrt.bo(
                self.device, array.nbytes, self.xrt.bo.host_only, loaded.kernel.group_id(FIRST + i)
            )
            self.counters.buffers += 1
        return held

    def _send(self, job: Job, buffers: Mapping[tuple[int, int, str], Any], to_device: Any) -> None:
        for (_, nbytes, name), buffer in buffers.items():
            given = job.inputs.get(name)
            if given is not None:
                data = job.input(name)
            if isinstance(given, Resident):
                self.counters.bytes_up += given.flush(to_device)
                continue
            view = np.frombuffer(buffer.map(), np.uint8)[:nbytes]
            if given is not None:
                view[:] = data.view(np.uint8)
                buffer.sync(to_device, nbytes, 0)
                self.counters.bytes_up += nbytes
                continue
            edge = min(STAMP.size, nbytes)
            view[:edge] = view[-edge:] = STAMP[:edge]
            for start in (0, nbytes - edge):
                buffer.sync(to_device, edge, start)
            self.counters.bytes_up += 2 * edge

    def _take(self, job: Job, buffers: Mapping[tuple[int, int, str], Any], from_device: Any) -> None:
        for (_, nbytes, name), buffer in buffers.items():
            if name not in job.outputs:
                continue
            buffer.sync(from_device, nbytes, 0)
            data = np.frombuffer(buffer.map(), np.uint8)[:nbytes]
            edge = min(STAMP.size, nbytes)
            if (data[:edge] == STAMP[:edge]).all() or (data[-edge:] == STAMP[:edge]).all():
                raise NpuError("silent", f"{self.name}: {job.design.name}: the run completed and left {name} unwritten")
            job.deliver(name, data.view(DTYPES[job.design.argument(name).dtype]))
            self.counters.bytes_down += nbytes
