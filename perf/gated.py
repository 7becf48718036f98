"""What the gates measure: counts that do not depend on how busy a machine is, and ratios of two programs run in turn.

Each group is a function that returns numbers by name; perf/gates/GROUP.toml holds what is expected of them.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybrid.engine import Engine
from hybrid.spec.device import Counters
from hybrid.spec.errors import SpecError
from hybrid.spec.schedule import CAPABILITIES
from kernels.vulkan.kernel import SPIRV
from perf.switches import bindings_without, find_switch
from perf.work import Planned, subject

Numbers = dict[str, float]
REFERENCE = Path(__file__).resolve().parent / "reference" / "spirv"
COUNTS = tuple(f.name for f in fields(Counters))
WARM, STEPS, PROMPT = 3, 10, 24
PAIRS = 20


def plans() -> Numbers:
    """Of plans alone, no device needed: dispatches, barriers and bytes of a pass, memory by purpose; under `units` as
    planned for a device with matrix units."""
    found: Numbers = {}
    for name in ("gemma3-1b", "gemma3-27b"):
        plain, units = (subject(name, "q4_0", capabilities=can) for can in ((), CAPABILITIES))
        assert isinstance(plain, Planned) and isinstance(units, Planned)
        passes = {
            "decode.1": plain.decode(1, 512),
            "decode.8": plain.decode(8, 512),
            "prefill.512": plain.work("prefill", 512, 1, 512, 1),
            "units.prefill.2048": units.work("prefill", 2048, 1, 2048, 1),
        }
        for key, work in passes.items():
            found[f"{name}.{key}.dispatches"] = work.dispatches
            found[f"{name}.{key}.barriers"] = sum(i.barriers for i in work.items)
            found[f"{name}.{key}.bytes"] = work.nbytes
            found[f"{name}.{key}.flops"] = work.flops
        for key, model in (("memory", plain), ("units.memory", units)):
            found |= {f"{name}.{key}.{purpose}": size for purpose, size in model.held(1, 4096).as_dict().items()}
    return found


def spirv() -> Numbers:
    """Bytes of every SPIR-V module."""
    names = json.loads((SPIRV / "manifest.json").read_text())
    return {name: (SPIRV / f"{name}.spv").stat().st_size for name in names}


def cpu_driver() -> str:
    """The selector of Mesa's CPU driver, on which counts are the same everywhere. SpecError where there is none."""
    from kernels.vulkan.api import VulkanUnavailable
    from kernels.vulkan.instance import list_devices

    try:
        found = [d for d in list_devices() if d.kind == "cpu"]
    except VulkanUnavailable as error:
        raise SpecError(f"the gates of group engine run on Mesa's CPU driver: {error}") from None
    if not found:
        raise SpecError(
            "the gates of group engine run on Mesa's CPU driver, which is not here: apt-get install mesa-vulkan-drivers"
        )
    return f"vulkan:{found[0].index}"


@contextmanager
def small_engine(**options: Any) -> Iterator[Engine]:
    """Two layers of random weights in the shape of the smallest Gemma 3, on the CPU driver."""
    from hybrid.checkpoint.random import random_checkpoint
    from kernels.vulkan.device import open_device

    bindings = options.pop("bindings", None)
    with open_device(cpu_driver(), bindings=bindings, validation=False) as device:
        checkpoint = random_checkpoint("gemma3-270m", "q4_0", None, 2, 2048)
        yield Engine(checkpoint, device, ctx=256, n_tokens=2048, **options)


def token(made: Engine, slot: int, position: int) -> None:
    """One token as a caller without look-ahead gets it."""
    made.token(slot, position, made.submit_decode((slot,)))


Step = Callable[[Engine, int, int], object]


def engine(step: Step = token, **options: Any) -> Numbers:
    """Of a running engine: what a token and a prompt cost after warm-up, what making it ready costs, Python calls."""
    with small_engine(**options) as made:
        made.warm_up(PROMPT)
        ready = made.counters.copy()
        found = {f"ready.{n}": getattr(ready, n) for n in ("pipelines", "recordings", "descriptor_writes", "allocations")}
        ids = list(range(2, 2 + PROMPT))
        slot = made.admit()
        made.wait(made.submit_prefill({slot: ids}))  # tables are written once per sequence
        before = made.counters.copy()
        made.wait(made.submit_prefill({slot: ids}))
        found |= _counts("prefill", made.counters.minus(before), 1)
        position = made.positions[slot] + 1
        for n in range(WARM):
            step(made, slot, position + n)
        before = made.counters.copy()
        for n in range(WARM, WARM + STEPS):
            step(made, slot, position + n)
        found |= _counts("token", made.counters.minus(before), STEPS)
        found["token.python_calls"] = count_calls(lambda: step(made, slot, position + WARM + STEPS))
        device: Any = made.device
        return {**found, **{f"memory.{purpose}": size for purpose, size in device.memory().items()}}


def _counts(prefix: str, done: Counters, per: int) -> Numbers:
    return {f"{prefix}.{name}": getattr(done, name) / per for name in COUNTS}


def count_calls(work: Callable[[], object]) -> int:
    """Python and C functions that a call enters."""
    entered = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


def ratios() -> Numbers:
    """Of two ways to do the same, run in turn in one process: the first way's processor time over the second's."""
    unfused = bindings_without([find_switch("fused-qkv"), find_switch("fused-ffn")])
    with small_engine() as ours, small_engine(bindings=unfused) as theirs:
        found = {"decode.recorded_over_unfused": paired(decoding(ours), decoding(theirs))}
    with product() as kernel, reference() as fixed:
        found["gemv.q4_0_over_reference"] = paired(kernel, fixed)
    return found


def paired(first: Callable[[], object], second: Callable[[], object], pairs: int = PAIRS) -> float:
    """time(first) / time(second), each the least of `pairs` runs in alternating order.

    Time is that of this process on its processors, the driver's threads included: what others do on the machine only
    ever adds to it, and least where they happened to do little. perf/gates/ratios.toml says how much it scatters."""
    first(), second()
    least = {first: math.inf, second: math.inf}
    for i in range(pairs):
        for work in (first, second) if i % 2 else (second, first):
            begin = time.process_time()
            work()
            least[work] = min(least[work], time.process_time() - begin)
    return least[first] / least[second]


def decoding(made: Engine, tokens: int = 12) -> Callable[[], object]:
    """Decodes `tokens` tokens, each time after the same three."""
    made.prefill({0: [2, 3, 4]})

    def work() -> None:
        made.rewind(0, 2)
        made.prefill({0: [4]})
        made.decode(tokens)

    return work


K, N = 6912, 1152  # the feed-forward output of gemma3-1b


@contextmanager
def product() -> Iterator[Callable[[], object]]:
    """Our kernel: one row times a Q4_0 matrix [N, K], int8 activations."""
    from conformance.cases import Case
    from hybrid.spec import load_op
    from kernels.vulkan.device import open_device
    from perf.op import repeated

    spec = load_op("linear")
    dtypes = dict(spec.dtypes({"x": "q8_act", "w": "q4_0"}))
    with open_device(cpu_driver(), validation=False) as device:
        plan, _ = repeated(spec, Case("linear", {"T": 1, "K": K, "N": N}, dtypes, {}, 1, 1, style="full"), device, 1)
        program = device.compile(plan)
        yield lambda: device.wait(program.submit())


@contextmanager
def reference() -> Iterator[Callable[[], object]]:
    """The fixed kernel of perf/reference on a matrix of the same shape and types, checked before it is used."""
    import numpy as np

    from hybrid.spec.plan import Plan, TensorDecl
    from hybrid.spec.plan import Step as PlanStep
    from hybrid.spec.tensor import Tensor
    from kernels.vulkan.device import open_device

    def record(rec: Any, step: Any, t: Mapping[str, Any]) -> None:
        parts = [t[name].parts[0] for name in ("w", "ws", "x", "xs", "y")]
        rec.dispatch(rec.kernel("reference"), parts[:4], parts[4:], struct.pack("<I", K // 32), (N, 1, 1))

    values = {  # codes of 9 - 8 times 2, scaled by a half: every product is 1
        "w": np.full((N, K // 8), 0x99999999, np.uint32),
        "ws": np.full((N, K // 32), 0.5, np.float32),
        "x": np.full((1, K // 4), 0x02020202, np.uint32),
        "xs": np.ones((1, K // 32), np.float32),
        "y": np.zeros((1, N), np.float32),
    }
    dtypes = {name: "u32" if name in ("w", "x") else "f32" for name in values}
    decls = {name: TensorDecl(name, dtypes[name], v.shape, "state") for name, v in values.items()}
    control = TensorDecl("control", "u32", (8,), "io")
    with open_device(cpu_driver(), validation=False, spirv=REFERENCE, bindings={"reference": record}) as device:
        device.store(control, Tensor.of(np.array([1, 1, 1, 0, 0, 0, 0, 0], np.uint32)))
        for name, decl in decls.items():
            device.store(decl, Tensor.of(values[name]))
        only = PlanStep("reference", "reference", {}, {n: n for n in decls}, device="vulkan")
        program = device.compile(Plan("reference", 1, 1, (only,), {"control": control, **decls}))
        device.wait(program.submit())
        if not (device.read("y").array == K).all():
            raise RuntimeError("the reference kernel computes wrongly: nothing can be compared with it")
        yield lambda: device.wait(program.submit())


def gfx1103() -> dict[str, Mapping[str, Any]]:
    """Mesa version -> table. The rules of perf/isa.toml are part of the gate."""
    from perf.isa import compiled

    return {version: table for version, (table, _) in compiled().items()}


GROUPS: dict[str, Callable[[], Numbers]] = {"plans": plans, "spirv": spirv, "engine": engine, "ratios": ratios}
