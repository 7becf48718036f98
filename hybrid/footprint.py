"""What a model takes on a device, by purpose, from plans alone: nothing is allocated and no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid.expand import WeightInfo
from hybrid.hparams import HParams
from hybrid.kv import CacheShape
from hybrid.lanes import in_lane, lanes_of, outlasting
from hybrid.passes import PassSizes, chunk_of, pass_sizes
from hybrid.planner import PrecisionName, Target, plan
from hybrid.spec.plan import Plan, TensorDecl
from hybrid.spec.schedule import Schedule, find_schedule


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device, each tensor padded as devices pad it."""

    weights: int
    tables: int
    """RoPE."""
    kv_global: int
    """Of layers that see the whole context."""
    kv_local: int
    """Of layers with a window: a ring of blocks, whatever the context."""
    state: int
    io: int
    """Tokens, positions, parameters, the ids chosen."""
    scratch: int
    """The arena that activations share."""
    beside: int = 0
    """What kernels take beside it: partial results, a weight's f16 numbers where it is unpacked before a product. Of the
    pass that takes most, which need not be the largest: few rows are cut into more parts."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def footprint(
    hparams: HParams,
    weights: Mapping[str, WeightInfo],
    *,
    batch: int = 1,
    context: int,
    chunk: int | None = None,
    precision: PrecisionName = "auto",
    kv: Any = "auto",
    capabilities: frozenset[str] = frozenset(),
    beside: Callable[[Plan], int] = lambda plan: 0,
    schedule: Schedule | None = None,
) -> Footprint:
    """As an engine with `batch` slots of `context` positions and prefill passes of `chunk` rows (default: what suits the
    capabilities) would hold it on a device that has `capabilities`, whose kernels take `beside(plan)` bytes of their own.
    schedule: another than the family's. Where it places steps on a second device, this is what the main one holds, rows and
    activations of every pass in flight included.

    Logits and hidden states that are read back (model.logits, model.hidden_states) are not in it. ValueError for a
    batch or context that cannot be.
    """
    if not 1 <= context <= hparams.context_length:
        raise ValueError(f"a context of {context} is outside 1..{hparams.context_length}, which the model was made for")
    sizes = pass_sizes(hparams, context, batch, chunk or chunk_of(capabilities))
    rows, outs, logits, hidden = sizes.rows[-1], sizes.outs[-1], sizes.logits, sizes.hidden
    schedule = schedule or find_schedule(hparams.family)
    lanes = lanes_of(schedule)
    cache = CacheShape(context, 0 if all(hparams.layer_is_global) else hparams.window, min(lanes * rows, context), batch)
    target = Target(schedule, hparams, weights, cache, hparams.vocab, precision, kv, capabilities=capabilities)
    prefill = plan(target, rows, outs, "prefill")
    passes = [
        prefill,
        plan(target, logits, logits, "prefill", sample=False, layout=prefill),
        plan(target, hidden, 0, "prefill", capture=True, layout=prefill),
    ]
    plans = [plan(target, outs, outs, "decode")]
    plans += [in_lane(p, lane, schedule, prefill.arena_bytes) for p in passes for lane in range(lanes)]
    return _sum(plans, hparams, max(map(beside, [*plans, *every_size(target, sizes)])))


def every_size(target: Target, sizes: PassSizes) -> Iterator[Plan]:
    """Plans of every number of rows that an engine compiles, of the first layers only: up to where each kind of layer
    (what it sees, and the types of its weights) has been met. What kernels take beside the arena is taken by one step at
    a time, so these tell the most of it, in a tenth of the time. Not for several lanes, whose plans are cut anew."""
    if lanes_of(target.schedule) > 1:
        return
    kinds: dict[object, int] = {}
    for layer, seen in enumerate(target.hparams.layer_is_global):
        prefix = f"blk.{layer}."
        own = [(name[len(prefix) :], w.dtype, w.pieces) for name, w in target.weights.items() if name.startswith(prefix)]
        kinds.setdefault((seen, *sorted(own)), layer)
    count = max(kinds.values()) + 1
    few = replace(target.hparams, n_layers=count, layer_is_global=target.hparams.layer_is_global[:count])
    small = replace(target, hparams=few)
    for outs in sizes.outs:
        yield plan(small, outs, outs, "decode")
    for rows in sizes.rows:
        yield plan(small, rows, max((o for o in sizes.outs if o <= rows), default=1), "prefill")
    yield plan(small, sizes.logits, sizes.logits, "prefill", sample=False)
    yield plan(small, sizes.hidden, 0, "prefill", capture=True)


def _sum(plans: list[Plan], hparams: HParams, beside: int) -> Footprint:
    decls = outlasting(plans)
    held = dict.fromkeys(("weights", "tables", "kv_global", "kv_local", "state", "io"), 0)
    for name, decl in decls.items():
        held[_purpose(decl, name, hparams)] += decl.nbytes
    return Footprint(**held, scratch=max(p.arena_bytes for p in plans), beside=beside)


def _purpose(decl: TensorDecl, name: str, hparams: HParams) -> str:
    if decl.kind == "weight":
        return "tables" if name.startswith("rope.") else "weights"
    if decl.kind == "state" and name.startswith("kv."):
        return "kv_global" if hparams.layer_is_global[int(name.split(".")[1])] else "kv_local"
    return decl.kind
