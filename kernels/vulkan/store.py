"""Named tensors of a Vulkan device: stored, written, read, freed, and guarded in tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from hybrid.core.device import Counters
from hybrid.core.dtypes import DTYPES
from hybrid.core.hostmemory import NotShareable
from hybrid.core.plan import IN_HOST_MEMORY, PURPOSE, Plan, TensorDecl
from hybrid.core.tensor import Packed, Source, Tensor, unpacked
from hybrid.kernels.vulkan import columns
from hybrid.kernels.vulkan.hostmemory import import_fd, import_pages
from hybrid.kernels.vulkan.layout import tiled
from hybrid.kernels.vulkan.memory import Memory, Slice, align_up
from hybrid.kernels.vulkan.repack import Loader, takes
from hybrid.kernels.vulkan.tensors import Chunk, DeviceTensor, chunk_rows, part_bytes, rows_of
from hybrid.kernels.vulkan.transfer import Transfer

# Huge as f32 and bf16, NaN as f16: an out-of-bounds read shows in the result too.
GUARD_BYTE = 0x7F
# io tensors that only the host reads: cached host memory, written by kernels.
HOST_READ = ("history", "drafts", "accepted")


class Storage(ABC):
    """Tensor storage of VulkanDevice."""

    counters: Counters

    def __init__(self, memory: Memory, transfer: Transfer, max_range: int, guard: int) -> None:
        self.memory_pool, self.transfer, self.max_range, self.guard = memory, transfer, max_range, guard
        self.loader: Loader | None = None
        """Set while a model is loading."""
        self._tensors: dict[str, DeviceTensor] = {}
        self._kinds: dict[str, str] = {}
        self._allocations: dict[str, list[tuple[Slice, str]]] = {}
        self._guards: dict[str, list[Slice]] = {}
        self._views: dict[str, np.ndarray] = {}
        """Mapped views for peek()."""
        self._lent: dict[str, DeviceTensor] = {}
        """Tensors lent by the device on the same queue, by their names here."""

    @abstractmethod
    def check_open(self) -> None:
        """Raise VulkanError if the device is closed, lost or the parent's: the driver would crash on its handles."""

    @abstractmethod
    def wait(self, ticket: int | None = None) -> None:
        """Wait until that submit, or everything submitted, has finished."""

    @abstractmethod
    def loading(self, nbytes: int, plans: Iterable[Plan] = ()) -> AbstractContextManager[None]:
        """See Device.loading."""

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        """Allocate a weight, state or io tensor; fill it with `value`, with the rows of `parts`, or with zeros."""
        self.check_open()
        if decl.name in self._tensors:
            raise ValueError(f"tensor {decl.name} is already stored on this device")
        if decl.kind == "activation":
            raise ValueError(f"{decl.name} is an activation: it lives in the arena (reserve), not in a stored tensor")
        lent = None if value is not None or parts or self.guard else self._lent.get(decl.name)
        if lent is not None and (lent.dtype, lent.shape) == (decl.dtype, decl.shape):
            self._kinds[decl.name], self._tensors[decl.name] = decl.kind, lent
            return
        pool = "host" if decl.pool == "host" else "device"
        if decl.kind == "io" and decl.dtype != "f32":  # computed numbers stay in device memory and are copied out
            pool = "read" if decl.name in HOST_READ else "shared"
        self.add(decl, pool)
        try:
            row = 0
            for make in (lambda: value,) if value is not None else parts:
                piece = make()
                assert piece is not None
                if isinstance(piece, Packed) and takes(piece):
                    self._load_rows(decl.name, piece, row)
                else:
                    self._put_rows(decl.name, unpacked(piece), row, fresh=True)
                row += rows_of(piece.shape)
            if row == 0:
                for chunk in self._tensors[decl.name].chunks:
                    for part in chunk.parts:
                        self.fill(part, 0)
            elif row != rows_of(decl.shape):
                raise ValueError(f"{decl.name} has {rows_of(decl.shape)} rows, its parts gave {row}")
        except BaseException:
            self.drop(decl.name)
            raise

    @abstractmethod
    def has(self, feature: str) -> bool:
        """See Device.has."""

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        """See Device.adopt: pages or dma-bufs are imported. NotShareable where the device or the memory do not allow
        it."""
        self.check_open()
        if self.guard:
            raise NotShareable("tensors with guard bytes around them have memory of their own")
        if tiled(decl.dtype, decl.shape):
            raise NotShareable(f"{decl.name} is stored in tiles on this device")
        if max(part_bytes(decl.dtype, decl.shape)) > self.max_range:
            raise NotShareable(f"{decl.name} is larger than one storage buffer of this device may be")
        held = self._allocations.setdefault(decl.name, [])
        try:
            purpose = PURPOSE[decl.kind]
            for i, part in enumerate(value.parts):
                if fds:
                    held.append((import_fd(self.memory_pool, self.has, fds[i], part, purpose), purpose))
                else:
                    held.append((import_pages(self.memory_pool, part, purpose), purpose))
        except BaseException:
            self.drop(decl.name)
            raise
        self._kinds[decl.name] = decl.kind
        chunk = Chunk(0, rows_of(decl.shape), tuple(piece for piece, _ in held), decl.dtype)
        self._tensors[decl.name] = DeviceTensor(decl.name, decl.dtype, decl.shape, (chunk,))

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        """Overwrite rows from `row` on. io: at once, visible to a running plan. State and weights: in order with
        submits."""
        self._put_rows(name, value, row)
        if (other := self._tensors.get(name + columns.SUFFIX)) is not None:
            columns.lay_out(self, self.tensor(name), other)

    def by_columns(self, w: DeviceTensor) -> DeviceTensor:
        """Column-major copy of a stored weight that fits(). Made on first use, dropped with the weight."""
        name = w.name + columns.SUFFIX
        if name not in self._tensors:
            made = self.add(TensorDecl(name, w.dtype, w.shape, "weight"), "device")
            try:
                columns.lay_out(self, w, made)
            except BaseException:
                self.drop(name)
                raise
        return self._tensors[name]

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        """Copy of rows start..stop, after everything submitted (or only after `ticket`, for mapped io)."""
        tensor = self.tensor(name)
        rows = rows_of(tensor.shape)
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"{name} has {rows} rows; there are no rows {start}..{stop}")
        out = Tensor.empty(tensor.dtype, (stop - start, *tensor.shape[1:]) if tensor.shape else ())
        self.wait(ticket if self._kinds[name] == "io" else None)
        for piece, host in tensor.spans(start, out):
            if piece.buffer.view is not None:
                host[...] = piece.bytes.reshape(host.shape)
            else:
                self.transfer.download(piece, host)
            self.counters.bytes_down += host.size
        return out

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        """See Device.peek. ValueError for a tensor that is not mapped."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(name)
        self.wait(ticket)
        self.counters.bytes_down += 4
        return view.item(row, column)

    def _view(self, name: str) -> np.ndarray:
        """int32 [rows, columns] over a mapped io tensor; of one axis: [rows, 1]."""
        tensor = self.tensor(name)
        (piece,) = tensor.parts
        if self._kinds[name] != "io" or tensor.dtype not in ("i32", "u32") or piece.buffer.view is None:
            raise ValueError(
                f"{name} ({self._kinds[name]} {tensor.dtype}) is no mapped integer tensor: read() copies it"
            )
        return piece.bytes.view(DTYPES[tensor.dtype].parts[0].dtype).reshape(tensor.shape[0], -1)

    def tensor(self, name: str) -> DeviceTensor:
        """A stored tensor by name."""
        self.check_open()
        if name not in self._tensors:
            raise KeyError(f"no tensor {name!r} is stored on this device")
        return self._tensors[name]

    def drop(self, name: str) -> None:
        """Free a stored tensor. Waits; programs that use it must not run again."""
        if self.loader is not None:
            self.loader.cancel(name)
        self.wait()
        if name + columns.SUFFIX in self._tensors:
            self.drop(name + columns.SUFFIX)
        self._tensors.pop(name, None)
        self._kinds.pop(name, None)
        self._guards.pop(name, None)
        self._views.pop(name, None)
        for piece, purpose in self._allocations.pop(name, []):
            self.memory_pool.release(piece, purpose)

    def clear_names(self) -> None:
        """Forget every tensor; the memory is freed with the device."""
        for table in (self._tensors, self._kinds, self._allocations, self._guards, self._views):
            table.clear()

    def add(self, decl: TensorDecl, pool: str) -> DeviceTensor:
        """Allocate a named tensor, uninitialised, with guard bytes around every part if enabled."""
        purpose, chunks = IN_HOST_MEMORY if pool == "host" else PURPOSE[decl.kind], []
        held = self._allocations.setdefault(decl.name, [])
        for row, rows, dtype in chunk_rows(decl, self.max_range):
            parts = []
            shape = (rows, *decl.shape[1:]) if decl.shape else ()
            for size in part_bytes(dtype, shape):
                front = align_up(self.guard)
                body = align_up(size + self.guard) if self.guard else size
                whole = self.memory_pool.allocate(front + body, purpose, pool)
                held.append((whole, purpose))
                if self.guard:
                    around = [
                        Slice(whole.buffer, whole.offset, front),
                        Slice(whole.buffer, whole.offset + front + size, whole.size - front - size),
                    ]
                    for piece in around:
                        self.put(piece, np.full(piece.size, GUARD_BYTE, np.uint8))
                    self._guards.setdefault(decl.name, []).extend(around)
                parts.append(Slice(whole.buffer, whole.offset + front, size))
            chunks.append(Chunk(row, rows, tuple(parts), dtype))
        self._kinds[decl.name] = decl.kind
        self._tensors[decl.name] = DeviceTensor(decl.name, decl.dtype, decl.shape, tuple(chunks))
        return self._tensors[decl.name]

    def _fitting(self, name: str, value: Tensor | Packed, row: int) -> DeviceTensor:
        """The tensor, checked to hold `value` from `row` on."""
        tensor = self.tensor(name)
        mixed = len({c.dtype for c in tensor.chunks}) > 1  # then the rows' types are compared
        if (value.dtype != tensor.dtype and not mixed) or value.shape[1:] != tensor.shape[1:]:
            raise ValueError(
                f"{name} is {tensor.dtype}{list(tensor.shape)}; {value.dtype}{list(value.shape)} cannot "
                "be written into its rows"
            )
        if row < 0 or row + rows_of(value.shape) > rows_of(tensor.shape):
            raise ValueError(
                f"{name} has {rows_of(tensor.shape)} rows; {rows_of(value.shape)} from row {row} on do not fit"
            )
        return tensor

    def _load_rows(self, name: str, piece: Packed, row: int) -> None:
        if self.loader is None:
            with self.loading(piece.nbytes):
                self._load_rows(name, piece, row)
            return
        self.loader.put(name, piece, row, self._fitting(name, piece, row).chunks)

    def _put_rows(self, name: str, value: Tensor, row: int, fresh: bool = False) -> None:
        tensor = self._fitting(name, value, row)
        if not all(p.flags.c_contiguous for p in value.parts):
            value = Tensor(value.dtype, value.shape, tuple(p.copy() for p in value.parts))
        direct = fresh or self._kinds[name] == "io"
        for piece, host in tensor.spans(row, value):
            if direct:
                self.put(piece, host)
            else:
                self.transfer.upload(piece, host)
            self.counters.bytes_up += host.size

    def put(self, target: Slice, data: np.ndarray) -> None:
        """Write bytes to device memory: directly if mapped, else through staging in queue order."""
        if target.buffer.view is not None:
            target.bytes.reshape(data.shape)[...] = data
        else:
            self.transfer.upload(target, data)

    def fill(self, target: Slice, byte: int) -> None:
        if target.buffer.view is not None:
            target.bytes[:] = byte
        else:
            self.transfer.fill(target, byte)

    def slices(self, names: Sequence[str]) -> list[Slice]:
        """All slices of tensors by name."""
        return [p for name in names for c in self.tensor(name).chunks for p in c.parts]

    def check_guards(self) -> list[str]:
        """Names of tensors with changed guard bytes; waits for everything submitted."""
        self.check_open()
        self.wait()
        damaged = []
        for name, pieces in self._guards.items():
            for piece in pieces:
                data = np.empty(piece.size, np.uint8)
                if piece.buffer.view is not None:
                    data[:] = piece.bytes
                else:
                    self.transfer.download(piece, data)
                if (data != GUARD_BYTE).any():
                    damaged.append(name)
                    break
        return damaged
