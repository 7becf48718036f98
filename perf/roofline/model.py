"""Roofline model: time, bytes and operations of every step of a pass, the bound of each, and tokens per second.

Everything here is modelled, from the operations' cost expressions and a device sheet (specs/devices):
  ceiling   weights and caches cross memory once at its peak, all arithmetic runs at its peak, and both overlap fully;
            activations stay in caches, dispatches are free. A measurement above it is a mistake.
  expected  each step takes the larger of its bytes (activations too) at the bandwidth that was reached and its
  operations
            at the rate that was reached, one after another, and pays for its dispatches; a pass pays for its submit.
Speculative decoding: k tokens are drafted one by one, one pass verifies all; with acceptance a it yields
(1 - a^(k+1)) / (1 - a) tokens. A draft on another device runs ahead while a pass verifies; both read the memory that
they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid.core.errors import SpecError
from hybrid.perf.roofline.work import Item, Rate, Subject, Work
from hybrid.spec.devicesheet import DeviceSheet, Figure, find_sheet, load_sheets

Level = Literal["ceiling", "expected"]
_PEAKS: dict[Rate, tuple[str, ...]] = {
    "int8": ("int8_tops", "dot4_tops", "f32_tflops"),
    "f16": ("f16_tflops", "f32_tflops"),
    "f32": ("f32_tflops",),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One step's time in seconds and its bound: memory, a rate (int8, f16, f32) or dispatch."""

    item: Item
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """One pass on one device. `bound`: the bound with the largest share of time."""

    level: Level
    work: Work
    seconds: float
    bound: str
    steps: tuple[Timed, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of a decode pass: one token for each row that gets logits; of a prefill pass: prompt tokens."""
        return self.work.rows / self.seconds


def bandwidth(sheet: DeviceSheet, level: Level) -> float:
    """Bytes per second. SpecError for a sheet without one."""
    return _figure(sheet, ("bandwidth_gb_s",), level).value * 1e9


def rate(sheet: DeviceSheet, kind: Rate, level: Level) -> float:
    """Operations per second of the best unit for this kind of product. SpecError where the sheet knows none."""
    return _figure(sheet, _PEAKS[kind], level).value * 1e12


def _figure(sheet: DeviceSheet, names: Sequence[str], level: Level) -> Figure:
    tables = (sheet.reached, sheet.peak) if level == "expected" else (sheet.peak,)
    for name in names:
        for table in tables:
            found = getattr(table, name)
            if found is not None:
                return found
    raise SpecError(f"the sheet of {sheet.device.name} has no {names[0]} under [peak]: nothing can be modelled from it")


def modelled_sheets() -> dict[str, DeviceSheet]:
    """Sheets that know a memory and rates for every kind of product: all that a pass of a model asks of one."""
    return {name: sheet for name, sheet in load_sheets().items() if not _lacking(sheet)}


def _lacking(sheet: DeviceSheet) -> str:
    """The first figure that a pass asks for and the sheet does not have; empty: it has all."""
    wanted = (("bandwidth_gb_s",), *_PEAKS.values())
    return next((names[0] for names in wanted if all(getattr(sheet.peak, n) is None for n in names)), "")


def modelled_sheet(name: str) -> DeviceSheet:
    """A sheet by name. SpecError for one that passes of a model cannot be timed on, before anything is planned."""
    lacking = _lacking(find_sheet(name))
    if lacking:
        able = ", ".join(modelled_sheets())
        raise SpecError(
            f"specs/devices/{name}.toml: [peak] has no {lacking}, so no pass can be modelled on it; use {able}"
        )
    return find_sheet(name)


def estimate(work: Work, sheet: DeviceSheet, level: Level) -> Estimate:
    times: dict[tuple[object, ...], tuple[float, str]] = {}  # layers repeat: each distinct step is timed once
    steps = tuple(_timed(item, sheet, level, times) for item in work.items)
    if level == "ceiling":  # memory and arithmetic overlap across steps
        memory = work.streamed / bandwidth(sheet, level)
        by_rate: dict[str, float] = {
            r: sum(i.flops for i in work.items if i.rate == r) / rate(sheet, r, level)
            for r in {i.rate for i in work.items}
        }
        arithmetic = sum(by_rate.values())
        bound = "memory" if memory >= arithmetic else max(by_rate, key=lambda r: by_rate[r])
        return Estimate(level, work, max(memory, arithmetic), bound, steps)
    spent: dict[str, float] = {}
    for t in steps:
        spent[t.bound] = spent.get(t.bound, 0.0) + t.seconds
    submit = _cost(sheet, "submit_us")
    return Estimate(level, work, sum(spent.values()) + submit, max(spent, key=lambda b: spent[b]), steps)


def _timed(item: Item, sheet: DeviceSheet, level: Level, times: dict[tuple[object, ...], tuple[float, str]]) -> Timed:
    key = (item.nbytes, item.activations, item.flops, item.rate, item.dispatches, item.barriers)
    if key not in times:
        times[key] = _time(item, sheet, level)
    return Timed(item, *times[key])


def _time(item: Item, sheet: DeviceSheet, level: Level) -> tuple[float, str]:
    """Seconds of a step, and its bound."""
    moved = item.nbytes if level == "expected" else item.nbytes - item.activations
    parts: dict[str, float] = {
        "memory": moved / bandwidth(sheet, level),
        item.rate: item.flops / rate(sheet, item.rate, level),
    }
    busy = max(parts.values())
    waits = 0.0
    if level == "expected":
        drain = _cost(sheet, "drain_us")
        waits = item.barriers * (
            drain if drain and busy > drain * item.barriers else _cost(sheet, "dependent_dispatch_us")
        )
        waits += (item.dispatches - item.barriers) * _cost(sheet, "independent_dispatch_us")
    bound = "dispatch" if waits > busy else max(parts, key=lambda p: parts[p])
    return busy + waits, bound


def _cost(sheet: DeviceSheet, name: str) -> float:
    found = getattr(sheet.costs, name)
    return found.value * 1e-6 if found else 0.0


# -----------------------------------------------------------------------------------------------------------
# speculation
@dataclass(frozen=True, slots=True)
class Speculation:
    """One sequence with `length` drafted tokens per pass, of which each is accepted with `acceptance`."""

    draft: Subject | None
    """The draft model; None: drafts are looked up in the text, at no cost beside a pass."""
    length: int
    acceptance: float
    on: DeviceSheet | None = None
    """The device that drafts; None: the model's own, pass after pass."""
    waits: bool = False
    """Expected, where that is another device: whether it drafts only after each verification."""

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1 or self.length < 1:
            raise ValueError(
                f"speculation needs a draft of 1 or more and an acceptance in 0..1, not {self.length}, {self.acceptance}"
            )

    @property
    def yields(self) -> float:
        """Expected tokens of one verification."""
        return (1 - self.acceptance ** (self.length + 1)) / (1 - self.acceptance)

    def seconds(self, model: Subject, context: int, sheet: DeviceSheet, level: Level) -> float:
        """Of the draft's passes and the verification. SpecError for a second device that does not share the
        model's memory: what it costs to bring tokens over is not modelled."""
        verification = model.verify(self.length, context)
        verifying = estimate(verification, sheet, level).seconds
        if self.draft is None:
            return verifying
        draft = self.draft.decode(1, context)
        if self.on is None:
            return verifying + self.length * estimate(draft, sheet, level).seconds
        if self.on.device.shares is None or self.on.device.shares != sheet.device.shares:
            names = self.on.device.name, sheet.device.name
            raise SpecError(f"{names[0]} does not share the memory of {names[1]}: a draft there is not modelled")
        each, shared = at_least(draft, self.on, level), bandwidth(find_sheet(self.on.device.shares), level)
        if level == "ceiling":
            return max(verifying, self.length * each, (verification.streamed + self.length * draft.streamed) / shared)
        # Beside a verification the token after its drafts is drafted too. What was drafted
        # continues from all of them, or is discarded.
        ahead, drafting, ready = self.length + 1, self.length * each, self.acceptance ** (self.length + 1)
        together = max(verifying, ahead * each, (verification.nbytes + ahead * draft.nbytes) / shared)
        waiting = verifying + drafting
        return waiting if self.waits else min(waiting, together + (1 - ready) * drafting)

    def tokens_per_second(self, model: Subject, context: int, sheet: DeviceSheet, level: Level) -> float:
        return self.yields / self.seconds(model, context, sheet, level)


def at_least(work: Work, sheet: DeviceSheet, level: Level) -> float:
    """Seconds of a pass, without the arithmetic that a sheet knows no rate for (an NPU's has int8 alone)."""
    total = _cost(sheet, "submit_us") if level == "expected" else 0.0
    for item in work.items:
        moved = item.nbytes if level == "expected" else item.nbytes - item.activations
        busy = moved / bandwidth(sheet, level)
        if any(getattr(sheet.peak, name) is not None for name in _PEAKS[item.rate]):
            busy = max(busy, item.flops / rate(sheet, item.rate, level))
        total += busy + (item.barriers * _cost(sheet, "dependent_dispatch_us") if level == "expected" else 0.0)
    return total


# ---------------------------------------------------------------------------------------------------------------
# command
def report(model: Subject, sheet: DeviceSheet, works: Sequence[Work], context: int) -> dict[str, Any]:
    """Everything as plain data; seconds, bytes, operations."""
    passes = []
    for work in works:
        levels = {level: estimate(work, sheet, level) for level in ("ceiling", "expected")}
        passes.append(
            {
                "rows": work.rows,
                "outs": work.outs,
                "bytes": work.nbytes,
                "bytes_streamed": work.streamed,
                "flops": work.flops,
                "dispatches": work.dispatches,
                "memory": model.memory(max(1, work.outs), context),
                **{
                    name: {"seconds": e.seconds, "tokens_per_second": e.tokens_per_second, "bound": e.bound}
                    for name, e in levels.items()
                },
                "ops": by_op(levels["expected"]),
            }
        )
    return {
        "model": model.name,
        "basis": model.basis,
        "device": sheet.device.name,
        "provenance": "modelled",
        "context": context,
        "passes": passes,
    }


def by_op(e: Estimate) -> list[dict[str, Any]]:
    """Steps of one operation together, those that take longest first."""
    rows: dict[str, dict[str, Any]] = {}
    for t in e.steps:
        row = rows.setdefault(
            t.item.op,
            {
                "op": t.item.op,
                "steps": 0,
                "bytes": 0,
                "flops": 0,
                "dispatches": 0,
                "seconds": 0.0,
                "rate": t.item.rate,
                "_bounds": {},
            },
        )
        row["steps"] += 1
        row["bytes"] += t.item.nbytes
        row["flops"] += t.item.flops
        row["dispatches"] += t.item.dispatches
        row["seconds"] += t.seconds
        row["_bounds"][t.bound] = row["_bounds"].get(t.bound, 0.0) + t.seconds
    for row in rows.values():
        bounds = row.pop("_bounds")
        row["bound"] = max(bounds, key=lambda b: bounds[b])
        row["share"] = row["seconds"] / e.seconds
    return sorted(rows.values(), key=lambda r: -r["seconds"])


def text(data: dict[str, Any]) -> str:
    lines = [
        f"{data['model']} on {data['device']}, context {data['context']}; modelled, from {data['basis']}",
        "",
        f"{'rows':>5} {'GB/pass':>8} {'GFLOP':>9} {'disp.':>6} {'memory GB':>10} | {'ceiling ms':>11} {'tok/s':>9} {'bound':>8} | "
        f"{'expected ms':>12} {'tok/s':>9} {'bound':>8}",
    ]
    for p in data["passes"]:
        c, e = p["ceiling"], p["expected"]
        lines.append(
            f"{p['rows']:>5} {p['bytes_streamed'] / 1e9:>8.2f} {p['flops'] / 1e9:>9.1f} {p['dispatches']:>6} "
            f"{p['memory'] / 1e9:>10.2f} | {1e3 * c['seconds']:>11.2f} {c['tokens_per_second']:>9.1f} {c['bound']:>8} | "
            f"{1e3 * e['seconds']:>12.2f} {e['tokens_per_second']:>9.1f} {e['bound']:>8}"
        )
    for p in data["passes"]:
        lines += [
            "",
            f"{p['rows']} row{'s' * (p['rows'] > 1)}, expected, by operation",
            f"  {'operation':22} {'steps':>5} {'MB':>10} {'GFLOP':>9} {'FLOP/B':>8} {'ms':>9} {'share':>7}  bound",
        ]
        for r in p["ops"]:
            lines.append(
                f"  {r['op']:22} {r['steps']:>5} {r['bytes'] / 1e6:>10.2f} {r['flops'] / 1e9:>9.2f} "
                f"{r['flops'] / max(1, r['bytes']):>8.2f} {1e3 * r['seconds']:>9.3f} {100 * r['share']:>6.1f}%  {r['bound']}"
            )
    if "speculation" in data:
        s = data["speculation"]
        lines += [
            "",
            f"speculative, draft {s['draft']} on {s['device']}, length {s['length']}, acceptance {s['acceptance']:.3g}: "
            f"{s['yields']:.2f} tokens "
            f"per verification; ceiling {s['ceiling']:.1f} tok/s, expected {s['expected']:.1f} tok/s"
            + (f" ({s['waiting']:.1f} where it waits for each verification)" if "waiting" in s else ""),
        ]
    return "\n".join(lines)
