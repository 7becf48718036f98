"""Speculative decoding: guesses of the next tokens, verified together in one pass of the model. A guess is accepted where
it equals the token that the model chooses, so a text is the same with and without guesses.

    Lookup       n-grams of the sequence itself: what followed the last tokens where they stood before
    DraftModel   a smaller model with the same tokenizer, on the same queue
    Replay       known texts, right with a set rate: for measuring what acceptance is worth
    Speculator   how many guesses, for which sequences: by measured acceptance and measured cost

A draft model's guesses are never read by the host. Its passes leave them in memory that the larger model's next pass
reads (GUESSED), and the passes of its next guesses are submitted behind that verification before anybody has read it:
they find on the device where the sequence continues (FOLLOWS).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hybrid.core.plan import FAULTED, GUESSES_TENSOR, UNTIL_TENSOR
from hybrid.engine.loading import check_guesses
from hybrid.engine.request import Request
from hybrid.engine.runner import CONTINUES, FOLLOWS, GUESSED, Flight, Runner, Stack
from hybrid.engine.sampling import SamplingState
from hybrid.engine.scheduler import Pass, Scheduler
from hybrid.planning.passes import GUESSED_ROWS

MOST = 7
"""Guesses of a pass for one sequence at most, unless asked for: with the token before them they fill the smallest batch
of rows."""
PROBES = (8, 128)  # tokens between two tries where guesses do not pay: doubled after each try in vain
PROBE, TRIES = 2, 2  # guesses of such a try; sequences in a pass that try
NGRAMS = (4, 2)  # tokens that must have stood there before, the most first
LENT = {"history": GUESSES_TENSOR, GUESSES_TENSOR: "history", UNTIL_TENSOR: "next_position"}
"""Tensors of a draft model that are the larger model's (Device.sibling)."""
_DECAY, _DECAY_OF_ALL = 0.9, 0.98  # of what was counted before, at each verification of one sequence, and of any
_PRIOR = 8.0  # guesses that the acceptance of all sequences counts for in one


class Drafter(Protocol):
    """Guesses for many sequences. Whatever it raises ends drafting, not the requests."""

    name: str

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """For each request up to so many guesses of what follows its `ids`; none is an answer too."""
        ...

    def verified(self, request: Request, accepted: int) -> None:
        """So many of the last guesses of a request were right."""
        ...

    def end(self, request: Request) -> None:
        """Forget a request."""
        ...

    def close(self) -> None: ...


class Lookup:
    """What followed the last few tokens where they stood before, the latest such place; needs no model. Where that place
    is so near that it ends before the guesses do, the text is taken to repeat itself."""

    name = "lookup"

    def __init__(self) -> None:
        self._places: dict[Request, tuple[int, dict[tuple[int, ...], int]]] = {}  # tokens noted, n-gram -> what follows

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: self._after(request, most) for request, most in wanted.items()}

    def _after(self, request: Request, most: int) -> list[int]:
        ids = request.ids
        seen, places = self._places.get(request, (1, {}))
        for end in range(seen, len(ids)):
            for n in NGRAMS:
                if end >= n:
                    places[tuple(ids[end - n : end])] = end
        self._places[request] = len(ids), places
        at = (places.get(tuple(ids[-n:])) for n in NGRAMS if len(ids) > n)
        begin = next((place for place in at if place is not None), None)
        found: list[int] = []
        for i in range(begin, begin + most) if begin is not None else ():
            found.append(ids[i] if i < len(ids) else found[i - len(ids)])
        return found

    def verified(self, request: Request, accepted: int) -> None:
        pass

    def end(self, request: Request) -> None:
        self._places.pop(request, None)

    def close(self) -> None:
        self._places.clear()


class Replay:
    """Guesses out of known texts: each is right with probability `rate`, drawn from the number of its text and its
    position in the sequence. draft: a model whose passes are run for every guess, as if they were its own."""

    name = "replay"

    def __init__(
        self, texts: Mapping[tuple[int, ...], Sequence[int]], rate: float, draft: DraftModel | None = None
    ) -> None:
        """texts: what follows each prompt. ValueError for a rate that is no probability."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be a probability, 0 to 1, not {rate!r}")
        self.draft = draft
        self._guesses: dict[tuple[int, ...], list[int]] = {}
        for number, (prompt, text) in enumerate(texts.items()):
            drawn = (
                np.random.Generator(np.random.Philox(key=[number, len(prompt) + at])).random()
                for at in range(len(text))
            )
            self._guesses[prompt] = [token if x < rate else token ^ 1 for token, x in zip(text, drawn, strict=True)]
        self._of: dict[Request, list[int]] = {}

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """None for a prompt that is not known."""
        if self.draft is not None:
            wanted = {request: len(words) for request, words in self.draft.propose(wanted).items()}
        found = {}
        for request, most in wanted.items():
            if request not in self._of:
                self._of[request] = self._guesses.get(tuple(request.prompt), [])
            at = len(request.ids) - request.n_prompt
            found[request] = self._of[request][at : at + most]
        return found

    def verified(self, request: Request, accepted: int) -> None:
        if self.draft is not None:
            self.draft.verified(request, accepted)

    def end(self, request: Request) -> None:
        self._of.pop(request, None)
        if self.draft is not None:
            self.draft.end(request)

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()


@dataclass(slots=True)
class _Copy:
    """A draft model's sequence for one of the larger model's."""

    own: Request
    known: int = 0
    """Tokens of the sequence when guesses were made last."""
    guesses: int = 0
    """So many then."""
    valid: int = 0
    """Positions of its cache that hold the sequence's tokens."""
    following: int = 0
    """Passes that were submitted behind the verification of these guesses; `end`: the position that it had before."""
    end: int = 0


class DraftModel(Stack):
    """A smaller model on the queue of the larger one: each request has a sequence there, as many as there are slots and
    blocks. It samples by the request's parameters, so both models add the same noise to their
    logits, and agree more often than two draws would. ValueError where it cannot share the larger model's memory."""

    def __init__(self, runner: Runner, name: str, close: Callable[[], object]) -> None:
        super().__init__(runner)
        self.name, self._close = name, close
        missing = [name for name in LENT if not runner.device.shares(name)]
        if missing:
            raise ValueError(
                f"{name}: its context of {runner.cache.ctx} tokens or its {runner.cache.slots} slots are not the larger "
                "model's, so neither finds the other's tokens: load that one with the same ctx and slots"
            )
        self.queues = runner.device.passes_ahead > 1
        """Whether its passes run behind those that were submitted before; else submitting is running."""
        self._copies: dict[Request, _Copy] = {}
        self._flight: Flight | None = None  # the last
        self._proposed: Flight | None = None  # the last one of the guesses that are verified now

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Words by which a pass of the larger model finds the guesses. Runs what is new of each sequence, then continues
        from its own tokens, all sequences in the same passes, submitted one behind another; waits for none."""
        self.scheduler.forget_tokens()
        ctx = self.runner.cache.ctx
        for request, most in wanted.items():
            copy = self._copy(request)
            ids, ready = request.ids, self.expects(request)
            last = min(len(ids) + most, ctx)
            if ready:
                self.scheduler.resume(copy.own, ids, last, len(ids) - 1 + ready, ready)
            else:
                self.scheduler.resume(copy.own, ids, last, copy.valid)
        for copy in self._copies.values():
            copy.following = 0
        if flights := self.run():
            self._flight = flights[-1]
        found = {}
        for request, most in wanted.items():
            copy, own = self._copies[request], self._copies[request].own
            count = min(own.pending, most)
            copy.known, copy.guesses = len(request.ids), count
            copy.valid = min(own.position, copy.known) if own.slot is not None else 0
            if count and own.slot is not None:
                found[request] = [GUESSED - own.slot] * count
            own.last = 0  # it runs when it is asked for
        self._proposed = self._flight
        return found

    def verified(self, request: Request, accepted: int) -> None:
        copy = self._copies.get(request)
        if copy is not None and copy.guesses:
            copy.valid = min(copy.valid, copy.known) + min(accepted, copy.guesses - 1)

    def follow(self, verified: Mapping[Request, int], most: int) -> bool:
        """Submit the passes of the next guesses, `most` of each request, behind the pass that verifies the last ones, so
        many of each request; waits for none. They begin where that pass says that the sequence continues. False, and
        nothing done, where that cannot be."""
        self.scheduler.forget_tokens()
        copies = []
        for request, count in verified.items():
            copy = self._copies.get(request)
            if copy is None or copy.own.slot is None or request.slot is None or copy.guesses != count:
                continue
            if copy.known + count + most < self.runner.cache.ctx:
                copy.own.position = copy.end = copy.known - 1 + count
                copies.append((request, copy))
        if not copies or not most:
            return False
        for i in range(most):
            rows: list[tuple[Request, int | None, int | None]] = []
            for request, copy in copies:
                word = FOLLOWS - (request.slot or 0)
                # The second takes the larger model's token too, where the first has run the last guess.
                place = (word, FOLLOWS) if i == 0 else (word, CONTINUES) if i == 1 else (None, None)
                rows.append((copy.own, *place))
            made = self.scheduler.schedule_rows(rows)
            if made is None:
                break
            self._flight = self.start(made)
            for _, copy in copies:
                copy.following = i + 1
        return any(copy.following for _, copy in copies)

    def expects(self, request: Request) -> int:
        """Guesses after the request's tokens that `follow` has submitted."""
        copy = self._copies.get(request)
        if copy is None or not copy.following or not 0 < len(request.ids) - copy.known <= copy.guesses + 1:
            return 0
        return max(0, copy.following - max(0, len(request.ids) - 1 - copy.end))

    @property
    def recordings(self) -> int:
        """Programs made so far."""
        return self.runner.counters.recordings

    def wait(self) -> None:
        """Until the passes of the last guesses have finished. Where they were aborted, all is run again."""
        flight, self._proposed = self._proposed, None
        if flight is None:
            return
        _, slot, start, ids, *_ = flight.scheduled.runs[0]
        word = self.runner.device.peek("history", slot, start + len(ids or (CONTINUES,)), flight.ticket)
        if word == FAULTED:
            self.runner.abort()
            self.scheduler.lose()
            for copy in self._copies.values():
                copy.valid = copy.guesses = copy.following = 0

    def end(self, request: Request) -> None:
        copy = self._copies.pop(request, None)
        if copy is not None:
            self.scheduler.cancel(copy.own)

    def close(self) -> None:
        """Let go of its device, whatever state that is in."""
        self._copies.clear()
        self._close()

    def _copy(self, request: Request) -> _Copy:
        if request not in self._copies:
            options = replace(
                request.options,
                max_tokens=max(1, request.last - request.n_prompt),
                constraint=None,
                logprobs=0,
                stop=(),
            )
            own = Request(request.id, request.ids, options)
            own.rollback = 4 * (MOST + 1)
            self.scheduler.add(own)
            self._copies[request] = _Copy(own)
        return self._copies[request]


# --- how many --------------------------------------------------------------------------------------------------------


def most_guesses(draft: object, speculate: object) -> int:
    """Of a pass, by what a user asks for (hybrid.load): 0 where tokens are not to be guessed. ValueError."""
    if speculate is None:
        speculate = 0 if draft is None else "auto"
    return MOST if speculate == "auto" else check_guesses(speculate)


class Acceptance:
    """How often a guess is right where those before it are. rate: what is supposed before anything was verified."""

    def __init__(self, rate: float = 0.75, decay: float = _DECAY_OF_ALL) -> None:
        self.right, self.tried, self._decay = 2 * rate, 2.0, decay

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def verified(self, guessed: int, accepted: int) -> None:
        """So many of a pass's guesses were right."""
        self.right = self._decay * self.right + accepted
        self.tried = self._decay * self.tried + accepted + (accepted < guessed)


class Followed:
    """A request that is guessed for. most: guesses of a pass at most; fixed: always as many. among: the acceptance of all
    requests, towards which its own, known from few guesses, is drawn."""

    def __init__(self, request: Request, most: int, fixed: bool, among: Acceptance) -> None:
        self.request, self.most, self.fixed, self._among = request, most, fixed, among
        self._own = Acceptance(among.rate, _DECAY)
        self.rest = 0
        """Tokens until guesses are considered again."""
        self.known = False
        """Whether the drafter has its prompt."""
        self.asked = 0
        """Guesses that the next pass may have for it."""
        self._wait, self._probed = PROBES[0], False

    @property
    def rate(self) -> float:
        return (self._own.right + _PRIOR * self._among.rate) / (self._own.tried + _PRIOR)

    def verified(self, guessed: int, accepted: int) -> None:
        self._own.verified(guessed, accepted)

    def offer(self, guesses: int, probe: int) -> int:
        """Guesses for the next pass, where so many pay; where none do, `probe` of them now and then."""
        if guesses or self.fixed:
            self._wait, self._probed = PROBES[0], False
            return guesses
        self._probed = not self._probed and probe > 0
        if self._probed:
            return min(probe, self.most)
        self.rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        return 0


@dataclass(slots=True)
class Costs:
    """Seconds of a pass by its rows, prompts' excluded, and of drafting by the most guesses of one sequence: the mean of
    the last readings without the slowest. What was not measured lies between what was; beyond the most rows that were,
    a pass costs what those do, so it is tried once; from GUESSED_ROWS on it costs in proportion."""

    _read: dict[tuple[str, int], deque[float]] = field(default_factory=dict)

    def took(self, rows: int, seconds: float) -> None:
        self._note("pass", rows, seconds)

    def drafted(self, guesses: int, seconds: float) -> None:
        self._note("draft", guesses, seconds)

    def _note(self, what: str, n: int, seconds: float) -> None:
        self._read.setdefault((what, n), deque(maxlen=8)).append(seconds)

    def known(self, what: str) -> dict[int, float]:
        """Means by rows of a `pass`, or by guesses of a `draft`."""
        found = {}
        for (of, n), readings in self._read.items():
            if of == what:
                kept = sorted(readings)[: max(1, len(readings) - 1 - len(readings) // 4)]
                found[n] = sum(kept) / len(kept)
        return found

    def table(self, rows: int) -> CostTable:
        return CostTable(self.known("pass"), self.known("draft"), rows)


class CostTable:
    """Costs as they are known at one moment, for passes of `rows` rows and more. What a busy device took once is not
    believed: a row more costs a plain pass more at most, and so does a guess."""

    def __init__(self, passes: dict[int, float], drafts: dict[int, float], rows: int) -> None:
        self.passes, self.drafts, self.rows = passes, drafts, rows
        self.plain = 0.0
        """Of a pass without guesses; 0: nothing is known of so few rows."""
        if any(n <= rows for n in passes):
            self.plain = self._pass(rows)

    def _pass(self, rows: int) -> float:
        return _between(self.passes, rows) * max(1.0, rows / max(GUESSED_ROWS, *self.passes))

    def of(self, rows: int, guesses: int) -> float:
        """Of a pass of so many rows, and of drafting the most guesses of a sequence; 0 where `plain` is not known."""
        if not self.plain:
            return 0.0
        verify = min(max(self._pass(rows), self.plain), self.plain * (1 + rows - self.rows))
        return verify + min(self._draft(guesses), self.plain * guesses)

    def _draft(self, guesses: int) -> float:
        if not self.drafts or not guesses:
            return 0.0
        least, most = min(self.drafts), max(self.drafts)
        if guesses <= least:
            return self.drafts[least] * guesses / least
        each = (self.drafts[most] - self.drafts[least]) / (most - least) if most > least else self.drafts[most] / most
        return _between(self.drafts, guesses) + max(0.0, each) * max(0, guesses - most)


def _between(table: Mapping[int, float], n: int) -> float:
    """By the nearest that are known, of which one is not greater; as the greatest beyond it."""
    below, above = max(k for k in table if k <= n), min((k for k in table if k >= n), default=0)
    if above <= below:
        return table[below]
    return table[below] + (n - below) / (above - below) * (table[above] - table[below])


def expected(rate: float, guesses: int) -> float:
    """Tokens of a pass that verifies so many guesses, each right with this rate where those before it are."""
    return sum(rate**i for i in range(guesses + 1))


def share(wanted: Sequence[tuple[float, int, bool]], room: int, costs: CostTable) -> list[int]:
    """How many guesses each sequence gets in a pass that has `costs.rows` rows without any, and at most `room`: those that
    give the most tokens in a second, all sequences together, first those that are likelier to be right. wanted: of each
    its acceptance rate, its most guesses, and whether it always gets these."""
    rows = costs.rows
    counts, tokens = [0] * len(wanted), float(rows)
    room = min(room, max(rows + PROBE, 2 * max(costs.passes, default=room)))  # steps into what is not known are small
    for i, (rate, most, fixed) in enumerate(wanted):
        if fixed:
            counts[i] = min(most, max(0, room - rows))
            tokens, rows = tokens + expected(rate, counts[i]) - 1, rows + counts[i]

    def speed() -> float:
        seconds = costs.of(rows, max(counts, default=0))
        return tokens / seconds if seconds else 0.0

    best, fastest = list(counts), speed()
    gains = [
        (-(rate**j), i, j) for i, (rate, most, fixed) in enumerate(wanted) if not fixed for j in range(1, most + 1)
    ]
    for loss, i, j in sorted(gains)[: max(0, room - rows)]:
        counts[i], tokens, rows = j, tokens - loss, rows + 1
        if (now := speed()) > fastest:
            best, fastest = list(counts), now
    return best


class Speculator:
    """Before each pass of a scheduler: which sequences get how many guesses. A sequence with guesses does not run ahead of
    the host, for its last token must be known before more are guessed; so all such sequences share one pass, and nothing
    is submitted before the passes in flight have been read.

    room: most rows of a pass whose tokens are chosen. k: guesses of a pass (None: by their worth). refused: told of a
    request whose constraint fails. failed: told once why guessing ended, where a drafter failed. clock: seconds.
    recordings: programs made so far for the passes that verify.
    """

    def __init__(
        self,
        drafter: Drafter,
        room: int,
        k: int | None,
        sampling: SamplingState | None,
        refused: Callable[[Request, Exception], object],
        failed: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
        recordings: Callable[[], int] = lambda: 0,
    ) -> None:
        self.drafter: Drafter | None = drafter
        self.name, self.room, self.k, self.verified = drafter.name, room, k, 0
        self._sampling, self._refused, self._failed, self._clock = sampling, refused, failed, clock
        self._recordings = recordings
        self._of: dict[Request, Followed] = {}
        self.forget()

    def forget(self) -> None:
        """Forget what passes and guesses cost, and how often they were right."""
        self.costs, self.acceptance = Costs(), Acceptance()
        # Of a draft model on the queue: since when, the most guesses, and the programs made until then (-1: not timed).
        self._drafting: tuple[float, int, int] | None = None
        self._verifying: tuple[int, dict[Request, int]] = 0, {}  # the last pass with guesses, and how many of whom
        self._followed = 0  # the pass behind which the next guesses are made
        self._rest, self._wait = 0, PROBES[0]  # passes until a try where nobody's guesses pay; after the next one
        self._seen = 0.0  # when the last pass had been read

    @property
    def draft(self) -> DraftModel | None:
        """The draft model whose passes are run."""
        drafter = self.drafter.draft if isinstance(self.drafter, Replay) else self.drafter
        return drafter if isinstance(drafter, DraftModel) else None

    def prepare(self, scheduler: Scheduler) -> bool:
        """Give the scheduler drafts for its next pass. False: it is to make none before those in flight have been
        read."""
        if self.drafter is None:
            return True
        if scheduler.in_flight == 1 and self._verifying[0] == scheduler.number:
            self._follow_up()
        followed = [self._follow(r) for r in scheduler.running if r.decodes]
        due = [f for f in followed if f.most > 0 and f.rest <= 0]
        asked = self._ask(scheduler, due, len(followed)) if due and self.drafter is not None else []
        if asked and scheduler.in_flight:
            for f in asked:
                _run_ahead(f.request, False)
            return False
        if not asked or not self._propose(scheduler, asked):
            for f in followed:
                _run_ahead(f.request, True)
        return True

    def drafted(self, done: Pass) -> float:
        """Before a pass is waited for: wait for the drafting on the same queue that it follows, if any; when that was
        over."""
        begun, self._drafting = self._drafting, None
        model = self.draft
        if begun is None or model is None or done.outs == len(done.wanting):
            return 0.0
        try:
            model.wait()
        except Exception as error:  # as where it is submitted
            self._fail(error)
            return 0.0
        now = self._clock()
        if self._programs() == begun[2]:  # else the host has recorded meanwhile
            self.costs.drafted(begun[1], now - begun[0])
        return now

    def committed(self, done: Pass, news: Sequence[tuple[Request, int]], seconds: float) -> None:
        """A pass has chosen so many tokens of each request, and took so long (0: it has taken what others will not)."""
        self._seen = self._clock()
        self._rest -= done.outs == len(done.wanting)
        wants = {run.seq: run.wants for run in done.runs}
        if seconds and all(run.wants == (len(run.ids) if run.ids else 1) for run in done.runs):  # no rows of prompts
            self.costs.took(done.rows, seconds)
        for request, n in news:
            guesses, found = wants[request] - 1, self._of.get(request)
            if guesses:
                self.verified += 1
                self.acceptance.verified(guesses, n - 1)
                if found is not None:
                    found.verified(guesses, n - 1)
                if self.drafter is not None:
                    self.drafter.verified(request, n - 1)
            elif found is not None:
                found.rest = max(0, found.rest - n)

    def end(self, request: Request) -> None:
        """A request has ended: forget it."""
        self._of.pop(request, None)
        if self.drafter is not None:
            try:
                self.drafter.end(request)
            except Exception as error:  # its device may be gone
                self._fail(error)

    def close(self) -> None:
        drafter, self.drafter = self.drafter, None
        self._of.clear()
        if drafter is not None:
            drafter.close()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _programs(self) -> int:
        """Programs made so far for either model: nothing is timed while the host records."""
        return self._recordings() + (0 if self.draft is None else self.draft.recordings)

    def _follow(self, request: Request) -> Followed:
        found = self._of.get(request)
        if found is None:
            k = self.k if request.options.speculate is None else request.options.speculate
            if request.options.constraint is not None and self.draft is not None:
                k = 0  # the constraint must hear of guesses, which the host does not read
            found = self._of[request] = Followed(request, MOST if k is None else k, k is not None, self.acceptance)
        return found

    def _ask(self, scheduler: Scheduler, due: list[Followed], rows: int) -> list[Followed]:
        """Those that get guesses in a pass of so many rows without any."""
        costs, model = self.costs.table(rows), self.draft
        shares = share([(f.rate, f.most, f.fixed) for f in due], self.room, costs)
        behind = self._followed == scheduler.number and model is not None
        quiet = not any(shares)  # nobody's guesses pay, so a try costs a pass of its own
        tries = TRIES if rows < GUESSED_ROWS and not (quiet and self._rest > 0) else 0
        for f, k in zip(due, shares, strict=True):
            if not costs.plain and not f.fixed:  # what a pass without guesses takes must be known
                f.asked = 0
                continue
            f.asked = f.offer(k, PROBE if tries else 0)
            tries -= f.asked > k
            if behind and k and model is not None and not f.fixed:
                f.asked = max(f.asked, model.expects(f.request))
            f.asked = min(f.asked, f.request.last - len(f.request.ids) - f.request.pending - 1)
        asked = [f for f in due if f.asked > 0]
        if not quiet:
            self._wait = PROBES[0]
        elif asked:
            self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        return asked

    def _propose(self, scheduler: Scheduler, asked: list[Followed]) -> bool:
        """Whether there were any guesses."""
        assert self.drafter is not None
        began = self._seen if self._followed == scheduler.number else self._clock()
        made = self._programs()
        try:
            found = self.drafter.propose({f.request: f.asked for f in asked})
        except Exception as error:  # whatever another model's device or files raise: a text does not depend on guesses
            self._fail(error)
            return False
        most = max(map(len, found.values()), default=0)
        timed = most and self._programs() == made and all(f.known for f in asked)  # else it ran their prompts too
        if self.draft is not None and self.draft.queues:
            self._drafting = (began, most, made if timed else -1) if most else None
        elif timed:
            self.costs.drafted(most, self._clock() - began)
        for f in asked:
            f.known = True
        given: dict[Request, int] = {}
        for f in asked:
            if guesses := self._allowed(f.request, list(found.get(f.request, ()))[: f.asked]):
                _run_ahead(f.request, False)
                scheduler.draft(f.request, guesses)
                given[f.request] = len(guesses)
            else:
                f.rest = max(f.rest, PROBE)
        self._verifying = scheduler.number + 1, given
        return bool(given)

    def _follow_up(self) -> None:
        """Let a draft model guess behind the pass in flight, which verifies its last guesses: so the device continues while
        the host reads. Of requests that will not have ended by their length, as many as pay."""
        model, (number, given) = self.draft, self._verifying
        self._verifying = 0, {}  # once
        if model is None or not model.queues:
            return
        found = [
            self._of[request]
            for request, guesses in given.items()
            if request in self._of and request.slot is not None and request.last - len(request.ids) - guesses > 2
        ]
        shares = share([(f.rate, f.most, f.fixed) for f in found], self.room, self.costs.table(len(found)))
        try:
            if model.follow({f.request: given[f.request] for f in found}, max(shares, default=0)):
                self._followed = number
        except Exception as error:  # as where it guesses
            self._fail(error)

    def _allowed(self, request: Request, guesses: Sequence[int]) -> tuple[int, ...]:
        """Those that may be verified under the request's constraint."""
        if request.options.constraint is None or self._sampling is None or not guesses:
            return tuple(guesses)
        assert request.slot is not None
        try:
            return self._sampling.allowed(request.slot, guesses)
        except Exception as error:  # whatever somebody's constraint raises
            self._refused(request, error)
            return ()

    def _fail(self, error: Exception) -> None:
        """Nobody guesses any more: what the drafter held is let go of at once."""
        drafter, self.drafter = self.drafter, None
        said = f"{self.name}: {type(error).__name__}: {error}; no more tokens are guessed"
        try:
            if drafter is not None:
                drafter.close()
        except Exception as second:  # of a device that is gone already
            said += "" if str(second) == str(error) else f" (closing it: {type(second).__name__}: {second})"
        self._failed(said)
        for request in self._of:
            _run_ahead(request, True)


def _run_ahead(request: Request, may: bool) -> None:
    """Whether its next row may run before its last token is known."""
    may = may and request.options.constraint is None
    if request.ahead != may:
        request.ahead, request.steady = may, False
