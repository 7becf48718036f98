"""The `scale` of the bound, for each operation: what its sums would be if nothing cancelled.

Evaluated in float64 beside the oracle. `Call` is a case as the oracle saw it: live inputs, attributes, results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import block_values
from hybrid.kernels.oracle import ORACLE
from hybrid.kernels.oracle.attention import in_int8, rotate
from hybrid.kernels.oracle.norm import rms


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


def scale(op: str, name: str, call: Call) -> np.ndarray:
    """Scale of one result. Raises KeyError for one without a rule."""
    if op not in _SCALES:
        raise KeyError(f"no scale rule for operation {op!r}: add it to conformance/harness/scales.py")
    return _SCALES[op](call)[name]


def product(x: np.ndarray, x_dtype: str, w: Tensor, w_values: np.ndarray) -> np.ndarray:
    """|x| @ |w|.T. int8 activations on weights with an offset or a minimum also carry its terms apart: the minimum
    (q4_0: 8*|d|) times the sum of a block of x."""
    terms = np.abs(x) @ np.abs(w_values).T
    if x_dtype == "q8_act" and w.type.quantised:
        _, scale, minimum = block_values.unpack(w)
        if w.dtype == "q4_0":
            minimum = 8 * scale
        if isinstance(minimum, np.ndarray):
            sums = np.abs(x.reshape(*x.shape[:-1], -1, 32).sum(-1))
            terms += sums @ np.abs(minimum[..., 0]).T
    return terms


def _linear(call: Call) -> dict[str, np.ndarray]:
    (name,) = call.refs
    return {name: product(call.values["x"], call.dtypes["x"], call.tensors["w"], call.values["w"])}


def _matmul_blocks(call: Call) -> dict[str, np.ndarray]:
    return {"y": np.abs(call.values["x"].astype(np.float64)) @ np.abs(call.values["w"]).T}


def _logits(call: Call) -> dict[str, np.ndarray]:
    # tanh never enlarges an error; its own is a few units of the cap.
    rows = call.values["x"][call.values["out_rows"]]
    terms = product(rows, call.dtypes["x"], call.tensors["w"], call.values["w"])
    return {"logits": terms + float(call.attrs.get("softcap", 0))}


def _add_rmsnorm(call: Call) -> dict[str, np.ndarray]:
    (post,) = ORACLE["rmsnorm"](x=call.values["a"], w=call.values["w_post"], eps=call.attrs["eps"])
    return {"sum": np.abs(call.values["residual"]) + np.abs(post), "y": np.abs(call.refs["y"])}


def _attention(call: Call) -> dict[str, np.ndarray]:
    q, k, v = (call.values[n] for n in ("q", "k_cache", "v_cache"))
    out, plain = _attended(call, q, np.abs(q), k, v)
    return {"o": out, "o.values": plain}


def _attention_i8(call: Call) -> dict[str, np.ndarray]:
    """As attention, of the codes times their scales."""
    d = call.values["k_cache"].shape[3]
    q, k = (in_int8(call.values[n].astype(np.float32), d, np.float64) for n in ("q", "k_cache"))
    out, plain = _attended(call, q, np.abs(q), k, call.values["v_cache"])
    return {"o": out, "o.values": plain}


def _decode_attention(call: Call) -> dict[str, np.ndarray]:
    """As attention, of a q whose rotation adds and subtracts."""
    v, d = call.values, call.values["k_cache"].shape[3]
    heads = v["qkv"].reshape(len(v["qkv"]), -1, d)[:, : -2 * v["k_cache"].shape[2]]
    normed = rms(heads, call.attrs["eps"]) * v["w_q_norm"]
    angles = v["rope"][v["positions"]]
    q = rotate(normed, angles).reshape(len(heads), -1)
    cos, sin = np.split(np.abs(angles)[:, None, :], 2, axis=-1)
    a, b = np.split(np.abs(normed), 2, axis=-1)
    terms = np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1).reshape(q.shape)
    return {"o": _attended(call, q, terms, call.refs["k_cache"], call.refs["v_cache"])[0]}


def _attended(call: Call, q: np.ndarray, q_terms: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sum of p|v|, enlarged by the largest score's own terms |q||k| (an error of a score is a relative one of its p),
    and as it is. q_terms: what q's sums would be if nothing cancelled."""
    out, plain, size, window = np.empty_like(q), np.empty_like(q), k.shape[1], call.attrs["window"]
    group = q.shape[1] // k.shape[3] // k.shape[2]
    for row, (slot, pos) in enumerate(zip(call.values["slots"], call.values["positions"], strict=True)):
        keys = np.arange(max(0, pos - window + 1) if window else 0, pos + 1)
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


def _geglu(call: Call) -> dict[str, np.ndarray]:
    gate, up = np.split(call.values["gate_up"], 2, axis=-1)
    return {"h": np.abs(gate * up)}


def _fused_ffn(call: Call) -> dict[str, np.ndarray]:
    """h: how far gelu(gate)*up moves with its sums (|gelu'| <= 1.13, |gelu(x)| <= |x|); y: the second product, of h."""
    x, w = call.values["x"], call.values["w_gate_up"]
    gate, up = np.split(np.abs(x @ w.T), 2, axis=-1)
    gate_terms, up_terms = np.split(product(x, call.dtypes["x"], call.tensors["w_gate_up"], w), 2, axis=-1)
    y = product(call.refs["h"], call.dtypes["h"], call.tensors["w_down"], call.values["w_down"])
    return {"h": 1.13 * gate_terms * up + gate * up_terms, "y": y}


def _adjust_logits(call: Call) -> dict[str, np.ndarray]:
    """What a repetition penalty may make of a logit, the other penalties and all the biases of the row's slot."""
    v = call.values
    repetition, presence, frequency = (call.tensors["penalties"].array[:, i : i + 1].view(np.float32) for i in range(3))
    factor = np.maximum(repetition, 1 / repetition)
    rest = np.abs(presence) + np.abs(frequency) * v["history"].shape[1] + np.abs(v["bias"]).sum(-1, keepdims=True)
    slots = v["slots"][v["out_rows"]]
    return {"adjusted": np.abs(v["logits"]) * factor[slots] + rest[slots]}


def _logprobs(call: Call) -> dict[str, np.ndarray]:
    """Of each row the largest logit and the logarithm of the number of ids; 1 for the logarithm's own error."""
    v = call.values
    terms = np.zeros_like(v["top_logprobs"])
    for row, source in zip(v["logits"], v["out_rows"], strict=True):
        finite = row[: call.attrs["valid"]][np.isfinite(row[: call.attrs["valid"]])]
        most = np.abs(finite).max() if finite.size else 0
        terms[v["slots"][source], (v["positions"][source] + 1) % terms.shape[1]] = most + np.log(len(row)) + 1
    return {"top_logprobs": terms}


_SCALES: dict[str, Callable[[Call], dict[str, np.ndarray]]] = {
    "linear": _linear,
    "fused_qkv": _linear,
    "logits": _logits,
    "add_rmsnorm": _add_rmsnorm,
    "attention": _attention,
    "attention_i8": _attention_i8,
    "decode_attention": _decode_attention,
    "matmul_blocks": _matmul_blocks,
    "geglu": _geglu,
    "fused_ffn": _fused_ffn,
    "adjust_logits": _adjust_logits,
    "logprobs": _logprobs,
}
