"""A plan: the steps of one pass over a batch of rows, with bound axes, named tensors and a device for each step.

Plans are data. A device compiles a plan into a Program (recorded command buffers, or a list of NumPy calls).
Rows are flat: each row of a batch has a sequence slot and a position. A plan has a fixed bucket of rows; the `control`
tensor holds the number of live rows of each run.
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
    """Word indices of a tensor of live counts: by name for a plan's control tensor, else by a number as text."""

    def __missing__(self, name: str) -> int:
        return int(name)


CONTROL = _Words(rows=0, outs=1, context=2)
# Set by a kernel if a wait within a dispatch timed out: this pass and every pass after it are aborted steps.
FAULT_WORD = 3
FAULTED = -2  # in `history`, in place of a token: the step was aborted

FEW_ROWS = 4
"""Default of Device.few_rows: up to this many rows a pass is bound by reading the weights."""

INBOX_TENSOR = "inbox"
TARGET_EMBEDDING = "target.token_embd.weight"
"""In the plans of a drafter that reads its target's cache: the target's embedding."""
DRAFTS_TENSOR = "drafts"
"""Draft tokens: the `history` of the draft engine on the same queue."""
UNTIL_TENSOR = "known_until"
"""By slot: the position up to which draft tokens exist (the draft engine's `next_position`)."""
ROWS_TENSOR = "rows"
"""f32 [rows, hidden]: input embeddings without tokens (specs/ops/insert_rows.toml). Ids after the vocabulary index
them."""
SPANS_TENSOR = "span_last"
"""By slot and position: last position of the bidirectional span there (specs/ops/row_views.toml)."""
INBOX_SETS = 16
"""Messages in the inbox's ring: the host writes one while earlier passes run."""
MESSAGE_HEADER, ROW_WORDS, OUT_WORDS, ENTRY_WORDS = 8, 3, 2, 4
"""i32 words of a message's header, and of each row, output row and block-table entry (specs/ops/begin_pass.toml)."""

NOT_FINITE = -1
"""Written to `history` in place of a token if the logits are not finite (specs/ops/sample.toml)."""

ALIGN = 256  # Vulkan's largest permitted minStorageBufferOffsetAlignment


PURPOSE = {"weight": "weights", "state": "state", "io": "io", "activation": "activations"}
"""A tensor's kind -> the name under which Device.memory() counts its bytes."""
IN_HOST_MEMORY = "weights_in_host_memory"
"""The same for weights of the pool `host`."""


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """A named tensor of a plan.

    kind: `weight` (uploaded once), `state` (persistent device memory: KV cache, next token), `io` (host-visible:
    tokens, positions, control, results), `activation` (valid from its first to its last step, at byte `offset` of the
    device's arena).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["weight", "state", "io", "activation"]
    offset: int = 0
    sources: tuple[str, ...] = ()
    """Weights: the checkpoint tensors whose rows are concatenated (empty: the tensor of this name)."""
    role: str = ""
    """`rope`: a RoPE table that the host computes for `layer`. `kv`: part of the KV cache of `layer`."""
    layer: int | None = None
    """The first layer that names a tensor with a role."""
    device: str = ""
    """Weights: the secondary device that stores it, if only that device uses it and has no fallback; empty: the main
    device."""
    pool: Literal["device", "any", "host"] = "device"
    """Weights: the memory that they are stored in, the device's, or the host's, from which the device reads them;
    `any`: the loader decides."""
    per_pass: bool = False
    """Whether it belongs to one pass (rows, control words, activations), not to sequences or the model. Overlapping
    passes have one each."""
    row_types: tuple[tuple[str, int], ...] = ()
    """Weights of mixed storage types: (dtype, rows) of each run of rows, in order; `dtype` is the widest."""

    @property
    def nbytes(self) -> int:
        """Bytes in an arena: every part padded to ALIGN."""
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
        """Distinct storage types of its rows."""
        return tuple(dict.fromkeys(dtype for dtype, _ in self.row_types)) if self.row_types else (self.dtype,)

    def _runs(self) -> list[tuple[DType, tuple[int, ...]]]:
        if not self.row_types:
            return [(DTYPES[self.dtype], self.shape)]
        return [(DTYPES[dtype], (rows, *self.shape[1:])) for dtype, rows in self.row_types]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with bound axes, tensors and attributes."""

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
    """The live count that bounds the op's token axis: a word of `counts` (CONTROL)."""
    layer: int | None = None
    counts: str = ""
    """The u32 tensor of live counts; empty: the plan's control. Another step may write it, such as expert routing."""


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    rows: int
    outs: int
    steps: tuple[Step, ...]
    tensors: Mapping[str, TensorDecl]
    arena_bytes: int = 0
    control: str = CONTROL_TENSOR
    """The tensor of this pass's control words; overlapping passes have one each."""
    reserved: Mapping[str, int] = field(default_factory=dict)
    """Arena bytes reserved for an activation of output rows, if the same pass over all rows would need more."""
    phase: Literal["prefill", "decode"] = "decode"
    """decode: one row of each sequence, possibly with the token that the previous pass sampled."""

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
