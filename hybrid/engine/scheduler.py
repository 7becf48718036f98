"""Which rows the next pass runs: of many sequences that come, go, wait and run out of room at any time.

    scheduler.add(stream)                 at any time, as `cancel`
    p = scheduler.schedule()              None where nothing can run now; the next one may be made while this one runs
    ...                                   the device: p.writes, p.params, then p.runs
    for stream, n in scheduler.commit(p, tokens): ...

Sequences are served in the order of their arrival, higher priorities first; but no request is overtaken more than
`Limits.overtakes` times. Every stream that decodes has its row in every pass, or takes turns where all get more so
(turns.py); prompts share the rows that are left, in order, a part being kept for the next one. Where blocks run out,
the last in order gives its own up, waits, and is run again from what the cache still holds: the first in order always
goes on; others may not.

Passes run in the order in which they were made, each after all that came before has been written: so blocks and slots
are given again as soon as no later pass needs them. Plain host code for one thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence

from hybrid.engine.blocks import Blocks, Write
from hybrid.engine.queue import Queue, has_room, in_order, length_at_end, remove
from hybrid.engine.sequence import Counts, Ending, Limits, Pass, Run, Stream
from hybrid.engine.turns import Turns

SHARE = 4  # of the rows for prompts, one of so many is kept for those behind the first


class Scheduler:
    """clock: of deadlines, seconds. slots: those that are free, where others take some too. turns: where passes cost in
    steps. ready: whether the next token of a sequence with ahead=False can be chosen."""

    def __init__(
        self,
        blocks: Blocks,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        slots: list[int] | None = None,
        turns: Turns | None = None,
        ready: Callable[[Stream], bool] = lambda stream: True,
    ) -> None:
        self.ready = ready
        self.blocks, self.limits, self.counts, self.turns = blocks, limits, Counts(), turns
        self.max_writes = len(blocks.pools) * (
            limits.slots + limits.rows // blocks.block + 1 - (-limits.ctx // blocks.block)
        )
        """Of a pass."""
        self.number = 0  # of the last pass
        self._queue = Queue(limits, clock)
        self._running: list[Stream] = []  # in order
        self._prompts: list[Stream] = []  # those of the running whose prompts are not scheduled whole
        self._flights: deque[Pass] = deque()
        self._slots = list(range(limits.slots - 1, -1, -1)) if slots is None else slots  # free ones
        self._cooling: deque[tuple[int, int]] = deque()  # (pass, slot): free when that pass has been committed
        self._stuck: tuple[Stream, int] | None = None  # a request that did not fit, and blocks.given at that time
        self._writes: list[Write] = []  # of the next pass, so are these
        self._params: list[Stream] = []
        self._released: list[int] = []
        self._adopted = 0  # blocks that it takes from the cache

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._queue.streams)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def in_flight(self) -> int:
        """Passes that have not been committed."""
        return len(self._flights)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and nothing to wait for."""
        return not (self._queue.streams or self._running or self._flights)

    def add(self, stream: Stream) -> None:
        """Let a new sequence wait for its turn. QueueFull; ContextExceeded for one that would never fit."""
        if stream.held is not None:
            raise ValueError(f"sequence {stream.id} has been added before")
        last = length_at_end(stream, self.limits.ctx, self.blocks)
        self._queue.put(stream)
        stream.last, stream.held = last, self.blocks.held()

    def cancel(self, stream: Stream, reason: Ending = "cancelled") -> bool:
        """End a sequence now, whatever of it is in flight. False where it has ended already."""
        if stream.finish is not None:
            return False
        self._end(stream, reason)
        return True

    def expire(self) -> list[Stream]:
        """End the sequences whose deadline has passed."""
        return [stream for stream in self._queue.late() if self.cancel(stream, "deadline")]

    def draft(self, stream: Stream, ids: Sequence[int]) -> None:
        """Verify these tokens, which may come next, in the sequence's next row; fewer of them, or none, where there is
        no room."""
        if stream.ahead or stream.flying:
            raise ValueError("drafts are for a sequence with ahead=False, none of whose tokens is in flight")
        stream.drafts = tuple(ids)

    # --- a pass ------------------------------------------------------------------------------------------------------

    def schedule(self, at_once: int = 1) -> Pass | None:
        """The next pass; None where nothing can run before a pass has been committed, or before more requests come.
        at_once: passes in flight that count as one, because one submit runs them."""
        if len(self._flights) >= self.limits.ahead * at_once or not (self._running or self._queue.streams):
            return None
        runs, now, limit = list[Run](), self.number + 1, self.limits.rows
        if self._prompts and self._prompts[0] is self._running[0]:
            self._first_goes_on(self._prompts[0], now)
        rows = self._decode(runs)
        if runs:
            limit = self.limits.mixed or limit
        if self._queue.streams:
            self._admit(limit - rows, now)
        if self._prompts:
            rows += self._prefill(runs, limit - rows, now)
        if not runs:
            return None
        outs = sum([run[4] for run in runs])
        done = Pass(now, runs, self._writes, self._params, self._released, rows, outs)
        self._writes, self._params, self._released, self._adopted = [], [], [], 0
        self.number = now
        self._flights.append(done)
        self.counts.passes += 1
        self.counts.rows += rows
        return done

    def commit(
        self, done: Pass, tokens: Sequence[int], counts: Sequence[int] | None = None
    ) -> list[tuple[Stream, int]]:
        """Take the tokens that the oldest pass in flight has chosen: for each run that wants any, `counts` of them (one
        each; where drafts were verified, those accepted and the one after them). Returns (sequence, how many of its ids
        are new) for each sequence that had not ended; one whose `finish` is set now has given its slot and blocks
        back."""
        if not self._flights or self._flights[0] is not done:
            raise ValueError(
                f"pass {done.number} is not the oldest in flight: commit passes in order, and none that was lost"
            )
        done.check(len(tokens), counts)
        tokens = tokens if isinstance(tokens, list) else [int(t) for t in tokens]
        self._flights.popleft()
        while self._cooling and self._cooling[0][0] <= done.number:
            self._slots.append(self._cooling.popleft()[1])
        block, at, news, total = self.blocks.block, 0, [], self.counts.generated
        given = iter(counts or ())
        for stream, _, _, _, wants in done.runs:
            if not wants:
                continue
            n = 1 if counts is None else next(given)
            first, at = at, at + n
            if stream.finish is not None:
                continue
            stream.flying -= 1
            ids = stream.ids
            ids.append(tokens[first])
            if wants > 1:
                n = self._verified(stream, tokens[first + 1 : at], wants)
            elif not (len(ids) - 1) % block and stream.slot is not None:  # else no block has been filled
                self.blocks.seal(stream.held, ids, len(ids) - 1, done.number)  # type: ignore[arg-type]
            if ids[-1] in stream.ends:
                self._end(stream, "eos")
            elif len(ids) >= stream.last:
                self._end(stream, "length" if stream.last == stream.n_prompt + stream.limit else "context")
            total += n
            news.append((stream, n))
        self.counts.generated = total
        return news

    def _verified(self, stream: Stream, tokens: Sequence[int], wants: int) -> int:
        """Take what followed the first token of a sequence whose drafts have been verified; returns how many tokens it
        got."""
        ids, before = stream.ids, len(stream.ids) - 1
        for token in tokens:
            if ids[-1] in stream.ends:
                break
            ids.append(token)
        self.counts.drafted += wants - 1
        self.counts.accepted += len(ids) - before - 1
        if stream.slot is not None:
            stream.position = len(ids) - 1  # rows of drafts that were refused are run again, with other tokens
            self.blocks.seal(stream.held, ids, len(ids) - 1, self.number)  # type: ignore[arg-type]
        return len(ids) - before

    def lose(self, cache: bool = True) -> None:
        """The passes in flight have done nothing: forget them, and what they were to leave in the cache, or (cache) all
        that it holds; every sequence starts again from the tokens that are known."""
        since = self._flights[0].number if self._flights else self.number + 1
        self._flights.clear()
        for stream in reversed(list(self._running)):
            self._park(stream)
        for stream in self._queue.streams:
            stream.flying = 0
        self._slots.extend(slot for _, slot in self._cooling)
        self._cooling.clear()
        self.blocks.clear(0 if cache else since)

    def put_back_last(self) -> bool:
        """Let the last in order wait, for somebody else who needs a slot or blocks; False where none runs. No pass may
        be in flight."""
        if not self._running:
            return False
        self._preempt(self._running[-1])
        return True

    # --- rows --------------------------------------------------------------------------------------------------------

    def _decode(self, runs: list[Run]) -> int:
        """A row of every sequence that decodes, and its drafts; returns how many."""
        rows, limits, spare = 0, self.limits, -1
        resting = self.turns.resting(self._running) if self.turns and not (self._prompts or self._queue.streams) else ()
        for stream in self._running:  # it loses its last ones where some are preempted
            if resting and stream in resting:
                continue
            position, flying = stream.position, stream.flying
            if stream.steady and position < stream.stop:
                runs.append(
                    tuple.__new__(Run, (stream, stream.slot, position, None, 1))
                )  # half of the time of Run(...)
                stream.position, stream.flying = position + 1, flying + 1
                rows += 1
                continue
            total = len(stream.ids) + flying
            if position != total - 1 or total >= stream.last or not self._may_choose(stream):
                continue
            if spare < 0:  # rows for drafts: every stream may want one
                most = min(limits.mixed or limits.rows, limits.outs or limits.slots)
                spare = most - min(len(self._running) + self.waiting, limits.slots)
            drafts, stream.drafts = (
                stream.drafts[: max(0, min(spare, stream.last - total - 1))] if stream.drafts else (),
                (),
            )
            if drafts and position + len(drafts) >= stream.until and not self._grow(stream, position + len(drafts) + 1):
                drafts = ()
            if position >= stream.until and not self._extend(stream, position + 1):
                continue
            ids: tuple[int, ...] | None = None if flying else (stream.ids[-1], *drafts)
            n = 1 + len(drafts)
            assert stream.slot is not None
            runs.append(Run(stream, stream.slot, position, ids, n))
            stream.position, stream.flying, stream.steady = position + n, flying + 1, stream.ahead
            spare -= n - 1
            rows += n
        if self._prompts:
            self._prompts = [s for s in self._prompts if s.position < len(s.ids)]
        return rows

    def _prefill(self, runs: list[Run], room: int, now: int) -> int:
        """Rows of prompts, in order, as long as there are any left; returns how many."""
        blocks, prompts, rows = self.blocks, self._prompts, 0
        for i, stream in enumerate(prompts):
            if rows == room:
                break
            if not self._may_choose(stream) or self._follow(stream, now):
                continue
            position, rest, held = stream.position, stream.rest, stream.held
            assert stream.slot is not None and held is not None
            behind = prompts[i + 1].rest if i + 1 < len(prompts) else 0
            n = min(rest, room - rows - min((room - rows) // SHARE, behind))
            if n < rest and n > (cut := (position + n) % blocks.block):
                n -= cut  # whole blocks: others that follow may take them
            if position + n > stream.until:
                blocks.slide(held, position)
                self._grow(stream, min(position + n, (held.size + blocks.room()) * blocks.block))
                n = min(n, stream.until - position)
                if n < 1:
                    continue
            if stream.found == position:
                blocks.anchor(held, position // blocks.block)
            runs.append(Run(stream, stream.slot, position, tuple(stream.ids[position : position + n]), int(n == rest)))
            rows += n
            stream.position = position + n
            self.counts.recomputed += max(0, min(stream.reached, position + n) - position)
            blocks.seal(held, stream.ids, position + n, now)
            if n == rest:
                stream.flying, stream.steady = 1, stream.ahead
                for end in (
                    len(stream.ids) - 1,
                    len(stream.ids),
                ):  # asked again, of which the last row is run; continued
                    blocks.anchor(held, end // blocks.block)
        self._prompts = [s for s in prompts if s.position < len(s.ids)]
        return rows

    def _may_choose(self, stream: Stream) -> bool:
        """Whether the host, where it takes part in choosing, has what it needs for the sequence's next token."""
        return stream.ahead or (not stream.flying and self.ready(stream))

    def _follow(self, stream: Stream, now: int) -> bool:
        """Let a prompt take the blocks that another sequence has computed meanwhile; whether that one computes the next
        too."""
        held, block = stream.held, self.blocks.block
        assert held is not None and stream.slot is not None
        if held.size * block != stream.position:
            return False
        n, coming = self.blocks.match(held, stream.ids, (len(stream.ids) - 1) // block, now)
        if n > held.size:
            before = stream.position
            if not self._adopt(stream, n):
                return True
            if not stream.reached:
                stream.cached += stream.position - before
                self.counts.cached += stream.position - before
        return coming

    def _adopt(self, stream: Stream, n: int) -> bool:
        """Take n blocks from the cache; False where a pass would have to write too much of block tables."""
        held = stream.held
        assert held is not None and stream.slot is not None
        new = n - held.size
        if self._adopted + new > -(-self.limits.ctx // self.blocks.block):
            return False
        self._adopted += new
        self.blocks.adopt(held, n, stream.slot, self._writes)
        stream.position = stream.until = stream.found = n * self.blocks.block
        return True

    # --- coming and going --------------------------------------------------------------------------------------------

    def _admit(self, room: int, now: int) -> None:
        """Let those in that wait, in order, while there are slots, blocks and rows for them."""
        room -= sum(s.rest for s in self._prompts)
        waiting = self._queue.streams
        while waiting and self._slots and (room > 0 or len(self._prompts) == 1):
            stream = waiting[0]
            if stream.flying or not self._enter(stream, now):
                return
            room -= stream.rest

    def _enter(self, stream: Stream, now: int) -> bool:
        """Give a waiting sequence a slot and what the cache holds of it; False, and nothing done, where it would not
        fit."""
        blocks, held = self.blocks, stream.held
        assert held is not None
        if self._stuck == (stream, blocks.given):
            return False
        n, _ = blocks.match(held, stream.ids, (len(stream.ids) - 1) // blocks.block, now)
        stream.slot, mark = self._slots[-1], len(self._writes)
        fits = self._adopt(stream, n)
        if not fits or not has_room(self.blocks, self._running, self._prompts, stream):
            blocks.release(held)
            if fits:
                self._adopted -= n
                self._stuck = (stream, blocks.given)
            del self._writes[mark:]
            stream.slot, stream.position, stream.until = None, 0, 0
            return False
        self._slots.pop()
        self._queue.pop()
        insort(self._running, stream, key=in_order)
        insort(self._prompts, stream, key=in_order)
        self._params.append(stream)
        if not stream.entered:
            stream.entered, stream.cached = True, stream.position
            self.counts.prompt += stream.n_prompt
            self.counts.cached += stream.cached
        return True

    def _first_goes_on(self, stream: Stream, now: int) -> None:
        """The first in order, a prompt, has room for a row before those that decode take theirs, whoever must go for
        it."""
        if not self._follow(stream, now) and stream.position >= stream.until:
            self._extend(stream, stream.position + 1)

    def _extend(self, stream: Stream, positions: int) -> bool:
        """Blocks for so many positions, if need be of those behind it in order; False where it is the last itself."""
        while not self._grow(stream, positions):
            last = self._running[-1]
            if last is stream:
                return False
            self._preempt(last)
        return True

    def _grow(self, stream: Stream, positions: int) -> bool:
        """Blocks for so many positions, if there are as many that nobody holds."""
        held, block = stream.held, self.blocks.block
        assert held is not None and stream.slot is not None
        self.blocks.slide(held, stream.position)
        if not self.blocks.grow(held, -(-positions // block), stream.slot, self._writes):
            return False
        stream.until = held.size * block
        stream.stop = min(stream.until, stream.last - 1)
        return True

    def _preempt(self, stream: Stream) -> None:
        self.counts.preemptions += 1
        stream.preemptions += 1
        self._park(stream)

    def _park(self, stream: Stream) -> None:
        """Let a running sequence wait, with nothing of its own but its tokens."""
        self._leave(stream, bool(stream.flying and self._flights))
        if not self._flights:
            stream.flying = 0
        stream.position = stream.until = stream.stop = stream.found = 0
        stream.steady, stream.drafts = False, ()
        self._queue.put_back(stream)

    def _leave(self, stream: Stream, cool: bool) -> None:
        """Take slot and blocks from a running sequence. cool: a pass in flight chooses a token in its slot, which is to
        be read."""
        assert stream.slot is not None and stream.held is not None
        stream.reached = max(stream.reached, stream.position)
        self.blocks.release(stream.held)
        remove(self._running, stream)
        if stream in self._prompts:
            self._prompts.remove(stream)
        if cool:
            self._cooling.append((self._flights[-1].number, stream.slot))
        else:
            self._slots.append(stream.slot)
        self._released.append(stream.slot)
        if self._writes:  # of a pass that is not made yet
            self._writes = [w for w in self._writes if w[1] != stream.slot]
        if stream in self._params:
            self._params.remove(stream)
        stream.slot = None

    def _end(self, stream: Stream, reason: Ending) -> None:
        stream.finish = reason
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        self._queue.ended(stream)
        if stream.slot is None:
            self._queue.remove(stream)
        else:
            self._leave(stream, False)
