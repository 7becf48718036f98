"""Tensors in host memory, and plans that run one function per operation.

A model's matrices stay in their file, where rows are looked up. For products each is made once, as the memory budget allows: codes
for onnxruntime (hybrid.kernels.host.nbits) where it is installed and activations are int8, else float32; else a copy in
its own type that is dequantised in blocks of rows at every use; else it is read at every use. Other weights are copied
into memory. submit() is synchronous; tickets exist for the protocol.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import numpy as np

from hybrid.core.device import Counters, Program, SingleDevice
from hybrid.core.dtypes import DTYPES
from hybrid.core.hostmemory import NotShareable
from hybrid.core.names import part_of
from hybrid.core.plan import ALIGN, PURPOSE, Plan, TensorDecl
from hybrid.core.tensor import Packed, Rows, Source, Tensor, unpacked
from hybrid.kernels.host import nbits
from hybrid.kernels.host.memory import Guarded, Slabs, aligned, in_memory, place, usable_bytes
from hybrid.kernels.host.nbits import Product
from hybrid.kernels.host.program import HostProgram, int8_activations
from hybrid.kernels.host.threads import BlasThreads, processors
from hybrid.quant.codec import Value, argument, copy_rows, dequantise, joined, row_blocks, rows, runs
from hybrid.spec.op import load_ops

_AT_ONCE = 1 << 20  # elements that a thread dequantises


class Stored(Protocol):
    """A weight's storage type and shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Form = Literal["codes", "float32", "own", "file"]


def held_as(weight: Stored, int8: bool, room: int, floats: int) -> tuple[Form, int]:
    """How a cpu device holds a matrix for products, and in how many bytes: codes for onnxruntime, float32, its own
    type, or not at all (it is read from its file at every use). int8: onnxruntime multiplies it. room: bytes left;
    floats: of these for float32."""
    kind = DTYPES[weight.dtype]
    if int8 and kind.quantised and nbits.size(weight) <= room:
        return "codes", nbits.size(weight)
    if weight.dtype != "f32" and 4 * math.prod(weight.shape) <= min(room, floats):
        return "float32", 4 * math.prod(weight.shape)
    own = kind.nbytes(weight.shape)
    return ("own", own) if own <= room else ("file", 0)


def weight_bytes(
    plans: Iterable[Plan], weights: Mapping[str, Stored], memory: int, floats: int
) -> tuple[int, dict[str, int]]:
    """What a cpu device makes of a model's weights with so much memory for them, libraries as installed: the bytes that
    it holds, and the bytes in their own types of the matrices that it holds in each form. plans: at least a layer of
    each kind. floats: most bytes of float32 copies."""
    ops, by_codes = load_ops(), nbits.unusable() is None
    int8: dict[str, bool] = {}
    for plan in plans:
        for step in plan.steps:
            for matrix in (plan.tensors[step.args[n]] for n in ops[step.op].matrices):
                names = map(part_of, matrix.sources or (matrix.name,))
                int8 |= dict.fromkeys(names, int8_activations(ops[step.op], step, plan))
    total, copies, forms = 0, 0, dict[str, int].fromkeys(get_args(Form), 0)
    for name, weight in weights.items():
        own, multiplied = DTYPES[weight.dtype].nbytes(weight.shape), int8.get(part_of(name))
        if len(weight.shape) == 1 or weight.dtype == "f32":
            total += own if own <= memory - total else 0
        elif multiplied is not None:
            form, held = held_as(weight, multiplied and by_codes, memory - total, floats - copies)
            total, forms[form] = total + held, forms[form] + own
            copies += held if form in ("codes", "float32") else 0
    return total, forms


class HostDevice(SingleDevice):
    """hybrid.core.device.Device over NumPy arrays.

    functions: what computes each operation, by its name, called with arrays and attributes as kernels.oracle's are.
    memory: bytes for all tensors (default: usable_bytes() now).
    memory_budget: bytes of it for float32 copies of weights (default: half).
    guard: bytes of a pattern around every tensor; activations then get memory of their own (no shared arena).
    products: use onnxruntime where it can be used.
    ops: operation specs by name (default: the shipped ones)."""

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Callable[..., tuple[np.ndarray, ...]]],
        *,
        memory: int | None = None,
        memory_budget: int | None = None,
        guard: int = 0,
        products: bool = False,
        ops: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.counters = Counters()
        self.ops = load_ops() if ops is None else ops
        self.functions = dict(functions)
        self.guard = guard
        self.generation = 0
        """Incremented whenever memory moves: programs then look their tensors up again."""
        self.blas = BlasThreads()
        self.threads = self.blas.text
        """See Device.threads."""
        why_not = nbits.unusable() if products else ""
        self._by_codes = why_not is None
        if self._by_codes:
            self.threads = f"{self.threads}; {nbits.name()} for int8 activations"
        self.failures = (f"{why_not}; so float32",) if why_not else ()
        self._memory = usable_bytes() if memory is None else memory
        self._budget = self._memory // 2 if memory_budget is None else memory_budget
        self._decls: dict[str, TensorDecl] = {}
        self._tensors: dict[str, Tensor | Rows | Packed] = {}
        self._held: dict[str, int] = {}
        """Bytes of each tensor that are in memory; `_holds` is their sum."""
        self._holds = 0
        self._guarded: dict[str, Guarded] = {}
        self._float: dict[str, np.ndarray] = {}
        self._products: dict[str, Product] = {}
        self._making: deque[Product] = deque()
        self._uses: dict[str, bool | None] = {}
        """Weights of the plans that are being loaded: whether they multiply int8 activations; None: not a product's."""
        self._slabs = Slabs()
        self._arena = aligned(0)
        self._lent: dict[str, Tensor | Rows | Packed] = {}  # tensors of the sibling device
        self._programs: weakref.WeakSet[HostProgram] = weakref.WeakSet()
        self._open = True

    def shares(self, name: str) -> bool:
        """See Device."""
        return name in self._lent and self._tensors.get(name) is self._lent[name]

    def sibling(self, lent: Mapping[str, str] | None = None) -> HostDevice:
        """See Device."""
        made: HostDevice = type(self)()  # type: ignore[call-arg]  # a backend's device needs no argument
        made._lent = {theirs: self._tensors[ours] for theirs, ours in (lent or {}).items()}
        return made

    def has(self, feature: str) -> bool:
        return False  # no unit for which another precision would pay

    # --- tensors

    @contextmanager
    def loading(self, nbytes: int, plans: Iterable[Plan] = ()) -> Iterator[None]:
        """See Device.loading. Matrices of `plans` stay in their file; what products need is made as they are stored, of a
        few at a time."""
        steps = [(step, plan, self.ops[step.op]) for plan in plans for step in plan.steps if step.op in self.ops]
        self._uses = {name: None for step, _, _ in steps for name in step.args.values()}
        for step, plan, spec in steps:
            self._uses |= dict.fromkeys((step.args[n] for n in spec.matrices), int8_activations(spec, step, plan))
        try:
            yield
            while self._making:
                self._making.popleft().wait()
        finally:
            self._uses = {}
            self._making.clear()

    def store(self, decl: TensorDecl, value: Tensor | None = None, parts: Sequence[Source] = ()) -> None:
        """See Device.store. A weight given whole is kept by reference. Matrices of the plans that are loaded, and weights
        over the memory limit, stay in their file."""
        self.check_open()
        lent = None if value is not None or parts or self.guard else self._lent.get(decl.name)
        if lent is not None and (lent.dtype, lent.shape) == (decl.dtype, decl.shape):
            tensor: Tensor | Rows | Packed = lent
        elif decl.kind == "weight" and parts and not self.guard and (self._stays(decl) or decl.nbytes > self._room()):
            tensor = self._left_in_file(decl, parts)
        elif decl.row_types:
            tensor = runs(decl, parts)
        else:
            tensor = self._filled(decl, value, parts)
        self._forget(decl.name)
        self._put(decl, tensor)
        self.counters.bytes_up += decl.data_bytes if value is not None or parts else 0
        if (int8 := self._uses.get(decl.name)) is not None:
            made = self.weight(decl.name, int8)
            if isinstance(made, Product):
                self._making.append(made)
            if len(self._making) > 2 * processors():
                self._making.popleft().wait()
        self.generation += 1

    def adopt(self, decl: TensorDecl, value: Tensor, fds: Sequence[int] = ()) -> None:
        """See Device.adopt: NumPy takes any memory."""
        self.check_open()
        if self.guard:
            raise NotShareable("tensors with guard bytes around them have memory of their own")
        self._put(decl, value)
        self.generation += 1

    def _put(self, decl: TensorDecl, tensor: Tensor | Rows | Packed) -> int:
        """Replace the tensor of that name; returns the new tensor's bytes in memory."""
        held = in_memory(tensor)
        self._holds += held - self._held.get(decl.name, 0)
        self._decls[decl.name], self._tensors[decl.name], self._held[decl.name] = decl, tensor, held
        return held

    def _stays(self, decl: TensorDecl) -> bool:
        return decl.name in self._uses and len(decl.shape) == 2 and "f32" not in decl.dtypes

    def _room(self) -> int:
        """Bytes available for further tensors."""
        return self._memory - self._holds - self._arena.size - self._guarded_bytes() - self._copies()

    def _guarded_bytes(self) -> int:
        return sum(g.room.nbytes for p in self._programs for g in p.guarded.values())

    def _copies(self) -> int:
        return sum(a.nbytes for a in self._float.values()) + sum(p.nbytes for p in self._products.values())

    def _forget(self, name: str) -> None:
        """What was made of a weight's former numbers."""
        self._float.pop(name, None)
        self._products.pop(name, None)

    def _filled(self, decl: TensorDecl, value: Tensor | None, parts: Sequence[Source]) -> Tensor:
        if value is None and len(parts) == 1:
            value = unpacked(parts[0]())
            parts = ()
        if value is not None and (value.dtype, value.shape) != (decl.dtype, decl.shape):
            raise ValueError(f"{decl.name} is declared {decl.dtype} {decl.shape}, got {value.dtype} {value.shape}")
        if decl.kind == "weight" and value is not None and not self.guard:
            return value
        made = self.allocate(decl)
        if self.guard:
            self._guarded[decl.name] = made
        if value is not None or parts:
            copy_rows(decl.name, made.tensor, [value] if value is not None else (unpacked(make()) for make in parts))
        return made.tensor

    def _left_in_file(self, decl: TensorDecl, parts: Sequence[Source]) -> Tensor | Rows | Packed:
        """The parts as their sources make them. A part that is converted while loading is in memory in any case."""
        made = tuple(make() for make in parts)
        tensor = made[0] if len(made) == 1 else Rows(made)
        if tensor.shape != decl.shape or not {p.dtype for p in made} <= set(decl.dtypes):
            raise ValueError(f"{decl.name} is declared {decl.dtype} {decl.shape}, got {tensor.dtype} {tensor.shape}")
        return tensor

    def write(self, name: str, value: Tensor, row: int = 0) -> None:
        target, stop = self.whole(name), row + value.shape[0]
        same = (value.dtype, value.shape[1:]) == (target.dtype, target.shape[1:])
        if not same or not 0 <= row <= stop <= target.shape[0]:
            raise ValueError(
                f"{name} is {target.dtype} {target.shape}: cannot write {value.dtype} {value.shape} at row {row}"
            )
        if self._decls[name].kind == "weight":  # kept by reference: the owner's numbers must not change
            target = Tensor(target.dtype, target.shape, tuple(p.copy() for p in target.parts))
            self._put(self._decls[name], target)
            self._forget(name)
            self.generation += 1
        for to, part in zip(target.parts, value.parts, strict=True):
            to[row:stop] = part
        self.counters.bytes_up += value.nbytes

    def read(self, name: str, start: int = 0, stop: int | None = None, ticket: int | None = None) -> Tensor:
        self.wait(ticket)
        stored = self.stored(name)
        view = joined(name, stored.rows(start, stored.shape[0] if stop is None else stop))
        self.counters.bytes_down += view.nbytes
        return Tensor(view.dtype, view.shape, tuple(p.copy() for p in view.parts))

    def peek(self, name: str, row: int, column: int, ticket: int | None = None) -> int:
        self.wait(ticket)
        array = self.whole(name).array
        return array.item(row, column) if array.ndim == 2 else array.item(row)

    def reserve(self, arena_bytes: int, plans: Iterable[Plan] = ()) -> None:
        self.check_open()
        if not self.guard and arena_bytes > self._arena.size:
            self._arena = aligned(arena_bytes)
            self.counters.allocations += 1
            self.generation += 1

    # --- plans

    def compile(self, plan: Plan, profile: bool = False, cooperative: bool = True) -> Program:
        """Check a plan against the stored tensors and prepare it. ValueError names the step and what is wrong."""
        self.check_open()
        self.reserve(plan.arena_bytes)
        program = HostProgram(self, plan, profile)
        self._programs.add(program)
        self.counters.recordings += 1
        return program

    def wait(self, ticket: int | None = None) -> None:
        self.check_open()
        if ticket is not None and ticket > self.counters.submits:
            raise ValueError(f"no such ticket: {ticket}; the last submit was {self.counters.submits}")

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. `dequantised`: float32 copies of weights. `codes`: what onnxruntime holds of them.
        `left_in_files`: weights not held in memory."""
        self.check_open()
        held = dict.fromkeys(("weights", "state", "io"), 0)
        for name, nbytes in self._held.items():
            held[PURPOSE[self._decls[name].kind]] += nbytes
        held |= {"activations": self._arena.size + self._guarded_bytes(), "staging": 0}
        held |= {"dequantised": sum(a.nbytes for a in self._float.values())}
        held |= {"codes": sum(p.nbytes for p in self._products.values())}
        return {**held, "left_in_files": self.left_in_files}

    @property
    def left_in_files(self) -> int:
        """Bytes of weights that are not in memory, in any form: they are read again at every use."""
        made = self._float.keys() | self._products.keys()
        return sum(t.nbytes - self._held[name] for name, t in self._tensors.items() if name not in made)

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop everything; any later call raises."""
        self.reset()
        self._open = False

    def reset(self) -> None:
        """Drop every program, tensor and arena. For tests that use one device for many cases."""
        self._decls.clear()
        self._tensors.clear()
        self._held.clear()
        self._holds = 0
        self._guarded.clear()
        self._float.clear()
        self._products.clear()
        self._slabs = Slabs()
        self._programs.clear()
        self._arena = aligned(0)
        self.generation += 1

    # --- for tests

    def poison(self, byte: int, names: Sequence[str] = ()) -> None:
        """Fill all activations and the stored tensors `names` with a byte."""
        self.check_open()
        self._arena.fill(byte)
        tensors = [self.whole(n) for n in names] + [g.tensor for p in self._programs for g in p.guarded.values()]
        for part in (p for t in tensors for p in t.parts):
            part.view(np.uint8).fill(byte)

    def check_guards(self) -> list[str]:
        """Names of the tensors whose guard bytes were overwritten; always empty with guard=0."""
        self.check_open()
        activations = {f"{p.plan.name}:{name}": g for p in self._programs for name, g in p.guarded.items()}
        return [name for name, g in {**self._guarded, **activations}.items() if not g.intact()]

    # --- for programs

    def check_open(self) -> None:
        if not self._open:
            raise RuntimeError(f"the {self.name} device is closed")

    def view(self, decl: TensorDecl) -> Tensor | Rows | Packed:
        """Memory of a plan's declaration: a prefix of the stored tensor, or its range of the arena."""
        if decl.kind == "activation":
            if decl.offset % ALIGN or decl.offset + decl.nbytes > self._arena.size:
                raise ValueError(
                    f"activation {decl.name} at byte {decl.offset} needs {decl.nbytes} bytes, aligned to {ALIGN}; "
                    f"the arena has {self._arena.size}: set Plan.arena_bytes and TensorDecl.offset"
                )
            return place(decl.dtype, decl.shape, self._arena, decl.offset)
        stored = self.stored(decl.name)
        same = (decl.dtype, decl.shape[1:]) == (stored.dtype, stored.shape[1:])
        if not same or decl.shape[0] > stored.shape[0]:
            raise ValueError(
                f"the plan declares {decl.name} as {decl.dtype} {decl.shape}, "
                f"stored is {stored.dtype} {stored.shape}: only the first axis may be smaller"
            )
        return stored.rows(0, decl.shape[0])

    def weight(self, name: str, int8: bool = False) -> Value | Product:
        """A matrix for products, made at first use: see this module. int8: its activations are."""
        tensor = self.stored(name)
        if int8 and name in self._products:
            return self._products[name]
        if name in self._float:
            return self._float[name]
        form, _ = held_as(tensor, int8 and self._by_codes, self._room(), self._budget - self._copies())
        if form == "codes":
            self._products[name] = Product(tensor, self.blas.now)
            return self._products[name]
        if form == "float32":
            self._float[name] = self._dequantised(tensor)
            self.counters.allocations += 1
            return self._float[name]
        if self._held[name] < tensor.nbytes <= self._room():
            held = [unpacked(t) for t in (tensor.tensors if isinstance(tensor, Rows) else (tensor,))]
            tensor = held[0] if len(held) == 1 else Rows(tuple(held))
            self._put(self._decls[name], tensor)
        return argument(tensor)

    def _dequantised(self, tensor: Tensor | Rows | Packed) -> np.ndarray:
        out = self._slabs.take(tensor.shape)
        with ThreadPoolExecutor() as threads:  # NumPy releases the GIL
            spans = row_blocks(tensor.shape[0], tensor.shape[1], _AT_ONCE)
            list(threads.map(lambda s: dequantise(rows(tensor, *s), np.float32, out[s[0] : s[1]]), spans))
        return out

    def whole(self, name: str) -> Tensor:
        return joined(name, self.stored(name))

    def stored(self, name: str) -> Tensor | Rows | Packed:
        self.check_open()
        if name not in self._tensors:
            raise ValueError(f"no tensor {name!r} is stored on the {self.name} device: store() it first")
        return self._tensors[name]

    def allocate(self, decl: TensorDecl) -> Guarded:
        self.counters.allocations += 1
        return Guarded(decl, self.guard)
