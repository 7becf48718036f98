"""From a layer's attention output to the next layer's q, k and v, or its attention, in one dispatch: layer.slang."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor
from hybrid.kernels.vulkan.types import SCALED

OPS = ("linear", "add_rmsnorm", "fused_ffn", "add_rmsnorm", "fused_qkv")
WITH_OWN = (*OPS[:3], "add_norm", "per_layer_input", *OPS[3:])
"""With the per-layer input (Gemma 4)."""
QUERIES, QUERIES_WITH_OWN = (*OPS[:-1], "linear"), (*WITH_OWN[:-1], "linear")
"""Layers that project queries alone, or keys that are also the values."""
LAST, LAST_WITH_OWN = OPS[:-1], WITH_OWN[:-1]
"""The last layer, without a projection."""
# Data dependencies of the steps: (step, its output) and (later step, its input).
START = (((0, "y"), (1, "a")), ((1, "y"), (2, "x")), ((1, "sum"), (3, "residual")), ((2, "y"), (3, "a")))
OWN_EDGES = (((3, "y"), (4, "x")), ((3, "sum"), (5, "residual")), ((4, "y"), (5, "a")))
ROWS, PIECE, BLOCK, HELD = (
    4,
    32,
    32,
    8,
)  # these repeat layer.slang's: rows of a quad, a piece, a block of h; floats per thread
BLOCK_WORDS = 10  # as in workgroup_flags.slang: flag words of a block of h
ATTENTION_BINDINGS, ATTENTION_PUSH = (
    13,
    40,
)  # layer_attention.slang's, behind the flags and in the end of the push constants
ATTENDING = "a layer's dispatch that ends with the next attention"
"""Key of the latest one in Recorder.noted."""
NO_ATTENTION = {
    "ATTENDS": 0,
    "LANES": 16,
    "OUTPUT": 2,
    "MERGED": 8,
    "QUADS": 8,
    "Q_HEADS": 1,
    "KV_HEADS": 1,
    "BLOCK": 32,
    "AHEAD": 1,
    "PROJECTIONS": 0,
    "ROTARY": 8,
    "VALUE_NORM": 0,
}
"""Of the kernel with attention, where it does without."""
DEFAULT = {"workgroups": 0, "whole": 0, "threads": 256, "attention": 0, "min_split": 48, "ahead": 4}


@dataclass(frozen=True, slots=True)
class Layer:
    """One dispatch before it is recorded: kernel, constants, bindings, push constants, flag words."""

    kernel: str
    constants: Mapping[str, int]
    reads: Sequence[Slice]
    writes: Sequence[Slice]
    push: bytes
    words: int
    use: Mapping[str, int]
    shared_bytes: int

    @property
    def grid(self) -> int:
        return self.constants["GRID"]

    def record(self, rec: Recorder, reads: Sequence[Slice] = (), writes: Sequence[Slice] = ()) -> None:
        """Record the dispatch. `reads`, `writes`: bindings after the flags."""
        kernel, made = rec.kernel(self.kernel, **self.constants), [*self.writes, rec.counters(self.words)]
        rec.dispatch(
            kernel,
            [*self.reads, *reads],
            [*made, *writes],
            self.push,
            (self.grid,),
            resident=True,
            order=(*self.reads, *made, *reads, *writes),
        )


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """a = o @ w_o.T; r, z = add and norm; h, m = feed-forward; s, y = add and norm; qkv = y @ w.T if present; for one
    row. The per-layer input comes in between if present. False where the kernel does not fit (`prepare`)."""
    layer = prepare(rec, steps, t)
    if layer is None:
        return False
    attending: Layer | None = rec.noted.get(ATTENDING)
    if attending is not None and same_but_attention(layer, attending):
        layer = replace(layer, kernel=attending.kernel, constants=attending.constants)
    more = ATTENTION_BINDINGS if layer.kernel.endswith((".own", ".f16")) else 0
    if len(layer.reads) + len(layer.writes) + 2 + more > rec.device.storage_buffers:
        return False
    if more:  # the kernel with attention, which does without it here: its other bindings must hold some buffer
        layer = replace(layer, push=layer.push + bytes(ATTENTION_PUSH))
    layer.record(rec, writes=[layer.writes[0]] * more)
    return True


def same_but_attention(layer: Layer, attending: Layer) -> bool:
    """Whether this layer can use the pipeline of a layer that ends with the next attention, with no KV splits. Using
    one pipeline avoids loading another's code into the multiprocessors (`both_kinds`)."""
    sizes = [(name, value) for name, value in layer.constants.items() if name not in (*NO_ATTENTION, "POOL")]
    alike = attending.kernel in (layer.kernel, f"{layer.kernel}.f16")
    return alike and all(attending.constants.get(name) == value for name, value in sizes)


def own_input(steps: Sequence[Step]) -> bool:
    return steps[3].op == "add_norm"


def prepare(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> Layer | None:
    """The layer's dispatch, or None where the kernel does not fit: unconnected steps, several rows, weights of
    different types or in several chunks, activations other than q8_act, sparse gates, a tuning table that does not ask
    for it, or a program that excludes waits."""
    own = t[3:5] if own_input(steps) else ()
    last = 3 + len(own)
    (out, add, ffn), then, qkv = t[:3], t[last], t[last + 1] if len(steps) > last + 1 else None
    norms = [steps[i] for i in ((1, 3, 5) if own else (1, 3))]
    weights = [out["w"], ffn["w_gate_up"], ffn["w_down"]]
    activations = [out["x"], add["y"], ffn["h"], then["y"]]
    projected, edges = (
        ffn["y"],
        [*START, *(OWN_EDGES if own else ())],
    )  # without a projection its binding must hold some buffer
    if qkv:
        weights.append(qkv["w"])
        projected = qkv["y" if steps[last + 1].op == "linear" else "qkv"]
        edges.append(((last, "y"), (last + 1, "x")))
    if own:
        weights += [own[1]["w_gate"], own[1]["w_proj"]]
        activations += [own[0]["y"], own[1]["h"]]
    follow = all(steps[i].args[a] == steps[j].args[b] for (i, a), (j, b) in edges)
    kinds = {chunk.dtype for w in weights for chunk in w.chunks}
    alone = all(len(w.chunks) == 1 for w in weights) and len(kinds) == 1
    if not (
        rec.cooperative and follow and alone and out["x"].shape[0] == 1 and {x.dtype for x in activations} == {"q8_act"}
    ):
        return None
    (kind,), device = kinds, rec.device
    attended, rows = out["x"].shape[-1], projected.shape[-1] if qkv else 0
    (first, second), (rows_first, rows_second) = both_kinds(rec.steps, steps, attended, rows)
    sizes = {
        "HIDDEN": add["a"].shape[-1],
        "ATTENDED": first,
        "ATTENDED_ELSE": second,
        "FFN": ffn["h"].shape[-1],
        "QKV": rows_first,
        "QKV_ELSE": rows_second,
    }
    if own:
        sizes["OWNED"] = own[1]["h"].shape[-1]
    use = device.tuning.choose("layer", DEFAULT, w=kind, hidden=sizes["HIDDEN"], own=sizes.get("OWNED", 0))
    threads = min(use["threads"], device.max_threads)
    grid = min(use["workgroups"], device.cores, *most_workgroups(sizes))
    if grid and use["whole"]:
        grid = whole_shares(rec.steps, grid)
    shares = most_shares(sizes, grid, threads // device.subgroup_size, device.subgroup_size) if grid else 0
    widest = max(sizes["HIDDEN"], first, second)
    shared = 4 * shares + widest // PIECE * (PIECE + 8) + 2 * threads
    if not (
        grid
        and shared <= device.shared_bytes
        and sizes["HIDDEN"] <= HELD * threads
        and not (rows_first | rows_second) % ROWS
    ):
        return None
    if own and (kind not in SCALED or sizes["OWNED"] > min(threads, widest)):
        return None
    one_eps = len({s.attrs["eps"] for s in norms}) == 1
    if steps[2].attrs.get("sparsity", 0.0) or norms[0].attrs.get("scale", 1.0) != 1.0 or not one_eps:
        return None
    if not qkv:
        weights.insert(3, ffn["w_gate_up"])  # of which the kernel loads a piece, for nothing
    between = own[0] if own else then  # the norm after the feed-forward
    reads = [out["x"], add["residual"], add["w_post"], add["w_next"], between["w_post"], then["w_next"], *weights]
    made = [add["a"], add["sum"], add["y"], ffn["h"], ffn["y"], then["sum"], then["y"], projected]
    constants = {
        "SUBGROUP": device.subgroup_size,
        "THREADS": threads,
        "GRID": grid,
        "SHARES": shares,
        "WIDEST": widest,
        "POLLS": device.polls,
        **sizes,
    }
    push = struct.pack(
        "<fIfI",
        norms[0].attrs["eps"],
        CONTROL[steps[0].extent],
        norms[-1].attrs.get("scale", 1.0),
        int(attended != first) | int(rows != rows_first) << 1,
    )
    if own:
        reads += [then["w_post"], own[1]["ple"]]
        made += [own[0]["sum"], own[0]["y"], own[1]["h"], own[1]["y"]]
        push += struct.pack("<I", int(steps[4].attrs["layer"]) * sizes["OWNED"])
        constants |= {
            **NO_ATTENTION,
            "POOL": max(-(-shares // 4), threads // device.subgroup_size * NO_ATTENTION["QUADS"]),
        }
    return Layer(
        f"layer.{kind}.own" if own else f"layer.{kind}",
        constants,
        [p for x in reads for p in x.parts],
        [p for x in made for p in x.parts],
        push,
        flag_words(sizes, grid),
        use,
        shared,
    )


def layers(steps: Sequence[Step]) -> Iterator[tuple[Step, int, int]]:
    """(feed-forward step, columns of w_o, projected rows) of each layer of a plan that such a dispatch may record."""
    for i, (out, add, ffn) in enumerate(zip(steps, steps[1:], steps[2:], strict=False)):
        if (out.op, add.op, ffn.op) != OPS[:3]:
            continue
        own = [s.op for s in steps[i + 3 : i + 4]] == ["add_norm"]
        last = steps[i + len(WITH_OWN if own else OPS) - 1 :][:1]
        yield ffn, out.bind["K"], sum(projected_rows(s) for s in last)


def projected_rows(step: Step) -> int:
    """Projected rows of the step that ends a layer; 0 where it projects nothing."""
    b = step.bind
    return b["N"] if step.op == "linear" else (b["HQ"] + 2 * b["HK"]) * b["D"] if step.op == "fused_qkv" else 0


def both_kinds(plan: Sequence[Step], steps: Sequence[Step], attended: int, rows: int) -> list[tuple[int, int]]:
    """(columns of w_o, projected rows) of the two most frequent layer kinds with this feed-forward, so that one
    pipeline serves both.

    Loading a second pipeline's code makes a layer of Gemma 4 E2B half as long again. Both entries are this layer's
    where
    there are not two kinds, or this is a third."""
    alike = [sizes for ffn, *sizes in layers(plan) if ffn.bind == steps[2].bind]
    found = []
    for mine, values in zip((attended, rows), zip(*alike, strict=True), strict=True) if alike else ():
        two = [v for v, _ in Counter(v for v in values if v).most_common(2)]
        found.append((two[0], two[1]) if mine in two and len(two) == 2 else (mine, mine))
    return found or [(attended, attended), (rows, rows)]


def most_workgroups(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Workgroup counts at which each has a quad of rows of every product and a whole block of h."""
    rows = (sizes["HIDDEN"], sizes["QKV"], sizes["QKV_ELSE"])
    return tuple(n for n in (*(r // ROWS for r in rows), sizes["FFN"] // BLOCK) if n)


def whole_shares(plan: Sequence[Step], most: int) -> int:
    """The most workgroups, up to `most`, that share the blocks of h of every layer of the plan evenly."""
    blocks = math.gcd(*(s.bind["F"] // BLOCK for s in plan if s.op == "fused_ffn"))
    return next(n for n in range(most, 0, -1) if not blocks % n)


def flag_words(sizes: Mapping[str, int], grid: int) -> int:
    """Words of the inter-workgroup flags (layer_flags.slang)."""
    blocks = sizes["FFN"] // BLOCK
    words = 4 + 2 * sizes["HIDDEN"] + BLOCK_WORDS * blocks + BLOCK * (blocks % grid)
    return words + (sizes["HIDDEN"] + sizes["OWNED"] if "OWNED" in sizes else 0)


def most_shares(sizes: Mapping[str, int], grid: int, subgroups: int, lanes: int) -> int:
    """Most partial row sums of a workgroup: one per row and subgroup that has pieces of the row."""
    hidden, ffn = sizes["HIDDEN"], sizes["FFN"]
    # Columns, quads of rows, and quads that must stay together.
    products = [(hidden, ffn // 2, BLOCK // 2), (ffn, hidden // ROWS, 1)]
    products += [(sizes[name], hidden // ROWS, 1) for name in ("ATTENDED", "ATTENDED_ELSE")]
    products += [(hidden, sizes[name] // ROWS, 1) for name in ("QKV", "QKV_ELSE")]
    if own := sizes.get("OWNED"):
        products += [(hidden, own // ROWS, 1), (own, hidden // ROWS, 1)]
    return max(
        most_quads(quads, per, grid) * ROWS * min(subgroups, -(-(k // PIECE) // lanes)) for k, quads, per in products
    )


def most_quads(quads: int, per: int, grid: int) -> int:
    """Most quads of one workgroup: an equal number in multiples of `per`, plus its share of the rest."""
    own = quads // per // grid * per
    return own + -(-(quads - own * grid) // grid)
