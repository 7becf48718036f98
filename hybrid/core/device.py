"""The device protocol: what the Vulkan, NumPy (`cpu`) and NPU backends, and several of them together, offer the engine.

device.store(decl, value)    a tensor that outlives plans (weights, state, io), by name
program = device.compile(plan)    everything that costs: allocation, pipelines, descriptors, recording
ticket = program.submit(times)    starts it; several times in a row with one call
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
    """What a device did since it was opened. Gates compare differences of these."""

    submits: int = 0
    dispatches: int = 0
    barriers: int = 0
    allocations: int = 0
    descriptor_writes: int = 0
    pipelines: int = 0
    recordings: int = 0
    """Plans made ready to run: command buffers that are submitted again and again."""
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
    """Which of several devices it ran on; empty: the main one."""
    within: str | None = None
    """Name of the step whose dispatch did this one's work too: the time is there."""


class Program(Protocol):
    plan: Plan

    def submit(self, times: int = 1) -> int:
        """Start the plan `times` times in a row, in one submit; returns a ticket that grows from call to call."""
        ...

    def times(self, ticket: int | None = None) -> Sequence[StepTime]:
        """Times of the last finished submit, or, where passes overlap, of that with the ticket; empty unless compiled
        with profile=True."""
        ...

    def began(self, ticket: int | None = None) -> float | None:
        """When that submit began, on the clock of time.perf_counter; None where the device's clock cannot
        be compared with it, or without profile=True."""
        ...


class Device(Protocol):
    @property
    def name(self) -> str:
        """The display name: `cpu`, `vulkan:0 (NVIDIA H200)`. Nothing is read out of it: see `backend`."""
        ...

    @property
    def backend(self) -> str:
        """`cpu`, `vulkan` or `npu`: whose kernels run the steps that a schedule places on `main`."""
        ...

    @property
    def drives(self) -> AbstractSet[str]:
        """Names that a step's `device` may have: the backends that this device runs."""
        ...

    @property
    def passes_ahead(self) -> int:
        """Passes that are worth having in flight: 2 where one runs while the host prepares the next, 1 where submitting
        is running."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a pass may begin before the one before it has ended."""
        ...

    def few_rows(self, hidden: int) -> int:
        """Rows of a pass up to which int8 activations pay beside quantised weights, in models of this hidden size; with
        more it is a batch (Profile.batch)."""
        ...

    def second_layout(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes that the down matrix [H, F] of a sparse feed-forward takes once more on this device, in another layout;
        0: none."""
        ...

    @property
    def counters(self) -> Counters: ...

    @property
    def failures(self) -> Sequence[str]:
        """For reports: why the steps of some backend have moved to its fallback since the device was opened."""
        ...

    @property
    def copies(self) -> str:
        """For reports: tensors shared and copied between the devices of one plan; empty for a single device."""
        ...

    @property
    def threads(self) -> str:
        """For reports: how matrix products use the host's processors; empty where they do not."""
        ...

    @property
    def available(self) -> int | None:
        """Bytes that may still be allocated for tensors now; None where that is not known."""
        ...

    def has(self, feature: str) -> bool:
        """Is a capability that schedules and bindings may ask about present and switched on?"""
        ...

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        """Allocate a weight, state or io tensor and fill it: with `value`, with the rows of `parts` one after
        another (each made when it is needed), or with zeros."""
        ...

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        """A state or io tensor in memory that is there already and that others use too: page-aligned and anonymous
        (hybrid.core.hostmemory), or, with a dma-buf for each part, another driver's; the descriptors stay the caller's.
        Who uses it keeps the order. NotShareable where this device cannot."""
        ...

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        """Around the stores of a model's weights, of about `nbytes` in all: what only loading needs is made and freed
        here, and stores may go on while the next one begins. Errors of a tensor's data (a damaged block, a file that
        was cut) may be raised by a later store, at the latest at the end; then what was stored here may be gone."""
        ...

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        """Overwrite rows of a stored tensor, starting at `row` of its first axis."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        """Copy of rows start..stop of a stored tensor, after everything submitted; io tensors after `ticket` only,
        while later submits run."""
        ...

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        """One element of a stored integer io matrix, or vector (column 0), when `ticket` (default: everything
        submitted) is done, while later submits run: costs the same whatever the size."""
        ...

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        """Make room for the activations of every plan that will be compiled (plans share one arena), and for what the
        kernels of `plans`, one of each size, take beside it."""
        ...

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        """Everything that costs. `cooperative`: kernels whose workgroups wait for one another may be chosen; where such
        a wait times out, the step is aborted: FAULT_WORD of its control tensor is set and no token is chosen (FAULTED in
        `history`)."""
        ...

    def wait(self, ticket: int | None = None) -> None:
        """Until that submit, or everything submitted, has finished."""
        ...

    def check_open(self) -> None:
        """Raise where this device can no longer be used: closed, lost (DeviceLost), or of the process that this one was
        forked from."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by purpose: weights, state, io, activations, staging."""
        ...

    def sibling(self, lent: Mapping[str, str] | None = None) -> Device:
        """Another device with tensors and programs of its own where this one runs, for a model that runs in turns with
        this one's: on a GPU by the same queue, so that nothing lies between passes of both. Closed with this one, if
        not before. lent: names of its tensors, to be written in turns -> those of this device that they are, where they
        are alike (`shares`)."""
        ...

    def shares(self, name: str) -> bool:
        """Whether a tensor is lent by the device that this is a sibling of."""
        ...

    def close(self) -> None: ...


class SingleDevice:
    """What Device says of one backend that runs whole plans by itself. A base class of the backends' devices."""

    name: str
    backend: ClassVar[str]
    passes_ahead: ClassVar[int] = 1
    overlaps: ClassVar[bool] = False
    failures: ClassVar[Sequence[str]] = ()
    copies: ClassVar[str] = ""
    threads: str = ""
    available: int | None = None

    def few_rows(self, hidden: int) -> int:
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
        return type(self)()  # type: ignore[return-value]  # a class that is derived from this one is a Device
