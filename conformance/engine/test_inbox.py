"""Messages to the device: their contents and addresses; none is overwritten before it was read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.support.fake_runner import request
from hybrid.core.plan import INBOX_SETS
from hybrid.engine.runner import CONTINUES, Inbox, message
from hybrid.engine.scheduler import Pass, Run
from hybrid.planning.cache import CacheShape

SHAPE = CacheShape(ctx=64, window=10, chunk=8, slots=2)


class Device:
    """Records its calls."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def write(self, name: str, value: Any, row: int = 0) -> None:
        self.said.append((name, value.array.tolist(), row))

    def wait(self, ticket: int | None = None) -> None:
        self.said.append(("wait", ticket))


def rows(count: int, **more: Any) -> Pass:
    """A pass in which so many sequences continue."""
    one = request(0, [1], 9)
    return Pass(1, [Run(one, slot, CONTINUES, None, 1) for slot in range(count)], rows=count, outs=count, **more)


def test_a_message_is_header_rows_wanted_rows_and_entries() -> None:
    made = message(9, rows(2, writes=[(1, 1, 3, 7), (0, 0, 2, 5)]))
    assert made.dtype == np.int32
    assert made.tolist() == [9, 2, 2, 2, 0, 0, 0, 0, -1, -1, 0, -1, -1, 1, 0, -1, 1, -1, 1, 1, 3, 7, 0, 0, 2, 5]
    assert message(1, rows(1), np.array([4], np.int32)).tolist()[-2:] == [0, 4]


def test_a_place_is_written_again_when_its_pass_is_done() -> None:
    device: Any = Device()
    inbox = Inbox(device, SHAPE)
    for i in range(INBOX_SETS + 2):
        inbox.put(rows(1))
        for ticket in range(100 + 3 * i, 103 + 3 * i):  # the pass, and two that continue it
            inbox.submitted(ticket)
    places = [(said[1][0], said[2]) for said in device.said if said[0] == "inbox"]
    assert places == [(1 + 3 * i, i % INBOX_SETS * SHAPE.message) for i in range(INBOX_SETS + 2)]
    waits = [i for i, said in enumerate(device.said) if said[0] == "wait"]
    assert [device.said[i] for i in waits] == [("wait", 100), ("wait", 103)]
    assert all(device.said[i + 1][0] == "inbox" for i in waits)


def test_after_a_submit_that_failed_the_count_begins_anew() -> None:
    """Far enough that no old message has the number of a later pass."""
    device: Any = Device()
    inbox = Inbox(device, SHAPE)
    inbox.put(rows(1))
    inbox.begun += 5
    inbox.lost_count()
    inbox.put(rows(1))
    (turn,) = (said for said in device.said if said[0] == "turn")
    assert device.said[1] == ("wait", None) and turn[1][0] > 5 + 100 and device.said[-1][1][0] == turn[1][0] + 1


def test_messages_that_do_not_fit_are_refused() -> None:
    inbox = Inbox(Device(), SHAPE)  # type: ignore[arg-type]
    inbox.put(rows(8, writes=[(0, 0, 0, 0)] * SHAPE.entries))
    with pytest.raises(ValueError, match=r"9 rows with .* entries of block tables take .* words"):
        inbox.put(rows(9, writes=[(0, 0, 0, 0)] * SHAPE.entries))
