"""The `scale` of the bound for each operation: its sums without cancellation.

Evaluated in float64 beside the oracle. `Call` is a case as the oracle ran it: live inputs, attributes, results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import block_values
from hybrid.kernels.oracle import ORACLE
from hybrid.kernels.oracle.attention import in_int8, rotate
from hybrid.kernels.oracle.experts import mixed
from hybrid.kernels.oracle.ffn import sparsified
from hybrid.kernels.oracle.norm import rms
from hybrid.kernels.oracle.per_layer import of_layer


@dataclass(frozen=True, slots=True)
class Call:
    """tensors: live inputs and initial state as given; values: the same as f64; refs: f64 results by name (outputs and
    scratch cut to their live rows, or those drawn of a large case; state whole); dtypes: of every tensor."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    refs: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    matrices: bool = False
    """The device has matrix units."""


Rule = Callable[[Call], dict[str, np.ndarray]]
_RULES: dict[str, Rule] = {}


def _of(*ops: str) -> Callable[[Rule], Rule]:
    """Scale of operations that subtract, or whose products round separately."""

    def named(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return named


def scale(op: str, name: str, call: Call) -> np.ndarray:
    """Scale of one result. Raises KeyError for one without a rule."""
    return scales(op, call)[name]


def scales(op: str, call: Call) -> dict[str, np.ndarray]:
    """Scale of every result by name. NAME.values: with the absolute values of what is averaged; NAME.steps: an absolute
    error beside the scale."""
    return _RULES[op](call) if op in _RULES else _of_absolutes(op, call)


def _of_absolutes(op: str, call: Call) -> dict[str, np.ndarray]:
    """The operation applied to absolute values, for operations that only add and multiply."""
    given = {n: np.abs(v) for n, v in call.values.items()}
    given |= {n: abs(v) if isinstance(v, float) else v for n, v in call.attrs.items()}
    return dict(zip(call.refs, ORACLE[op](**given, real=np.float64), strict=True))


def product(x: np.ndarray, x_dtype: str, w: Tensor, w_values: np.ndarray) -> np.ndarray:
    """|x| @ |w|.T. int8 activations on weights with an offset or a minimum also have its terms: the minimum (q4_0:
    8*|d|) times the sum of a block of x."""
    terms = np.abs(x) @ np.abs(w_values).T
    if x_dtype == "q8_act" and w.type.quantised:
        _, scale, minimum = block_values.unpack(w)
        if w.dtype == "q4_0":
            minimum = 8 * scale
        if isinstance(minimum, np.ndarray):
            sums = np.abs(x.reshape(*x.shape[:-1], -1, w.type.group).sum(-1))
            terms += sums @ np.abs(minimum[..., 0]).T
    return terms


F16_NORMAL, F16_STEP = 2.0**-14, 2.0**-24


def steps(x: np.ndarray, x_dtype: str, w_values: np.ndarray) -> np.ndarray:
    """Absolute error where weights beside f16 rows round to f16: subnormals have a fixed step below F16_NORMAL, and
    drivers round in different directions. The relative bound misses it where one element of a row outweighs all others.
    """
    return (
        np.abs(x) @ (np.abs(w_values) < F16_NORMAL).T * F16_STEP
        if x_dtype == "f16"
        else np.zeros((len(x), len(w_values)))
    )


@_of("linear", "fused_qkv")
def _linear(call: Call) -> dict[str, np.ndarray]:
    (name,) = call.refs
    return {name: product(call.values["x"], call.dtypes["x"], call.tensors["w"], call.values["w"])}


@_of("logits")
def _logits(call: Call) -> dict[str, np.ndarray]:
    # tanh never enlarges an error; its own error is a few units of the cap.
    rows = call.values["x"][call.values["out_rows"]]
    terms = product(rows, call.dtypes["x"], call.tensors["w"], call.values["w"])
    return {"logits": terms + float(call.attrs.get("softcap", 0))}


@_of("add_rmsnorm", "add_norm")
def _add_rmsnorm(call: Call) -> dict[str, np.ndarray]:
    (post,) = ORACLE["rmsnorm"](x=call.values["a"], w=call.values["w_post"], eps=call.attrs["eps"])
    terms = (np.abs(call.values["residual"]) + np.abs(post)) * abs(float(call.attrs.get("scale", 1.0)))
    return {"sum": terms, "y": np.abs(call.refs["y"])}


@_of("router")
def _router(call: Call) -> dict[str, np.ndarray]:
    v = call.values
    normed = np.abs(rms(v["x"], call.attrs["eps"]) * v["scale"])
    return {"logits": normed @ np.abs(v["w"]).T}


@_of("expert_add")
def _expert_add(call: Call) -> dict[str, np.ndarray]:
    """Errors of the experts' sum reach the norms in proportion to its terms."""
    v, eps = call.values, call.attrs["eps"]
    names = ("a", "o", "gates", "w_dense", "w_experts")
    given, size = {n: v[n] for n in names}, {n: np.abs(v[n]) for n in names}
    m, terms = (mixed(**some, places=v["places"].astype(np.int64), eps=eps) for some in (given, size))
    (post,) = ORACLE["rmsnorm"](x=m, w=v["w_post"], eps=eps)
    post = np.abs(post) + terms / np.sqrt((m * m).mean(-1, keepdims=True) + eps) * np.abs(v["w_post"])
    return {"sum": (np.abs(v["residual"]) + post) * abs(call.attrs["scale"]), "y": np.abs(call.refs["y"])}


@_of("expert_ffn")
def _expert_ffn(call: Call) -> dict[str, np.ndarray]:
    """h: sensitivity of gelu(gate)*up to both sums; y: the second product, of h."""
    v, spans = call.values, call.tensors["spans"].array.tolist()
    h, y, more = (np.zeros_like(a) for a in (call.refs["h"], call.refs["y"], call.refs["y"]))
    for expert, (start, end) in enumerate(spans):
        if start == end:
            continue
        x, mid = v["x"][start:end], call.refs["h"][start:end]
        gate_up, down = (_part(call, n, expert, len(spans)) for n in ("w_gate_up", "w_down"))
        gate, up = np.split(np.abs(x @ gate_up[1].T), 2, axis=-1)
        gate_terms, up_terms = np.split(product(x, call.dtypes["x"], *gate_up), 2, axis=-1)
        h[start:end] = 1.13 * gate_terms * up + gate * up_terms
        y[start:end] = product(mid, call.dtypes["h"], *down)
        more[start:end] = steps(mid, call.dtypes["h"], down[1])
    return {"h": h, "y": y, "y.steps": more}


def _part(call: Call, name: str, index: int, count: int) -> tuple[Tensor, np.ndarray]:
    """One expert's rows of a weight."""
    n = call.tensors[name].shape[0] // count
    return call.tensors[name].rows(index * n, index * n + n), call.values[name][index * n : index * n + n]


@_of("per_layer_embed")
def _per_layer_embed(call: Call) -> dict[str, np.ndarray]:
    normed = call.refs["ple"] * np.sqrt(2) - (row := _table_rows(call))
    return {"ple": np.abs(row) + np.abs(normed)}


def _table_rows(call: Call) -> np.ndarray:
    known = call.values["tokens"]
    return call.values["w"][np.where((known >= 0) & (known < len(call.values["w"])), known, 0)] * call.attrs["scale"]


@_of("per_layer_input")
def _per_layer_input(call: Call) -> dict[str, np.ndarray]:
    """h: sensitivity of gelu(gate)*ple to its sum; y: the second product, of h."""
    v, w = call.values, call.tensors["w_gate"]
    terms = product(v["x"], call.dtypes["x"], w, v["w_gate"])
    own = np.abs(of_layer(v["ple"], call.attrs["layer"], len(v["w_gate"])))
    y = product(call.refs["h"], call.dtypes["h"], call.tensors["w_proj"], v["w_proj"])
    return {"h": 1.13 * terms * own, "y": y, "y.steps": steps(call.refs["h"], call.dtypes["h"], v["w_proj"])}


@_of("attention", "view_attention")
def _attention(call: Call) -> dict[str, np.ndarray]:
    q, k, v = (call.values[n] for n in ("q", "k_cache", "v_cache"))
    out, plain = _attended(call, q, np.abs(q), k, v)
    return {"o": out, "o.values": plain}


@_of("attention_i8")
def _attention_i8(call: Call) -> dict[str, np.ndarray]:
    """As attention, of codes times scales."""
    d = call.values["k_cache"].shape[3]
    with np.errstate(invalid="ignore"):  # values outside every row's view may be NaN
        q, k = (in_int8(call.values[n].astype(np.float32), d, np.float64) for n in ("q", "k_cache"))
    out, plain = _attended(call, q, np.abs(q), k, call.values["v_cache"])
    return {"o": out, "o.values": plain}


@_of("decode_attention")
def _decode_attention(call: Call) -> dict[str, np.ndarray]:
    """As attention, of a q whose rotation adds and subtracts."""
    v, (_, _, kv_heads, d) = call.values, call.values["k_cache"].shape
    heads = v["qkv"].reshape(len(v["qkv"]), -1, d)
    heads = heads[:, : heads.shape[1] - call.attrs.get("projections", 2) * kv_heads]
    normed = rms(heads, call.attrs["eps"]) * v["w_q_norm"]
    angles = v["rope"][v["positions"]]
    q = rotate(normed, angles).reshape(len(heads), -1)
    cos, sin = np.split(np.abs(angles), 2, axis=-1)
    terms = rotate(np.abs(normed), np.concatenate([cos, -sin], axis=-1))  # its first half: |a| cos + |b| sin
    other = rotate(np.abs(normed), np.concatenate([cos, sin], axis=-1))
    terms = np.maximum(terms, other).reshape(q.shape)
    return {"o": _attended(call, q, terms, call.refs["k_cache"], call.refs["v_cache"])[0]}


def _attended(call: Call, q: np.ndarray, q_terms: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sum of p|v|, with and without the factor for the largest score's terms |q||k| (a score's error is a relative
    error of its p). q_terms: q's sums without cancellation."""
    out, plain, size, window = np.empty_like(q), np.empty_like(q), k.shape[1], call.attrs.get("window", 0)
    group = q.shape[1] // k.shape[3] // k.shape[2]
    for row, slot in enumerate(call.values["slots"]):
        if "views" in call.values:
            first, last = call.values["views"][row]
        else:
            last = call.values["positions"][row]
            first = max(0, last - window + 1) if window else 0
        keys = np.arange(first, last + 1)
        where = (call.values["block_table"][slot, keys // size], keys % size)
        heads, head_terms = (x[row].reshape(-1, group, k.shape[3]) for x in (q, q_terms))
        kh, vh = k[where].transpose(1, 2, 0), v[where].swapaxes(0, 1)  # [HK, D, J], [HK, J, D]
        s = np.matmul(heads, kh) * call.attrs["scale"]
        terms = np.matmul(head_terms, np.abs(kh)) * call.attrs["scale"]
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        average = np.matmul(p, np.abs(vh))
        out[row], plain[row] = (average * (1 + terms.max(-1, keepdims=True))).reshape(-1), average.reshape(-1)
    return out, plain


@_of("geglu")
def _geglu(call: Call) -> dict[str, np.ndarray]:
    gate, up = np.split(call.values["gate_up"], 2, axis=-1)
    return {"h": _threshold_terms(np.abs(gate), gate, call.attrs["sparsity"]) * np.abs(up)}


def _threshold_terms(terms: np.ndarray, gate: np.ndarray, sparsity: float) -> np.ndarray:
    """Terms of gate - threshold: the gate's, the mean's and the deviation's. The deviation's error is at most that of
    the gates; its squares may cancel."""
    if sparsity <= 0:
        return terms
    mean, every = np.abs(gate).mean(-1, keepdims=True), terms.mean(-1, keepdims=True)
    spread = np.sqrt((gate * gate).mean(-1, keepdims=True)) + np.sqrt((terms * terms).mean(-1, keepdims=True))
    return terms + mean + every + NormalDist().inv_cdf(sparsity) * spread


@_of("altup_predict")
def _altup_predict(call: Call) -> dict[str, np.ndarray]:
    v = call.values
    s = np.abs(v["streams"].reshape(len(v["streams"]), -1, len(v["w_norm"])))
    size = s.shape[1]
    c = (_route_terms(v["streams"][:, : s.shape[2]], call) @ np.abs(v["w_predict"]).T).reshape(len(s), size, size)
    return {"predicted": (s + np.matmul(c, s)).reshape(len(s), -1)}


def _route_terms(x: np.ndarray, call: Call) -> np.ndarray:
    """Sensitivity of the router's tanh to its sum, and its own size."""
    scaled = rms(x, call.attrs["eps"]) * call.values["w_router_norm"] / x.shape[-1]
    return np.abs(np.tanh(scaled @ call.values["w_router"].T)) + np.abs(scaled) @ np.abs(call.values["w_router"]).T


@_of("altup_correct")
def _altup_correct(call: Call) -> dict[str, np.ndarray]:
    v, eps = call.values, call.attrs["eps"]
    (post,) = ORACLE["rmsnorm"](x=v["a"], w=v["w_post"], eps=eps)
    out, p = v["residual"] + post, v["predicted"].reshape(len(v["a"]), -1, len(v["w_post"]))
    d = 1 + _route_terms(out, call) @ np.abs(v["w_correct"]).T
    # The router's sum inherits the error that the residual add cancels.
    cancelled = 1 + (np.abs(v["residual"]) + np.abs(post)).max(-1) / np.maximum(np.sqrt((out * out).mean(-1)), 1e-30)
    moved = np.abs(v["residual"]) + np.abs(post) + np.abs(p[:, 0])
    terms = np.abs(p) + (d * np.minimum(cancelled, 1e6)[:, None])[:, :, None] * moved[:, None]
    return {"corrected": terms.reshape(len(p), -1), "y": np.abs(call.refs["y"])}


@_of("altup_add")
def _altup_add(call: Call) -> dict[str, np.ndarray]:
    v = call.values
    added = np.abs(rms(v["a"], call.attrs["eps"]) * v["w_post"])
    terms = np.abs(v["corrected"]).reshape(len(added), -1, added.shape[1])
    return {"streams": (terms + added[:, None]).reshape(len(added), -1)}


@_of("laurel_add")
def _laurel_add(call: Call) -> dict[str, np.ndarray]:
    v, eps = call.values, call.attrs["eps"]
    x = v["predicted"][:, : len(v["w_next"])]
    post, beside = (np.abs(rms(v[t], eps) * v[w]) for t, w in (("a", "w_post"), ("laurel", "w_laurel")))
    terms = np.abs(x) + post + np.abs(v["normed"]) + beside
    return {"sum": terms, "y": np.abs(call.refs["y"])}


@_of("altup_end")
def _altup_end(call: Call) -> dict[str, np.ndarray]:
    v, h = call.values, len(call.values["w_norm"])
    x, z = v["streams"][:, :h], v["z"].reshape(len(v["z"]), -1, h)
    square = np.sqrt((x * x).mean(-1))[:, None]
    each = np.abs(z) * (square / np.sqrt(np.maximum((z * z).mean(-1), call.attrs["least"])))[..., None]
    terms = (np.abs(x) + each.sum(1)) * h / v["streams"].shape[1]
    (mean,) = ORACLE["altup_end"](streams=v["streams"], z=v["z"], w_norm=np.ones(h), **call.attrs)
    signed = v["z"].reshape(z.shape) * (square / np.sqrt(np.maximum((z * z).mean(-1), call.attrs["least"])))[..., None]
    whole = (x + signed.sum(1)) * h / v["streams"].shape[1]
    scale = 1 / np.sqrt((whole * whole).mean(-1, keepdims=True) + call.attrs["eps"])
    spread = np.sqrt((terms * terms).mean(-1, keepdims=True)) * scale
    return {"y": np.abs(v["w_norm"]) * (terms * scale + np.abs(mean) * spread)}


@_of("fused_ffn")
def _fused_ffn(call: Call) -> dict[str, np.ndarray]:
    """h: sensitivity of gelu(gate)*up to its sums (|gelu'| <= 1.13, |gelu(x)| <= |x|); y: the second product, of h."""
    x, w = call.values["x"], call.values["w_gate_up"]
    gate, up = np.split(np.abs(x @ w.T), 2, axis=-1)
    gate_terms, up_terms = np.split(product(x, call.dtypes["x"], call.tensors["w_gate_up"], w), 2, axis=-1)
    y = product(call.refs["h"], call.dtypes["h"], call.tensors["w_down"], call.values["w_down"])
    if call.attrs["sparsity"] > 0:
        gate_terms = _threshold_terms(gate_terms, x @ w[: len(w) // 2].T, call.attrs["sparsity"])
        gate = sparsified(x @ w[: len(w) // 2].T, call.attrs["sparsity"])
    step = steps(call.refs["h"], call.dtypes["h"], call.values["w_down"])
    return {"h": 1.13 * gate_terms * up + gate * up_terms, "y": y, "y.steps": step}


@_of("adjust_logits")
def _adjust_logits(call: Call) -> dict[str, np.ndarray]:
    """Largest effect of a repetition penalty on a logit, the other penalties and all biases of the row's slot."""
    v = call.values
    repetition, presence, frequency = (call.tensors["penalties"].array[:, i : i + 1].view(np.float32) for i in range(3))
    factor = np.maximum(repetition, 1 / repetition)
    rest = np.abs(presence) + np.abs(frequency) * v["history"].shape[1] + np.abs(v["bias"]).sum(-1, keepdims=True)
    slots = v["slots"][v["out_rows"]]
    return {"adjusted": np.abs(v["logits"]) * factor[slots] + rest[slots]}


@_of("logprobs")
def _logprobs(call: Call) -> dict[str, np.ndarray]:
    """For each row the largest logit and the logarithm of the number of ids; 1 for the logarithm's own error."""
    v = call.values
    terms = np.zeros_like(v["top_logprobs"])
    for row, source in zip(v["logits"], v["out_rows"], strict=True):
        finite = row[: call.attrs["valid"]][np.isfinite(row[: call.attrs["valid"]])]
        most = np.abs(finite).max() if finite.size else 0
        terms[v["slots"][source], (v["positions"][source] + 1) % terms.shape[1]] = most + np.log(len(row)) + 1
    return {"top_logprobs": terms}
