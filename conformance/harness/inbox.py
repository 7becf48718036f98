"""The inbox message of begin_pass and its control words before the pass, for every kind of edge case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybrid.core.tensor import Tensor
from hybrid.harness import values
from hybrid.harness.cases import Case

HEADER, ENTRIES = 8, 5  # header words of a message; most table entries of a message
OUTSIDE = 0x3FFFFFFF
FOLLOWS = -(1 << 30)


def words(bind: dict[str, int]) -> int:
    """Words of the largest message of a case."""
    return HEADER + 3 * bind["R"] + 2 * bind["Q"] + 4 * 2 * ENTRIES


def live(case: Case) -> Tensor:
    """Control words u32 [8] after the previous pass. Kernels must not change the fault word and the words after it
    unless a fault occurs."""
    b, number = case.bind, _numbers(case, "live")
    rows = 1 + int(number[0]) % b["R"]
    return Tensor.of(np.array([rows, int(number[1]) % (b["Q"] + 1), number[2], number[3] % 2, *number[4:8]], np.uint32))


def inbox(case: Case, turn: int, next_position: np.ndarray) -> Tensor:
    """i32 [I]: a message for the pass after `turn`, unless the kind says otherwise, and one for an earlier pass."""
    kind, sets = case.kinds.get("inbox", ""), int(case.attrs["sets"])
    made = np.zeros((sets, case.bind["I"] // sets), np.int32)
    number = _numbers(case, "inbox")
    made[:, 0] = turn - np.arange(sets)
    at = sets - 1 if kind == "last_set" else int(number[0]) % sets
    if kind == "no_message":
        return Tensor.of(np.zeros(made.size, np.int32))
    message = _message(case, kind, next_position)
    made[at, : len(message)] = message
    made[at, 0] = turn + 2 if kind == "other_pass" else turn + 1
    if kind == "other_pass":
        made[(at + 1) % sets, : len(message)] = message
        made[(at + 1) % sets, 0] = turn if sets > 1 else turn + 2
    return Tensor.of(made.reshape(-1))


def _message(case: Case, kind: str, next_position: np.ndarray) -> np.ndarray:
    b, number = case.bind, _numbers(case, "message")
    rows = 0 if kind == "no_rows" else b["R"] if int(number[0]) % 2 else 1 + int(number[0]) % b["R"]
    outs = int(number[1]) % (b["Q"] + 1) if rows else 0
    body = _rows(case, kind, rows, next_position)
    wanted = np.stack(
        [_some(case, "wanted", outs, 0, max(rows, 1) - 1), _some(case, "masks", outs, -1, b["Q"] - 1)], axis=1
    )
    entries = np.concatenate([_entries(case, table) for table in (0, 1)])
    if kind == "outside":
        entries[::2, 1 + int(number[2]) % 2] = OUTSIDE
        entries[-1, 0] = 7
    header = [0, rows, outs, len(entries), 0, 0, 0, 0]
    return np.concatenate([np.array(header), body.reshape(-1), wanted.reshape(-1), entries.reshape(-1)]).astype(
        np.int32
    )


def _rows(case: Case, kind: str, rows: int, next_position: np.ndarray) -> np.ndarray:
    """[rows, 3]: token, position, slot. Rows of one position have one token: `history` stores one."""
    b = case.bind
    slots = _some(case, "slot", rows, 0, b["S"] - 1)
    places = _some(case, "place", rows, 0, b["C"] - 1)
    after = _some(case, "after", rows, 0, 3)
    choice = _some(case, "choice", rows, 0, 3)
    host, fixed = {
        "host_rows": (choice >= 0, choice >= 0),
        "going_on": (choice < 0, choice < 0),
        "ahead": (choice > 0, choice < 0),
        "drafted": (choice < 0, choice < 2),
        "following": (choice < 0, choice < 0),
    }.get(kind, (choice % 2 == 0, choice < 2))
    after = np.where(kind == "going_on", 0, after)
    where = np.where(fixed, places, next_position[slots] + after)
    tokens = (slots * 7919 + where * 31 + case.seed) % 262144
    drafted = -2 - (slots * 13 + where * 5 + case.seed) % (b["S"] + 1)  # the last index is out of range
    followed = FOLLOWS - (slots * 13 + case.seed) % (b["S"] + 1)  # likewise; the same for all rows of a slot
    tokens = np.where(host, tokens, {"drafted": drafted, "following": followed}.get(kind, np.array(-1)))
    at = np.where(kind == "following", np.where(choice < 2, FOLLOWS, -1), -1 - after)
    found = np.stack([tokens, np.where(fixed, places, at), slots], axis=1)
    if kind == "outside":
        found[::2, 2] = OUTSIDE
    return found


def _entries(case: Case, table: int) -> np.ndarray:
    """[n, 4]: table, slot, index, block; no entry twice."""
    size = case.bind["S"] * case.bind["MB"]
    places = values.permutation(case.seed, f"entries.{table}", size)[:ENTRIES]
    blocks = _some(case, f"blocks.{table}", len(places), 0, size - 1)
    return np.stack([np.full(len(places), table), places // case.bind["MB"], places % case.bind["MB"], blocks], axis=1)


def _some(case: Case, name: str, count: int, low: int, high: int) -> np.ndarray:
    return values.integers(case.seed, f"inbox.{name}", (max(count, 1),), low, high)[:count].astype(np.int64)


def _numbers(case: Case, name: str) -> np.ndarray:
    return values.integers(case.seed, f"numbers.{name}", (8,), 0, 9999).astype(np.int64)


TENSORS: dict[str, Callable[[Case, int, np.ndarray], Tensor]] = {
    "inbox": inbox,
    "live": lambda case, turn, next_position: live(case),
}
"""Makers of the tensors of domain `inbox`, from the case, the previous pass and next_position i32 [S]."""
