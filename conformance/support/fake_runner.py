"""A simulated device for the scheduler's tests: memory, block tables and a next token for each slot; it runs passes.

A row reads from the cache what its sequence's table says: of global groups every earlier position, of the others the
window. Its written value and its sampled token depend on every value read. A wrong block, one reused too early, a stale
block, a wrong position or a wrong token therefore changes every later token. Unwritten memory is noise. So is, to other
sequences, what a sequence writes in the same pass: on a device that may or may not be visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from conformance.support.audit import audit
from hybrid.engine.blocks import Blocks, Group
from hybrid.engine.request import Options, Request
from hybrid.engine.scheduler import BatchCap, Limits, Pass, Scheduler

VOCAB = 23
Place = tuple[str, int, int]
"""Group, block, position in it."""


def row_value(token: int, position: int, seen: Sequence[tuple[int, ...]]) -> int:
    """The value that a row writes to the cache, from what it reads of each group."""
    return hash((token, position, *map(hash, seen)))


def chosen(value: int) -> int:
    """The token after a row that has written `value`."""
    return hash((value, 1)) % VOCAB


class Oracle:
    """One sequence alone, with a private cache."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows = tuple(windows)

    @lru_cache(maxsize=20000)  # noqa: B019
    def values(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The values that the rows of `ids` write."""
        if not ids:
            return ()
        before = self.values(ids[:-1])
        n = len(before)
        seen = [before[max(0, n - w + 1) :] if w else before for w in self.windows]
        return (*before, row_value(ids[-1], n, seen))

    def next(self, ids: Sequence[int]) -> int:
        for n in range(0, len(ids), 100):
            self.values(tuple(ids[:n]))  # limit the recursion depth
        return chosen(self.values(tuple(ids))[-1])

    def text(self, prompt: Sequence[int], most: int, ends: frozenset[int]) -> list[int]:
        """The tokens that continue a prompt."""
        ids = list(prompt)
        while len(ids) < len(prompt) + most:
            ids.append(self.next(ids))
            if ids[-1] in ends:
                break
        return ids[len(prompt) :]


class Runner:
    """groups and block: as the scheduler's blocks have them."""

    def __init__(self, groups: Sequence[Group], block: int, slots: int, table: int) -> None:
        self.groups, self.block, self.shape = tuple(groups), block, (slots, table)
        self._garbage = 0
        self.passes = 0
        self.lose()

    def lose(self) -> None:
        """Lose all memory contents."""
        slots, table = self.shape
        self.memory = {
            g.name: [[self._noise() for _ in range(self.block)] for _ in range(g.blocks)] for g in self.groups
        }
        self.tables = {
            g.name: [[self._noise() % g.blocks for _ in range(table)] for _ in range(slots)] for g in self.groups
        }
        self.numbers = list(self.tables)
        self.next = [(self._noise() % VOCAB, self._noise()) for _ in range(slots)]

    def run(self, done: Pass) -> tuple[list[int], list[int]]:
        """(tokens, accepted count of each run that samples), as `Scheduler.commit` takes them."""
        assert len({write[:3] for write in done.writes}) == len(done.writes), "one entry of a table written twice"
        for group, slot, index, block in done.writes:
            self.tables[self.numbers[group]][slot][index] = block
        assert len({run.slot for run in done.runs}) == len(done.runs), "two runs of one slot"
        for seq, _, start, ids, *_ in done.runs:
            assert not any(a < start + len(ids or (0,)) < b for a, b in seq.spans), f"{seq.id}: a span is cut"
        whose: dict[Place, int] = {}  # the writer of each position in this pass
        for _, slot, start, ids, *_ in done.runs:
            for position in range(start, start + len(ids or (0,))):
                for g in self.groups:
                    place = self._place(g, slot, position)
                    assert whose.setdefault(place, slot) == slot, "two sequences write one position"
        written: dict[Place, int] = {}
        tokens: list[int] = []
        counts: list[int] = []
        for seq, slot, start, ids, wants, _ in done.runs:
            if ids is None:
                token, position = self.next[slot]
                assert position == start, f"{seq.id}: the device continues at {position}, the host at {start}"
                ids = (token,)
            values = []
            for position, token in enumerate(ids, start):
                seen = [self._read(g, slot, position, whose, written) for g in self.groups]
                values.append(row_value(token, position, seen))
                for g in self.groups:
                    written[self._place(g, slot, position)] = values[-1]
            if done.capture is not None:
                if seq.finish is None:
                    seq.captured.append((start, tuple(values)))
            elif wants:
                picked = [chosen(value) for value in values[-wants:]]
                n = 1
                while n < wants and picked[n - 1] == ids[n]:  # accepted drafts
                    n += 1
                tokens += picked[:n]
                counts.append(n)
                self.next[slot] = (picked[n - 1], start + len(ids) - wants + n)
        for (group, block, offset), value in written.items():
            self.memory[group][block][offset] = value
        assert (
            sum(len(run.ids or (0,)) for run in done.runs) == done.rows
            and sum(run.wants for run in done.runs) == done.outs
        )
        self.passes += 1
        return tokens, counts

    def _place(self, group: Group, slot: int, position: int) -> Place:
        return group.name, self.tables[group.name][slot][position // self.block], position % self.block

    def _read(
        self, group: Group, slot: int, position: int, whose: dict[Place, int], written: dict[Place, int]
    ) -> tuple[int, ...]:
        """The rows that a row sees of its sequence."""
        memory, found = self.memory[group.name], []
        for p in range(max(0, position - group.window + 1) if group.window else 0, position):
            place = self._place(group, slot, p)
            writer = whose.get(place)
            found.append(
                memory[place[1]][place[2]] if writer is None else written[place] if writer == slot else self._noise()
            )
        return tuple(found)

    def _noise(self) -> int:
        self._garbage += 1
        return hash((self._garbage, 7)) & 0xFFFFFFFF


class Uneven(BatchCap):
    """Sequences sit out steps; the cap varies."""

    def __init__(self) -> None:
        super().__init__((1, 64), ())
        self.asked = self.rested = 0

    def fewer(self, n: int) -> int:
        self.asked += 1
        return max(0, n - self.asked * 7 % 3)

    def pays(self, n: int) -> bool:
        self.rested += 1
        return True


class Host:
    """A constraint, for requests whose tokens the host helps to sample."""

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        pass

    def copy(self) -> Host:
        return self


def request(
    id: Any, prompt: Sequence[int], limit: int, *, priority: int = 0, ahead: bool = True, **options: Any
) -> Request:
    """A request without a tokenizer. ahead: whether the device samples without the host."""
    wanted = {name: options.pop(name) for name in ("speculate",) if name in options}
    given = Options(max_tokens=limit, priority=priority, constraint=None if ahead else Host(), **wanted)
    return Request(id, prompt, given, **options)


class Guides:
    """A SamplingState for a Speculator, whose constraints allow everything. expected: tokens that a request's
    constraint expects."""

    def __init__(self, scheduler: Scheduler, expected: Callable[[Request], Sequence[int]]) -> None:
        self.scheduler, self.expected = scheduler, expected

    def constrained(self, slots: Iterable[int]) -> bool:
        some = set(slots)
        return any(r.slot in some for r in self.scheduler.running if r.options.constraint is not None)

    def likely(self, slot: int) -> Sequence[int]:
        return self.expected(next(r for r in self.scheduler.running if r.slot == slot))

    def allowed(self, slot: int, drafts: Sequence[int]) -> tuple[int, ...]:
        return tuple(drafts)


class Loop:
    """A scheduler with its runner; passes run in order."""

    def __init__(
        self,
        groups: Sequence[Group],
        block: int,
        limits: Limits,
        clock: Callable[[], float] = float,
        cap: BatchCap | None = None,
    ) -> None:
        blocks = Blocks(groups, block)
        self.scheduler = Scheduler(blocks, limits, clock, cap)
        self.runner = Runner(blocks.groups, block, limits.slots, -(-limits.ctx // block))
        self.oracle = Oracle([g.window for g in blocks.groups])
        self.passes: list[Pass] = []
        """All passes so far."""
        self._flights: list[Pass] = []

    def add(self, prompt: Sequence[int], limit: int, **options: Any) -> Request:
        made = request(len(prompt), prompt, limit, **options)
        self.scheduler.add(made)
        return made

    def step(self) -> Pass | None:
        """Submit the next pass, then commit the oldest in flight."""
        done = self.scheduler.schedule()
        if done is not None:
            self.passes.append(done)
            self._flights.append(done)
        if self._flights and (done is None or len(self._flights) == self.scheduler.limits.ahead):
            oldest = self._flights.pop(0)
            self.scheduler.commit(oldest, *self.runner.run(oldest))
        audit(self.scheduler)
        return done

    def steps(self, n: int) -> list[Pass]:
        return [done for done in (self.step() for _ in range(n)) if done is not None]

    def drain(self) -> None:
        """Run until all requests ended; every text must equal that of its sequence alone."""
        for _ in range(5000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("a request never ends")

    def right(self, *streams: Request) -> bool:
        """Whether texts are complete and equal those of each sequence alone."""
        return all(s.generated == self.oracle.text(s.ids[: s.n_prompt], s.last - s.n_prompt, s.ends) for s in streams)
