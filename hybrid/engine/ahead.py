"""Guesses that are made while those before them are verified: a draft on another device than the target's goes on as if
all of them were right, and as if the token after them were its own choice. Where the verification says so, the next
guesses are there.

    Ahead.start(what is verified now) -> a thread runs the draft's passes -> the verification is read -> Ahead.take(what
    is known)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import closing

Wanted = Mapping[Hashable, tuple[Sequence[int], int]]
"""By sequence: tokens, and how many guesses of what follows them, at most."""
WAIT = 600.0  # seconds for a pass of the draft's, which waits for nothing but its device, which bounds its waits itself


class Ahead:
    """run: the draft's passes for what is wanted; each step gives the next guess of every sequence that lacks any. Its
    steps are taken in a thread of their own, and from `start` until `rest` or `take` nobody else may use what it uses.
    Otherwise for one thread at a time. What `run` raises is raised by whoever waits for it."""

    def __init__(self, run: Callable[[Wanted], Generator[Mapping[Hashable, int], None, None]]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._most, self._steps, self._over = 0, 0, True  # steps to take; those taken; whether no more come
        self._error: BaseException | None = None
        self._after: dict[Hashable, list[int]] = {}  # tokens that guesses follow, by sequence
        self._made: dict[Hashable, list[int]] = {}
        self.started = 0
        """Verifications beside which guesses were begun."""
        self.dropped: Counter[Hashable] = Counter()
        """Guesses that nobody wanted, by sequence; whoever counts them takes them out."""

    def start(self, wanted: Wanted) -> None:
        """Guess what follows these tokens, those among them that are being verified."""
        self.rest()
        self._drop({})
        ordered = {key: (list(ids), most) for key, (ids, most) in wanted.items()}  # a sequence's own list grows
        thread = threading.Thread(target=self._work, args=(ordered,), name="hybrid draft")
        self._after, self._made = {key: ids for key, (ids, _) in ordered.items()}, {key: [] for key in ordered}
        self._most, self._steps = max(most for _, most in ordered.values()), 0
        self.started += 1
        try:
            self._over = False
            thread.start()
            self._thread = thread
        except BaseException:
            if not thread.is_alive():
                self._over = True
            else:  # somebody was interrupted
                self._thread = thread
            raise

    def take(self, wanted: Wanted) -> dict[Hashable, list[int]]:
        """Guesses of sequences whose tokens, all that are known by now, are those that were supposed; waits until there
        are as many as are wanted. What is not right, or not wanted, is dropped."""
        ends: dict[Hashable, int] = {}  # of what was made, by sequences that have gone on as was supposed
        for key, (ids, most) in wanted.items():
            if key in self._after and self._as_supposed(key, list(ids)):
                ends[key] = max(0, len(ids) - len(self._after[key]) + most)
        self.rest(max(ends.values(), default=0))
        found = {key: [*self._after[key], *self._made[key][:end]][len(wanted[key][0]) :] for key, end in ends.items()}
        found = {key: guesses[: wanted[key][1]] for key, guesses in found.items() if guesses}
        self._drop({key: ends[key] for key in found})
        return found

    def _as_supposed(self, key: Hashable, ids: list[int]) -> bool:
        after, new = self._after[key], len(ids) - len(self._after[key])
        if after[: len(ids)] != ids[: len(after)]:
            return False
        self._wait(new)  # for the token after the verified ones
        return self._made[key][: max(0, new)] == ids[len(after) :]

    def rest(self, steps: int = 0) -> None:
        """Take no more than so many steps, and wait until the last of them is over. What was guessed stays, to be
        taken."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._most = min(self._most, steps)
        self._wait(None)
        thread.join(WAIT)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._drop({})
            raise error

    def stop(self) -> None:
        """As `rest`, waiting for nothing."""
        with self._changed:
            self._most = 0

    def close(self) -> None:
        """Stop, and wait for it; what goes wrong with guesses is of no interest any more."""
        self.stop()
        if self._thread is not None:
            self._thread.join(WAIT)

    def forget(self, key: Hashable) -> None:
        """A sequence has ended."""
        self.rest()
        self._after.pop(key, None)
        if made := self._made.pop(key, None):
            self.dropped[key] += len(made)

    def _drop(self, used: Mapping[Hashable, int]) -> None:
        """All that was made, but for so many of a sequence's."""
        for key, made in self._made.items():
            if n := len(made[used.get(key, 0) :]):
                self.dropped[key] += n
        self._after, self._made = {}, {}

    def _wait(self, steps: int | None) -> None:
        """Until so many steps were taken (None: all), or no more come."""
        with self._changed:
            while not self._over and (steps is None or self._steps < steps):
                if self._thread is None or not self._thread.is_alive() or not self._changed.wait(WAIT):
                    raise RuntimeError(f"the draft's thread has ended, or not finished a pass in {WAIT:g} s")

    def _work(self, wanted: Wanted) -> None:
        try:
            with closing(self._run(wanted)) as steps:
                for found in steps:
                    with self._changed:
                        for key, token in found.items():
                            self._made[key].append(token)
                        self._steps += 1
                        self._changed.notify_all()
                        if self._steps >= self._most:
                            break
        except BaseException as error:  # for whoever waits
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
