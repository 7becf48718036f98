"""Which replica a request goes to. Plain host code, without I/O.

A request's beginning is cut into pieces, each with a key that follows from all pieces up to it, as the blocks of the
prefix cache have (hybrid/engine/blocks.py). The replica that ran the longest part of it last has that part in its KV
cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

PIECE = 128
"""Characters of a piece: about the tokens of one cache block."""
PIECES = 512
"""Of a beginning that are looked at: longer ones differ in these or do not matter."""
LOOKED = 2 * PIECES * PIECE
"""Bytes of a body that are read for it, whatever is in them: milliseconds of the event loop."""


def beginning(path: str, body: bytes) -> str:
    """What an engine would compute first, as text that a longer conversation begins with too; empty where the body is
    none of a request for text. Never raises: replicas refuse what is wrong."""
    try:
        said = from_json(body[:LOOKED], allow_partial="trailing-strings" if len(body) > LOOKED else "off")
        if not isinstance(said, dict):
            return ""
        first = [said[k] for k in ("tools", "instructions") if said.get(k) is not None]
        rest: Any = said.get("messages", said.get("input", said.get("prompt")))
        if rest is None:
            return ""
        *before, last = (json.dumps(item, sort_keys=True) for item in [*first, rest])
    except ValueError:
        return ""
    return (
        path + "".join(before) + (last[:-1] if isinstance(rest, (list, str)) else last)
    )  # a longer one does not end here


def keys_of(text: str) -> tuple[bytes, ...]:
    """The chained key of each whole piece of a beginning, the first piece's first."""
    keys, last = [], b""
    for at in range(0, min(len(text), PIECES * PIECE) - PIECE + 1, PIECE):
        last = hashlib.blake2b(last + text[at : at + PIECE].encode("utf-8", "surrogatepass"), digest_size=16).digest()
        keys.append(last)
    return tuple(keys)


class Routes:
    """Who ran what, for `replicas` replicas. remembered: keys that are kept, the least recently used go first.
    imbalance: a replica with so many more open requests than the least busy one is passed over, whatever it has
    cached."""

    def __init__(self, replicas: int, remembered: int = 1 << 18, imbalance: int = 8) -> None:
        if replicas < 1 or remembered < 1 or imbalance < 1:
            raise ValueError(f"replicas {replicas}, remembered {remembered} and imbalance {imbalance} must be positive")
        self.replicas, self._remembered, self._imbalance = replicas, remembered, imbalance
        self._ran: OrderedDict[bytes, int] = OrderedDict()
        self._turn = 0

    def choose(self, keys: Sequence[bytes], load: Sequence[int | None]) -> int | None:
        """The replica for a request, by the open requests of each (None: it is down); None where all are down."""
        up = [i for i, n in enumerate(load) if n is not None]
        if not up:
            return None
        least = min(load[i] or 0 for i in up)
        for key in reversed(keys):
            replica = self._ran.get(key)
            if replica in up and (load[replica] or 0) - least < self._imbalance:
                return replica
        self._turn += 1
        return min(up, key=lambda i: (load[i] or 0, (i - self._turn) % self.replicas))

    def ran(self, keys: Sequence[bytes], replica: int) -> None:
        """A request with these keys has begun on a replica."""
        for key in keys:
            self._ran[key] = replica
            self._ran.move_to_end(key)
        while len(self._ran) > self._remembered:
            self._ran.popitem(last=False)

    def forget(self, replica: int) -> None:
        """It was lost, and its cache with it."""
        for key in [k for k, r in self._ran.items() if r == replica]:
            del self._ran[key]
