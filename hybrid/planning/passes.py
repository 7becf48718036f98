"""Row counts that an engine's plans are made for, by what its device can multiply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hybrid.core.hparams import HParams
from hybrid.spec.schedule import CAPABILITIES

ROW_BUCKETS = (1, 8, 32, 128, 512)
GUESSED_ROWS = 32
"""Rows of a pass up to which several sequences may all have guesses."""
GUESSED_BUCKETS = (1, 2, 4, 8, 16, 32, 128, 512)  # where passes verify guesses: few rows cost by their number
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
)  # of decode passes where few rows have other kernels than many
CHUNK, MATRIX_CHUNK = 512, 2048  # rows of a prefill pass; where matrix units multiply, more are needed to fill them
FIXED_ROWS = 8  # of every pass of a deterministic engine on Vulkan
LOGITS_BYTES, HIDDEN_BYTES = 64 << 20, 256 << 20  # most host memory for one pass of logits() and hidden_states()


def buckets(most: int, sizes: Sequence[int] = ROW_BUCKETS) -> tuple[int, ...]:
    """Row counts to compile plans for: those below `most`, and `most` itself."""
    return (*(s for s in sizes if s < most), most)


def bucket_of(n: int, sizes: Sequence[int]) -> int:
    """The smallest bucket that holds n rows."""
    for size in sizes:
        if n <= size:
            return size
    raise ValueError(f"{n} rows do not fit in the largest bucket, {sizes[-1]}")


def capabilities_of(has: Callable[[str], bool]) -> frozenset[str]:
    """The features of a device (by its `has`) that schedules choose precisions by."""
    return frozenset(c for c in CAPABILITIES if has(c))


def chunk_of(capabilities: Collection[str]) -> int:
    """Default rows of a prefill pass on a device with these capabilities."""
    return MATRIX_CHUNK if "f16_matrices" in capabilities else CHUNK


def decode_buckets_of(capabilities: Collection[str]) -> tuple[int, ...]:
    """Row counts of decode passes on a device with these capabilities. Where matrix units multiply, few rows and many
    have other kernels; elsewhere a pass costs what its live rows cost."""
    return MATRIX_BUCKETS if "f16_matrices" in capabilities else ROW_BUCKETS


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Row counts to make plans for, ascending: of prefill passes (`rows`), of sequences that get a token there
    (`outs`), of decode passes (`decode`). `logits`, `hidden`: most rows of a pass that reads those back."""

    rows: tuple[int, ...]
    outs: tuple[int, ...]
    decode: tuple[int, ...]
    logits: int
    hidden: int
    guesses: int = 0
    """Most guessed tokens of a pass."""

    @property
    def wanted(self) -> int:
        """Most rows of a prefill pass whose tokens are chosen: of every sequence one, and guesses of one or of
        several."""
        slots = self.outs[-1]
        return min(max(slots + self.guesses, min(GUESSED_ROWS, slots * (1 + self.guesses))), self.rows[-1])

    @property
    def wants(self) -> tuple[int, ...]:
        """The same as numbers to make plans for: of sequences, and, with guesses, of few rows of one."""
        few = (
            tuple(n for n in GUESSED_BUCKETS if n < self.wanted)
            if self.guesses and len(self.outs) < len(self.rows)
            else ()
        )
        return tuple(sorted({*self.outs, *few, self.wanted}))


def pass_sizes(
    hp: HParams,
    ctx: int,
    slots: int,
    chunk: int,
    fixed: int | None = None,
    guesses: int = 0,
    decode: Sequence[int] = ROW_BUCKETS,
) -> PassSizes:
    """For `slots` sequences of `ctx` positions and prefill passes of at most `chunk` rows; or every pass of `fixed`.
    guesses: most guessed tokens of a pass. decode: rows of decode passes."""
    most = fixed or max(min(chunk, ctx * slots), slots + guesses, min(GUESSED_ROWS, slots * (1 + guesses)))
    few = GUESSED_BUCKETS if guesses else ROW_BUCKETS
    rows, outs, alone = ((most,),) * 3 if fixed else (buckets(most, few), buckets(slots), buckets(slots, decode))
    logits = _within(rows, LOGITS_BYTES // (4 * hp.vocab))
    hidden = _within(rows, HIDDEN_BYTES // (4 * hp.n_streams * hp.hidden * (hp.n_layers + 1)))
    return PassSizes(rows, outs, alone, logits, hidden, guesses)


def fixed_rows(backend: str, slots: int) -> int:
    """Rows of every pass of a deterministic engine. A kernel's variant follows from a plan's rows, and its sums for one
    row from no other row; on cpu BLAS's sums depend on how many rows there are, so there is only one."""
    if backend != "cpu":
        return max(FIXED_ROWS, slots)
    if slots > 1:
        raise ValueError(f"deterministic on cpu runs one sequence at a time, not {slots}")
    return 1


def _within(sizes: Sequence[int], most: int) -> int:
    """The largest bucket of at most `most` rows, else the smallest."""
    return max((s for s in sizes if s <= most), default=sizes[0])
