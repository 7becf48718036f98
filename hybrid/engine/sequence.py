"""What the scheduler deals in: sequences, the rows of a pass, and the limits of both. Data, no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from hybrid.engine.blocks import Held, Write

Ending = Literal["eos", "stop", "length", "context", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: sequences that run at a time. ctx: positions of a sequence. rows: most rows of a pass. mixed: most rows of
    a pass in which a stream decodes, so that its next token comes in time (None: rows). outs: most rows of a pass whose
    logits are wanted (None: slots). ahead: passes in flight at most. queue: requests that wait at most. overtakes:
    later requests that may go before one that waits, whatever their priority."""

    slots: int
    ctx: int
    rows: int
    mixed: int | None = None
    outs: int | None = None
    ahead: int = 2
    queue: int = 1024
    overtakes: int = 64

    def __post_init__(self) -> None:
        for key in ("slots", "ctx", "ahead", "queue"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        for key in ("rows", "mixed", "outs"):  # one row of every stream fits in every pass
            found = getattr(self, key)
            if found is not None and found < self.slots:
                raise ValueError(f"{key} must be at least the number of slots, {self.slots}, not {found}")
        if self.overtakes < 0:
            raise ValueError(f"overtakes must be 0 or more, not {self.overtakes}")


class Stream:
    """One request in the scheduler's terms: a sequence of tokens that grows.

    prompt: token ids, at least one. limit: tokens to generate at most. ends: ids that end it, kept as its last.
    priority: higher goes first. deadline: the scheduler's clock, in seconds. ahead: whether a row may run before its
    token is known on the host (not where the host chooses: constraints, verified drafts). tag: the caller's.
    """

    __slots__ = (
        "ahead",
        "cached",
        "deadline",
        "drafts",
        "ends",
        "entered",
        "finish",
        "flying",
        "found",
        "held",
        "id",
        "ids",
        "last",
        "limit",
        "n_prompt",
        "number",
        "order",
        "overtaken",
        "position",
        "preemptions",
        "priority",
        "reached",
        "slot",
        "steady",
        "stop",
        "tag",
        "until",
    )

    def __init__(
        self,
        id: Any,
        prompt: Sequence[int],
        limit: int,
        *,
        ends: Iterable[int] = (),
        priority: int = 0,
        deadline: float | None = None,
        ahead: bool = True,
        tag: Any = None,
    ) -> None:
        if not len(prompt):
            raise ValueError("the prompt is empty: it needs at least one token")
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}: tokens to generate at most")
        self.id, self.limit, self.ends, self.priority = id, limit, frozenset(ends), priority
        self.deadline, self.ahead, self.tag = deadline, ahead, tag
        self.ids: list[int] = list(prompt)
        """The prompt and the tokens that are known."""
        self.n_prompt = len(self.ids)
        self.slot: int | None = None
        """While it runs."""
        self.finish: Ending | None = None
        self.cached = 0
        """Tokens of the prompt that were not computed for it, because the cache held them."""
        self.preemptions = 0
        # The scheduler's own:
        self.held: Held | None = None
        """Its blocks, from `Scheduler.add` on."""
        self.last = 0
        """Length of `ids` at which it ends."""
        self.position = 0
        """Of its next row. Rows up to it have been scheduled."""
        self.until = 0
        """Rows before this position have their blocks."""
        self.stop = 0
        """The same, or where its last row is, whichever comes first."""
        self.steady = False
        """Whether it decodes, and each row may run before its token is known."""
        self.found = 0
        """Up to here its blocks came from the cache."""
        self.entered = False
        """Whether it has ever had a slot."""
        self.reached = 0
        """The furthest position of any row so far."""
        self.flying = 0
        """Tokens that passes in flight choose."""
        self.drafts: tuple[int, ...] = ()
        self.number = self.overtaken = 0
        self.order: tuple[int, int, int] = (1, 0, 0)
        """Less goes first: (0 if it was overtaken often enough, -priority, number of its arrival)."""

    @property
    def rest(self) -> int:
        """Rows that are left to schedule: 1 where it decodes, more within its prompt."""
        return len(self.ids) + self.flying - self.position

    @property
    def decodes(self) -> bool:
        """Whether it runs and its next row is that of its last token, known or not yet, and another may come."""
        return self.slot is not None and self.rest == 1 and self.position < self.last - 1

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]


class Run(NamedTuple):
    """Consecutive rows of one sequence in a pass: those of `ids` from position `start` on, or, where ids is None, one
    row that continues on the device with the token sampled last. wants: how many of its last rows want logits: 0 where
    the prompt goes on, 1, or k + 1 where k drafts are verified."""

    seq: Stream
    slot: int
    start: int
    ids: tuple[int, ...] | None
    wants: int


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over the model. runs: those that decode first. writes: of block tables, before its rows. params:
    sequences that got their slot with this pass. released: slots that were given up since the pass before, some of them
    given again."""

    number: int
    runs: list[Run]
    writes: list[Write] = field(default_factory=list)
    params: list[Stream] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    rows: int = 0
    outs: int = 0

    @property
    def context(self) -> int:
        """Of the longest sequence, in positions."""
        return max(run.start + (1 if run.ids is None else len(run.ids)) for run in self.runs)

    @property
    def wanting(self) -> list[Run]:
        """The runs of which a token is wanted."""
        return self.runs if self.outs == len(self.runs) == self.rows else [run for run in self.runs if run.wants]

    def check(self, tokens: int, counts: Sequence[int] | None) -> None:
        """ValueError unless so many tokens, `counts` for each run that wants any (None: one each), are what the pass
        can choose."""
        wants = [run[4] for run in self.runs if run[4]]
        if counts is not None and (
            len(counts) != len(wants) or any(not 1 <= n <= w for n, w in zip(counts, wants, strict=True))
        ):
            raise ValueError(f"pass {self.number}: its runs take 1 to {wants} tokens, not {list(counts)}")
        if tokens != (len(wants) if counts is None else sum(counts)):
            raise ValueError(f"pass {self.number}: {tokens} tokens are not what its runs want")

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """int32: tokens [rows] (-1: the one sampled last on the device), positions [rows], slots [rows], and out_rows
        [outs], the rows whose logits are wanted."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outs: list[int] = []
        for _, slot, start, ids, wants in self.runs:
            if ids is None:
                outs.append(len(tokens))
                tokens.append(-1)
                positions.append(start)
                slots.append(slot)
                continue
            n = len(ids)
            tokens.extend(ids)
            positions.extend(range(start, start + n))
            slots.extend([slot] * n)
            outs.extend(range(len(tokens) - wants, len(tokens)))
        rows = np.array((tokens, positions, slots), np.int32)
        return rows[0], rows[1], rows[2], np.array(outs, np.int32)


@dataclass(slots=True)
class Counts:
    """What a scheduler has done."""

    passes: int = 0
    rows: int = 0
    prompt: int = 0
    """Tokens of the prompts that were admitted."""
    cached: int = 0
    """Of these, tokens that the cache held."""
    generated: int = 0
    drafted: int = 0
    """Drafts that were verified; of these, `accepted`."""
    accepted: int = 0
    preemptions: int = 0
    recomputed: int = 0
    """Rows that were run again after a preemption or a lost device."""
    finished: dict[str, int] = field(default_factory=dict)
