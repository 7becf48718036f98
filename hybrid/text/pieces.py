"""Texts by number and their numbers by text, in a few arrays: a vocabulary of 262144 pieces takes 7 MB, as Python's own
strings and a dictionary 40."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

from hybrid.core.numeric import np


class Pieces(Sequence[str]):
    """Any texts, lone surrogates included."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = texts if isinstance(texts, list | tuple) else list(texts)
        self._data = "".join(texts).encode("utf-8", "surrogatepass")
        begins = np.flatnonzero(
            np.frombuffer(self._data + b"\0", np.uint8) & 0xC0 != 0x80
        )  # of characters, and the end
        ends = begins[np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)]
        self._ends = array("q", ends.astype(np.int64).tobytes())
        hashes = np.fromiter(map(hash, texts), np.int64, len(texts))
        order = np.argsort(hashes, kind="stable")  # of equal texts the first number comes first
        self._hashes, self._order = array("q", hashes[order].tobytes()), array("I", order.astype(np.uint32).tobytes())

    @classmethod
    def of(cls, texts: Iterable[str]) -> Pieces:
        return texts if isinstance(texts, cls) else cls(texts)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = index if index >= 0 else len(self) + index
        if not 0 <= i < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        return str(self._data[self._ends[i] : self._ends[i + 1]], "utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and (self._data, self._ends) == (other._data, other._ends)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and next(self.numbers(text), None) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return Pieces, (list(self),)  # hashes differ between processes

    def numbers(self, text: str) -> Iterator[int]:
        """The numbers of this text, ascending."""
        wanted, hashes = hash(text), self._hashes
        at = bisect_left(hashes, wanted)
        while at < len(hashes) and hashes[at] == wanted:
            if self[number := self._order[at]] == text:
                yield number
            at += 1

    def holding(self, part: str, inside: bool = False) -> list[int]:
        """Numbers of the texts that contain `part`. inside: elsewhere than at their beginning."""
        data, wanted = np.frombuffer(self._data, np.uint8), part.encode("utf-8", "surrogatepass")
        found = np.ones(max(len(data) - len(wanted) + 1, 0), bool)
        for i, byte in enumerate(wanted):
            found &= data[i : i + len(found)] == byte
        at, ends = np.flatnonzero(found), np.frombuffer(self._ends, np.int64)
        number = np.searchsorted(ends, at, side="right") - 1
        return sorted(set(number[(ends[number] < at) | (not inside)].tolist()))
