"""Guesses of the tokens that come next. A guess costs nothing but time: it is held against what the model chooses, so
where it is wrong the text is what it would have been without it.

    Lookup       n-grams of the sequence itself: what followed the last tokens when they stood there before
    Replay       a text that is known, right with a set rate: for measuring what acceptance is worth
    DraftModel   a smaller model with the same tokenizer (hybrid/engine/draft_model.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from hybrid.engine.pace import WATCHES

NGRAMS = (4, 2)  # tokens that must have stood there before, the most first


class Drafter(Protocol):
    """Guesses for one sequence at a time. Whatever it raises ends drafting, not the request."""

    name: str

    def fork(self) -> Drafter:
        """A drafter for one more sequence, beside those of others; itself, where it keeps nothing of a sequence."""
        ...

    def propose(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` guesses of what follows ids, all tokens of the sequence so far; none is an answer too. Later ids
        usually begin with earlier ones; where they do not, it is another sequence."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Watcher(Drafter, Protocol):
    """One that can say what it would have guessed of a text that came without guesses."""

    watches: int
    """Most tokens between two looks at that."""

    def agreed(self, ids: Sequence[int], since: int) -> tuple[int, int]:
        """How many of the tokens ids[since:] it would have guessed, each after those before it; and for how many it had
        a guess."""
        ...


class Lookup:
    """What followed the last few tokens where they stood before, the latest such place; needs no model. Where that
    place is so near that it ends before the guesses do, the text is taken to repeat itself."""

    name = "lookup"
    watches = WATCHES[0]

    def __init__(self) -> None:
        self._seen, self._last = 0, -1  # tokens whose n-grams are noted, but for those at their end; the last of them
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> where what followed it begins

    def fork(self) -> Lookup:
        return Lookup()

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        begin = self._place(ids, len(ids))
        found: list[int] = []
        if begin is not None:
            for at in range(begin, begin + most):
                found.append(ids[at] if at < len(ids) else found[at - len(ids)])
        return found

    def agreed(self, ids: Sequence[int], since: int) -> tuple[int, int]:
        places = [(at, self._place(ids, at)) for at in range(max(since, 1), len(ids))]
        found = [ids[begin] == ids[at] for at, begin in places if begin is not None]
        return sum(found), len(found)

    def close(self) -> None:
        self._seen, self._last, self._places = 0, -1, {}

    def _place(self, ids: Sequence[int], count: int) -> int | None:
        """Where in the first `count` ids stands what followed their end before."""
        self._follow(ids, count)
        places = (self._places.get(tuple(ids[count - n : count])) for n in NGRAMS if count > n)
        return next((place for place in places if place is not None), None)

    def _follow(self, ids: Sequence[int], count: int) -> None:
        """Note the n-grams of the first `count` ids that are new, but for those at their end, which nothing follows
        yet."""
        if self._seen > count or (self._seen and self._last != ids[self._seen - 1]):
            self.close()
        for end in range(max(self._seen, 1), count):
            for n in NGRAMS:
                if end >= n:
                    self._places[tuple(ids[end - n : end])] = end
        self._seen, self._last = count, ids[count - 1] if count else -1


class Replay:
    """Guesses out of a known text: each is right with probability `rate`, by a hash of the seed and its position; what
    follows a wrong one is as likely to be right, as with a draft model that goes on from its own token it would not
    be."""

    name = "replay"
    watches = WATCHES[0]

    def __init__(self, text: Sequence[int], rate: float, seed: int = 0) -> None:
        """text: all ids of the sequence, the prompt's too. ValueError for a rate that is no probability."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be a probability, 0 to 1, not {rate!r}")
        self._text, self._rate, self._seed = list(text), rate, seed
        self._right: dict[int, bool] = {}  # by position: drawing takes longer than looking up what is guessed

    def fork(self) -> Replay:
        return self

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        at = len(ids)
        return [self._guess(token, at + i) for i, token in enumerate(self._text[at : at + most])]

    def agreed(self, ids: Sequence[int], since: int) -> tuple[int, int]:
        found = [self._guess(token, at) == token for at, token in enumerate(self._text[since : len(ids)], since)]
        return sum(found), len(found)

    def close(self) -> None:
        pass

    def _guess(self, token: int, position: int) -> int:
        if position not in self._right:
            draw = np.random.Generator(np.random.Philox(key=[self._seed, position])).random()
            self._right[position] = bool(draw < self._rate)
        return token if self._right[position] else (token ^ 1)
