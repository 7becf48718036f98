"""From one layer's attention to the next one's q, k and v, or to its attention, in one dispatch: layer.slang."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid.core.plan import CONTROL, Step
from hybrid.kernels.vulkan.memory import Slice
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OPS = ("linear", "add_rmsnorm", "fused_ffn", "add_rmsnorm", "fused_qkv")
WITH_OWN = (*OPS[:3], "add_norm", "per_layer_input", *OPS[3:])
"""With the layer's own input (Gemma 4)."""
QUERIES, QUERIES_WITH_OWN = (*OPS[:-1], "linear"), (*WITH_OWN[:-1], "linear")
"""Of layers that project queries alone, or keys that are the values too."""
LAST, LAST_WITH_OWN = OPS[:-1], WITH_OWN[:-1]
"""Of the last layer: nothing is projected."""
# Data dependencies of the steps: (step, its output) and (later step, its input).
START = (((0, "y"), (1, "a")), ((1, "y"), (2, "x")), ((1, "sum"), (3, "residual")), ((2, "y"), (3, "a")))
OWN_EDGES = (((3, "y"), (4, "x")), ((3, "sum"), (5, "residual")), ((4, "y"), (5, "a")))
OWN_TYPES = ("q8_0", "q4_0")
ROWS, PIECE, BLOCK, HELD = 4, 32, 32, 8  # these repeat layer.slang's: rows of a quad, a piece, a block of h; floats per thread
BLOCK_WORDS = 10  # and mailbox.slang's: mailbox words of a block of h
ATTENTION_BINDINGS, ATTENTION_PUSH = 13, 40  # layer_attention.slang's, behind the mailbox and in the end of the push constants
NO_ATTENTION = {"ATTENDS": 0, "LANES": 16, "OUTPUT": 2, "MERGED": 8, "QUADS": 8, "Q_HEADS": 1, "KV_HEADS": 1, "BLOCK": 32,
                "AHEAD": 1, "PROJECTIONS": 0, "ROTARY": 8, "VALUE_NORM": 0}  # fmt: skip
"""Of the kernel with attention, where it does without."""
DEFAULT = {"workgroups": 0, "threads": 256, "attention": 0, "min_split": 48, "ahead": 4, "poll_all": 0}


@dataclass(frozen=True, slots=True)
class Layer:
    """One dispatch, before it is recorded: kernel, constants, bindings, push constants, words of the mailbox."""

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

    def record(self, rec: Recorder, more: Sequence[Slice] = ()) -> None:
        """`more`: bindings after the mailbox."""
        kernel = rec.kernel(self.kernel, **self.constants)
        rec.dispatch(kernel, self.reads, [*self.writes, rec.counters(self.words), *more], self.push, (self.grid,), resident=True)


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """a = o @ w_o.T; r, z = add and norm; h, m = feed-forward; s, y = add and norm; qkv = y @ w.T where the steps have it, for one
    row; in between the layer's own input where they have one. False where the kernel does not fit (`prepare`)."""
    layer = prepare(rec, steps, t)
    more = ATTENTION_BINDINGS if own_input(steps) else 0
    if layer is None or len(layer.reads) + len(layer.writes) + 2 + more > rec.device.storage_buffers:
        return False
    if own_input(steps):  # the kernel with attention, which does without it here: its other bindings must hold some buffer
        layer = replace(layer, push=layer.push + bytes(ATTENTION_PUSH))
        layer.record(rec, [layer.writes[0]] * ATTENTION_BINDINGS)
    else:
        layer.record(rec)
    return True


def own_input(steps: Sequence[Step]) -> bool:
    return steps[3].op == "add_norm"


def prepare(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> Layer | None:
    """None where the kernel does not fit: these steps do not follow from one another, several rows, weights of different
    types or in several chunks, activations that are not q8_act, sparse gates, a device whose tuning table does not ask for it,
    or a program that excludes waits."""
    own = t[3:5] if own_input(steps) else ()
    last = 3 + len(own)
    (out, add, ffn), then, qkv = t[:3], t[last], t[last + 1] if len(steps) > last + 1 else None
    norms = [steps[i] for i in ((1, 3, 5) if own else (1, 3))]
    weights = [out["w"], ffn["w_gate_up"], ffn["w_down"]]
    activations = [out["x"], add["y"], ffn["h"], then["y"]]
    projected, edges = ffn["y"], [*START, *(OWN_EDGES if own else ())]  # without a projection its binding must hold some buffer
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
    if not (rec.cooperative and follow and alone and out["x"].shape[0] == 1 and {x.dtype for x in activations} == {"q8_act"}):
        return None
    (kind,), device = kinds, rec.device
    sizes = {"HIDDEN": add["a"].shape[-1], "ATTENDED": out["x"].shape[-1], "FFN": ffn["h"].shape[-1],
             "QKV": projected.shape[-1] if qkv else 0}  # fmt: skip
    if own:
        sizes["OWNED"] = own[1]["h"].shape[-1]
    use = device.tuning.choose("layer", DEFAULT, w=kind, hidden=sizes["HIDDEN"], own=sizes.get("OWNED", 0))
    threads = min(use["threads"], device.max_threads)
    grid = min(use["workgroups"], device.cores, *most_workgroups(sizes))
    shares = most_shares(sizes, grid, threads // device.subgroup_size, device.subgroup_size) if grid else 0
    widest = max(sizes["HIDDEN"], sizes["ATTENDED"])
    shared = 4 * shares + widest // PIECE * (PIECE + 8) + 2 * threads
    if not (grid and shared <= device.shared_bytes and sizes["HIDDEN"] <= HELD * threads and sizes["QKV"] % ROWS == 0):
        return None
    if own and (kind not in OWN_TYPES or sizes["OWNED"] > min(threads, widest)):
        return None
    one_eps = len({s.attrs["eps"] for s in norms}) == 1
    if steps[2].attrs.get("sparsity", 0.0) or norms[0].attrs.get("scale", 1.0) != 1.0 or not one_eps:
        return None
    if not qkv:
        weights.insert(3, ffn["w_gate_up"])  # of which the kernel loads a piece, for nothing
    between = own[0] if own else then  # the norm behind the feed-forward
    reads = [out["x"], add["residual"], add["w_post"], add["w_next"], between["w_post"], then["w_next"], *weights]
    made = [add["a"], add["sum"], add["y"], ffn["h"], ffn["y"], then["sum"], then["y"], projected]
    constants = {"SUBGROUP": device.subgroup_size, "THREADS": threads, "GRID": grid, "SHARES": shares, "WIDEST": widest,
                 "POLLS": device.polls, "POLL_ALL": use["poll_all"], **sizes}  # fmt: skip
    push = struct.pack("<fIf", norms[0].attrs["eps"], CONTROL[steps[0].extent], norms[-1].attrs.get("scale", 1.0))
    if own:
        reads += [then["w_post"], own[1]["ple"]]
        made += [own[0]["sum"], own[0]["y"], own[1]["h"], own[1]["y"]]
        push += struct.pack("<I", int(steps[4].attrs["layer"]) * sizes["OWNED"])
        constants |= {**NO_ATTENTION, "POOL": max(-(-shares // 4), threads // device.subgroup_size * NO_ATTENTION["QUADS"])}
    return Layer(f"layer.{kind}.own" if own else f"layer.{kind}", constants, [p for x in reads for p in x.parts],
                 [p for x in made for p in x.parts], push, mailbox_words(sizes, grid), use, shared)  # fmt: skip


def most_workgroups(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Each has at least one quad of rows of every product that there is, and of the feed-forward's a whole block of h."""
    return tuple(n for n in (sizes["HIDDEN"] // ROWS, sizes["QKV"] // ROWS, sizes["FFN"] // BLOCK) if n)


def mailbox_words(sizes: Mapping[str, int], grid: int) -> int:
    """Words of the inter-workgroup mailbox (layer_mailbox.slang)."""
    blocks = sizes["FFN"] // BLOCK
    words = 4 + 2 * sizes["HIDDEN"] + BLOCK_WORDS * blocks + BLOCK * (blocks % grid)
    return words + (sizes["HIDDEN"] + sizes["OWNED"] if "OWNED" in sizes else 0)


def most_shares(sizes: Mapping[str, int], grid: int, subgroups: int, lanes: int) -> int:
    """Partial row sums of a workgroup, at most: of each row one for every subgroup that has pieces of it."""
    hidden, ffn = sizes["HIDDEN"], sizes["FFN"]
    # Columns, quads of rows, and how many of them stay together.
    products = [(sizes["ATTENDED"], hidden // ROWS, 1), (hidden, ffn // 2, BLOCK // 2), (ffn, hidden // ROWS, 1),
                (hidden, sizes["QKV"] // ROWS, 1)]  # fmt: skip
    if own := sizes.get("OWNED"):
        products += [(hidden, own // ROWS, 1), (own, hidden // ROWS, 1)]
    return max(most_quads(quads, per, grid) * ROWS * min(subgroups, -(-(k // PIECE) // lanes)) for k, quads, per in products)


def most_quads(quads: int, per: int, grid: int) -> int:
    """Quads of one workgroup, at most: equally many in multiples of `per`, and its share of the remaining ones."""
    own = quads // per // grid * per
    return own + -(-(quads - own * grid) // grid)
