"""Large cases are checked on randomly drawn rows: the oracle computes only those, in float64.

For operations whose every element depends on one row of each axis named here. Earlier memory contents, guard bands,
untouched inputs and the equality of two runs are still checked on everything.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import values
from hybrid.harness.cases import Case
from hybrid.spec import OpSpec

LARGE = 250_000_000  # flops of a case from which rows are drawn
# Operation -> axis -> most rows to check.
ROWS: dict[str, dict[str, int]] = {
    "attention": {"T": 12},
    "attention_i8": {"T": 12},
    "logits": {"O": 8, "V": 2048},
    "linear": {"T": 48, "N": 1024},
    "fused_qkv": {"T": 16},
}

Rows = Mapping[str, np.ndarray]


def choose(spec: OpSpec, case: Case) -> Rows:
    """Axis -> the rows to check, ascending: the first, the last live one and others by the case's seed. Empty if all
    rows are checked."""
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
    """The drawn rows of a tensor's first axis, and the drawn columns of its last."""
    shape = [str(dim) for dim in spec.tensors[name].shape]
    if shape[0] in rows:
        index = rows[shape[0]]
        tensor = Tensor(tensor.dtype, (len(index), *tensor.shape[1:]), tuple(p[index] for p in tensor.parts))
    if len(shape) == 2 and shape[1] in rows:
        tensor = Tensor.of(np.ascontiguousarray(tensor.array[:, rows[shape[1]]]), tensor.dtype)
    return tensor
