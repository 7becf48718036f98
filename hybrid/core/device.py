"""The device protocol: the interface of the Vulkan, NumPy (`cpu`), NPU and multi-device backends.

device.store(decl, value)    allocates a persistent tensor (weights, state, io) by name
program = device.compile(plan)    all setup work: allocation, pipelines, descriptors, recording
ticket = program.submit(times)    starts the program `times` times in a row
device.wait(ticket)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from hybrid.core.plan import FEW_ROWS, Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor


@dataclass(slots=True)
class Counters:
    """Device operations since it was opened. Performance gates compare differences of these."""

    submits: int = 0
    dispatches: int = 0
    barriers: int = 0
    allocations: int = 0
    descriptor_writes: int = 0
    pipelines: int = 0
    recordings: int = 0
    """Reusable command buffers recorded for plans."""
    transfers: int = 0
    """Command buffers recorded for one copy between host and device: uploads, downloads, fills."""
    bytes_up: int = 0
    bytes_down: int = 0

    def minus(self, other: Counters) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def copy(self) -> Counters:
        return self.minus(Counters())


@dataclass(frozen=True, slots=True)
class StepTime:
    """Device time of one step of the last submit, in seconds from the pass's start."""

    name: str
    op: str
    layer: int | None
    start: float
    duration: float
    device: str = ""
    """The device it ran on; empty: the main device."""
    within: str | None = None
    """The step whose fused dispatch includes this one; that step has the time."""


class Program(Protocol):
    plan: Plan

    def submit(self, times: int = 1) -> int:
        """Start the plan `times` times in a row, in one submit. Returns a ticket; tickets increase."""
        ...

    def times(self, ticket: int | None = None) -> Sequence[StepTime]:
        """Step times of the last finished submit; with overlapping passes, of the submit with this ticket. Empty unless
        compiled with profile=True."""
        ...

    def began(self, ticket: int | None = None) -> float | None:
        """Start of that submit in seconds of time.perf_counter. None without profile=True, or if the device clock
        cannot be converted."""
        ...


class Device(Protocol):
    @property
    def name(self) -> str:
        """The display name: `cpu`, `vulkan:0 (NVIDIA H200)`. Do not parse it: see `backend`."""
        ...

    @property
    def backend(self) -> str:
        """`cpu`, `vulkan` or `npu`: the backend that runs steps placed on `main`."""
        ...

    @property
    def drives(self) -> AbstractSet[str]:
        """Backends that this device runs: valid values of a step's `device`."""
        ...

    @property
    def passes_ahead(self) -> int:
        """Passes to keep in flight: 2 for an asynchronous device, 1 where submit runs the pass itself."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether consecutive passes may run at the same time."""
        ...

    def few_rows(self, hidden: int, experts: int) -> int:
        """Most rows of a pass for which int8 activations are faster with quantised weights, for this hidden size and
        number of experts of a layer. Larger passes use the batch profile (Profile.batch)."""
        ...

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes of the column-major copy of a sparse feed-forward's down matrix [H, F]; 0: no copy."""
        ...

    @property
    def exact(self) -> bool:
        """Whether precision `auto` is `exact` on this device: its other kernels are wrong."""
        ...

    @property
    def counters(self) -> Counters: ...

    @property
    def failures(self) -> Sequence[str]:
        """For reports: why a backend's steps moved to its fallback since the device was opened."""
        ...

    @property
    def copies(self) -> str:
        """For reports: tensors shared and copied between a plan's devices; empty for a single device."""
        ...

    @property
    def threads(self) -> str:
        """For reports: host threads of matrix products; empty if they run on no host thread."""
        ...

    @property
    def available(self) -> int | None:
        """Bytes free for tensors now; None if unknown."""
        ...

    @property
    def unified(self) -> bool:
        """Device memory is host memory: CPUs, integrated GPUs."""
        ...

    def host_room(self, memory: int) -> int:
        """Bytes of host memory for weights (TensorDecl.pool), beside `memory` bytes of its own; 0 where it stores none
        there."""
        ...

    def has(self, feature: str) -> bool:
        """Whether a capability that schedules and bindings name is present and enabled."""
        ...

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        """Allocate a weight, state or io tensor. Fill it with `value`, with the concatenated rows of `parts` (each read
        lazily), or with zeros."""
        ...

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        """Import existing memory as a state or io tensor: page-aligned anonymous pages (hybrid.core.hostmemory), or
        one dma-buf of another driver for each part. The caller keeps ownership of `fds` and synchronises accesses.
        Raises NotShareable."""
        ...

    def loading(self, nbytes: int, plans: Iterable[Plan] = ()) -> AbstractContextManager[None]:
        """Context of loading about `nbytes` of weights, which `plans` will use. It owns the staging resources, and stores inside it may be
        asynchronous. An error in a tensor's data (damaged block, truncated file) may be raised by a later store, at the
        latest on exit. The tensors stored in the context are then undefined."""
        ...

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        """Overwrite rows of a stored tensor, starting at `row` of its first axis."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        """Copy of rows start..stop of a stored tensor, after all submits. With `ticket`, io tensors are read after that
        submit, while later ones run."""
        ...

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        """One element of a stored integer io matrix, or vector (column 0), after `ticket` (default: all submits), while
        later submits run. Constant cost for any tensor size."""
        ...

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """Allocate the activation arena that all plans share, and the scratch memory of the kernels in `plans` (one
        plan of each size)."""
        ...

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        """Do all setup work for a plan. `cooperative` allows kernels whose workgroups wait for each other. If such a
        wait times out, the step is aborted: FAULT_WORD of its control tensor is set, and `history` gets FAULTED instead
        of a token."""
        ...

    def wait(self, ticket: int | None = None) -> None:
        """Block until that submit (default: every submit) has finished."""
        ...

    def check_open(self) -> None:
        """Raise if this device is closed, lost (DeviceLost), or was opened before a fork."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Allocated bytes by purpose: weights, state, io, activations, staging."""
        ...

    def sibling(self, lent: Mapping[str, str] | None = None) -> Device:
        """A second device object on the same hardware, with its own tensors and programs, for a draft model. On a GPU
        it submits to the same queue, so passes of both need no host synchronisation. Closing this device closes the
        sibling. lent: names of the sibling's tensors -> the tensors of this device that they alias, where the
        declarations match (`shares`)."""
        ...

    def shares(self, name: str) -> bool:
        """Whether a tensor is an alias of the parent device's tensor (`sibling`)."""
        ...

    def close(self) -> None: ...


class SingleDevice:
    """Base class of backends that run whole plans: Device's defaults for a single device."""

    name: str
    backend: ClassVar[str]
    passes_ahead: ClassVar[int] = 1
    overlaps: ClassVar[bool] = False
    failures: Sequence[str] = ()
    copies: ClassVar[str] = ""
    threads: str = ""
    available: int | None = None
    exact: bool = False
    unified: bool = True

    def host_room(self, memory: int) -> int:
        return 0

    def few_rows(self, hidden: int, experts: int) -> int:
        return FEW_ROWS

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        return 0

    @property
    def drives(self) -> AbstractSet[str]:
        return frozenset({self.backend})

    def shares(self, name: str) -> bool:
        """See Device."""
        return False

    def sibling(self, lent: Mapping[str, str] | None = None) -> Device:
        """See Device."""
        return type(self)()  # type: ignore[return-value]  # a subclass is a Device
