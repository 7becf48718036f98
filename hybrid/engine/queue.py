"""Requests that wait for a slot: in the order of their arrival, higher priorities first, nobody overtaken without
end."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

from hybrid.core.errors import ContextExceeded, QueueFull
from hybrid.engine.blocks import Blocks
from hybrid.engine.sequence import Limits, Stream

in_order = attrgetter("order")
KEPT = 64
"""Requests that have ended whose deadlines are kept in any case."""


def remove(streams: list[Stream], stream: Stream) -> None:
    """Take a stream out of a list that is in order."""
    index = bisect_left(streams, stream.order, key=in_order)
    assert streams[index] is stream
    del streams[index]


def length_at_end(stream: Stream, ctx: int, blocks: Blocks) -> int:
    """The tokens that a sequence has at most, its prompt's included. ContextExceeded where it can never run so far."""
    if stream.n_prompt >= ctx:
        raise ContextExceeded(
            f"a prompt of {stream.n_prompt} tokens leaves no room in the context of {ctx}: "
            "shorten it or load the model with a larger ctx"
        )
    last = min(stream.n_prompt + stream.limit, ctx)
    for group in blocks.groups:
        need = group.need(last - 1, blocks.block)  # the last token is not run
        if need > group.blocks:
            raise ContextExceeded(
                f"{stream.n_prompt} tokens and {last - stream.n_prompt} to generate need {need} blocks of {blocks.block} "
                f"positions in {group.name} layers, and the cache has {group.blocks}: ask for fewer tokens or give the model "
                "more memory"
            )
    return last


def has_room(blocks: Blocks, running: Sequence[Stream], prompts: Sequence[Stream], stream: Stream) -> bool:
    """Whether there are blocks for what is known of a sequence, beside what the others need: those whose prompts run,
    all of theirs, and every other one a block. What is alone always fits (`length_at_end`)."""
    if not running:
        return True
    for g, pool in enumerate(blocks.pools):
        want = len(running)
        for s in (*prompts, stream):
            assert s.held is not None
            want += max(0, pool.group.need(len(s.ids) + 1, blocks.block) - (s.held.size - s.held.first[g]))
        if want > pool.available:
            return False
    return True


class Queue:
    """limits: queue, how many wait at most (beside those that are put back); overtakes, see `Limits`. clock: of
    deadlines, in seconds."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.streams: list[Stream] = []
        """In order."""
        self._limits, self._clock = limits, clock
        self._arrivals = self._back = 0  # _back: those that have run and wait again
        self._deadlines: list[tuple[float, int, Stream]] = []  # a heap; of some that have ended too
        self._stale = 0  # requests with a deadline that have ended since it was made
        self._ends: deque[float] = deque(maxlen=33)  # when requests ended

    def put(self, stream: Stream) -> None:
        """A request that has come just now. QueueFull."""
        if (fresh := len(self.streams) - self._back) >= self._limits.queue:
            raise QueueFull(fresh, self._until_one_ends())
        self._arrivals += 1
        stream.number = self._arrivals
        stream.order = (1, -stream.priority, stream.number) if self._limits.overtakes else (0, 0, stream.number)
        if stream.deadline is not None:
            heappush(self._deadlines, (stream.deadline, stream.number, stream))
        insort(self.streams, stream, key=in_order)

    def put_back(self, stream: Stream) -> None:
        """One that has run and must wait again: where it was."""
        insort(self.streams, stream, key=in_order)
        self._back += 1

    def remove(self, stream: Stream) -> None:
        remove(self.streams, stream)
        self._back -= stream.entered

    def pop(self) -> Stream:
        """The first; counts it for those who came earlier and still wait."""
        stream, waiting, late = self.streams.pop(0), self.streams, False
        self._back -= stream.entered
        if not waiting or stream.entered or stream.order[:2] == waiting[0].order[:2] == waiting[-1].order[:2]:
            return stream  # all are alike: in the order of their arrival
        for other in waiting:
            if other.number < stream.number:
                other.overtaken += 1
                if other.overtaken >= self._limits.overtakes and other.order[0]:
                    other.order, late = (0, 0, other.number), True
        if late:
            waiting.sort(key=in_order)
        return stream

    def late(self) -> list[Stream]:
        """Those whose deadline has passed, each once, whether they wait or run; some that have ended may be among
        them."""
        found: list[Stream] = []
        now = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append(heappop(self._deadlines)[2])
        return found

    def ended(self, stream: Stream) -> None:
        """Note that a request has ended: how long others wait is guessed from that. Its deadline is forgotten when as
        many have ended as have not, so that a server's memory does not hold the requests of its last minutes."""
        self._ends.append(self._clock())
        self._stale += stream.deadline is not None
        if self._stale > KEPT and 2 * self._stale > len(self._deadlines):
            self._deadlines = [d for d in self._deadlines if d[2].finish is None]
            heapify(self._deadlines)
            self._stale = 0

    def _until_one_ends(self) -> float:
        """Seconds, by those that ended last."""
        ends = self._ends
        return min(60.0, max(0.1, (ends[-1] - ends[0]) / (len(ends) - 1))) if len(ends) > 1 else 1.0
