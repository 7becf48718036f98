"""Statistics of generations, of the engine, and of passes.

Seconds of a pass run from its submission, or the end of the pass before, until the host sees its end. Bytes and
operations are the plan's declared costs for the pass's rows, sequences and mean context. Within a factor of two of the
context these costs are multilinear. So a pass only adds to sums of products, kept per plan and power of two, and costs are
evaluated at the corners on request.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np

from hybrid.core.plan import Plan
from hybrid.core.units import show_bytes, show_rate
from hybrid.engine.loading import Load
from hybrid.planning.cost import plan_cost
from hybrid.spec.devicesheet import sheet_for

Finish = Literal["eos", "stop", "length", "context", "cancelled", "deadline", "error"]
"""Why a request ended."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, its natural log-probability, and the most likely alternatives, best first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The engine's part of Stats."""

    device: str
    passed_over: tuple[str, ...]
    precision: Mapping[str, tuple[str, ...]]
    bytes_per_token: int
    per_pass: Mapping[str, float] = field(default_factory=dict)
    bytes_elsewhere: Mapping[str, int] = field(default_factory=dict)
    carried: str = ""
    notes: tuple[str, ...] = ()
    load: Load | None = None
    reencoded: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    threads: str = ""
    speculation: str = ""
    drafted: int = 0
    accepted: int = 0

    def fields(self) -> dict[str, Any]:
        """Fields of Stats by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one generation. Seconds on the host's clock."""

    device: str
    passed_over: tuple[str, ...]
    """Devices that were skipped, and why."""
    precision: Mapping[str, tuple[str, ...]]
    """Storage types: weights, activations (matrix inputs), kv; `prefill activations` where those differ."""
    prompt_tokens: int
    tokens: int
    """Generated, the end-of-text token included."""
    finish: Finish
    first_token_seconds: float
    total_seconds: float
    bytes_per_token: int
    """Declared bytes of a decode pass at the sequence's mean length."""
    per_pass: Mapping[str, float] = field(default_factory=dict)
    """Submits, dispatches, allocations, ... per decode pass."""
    ids: tuple[int, ...] = ()
    bytes_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """The part of `bytes_per_token` outside device memory, by place: host memory (`cpu`) or a second device."""
    carried: str = ""
    """Copies between devices since they were opened."""
    notes: tuple[str, ...] = ()
    """What the checkpoint's reader assumed or left out."""
    cached_tokens: int = 0
    """Cached tokens before the prompt."""
    load: Load | None = None
    """Timing of loading."""
    reencoded: tuple[str, ...] = ()
    """Re-encoded types and their error."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the device by purpose; `left_in_files` (cpu): weights that are read again at every use."""
    threads: str = ""
    """Threads of host matrix products."""
    speculation: str = ""
    """Speculation: drafts, accepted drafts, tokens per pass."""
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Per generated token, if requested."""

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_seconds if self.first_token_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time after the first; 0 for one token."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0

    @property
    def timed(self) -> bool:
        """Whether there was a token after the first."""
        return self.tokens_per_second > 0

    @property
    def gb_per_second(self) -> float:
        return self.tokens_per_second * self.bytes_per_token / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """Share of the peak bandwidth, if a device sheet has it."""
        sheet = sheet_for(self.device)
        peak = sheet.peak.bandwidth_gb_s if sheet else None
        return self.gb_per_second / peak.value if peak else None

    def line(self) -> str:
        """The one line after a generation."""
        peak = "" if self.share_of_peak is None else f" ({100 * self.share_of_peak:.1f} % of peak)"
        cached = f" after {self.cached_tokens} in the cache" if self.cached_tokens else ""
        fallback = " (fallback)" if self.passed_over else ""
        parts = [
            f"{self.device}{fallback}",
            f"prompt {self.prompt_tokens} tokens{cached}, {self.prompt_per_second:.1f} tok/s",
        ]
        parts += [f"generated {self.tokens}" + f", {self.tokens_per_second:.1f} tok/s" * self.timed]
        parts += [f"first token {1000 * self.first_token_seconds:.0f} ms"]
        parts += [f"{show_rate(1e9 * self.gb_per_second, 'B/s')}{peak}"] * self.timed
        return " | ".join([*parts, self.finish])

    def reasons(self) -> list[str]:
        """A line for each skipped or failed device."""
        return [f"passed over: {p}" for p in self.passed_over]

    def details(self) -> list[str]:
        """More lines, for --stats."""
        types = "; ".join(f"{k} {', '.join(v)}" for k, v in self.precision.items())
        counts = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in self.per_pass.items())
        away = "".join(
            f", {n / 1e6:.2f} of it from {'host memory' if k == 'cpu' else k}" for k, n in self.bytes_elsewhere.items()
        )
        lines = [
            f"precision: {types}",
            f"per decode pass: {counts}; {self.bytes_per_token / 1e6:.2f} MB by declared cost{away}",
        ]
        if self.load is not None:
            lines.append(self.load.line())
        if self.speculation:
            lines.append(self.speculation)
        if self.threads:
            lines.append(f"threads: {self.threads}")
        if self.carried:
            lines.append(f"between devices: {self.carried}")
        lines += [f"re-encoded: {r}" for r in self.reencoded]
        held = ", ".join(
            f"{k.replace('_', ' ')} {show_bytes(n)}" for k, n in self.memory.items() if n and k != "left_in_files"
        )
        left = self.memory.get("left_in_files", 0)
        if held:
            lines.append(
                f"memory: {held}" + f"; weights read from their file at every use: {show_bytes(left)}" * bool(left)
            )
        return lines + [f"checkpoint: {n}" for n in self.notes]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        rates = ("tokens_per_second", "gb_per_second", "share_of_peak")  # null where there is none
        found = {r: getattr(self, r) if self.timed else None for r in rates}
        said = {**asdict(self), "prompt_per_second": self.prompt_per_second, **found}
        if self.logprobs is None:
            del said["logprobs"]
        return said


PassPhase = Literal["prefill", "decode", "mixed"]
"""Kinds of passes: prompt rows only, decode rows only, or both."""


@dataclass(frozen=True, slots=True)
class Total:
    """Of one phase."""

    passes: int = 0
    rows: int = 0
    seconds: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Passes of one plan, phase and range of contexts: `moments` are sums of products of (1, rows) x (1, sequences) x
    (1, context)."""

    plan: Plan
    onward: bool
    low: int
    moments: np.ndarray = field(default_factory=lambda: np.zeros((2, 2, 2)))
    passes: int = 0
    rows: int = 0
    seconds: float = 0.0


class Rows(Protocol):
    """Rows of a pass, as the scheduler makes them (Pass)."""

    rows: int

    @property
    def runs(self) -> Sequence[Any]: ...


class Work:
    """Accumulates the work of passes. Called by the engine's thread; `totals` from any. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sums: dict[tuple[PassPhase, int, int], _Sums] = {}
        # submitted, not known to have ended: with the mean context and the time of submission
        self._open: list[tuple[Rows, _Sums, int, float]] = []
        self._last = 0.0  # when the last pass ended
        self._corners: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()  # of the corners

    def begin(self, p: Rows, onward: bool, plan: Plan) -> None:
        """Note a pass before its submission. onward: by a decode plan, one row per sequence."""
        context = mean_context(p)
        bits = context.bit_length()
        key = (phase_of(p), id(plan), bits)
        sums = self._sums.get(key)
        if sums is None:  # it keeps the plan, so that its id stays its own
            sums = self._sums[key] = _Sums(plan, onward, 1 << (bits - 1))
        self._open.append((p, sums, context, self._clock()))

    def end(self, p: Rows) -> None:
        """Note the end of a pass and of those before it."""
        now = self._clock()
        ended = 1 + next((i for i, (known, *_) in enumerate(self._open) if known is p), -1)
        done, self._open = self._open[:ended], self._open[ended:]
        if not done:
            return
        seconds, rows = now - max(self._last, done[0][3]), sum(known.rows for known, *_ in done)
        for known, sums, c, _ in done:
            t, s = known.rows, len(known.runs)
            sums.moments += ((1, c), (s, s * c)), ((t, t * c), (t * s, t * s * c))
            sums.passes += 1
            sums.rows += t
            sums.seconds += seconds * t / rows
        self._last = now

    def lost(self) -> None:
        """Drop open passes after a loss."""
        self._open.clear()

    def totals(self) -> Mapping[PassPhase, Total]:
        """Totals of the passes that have ended."""
        found: dict[PassPhase, Total] = {}
        for (phase, _, _), sums in list(self._sums.items()):
            nbytes, flops = np.tensordot(self._at_corners(sums), _weights(sums), 3).tolist()
            t = found.get(phase, Total())
            found[phase] = Total(
                t.passes + sums.passes, t.rows + sums.rows, t.seconds + sums.seconds, t.nbytes + nbytes, t.flops + flops
            )
        return found

    def _at_corners(self, sums: _Sums) -> np.ndarray:
        """[2, rows, sequences, context]: bytes and operations of the plan at the corners; decode plans have a sequence
        for each row, so theirs are a square."""
        with self._lock:
            found = self._corners.get(key := (id(sums.plan), sums.low))
            if found is None:
                found = np.zeros((2, 2, 2, 2))
                for i, j, k in itertools.product(range(2), repeat=3):
                    (t, s), c = _corner(sums, i, j), sums.low << k
                    if sums.onward and i != j:
                        continue
                    cost = plan_cost(sums.plan, c, {"tokens": t, "slots": s, **({"outs": t} if sums.onward else {})})
                    found[:, i, j, k] = cost.nbytes, cost.flops
                self._corners[key] = found
            return found


def phase_of(p: Rows) -> PassPhase:
    """Rows of a pass by kind: runs with logits for every row decode, others are prompts."""
    prompts = sum(run.ids is not None and len(run.ids) > run.wants for run in p.runs)
    return "decode" if not prompts else "prefill" if prompts == len(p.runs) else "mixed"


def mean_context(p: Rows) -> int:
    """Mean context of a pass's rows, at least 1."""
    seen = rows = 0
    for _, _, start, ids, *_ in p.runs:
        n = 1 if ids is None else len(ids)
        seen += n * start + n * (n + 1) // 2
        rows += n
    return max(1, seen // rows)


def _sizes(sums: _Sums) -> tuple[int, int]:
    """Rows and sequences at the far corner."""
    return (2, 2) if sums.onward else (64, 16)


def _corner(sums: _Sums, i: int, j: int) -> tuple[int, int]:
    """Rows never fewer than sequences: costs have a bend there."""
    rows, sequences = _sizes(sums)
    return ((rows if i else 1) if sums.onward else rows << i), (sequences if j else 1)


def _weights(sums: _Sums) -> np.ndarray:
    """[rows, sequences, context]: how much of each corner's cost the passes make together."""
    m, c = sums.moments, sums.low
    m = np.stack((2 * m[..., 0] - m[..., 1] / c, m[..., 1] / c - m[..., 0]), -1)  # contexts c and 2 c
    if sums.onward:  # linear in rows, which are the sequences
        n, t = m[0, 0], m[1, 0]
        return np.array([[2 * n - t, 0 * n], [0 * n, t - n]])
    rows, sequences = _sizes(sums)
    at = np.stack((2 * m[0] - m[1] / rows, m[1] / rows - m[0]))  # rows and 2 rows
    return np.stack((at[:, 0] - (at[:, 1] - at[:, 0]) / (sequences - 1), (at[:, 1] - at[:, 0]) / (sequences - 1)), 1)


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot; counts are since the model was loaded."""

    waiting: int = 0
    """Requests without a pass so far."""
    running: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached ones included."""
    cached_tokens: int = 0
    """Cached prompt tokens."""
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    """Ended requests by Finish."""
    refused: int = 0
    """Requests refused with QueueFull."""
    passes: int = 0
    drafted: int = 0
    """Verified drafts; accepted: accepted ones; verified: verifications, per sequence."""
    accepted: int = 0
    verified: int = 0
    preemptions: int = 0
    evictions: int = 0
    """Evicted blocks."""
    recomputed: int = 0
    """Rows computed again after a preemption or an aborted step."""
    work: Callable[[], Mapping[PassPhase, Total]] = dict
    """Work by phase; computed separately, because it takes a moment."""
    blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """KV blocks by layer kind: used, cached (idle) and free."""
