"""Errors for the words that a pass leaves in `history` in place of a token."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from hybrid.core.plan import FAULTED, NOT_FINITE


class NotFinite(RuntimeError):
    """The logits after some position are NaN or infinite: no token can be sampled from them."""

    def __init__(self, path: Path, position: int, slot: int | None = None) -> None:
        where = f"after position {position}" + ("" if slot is None else f" of slot {slot}")
        super().__init__(
            f"{path}: the logits {where} are NaN or infinite. A weight may be damaged: python -m hybrid.inspect "
            f"{shlex.quote(str(path))} --check-finite names its tensor; where none is, the activations are beyond float16: "
            "use precision exact"
        )
        self.position, self.slot = position, slot


def fault(word: int, path: Path, slot: int, position: int) -> RuntimeError:
    """The error for a negative word of `history` at a position, whose token the pass before it should have sampled."""
    if word == NOT_FINITE:
        return NotFinite(path, position - 1, slot)
    if word == FAULTED:
        return RuntimeError(
            f"{path}: no token was chosen for position {position} of slot {slot}: its pass was void and could not be run again; "
            "release the slot and prompt it anew"
        )
    return RuntimeError(
        f"{path}: the device left {word} as the token for position {position} of slot {slot}: no such word"
    )


def check_finite(path: Path, logits: np.ndarray, positions: np.ndarray) -> None:
    """NotFinite for the first row of logits float32 [rows, vocab] that holds NaN or infinity; rows are of
    `positions`."""
    # The extremes of a row with a NaN are NaN; nothing of the matrix's size is made.
    wrong = ~(np.isfinite(logits.max(-1)) & np.isfinite(logits.min(-1)))
    if wrong.any():
        raise NotFinite(path, int(positions[wrong.argmax()]))
