"""Gated numbers that do not depend on a machine's load (perf.gate.ratios has those that do a little).

Each group is a function that returns numbers by name; perf/gates/GROUP.toml holds what is expected of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from hybrid.core.device import Counters
from hybrid.core.errors import SpecError
from hybrid.engine.handle import Handle
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.kernels.vulkan import modules
from hybrid.kernels.vulkan.dry import DryDevice, count
from hybrid.kernels.vulkan.kernel import SPIRV
from hybrid.perf.roofline.work import Planned, subject
from hybrid.spec.schedule import CAPABILITIES

Numbers = dict[str, float]
COUNTS = tuple(f.name for f in fields(Counters))
WARM, STEPS, PROMPT = 10, 10, 24  # tokens within a block: a new one takes a message


def plans() -> Numbers:
    """Of plans alone, no device needed: dispatches, barriers and bytes of a pass, memory by purpose; under `units` as
    planned for a device with matrix units, under `hopper` as recorded for an H100 or H200, TLB prefetches included."""
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
    for name in ("gemma3-4b", "gemma3-27b", "gemma3n-e2b", "gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-26b-a4b"):
        large, device = subject(name, "q4_0", capabilities=CAPABILITIES), hopper()
        assert isinstance(large, Planned)
        for rows in (1, 32):
            counts = count(large.plan("decode", rows, rows, 512, rows), device)
            found[f"{name}.hopper.decode.{rows}.dispatches"] = sum(counts.dispatches.values())
            found[f"{name}.hopper.decode.{rows}.barriers"] = sum(counts.barriers.values())
    return found


def hopper() -> DryDevice:
    """An H100 or H200 by NVIDIA's driver, as far as bindings ask: its tuning table, multiprocessors and limits."""
    return DryDevice(
        features=lambda feature: True, tuning="nvidia", cores=132, shared_bytes=49152, storage_buffers=1 << 20
    )


def spirv() -> Numbers:
    """Bytes of every SPIR-V module."""
    names = json.loads((SPIRV / "manifest.json").read_text())
    return {name: len(modules.read(SPIRV, name)) for name in names}


def cpu_driver() -> str:
    """The selector of Mesa's CPU driver, on which counts are the same everywhere. SpecError where there is none."""
    from hybrid.kernels.vulkan.api import VulkanUnavailable
    from hybrid.kernels.vulkan.instance import list_devices

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
    from hybrid.kernels.vulkan.device import open_device

    bindings = options.pop("bindings", None)
    with open_device(cpu_driver(), bindings=bindings, validation=False) as device:
        checkpoint = random_checkpoint("gemma3-270m", "q4_0", None, 2, 2048)
        yield Engine(checkpoint, device, EngineConfig(ctx=256, n_tokens=2048, **options))


def token(made: Engine) -> None:
    """One token, for a reader that runs the passes."""
    made.drive_step()


Step = Callable[[Engine], object]


def sequence(made: Engine, prompt: Sequence[int], most: int) -> Handle:
    """A request that decodes `most` tokens, without a cached prefix."""
    request = Request(0, prompt, Options(max_tokens=most, ignore_eos=True))
    request.private = True
    return made.drive(request)


def engine(step: Step = token, **options: Any) -> Numbers:
    """Of a running engine: what a token and a prompt cost after warm-up, what making it ready costs, Python calls."""
    with small_engine(**options) as made:
        made.runner.warm_up(PROMPT)
        ready = made.counters.copy()
        found = {
            f"ready.{n}": getattr(ready, n) for n in ("pipelines", "recordings", "descriptor_writes", "allocations")
        }
        for _ in range(2):  # what is done once per process is done by the first
            before = made.counters.copy()
            sequence(made, range(2, 2 + PROMPT), 1).result()
        found |= _counts("prefill", made.counters.minus(before), 1)
        found |= tokens(made, step)
        device: Any = made.device
        return {**found, **{f"memory.{purpose}": size for purpose, size in device.memory().items()}}


def tokens(made: Engine, step: Step = token) -> Numbers:
    """Cost of one more token of a sequence."""
    running = sequence(made, range(2, 2 + PROMPT), WARM + STEPS + 8)
    for _ in range(WARM):
        step(made)
    before = made.counters.copy()
    for _ in range(STEPS):
        step(made)
    found = _counts("token", made.counters.minus(before), STEPS)
    found["token.python_calls"] = count_calls(lambda: step(made))
    made.finish([running.request])
    return found


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


def gfx1103(share: int = 1) -> dict[str, Mapping[str, Any]]:
    """Mesa version -> table (share: see perf.isa.compiled). The rules of perf/isa/isa.toml are part of the gate."""
    from hybrid.perf.isa import compiled

    return {version: table for version, (table, _) in compiled(share).items()}


GROUPS: dict[str, Callable[[], Numbers]] = {"plans": plans, "spirv": spirv, "engine": engine}
