"""Configurations of a model and their modelled speed on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybrid.perf.acceptance import LENGTHS
from hybrid.perf.roofline.model import Level, Speculation, estimate
from hybrid.perf.roofline.work import Subject, subject
from hybrid.spec.devicesheet import DeviceSheet
from hybrid.spec.model import load_models

BATCHES = (1, 2, 4, 8, 16, 32)
TYPES = ("q8_0", "q4_0")  # the smallest last
DRAFTS = {"gemma3": "gemma3-1b"}
"""By family, whose models share a tokenizer; Gemma 3n has none, its sizes are too alike. Gemma 4 has assistants."""
ACCEPTANCES = (0.6, 0.8, 0.9)
"""As parameters, beside what was measured."""
SPECULATION = tuple((length, acceptance) for acceptance in (0.7, 0.8, 0.9) for length in (4, 8))


def draft_of(name: str) -> str | None:
    """The published model that drafts for another: its assistant, else a smaller one of its family; None without."""
    known = load_models()
    if f"{name}-assistant" in known:
        return f"{name}-assistant"
    draft = DRAFTS.get(known[name].model.family) if name in known else None
    return draft if draft and known[name].model.parameters > known[draft].model.parameters else None


@dataclass(frozen=True, slots=True)
class Config:
    """How a model is run: matrices' type, sequences at a time, positions each, and speculation (length, acceptance)."""

    model: str
    dtype: str
    batch: int
    context: int
    draft: tuple[int, float] | None = None

    def __str__(self) -> str:
        text = f"{self.dtype}, B={self.batch}, context {self.context}"
        if self.draft:
            text += f", draft {(draft_of(self.model) or '').partition('-')[2]} k={self.draft[0]} a={self.draft[1]}"
        return text


@dataclass(frozen=True, slots=True)
class Speed:
    """Modelled tokens per second of a configuration, all sequences together, and what bounds it."""

    config: Config
    ceiling: float
    expected: float
    bound: str


def model_of(name: str, dtype: str, sheet: DeviceSheet) -> Subject:
    """As it is planned for what the sheet's device can do."""
    return _planned(name, dtype, sheet.limits.capabilities)


def memory_of(name: str, dtype: str, batch: int, context: int, sheet: DeviceSheet) -> int:
    return _memory(name, dtype, batch, context, sheet.limits.capabilities)


def needed(config: Config, sheet: DeviceSheet) -> int:
    """Bytes of a configuration, its draft model's among them."""
    own = memory_of(config.model, config.dtype, config.batch, config.context, sheet)
    draft = draft_of(config.model) if config.draft else None
    return own + (memory_of(draft, config.dtype, config.batch, config.context, sheet) if draft else 0)


@lru_cache(maxsize=64)
def _planned(name: str, dtype: str, capabilities: tuple[str, ...]) -> Subject:
    return subject(name, dtype, capabilities=capabilities)


@lru_cache(maxsize=256)
def _memory(name: str, dtype: str, batch: int, context: int, capabilities: tuple[str, ...]) -> int:
    return _planned(name, dtype, capabilities).memory(batch, context)


def speed(config: Config, sheet: DeviceSheet) -> Speed:
    """Both levels of one configuration."""
    if config.draft:
        return _speculative(config, sheet)
    work = model_of(config.model, config.dtype, sheet).decode(config.batch, config.context)
    ceiling, expected = (estimate(work, sheet, level) for level in _LEVELS)
    return Speed(config, ceiling.tokens_per_second, expected.tokens_per_second, ceiling.bound)


_LEVELS: tuple[Level, ...] = ("ceiling", "expected")


def _speculative(config: Config, sheet: DeviceSheet) -> Speed:
    length, acceptance = config.draft or (1, 0.0)
    plan = Speculation(model_of(_required(config.model), config.dtype, sheet), length, acceptance)
    model = model_of(config.model, config.dtype, sheet)
    ceiling, expected = (plan.tokens_per_second(model, config.context, sheet, level) for level in _LEVELS)
    return Speed(config, ceiling, expected, "memory")


def _required(name: str) -> str:
    draft = draft_of(name)
    if draft is None:
        raise ValueError(
            f"{name} has no draft among the published models: {', '.join(DRAFTS.values())} draft for larger ones of theirs, assistants for Gemma 4"
        )
    return draft


def plain(
    name: str, context: int, sheet: DeviceSheet, batches: Sequence[int] = BATCHES, types: Sequence[str] = TYPES
) -> Iterator[Speed]:
    """Fewest sequences first, then the better type."""
    for batch in batches:
        for dtype in types:
            yield speed(Config(name, dtype, batch, context), sheet)


def drafted(name: str, context: int, sheet: DeviceSheet) -> Iterator[Speed]:
    """One sequence with a draft model, modest acceptance first. Nothing for a model that has none."""
    if draft_of(name) is None:
        return
    for draft in SPECULATION:
        yield speed(Config(name, "q4_0", 1, context, draft), sheet)


def best_drafts(
    name: str, acceptance: float, context: int, sheet: DeviceSheet, lookup: bool = False, on: DeviceSheet | None = None
) -> tuple[int, float]:
    """(fastest draft length, up to 8, expected tokens per second) of one sequence in q4_0, with a draft
    on a device (None: the model's own) or with drafts that are looked up. ValueError for a model without a draft."""
    model, draft = model_of(name, "q4_0", sheet), None if lookup else model_of(_required(name), "q4_0", sheet)
    rates = {
        k: Speculation(draft, k, acceptance, on).tokens_per_second(model, context, sheet, "expected") for k in LENGTHS
    }
    best = max(rates, key=lambda k: rates[k])
    return best, rates[best]


_PROMPTS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)


def longest_prompt(name: str, dtype: str, seconds: float, sheet: DeviceSheet, level: Level) -> int:
    """Tokens of the longest prompt whose first token comes within `seconds`, at most 2048; 0: not even one token's.
    Between the lengths that are planned, time is taken to grow in proportion."""
    model, before = model_of(name, dtype, sheet), (0, 0.0)
    for rows in _PROMPTS:
        spent = estimate(model.work("prefill", rows, 1, max(rows, 32), 1), sheet, level).seconds
        if spent > seconds:
            length, earlier = before
            return int(length + (rows - length) * (seconds - earlier) / (spent - earlier)) if length else 0
        before = rows, spent
    return _PROMPTS[-1]
