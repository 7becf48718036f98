"""What an engine has done for submitted requests, as numbers that a server can publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybrid.engine.work import PassPhase, Total


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot; counts are since the model was loaded."""

    waiting: int = 0
    """Requests that no pass has run for."""
    running: int = 0
    prompt_tokens: int = 0
    """Of requests that were begun, those found in the cache included."""
    cached_tokens: int = 0
    """Of prompt_tokens, those that were not computed."""
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests by how they ended: eos, stop, length, context, cancelled, deadline, error."""
    refused: int = 0
    """Requests that found the queue full."""
    passes: int = 0
    drafted: int = 0
    """Guessed tokens that passes verified; accepted: those of them that were right; verified: passes with guesses, of
    each sequence."""
    accepted: int = 0
    verified: int = 0
    drafted_beside: int = 0
    """Of drafted, made while those before them were verified; dropped_beside: made so in vain, of sequences that have
    ended."""
    dropped_beside: int = 0
    preemptions: int = 0
    evictions: int = 0
    """Cached blocks that were given up for others."""
    recomputed: int = 0
    """Rows that were run again after a preemption or a void pass."""
    work: Callable[[], Mapping[PassPhase, Total]] = dict
    """What passes took, by phase; asked for apart, since declared costs take a moment."""
    blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By kind of layer: used, cached (of no running sequence, but found again) and free blocks of the KV cache."""
