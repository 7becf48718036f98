"""Every published size on one device, modelled: memory, decoding alone and together, and a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from hybrid.core.errors import SpecError
from hybrid.core.units import show_bytes
from hybrid.perf.roofline.model import estimate
from hybrid.perf.roofline.work import Work
from hybrid.perf.targets.search import TYPES, memory_of, model_of
from hybrid.spec.devicesheet import DeviceSheet
from hybrid.spec.model import load_models

TOGETHER = (1, 8, 32)
PROMPT = 2048


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of pass. Tokens per second of all sequences together (of a prompt: its tokens); memory in bytes."""

    name: str
    expected: float
    ceiling: float
    bound: str
    memory: int
    fits: bool
    """In what the sheet says that the device has; a sheet that does not say has enough."""

    @property
    def shown(self) -> str:
        return f"{_digits(self.expected)} ({_digits(self.ceiling)}){' ' if self.fits else '*'}"


@dataclass(frozen=True, slots=True)
class Size:
    """A published model with matrices of `dtype` on a device: `passes` decode one and several sequences of `context`
    positions, then read a prompt of PROMPT tokens."""

    model: str
    dtype: str
    context: int
    passes: tuple[Pass, ...]


def names(pattern: str) -> tuple[str, ...]:
    """Published models that write text and whose name fits, as in a shell; smallest first. SpecError where none does."""
    known = {name: m for name, m in load_models().items() if not (m.shape.dimensions or m.shape.backbone)}
    found = sorted((n for n in known if fnmatch(n, pattern)), key=lambda n: known[n].model.parameters)
    if not found:
        raise SpecError(f"--models: no model is called {pattern!r}; specs/models has {', '.join(known)}")
    return tuple(found)


def sizes(models: Iterable[str], context: int, sheet: DeviceSheet, dtype: str = TYPES[-1]) -> Iterator[Size]:
    """ValueError for a context that a model was not made for."""
    for name in models:
        model = model_of(name, dtype, sheet)
        works = [(f"{b} at a time", model.decode(b, context), b, context) for b in TOGETHER]
        works.append((f"prompt of {PROMPT}", model.work("prefill", PROMPT, 1, PROMPT, 1), 1, PROMPT))
        yield Size(name, dtype, context, tuple(_pass(name, dtype, sheet, *work) for work in works))


def _pass(model: str, dtype: str, sheet: DeviceSheet, name: str, work: Work, batch: int, context: int) -> Pass:
    expected, ceiling = estimate(work, sheet, "expected"), estimate(work, sheet, "ceiling")
    need, have = memory_of(model, dtype, batch, context, sheet), sheet.limits.memory_bytes
    return Pass(
        name, expected.tokens_per_second, ceiling.tokens_per_second, ceiling.bound, need, have is None or need <= have
    )


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:.3g}" if value < 1000 else f"{round(value, 2 - len(str(int(value))) + 1):,.0f}"


def table(found: Iterable[Size], sheet: DeviceSheet) -> str:
    """As text; a star: more than the device's memory."""
    rows = list(found)
    one = rows[0]
    lines = [
        f"Published sizes on {sheet.device.name}, {one.dtype}, {one.context} positions of each sequence",
        "modelled tokens per second: expected (ceiling)",
        "",
        f"{'model':13}{'memory':>10}" + "".join(f"{p.name:>22}" for p in one.passes) + "  bound by",
    ]
    for row in rows:
        bounds = " ".join(dict.fromkeys(p.bound for p in row.passes))
        cells = "".join(f"{p.shown:>22}" for p in row.passes)
        lines.append(f"{row.model:13}{show_bytes(row.passes[0].memory):>10}{cells}  {bounds}")
    if not all(p.fits for row in rows for p in row.passes):
        lines += [
            "",
            f"*: takes more than the {show_bytes(sheet.limits.memory_bytes or 0)} that the sheet says the device has",
        ]
    return "\n".join(lines)
