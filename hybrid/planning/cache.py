"""Sizes of the paged KV cache.

Layers with full attention (`global`) have one block for every `block` positions of the context. Layers with a sliding
window (`local`) have a ring of blocks, assigned cyclically.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.core.hparams import HParams
from hybrid.core.plan import ENTRY_WORDS, MESSAGE_HEADER, OUT_WORDS, ROW_WORDS

BLOCK = 32  # positions per block
MAX_SLOTS = 256
DEFAULT_CTX = 4096  # default positions per sequence, at most the model's context
MOST_ROWS = 8192  # of a pass, as specs/axes.toml limits tokens


@dataclass(frozen=True, slots=True)
class CacheShape:
    """ctx: positions per sequence. window: of local layers in positions, the row's own included (0: no local layers).
    chunk: most rows of one sequence in a pass. slots: sequences. rows: most rows of any pass (0: chunk). held: blocks
    of a global and of a local layer (0: enough for all slots at full context). Construct it with `of`."""

    ctx: int
    window: int
    chunk: int
    slots: int
    block: int = BLOCK
    rows: int = 0
    held: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1..{MAX_SLOTS}, not {self.slots}")
        for key in ("ctx", "chunk", "block"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        if min(self.held) < 0:
            raise ValueError(f"held must be numbers of blocks, not {self.held}")

    @classmethod
    def of(cls, hp: HParams, ctx: int, slots: int, rows: int, held: tuple[int, int] = (0, 0)) -> CacheShape:
        """For a model, with prefill passes of at most `rows` rows."""
        return cls(ctx, hp.window, min(rows, ctx), slots, rows=rows, held=held)

    @property
    def table(self) -> int:
        """Entries of a sequence's block table: enough blocks for the context."""
        return -(-self.ctx // self.block)

    @property
    def ring(self) -> int:
        """Blocks of a local layer's ring: enough for window - 1 + chunk consecutive positions."""
        if self.window <= 0:
            return 1
        span = self.window - 1 + self.chunk
        return min(self.table, (span + self.block - 2) // self.block + 1)

    @property
    def entries(self) -> int:
        """Most block-table entries in a pass's message: those of a fully cached context, and of each block that the
        pass's rows may begin."""
        return 2 * (self.table + 2 * self.slots + self.most_rows // self.block + 1)

    @property
    def most_rows(self) -> int:
        return max(self.rows or self.chunk, self.slots)

    @property
    def message(self) -> int:
        """Words of a pass's message, if all of its rows are output rows."""
        return MESSAGE_HEADER + (ROW_WORDS + OUT_WORDS) * self.most_rows + ENTRY_WORDS * self.entries

    @property
    def global_blocks(self) -> int:
        return self.held[0] or self.slots * self.table

    @property
    def local_blocks(self) -> int:
        return self.held[1] or self.slots * self.ring
