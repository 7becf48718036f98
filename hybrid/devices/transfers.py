"""Tensors that several devices of a plan use: in shared memory, else copied after another device's writes.

Persistent tensors and activations between devices are shared if the main device can import host memory. Of a KV cache
that cannot be shared, only blocks that the pass has appended to are copied; all blocks it reads if the secondary device
has missed passes. An NPU's DMA cannot use block tables, so it keeps views (kernels/npu/views.py), which are
invalidated here after appends that it has missed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from hybrid.core.device import Device
from hybrid.core.hostmemory import Exported, NotShareable, anonymous
from hybrid.core.plan import CONTROL, Step, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.planning.pipeline import CACHES


@dataclass(slots=True)
class TransferCounts:
    """Numbers of shared tensors and of copies between devices."""

    shared: int = 0
    shared_bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    dma_bufs: int = 0
    """Shared buffers that were imported as dma-bufs rather than anonymous pages."""
    why_not: str = ""
    """Why tensors are copied instead of shared."""

    def __str__(self) -> str:
        shared = f"{self.shared_bytes / 1e6:.2f} MB" + (f", {self.dma_bufs} dma-bufs" if self.dma_bufs else "")
        text = f"{self.shared} tensors shared ({shared}), {self.copies} copies, {self.copied_bytes / 1e6:.2f} MB"
        return text + (f"; not shared: {self.why_not}" if self.why_not else "")


@runtime_checkable
class Exporter(Protocol):
    """A device that can export buffers as dma-bufs."""

    def export(self, decl: TensorDecl) -> Exported: ...


@runtime_checkable
class Viewer(Protocol):
    """A device that caches re-ordered copies of KV caches."""

    def forget(self, name: str) -> None: ...


class Transfers:
    """Coherence of the tensors of `main` and `others` (by backend): tracks writes and copies stale tensors before a
    read."""

    def __init__(self, main: Device, others: Mapping[str, Device]) -> None:
        self.main, self.others = main, others
        self.counts = TransferCounts()
        self._decls: dict[str, TensorDecl] = {}
        self._pages: dict[str, Tensor] = {}
        self._exported: list[Exported] = []  # must outlive their device: the main device still uses them
        self._writes: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._appends: dict[
            tuple[str, str], int
        ] = {}  # (device, cache) -> the cache's write count at the device's last read
        self._complete: dict[
            tuple[str, str], set[int]
        ] = {}  # (device, cache) -> slots whose copy is up to date since then

    def store(self, decl: TensorDecl, value: Tensor | None, parts: Sequence[Source]) -> None:
        """Store on the main device, in shared memory if possible. Weights are stored in the main device's own memory,
        or on the only device that uses them (TensorDecl.device)."""
        if decl.device in self.others:
            self.others[decl.device].store(decl, value, parts)
        elif decl.kind == "weight" or value is not None or parts or not self.others or not self._share(decl):
            self.main.store(decl, value, parts)
        self._decls[decl.name] = decl
        self.mark_written(decl.name)
        if decl.device in self.others:
            self._seen[decl.device, decl.name] = self._writes[decl.name]

    def _share(self, decl: TensorDecl) -> bool:
        """Store in anonymous pages, else in a dma-buf that a secondary device exports. False if both fail
        (counts.why_not)."""
        reasons = []
        for way in (self._in_pages, self._in_dma_buf):
            try:
                self._pages[decl.name] = way(decl)
            except NotShareable as error:
                reasons.append(str(error))
                continue
            return True
        self.counts.why_not = "; ".join(reasons)
        return False

    def _in_pages(self, decl: TensorDecl) -> Tensor:
        pages = anonymous(decl)
        self.main.adopt(decl, pages)
        return pages

    def _in_dma_buf(self, decl: TensorDecl) -> Tensor:
        name, exporter = next(iter(self.others.items()))
        if not isinstance(exporter, Exporter):
            raise NotShareable(f"{name} exports no buffers")
        exported = exporter.export(decl)
        try:
            self.main.adopt(decl, exported.value, exported.fds)
        finally:
            for fd in exported.fds:
                os.close(fd)
        self._exported.append(exported)
        self.counts.dma_bufs += len(exported.fds)
        return exported.value

    def mark_written(self, name: str) -> None:
        """Mark copies as stale: the main device has written the tensor or has a submitted write to it."""
        self._writes[name] = self._writes.get(name, 0) + 1

    def hold(self, where: str, names: Sequence[str]) -> None:
        """Import the main device's tensors on a secondary device, or allocate copies."""
        for name in names:
            if (where, name) in self._seen:
                continue
            decl = replace(self._decls[name], kind="state")
            if name in self._pages:
                self.others[where].adopt(decl, self._pages[name])
                self.counts.shared += 1
                self.counts.shared_bytes += self._pages[name].nbytes
            else:
                self.others[where].store(decl)
            self._seen[where, name] = -1

    def shared_with(self, where: str) -> int:
        """Bytes of shared memory that a secondary device uses in place."""
        return sum(self._pages[n].nbytes for w, n in self._seen if w == where and n in self._pages)

    def send(
        self, where: str, steps: Sequence[Step], results: set[str], control: str, tensors: Mapping[str, TensorDecl]
    ) -> None:
        """Copy stale inputs of `steps` to a secondary device, without `results`, which they overwrite. The caller must
        have waited for the main device's writes. control: the pass's control tensor. tensors: of the pass, which may
        have fewer rows than are stored."""
        caches = {s.args[c]: s for s in steps if "block_table" in s.args for c in CACHES if c in s.args}
        used = {control, *(n for s in steps for n in (*s.args.values(), s.counts) if n)}
        names = used - results - set(self._pages)
        for name in sorted(names - set(caches)):
            if self._seen[where, name] != self._writes.get(name, 0):
                self._copy(where, name, 0, tensors[name].shape[0])
                self._seen[where, name] = self._writes.get(name, 0)
        for name in sorted(caches):
            self._follow(where, name)
            if name in names:
                complete = self._complete.setdefault((where, name), set())
                for start, stop in self._blocks(caches[name], self._decls[name].shape[1], control, complete):
                    self._copy(where, name, start, stop)

    def _follow(self, where: str, name: str) -> None:
        """Track appends to a cache that a secondary device is about to read. A pass appends once. If more than one
        append happened since its last read, the device has missed a pass, and its copy is invalidated."""
        writes, before = self._writes.get(name, 0), self._appends.get((where, name))
        self._appends[where, name] = writes
        if before is None or writes - before > 1:
            self._complete.pop((where, name), None)
            device = self.others[where]
            if isinstance(device, Viewer):
                device.forget(name)

    def fetch(self, where: str, names: Sequence[str], rows: Mapping[str, int], ticket: int) -> None:
        """Copy rows 0..rows[name], which a secondary device has written by `ticket`, to the main device."""
        for name in names:
            if name not in self._pages:
                value = self.others[where].read(name, 0, rows[name], ticket)
                self.main.write(name, value)
                self._count(value)
            self.mark_written(name)
            self._seen[where, name] = self._writes[name]

    def _copy(self, where: str, name: str, start: int, stop: int) -> None:
        value = self.main.read(name, start, stop)
        self.others[where].write(name, value, start)
        self._count(value)

    def _blocks(self, step: Step, size: int, control: str, complete: set[int]) -> list[tuple[int, int]]:
        """(first, end) ranges of cache blocks (`size` positions each) that a step's live rows attend to. For slots in
        `complete`, only blocks that were appended to. Adds the slots to `complete`."""
        main = self.main
        live = int(main.read(control).array[CONTROL[step.extent]])
        slots, positions = (main.read(step.args[n], 0, live).array for n in ("slots", "positions"))
        table, window, blocks = main.read(step.args["block_table"]).array, int(step.attrs["window"]), list[int]()
        for slot in np.unique(slots):
            at = positions[slots == slot]
            first = max(0, int(at.min()) - window + 1) if window else 0
            if int(slot) in complete:
                first = int(at.min())
            complete.add(int(slot))
            blocks += table[slot, first // size : int(at.max()) // size + 1].tolist()
        wanted = np.unique(np.array(blocks, np.int64))
        return [
            (int(r[0]), int(r[-1]) + 1) for r in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1) if len(r)
        ]

    def _count(self, value: Tensor) -> None:
        self.counts.copies += 1
        self.counts.copied_bytes += value.nbytes
