"""The work of one pass, as bytes and operations per step: from a plan. perf.roofline turns it into time on a device
sheet.

Operations are those of the specs' cost expressions (a multiply-add counts 2), bytes what must move to and from memory,
each tensor touched once. Sizes are in bytes, contexts in positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hybrid.convert.kinds import Wanted, plan_types
from hybrid.core.dtypes import DTYPES, CacheChoice
from hybrid.core.errors import nearest
from hybrid.core.hparams import HParams
from hybrid.core.plan import Plan, Step, TensorDecl
from hybrid.kernels.vulkan.dry import DryDevice, count, scratch_bytes
from hybrid.planning.cache import CacheShape
from hybrid.planning.cost import step_cost
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import Footprint, footprint
from hybrid.planning.planner import PrecisionName, Target, plan
from hybrid.spec.model import find_model, load_models
from hybrid.spec.op import load_op
from hybrid.spec.schedule import Phase, find_schedule

Rate = Literal["int8", "f16", "f32"]


@dataclass(frozen=True, slots=True)
class Item:
    """One step: number type, operations, bytes, dispatches, and how many dispatches wait for another."""

    name: str
    op: str
    rate: Rate
    flops: int
    nbytes: int
    activations: int = 0
    """Of `nbytes`, those of activations: written and read within a pass, they may never leave a cache."""
    dispatches: int = 1
    barriers: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """One pass: `rows` tokens go in, `outs` of them get logits."""

    rows: int
    outs: int
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(i.nbytes for i in self.items)

    @property
    def streamed(self) -> int:
        """Bytes of weights and caches: they cannot come from anywhere but memory."""
        return sum(i.nbytes - i.activations for i in self.items)

    @property
    def flops(self) -> int:
        return sum(i.flops for i in self.items)

    @property
    def dispatches(self) -> int:
        return sum(i.dispatches for i in self.items)


class Subject(ABC):
    """A model whose passes can be costed: `work` of a pass, `memory` that it needs."""

    name: str
    basis: str
    """Inputs of the figures."""

    @abstractmethod
    def work(self, phase: Phase, rows: int, outs: int, context: int, slots: int, counted: bool = True) -> Work:
        """A pass over `rows` rows of `slots` sequences that hold `context` positions each. Not `counted`: as if every
        step were one dispatch, which a ceiling does not ask about and takes half of the time to find out."""

    @abstractmethod
    def memory(self, slots: int, context: int) -> int:
        """Bytes of weights, cache and activations."""

    def decode(self, batch: int, context: int) -> Work:
        return self.work("decode", batch, batch, context, batch)

    def verify(self, length: int, context: int) -> Work:
        """One sequence's token and `length` drafted ones in one pass, logits for each."""
        return self.work("prefill", length + 1, length + 1, context + length, 1)


class Planned(Subject):
    """A model with a schedule. dtype: what to call the mixture of its storage types; capabilities: what the device that
    is asked about can do (DeviceSheet.limits)."""

    def __init__(
        self,
        name: str,
        hparams: HParams,
        weights: Mapping[str, WeightInfo],
        dtype: str,
        precision: PrecisionName = "auto",
        kv: CacheChoice = "auto",
        capabilities: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.hparams, self.weights, self.dtype = name, hparams, dict(weights), dtype
        self.precision, self.kv, self.capabilities = precision, kv, capabilities
        self.basis = f"the plan of schedule {hparams.family}, {dtype}"
        self._dry = DryDevice(features=capabilities.__contains__)
        self._works: dict[tuple[object, ...], Work] = {}

    def target(self, rows: int, context: int, slots: int) -> Target:
        hp = self.hparams
        cache = CacheShape.of(hp, context, slots, rows)
        family = find_schedule(hp.family)
        return Target(family, hp, self.weights, cache, hp.vocab, self.precision, self.kv, "vulkan", self.capabilities)

    def plan(self, phase: Phase, rows: int, outs: int, context: int, slots: int) -> Plan:
        if not 1 <= context <= self.hparams.context_length:
            raise ValueError(f"{self.name}: a context of {context} is outside 1..{self.hparams.context_length}")
        return plan(self.target(rows, context, slots), rows, outs, phase)

    def work(self, phase: Phase, rows: int, outs: int, context: int, slots: int, counted: bool = True) -> Work:
        key = (phase, rows, outs, context, slots, counted)
        if key not in self._works:
            self._works[key] = _work(self.plan(phase, rows, outs, context, slots), context, self._dry, counted)
        return self._works[key]

    def memory(self, slots: int, context: int) -> int:
        return self.held(slots, context).total

    def held(self, slots: int, context: int) -> Footprint:
        """`memory` by purpose."""
        return footprint(
            self.hparams,
            self.weights,
            batch=slots,
            context=context,
            precision=self.precision,
            kv=self.kv,
            capabilities=self.capabilities,
            beside=lambda p: scratch_bytes(p, self._dry),
            again=self._dry.second_layout,
        )


def subject(
    name: str,
    dtype: str = "q4_0",
    by_class: Mapping[str, str] | None = None,
    precision: PrecisionName = "auto",
    kv: CacheChoice = "auto",
    capabilities: Iterable[str] = (),
) -> Subject:
    """A model by name (specs/models) with its matrices stored as `dtype`, or a checkpoint by its path as
    stored, planned for a device with `capabilities`. SpecError with the nearest name for one that is unknown."""
    if dtype not in DTYPES:
        raise ValueError(f"no storage type {dtype!r}{nearest(dtype, DTYPES)}")
    if name not in load_models() and Path(name).exists():
        return _opened(name, precision, kv, frozenset(capabilities))
    return _named(name, dtype, tuple(sorted((by_class or {}).items())), precision, kv, frozenset(capabilities))


@lru_cache(maxsize=64)
def _named(
    name: str,
    dtype: str,
    by_class: tuple[tuple[str, str], ...],
    precision: PrecisionName,
    kv: CacheChoice,
    capabilities: frozenset[str],
) -> Planned:
    """One of each: it keeps the passes that were planned."""
    return of_shape(name, find_model(name).hparams(), Wanted(dtype, dict(by_class)), precision, kv, capabilities)


def of_shape(
    name: str,
    hp: HParams,
    wanted: Wanted,
    precision: PrecisionName,
    kv: CacheChoice = "auto",
    capabilities: frozenset[str] = frozenset(),
) -> Planned:
    """A model that no file holds, its matrices stored as wanted."""
    from hybrid.checkpoint.families import is_exact, tensors

    shapes = tensors(hp)
    types = plan_types({n: ("f32" if is_exact(n, s) else "bf16", s) for n, s in shapes.items()}, wanted, writing=False)
    return Planned(name, hp, _infos(types.kinds, shapes), wanted.dtype, precision, kv, capabilities)


def _opened(path: str, precision: PrecisionName, kv: CacheChoice, capabilities: frozenset[str]) -> Planned:
    from hybrid.checkpoint import open_checkpoint

    with open_checkpoint(path) as c:
        kinds, shapes = {n: c.dtype(n) for n in c.names}, {n: c.shape(n) for n in c.names}
        mixture = "/".join(sorted({kinds[n] for n in c.names if len(shapes[n]) > 1}))
        return Planned(Path(path).name, c.hparams, _infos(kinds, shapes), mixture, precision, kv, capabilities)


def _infos(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, WeightInfo]:
    from hybrid.quant.native import native

    return {n: WeightInfo(native(k, "vulkan") if len(shapes[n]) > 1 else k, shapes[n]) for n, k in kinds.items()}


def _work(made: Plan, context: int, device: DryDevice, counted: bool) -> Work:
    found = count(made, device) if counted else None
    costs: dict[tuple[object, ...], tuple[int, int, int]] = {}  # layers repeat: each distinct step is evaluated once
    items = []
    for step in made.steps:
        used = {k: made.tensors[n] for k, n in step.args.items()}
        key = (
            step.op,
            tuple(step.bind.items()),
            tuple(step.attrs.items()),
            tuple((d.dtype, d.row_types, d.kind) for d in used.values()),
        )
        if key not in costs:
            cost = step_cost(made, step, context)
            costs[key] = cost.flops, cost.nbytes, _activations(step, used)
        counts = (found.dispatches[step.name], found.barriers[step.name]) if found else (1, 1)
        items.append(Item(step.name, step.op, rate_of(step, used, device.has("f16_matrices")), *costs[key], *counts))
    return Work(made.rows, made.outs, tuple(items))


def _activations(step: Step, used: Mapping[str, TensorDecl]) -> int:
    """Bytes of a step's activations: the terms of its cost that vanish when they take no space."""
    op = load_op(step.op)
    env: dict[str, Any] = {**step.bind, **op.attrs(step.bind, step.attrs)}

    def size(every: bool) -> float:
        return op.cost.bytes.eval(
            env, lambda t: DTYPES[used[t].dtype].bits / 8 * (every or used[t].kind != "activation")
        )

    return round(size(True) - size(False))


def rate_of(step: Step, used: Mapping[str, TensorDecl], units: bool) -> Rate:
    """What a step's products are made of: int8 codes, f16 numbers, or f32; by its tensors, and by what its
    specification lets matrix units round, where the device has them."""
    rounded = load_op(step.op).numerics.matrices
    if (
        units
        and rounded
        and rounded.when.eval(step.bind)
        and all(used[k].dtype in d for k, d in rounded.dtypes.items())
    ):
        return "f16"
    inputs = {used[k].dtype for k in ("x", "h") if k in used}
    matrix = any(d.kind == "weight" and len(d.shape) == 2 and not d.role for d in used.values())
    if matrix and "q8_act" in inputs:
        return "int8"
    return "f16" if matrix and "f16" in inputs else "f32"
