"""sim-npu1: a stand-in for the module `pyxrt` that runs designs in the interpreter. Used only with --npu sim.

It keeps to pyxrt's surface (pyxrt.toml) and to its traps: a started run executes in the background (a thread for each opened
device, one run at a time, in the order of their starts) until the host waits for it; a buffer has a host copy and a
device copy, and only sync moves bytes between them; calling a kernel swallows arguments that it cannot cast; a run that
deadlocks ends in ERT_CMD_STATE_TIMEOUT and takes its context with it; the driver opens six contexts, and dropping one
of several breaks those that stay. What would crash the process raises WouldCrash. Its time is not a measurement.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from hybrid.kernels.npu.artefact import KERNEL, decode
from hybrid.kernels.npu.check import npu_limits
from hybrid.kernels.npu.design import DTYPES, Design
from hybrid.kernels.npu.interpreter import Deadlock, Interpreter
from hybrid.kernels.npu.objects import on_this_computer
from hybrid.kernels.npu.reader import read

NAME = "sim-npu1"
POISON = 0x5C  # unwritten device memory
OPCODE = 3  # run an instruction stream
_GONE = "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-19): No such device"
FIRST = 3  # kernel arguments before the buffers: opcode, instructions, their length in bytes


class WouldCrash(RuntimeError):
    """On the hardware this ends the process, or reads somebody else's memory."""


class xclBOSyncDirection(enum.IntEnum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class ert_cmd_state(enum.IntEnum):
    ERT_CMD_STATE_NEW = 1
    ERT_CMD_STATE_QUEUED = 2
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_ERROR = 5
    ERT_CMD_STATE_ABORT = 6
    ERT_CMD_STATE_SUBMITTED = 7
    ERT_CMD_STATE_TIMEOUT = 8
    ERT_CMD_STATE_NORESPONSE = 9


class xrt_info_device(enum.IntEnum):
    bdf = 0
    name = 1  # type: ignore[assignment]
    max_clock_frequency_mhz = 2


@dataclass(slots=True)
class Faults:
    """Failures to come, counted in runs from now: the n-th run times out, completes without writing, or finds no
    device."""

    timeout_after: int | None = None
    silent_after: int | None = None
    vanish_after: int | None = None

    def due(self, key: str) -> bool:
        left = getattr(self, key)
        if left is not None:
            setattr(self, key, left - 1 if left > 0 else None)
        return left == 0


faults = Faults()
_present = [True]
_computing = threading.Lock()
"""Held while a run executes: compiled kernels keep their modes in static memory, so this computer stands for one array
at a time."""


def reset() -> None:
    """A fresh machine: no faults to come, the device there. For tests."""
    faults.timeout_after = faults.silent_after = faults.vanish_after = None
    _present[0] = True


class uuid:
    def __init__(self, text: str) -> None:
        self._text = text

    def to_string(self) -> str:
        return self._text


class xclbinkernel:
    def __init__(self, count: int = 0) -> None:
        self._count = count

    def get_name(self) -> str:
        return KERNEL

    def get_num_args(self) -> int:
        return self._count


class xclbin:
    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            data = file.read()
        if data[:7] == b"xclbin2":
            raise RuntimeError(f"{path} is for an NPU; {NAME} runs what python -m kernels.npu.build --sim makes")
        self._design: Design = read(data.decode())
        self._uuid = uuid(self._design.name)

    def get_uuid(self) -> uuid:
        return self._uuid

    def get_kernels(self) -> list[xclbinkernel]:
        return [xclbinkernel(FIRST + len(self._design.arguments))]


class device:
    def __init__(self, index: int = 0) -> None:
        if index != 0:
            raise RuntimeError(f"Could not open device with index '{index}'")
        self._registered: dict[str, xclbin] = {}
        self._contexts: weakref.WeakSet[hw_context] = weakref.WeakSet()  # each opened device is a machine of its own
        self._runs: SimpleQueue[run | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._runs,), name=NAME, daemon=True).start()
        weakref.finalize(self, self._runs.put, None)

    def register_xclbin(self, binary: xclbin) -> uuid:
        self._registered[binary.get_uuid().to_string()] = binary
        return binary.get_uuid()

    def get_info(self, key: xrt_info_device) -> str:
        return {xrt_info_device.name: NAME, xrt_info_device.bdf: "sim", xrt_info_device.max_clock_frequency_mhz: "0"}[
            key
        ]


def _serve(runs: SimpleQueue[run | None]) -> None:
    """The machine: runs in the order in which they were started."""
    while (one := runs.get()) is not None:
        done = one._done
        with _computing:
            one._execute()
        del one  # the waiter may drop the run, and with it its context, at once
        done.set()


class hw_context:
    def __init__(self, owner: device, identity: uuid) -> None:
        if not _present[0]:
            raise RuntimeError("No such device")
        if identity.to_string() not in owner._registered:
            raise RuntimeError(f"xclbin {identity.to_string()} is not registered")
        most = npu_limits().contexts.value
        if len(owner._contexts) >= most:
            raise RuntimeError(f"DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-2): {most} contexts are open")
        self._design = owner._registered[identity.to_string()]._design
        self._kernels = on_this_computer(self._design)
        self._fabric = Interpreter(self._design, self._kernels)
        self._broken = [False]
        self._owner = owner  # open while a context of it is
        owner._contexts.add(self)
        weakref.finalize(self, _dropped, owner._contexts)

    def _digest(self) -> str:
        from hybrid.kernels.npu.artefact import fabric_digest

        return fabric_digest(self._design)


def _dropped(others: weakref.WeakSet[hw_context]) -> None:
    """The quirk of npu1: after one context of several is gone, those that stay fail."""
    for context in others:
        context._broken[0] = True


class kernel:
    def __init__(self, context: hw_context, name: str) -> None:
        if name != KERNEL:
            raise RuntimeError(f"No such kernel '{name}'")
        self._context = context

    def group_id(self, index: int) -> int:
        if not 0 <= index < FIRST + len(self._context._design.arguments):
            raise IndexError(f"kernel argument {index}")
        return 1 if index == 1 else 0x10000 + index

    def __call__(self, *args: Any) -> run:
        if len(args) > FIRST + len(self._context._design.arguments):
            raise WouldCrash(f"{len(args)} arguments for a kernel of {FIRST + len(self._context._design.arguments)}")
        made = run(self)
        for i, value in enumerate(args):
            if isinstance(value, (bo, int)):  # others are swallowed, as pyxrt does
                made.set_arg(i, value)
        made.start()
        return made


class bo:
    class flags(enum.IntEnum):
        normal = 0
        cacheable = 1
        device_only = 2
        host_only = 3

    _addresses = itertools.count(0x4000000, 0x1000000)

    _host: np.ndarray
    _device: np.ndarray
    _parent: bo | None
    _flags: bo.flags
    _group: int
    _base: int
    _size: int

    def __init__(self, owner: device | bo, size: int, *more: int) -> None:
        if isinstance(owner, bo):
            (offset,) = more
            if owner._parent is not None:
                raise WouldCrash("a sub-buffer of a sub-buffer addresses the wrong bytes")
            if offset + size > owner._size:
                raise RuntimeError("sub-buffer outside of its parent")
            self._host, self._device = owner._host[offset : offset + size], owner._device[offset : offset + size]
            self._parent, self._flags, self._group, self._base = owner, owner._flags, owner._group, owner._base + offset
        else:
            if size < 1:
                raise RuntimeError("buffer of no bytes")
            flags, self._group = more
            if flags == bo.flags.cacheable:
                _take_heap(self, size)
            self._parent, self._flags = None, bo.flags(flags)
            # As a driver's mapping, this one belongs to a file: it is no anonymous memory that others could import.
            self._host, self._device = np.frombuffer(mmap.mmap(-1, size), np.uint8), np.full(size, POISON, np.uint8)
            self._base = next(bo._addresses)
        self._size = size

    cacheable, host_only, normal, device_only = flags.cacheable, flags.host_only, flags.normal, flags.device_only

    def map(self) -> memoryview:
        return memoryview(self._host.data)

    def sync(self, direction: xclBOSyncDirection, size: int | None = None, offset: int = 0) -> None:
        end = self._size if size is None else offset + size
        if end > self._size:
            raise RuntimeError("sync outside of the buffer")
        if direction == xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            self._device[offset:end] = self._host[offset:end]
        else:
            self._host[offset:end] = self._device[offset:end]

    def write(self, data: Any, seek: int) -> None:
        raw = np.frombuffer(data, np.uint8)
        self._host[seek : seek + raw.size] = raw

    def read(self, size: int, skip: int) -> np.ndarray:
        return self._host[skip : skip + size].view(np.int8).copy()

    def size(self) -> int:
        return self._size

    def address(self) -> int:
        return self._base


_heap = [0]  # bytes of instruction buffers, which are in the device's heap


def heap_taken() -> int:
    """Bytes of the device's heap in use."""
    return _heap[0]


def _take_heap(owner: bo, size: int) -> None:
    most = npu_limits().heap_bytes.value
    if _heap[0] + size > most:
        raise RuntimeError(
            f"DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-12): the device heap of {most} bytes is full"
        )
    _heap[0] += size
    weakref.finalize(owner, _give_heap, size)


def _give_heap(size: int) -> None:
    _heap[0] -= size


class run:
    def __init__(self, owner: kernel) -> None:
        self._kernel, self._args = owner, dict[int, Any]()
        self._state = ert_cmd_state.ERT_CMD_STATE_NEW
        self._done, self._gone = threading.Event(), False
        self._done.set()
        self.message = ""

    def set_arg(self, index: int, value: bo | int) -> None:
        if index >= FIRST + len(self._kernel._context._design.arguments):
            raise WouldCrash(f"kernel argument {index}")
        self._args[index] = value

    def start(self) -> None:
        if not self._done.is_set():
            raise RuntimeError("bad command state, can't launch")
        if not _present[0]:
            raise RuntimeError(_GONE)
        self._done.clear()
        self._state = ert_cmd_state.ERT_CMD_STATE_QUEUED
        self._kernel._context._owner._runs.put(self)

    def state(self) -> ert_cmd_state:
        return self._state

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        """The state when the run has ended; where a timeout comes first, the state then."""
        self._done.wait(timeout_ms / 1000 if timeout_ms else None)
        if self._gone:
            raise RuntimeError(_GONE)
        return self._state

    def _execute(self) -> None:
        context = self._kernel._context
        self._state = ert_cmd_state.ERT_CMD_STATE_SUBMITTED
        if faults.due("vanish_after"):
            _present[0] = False
        self._gone = not _present[0]
        if self._gone:
            return
        if context._broken[0]:
            return self._end(ert_cmd_state.ERT_CMD_STATE_ABORT, "the context is broken")
        if faults.due("timeout_after"):
            context._broken[0] = True
            return self._end(ert_cmd_state.ERT_CMD_STATE_TIMEOUT, "injected")
        if faults.due("silent_after"):
            return self._end(ert_cmd_state.ERT_CMD_STATE_COMPLETED, "injected: nothing was written")
        try:
            memory, sequence = self._memory(context)
            context._fabric.run(memory, sequence)
        except Deadlock as error:
            context._broken[0] = True
            return self._end(ert_cmd_state.ERT_CMD_STATE_TIMEOUT, str(error))
        except Exception as error:  # a machine has no way to raise: what went wrong is the run's end
            context._broken[0] = True
            return self._end(ert_cmd_state.ERT_CMD_STATE_ERROR, f"{type(error).__name__}: {error}")
        return self._end(ert_cmd_state.ERT_CMD_STATE_COMPLETED, "")

    def _end(self, state: ert_cmd_state, message: str) -> None:
        self._state, self.message = state, message

    def _memory(self, context: hw_context) -> tuple[dict[str, np.ndarray], Any]:
        """Device copies of the buffers, typed. ValueError for what the firmware would stumble over."""
        insts, nbytes = self._args.get(1), self._args.get(2)
        if self._args.get(0) != OPCODE or not isinstance(insts, bo) or not isinstance(nbytes, int):
            raise ValueError("opcode 3, an instruction buffer and its length in bytes are wanted")
        if insts._flags != bo.flags.cacheable or nbytes > insts._size:
            raise ValueError("instructions lie in a cacheable buffer, as many bytes as it has at most")
        fabric, arguments, sequence = decode(insts._device[:nbytes].tobytes())
        if fabric != context._digest():
            raise ValueError(f"the instruction stream is for fabric {fabric[:12]}, loaded is {context._digest()[:12]}")
        memory = {}
        for i, (name, array) in enumerate(arguments):
            buffer = self._args.get(FIRST + i)
            if not isinstance(buffer, bo):
                raise ValueError(f"argument {name} is no buffer")
            if buffer._flags != bo.flags.host_only or buffer._size < array.nbytes:
                raise ValueError(f"argument {name} needs a host_only buffer of {array.nbytes} bytes")
            memory[name] = buffer._device[: array.nbytes].view(DTYPES[array.dtype])
        return memory, sequence


class runlist:
    def __init__(self, context: hw_context) -> None:
        self._context, self._runs = context, list[run]()

    def add(self, one: run) -> None:
        if one._kernel._context is not self._context:
            raise RuntimeError("runs of a runlist share its context")
        self._runs.append(one)

    def execute(self) -> None:
        for one in self._runs:
            one.start()

    def wait(self, timeout_ms: int = 0) -> None:
        for one in self._runs:
            state = one.wait()
            if state != ert_cmd_state.ERT_CMD_STATE_COMPLETED:
                raise RuntimeError(f"runlist failed execution (state {state.name})")
