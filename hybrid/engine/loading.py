"""Loading a model: configuration, memory budget, upload of weights, and timing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import get_args

from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.checkpoint.classes import AS_STORED, class_of
from hybrid.checkpoint.families import EMBEDDING, is_exact
from hybrid.checkpoint.random import random_checkpoint
from hybrid.cli.progress import Advance, progress_bar
from hybrid.core.device import Device
from hybrid.core.dtypes import CACHE_CHOICES, DTYPES, WEIGHT_TYPES, WRITABLE_TYPES, CacheChoice, requantises
from hybrid.core.hparams import HParams
from hybrid.core.numeric import np
from hybrid.core.plan import TARGET_EMBEDDING, Plan, TensorDecl
from hybrid.core.tensor import Source, Tensor
from hybrid.core.units import show_bytes
from hybrid.devices.opening import Opened, beside
from hybrid.planning.cache import DEFAULT_CTX, MAX_SLOTS, CacheShape
from hybrid.planning.expand import WeightInfo
from hybrid.planning.footprint import Footprint, every_size, footprint, thinned
from hybrid.planning.passes import (
    CHUNK,
    PassSizes,
    capabilities_of,
    chunk_of,
    decode_buckets_of,
    fixed_rows,
    pass_sizes,
)
from hybrid.planning.planner import PrecisionName, Target, plan
from hybrid.planning.rope import rope_of
from hybrid.quant.codec import dequantise, quantise, row_blocks
from hybrid.quant.native import NATIVE, computed, native
from hybrid.quant.reencode import Reencoded, reencode, summary
from hybrid.spec.schedule import Schedule, find_schedule, named_schedule

MOST_DRAFTS = 16
SHARING = 4


def check_drafts(speculate: object) -> int:
    """A checked limit of drafts per pass. ValueError."""
    if speculate == "auto":
        return MOST_DRAFTS
    if isinstance(speculate, bool) or not isinstance(speculate, int | np.integer) or not 0 <= speculate <= MOST_DRAFTS:
        raise ValueError(f"speculate must be auto, or a number of draft tokens, 0 to {MOST_DRAFTS}, not {speculate!r}")
    return int(speculate)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """ValueError names the field and its range. None: decided by the model or the device."""

    precision: PrecisionName = "auto"
    """auto: quantised weights with int8 activations (f16 on matrix units) and an f16 KV cache, other weights in float32;
    exact: float32; fast: unquantised weights with f16 activations."""
    kv: CacheChoice = "auto"
    """Storage type of the KV cache; auto: by `precision`."""
    weights: str | None = None
    """Storage type that matrices are converted to while loading (default: the file's)."""
    requantize: bool = False
    """Whether `weights` applies to matrices that are quantised in another type."""
    ctx: int | None = None
    """Positions per sequence (default: the model's context, at most DEFAULT_CTX)."""
    slots: int = 1
    """Sequences that run at once."""
    blocks: tuple[int, int] = (0, 0)
    """KV blocks of global and of local layers (0: enough for `slots` sequences at full length)."""
    shared: bool = False
    """SHARING slots with the blocks of one full sequence, in place of `slots` and `blocks`."""
    memory: int | None = None
    """Memory budget in bytes on the device; the KV cache takes the rest, in place of `blocks`."""
    chunk: int | None = None
    """Most rows of a prefill pass (default: what fills the device's matrix units)."""
    n_tokens: int | None = None
    """Ids below this can be sampled (default: the tokenizer's size)."""
    deterministic: bool = False
    """One bucket for all passes, so that a row's bits depend neither on prompt chunks nor on batch neighbours. Slower:
    prompts run a few rows at a time; on cpu one row and one sequence."""
    drafts: int = 0
    """Most drafts of a pass (hybrid/engine/speculation.py)."""
    hidden: bool = False
    """Keep each sequence's last hidden state, for a drafter that reads it (hybrid/engine/assistant.py)."""
    profile: bool = False
    """Time every step (Runner.trace); waits after each pass."""

    def __post_init__(self) -> None:
        for name, known in (("kv", CACHE_CHOICES), ("precision", get_args(PrecisionName))):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if not isinstance(self.slots, Integral) or not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1..{MAX_SLOTS}, not {self.slots!r}")
        if not isinstance(self.drafts, Integral) or not 0 <= self.drafts <= MOST_DRAFTS:
            raise ValueError(f"drafts must be 0..{MOST_DRAFTS}, not {self.drafts!r}")
        for name in ("ctx", "chunk", "n_tokens", "memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or (value < 1 and name != "ctx")):
                raise ValueError(f"{name} must be a positive integer, or None for the default, not {value!r}")

    def context(self, hparams: HParams) -> int:
        """Positions per sequence for a model. ValueError beyond the model's context."""
        ctx = min(hparams.context_length, DEFAULT_CTX) if self.ctx is None else self.ctx
        if not 1 <= ctx <= hparams.context_length:
            raise ValueError(
                f"ctx {ctx} is outside 1..{hparams.context_length}, the context that the model was made for"
            )
        return ctx


def sizes_for(config: EngineConfig, hparams: HParams, device: Device) -> PassSizes:
    """Buckets. ValueError where the device cannot be deterministic with so many slots."""
    can = capabilities_of(device.has)
    chunk = chunk_of(can) if config.chunk is None else config.chunk
    fixed = fixed_rows(device.backend, config.slots) if config.deterministic else None
    return pass_sizes(
        hparams, config.context(hparams), config.slots, chunk, fixed, config.drafts, decode_buckets_of(can)
    )


def target_for(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: Device,
    schedule: Schedule,
    sizes: PassSizes,
    read: Target | None = None,
) -> Target:
    """What all plans share. read: of a drafter, the model whose cache and embedding it reads. ValueError for weight types
    that the device does not support."""
    hp = checkpoint.hparams
    weights = stored_types(checkpoint, config.weights, device.backend, config.requantize)
    if read is None:
        n_tokens = checkpoint.tokenizer.n_tokens if config.n_tokens is None else config.n_tokens
        cache = CacheShape.of(hp, config.context(hp), config.slots, sizes.rows[-1], config.blocks)
    else:
        n_tokens, cache = read.n_tokens, read.cache
        weights[TARGET_EMBEDDING] = read.weights[EMBEDDING]
    return Target(
        schedule,
        hp,
        weights,
        cache,
        min(hp.vocab, n_tokens),
        config.precision,
        config.kv,
        device.backend,
        capabilities_of(device.has),
        device.few_rows(hp.hidden, max(layer.n_experts for layer in hp.layers)),
    )


# --- the memory budget ------------------------------------------------------------------------------------------------

HEADROOM = 96 << 20
"""Headroom for undeclared allocations: staging, kernel scratch, command buffers."""
LEAST_KEPT = 16
"""Least capacity of the prefix cache, in full sequences."""


class OverBudget(ValueError):
    """The memory budget does not hold the model with one sequence, which takes `needs` bytes."""

    def __init__(self, text: str, needs: int) -> None:
        super().__init__(text)
        self.needs = needs


@dataclass(frozen=True, slots=True)
class Budget:
    """Split of the memory budget. sequences: capacity in full sequences of `context` positions."""

    memory: int
    weights: int
    """Those in device memory."""
    spill: int
    """Bytes of further weights, in host memory."""
    rest: int
    """Activations, tables, results, and HEADROOM."""
    blocks: tuple[int, int]
    kv: int
    sequences: float
    context: int

    def line(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv, "activations and the rest": self.rest}
        shown = ", ".join(f"{what} {show_bytes(n)}" for what, n in parts.items())
        return f"memory {show_bytes(self.memory)}: {shown}: {self.sequences:.1f} sequences of {self.context} tokens"


def budget_for(memory: int, held: Footprint, cache: CacheShape, room: int = 0) -> Budget:
    """The split of `memory` bytes. held: the engine's footprint with `cache`. room: bytes of host memory for weights
    that do not fit. OverBudget says what is missing and what would fit."""
    rest = held.total - held.weights - held.kv_global - held.kv_local + HEADROOM
    per_global, per_local = held.kv_global / cache.global_blocks, held.kv_local / cache.local_blocks
    one = per_global * cache.table + per_local * cache.ring
    spill = min(max(0, math.ceil(held.weights + rest + one) - memory), held.spill, room)
    weights = held.weights - spill
    left = memory - weights - rest
    if left < one:
        fits = int((left - per_local * cache.ring) // per_global) * cache.block if per_global else 0
        fix = f"ctx={fits} would fit" if fits >= cache.block else "use a smaller weight type"
        needs = int(weights + rest + one)
        beside = f" beside {show_bytes(spill)} in host memory" if spill else ""
        raise OverBudget(
            f"memory {show_bytes(memory)} is too little: weights take {show_bytes(weights)}{beside}, activations and "
            f"the rest {show_bytes(rest)}, one sequence of {cache.ctx} tokens {show_bytes(int(one))}, together "
            f"{show_bytes(needs)}: {fix}, or give it more",
            needs,
        )
    sequences = min(left / one, max(2 * cache.slots, LEAST_KEPT))
    blocks = (int(sequences * cache.table), int(sequences * cache.ring))
    kv = int(blocks[0] * per_global + blocks[1] * per_local)
    return Budget(memory, weights, spill, rest, blocks, kv, sequences, cache.ctx)


def with_budget(
    opened: Opened, schedule: Schedule, config: EngineConfig, checkpoint: Checkpoint
) -> tuple[Opened, Schedule, EngineConfig]:
    """The family's schedule, or of its fallbacks the first that fits the memory budget (or the device's free memory),
    else the smallest; `passed_over` says why. Where weights go to host memory, free memory becomes the configuration's
    budget."""
    memory = opened.device.available if config.memory is None else config.memory
    if memory is None:
        return opened, schedule, config
    refused: list[tuple[OverBudget, Schedule]] = []
    for found in (schedule, *map(find_schedule, schedule.schedule.without_room)):
        try:
            _, budget = fitted(replace(config, memory=memory), checkpoint, opened.device, found)
        except OverBudget as error:
            refused.append((error, found))
            continue
        if budget is not None and budget.spill:
            config = replace(config, memory=memory)
        break
    else:
        found = min(refused, key=lambda one: one[0].needs)[1]
    if found is schedule:
        return opened, schedule, config
    why = f"schedule {schedule.schedule.name}: {refused[0][0]}; so {found.schedule.name}"
    return beside(replace(opened, passed_over=(*opened.passed_over, why)), found), found, config


def fitted(
    config: EngineConfig, checkpoint: Checkpoint, device: Device, schedule: Schedule
) -> tuple[EngineConfig, Budget | None]:
    """The configuration with `blocks` set from `memory` or `shared`, and the precision that `device` demands."""
    hp = checkpoint.hparams
    if device.exact and config.precision == "auto":
        config = replace(config, precision="exact")
    alone = config.deterministic and device.backend == "cpu"  # runs one sequence at a time
    if config.shared and not alone:
        config = replace(config, slots=SHARING)
        rows = sizes_for(config, hp, device).rows[-1]
        one = CacheShape.of(hp, config.context(hp), 1, rows)
        config = replace(config, blocks=(one.table, one.ring))
    if config.memory is None:
        return config, None
    capabilities = capabilities_of(device.has)
    context, chunk = config.context(hp), chunk_of(capabilities) if config.chunk is None else config.chunk
    weights = stored_types(checkpoint, config.weights, device.backend, config.requantize)
    held = footprint(
        hp,
        weights,
        batch=config.slots,
        context=context,
        chunk=chunk,
        precision=config.precision,
        kv=config.kv,
        capabilities=capabilities,
        again=device.second_layout,
        schedule=schedule,
        device=device.backend,
    )
    rows = pass_sizes(hp, context, config.slots, chunk).rows[-1]
    cache = CacheShape.of(hp, context, config.slots, rows)
    budget = budget_for(config.memory, held, cache, device.host_room(config.memory))
    return replace(config, blocks=budget.blocks), budget


def placed(decls: Mapping[str, TensorDecl], spill: int) -> dict[str, TensorDecl]:
    """Tensors by name, each in its pool: of those that may be in `any`, the last ones in host memory, so many as hold
    `spill` bytes."""
    found, left = dict(decls), spill
    for name, decl in reversed(list(decls.items())):
        if decl.pool == "any":
            found[name] = replace(decl, pool="host" if left > 0 else "device")
            left -= decl.nbytes
    return found


# --- weights ----------------------------------------------------------------------------------------------------------

_ELEMENTS = 1 << 23  # made at once
_AT_ONCE = 1 << 19  # converted at once by a thread: 2 MB in float32


def stored_types(
    checkpoint: Checkpoint, weights: str | None, backend: str = "cpu", requantize: bool = False
) -> dict[str, WeightInfo]:
    """Dtype and shape of every tensor on the device: type `weights` for matrices, else the file's type, or where the backend
    does not support that, the nearest one.

    Vectors and the smallest matrices stay float32; `weights` leaves classes AS_STORED alone. ValueError for an unknown
    type, rows that are not whole blocks, and a matrix to be quantised again unless `requantize`.
    """
    makes = [t for t in WRITABLE_TYPES if t in computed(backend)]
    if weights is not None and weights not in WEIGHT_TYPES:
        raise ValueError(f"unknown weight type {weights!r}: use one of {', '.join(makes)}")
    if weights is not None and weights not in makes:
        raise ValueError(f"weights cannot be made {weights!r} for {backend}: use one of {', '.join(makes)}")
    found = {}
    for name in checkpoint.names:
        dtype, shape = checkpoint.dtype(name), tuple(checkpoint.shape(name))
        if is_exact(name, shape):
            found[name] = WeightInfo(dtype, shape)
            continue
        if weights is not None and class_of(name) not in AS_STORED:
            if shape[1] % DTYPES[weights].block:
                raise ValueError(
                    f"{name} {list(shape)} cannot be {weights}: its rows are not multiples of {DTYPES[weights].block}"
                )
            if not requantize and requantises(dtype, weights):
                raise ValueError(
                    f"{checkpoint.path}: tensor {name} is {dtype}: as {weights} it would be quantised twice, which costs "
                    "accuracy; load the unquantised model, leave weights out, or give --requantize (requantize=True)"
                )
            dtype = weights
        else:
            dtype = native(dtype, backend)
        found[name] = WeightInfo(dtype, shape)
    return found


def upload(
    checkpoint: Checkpoint,
    device: Device,
    decls: Iterable[TensorDecl],
    types: Mapping[str, WeightInfo],
    stored: Callable[[float], object] = lambda share: None,
    plans: Iterable[Plan] = (),
) -> tuple[Reencoded, ...]:
    """Upload every weight, reading and converting a few rows at a time. Returns the re-encoded tensors.

    `stored` is called after each tensor with the share that is done. plans: will use the weights.
    """
    changed: dict[str, float] = {}
    decls = list(decls)
    total, done = sum(d.nbytes for d in decls), 0
    with device.loading(sum(d.data_bytes for d in decls), plans):
        for decl in decls:
            sources = decl.sources or (decl.name,)
            makers = [m for s in sources for m in _makers(checkpoint, s, types[s].dtype, changed)]
            device.store(decl, parts=makers)
            done += decl.nbytes
            stored(done / total)
    return summary((checkpoint.dtype(n), types[n].dtype, types[n].shape, rounding) for n, rounding in changed.items())


def _makers(checkpoint: Checkpoint, name: str, dtype: str, changed: dict[str, float]) -> Iterator[Source]:
    """Reads rows of a tensor as `dtype`. Re-encoding notes its rounding error in `changed`."""
    stored = checkpoint.dtype(name)
    if stored == dtype and (len(checkpoint.shape(name)) == 1 or checkpoint.packed(name) is not None):
        yield lambda: checkpoint.packed(name) or checkpoint.tensor(name)
        return
    changes, (n, width) = NATIVE.get(stored) == dtype, checkpoint.shape(name)

    def make(start: int, stop: int) -> Tensor:
        out = Tensor.empty(dtype, (stop - start, width))
        with ThreadPoolExecutor() as threads:  # NumPy releases the GIL
            roundings = list(
                threads.map(lambda span: fill(out, start, *span), row_blocks(stop - start, width, _AT_ONCE))
            )
        if changes:
            changed[name] = max(changed.get(name, 0.0), *roundings)
        return out

    def fill(out: Tensor, start: int, first: int, last: int) -> float:
        rows = checkpoint.rows(name, start + first, start + last)
        try:
            made, rounding = reencode(rows) if changes else (convert(rows, dtype) if dtype != stored else rows, 0.0)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: tensor {name}: {error}") from None
        for to, part in zip(out.parts, made.parts, strict=True):
            to[first:last] = part
        return rounding

    for start, stop in row_blocks(n, width, _ELEMENTS):
        yield partial(make, start, stop)


def convert(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in another storage type, through float32."""
    return quantise(dequantise(tensor), dtype)


# --- what loading took ------------------------------------------------------------------------------------------------

_STATUS = Path("/proc/self/status")
_GIB = 1 << 30


def resident() -> dict[str, int]:
    """Resident bytes of this process from /proc: `anonymous`, `file` (mapped), `shared`, and the `peak` of their sum. Empty
    elsewhere."""
    names = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared", "VmHWM": "peak"}
    try:
        lines = [line.split() for line in _STATUS.read_text().splitlines()]
    except OSError:
        return {}
    return {names[w[0][:-1]]: 1024 * int(w[1]) for w in lines if len(w) > 1 and w[0][:-1] in names}


def peak_resident() -> int:
    """Peak resident bytes of this process; 0 if unknown."""
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
    """Seconds by phase; bytes_up: uploaded in phase `weights`. peak_host: peak resident bytes, libraries included;
    peak_anonymous: greatest sample between tensors, None if unknown."""

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


SHARES = {"open": 10, "tokenizer": 20, "device": 5, "plan": 3, "cache": 2, "weights": 50, "pipelines": 10}
"""Percent of a load's progress bar by phase."""


class LoadClock:
    """Collects a Load, and shows its progress. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes_up = 0
        self._anonymous: int | None = None
        self._bar: Advance | None = None
        self._phase, self._before, self._shown = "", 0, 0  # percent before the phase, and shown

    @contextmanager
    def shown(self, wanted: bool) -> Iterator[None]:
        """Show the phases within as one progress bar, if they take more than a second."""
        with progress_bar(100, "load", False, "%", after=1.0) if wanted else nullcontext(None) as self._bar:
            self.part(0.0)
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin, self._phase = time.perf_counter(), name
        if self._bar is not None:
            self._bar.name(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.part(1.0)
            self._before, self._phase = self._before + SHARES.get(name, 0), ""

    def part(self, share: float) -> None:
        """Note the share of the phase that is done."""
        self.sample()
        percent = self._before + int(share * SHARES.get(self._phase, 0))
        if self._bar is not None and percent > self._shown:
            self._bar(percent - self._shown)
            self._shown = percent

    def sample(self) -> None:
        """Sample the resident memory."""
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
    decls: Mapping[str, TensorDecl],
    clock: LoadClock,
) -> tuple[Reencoded, ...]:
    """Store `decls`, every tensor that outlives a pass of `plans` (the largest of each kind); reserve activations, and
    kernel scratch for all `sizes`. Returns the re-encoded tensors."""
    first = 1 if target.hparams.backbone else 0  # a drafter's queries stand one position after the last key
    with clock.phase("cache"):
        for decl in decls.values():
            if decl.role == "rope":
                assert decl.layer is not None
                device.store(decl, Tensor.of(rope_of(target.hparams.layers[decl.layer], target.cache.ctx, first)))
            elif decl.kind != "weight" or decl.name == TARGET_EMBEDDING:  # lent by the target
                device.store(decl)
        # With overlapping passes the largest plans suffice; a second device reports now what it lacks.
        every = plans if device.overlaps else every_size(target, sizes)
        device.reserve(max(p.arena_bytes for p in plans), every)
    weights = [d for d in decls.values() if d.kind == "weight" and d.role != "rope" and d.name != TARGET_EMBEDDING]
    before = device.counters.bytes_up
    with clock.phase("weights"):
        reencoded = upload(checkpoint, device, weights, target.weights, clock.part, plans)
    clock.bytes_up = device.counters.bytes_up - before
    return reencoded


# --- plans without loading --------------------------------------------------------------------------------------------


def plans_of_model(
    model: str,
    schedule: str | Schedule,
    ctx: int | None = None,
    slots: int | None = None,
    chunk: int | None = None,
    backend: str = "vulkan",
) -> Iterator[Plan]:
    """Plans of every bucket with two layers of each kind; other layers have steps of the same sizes.

    model: a file, a directory, a name on the hub, or of a sheet of specs/models. schedule: a shipped one's name, or a file.
    slots: sequences (default: as `load` has them, SHARING ones with the blocks of one). chunk: rows of a prefill pass
    (default: 512, that of devices without matrix units). backend: of the main device."""
    chosen = schedule if isinstance(schedule, Schedule) else named_schedule(schedule)
    with open_checkpoint(model) if Path(model).exists() or "/" in model else random_checkpoint(model) as checkpoint:
        hp = checkpoint.hparams
        context = EngineConfig(ctx=ctx, chunk=chunk).context(hp)
        sizes = pass_sizes(hp, context, slots or SHARING, CHUNK if chunk is None else chunk)
        cache = CacheShape.of(hp, context, slots or 1, sizes.rows[-1])
        cache = cache if slots else replace(cache, slots=SHARING, held=(cache.table, cache.ring))
        whole = Target(chosen, hp, stored_types(checkpoint, None, backend), cache, hp.vocab, device=backend)
        target, _ = thinned(whole)
        for count in sizes.decode:
            yield plan(target, count, count, "decode")
        for rows in sizes.rows:
            yield plan(target, rows, max(o for o in (*sizes.outs, 1) if o <= rows), "prefill")
        yield plan(target, sizes.logits, sizes.logits, "prefill", sample=False)
        yield plan(target, sizes.hidden, 0, "prefill", capture=True)
