"""The tensors of a case, drawn from the domains that the spec declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hybrid.core.dtypes import DTYPES
from hybrid.core.tensor import Tensor
from hybrid.harness import inbox, values
from hybrid.harness.batches import Batch, block_table
from hybrid.harness.cases import Case, batch_of, live, takes_runs
from hybrid.harness.kinds import apply_kind
from hybrid.harness.sampling import Params, Penalties
from hybrid.spec import OpSpec
from hybrid.spec.fields import Domain

DEAD_INDEX = 0x3FFFFFFF  # in rows beyond the live count: no kernel may use it as an index
ROUTING = ("slots", "positions", "block_table", "out_rows")  # made together; their edge kinds select the values
UNSEEN = 64.0  # scale of cached positions outside every row's view (or NaN)


def make(spec: OpSpec, case: Case, without: Collection[str] = (), backend: str = "vulkan") -> dict[str, Tensor]:
    """Inputs and initial state by name. Rows beyond the live counts hold NaN and wild indices. `without`: tensors to
    omit."""
    rows = batch_of(spec, case)
    tensors = {}
    for name in (n for n in (*spec.inputs, *spec.state) if n not in without):
        tensor = _tensor(spec, case, name, rows)
        domain = spec.tensors[name].domain
        made = name in inbox.TENSORS or (domain is not None and domain.dist == "spans")
        made = made or (name in ROUTING and not (name == "slots" and rows is None))
        if name in case.kinds and not made:
            tensor = apply_kind(case.kinds[name], tensor, case.seed, name, _top(spec, case, name))
        count = live(spec, case, name)
        tensors[name] = tensor if count is None or count == tensor.shape[0] else _kill(tensor, count)
    sights = _sights(tensors, rows, case) if "block_table" in tensors else None
    if sights is not None:
        for name in ("k_cache", "v_cache"):
            tensors[name] = _hide(tensors[name], tensors["block_table"].array, sights, case, backend)
    return tensors


def _tensor(spec: OpSpec, case: Case, name: str, rows: Batch | None) -> Tensor:
    t, dtype = spec.tensors[name], case.dtypes[name]
    shape = spec.shape(name, case.bind)
    if rows is not None and name in ("slots", "positions"):
        return Tensor.of(_padded(getattr(rows, name), shape[0]))
    if t.domain is not None and t.domain.dist == "inbox":
        turn, next_position = (_tensor(spec, case, n, rows).array for n in ("turn", "next_position"))
        return inbox.TENSORS[name](case, int(turn[0]), next_position)
    if t.domain is not None and t.domain.dist == "places":
        count = live(spec, case, name) or shape[0]
        order = values.permutation(case.seed, name, count * shape[1]).reshape(count, shape[1])
        return Tensor.of(np.concatenate([order, np.full((shape[0] - count, shape[1]), DEAD_INDEX)]).astype(np.int32))
    if t.domain is not None and t.domain.dist == "spans":
        return Tensor.of(_spans(case, name, shape[0]))
    if t.domain is not None and t.domain.dist == "order":
        parts = _spans(case, "spans", spec.shape("spans", case.bind)[0]).astype(np.int64)
        return Tensor.of(_padded(np.repeat(np.arange(len(parts), dtype=np.int32), parts[:, 1] - parts[:, 0]), shape[0]))
    if t.domain is not None and t.domain.dist == "after_rows":
        assert rows is not None
        found = values.integers(case.seed, name, shape, 0, 64)
        picked = values.permutation(case.seed, name, len(rows.slots))
        found[rows.slots[picked]] = rows.positions[picked] + 1
        return Tensor.of(found.astype(np.int32))
    if name == "block_table":
        return Tensor.of(
            block_table(case.seed, shape[0], shape[1], case.bind["B"], ring=case.kinds.get(name) == "ring")
        )
    if name == "out_rows":
        return Tensor.of(_out_rows(spec, case, shape[0], rows))
    if t.role == "cache" and t.domain is None:
        if DTYPES[dtype].quantised:
            return values.quantised(case.seed, name, shape, dtype, 1.0)
        return values.rounded(values.normal(case.seed, name, shape), dtype)
    return draw(case, name, t.domain or Domain(dist="zeros"), shape, dtype, _env(spec, case))


def draw(case: Case, name: str, domain: Domain, shape: tuple[int, ...], dtype: str, env: Mapping[str, float]) -> Tensor:
    """Values of one domain. In exact mode reals become small integers; tables and indices are unchanged."""
    seed = case.seed
    if domain.dist == "zeros":
        return Tensor.empty(dtype, shape)
    if domain.dist == "sampling":
        return Tensor.of(np.stack([_params(seed, i) for i in range(shape[0])]))
    if domain.dist == "penalties":
        return Tensor.of(np.stack([_penalties(seed, i).words() for i in range(shape[0])]))
    if domain.dist == "rope":
        return values.rounded(_rope(seed, name, shape), dtype)
    if domain.dist == "normal":
        if case.mode == "exact":
            return values.exact(seed, name, shape, dtype)
        scale = float(domain.scale or 1.0) * case.scale
        if DTYPES[dtype].quantised:
            return values.quantised(seed, name, shape, dtype, scale)
        return values.rounded(values.normal(seed, name, shape, scale), dtype)
    assert domain.low is not None and domain.high is not None
    low, high = domain.low.eval(env), domain.high.eval(env)
    if domain.dist == "uniform":
        return values.rounded(values.uniform(seed, name, shape, float(low), float(high)), dtype)
    low, high = int(low), int(high)
    if domain.dist == "ranges":
        return values.rounded(np.sort(values.integers(seed, name, shape, low, high - 1), axis=-1), dtype)
    if domain.dist == "integers":
        return values.rounded(values.integers(seed, name, shape, low, high - 1), dtype)
    if domain.dist == "subset":
        each = [values.permutation(seed, f"{name}.{i}", high - low)[: shape[1]] for i in range(shape[0])]
        return values.rounded(low + np.stack(each), dtype)
    count = int(np.prod(shape))
    return values.rounded(low + values.permutation(seed, name, high - low)[:count].reshape(shape), dtype)


def _spans(case: Case, name: str, count: int) -> np.ndarray:
    """u32 [count,2]: parts of the case's live rows. A third of them has none."""
    kind = case.kinds.get(name)
    weights = values.integers(case.seed, name, (count,), 0, 5).astype(np.float64) // 2
    if kind is not None:
        weights[:] = 0
        weights[-1 if kind == "last_expert" else count // 2] = 1
    elif not weights.any():
        weights[:] = 1
    ends = np.rint(np.cumsum(weights) / weights.sum() * case.rows)
    return np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=-1).astype(np.uint32)


def _env(spec: OpSpec, case: Case) -> dict[str, float]:
    return {**case.bind, **{k: v for k, v in case.attrs.items() if not isinstance(v, str)}}


def _top(spec: OpSpec, case: Case, name: str) -> int:
    """The largest index of an index tensor's domain (0 for other tensors)."""
    domain = spec.tensors[name].domain
    return int(domain.high.eval(_env(spec, case))) - 1 if domain is not None and domain.high is not None else 0


def _out_rows(spec: OpSpec, case: Case, size: int, rows: Batch | None) -> np.ndarray:
    """Output row -> row. Matrices: any rows. Sampling: the last row of as many different slots. Verification: rows
    grouped by slot, in the order of their positions."""
    kind = case.kinds.get("out_rows")
    if rows is not None and takes_runs(spec):
        return _padded(np.lexsort((rows.positions, rows.slots))[-case.outs :].astype(np.int32), size)
    if rows is not None:
        last = {int(slot): i for i, slot in enumerate(rows.slots)}
        candidates = np.array(sorted(last.values()))
        if len(candidates) < case.outs:
            raise ValueError(f"{case}: {case.outs} output rows need as many slots")
    else:
        candidates = np.arange(case.bind["R"])
    order = candidates[values.permutation(case.seed, "out_rows", len(candidates))]
    if kind == "reversed":
        order = candidates[::-1]
    elif kind is not None:
        order = np.full(size, candidates[-1] if kind == "last" else order[0])
    return _padded(np.resize(order, case.outs).astype(np.int32), size)  # a matrix product may read a row twice


def _padded(live_rows: np.ndarray, size: int) -> np.ndarray:
    full = np.full(size, DEAD_INDEX, np.int32)
    full[: len(live_rows)] = live_rows
    return full


def _kill(tensor: Tensor, count: int) -> Tensor:
    """Poison rows from `count` on: NaN, or indices far out of range."""
    parts = []
    for part in tensor.parts:
        part = part.copy()
        wild = np.nan if part.dtype.kind == "f" else 0x7FC1 if tensor.dtype == "bf16" else DEAD_INDEX
        part[count:] = wild if part.dtype.itemsize > 1 else -77
        parts.append(part)
    return Tensor(tensor.dtype, tensor.shape, tuple(parts))


Sight = tuple[int, int, int]
"""A live row's slot, and the first and last position that it sees."""


def _sights(tensors: Mapping[str, Tensor], rows: Batch | None, case: Case) -> list[Sight] | None:
    """Attention mask of the live rows; None for operations without attention."""
    if "views" in tensors:
        both = np.column_stack([tensors["slots"].array, tensors["views"].array])[: case.rows]
        return [(slot, first, last) for slot, first, last in both.tolist()]
    if rows is None or "window" not in case.attrs:
        return None
    window, pairs = int(case.attrs["window"]), zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
    return [(slot, max(0, p - window + 1) if window else 0, p) for slot, p in pairs]


def _hide(cache: Tensor, table: np.ndarray, sights: list[Sight], case: Case, backend: str) -> Tensor:
    """Poison every cached position outside all rows' view, as a reused block may hold: NaN, or large finite numbers.
    Only numbers for the NPU, whose tile kernels multiply masked values by zero."""
    size, seen = cache.shape[1], np.zeros(cache.shape[:2], bool)
    for slot, first, last in sights:
        p = np.arange(first, last + 1)
        seen[table[slot, p // size], p % size] = True
    strange = values.integers(case.seed, "unseen", seen.shape, 0, 1) > 0
    *codes, data = (p.copy() for p in cache.parts)  # of q8_0: the scales
    data[~seen] = np.clip(data[~seen].astype(np.float32) * UNSEEN, -6e4, 6e4)
    if backend != "npu":
        data[~seen & strange] = np.nan
    return Tensor(cache.dtype, cache.shape, (*codes, data))


def _rope(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of cosines and sines of arbitrary angles, from the rational circle: no library's sine is used."""
    half = (*shape[:-1], shape[-1] // 2)
    t = values.uniform(seed, name, half, -1.0, 1.0)
    flip = 1 - 2 * values.integers(seed, name + ".flip", half, 0, 1)
    return np.concatenate([flip * (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)], axis=-1)


def _params(seed: int, slot: int) -> np.ndarray:
    """A mix of greedy, plain and filtered sampling over the slots, and of log-probability counts."""
    pick = values.integers(seed, f"params.{slot}", (6,), 0, 999)
    wanted = 1 + int(pick[5]) % 20
    choose = [
        Params(logprobs=wanted),
        Params(temperature=1.0, seed=int(pick[1]), logprobs=wanted),
        Params(temperature=0.7, top_k=1 + int(pick[2]) % 40, seed=int(pick[1]) << 24 | 5, logprobs=wanted),
        Params(temperature=1.3, top_p=0.05 + pick[3] / 1100, seed=int(pick[1]) << 40, logprobs=wanted),
        Params(temperature=0.9, min_p=0.001 + pick[4] / 2000, seed=int(pick[1]), logprobs=wanted),
        Params(0.8, 1 + int(pick[2]) % 60, 0.3 + pick[3] / 1500, 0.02, int(pick[1]) << 33 | 7, wanted),
    ]
    return choose[int(pick[0]) % len(choose)].words()


def _penalties(seed: int, slot: int) -> Penalties:
    """A mix of penalties and biases over the slots: none, one, all."""
    pick = values.integers(seed, f"penalties.{slot}", (5,), 0, 999)
    repetition, presence, frequency = 0.5 + pick[1] / 500, pick[2] / 250 - 2, pick[3] / 250 - 2
    first, biases = int(pick[4]) % 23, int(pick[4]) % 7
    choose = [
        Penalties(),
        Penalties(repetition=repetition, first=first),
        Penalties(presence=presence, first=first, biases=biases),
        Penalties(frequency=frequency, first=first),
        Penalties(biases=biases),
        Penalties(repetition, presence, frequency, first, biases),
    ]
    return choose[int(pick[0]) % len(choose)]
