"""Edge values: apply each kind of fields.EDGE_VALUES to a drawn tensor.

Kinds of index tensors (batches, block tables, output rows) are applied where those are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import values
from hybrid.harness.block_values import largest, negative, pack
from hybrid.harness.sampling import Params, Penalties

STYLE = {
    "first": "empty",
    "empty_cache": "empty",
    "last": "full",
    "full_cache": "full",
    "mixed_slots": "mixed",
    "block_edge": "edge",
    "window_edge": "edge",
}
"""Kind of slots or positions -> style of batch (batches.STYLES)."""
TOGETHER = {kind: ("logits", "params") for kind in ("min_p_border", "top_p_border")}
"""Kind -> the tensors that have it together, because their values depend on each other."""
CUT, TEMPERATURE = 0.3, 0.8  # min_p or top_p of those kinds
NEAR = 5e-4  # relative distance from the cut: a cut off by a thousandth keeps other ids


def apply_kind(kind: str, tensor: Tensor, seed: int, name: str, top: int = 0) -> Tensor:
    """The tensor with its edge values (`top`: its largest index). Raises KeyError for a kind that does not fit its
    type."""
    if tensor.dtype == "i32":
        return Tensor.of(_INDEX[kind](tensor.array, top).astype(np.int32))
    if kind == "nothing_allowed":
        return Tensor.empty(tensor.dtype, tensor.shape)
    if tensor.dtype == "u32":
        rows = [_PARAMS[kind](seed + i).words() for i in range(tensor.shape[0])]
        return Tensor.of(np.stack(rows))
    if tensor.type.quantised:
        return _blocks(kind, tensor, seed, name)
    return values.rounded(_REALS[kind](values.real(tensor).copy(), seed, name), tensor.dtype)


def _blocks(kind: str, tensor: Tensor, seed: int, name: str) -> Tensor:
    if kind == "all_zero":
        return Tensor.empty(tensor.dtype, tensor.shape)
    if kind == "negative_scale_block":
        return negative(tensor)
    if kind == "max_scale_block":
        count = int(np.prod(tensor.shape)) // tensor.type.block
        return largest(tensor, int(values.integers(seed, name + ".max", (1,), 0, count - 1)[0]))
    if tensor.dtype == "q8_act":  # edge values of an activation are quantised here
        return act(_REALS[kind](values.real(tensor), seed, name))
    if tensor.dtype == "q8_0" and kind == "outlier":  # of a block: the other values are nearly zero
        return blocks_of(_REALS[kind](values.real(tensor), seed, name))
    raise KeyError(f"no edge kind {kind!r} for {tensor.dtype} tensors")


def act(x: np.ndarray) -> Tensor:
    """q8_act of real values by the definition, without the oracle's encoder."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32).astype(np.float32)
    peak = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    scaled = (
        np.where(np.isfinite(peak)[..., None], blocks, 0) * inverse[..., None]
    )  # codes of a block with a NaN are undefined
    codes = np.clip(np.rint(scaled), -127, 127)
    return pack("q8_act", codes.reshape(x.shape).astype(np.int64), peak * np.float32(1 / 127))


def blocks_of(x: np.ndarray) -> Tensor:
    """q8_0 of real values, without the oracle's encoder."""
    codes, pairs = act(x).parts
    return pack("q8_0", codes.astype(np.int64), pairs[..., ::2])


def _one_hot(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    at = int(values.integers(seed, name + ".hot", (1,), 0, x.size - 1)[0])
    y = np.zeros_like(x)
    y.flat[at] = 1.0
    return y


def _outlier(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    x = x.copy()
    x[..., 5 % x.shape[-1]] *= 1e4
    return x


def _half_codes(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    """Blocks whose largest value is 127, so that codes equal values, and every other value ends in .5."""
    y = values.integers(seed, name + ".half", x.shape, -126, 125) + 0.5
    y[..., ::32] = 127.0
    return y


def _saturated(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    half = x.shape[-1] // 2
    x = x.copy()
    x[..., :half] = 30.0 * (1 - 2 * values.integers(seed, name + ".sign", x[..., :half].shape, 0, 1))
    return x


def _two_best(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    x = x.copy()
    at = values.integers(seed, name + ".best", (2,), 0, x.shape[-1] - 1)
    x[..., at] = np.abs(x).max() + 1
    return x


def _neg_inf(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    return np.where(values.integers(seed, name + ".inf", x.shape, 0, 4) > 0, -np.inf, x)


def _nan(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    return _in_every_second(x, seed, name, np.where(np.arange(len(x)) % 4, -np.nan, np.nan))


def _pos_inf(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    return _in_every_second(x, seed, name, np.full(len(x), np.inf))


def _in_every_second(x: np.ndarray, seed: int, name: str, what: np.ndarray) -> np.ndarray:
    """Copy one element of `what` into rows 0, 2, .."""
    x = x.copy()
    rows = np.arange(0, len(x), 2)
    x[rows, values.integers(seed, name + ".one", (len(x),), 0, x.shape[-1] - 1)[rows]] = what[rows]
    return x


def _nothing_left(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    return np.full_like(x, -np.inf)


def _min_p_border(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    """One best id. Of the other ids, which outweigh the best, alternate ones are just kept and just cut."""
    z = math.log(CUT) + np.where(np.arange(x.shape[-1]) % 2, NEAR, -NEAR)
    z[x.shape[-1] // 2] = 0.0
    return np.broadcast_to(2 + TEMPERATURE * z, x.shape)


def _top_p_border(x: np.ndarray, seed: int, name: str) -> np.ndarray:
    """One best id. In even rows its mass just misses the cut, so that all ids are kept; in odd rows it just suffices,
    so that only the best is kept."""
    share = CUT * (1 + NEAR * np.where(np.arange(x.shape[0]) % 2, 1, -1))
    z = np.repeat(np.log((1 - share) / (x.shape[-1] - 1) / share)[:, None], x.shape[-1], axis=1)
    z[:, x.shape[-1] // 2] = 0.0
    return 2 + TEMPERATURE * z


_REALS: dict[str, Callable[[np.ndarray, int, str], np.ndarray]] = {
    "all_zero": lambda x, seed, name: np.zeros_like(x),
    "all_equal": lambda x, seed, name: np.ones_like(x),
    "equal": lambda x, seed, name: np.full_like(x, 0.625),
    "large": lambda x, seed, name: x * 1e4,
    "tiny": lambda x, seed, name: x * 1e-20,
    "one_hot": _one_hot,
    "outlier": _outlier,
    "half_codes": _half_codes,
    "saturated": _saturated,
    "two_best": _two_best,
    "neg_inf": _neg_inf,
    "nan": _nan,
    "pos_inf": _pos_inf,
    "nothing_left": _nothing_left,
    "min_p_border": _min_p_border,
    "top_p_border": _top_p_border,
}
_INDEX: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "first": lambda a, top: np.zeros_like(a),
    "last": lambda a, top: np.full_like(a, top),
    "repeated": lambda a, top: np.full_like(a, a.flat[0]),
    "no_mask": lambda a, top: np.full_like(a, -1),
}
_PARAMS: dict[str, Callable[[int], Params | Penalties]] = {
    "greedy": lambda seed: Params(),
    "every_filter": lambda seed: Params(temperature=0.8, top_k=9, top_p=0.7, min_p=0.05, seed=seed),
    "all_drawn": lambda seed: Params(temperature=1.2, seed=seed),
    "top_k_one": lambda seed: Params(temperature=1.5, top_k=1, seed=seed),
    "min_p_border": lambda seed: Params(temperature=TEMPERATURE, min_p=CUT, seed=seed),
    "top_p_border": lambda seed: Params(temperature=TEMPERATURE, top_p=CUT, seed=seed),
    "one_logprob": lambda seed: Params(logprobs=1),
    "every_logprob": lambda seed: Params(logprobs=20),
    "some_logprobs": lambda seed: Params(logprobs=3 * (seed % 2)),
    "neutral": lambda seed: Penalties(),
    "every_penalty": lambda seed: Penalties(1.25, 0.5, 0.25, first=5, biases=4096),
    "all_generated": lambda seed: Penalties(1.25, 0.5, 0.25, first=0, biases=3),
    "none_generated": lambda seed: Penalties(1.25, 0.5, 0.25, first=1 << 20, biases=3),
}
