"""Memory footprint of a model on a device, by purpose, computed from plans without allocating or reading weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid.core.hparams import HParams
from hybrid.core.names import in_layer, layer_of, part_of
from hybrid.core.plan import TARGET_EMBEDDING, Plan
from hybrid.planning.cache import CacheShape
from hybrid.planning.cost import purpose
from hybrid.planning.expand import WeightInfo
from hybrid.planning.passes import PassSizes, chunk_of, pass_sizes
from hybrid.planning.pipeline import for_pipeline_slot, outlasting, pipeline_depth
from hybrid.planning.planner import PrecisionName, Target, plan
from hybrid.spec.schedule import Schedule, find_schedule
from hybrid.spec.step import OPTIONS


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device, with the device's padding of each tensor."""

    weights: int
    tables: int
    """RoPE tables."""
    kv_global: int
    """KV cache of layers with full attention."""
    kv_local: int
    """KV cache of layers with a window: a ring of blocks, independent of the context."""
    state: int
    io: int
    """Tokens, positions, parameters, sampled ids."""
    scratch: int
    """The activation arena."""
    beside: int = 0
    """Kernels' scratch memory: split-K partials, weights dequantised to f16. The maximum over all passes; a pass of few
    rows may need more than a larger one, with more splits."""
    spill: int = 0
    """Bytes of `weights` that may be in host memory."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values()) - self.spill

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def no_scratch(plan: Plan) -> int:
    """Kernel scratch bytes of a plan, for devices without kernel scratch."""
    return 0


def no_second_layout(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight's second layout, for devices without second layouts."""
    return 0


def laid_out_again(
    hparams: HParams, weights: Mapping[str, WeightInfo], again: Callable[[str, tuple[int, ...]], int]
) -> int:
    """Total bytes of second layouts of a model's weights. again: Device.second_layout."""
    found = (weights[in_layer(i, "ffn_down.weight")] for i, layer in enumerate(hparams.layers) if layer.sparsity)
    return sum(again(w.dtype, w.shape) for w in found)


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
    beside: Callable[[Plan], int] = no_scratch,
    again: Callable[[str, tuple[int, ...]], int] = no_second_layout,
    schedule: Schedule | None = None,
    device: str = "cpu",
) -> Footprint:
    """The footprint of an engine with `batch` slots of `context` positions and prefill passes of `chunk` rows (default:
    by the capabilities).

    capabilities: of the device. beside: kernel scratch bytes of a plan. again: Device.second_layout; its bytes count as
    weights. schedule: instead of the family's. If it places steps on a second device, the result is for the main one
    (`device`): it includes rows and activations of every pass in flight, but not weights stored on the second device.
    Excludes read-back logits and hidden states (model.logits, model.hidden_states). ValueError for an invalid batch or
    context.
    """
    if not 1 <= context <= hparams.context_length:
        raise ValueError(f"a context of {context} is outside 1..{hparams.context_length}, which the model was made for")
    sizes = pass_sizes(hparams, context, batch, chunk or chunk_of(capabilities))
    rows, outs, logits, hidden = sizes.rows[-1], sizes.outs[-1], sizes.logits, sizes.hidden
    schedule = schedule or find_schedule(hparams.family)
    depth = pipeline_depth(schedule)
    cache = CacheShape.of(hparams, context, batch, rows)
    target = Target(schedule, hparams, weights, cache, hparams.vocab, precision, kv, device, capabilities)
    target, times = thinned(target) if depth == 1 else (target, (1,) * hparams.n_layers)
    prefill = plan(target, rows, outs, "prefill", options=OPTIONS)
    passes = [
        prefill,
        plan(target, logits, logits, "prefill", sample=False, layout=prefill),
        plan(target, hidden, 0, "prefill", capture=True, layout=prefill),
    ]
    plans = [plan(target, outs, outs, "decode", options=OPTIONS)]
    plans += [for_pipeline_slot(p, i, prefill.arena_bytes) for p in passes for i in range(depth)]
    others = () if beside is no_scratch else tuple(every_size(target, sizes))
    held = _sum(plans, target.hparams, times, max(map(beside, others or plans)))
    return replace(held, weights=held.weights + laid_out_again(hparams, weights, again))


def thinned(target: Target, each: int = 2) -> tuple[Target, tuple[int, ...]]:
    """The model reduced to `each` layers of each kind and the layers whose caches they read, and how many layers each
    represents. Layers are of one kind if their numbers and their weights' types and shapes are equal. The reduced plan
    suffices: layers of one kind differ only in names, and no activation lives beyond the next layer."""
    kinds: dict[object, list[int]] = {}
    own: dict[int, list[tuple[str, WeightInfo]]] = {}
    for name, info in target.weights.items():
        layer = layer_of(name)
        if layer is not None:
            own.setdefault(layer, []).append((part_of(name), info))
    for layer, params in enumerate(target.hparams.layers):
        weights = ((n, i.dtype, i.shape, i.row_types) for n, i in sorted(own.get(layer, ())))
        kinds.setdefault((params.kind, *weights), []).append(layer)
    kept = {layer for of in kinds.values() for layer in of[:each]}
    sources = {target.hparams.layers[layer].kv_from for layer in kept}
    kept |= {source for source in sources if source is not None}
    times: dict[int, int] = {}
    for of in kinds.values():
        here = [layer for layer in of if layer in kept]
        times |= dict.fromkeys(here, 1)
        times[here[-1]] += len(of) - len(here)
    order = sorted(kept)
    left = {n: i for n, i in target.weights.items() if layer_of(n) is None}
    left |= {in_layer(new, rest): info for new, old in enumerate(order) for rest, info in own.get(old, ())}
    return replace(target, hparams=target.hparams.only(order), weights=left), tuple(times[k] for k in order)


def every_size(target: Target, sizes: PassSizes) -> Iterator[Plan]:
    """Plans of every row count that an engine compiles, reduced to one layer of each kind. They give the largest kernel
    scratch, since few rows may use more splits than many. Empty for overlapping passes: a multi-device cuts plans into
    segments and does not reserve their scratch."""
    if pipeline_depth(target.schedule) > 1:
        return
    target, _ = thinned(target, 1)
    for outs in sizes.outs:
        yield plan(target, outs, outs, "decode", options=OPTIONS)
    for rows in sizes.rows:
        yield plan(target, rows, max((o for o in sizes.outs if o <= rows), default=1), "prefill", options=OPTIONS)
    yield plan(target, sizes.logits, sizes.logits, "prefill", sample=False)
    yield plan(target, sizes.hidden, 0, "prefill", capture=True)


def _sum(plans: list[Plan], hparams: HParams, times: Sequence[int], beside: int) -> Footprint:
    """times: how many layers each of the plans' layers represents."""
    held = dict.fromkeys(("weights", "tables", "kv_global", "kv_local", "state", "io", "spill"), 0)
    for name, decl in outlasting(plans).items():
        lent = hparams.backbone and (decl.role == "kv" or name == TARGET_EMBEDDING)  # by the drafter's target
        if decl.device or lent:
            continue
        kind, layer = purpose(decl), layer_of(name)
        if kind == "kv" and decl.layer is not None:
            layer = decl.layer
            kind = "kv_local" if hparams.layers[layer].window else "kv_global"
        nbytes = decl.nbytes * (1 if layer is None else times[layer])
        held[kind] += nbytes
        held["spill"] += nbytes if decl.pool == "any" else 0
    return Footprint(**held, scratch=max(p.arena_bytes for p in plans), beside=beside)
