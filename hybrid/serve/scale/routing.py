"""Prefix-aware routing of requests to replicas. No I/O.

A prompt is cut into pieces with chained hashes, as are the blocks of the prefix cache (hybrid/engine/blocks.py). The
replica that last ran the longest common prefix has it in its KV cache.
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
"""Most pieces of a prompt that are hashed."""
LOOKED = 2 * PIECES * PIECE
"""Most bytes of a body that are read, which bounds the time on the event loop."""


def beginning(path: str, body: bytes) -> str:
    """The prompt prefix of a request as text, a prefix also of the continued conversation's; empty for other requests.
    Never raises: replicas refuse invalid requests."""
    try:
        said = from_json(body[:LOOKED], allow_partial="trailing-strings" if len(body) > LOOKED else "off")
        if not isinstance(said, dict):
            return ""
        first = [said[k] for k in ("tools", "instructions", "system") if said.get(k) is not None]
        rest: Any = said.get("messages", said.get("input", said.get("prompt")))
        if rest is None:
            return ""
        *before, last = (json.dumps(item, sort_keys=True) for item in [*first, rest])
    except ValueError:
        return ""
    if isinstance(rest, (list, str)):
        last = last[:-1]  # a longer conversation continues here
    return path + "".join(before) + last


def keys_of(text: str) -> tuple[bytes, ...]:
    """The chained hash of each whole piece of a prefix, in order."""
    keys, last = [], b""
    for at in range(0, min(len(text), PIECES * PIECE) - PIECE + 1, PIECE):
        last = hashlib.blake2b(last + text[at : at + PIECE].encode("utf-8", "surrogatepass"), digest_size=16).digest()
        keys.append(last)
    return tuple(keys)


class Routes:
    """Routing table of `replicas` replicas. remembered: capacity of the LRU table of keys. imbalance: skip a replica
    with this many more open requests than the least busy one, regardless of its cache."""

    def __init__(self, replicas: int, remembered: int = 1 << 18, imbalance: int = 8) -> None:
        if replicas < 1 or remembered < 1 or imbalance < 1:
            raise ValueError(f"replicas {replicas}, remembered {remembered} and imbalance {imbalance} must be positive")
        self.replicas, self._remembered, self._imbalance = replicas, remembered, imbalance
        self._ran: OrderedDict[bytes, int] = OrderedDict()
        self._turn = 0

    def choose(self, keys: Sequence[bytes], load: Sequence[int | None]) -> int | None:
        """The replica for a request, or None if all are down. load: open requests of each replica; None: down."""
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
        """Record that a replica runs a request with these keys."""
        for key in keys:
            self._ran[key] = replica
            self._ran.move_to_end(key)
        while len(self._ran) > self._remembered:
            self._ran.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Drop the keys of a lost replica."""
        for key in [k for k, r in self._ran.items() if r == replica]:
            del self._ran[key]
