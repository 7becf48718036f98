"""A case: one call of one operation with fixed sizes, attributes and dtypes, and the seed of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid.harness.batches import Batch, batch
from hybrid.spec import OpSpec

Mode = Literal["random", "exact"]


@dataclass(frozen=True, slots=True)
class Case:
    """`bind` is the bucket; `rows` and `outs` of it are live. `kinds`: tensor -> kind of value (fields.EDGE_VALUES)."""

    op: str
    bind: Mapping[str, int]
    dtypes: Mapping[str, str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 1
    outs: int = 1
    seed: int = 0
    mode: Mode = "random"
    """exact: small integers, for which any order of summation gives the same bits: equality is required."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    """Multiplies the deviation of normal inputs."""
    style: str = "ragged"
    """Distribution of rows over slots and positions: `decode`, or one of batches.STYLES."""
    wanted: bool = False
    """The step's rows are those whose logits are wanted: their count is the control word of outs, and that of rows is
    0."""

    def __str__(self) -> str:
        axes = " ".join(f"{k}={v}" for k, v in self.bind.items())
        types = " ".join(f"{k}:{v}" for k, v in self.dtypes.items() if v != "i32")
        text = f"{self.op}[{axes}] live {self.rows}/{self.outs} {types} {dict(self.attrs)} seed={self.seed} {self.mode}"
        extra = [f"{k}={v}" for k, v in self.kinds.items()] + ["wanted"] * self.wanted
        return " ".join([text, self.style, *([f"x{self.scale:g}"] if self.scale != 1 else []), *extra])


def live(spec: OpSpec, case: Case, tensor: str) -> int | None:
    """Number of leading live rows of a tensor; None where all are live."""
    counts = {"tokens": case.rows, "outs": case.outs}
    rows = {axis: counts[a.role] for axis, a in spec.axes.items() if a.role in counts}
    dim = spec.tensors[tensor].shape[0]
    return int(dim.eval({**case.bind, **rows})) if dim.names & rows.keys() else None


def context(bind: Mapping[str, int]) -> int:
    """Positions per sequence: what the block table and the tables by position cover."""
    table = bind["MB"] * bind["BS"] if "MB" in bind and "BS" in bind else None
    limits = [n for n in (table, bind.get("C")) if n is not None]
    return min(limits) if limits else 64


def one_row_per_slot(spec: OpSpec) -> bool:
    """True for operations that take at most one row of each sequence."""
    return ("slots",) in spec.constraints.distinct


def takes_runs(spec: OpSpec) -> bool:
    """True for operations whose output rows may be consecutive positions of one sequence."""
    domain = spec.inputs["out_rows"].domain if "out_rows" in spec.inputs else None
    return domain is not None and domain.dist == "runs"


def batch_of(spec: OpSpec, case: Case) -> Batch | None:
    """Slots and positions of the live rows; None for operations without them.

    Where output rows select a slot (sampling), rows spread over the slots, so that every slot is selected at most once.
    Runs (verification) are not spread.
    """
    if "slots" not in spec.inputs or "positions" not in spec.inputs:
        return None
    edge = int(case.attrs.get("window", 0)) or case.bind.get("BS", 0)
    alone = ("out_rows" in spec.inputs and not takes_runs(spec)) or case.style == "decode" or one_row_per_slot(spec)
    return batch(case.seed, case.rows, case.bind["S"], context(case.bind), case.style, edge, alone)
