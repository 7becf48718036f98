"""What a generation did, and how fast: speeds with the bytes behind them and, where known, the device's ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from hybrid.core.units import show_bytes, show_rate
from hybrid.engine.loading import Load
from hybrid.spec.devicesheet import sheet_for

if TYPE_CHECKING:
    from hybrid.engine.handle import TokenLogprob

Finish = Literal["eos", "stop", "length", "context", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the statistics of a request say of the engine that ran it; see the fields of Stats."""

    device: str
    passed_over: tuple[str, ...]
    precision: Mapping[str, tuple[str, ...]]
    bytes_per_token: int
    per_pass: Mapping[str, float] = field(default_factory=dict)
    carried: str = ""
    notes: tuple[str, ...] = ()
    load: Load | None = None
    reencoded: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    threads: str = ""
    guessed: str = ""
    drafted: int = 0
    accepted: int = 0

    def fields(self) -> dict[str, Any]:
        """By name, as Stats takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one generation. Seconds are the host's clock; rates are per second."""

    device: str
    passed_over: tuple[str, ...]
    """Devices of the chain that could not be used, and why."""
    precision: Mapping[str, tuple[str, ...]]
    """Storage types: weights, activations (matrix inputs), kv; `prefill activations` where those differ."""
    prompt_tokens: int
    tokens: int
    """Generated, the end-of-text token included."""
    finish: Finish
    first_token_seconds: float
    total_seconds: float
    bytes_per_token: int
    """Bytes that one decode pass must move, by the operations' declared cost at the sequence's mean length."""
    per_pass: Mapping[str, float] = field(default_factory=dict)
    """Submits, dispatches, allocations, ... per decode pass."""
    ids: tuple[int, ...] = ()
    carried: str = ""
    """Copies between the devices of one plan, since they were opened."""
    notes: tuple[str, ...] = ()
    """What the checkpoint's reader assumed or left out."""
    cached_tokens: int = 0
    """Tokens before the prompt's that the cache held already (of a session)."""
    load: Load | None = None
    """What loading the model took."""
    reencoded: tuple[str, ...] = ()
    """Types of the file that the device holds as others, and what that costs."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the device holds, by purpose; `left_in_files` (cpu) are weights that it reads again at every use."""
    threads: str = ""
    """How matrix products use the host's processors, where they do."""
    guessed: str = ""
    """Guesses of the next tokens, where there are any: how many, how many of them right, tokens of a pass."""
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each generated token, where they were asked for."""

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.prompt_tokens / self.first_token_seconds if self.first_token_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time after the first; 0 when there is none, which is then no speed."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0

    @property
    def timed(self) -> bool:
        """Was there a token after the first, whose speed could be taken?"""
        return self.tokens_per_second > 0

    @property
    def gb_per_second(self) -> float:
        return self.tokens_per_second * self.bytes_per_token / 1e9

    @property
    def share_of_peak(self) -> float | None:
        """Of the device's bandwidth, where a device sheet knows it."""
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
        """A line for each device that was wanted first or failed: a fallback is never without its reason."""
        return [f"passed over: {p}" for p in self.passed_over]

    def details(self) -> list[str]:
        """More lines, for --stats."""
        types = "; ".join(f"{k} {', '.join(v)}" for k, v in self.precision.items())
        counts = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in self.per_pass.items())
        lines = [
            f"precision: {types}",
            f"per decode pass: {counts}; {self.bytes_per_token / 1e6:.2f} MB by declared cost",
        ]
        if self.load is not None:
            lines.append(self.load.line())
        if self.guessed:
            lines.append(self.guessed)
        if self.threads:
            lines.append(f"threads: {self.threads}")
        if self.carried:
            lines.append(f"between devices: {self.carried}")
        lines += [f"re-encoded: {r}" for r in self.reencoded]
        held = ", ".join(f"{k} {show_bytes(n)}" for k, n in self.memory.items() if n and k != "left_in_files")
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
