"""What the host tells the device of a pass: one message in a buffer of several, which begin_pass takes on the device
when the pass begins (specs/ops/begin_pass.toml). So the host prepares passes while others run, and a pass without a
message goes on with the rows of the pass before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid.core.device import Device
from hybrid.core.plan import ENTRY_WORDS, INBOX_SETS, INBOX_TENSOR, MESSAGE_HEADER, OUT_WORDS, ROW_WORDS
from hybrid.core.tensor import Tensor
from hybrid.planning.cache import CacheShape

GOES_ON = -1
"""As a row's token: the one that was chosen for its slot last; as its position: that token's. -1 - n: n positions after
it."""
GUESSED = -2
"""As a row's token: what `guesses` has of slot 0 for the row's position; GUESSED - n: of slot n."""
FOLLOWS = -(1 << 30)
"""As a row's token: as GUESSED where that token stands (`known_until`), else the one that was chosen for its slot last;
FOLLOWS - n: of slot n. As such a row's position: the slot's next, or the last for which that holds, if it is before."""
TABLES = {"global": 0, "local": 1}
_BEHIND = 1000  # passes by which the count goes on where it is not known how many have begun


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a pass: tokens, positions, slots int32 [rows], out_rows int32 [outs] the rows whose logits are wanted,
    mask_rows int32 [outs] their rows of `masks` (None: no masks); entries: (table, slot, index, block) of block tables
    that change."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    out_rows: np.ndarray
    mask_rows: np.ndarray | None = None
    entries: Sequence[tuple[str, int, int, int]] = ()

    def message(self, number: int) -> np.ndarray:
        """int32 [words]: the message for pass `number`."""
        rows, outs, entries = len(self.tokens), len(self.out_rows), len(self.entries)
        at = np.cumsum([MESSAGE_HEADER, ROW_WORDS * rows, OUT_WORDS * outs, ENTRY_WORDS * entries])
        made = np.zeros(at[-1], np.int32)
        made[:4] = number, rows, outs, entries
        made[at[0] : at[1]].reshape(rows, ROW_WORDS).T[:] = self.tokens, self.positions, self.slots
        wanted = made[at[1] : at[2]].reshape(outs, OUT_WORDS)
        wanted[:, 0], wanted[:, 1] = self.out_rows, -1 if self.mask_rows is None else self.mask_rows
        if entries:
            made[at[2] :] = [word for table, *place in self.entries for word in (TABLES[table], *place)]
        return made


class Inbox:
    """The device's inbox, and the count of passes by which it finds its messages."""

    def __init__(self, device: Device, cache: CacheShape) -> None:
        self._device, self._words = device, cache.message
        self.begun = 0
        """Passes submitted: the device's `turn` once they have begun."""
        self.messages = 0
        """How many were put."""
        self._known = True
        self._taken: deque[int] = deque(maxlen=INBOX_SETS)  # tickets of the last messages' passes

    def put(self, rows: Rows) -> None:
        """The message of the next pass that is submitted; waits until the pass that had its place before has
        finished."""
        if not self._known:
            self._device.wait()
            self.begun += _BEHIND
            self._device.write("turn", Tensor.of(np.array([self.begun], np.uint32)))
            self._known = True
        if len(self._taken) == INBOX_SETS:
            self._device.wait(self._taken[0])
        message = rows.message(self.begun + 1)
        if len(message) > self._words:
            what = f"{len(rows.tokens)} rows with {len(rows.entries)} entries of block tables"
            raise ValueError(f"{what} take {len(message)} words of a pass's message, which has room for {self._words}")
        self._device.write(INBOX_TENSOR, Tensor.of(message), self.messages % INBOX_SETS * self._words)
        self.messages += 1

    def taken(self, ticket: int) -> None:
        """The ticket of the pass that takes the message which was put last."""
        self._taken.append(ticket)

    def lost_count(self) -> None:
        """A submit failed: some of its passes may have begun."""
        self._known = False
