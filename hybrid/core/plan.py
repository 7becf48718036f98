"""A plan: the steps of one pass over a batch of rows, with bound axes, named tensors and a device for each step.

Plans are data. A device compiles one into a Program (recorded command buffers, or a list of NumPy calls).
Rows are flat: row r of a batch has a sequence slot and a position; a plan is made for a bucket of rows, and
how many of them are live is read from the `control` tensor when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybrid.core.dtypes import DTYPES, DType

CONTROL_WORDS = 8
# Words of a plan's control tensor (u32): live rows, live output rows, and the longest context (position + 1) of any
# live row.
CONTROL_TENSOR = "control"


class _Words(dict[str, int]):
    """Words of a tensor of live counts: those of a plan's control by name, any by its number as text."""

    def __missing__(self, name: str) -> int:
        return int(name)


CONTROL = _Words(rows=0, outs=1, context=2)
# A word that a kernel sets where a wait within a dispatch timed out: this pass and those after it are aborted steps.
FAULT_WORD = 3
FAULTED = -2  # in `history`, in place of a token: the step was aborted

FEW_ROWS = 4
"""Rows of a pass up to which reading the weights is all that takes time, where a device does not say otherwise."""

INBOX_TENSOR = "inbox"
GUESSES_TENSOR = "guesses"
"""Where the tokens are that another engine on the same queue has chosen (its `history`)."""
UNTIL_TENSOR = "known_until"
"""And up to which positions they stand, by slot (its `next_position`)."""
ROWS_TENSOR = "rows"
"""f32 [rows, hidden]: inputs that are no tokens (specs/ops/insert_rows.toml); the ids after the vocabulary's name them."""
SPANS_TENSOR = "span_last"
"""By slot and position: the last position of the span that sees itself whole there (specs/ops/row_views.toml)."""
INBOX_SETS = 4
"""Messages of rows that the inbox has room for: the host writes one while the passes of others run."""
MESSAGE_HEADER, ROW_WORDS, OUT_WORDS, ENTRY_WORDS = 8, 3, 2, 4
"""Words (i32) of a message, of each of its rows, wanted rows and block-table entries (specs/ops/begin_pass.toml)."""

NOT_FINITE = -1
"""What `sample` writes to `history` in place of a token where the logits are not finite (specs/ops/sample.toml)."""

ALIGN = 256  # no Vulkan device may ask for a larger storage-buffer offset alignment


PURPOSE = {"weight": "weights", "state": "state", "io": "io", "activation": "activations"}
"""A tensor's kind -> the name under which Device.memory() counts its bytes."""


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """A named tensor of a plan.

    kind: `weight` (uploaded once), `state` (device memory that outlives a pass: KV cache, next token),
    `io` (host-visible: tokens, positions, control, results), `activation` (lives between its first and last
    step, at byte `offset` of the device's arena).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["weight", "state", "io", "activation"]
    offset: int = 0
    sources: tuple[str, ...] = ()
    """Weights: the checkpoint tensors whose rows, one after another, make this one (empty: its own name)."""
    role: str = ""
    """`rope`: a table of positions, made by the host for `layer`. `kv`: part of the KV cache of `layer`."""
    layer: int | None = None
    """The first layer that names a tensor with a role."""
    device: str = ""
    """Weights: the device beside the main one that alone has steps with it, where nothing takes these over; empty: the
    main one."""
    per_pass: bool = False
    """Whether it belongs to one pass (rows, control words, what steps hand on), not to sequences or the model: passes that
    overlap have one each."""
    row_types: tuple[tuple[str, int], ...] = ()
    """Weights whose sources differ in storage type: (dtype, rows) of each run of rows, in order; `dtype` is the
    widest."""

    @property
    def nbytes(self) -> int:
        """Bytes with every part padded to ALIGN: what the tensor takes in an arena."""
        return sum(
            -(-_prod(t.part_shape(p, shape)) * p.itemsize // ALIGN) * ALIGN
            for t, shape in self._runs()
            for p in t.parts
        )

    @property
    def data_bytes(self) -> int:
        """Bytes without padding."""
        return sum(t.nbytes(shape) for t, shape in self._runs())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Every storage type in it."""
        return tuple(dict.fromkeys(dtype for dtype, _ in self.row_types)) if self.row_types else (self.dtype,)

    def _runs(self) -> list[tuple[DType, tuple[int, ...]]]:
        if not self.row_types:
            return [(DTYPES[self.dtype], self.shape)]
        return [(DTYPES[dtype], (rows, *self.shape[1:])) for dtype, rows in self.row_types]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with everything bound."""

    op: str
    name: str
    """For traces and errors, for example `blk.3.attn_qkv`."""
    bind: Mapping[str, int]
    """The op's symbolic axes."""
    args: Mapping[str, str]
    """The op's tensor names (inputs, outputs, state, scratch) -> names of declared tensors."""
    attrs: Mapping[str, float | int | str] = field(default_factory=dict)
    device: str = "cpu"
    extent: str = "rows"
    """Which live count bounds the op's token axis: a word of `counts` (CONTROL)."""
    layer: int | None = None
    counts: str = ""
    """The u32 tensor that has it; empty: the plan's control. Another step of the plan may write it, such as one that
    gives rows to experts."""


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    rows: int
    outs: int
    steps: tuple[Step, ...]
    tensors: Mapping[str, TensorDecl]
    arena_bytes: int = 0
    control: str = CONTROL_TENSOR
    """The tensor with this pass's control words: passes that run at the same time have their own."""
    rooms: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the arena keeps for an activation of few rows where the same pass over all of them would need more."""
    phase: Literal["prefill", "decode"] = "decode"
    """decode: one row of each sequence, which may be those of the pass before, continued."""

    def __post_init__(self) -> None:
        for step in self.steps:
            missing = [t for t in (*step.args.values(), step.counts) if t and t not in self.tensors]
            if missing:
                raise ValueError(f"plan {self.name}: step {step.name} names undeclared tensors {missing}")


def _prod(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
