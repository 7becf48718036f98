"""Record a plan as data; program.py turns the recording into a command buffer. Nothing here calls Vulkan.

Bindings append dispatches. Hazards between slices become barriers. Grids that depend on a live count become indirect
dispatches, whose sizes a grid kernel computes on the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.kernel import Kernel
from hybrid.kernels.vulkan.memory import Buffer, Slice, align_up

GRID_WORDS, TABLE_WORDS = 4, 8  # u32 words of one entry: computed grid, and what it is computed from
_FIXED = 0xFF  # control word of a constant axis


class WrongBinding(VulkanError):
    """A dispatch names other slices as written than those that its module stores to."""


@dataclass(frozen=True, slots=True)
class Live:
    """A grid axis of ceil(live / per) workgroups; live is the control word `extent` at run time.

    `cap` bounds the live count (the bucket's rows, the cache's length): at most ceil(cap / per) workgroups start.
    """

    extent: str
    per: int = 1
    cap: int = 1

    def __post_init__(self) -> None:
        if self.extent not in CONTROL and not self.extent.isdigit():
            raise ValueError(f"no live count {self.extent!r}; known: {', '.join(CONTROL)}, or the number of a word")
        if not (0 < self.per < 1 << 24 and self.cap > 0):
            raise ValueError(f"per and cap must be positive, got per={self.per}, cap={self.cap}")

    @property
    def most(self) -> int:
        return -(-self.cap // self.per)


GridAxis = int | Live


@dataclass(slots=True)
class Dispatch:
    """One dispatch as data. `grid` is direct, unless `entry` names an indirect grid."""

    kernel: Kernel
    reads: tuple[Slice, ...]
    writes: tuple[Slice, ...]
    push: bytes
    grid: tuple[int, int, int]
    entry: int | None
    step: int
    order: tuple[Slice, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """In binding order."""
        return self.order or self.reads + self.writes


@dataclass(frozen=True, slots=True)
class Barrier:
    """A global memory barrier before a dispatch: compute to compute, and the indirect stage where needed."""

    from_indirect: bool = False
    to_indirect: bool = False


@dataclass(slots=True)
class Recording:
    """A finished recording: dispatches in order, the barrier before each, and what the placeholders need."""

    dispatches: list[Dispatch]
    barriers: list[Barrier | None]
    table: list[int]
    scratch_bytes: int
    counter_bytes: int
    zero_bytes: int


class Recorder:
    """Records the dispatches of bindings. `device` offers kernel(name, **constants), subgroup_size, max_range,
    max_groups, max_threads, cores and has(feature). `cooperative`: workgroups of one dispatch may wait for each
    other."""

    def __init__(self, device: Any, control: Slice, cooperative: bool = True) -> None:
        self.device = device
        self.control = self._plan_control = control
        """Live counts of the step that is recorded."""
        self.cooperative = cooperative
        # Placeholders: memory is assigned after recording.
        self.scratch_buffer = Buffer(0, "scratch")
        self.grid_buffer = Buffer(0, "grids")
        self.table_buffer = Buffer(0, "table")
        self.counter_buffer = Buffer(0, "counters")
        self.zeros_buffer = Buffer(0, "zeros")
        self.step = 0
        self.steps: Sequence[Step] = ()
        """All steps of the plan, for bindings that look at other layers."""
        self.noted: dict[str, Any] = {}
        """Notes of a binding for later ones, by key."""
        self._dispatches: list[Dispatch] = []
        self._owners: dict[int, int] = {}  # offset of counters -> index of their dispatch
        self._entries: dict[tuple[Slice, tuple[GridAxis, ...]], int] = {}
        self._scratch_used = self._scratch_most = self._counter_bytes = self._zeros_used = self._zeros_most = 0

    def begin_step(self, index: int, counts: Slice | None = None) -> None:
        """Later dispatches belong to step `index` and take live counts from `counts` (default: the plan's control).
        Scratch of earlier steps may be reused."""
        self.step, self._scratch_used, self._zeros_used = index, 0, 0
        self.control = self._plan_control if counts is None else counts

    def kernel(self, name: str, **constants: int) -> Kernel:
        """A kernel of the manifest with its specialisation constants."""
        return self.device.kernel(name, **constants)

    def scratch(self, nbytes: int) -> Slice:
        """Temporary device memory of this step, uninitialised; steps reuse it."""
        piece = Slice(self.scratch_buffer, self._scratch_used, nbytes)
        self._scratch_used += align_up(nbytes)
        self._scratch_most = max(self._scratch_most, self._scratch_used)
        return piece

    def counters(self, words: int) -> Slice:
        """u32 words of the program, zero before its first run; kernels reset them to zero."""
        piece = Slice(self.counter_buffer, self._counter_bytes, 4 * words)
        self._counter_bytes += align_up(4 * words)
        return piece

    def zeros(self, nbytes: int) -> Slice:
        """Memory of the program that is zero when this step begins; its kernels reset it to zero, and steps share
        it."""
        piece = Slice(self.zeros_buffer, self._zeros_used, nbytes)
        self._zeros_used += align_up(nbytes)
        self._zeros_most = max(self._zeros_most, self._zeros_used)
        return piece

    def dispatch(
        self,
        kernel: Kernel,
        reads: Sequence[Slice],
        writes: Sequence[Slice],
        push: bytes = b"",
        grid: Sequence[GridAxis] = (1, 1, 1),
        resident: bool = False,
        order: Sequence[Slice] = (),
    ) -> None:
        """Append a dispatch. Bindings: control, reads, writes (a buffer that is read and written is a write). `order`: the
        slices after control in binding order, where reads do not come first.

        WrongBinding where the module writes a slice of `reads`, or no binding of a slice of `writes`.

        `resident`: its workgroups poll each other's results. VulkanError if there are more than are resident at once on
        the device, or if the program excludes waits. Counters belong to one dispatch: VulkanError for a second one,
        which
        might poll a word of a dispatch that has not begun."""
        bound = (self.control, *(order or (*reads, *writes)))
        if len(bound) != kernel.bindings:
            raise VulkanError(
                f"{kernel.name} has {kernel.bindings} bindings (control included), {len(bound)} were given"
            )
        self._check_writes(kernel, bound, writes)
        if len(push) != kernel.push:
            raise VulkanError(f"{kernel.name} takes {kernel.push} bytes of push constants, {len(push)} were given")
        axes: tuple[GridAxis, ...] = (*grid, *(1,) * (3 - len(grid)))
        most = tuple([a if isinstance(a, int) else a.most for a in axes])
        if min(most) < 1:
            raise VulkanError(f"{kernel.name}: grid {tuple(grid)} has an axis of no groups")
        limit, (x, y, z) = self.device.max_groups, most
        if x > limit[0] or y > limit[1] or z > limit[2]:
            raise VulkanError(
                f"{kernel.name}: grid of up to {most} groups is over this device's limit {tuple(limit)}; "
                "use fewer rows per pass"
            )
        self._check_waits(kernel, most, resident)
        self._own_counters(kernel, (*reads, *writes))
        # A live axis of at most one workgroup needs no indirection: kernels check their rows against control.
        fixed = tuple([1 if m == 1 else a for a, m in zip(axes, most, strict=True)])
        entry = None
        if any([isinstance(a, Live) for a in fixed]):
            entry = self._entries.setdefault((self.control, fixed), len(self._entries))
        self._dispatches.append(
            Dispatch(
                kernel,
                (self.control, *reads),
                tuple(writes),
                bytes(push),
                (most[0], most[1], most[2]),
                entry,
                self.step,
                bound,
            )
        )

    def _check_writes(self, kernel: Kernel, bound: Sequence[Slice], writes: Sequence[Slice]) -> None:
        """WrongBinding unless the module stores to all slices that are named as written, and to no others. Any kernel may
        set control's word of aborted steps."""
        hidden = [i for i in kernel.writes if i and bound[i] not in writes]
        if hidden and kernel.writes_now is not None:
            hidden = [i for i in hidden if i in kernel.writes_now()]
        if hidden:
            raise WrongBinding(
                f"{kernel.name} writes its binding {hidden[0]}, which is recorded as read: name it in `writes`"
            )
        written = [bound[i] for i in kernel.writes]
        idle = [i for i, piece in enumerate(bound) if piece in writes and piece not in written]
        if idle:
            raise WrongBinding(f"{kernel.name} never writes its binding {idle[0]}: name it in `reads`")

    def _check_waits(self, kernel: Kernel, grid: Sequence[int], resident: bool) -> None:
        if resident and not self.cooperative:
            raise VulkanError(f"{kernel.name}: its workgroups wait for one another, which this program excludes")
        if resident and grid[0] * grid[1] * grid[2] > self.device.cores:
            raise VulkanError(
                f"{kernel.name}: {tuple(grid)} workgroups wait for one another; {self.device.cores} are surely "
                "resident at once on this device"
            )

    def _own_counters(self, kernel: Kernel, bound: Sequence[Slice]) -> None:
        index = len(self._dispatches)
        for piece in bound:
            if piece.buffer is self.counter_buffer and self._owners.setdefault(piece.offset, index) != index:
                raise VulkanError(
                    f"{kernel.name} binds counters of another dispatch: workgroups wait for one another within "
                    "a dispatch only"
                )

    @property
    def scratch_bytes(self) -> int:
        """Scratch bytes of the largest step so far."""
        return self._scratch_most

    def finish(self) -> Recording:
        """Insert barriers, and the grid kernel where grids are computed."""
        self._sort_entries()
        dispatches = self._with_grids()
        return Recording(
            dispatches,
            hazards(dispatches, self.grid_slice),
            self._table(),
            self._scratch_most,
            self._counter_bytes,
            self._zeros_most,
        )

    @property
    def grid_slice(self) -> Slice:
        return Slice(self.grid_buffer, 0, 4 * GRID_WORDS * len(self._entries))

    @property
    def _table_slice(self) -> Slice:
        return Slice(self.table_buffer, 0, 4 * TABLE_WORDS * len(self._entries))

    def _table(self) -> list[int]:
        words: list[int] = []
        for _, axes in self._entries:
            for axis in axes:
                if isinstance(axis, Live):
                    words += [CONTROL[axis.extent] | axis.per << 8, axis.most]
                else:
                    words += [_FIXED, axis]
            words += [0, 0]
        return words

    def _sort_entries(self) -> None:
        """Number the grids of one control tensor consecutively."""
        owners = list(dict.fromkeys(control for control, _ in self._entries))
        order = sorted(self._entries, key=lambda key: (owners.index(key[0]), self._entries[key]))
        new = {self._entries[key]: i for i, key in enumerate(order)}
        for d in self._dispatches:
            d.entry = None if d.entry is None else new[d.entry]
        self._entries = {key: i for i, key in enumerate(order)}

    def _with_grids(self) -> list[Dispatch]:
        """Insert the grid kernel for each control tensor: before its first indirect grid, and after each step that
        writes the tensor if more indirect grids depend on it."""
        out: list[Dispatch] = []
        spans: dict[Slice, tuple[int, int]] = {}  # first entry, count
        for (control, _), i in self._entries.items():
            first, count = spans.get(control, (i, 0))
            spans[control] = first, count + 1
        stale = set(spans)
        for d in self._dispatches:
            control = d.reads[0]
            if d.entry is not None and control in stale:
                first, count = spans[control]
                out.append(
                    Dispatch(
                        self.kernel("grid"),
                        (control, self._table_slice),
                        (self.grid_slice,),
                        struct.pack("<II", first, count),
                        (-(-count // 64), 1, 1),
                        None,
                        d.step,
                    )
                )
                stale.remove(control)
            out.append(d)
            stale |= {control for control in spans if any(w.overlaps(control) for w in d.writes)}
        return out


def hazards(dispatches: Sequence[Dispatch], grids: Slice) -> list[Barrier | None]:
    """The barrier before each dispatch, or None. One is needed where a dispatch accesses a range written since the last
    barrier, or writes a range read since. `grids`: sizes of indirect dispatches."""
    out: list[Barrier | None] = []
    reads: list[Slice] = []
    writes: list[Slice] = []
    indirect_read = False
    for d in dispatches:
        gets = (*d.reads, grids) if d.entry is not None else d.reads
        clash = _overlap(d.writes, reads) or _overlap(d.writes, writes) or _overlap(gets, writes)
        if clash:
            out.append(Barrier(from_indirect=indirect_read, to_indirect=_overlap((grids,), writes)))
            reads, writes, indirect_read = [], [], False
        else:
            out.append(None)
        reads += gets
        writes += d.writes
        indirect_read = indirect_read or d.entry is not None
    return out


def _overlap(some: Sequence[Slice], others: Sequence[Slice]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)
