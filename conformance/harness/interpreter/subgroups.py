"""Subgroup operations between 32 lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from hybrid.harness.interpreter.matrices import LANES
from hybrid.harness.interpreter.operations import reduced, scalar
from hybrid.harness.interpreter.values import Fault, NotInterpreted, spread


class Subgroups(ABC):
    """Subgroup instructions of a machine."""

    name: str
    n: int
    mask: Any
    values: dict[int, Any]

    @abstractmethod
    def _put(self, result: int, value: Any) -> None:
        """Store an instruction's result."""

    def _active(self) -> np.ndarray:
        whole = np.ones(self.n, bool) if self.mask is None else self.mask
        return whole.reshape(-1, LANES)

    def _lanes(self, value: Any) -> np.ndarray:
        return spread(value, self.n).reshape(-1, LANES)

    def _elect(self, t: Any, result: int, a: list[int]) -> None:
        active = self._active()
        self._put(result, (active & (np.cumsum(active, -1) == 1)).ravel())

    def _vote(self, t: Any, result: int, a: list[int], every: bool) -> None:
        active, x = self._active(), self._lanes(self.values[a[1]])
        found = (x | ~active).all(-1) if every else (x & active).any(-1)
        self._put(result, np.repeat(found, LANES))

    def _shuffle(self, t: Any, result: int, a: list[int], exclusive: bool) -> None:
        lane = np.arange(LANES)[None]
        source = self._lanes(self.values[a[2]]).astype(np.int64)
        source = lane ^ source if exclusive else source
        self._take(result, self.values[a[1]], source)

    def _take(self, result: int, value: Any, source: np.ndarray) -> None:
        active = self._active()
        wrong = active & ~np.take_along_axis(active, source % LANES, -1)
        if wrong.any() or (source[active] >= LANES).any():
            raise Fault(f"{self.name}: a lane reads an inactive lane's value")

        def one(x: Any) -> Any:
            return np.take_along_axis(self._lanes(x), source % LANES, -1).ravel()

        self._put(result, [one(x) for x in value] if isinstance(value, list) else one(value))

    def _broadcast(self, t: Any, result: int, a: list[int], first: bool) -> None:
        active = self._active()
        source = active.argmax(-1)[:, None] if first else self._lanes(self.values[a[2]]).astype(np.int64)
        self._take(result, self.values[a[1]], np.broadcast_to(source, active.shape))

    def _ballot(self, t: Any, result: int, a: list[int]) -> None:
        bits = (self._lanes(self.values[a[1]]) & self._active()).astype(np.uint32) << np.arange(LANES, dtype=np.uint32)
        word = np.repeat(np.bitwise_or.reduce(bits, -1), LANES)
        self._put(result, [word, np.uint32(0), np.uint32(0), np.uint32(0)])

    def _bit_count(self, t: Any, result: int, a: list[int]) -> None:
        lane = np.arange(LANES, dtype=np.uint32)
        bits = self._lanes(self.values[a[2]][0])[..., None] >> lane & 1  # [subgroups, lanes, bits]
        counted = {0: np.ones((LANES, LANES), bool), 1: lane <= lane[:, None], 2: lane < lane[:, None]}[a[1]]
        self._put(result, (bits * counted).sum(-1).astype(np.uint32).ravel())

    def _reduce(self, op: int, t: Any, result: int, a: list[int]) -> None:
        how, value, active, dtype = a[1], self.values[a[2]], self._active(), scalar(t)
        if how not in (0, 1, 2) or (how and op not in (349, 350)):
            raise NotInterpreted(f"{self.name}: opcode {op} of subgroups in a way that is not known ({how})")

        def one(x: Any) -> Any:
            if how == 0:
                return np.repeat(reduced(op, self._lanes(x), active, dtype).astype(dtype).ravel(), LANES)
            own = np.where(active, self._lanes(x), dtype(0))  # a scan, exclusive or inclusive
            return (np.cumsum(own, -1, dtype=dtype) - (own if how == 2 else dtype(0))).ravel()

        self._put(result, [one(x) for x in value] if isinstance(value, list) else one(value))

    def _whole_subgroups(self) -> None:
        if (
            self.mask is not None
            and (self.mask.reshape(-1, LANES).any(-1) != self.mask.reshape(-1, LANES).all(-1)).any()
        ):
            raise Fault(f"{self.name}: a matrix operation that not all lanes of a subgroup reach")
