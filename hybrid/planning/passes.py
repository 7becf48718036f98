"""Row buckets of an engine's plans, by the device's capabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hybrid.core.hparams import HParams
from hybrid.spec.schedule import CAPABILITIES

ROW_BUCKETS = (1, 8, 32, 128, 512)
DRAFT_ROWS = 32
"""Most rows of a pass in which several sequences have draft tokens."""
DRAFT_BUCKETS = (
    1,
    2,
    4,
    8,
    16,
    32,
    128,
    512,
)  # where passes verify drafts; cost grows with the rows, so small buckets are fine-grained
MATRIX_BUCKETS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    40,
    48,
    64,
    96,
    128,
    256,
)  # decode buckets on matrix units, where kernels depend on the row count
CHUNK, MATRIX_CHUNK = 512, 2048  # rows of a prefill pass, without and with matrix units
FIXED_ROWS = 8  # rows of every pass of a deterministic engine on Vulkan
LOGITS_BYTES, HIDDEN_BYTES = 64 << 20, 256 << 20  # most host memory for one pass of logits() and hidden_states()


def buckets(most: int, sizes: Sequence[int] = ROW_BUCKETS) -> tuple[int, ...]:
    """Buckets to compile plans for: the sizes below `most`, and `most`."""
    return (*(s for s in sizes if s < most), most)


def bucket_of(n: int, sizes: Sequence[int]) -> int:
    """The smallest bucket of at least n rows."""
    for size in sizes:
        if n <= size:
            return size
    raise ValueError(f"{n} rows do not fit in the largest bucket, {sizes[-1]}")


def capabilities_of(has: Callable[[str], bool]) -> frozenset[str]:
    """The device features (by its `has`) that select precisions in schedules."""
    return frozenset(c for c in CAPABILITIES if has(c))


def chunk_of(capabilities: Collection[str]) -> int:
    """Default rows of a prefill pass on a device with these capabilities."""
    return MATRIX_CHUNK if "f16_matrices" in capabilities else CHUNK


def decode_buckets_of(capabilities: Collection[str]) -> tuple[int, ...]:
    """Row buckets of decode passes on a device with these capabilities. On matrix units kernels depend on the bucket;
    elsewhere a pass costs in proportion to its live rows."""
    return MATRIX_BUCKETS if "f16_matrices" in capabilities else ROW_BUCKETS


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Row buckets of plans, ascending: rows of prefill passes (`rows`), their sequences that get a token (`outs`), rows
    of decode passes (`decode`). `logits`, `hidden`: most rows of a pass that reads logits or hidden states back."""

    rows: tuple[int, ...]
    outs: tuple[int, ...]
    decode: tuple[int, ...]
    logits: int
    hidden: int
    drafts: int = 0
    """Most draft tokens of a sequence in a pass."""

    @property
    def wanted(self) -> int:
        """Most output rows of a prefill pass: one for each sequence, and drafts of one or several sequences."""
        slots = self.outs[-1]
        return min(max(slots + self.drafts, min(DRAFT_ROWS, slots * (1 + self.drafts))), self.rows[-1])

    @property
    def wants(self) -> tuple[int, ...]:
        """Buckets of output rows: numbers of sequences and, with drafts, the verify buckets."""
        few = (
            tuple(n for n in DRAFT_BUCKETS if n < self.wanted)
            if self.drafts and len(self.outs) < len(self.rows)
            else ()
        )
        return tuple(sorted({*self.outs, *few, self.wanted}))


def pass_sizes(
    hp: HParams,
    ctx: int,
    slots: int,
    chunk: int,
    fixed: int | None = None,
    drafts: int = 0,
    decode: Sequence[int] = ROW_BUCKETS,
) -> PassSizes:
    """Row buckets for `slots` sequences of `ctx` positions and prefill passes of at most `chunk` rows. fixed: the rows
    of every pass instead. drafts: most draft tokens of a sequence in a pass. decode: buckets of decode passes."""
    most = fixed or max(min(chunk, ctx * slots), slots + drafts, min(DRAFT_ROWS, slots * (1 + drafts)))
    few = DRAFT_BUCKETS if drafts else ROW_BUCKETS
    rows, outs, alone = ((most,),) * 3 if fixed else (buckets(most, few), buckets(slots), buckets(slots, decode))
    logits = _within(rows, LOGITS_BYTES // (4 * hp.vocab))
    hidden = _within(rows, HIDDEN_BYTES // (4 * hp.n_streams * hp.hidden * (hp.n_layers + 1)))
    return PassSizes(rows, outs, alone, logits, hidden, drafts)


def fixed_rows(backend: str, slots: int) -> int:
    """Rows of every pass of a deterministic engine. On Vulkan a plan's rows select the kernel variant, and a row's sums
    do not depend on other rows. On cpu BLAS's sums depend on the row count, so it is 1 with a single slot."""
    if backend != "cpu":
        return max(FIXED_ROWS, slots)
    if slots > 1:
        raise ValueError(f"deterministic on cpu runs one sequence at a time, not {slots}")
    return 1


def _within(sizes: Sequence[int], most: int) -> int:
    """The largest bucket of at most `most` rows, else the smallest."""
    return max((s for s in sizes if s <= most), default=sizes[0])
