"""Plans on a host-memory device: steps with resolved arrays, one function call each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid.core.device import StepTime
from hybrid.core.plan import CONTROL, Plan, Step
from hybrid.core.tensor import Packed, Rows, Tensor
from hybrid.kernels.host.memory import Guarded
from hybrid.kernels.host.nbits import Product
from hybrid.kernels.host.threads import seconds_alone
from hybrid.quant.codec import argument, round_into

if TYPE_CHECKING:  # the device imports this module
    from hybrid.kernels.host.device import HostDevice


class HostProgram:
    """A plan with resolved tensors."""

    def __init__(self, device: HostDevice, plan: Plan, profile: bool) -> None:
        self.plan = plan
        self.device = device
        self.profile = profile
        self.guarded: dict[str, Guarded] = {}
        """Activations in separate memory, where the device has guard bytes."""
        if device.guard:
            used = dict.fromkeys(plan.tensors[name] for step in plan.steps for name in step.args.values())
            self.guarded = {d.name: device.allocate(d) for d in used if d.kind == "activation"}
        self._times: list[StepTime] = []
        self._began: float | None = None
        self._bind()

    def _bind(self) -> None:
        self._steps = [_Bound(self, step) for step in self.plan.steps]
        self._generation = self.device.generation

    def tensor(self, name: str) -> Tensor | Rows | Packed:
        return self.guarded[name].tensor if name in self.guarded else self.device.view(self.plan.tensors[name])

    def submit(self, times: int = 1) -> int:
        self.device.check_open()
        if self._generation != self.device.generation:
            self._bind()
        for _ in range(times):
            self._pass()
        self.device.counters.submits += 1
        return self.device.counters.submits

    def _pass(self) -> None:
        marks, begin = [], time.perf_counter()
        with self.device.blas, np.errstate(all="ignore"):  # infinities and NaN are results here, as on every device
            for bound in self._steps:
                start = time.perf_counter()
                bound.run()
                marks.append((start, time.perf_counter()))
        if self.profile:
            named = zip(self.plan.steps, marks, strict=True)
            self._began, self._times = begin, [StepTime(s.name, s.op, s.layer, a - begin, b - a) for s, (a, b) in named]

    def times(self, ticket: int | None = None) -> Sequence[StepTime]:
        return tuple(self._times)

    def began(self, ticket: int | None = None) -> float | None:
        return self._began


def int8_activations(spec: Any, step: Step, plan: Plan) -> bool:
    """Whether the matrices of a step multiply int8 activations, each as a whole: not one expert's part of them."""
    stacked = any(axis.role == "experts" for axis in spec.axes.values())
    return not stacked and any(plan.tensors[step.args[n]].dtype == "q8_act" for n in (*spec.inputs, *spec.scratch))


class _Bound:
    """One step with its function and arrays. `live` arguments are cut to the live rows at each run."""

    def __init__(self, program: HostProgram, step: Step) -> None:
        self.device, self.step = program.device, step
        if step.op not in self.device.functions or step.op not in self.device.ops:
            where = "; a new one is a function in kernels/oracle" if self.device.backend == "cpu" else ""
            raise ValueError(f"step {step.name}: the {self.device.name} device has no operation {step.op!r}{where}")
        spec = self.device.ops[step.op]
        self.function = self.device.functions[step.op]
        self.control = program.device.whole(program.plan.control).array
        self.counts = self.control
        if step.counts:
            counts = program.tensor(step.counts)
            self.counts = counts.array if isinstance(counts, Tensor) else program.device.whole(step.counts).array
        self.axis = spec.token_axis
        self.bucket = None if self.axis is None else step.bind.get(self.axis)  # None: an operation on weights alone
        shapes = {**spec.inputs, **spec.outputs, **spec.state, **spec.scratch}
        self.live = {n: t.shape[0] for n, t in shapes.items() if t.shape and self.axis in t.shape[0].names}
        given, wanted = set(step.args), set(shapes)
        if given - wanted or wanted - given:
            raise ValueError(
                f"step {step.name} ({step.op}): missing arguments {sorted(wanted - given)}, "
                f"unknown {sorted(given - wanted)}"
            )
        try:
            tensors: dict[str, Any] = {n: program.tensor(step.args[n]) for n in shapes}
            act = int8_activations(spec, step, program.plan)
            self.matrices = {n: self.device.weight(step.args[n], act) for n in spec.matrices}
        except ValueError as error:
            raise ValueError(f"step {step.name}: {error}") from None
        self.inputs = {n: tensors[n] for n in (*spec.inputs, *spec.state) if n not in self.matrices}
        self.outputs = {n: tensors[n] for n in spec.outputs}
        self.scratch = {n: tensors[n] for n in spec.scratch}
        self.label = f"step {step.name}"
        self._prepared_for = -1

    def run(self) -> None:
        control, live = self.control, int(self.counts[CONTROL[self.step.extent]])
        if self.bucket is not None and live > self.bucket:
            raise ValueError(f"step {self.step.name}: {live} live {self.step.extent} in a plan for {self.bucket}")
        if self.bucket is not None and live == 0:
            return
        if live != self._prepared_for:
            self._prepare(live)
        alone = self._alone + self._alone_per_position * min(int(control[CONTROL["context"]]), self._positions)
        blas, begin = self.device.blas, time.perf_counter()
        trial = blas.use(alone, live == 1 and bool(self.matrices))
        results = self.function(**self._given, real=np.float32)
        if trial:
            blas.judge(alone, time.perf_counter() - begin)
        if len(results) != len(self._targets):
            raise TypeError(f"{self.label} returned {len(results)} arrays for the outputs {list(self._targets)}")
        for result, target in zip(results, self._targets.values(), strict=True):
            round_into(target, result)
        self.device.counters.dispatches += 1

    def _prepare(self, live: int) -> None:
        """Resolve what depends on the live rows only; decoding reuses it from pass to pass."""
        self._given = {
            **{n: argument(self._cut(n, t, live)) for n, t in self.inputs.items()},
            **{n: self._cut(n, t, live) for n, t in self.scratch.items()},
            **{f"{n}_dtype": t.dtype for n, t in self.scratch.items()},
            **self.matrices,
            **self.step.attrs,
        }
        self._targets = {n: self._cut(n, t, live) for n, t in self.outputs.items()}
        # The longest product on one thread; attention's (the queries of a kv head with its keys) grow with the context.
        self._alone = max(
            (
                seconds_alone(live, m.shape[0], m.shape[1], 1 if isinstance(m, Product) else 4)
                for m in self.matrices.values()
            ),
            default=0.0,
        )
        bind, window = self.step.bind, int(self.step.attrs.get("window", 0))
        attends = "k_cache" in self.inputs
        self._alone_per_position = seconds_alone(live * bind["HQ"] // bind["HK"], 1, bind["D"]) if attends else 0.0
        self._positions = window + live if window else 1 << 31  # most positions that a row sees
        self._prepared_for = live

    def _cut(self, name: str, tensor: Tensor, live: int) -> Tensor:
        if name not in self.live:
            return tensor
        return tensor.rows(0, int(self.live[name].eval({**self.step.bind, str(self.axis): live})))
