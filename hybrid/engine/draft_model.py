"""A smaller model that guesses what a larger one chooses: an engine of its own, on the same device or another, each of
whose slots follows one of the larger model's sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid.core.errors import NoFreeSlot
from hybrid.core.plan import FAULTED, GUESSES_TENSOR, UNTIL_TENSOR
from hybrid.engine.ahead import Ahead, Wanted
from hybrid.engine.inbox import FOLLOWS, GOES_ON, GUESSED, Rows
from hybrid.engine.interface import PassRunner
from hybrid.engine.pace import WATCHES
from hybrid.engine.sampling import Sampling
from hybrid.planning.passes import bucket_of

BEHIND = 32
"""Tokens that a sequence may be ahead of the draft after a while without guesses: their passes' programs are made at
once."""
FEW = 3
"""New tokens that are run one after another."""
WATCHED = 16
"""Tokens of a text without guesses, the latest, of which it is seen at a time what would have been guessed."""


@dataclass(slots=True)
class Followed:
    """A slot, and the tokens that its cache holds: in part perhaps guesses that were wrong."""

    slot: int
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Behind:
    """Passes that were submitted behind a verification, where whose end is they find on the device."""

    before: dict[Hashable, tuple[list[int], list[int]]]
    """By sequence, as of DraftModel._open: the guesses that are verified."""
    ends: dict[Hashable, int]
    """Positions that the draft's cache held before these passes: where all guesses are right, the first runs the last
    of them."""
    theirs: dict[Hashable, int]
    """The larger model's slots."""
    tickets: list[int] = field(default_factory=list)


class DraftModel:
    """Drives the slots of an engine whose tokenizer is the target's, one for each sequence that is followed. A slot
    chooses by the target's sampling parameters, so that both add the same noise to their logits, and agree more often
    than two draws would. apart: its passes may run while the target's do, so it may guess on while its guesses are
    verified (`go_on`)."""

    follows_on = False
    """Whether its passes may find on the device what the larger model has chosen (`behind`)."""
    _behind: Behind | None = None

    def __init__(self, engine: PassRunner, name: str, close: Callable[[], object], apart: bool = False) -> None:
        self.engine, self.name, self._close, self.apart = engine, name, close, apart
        self.beside = Ahead(self._guess_on)
        self.ready: Mapping[Hashable, int] = {}
        """How many of the last guesses, by sequence, were made while those before them were verified."""
        for rows in engine.sizes.rows:
            if rows <= BEHIND:
                engine.warm_up(rows)
        self.chains = engine.device.shares("history")
        """Whether a pass of the larger model may find guesses on the device, where they are made (`ahead`)."""
        self.follows_on = self.chains and engine.device.shares(GUESSES_TENSOR) and engine.device.shares(UNTIL_TENSOR)
        self._followed: dict[Hashable, Followed] = {}
        self._open: dict[Hashable, tuple[list[int], list[int]]] = {}
        """By key, what was submitted last and not read yet: the tokens before it, the ticket of each guess."""
        self.steady = True
        """Whether the last guesses took no longer than those that come: little was new of their sequences."""
        self.watches = WATCHES[1] if engine.sizes.guesses + 1 >= WATCHED and engine.device.pipeline_depth == 1 else 0
        """Most tokens between two looks at what it would have guessed (`watch`); 0: its engine has no plans that could
        say."""
        self._watched: dict[
            Hashable, tuple[list[int], int, int]
        ] = {}  # tokens, from where on they were watched, the ticket
        self.compiled = False
        """Whether a program was made for them, which no others take time for."""

    def fork(self) -> DraftModel:
        """One serves all sequences, by their keys (`propose_all`)."""
        return self

    def follows(self, key: Hashable) -> bool:
        return key in self._followed

    def begin(self, sampling: Sampling, key: Hashable = None) -> bool:
        """Guess for a sequence that is chosen so, from its beginning. False where no slot is free."""
        self.end(key)
        try:
            slot = self.engine.admit(self.engine.cache.ctx, sampling)
        except NoFreeSlot:
            return False
        self._followed[key] = Followed(slot)
        return True

    def end(self, key: Hashable = None) -> None:
        self.beside.forget(key)
        self._watched.pop(key, None)
        self._open.pop(key, None)
        if self._behind is not None:
            self._behind.before.pop(key, None)
        found = self._followed.pop(key, None)
        if found is not None:
            self.engine.release(found.slot)

    def watch(self, key: Hashable, ids: Sequence[int]) -> bool:
        """Run what is new of a sequence, so that `agreed` can say what would have been guessed of its last tokens;
        waits for no pass. Whether there is anything of it."""
        self.beside.rest()
        self._read_all()
        followed, engine = self._followed[key], self.engine
        fresh = self._fresh(followed, ids)
        rows = min(len(fresh) - 1, WATCHED)
        if rows < 1:
            return False
        slot, before = followed.slot, fresh[: -1 - rows]
        if before:
            engine.submit_prefill({slot: before})
        at, made = engine.positions[slot], {*engine.choosing.options([slot]), "verify"}
        bucket = bucket_of(WATCHED, engine.sizes.rows), bucket_of(WATCHED, engine.sizes.wants)
        row = np.arange(rows, dtype=np.int32)
        tokens = np.array(fresh[-1 - rows : -1], np.int32)
        ticket = engine.submit_scheduled(
            engine.program("prefill", *bucket, options=made), Rows(tokens, at + row, np.full(rows, slot, np.int32), row)
        )
        engine.positions[slot] = at + rows
        followed.ids = list(ids[:-1])
        self._watched[key] = list(ids), at + 1, ticket
        return True

    def watching(self, key: Hashable) -> bool:
        return key in self._watched

    def agreed(self, key: Hashable) -> tuple[int, int]:
        """Of the tokens that were watched last: how many would have been guessed, and how many there are."""
        if key not in self._watched or key not in self._followed:
            return 0, 0
        self.beside.rest()
        ids, since, ticket = self._watched.pop(key)
        chosen = self._read(self._followed[key].slot, since, [ticket] * (len(ids) - since))
        return self._right(ids, since, chosen)

    def _right(self, ids: Sequence[int], since: int, chosen: Sequence[int]) -> tuple[int, int]:
        return sum(a == b for a, b in zip(chosen, ids[since:], strict=False)), len(chosen)

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """As of every Drafter, for the one sequence without a key."""
        if None not in self._followed:
            self.begin(Sampling())
        return self.propose_all({None: (ids, most)}).get(None, [])

    def propose_all(self, wanted: Wanted) -> dict[Hashable, list[int]]:
        """Guesses for sequences that were begun: by key, (all tokens so far, guesses at most). Runs what is new of
        each, then goes on from its own tokens, all sequences in the same passes, submitted one behind another before
        any guess is read; what was guessed beside the last verification (`go_on`) is taken instead, where it fits."""
        found = self.beside.take(wanted)
        self.ready = {key: len(guesses) for key, guesses in found.items()}
        if rest := {key: some for key, some in wanted.items() if key not in found}:
            self._submit_all(rest)
            found |= self._read_all()
        self.steady = self.steady and not self.ready
        return found

    def go_on(self, verified: Wanted) -> None:
        """Guess what follows guesses that are about to be verified, by key (all tokens with those guesses, more guesses
        at most), first in place of the token after them. Waits for no pass."""
        self.beside.start(verified)

    def _guess_on(self, wanted: Wanted) -> Generator[dict[Hashable, int], None, None]:
        """One guess of each sequence after another, in a thread of its own; a pass runs ahead of the one that is
        read."""
        asked, tickets = self._begin(wanted)
        slots = [self._followed[key].slot for key in asked]
        chosen: dict[Hashable, list[int]] = {key: [] for key in asked}
        for at in range(max((most for _, most in asked.values()), default=0)):
            while len(tickets) < min(at + 2, max(most for _, most in asked.values())):
                tickets.append(self._submit(slots))
            self._open = {key: (ids, tickets[:most]) for key, (ids, most) in asked.items()}
            for key, (ids, most) in asked.items():
                if at < most:
                    chosen[key] += self._read(self._followed[key].slot, len(ids) + at, tickets[at : at + 1])
            known = {key: self._guessed(asked[key][0], tokens)[at:] for key, tokens in chosen.items()}
            if not any(known.values()):
                return
            yield {key: tokens[0] for key, tokens in known.items() if tokens}

    def ahead(self, wanted: Wanted) -> dict[Hashable, list[int]]:
        """The same without waiting: words by which a pass on the same queue finds the guesses (inbox.GUESSED), which it
        may be submitted with at once. For an engine whose `history` is lent (`chains`)."""
        found = self._take_behind(wanted)
        rest = {key: some for key, some in wanted.items() if key not in found}
        if rest or not found:
            self._submit_all(rest)
        else:
            self.steady, self.compiled = True, False
        self._open |= found
        return {key: self._words(key, ids, len(tickets)) for key, (ids, tickets) in self._open.items() if key in wanted}

    def behind(self, verified: Mapping[Hashable, tuple[int, int]], most: int) -> bool:
        """After a pass was submitted that verifies the last guesses (`ahead`): submit the passes of the next, `most` of
        each of these sequences, behind it; waits for none. verified: by key, the larger model's slot and how many
        guesses. They begin on the device where the verification says that the sequence goes on. False, and nothing
        done, where that cannot be."""
        self._drop_behind()
        keys = [key for key in verified if key in self._open and key in self._followed]
        if not (keys and most and self.follows_on) or not all(
            self._has_room(key, verified[key][1], most) for key in keys
        ):
            return False
        engine, slots = self.engine, {key: self._followed[key].slot for key in keys}
        made = Behind(
            {key: self._open.pop(key) for key in keys},
            {key: engine.positions[slot] for key, slot in slots.items()},
            {key: verified[key][0] for key in keys},
        )
        self._behind = made
        for i in range(most):  # the second takes the larger model's token too, where the first has run the last guess
            made.tickets.append(self._follow(keys, i == 0) if i < 2 else self._submit(list(slots.values())))
        for slot in slots.values():
            engine.positions[slot] += 1  # at most: more is not known
        return True

    def _has_room(self, key: Hashable, guesses: int, most: int) -> bool:
        """Whether so many rows more fit, wherever the verification ends, and what they go back behind is still held."""
        engine, slot, known = self.engine, self._followed[key].slot, len(self._open[key][0])
        return known + guesses + most < engine.cache.ctx and not engine.cache.forgets(
            max(0, engine.positions[slot] - known)
        )

    def _follow(self, keys: Sequence[Hashable], back: bool = False) -> int:
        """A pass of these sequences' next rows, with what the larger model has chosen for them as far as that goes.
        back: from the last of it on."""
        assert self._behind is not None
        tokens = np.array([FOLLOWS - self._behind.theirs[key] for key in keys], np.int32)
        at = np.full(len(keys), FOLLOWS if back else GOES_ON, np.int32)
        return self._submit([self._followed[key].slot for key in keys], tokens, at)

    def _take_behind(self, wanted: Wanted) -> dict[Hashable, tuple[list[int], list[int]]]:
        """What `behind` has submitted for these sequences, whose verification is read by now, with no pass after it, as
        `_open` has it; with more passes where that is less than is wanted."""
        if (made := self._behind) is None:
            return {}
        skips, ctx = dict[Hashable, int](), self.engine.cache.ctx
        for key, (ids, most) in wanted.items():
            before = made.before.get(key, ((), ()))[0]
            if most > 0 and 0 < len(before) < len(ids) < ctx and ids[: len(before)] == before:
                skips[key] = max(0, len(ids) - 1 - made.ends[key])  # 1: its first pass has run the last guess
        room = min((ctx - len(wanted[key][0]) for key in skips), default=0)  # they run the same passes
        asked = {key: min(wanted[key][1], room) for key in skips}
        for _ in range(max((skips[key] + asked[key] for key in skips), default=0) - len(made.tickets)):
            made.tickets.append(self._follow(list(skips)))
        found = {}
        for key, skip in skips.items():
            ids = list(wanted[key][0])
            found[key] = ids, made.tickets[skip : skip + asked[key]]
            self.engine.positions[self._followed[key].slot] = len(ids) - 1 + len(made.tickets) - skip
            del made.before[key]
        self._drop_behind()
        return found

    def _drop_behind(self) -> None:
        """Nobody takes what is left of it: those sequences are held as they were before the guesses that were
        verified."""
        made, self._behind = self._behind, None
        for key, (ids, _) in ({} if made is None else made.before).items():
            self._followed[key].ids = ids

    def drop(self) -> int:
        """Take nothing of what was submitted behind the last verification; how many passes that was."""
        passes = 0 if self._behind is None else len(self._behind.tickets)
        self._drop_behind()
        return passes

    def expects(self, key: Hashable, ids: Sequence[int]) -> int:
        """How many guesses after ids were submitted behind the last verification, by which a sequence has come to
        these."""
        if (made := self._behind) is None or key not in made.before:
            return 0
        return len(made.tickets) - max(0, len(ids) - 1 - made.ends[key])

    def finish(self) -> None:
        """Wait for the guesses that are verified next, or were void: then all is run again."""
        found = self._open if self._behind is None else self._open | self._behind.before
        if not found:
            return
        peek, last = self.engine.device.peek, max(tickets[-1] for _, tickets in found.values())
        self.engine.device.wait(last)
        ends = [(self._followed[key].slot, len(ids) - 1 + len(tickets)) for key, (ids, tickets) in found.items()]
        if any(peek("history", slot, end, last) == FAULTED for slot, end in ends):
            self.engine.settle()
            self._open, self._behind = {}, None
            for followed in self._followed.values():
                followed.ids = []

    def _words(self, key: Hashable, ids: Sequence[int], count: int) -> list[int]:
        return [GUESSED - self._followed[key].slot] * count

    def _read_all(self) -> dict[Hashable, list[int]]:
        """The guesses of what was submitted last, after which the caches hold all of them but the last."""
        self._drop_behind()
        found, done, self._open = {}, self._open, {}
        for key, (ids, tickets) in done.items():
            if key in self._followed:
                found[key] = guesses = self._guessed(ids, self._read(self._followed[key].slot, len(ids), tickets))
                self._followed[key].ids = [*ids, *guesses[:-1]] if guesses else []
        return found

    def _guessed(self, ids: Sequence[int], chosen: list[int]) -> list[int]:
        """What is guessed after ids."""
        return chosen

    def _submit_all(self, wanted: Wanted) -> None:
        """The passes of `propose_all`."""
        asked, tickets = self._begin(wanted)
        if asked:
            slots = [self._followed[key].slot for key in asked]
            tickets += [self._submit(slots) for _ in range(max(most for _, most in asked.values()) - len(tickets))]
            self._open = {key: (ids, tickets[:most]) for key, (ids, most) in asked.items()}

    def _begin(self, wanted: Wanted) -> tuple[dict[Hashable, tuple[list[int], int]], list[int]]:
        """Run what is new of these sequences: what can be guessed of which, and the first guesses' tickets; each
        further pass of their slots gives one more."""
        self._read_all()
        engine, ctx = self.engine, self.engine.cache.ctx
        asked = {
            key: (list(ids), most)
            for key, (ids, most) in wanted.items()  # copies: a sequence's own list grows
            if key in self._followed and len(ids) < ctx and most > 0
        }
        room = min((ctx - len(ids) for ids, _ in asked.values()), default=0)  # they run the same passes
        asked = {key: (ids, min(most, room)) for key, (ids, most) in asked.items()}
        if not asked:
            return {}, []
        fresh = {key: self._fresh(self._followed[key], ids) for key, (ids, _) in asked.items()}
        recorded = engine.device.counters.recordings
        slots = [self._followed[key].slot for key in asked]
        times, behind = max(most for _, most in asked.values()) - 1, max(map(len, fresh.values()))
        if behind <= FEW:  # as decode passes, which take less time than a pass of as many rows
            tickets = [self._known(fresh, left) for left in range(behind, 0, -1)][-1:]
        else:
            tickets = [engine.submit_prefill({self._followed[key].slot: ids for key, ids in fresh.items()})]
            if times:
                goes_on = np.full(len(slots), GOES_ON, np.int32)
                tickets.append(self._submit(slots, goes_on, goes_on))
        self.steady, self.compiled = behind <= FEW, engine.device.counters.recordings > recorded
        return asked, tickets

    def close(self) -> None:
        """Let go of its engine, whatever state that is in."""
        try:
            self.beside.close()
            for key in list(self._followed):
                self.end(key)
        finally:
            self._close()

    def _fresh(self, followed: Followed, ids: Sequence[int]) -> Sequence[int]:
        """What the slot has to run: all but what its cache holds, which it goes back to."""
        held, engine = self._same(followed.ids, ids), self.engine
        if held < engine.positions[followed.slot] and not engine.rewind(followed.slot, held):
            engine.rewind(followed.slot, 0)
            held = 0
        return ids[held:]

    @staticmethod
    def _same(held: Sequence[int], ids: Sequence[int]) -> int:
        """Tokens that the cache holds of ids, at most all but the last: its logits are wanted."""
        most = min(len(held), len(ids) - 1)
        if held[:most] == ids[:most]:
            return most
        return next((i for i in range(most) if held[i] != ids[i]), most)

    def _submit(self, slots: Sequence[int], tokens: np.ndarray | None = None, at: np.ndarray | None = None) -> int:
        """A decode pass of these slots' next rows; without tokens, of those of the pass before, going on."""
        engine, n = self.engine, len(slots)
        bucket = bucket_of(n, engine.sizes.decode)
        program = engine.program("decode", bucket, bucket, options=engine.choosing.options(slots))
        for slot in slots:
            engine.positions[slot] += 1
        if tokens is None or at is None:
            return engine.submit_scheduled(program, None)
        return engine.submit_scheduled(
            program, Rows(tokens, at, np.array(slots, np.int32), np.arange(n, dtype=np.int32))
        )

    def _known(self, fresh: Mapping[Hashable, Sequence[int]], left: int) -> int:
        """A decode pass of the tokens that are so many before the end of what is new, of the sequences that have so
        many."""
        rows = [(self._followed[key].slot, ids[-left]) for key, ids in fresh.items() if len(ids) >= left]
        slots = [slot for slot, _ in rows]
        at = [self.engine.positions[slot] for slot in slots]
        return self._submit(slots, np.array([token for _, token in rows], np.int32), np.array(at, np.int32))

    def _read(self, slot: int, position: int, tickets: Sequence[int]) -> list[int]:
        """The tokens chosen for positions from this one on; none from the first that is none (not finite, or of a void
        pass)."""
        found: list[int] = []
        for i, ticket in enumerate(tickets):
            token = self.engine.device.peek("history", slot, position + i, ticket)
            if token == FAULTED:
                self.engine.settle()
            if token < 0:
                break
            found.append(token)
        return found
