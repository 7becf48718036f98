"""A layer's dispatch that ends with the next layer's attention: layer_attention.slang."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybrid.core.plan import Step
from hybrid.kernels.vulkan.cache import cache_layout
from hybrid.kernels.vulkan.ops import _layer
from hybrid.kernels.vulkan.ops._combine import two_parts
from hybrid.kernels.vulkan.recorder import Recorder
from hybrid.kernels.vulkan.tensors import DeviceTensor

OPS = tuple(
    (*ops, "decode_attention") for ops in (_layer.WITH_OWN, _layer.QUERIES_WITH_OWN, _layer.OPS, _layer.QUERIES)
)
WORD, KEYS = 16, 2  # as in layer_attention.slang: bytes of a head per load of a lane; keys of a lane per step
MOST_SPLITS = 64


def record(rec: Recorder, steps: Sequence[Step], t: Sequence[Mapping[str, DeviceTensor]]) -> bool:
    """As _layer.record, and o[1,HQ*D] from qkv, with k and v appended to the cache. False where the kernel does not
    fit: see _layer.prepare; also a cache that is not f16, heads wider than one load of a subgroup, o that is not
    q8_act."""
    layer = _layer.prepare(rec, steps, t)
    if layer is None or not layer.use["attention"]:
        return False
    step, a, device, own = steps[-1], t[-1], rec.device, _layer.own_input(steps)
    heads, kv_heads, d = (step.bind[axis] for axis in ("HQ", "HK", "D"))
    cache, o, words = cache_layout(step, a), a["o"], d * 2 // WORD
    projected = steps[-2].args["y" if steps[-2].op == "linear" else "qkv"]
    follows = projected == step.args["qkv"] and step.bind["T"] == 1
    # What the first workgroup stores of the last norm may be on its way when others store o.
    follows = follows and not any(p.overlaps(q) for p in a["o"].parts for n in ("sum", "y") for q in t[-3][n].parts)
    parts = [a[n] for n in ("w_q_norm", "w_k_norm", "rope", "positions", "slots", "block_table", "k_cache", "v_cache")]
    whole = all(len(x.chunks) == 1 and len(x.parts) == 1 for x in parts)
    narrow = words <= device.subgroup_size and d % 32 == 0
    if not (follows and whole and narrow and cache.dtype == "f16" and o.dtype == "q8_act"):
        return False
    subgroups = layer.constants["THREADS"] // device.subgroup_size
    shares = layer.constants["SHARES"]
    pool = max(subgroups * d // 4, -(-shares // 4))  # row sums of the products, then attention's sums
    # Also a head's query, the new k and v, and the softmax maxima and sums.
    shared = layer.shared_bytes - 4 * shares + 16 * pool + 8 * d + 8 * subgroups
    if shared > device.shared_bytes or subgroups < 3:
        return False
    tiles = heads // kv_heads
    splits = min(layer.grid // (kv_heads * tiles), MOST_SPLITS)
    bindings = len(layer.reads) + len(layer.writes) + 2 + len(parts) + 5
    if not splits or bindings > device.storage_buffers:
        return False
    window = int(step.attrs["window"])
    merged = min(device.subgroup_size, max(8, 1 << (d // 4 // subgroups - 1).bit_length()))
    lanes = 1 << (words - 1).bit_length()
    ahead = min(layer.use["ahead"], -(-splits * merged // device.subgroup_size))  # at most a lane's number of parts
    constants = {
        **layer.constants,
        "LANES": lanes,
        "OUTPUT": 2,
        "MERGED": merged,
        "QUADS": d // 4,
        "Q_HEADS": heads,
        "KV_HEADS": kv_heads,
        "BLOCK": cache.block_size,
        "AHEAD": ahead,
        "PROJECTIONS": step.bind["KV"],
        "ROTARY": step.bind["R"] // 4,
        "VALUE_NORM": int(step.attrs["value_norm"]),
        "POOL": pool,
    }
    if own:
        constants["ATTENDS"] = 1
    push = struct.pack(
        "<6I2f2I",
        1,
        a["rope"].shape[0],
        cache.table_width,
        cache.slots,
        cache.blocks,
        window,
        step.attrs["eps"],
        step.attrs["scale"],
        splits,
        layer.use["min_split"],
    )
    memory = [rec.zeros(heads * splits * d * 4), rec.zeros(heads * splits * (d // 4) * 8)]
    arrived = rec.counters(heads * -(-d // 4 // merged))
    caches = [x.parts[0] for x in parts[-2:]]
    made = replace(
        layer,
        kernel=layer.kernel if own else f"{layer.kernel}.f16",
        constants=constants,
        push=layer.push + push,
        words=layer.words + (heads + tiles * 2 * kv_heads) * d,
    )
    made.record(rec, [x.parts[0] for x in parts[:-2]], [*caches, *memory, arrived, *two_parts(o)])
    rec.noted[_layer.ATTENDING] = made
    return True
