"""Ratios of two programs run alternately in one process, and their expected values by kind of processor.

A ratio depends on what a processor and the driver's code for it are good at, so one is expected of each kind: those of
perf/gates/ratios.toml were measured with care. On any other kind the first run is learned: it is kept in
$XDG_CACHE_HOME/hybrid-kernels/ratios.json, said, and later runs are compared with it. What holds for every processor
(`most`) is judged at once."""

from __future__ import annotations

import json
import math
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from hybrid.core.errors import SpecError
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options
from hybrid.perf.ablate.switches import bindings_without, find_switch
from hybrid.perf.gate.gated import cpu_driver, small_engine
from hybrid.spec.load import Model

REFERENCE = Path(__file__).resolve().parent.parent / "reference" / "spirv"
PAIRS = 20
TRIES = 3
CPUINFO = Path("/proc/cpuinfo")
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The least of all runs of one program over the least of the other's; low, high: the same of each half of the runs,
    and of the whole. The range between them is this measurement's scatter."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Of the value."""
        return (self.high - self.low) / self.value

    def nearest(self, expected: float) -> float:
        """What of low to high is nearest to what was expected: it is judged, so that scatter alone fails nothing."""
        return min(max(expected, self.low), self.high)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def measured(expected: Mapping[str, float], margin: float) -> dict[str, Ratio]:
    """Each ratio. One whose halves differ by more than `margin`, or that is further than `margin` from what is
    expected, is measured again, up to TRIES times: other work on the machine comes and goes, a slower kernel stays
    slower."""
    return {name: steady(take, expected.get(name), margin) for name, take in RATIOS.items()}


def steady(take: Callable[[], Ratio], expected: float | None, margin: float) -> Ratio:
    """A measurement that neither scatters by more than `margin` nor is that far from `expected`; else the middle of
    TRIES, with the range over all of them."""
    tries: list[Ratio] = []
    for _ in range(TRIES):
        tries.append(found := take())
        off = 0.0 if expected is None else abs(found.nearest(expected) / expected - 1)
        if max(found.spread, off) <= margin:
            return found
    middle = sorted(tries, key=lambda r: r.value)[TRIES // 2].value
    return Ratio(middle, min(r.low for r in tries), max(r.high for r in tries))


def paired(first: Work, second: Work, pairs: int = PAIRS) -> Ratio:
    """time(first) / time(second), each the least of `pairs` runs in alternating order.

    Time is that of this process on its processors, the driver's threads included: what others do on the machine only
    ever adds to it, and least where they happened to do little. perf/gates/ratios.toml says how much it scatters."""
    first(), second()
    halves = [{first: math.inf, second: math.inf} for _ in range(2)]
    for i in range(pairs):
        least = halves[2 * i // pairs]
        for work in (first, second) if i % 2 else (second, first):
            begin = time.process_time()
            work()
            least[work] = min(least[work], time.process_time() - begin)
    value = min(h[first] for h in halves) / min(h[second] for h in halves)
    found = [value, *(h[first] / h[second] for h in halves)]
    return Ratio(value, min(found), max(found))


def recorded_over_unfused() -> Ratio:
    """A token by the plan as it is, over one with joined weights split."""
    unfused = bindings_without([find_switch("fused-qkv"), find_switch("fused-ffn")])
    with small_engine() as ours, small_engine(bindings=unfused) as theirs:
        return paired(decoding(ours), decoding(theirs))


def gemv_over_reference() -> Ratio:
    """Our Q4_0 product over the fixed kernel of perf/reference, both on Mesa's CPU driver."""
    with product() as kernel, reference() as fixed:
        return paired(kernel, fixed)


RATIOS: dict[str, Callable[[], Ratio]] = {
    "decode.recorded_over_unfused": recorded_over_unfused,
    "gemv.q4_0_over_reference": gemv_over_reference,
}


# ------------------------------------------------------------------------------------------------------------
# processors
def kind_of_processor() -> str:
    """Make and model of this machine's processor as it numbers itself, and the driver, which names its vectors'
    width."""
    from hybrid.kernels.vulkan.instance import list_devices

    driver = next(d.name for d in list_devices() if f"vulkan:{d.index}" == cpu_driver())
    return f"{processor(CPUINFO.read_text() if CPUINFO.exists() else '')}, {driver}"


def processor(cpuinfo: str) -> str:
    """Of the text of /proc/cpuinfo: `GenuineIntel 6-207`, on Arm `0x41 0xd40`; without it, what Python knows."""
    said: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    if "vendor_id" in said:
        return f"{said['vendor_id']} {said.get('cpu family', '?')}-{said.get('model', '?')}"
    if "CPU part" in said:
        return f"{said.get('CPU implementer', '?')} {said['CPU part']}"
    return platform.processor() or platform.machine()


class Learned(Model):
    """Ratios of the first run on a kind of processor."""

    date: str
    ratios: dict[str, float]


class Store(Model):
    """$XDG_CACHE_HOME/hybrid-kernels/ratios.json."""

    schema_version: Literal[1] = Field(alias="schema")
    processor: dict[str, Learned] = Field(default_factory=dict)


def store_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-kernels" / "ratios.json"


def load_store() -> Store:
    """SpecError for a damaged file."""
    path = store_path()
    try:
        return Store.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Store(schema=1)
    except ValidationError as error:
        raise SpecError(f"{path}: {error.errors()[0]['msg']}: remove it, and the ratios are learned anew") from None


def learn(kind: str, ratios: Mapping[str, float]) -> None:
    """Store the ratios of a kind of processor; other kinds are kept."""
    path, known = store_path(), load_store()
    found = Learned(date=datetime.now(timezone.utc).strftime("%Y-%m-%d"), ratios=dict(ratios))
    whole = known.model_copy(update={"processor": {**known.processor, kind: found}})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(whole.model_dump(by_alias=True), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


# --------------------------------------------------------------------------------------------------------- the programs
def decoding(made: Engine, tokens: int = 3) -> Callable[[], object]:
    """Decodes `tokens` tokens, each time after the same three."""

    def work() -> None:
        made.generate([2, 3, 4], Options(max_tokens=1 + tokens, ignore_eos=True)).result()

    return work


K, N = 6912, 1152  # the feed-forward output of gemma3-1b


@contextmanager
def product() -> Iterator[Callable[[], object]]:
    """Our kernel: one row times a Q4_0 matrix [N, K], int8 activations."""
    from hybrid.harness.cases import Case
    from hybrid.kernels.vulkan.device import open_device
    from hybrid.perf.op import repeated
    from hybrid.spec import load_op

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

    from hybrid.core.plan import Plan, TensorDecl
    from hybrid.core.plan import Step as PlanStep
    from hybrid.core.tensor import Tensor
    from hybrid.kernels.vulkan.device import open_device

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
