"""Loading a model: its tensors stored on the device, and what that took: seconds by phase, bytes uploaded, host
memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybrid.checkpoint import Checkpoint
from hybrid.core.device import Device
from hybrid.core.plan import Plan
from hybrid.core.tensor import Tensor
from hybrid.engine.weights import upload
from hybrid.planning.footprint import every_size
from hybrid.planning.passes import PassSizes
from hybrid.planning.pipeline import outlasting
from hybrid.planning.planner import Target
from hybrid.planning.rope import rope_of
from hybrid.quant.reencode import Reencoded

_STATUS = Path("/proc/self/status")
_GIB = 1 << 30


def resident() -> dict[str, int]:
    """Bytes of this process that are in memory now, from /proc: `anonymous` (its own), `file` (mapped files, page cache
    that counts as the process's), `shared`, and the `peak` of their sum. Empty on systems that do not say."""
    names = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared", "VmHWM": "peak"}
    try:
        lines = [line.split() for line in _STATUS.read_text().splitlines()]
    except OSError:
        return {}
    return {names[w[0][:-1]]: 1024 * int(w[1]) for w in lines if len(w) > 1 and w[0][:-1] in names}


def peak_resident() -> int:
    """The most memory that this process has had at once, in bytes; 0 on systems that do not say."""
    found = resident().get("peak")
    if found is not None:
        return found
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of each phase, in order; bytes_up were brought to the device in phase `weights`. Memory in bytes:
    `peak_host` is the whole process's, libraries' files included; `peak_anonymous` the most of its own that was seen
    between two tensors, None on systems that do not say."""

    seconds: Mapping[str, float]
    bytes_up: int
    peak_host: int
    peak_anonymous: int | None

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def line(self) -> str:
        """For --stats."""
        weights = self.seconds.get("weights", 0.0)
        rate = f" ({self.bytes_up / 1e9:.2f} GB, {self.bytes_up / weights / 1e9:.2f} GB/s)" if weights > 0 else ""
        phases = ", ".join(f"{k} {s:.2f}{rate if k == 'weights' else ''}" for k, s in self.seconds.items())
        own = "" if self.peak_anonymous is None else f", of it {self.peak_anonymous / _GIB:.2f} its own"
        return f"load: {self.total_seconds:.2f} s ({phases}), peak host memory {self.peak_host / _GIB:.2f} GiB{own}"


class LoadClock:
    """Collects a Load. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes_up = 0
        self._anonymous: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.sample()

    def sample(self) -> None:
        """Note the memory held now, if it is the most so far."""
        now = resident().get("anonymous")
        if now is not None:
            self._anonymous = max(now, self._anonymous or 0)

    def load(self) -> Load:
        return Load(dict(self.seconds), self.bytes_up, peak_resident(), self._anonymous)


def load_tensors(
    checkpoint: Checkpoint,
    device: Device,
    target: Target,
    sizes: PassSizes,
    plans: Sequence[Plan],
    clock: LoadClock,
    progress: bool,
) -> tuple[Reencoded, ...]:
    """Store every tensor that outlives a pass of `plans` (the largest of each kind) and reserve memory for their
    activations and for the scratch of the kernels of all `sizes`. Returns what was re-encoded (weights.upload)."""
    decls = outlasting(plans)
    with clock.phase("cache"):
        for decl in decls.values():
            if decl.role == "rope":
                assert decl.layer is not None
                device.store(decl, Tensor.of(rope_of(target.hparams.layers[decl.layer], target.cache.ctx)))
            elif decl.kind != "weight":
                device.store(decl)
        # Where passes overlap the largest plans are enough: a second device says now what it lacks for them.
        every = plans if device.pipeline_depth > 1 else every_size(target, sizes)
        device.reserve(max(p.arena_bytes for p in plans), every)
    weights = [d for d in decls.values() if d.kind == "weight" and d.role != "rope"]
    before = device.counters.bytes_up
    with clock.phase("weights"):
        reencoded = upload(checkpoint, device, weights, target.weights, progress, clock.sample)
    clock.bytes_up = device.counters.bytes_up - before
    return reencoded
