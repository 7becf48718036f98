"""Large cases are judged on rows drawn at random: the oracle computes those alone, in float64.

For operations whose every element depends on one row of each axis named here, and on no other row of it. What memory
held before, guard bands, untouched inputs and the equality of two runs are checked on everything as always.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import values
from hybrid.harness.cases import Case
from hybrid.spec import OpSpec

LARGE = 250_000_000  # flops of a case from which on rows are drawn
# Operation -> axis -> rows of it that are judged, at most.
ROWS: dict[str, dict[str, int]] = {
    "attention": {"T": 12},
    "attention_i8": {"T": 12},
    "logits": {"O": 8, "V": 2048},
    "linear": {"T": 48, "N": 1024},
    "fused_qkv": {"T": 16},
}

Rows = Mapping[str, np.ndarray]


def choose(spec: OpSpec, case: Case) -> Rows:
    """Axis -> the rows that are judged, ascending: the first, the last live one and others by the case's seed. Empty
    where everything is."""
    if case.op not in ROWS or spec.flops(case.bind, case.attrs) < LARGE:
        return {}
    live = {"tokens": case.rows, "outs": case.outs}
    chosen = {}
    for axis, most in ROWS[case.op].items():
        size = live.get(spec.axes[axis].role, case.bind[axis])
        if size > most:
            drawn = values.permutation(case.seed, f"rows.{axis}", size)[: most - 2]
            chosen[axis] = np.unique([0, size - 1, *drawn])
    return chosen


def take(spec: OpSpec, name: str, tensor: Tensor, rows: Rows) -> Tensor:
    """The chosen rows of a tensor's first axis, and the chosen columns of its last."""
    shape = [str(dim) for dim in spec.tensors[name].shape]
    if shape[0] in rows:
        index = rows[shape[0]]
        tensor = Tensor(tensor.dtype, (len(index), *tensor.shape[1:]), tuple(p[index] for p in tensor.parts))
    if len(shape) == 2 and shape[1] in rows:
        tensor = Tensor.of(np.ascontiguousarray(tensor.array[:, rows[shape[1]]]), tensor.dtype)
    return tensor
