"""Speed targets: whether the APU can reach each one, in which configuration, and its bound.

    python -m perf.targets                               # the table
    python -m perf.targets --memory 16GiB --want 50      # what to run for 50 tok/s in 16 GiB
    python -m perf.targets --models 'gemma4-*'           # what the device makes of each published size ('*': of all)

Verdicts follow from hybrid.perf.roofline (modelled): `yes` if the expected speed reaches the target, `borderline` if
only the ceiling does (every byte at the memory's peak), else `no`; `needs ...` where it is reached with something that
this project does not have yet. `measured` is the nearest run in perf/records, on its device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.cli import Parser, UsageError, amount, run, size
from hybrid.cli.progress import tracked
from hybrid.core.units import show_bytes
from hybrid.perf.acceptance import pairs
from hybrid.perf.npu.pipeline import SHIPPED, gain, span
from hybrid.perf.record.schema import nearest_run
from hybrid.perf.roofline.model import bandwidth, estimate, modelled_sheet, rate
from hybrid.perf.roofline.work import subject
from hybrid.perf.targets.search import (
    ACCEPTANCES,
    TYPES,
    Config,
    Speed,
    best_drafts,
    drafted,
    longest_prompt,
    memory_of,
    model_of,
    needed,
    plain,
    speed,
)
from hybrid.perf.targets.sizes import names, sizes
from hybrid.perf.targets.sizes import table as sizes_table
from hybrid.spec.devicesheet import DeviceSheet, find_sheet
from hybrid.spec.load import Model, load_toml
from hybrid.spec.model import load_models

FILE = Path(__file__).with_name("targets.toml")
Verdict = Literal["yes", "borderline", "no", "by means", "needs"]


class Target(Model):
    """One wish. `want`: tokens per second, seconds or bytes, by its kind."""

    id: str
    text: str
    kind: Literal["speed", "bytes", "first_token", "token_time", "budget", "means"]
    model: str = "gemma3-27b"
    context: int = 256
    want: Annotated[float, Field(gt=0)] | None = None
    bytes: int | None = None
    means: Literal["none", "no_attention", "both_engines", "mixture", "draft", "lookup", "npu_down"] | None = None
    on: str | None = None
    """means = "draft": the sheet of the device that drafts; None: the model's own."""
    note: str = ""


class Targets(Model):
    schema_version: Literal[1] = Field(alias="schema")
    target: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A row of the table."""

    id: str
    target: str
    verdict: Verdict
    how: str
    bound: str
    modelled: str
    measured: str
    needs: str = ""
    """What the target cannot be reached without and the device does not settle."""
    together: bool = False
    """By several sequences at a time (hybrid.bench --batch-size runs them), their speeds added."""

    @property
    def shown(self) -> str:
        return f"needs {self.needs}" if self.verdict == "needs" else self.verdict + ", together" * self.together


def load_targets() -> tuple[Target, ...]:
    return load_toml(FILE, Targets).target


def judge(target: Target, sheet: DeviceSheet, measured_on: str) -> Judged:
    """One wish against one device's sheet. The kind decides which question is asked."""
    found = _KINDS[target.kind](target, sheet)
    how = "; ".join(filter(None, (found.how, target.note)))
    verdict: Verdict = "needs" if found.needs and found.verdict in ("yes", "borderline") else found.verdict
    if verdict == "needs" and found.verdict == "borderline":
        how += "; even then borderline"
    needs = found.needs if verdict == "needs" else ""
    measured = _measured(target, measured_on)
    return Judged(target.id, target.text, verdict, how, found.bound, found.modelled, measured, needs, found.together)


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict as if all that `needs` names were so."""

    verdict: Verdict
    how: str
    bound: str
    modelled: str
    needs: str = ""
    together: bool = False


def assumed(config: Config) -> str:
    """What a configuration's speed rests on beside the device: a draft that is right so often, which depends on the two
    models and on the text (perf.acceptance measures it). Empty: nothing."""
    return f"a draft that is right {config.draft[1]:g} of the time" if config.draft else ""


def _speed(t: Target, sheet: DeviceSheet) -> Answer:
    """What can be run today comes first: one sequence, then several together; then one sequence with a draft."""
    want = t.want or 0.0
    today, later = list(plain(t.model, t.context, sheet)), list(drafted(t.model, t.context, sheet))
    alone = _first([s for s in today if s.config.batch == 1], want)
    found = min(filter(None, (_first(today, want), _first(later, want))), key=lambda f: f[0] != "yes", default=None)
    best = max(today, key=lambda s: s.ceiling)
    one = _best_single(t, sheet, want) if alone is None else f"one sequence: {alone[1].config}"
    if found is None:
        how = f"{one}; together: at most {best.config}; {_needs(want, best, sheet)}"
        return Answer("no", how, _lacks(want, best, sheet), _rates(best))
    verdict, speed = found
    c, need = speed.config, needed(speed.config, sheet)
    ran = f"together: {c}; {one}" if c.batch > 1 else f"one sequence: {c}"
    return Answer(verdict, f"{ran} ({show_bytes(need)})", speed.bound, _rates(speed), assumed(c), c.batch > 1)


def _alone(model: str, context: int, sheet: DeviceSheet) -> Iterator[Speed]:
    """One sequence: by itself, then with a draft."""
    return chain(plain(model, context, sheet, batches=(1,)), drafted(model, context, sheet))


def _best_single(t: Target, sheet: DeviceSheet, want: float) -> str:
    """What one sequence can do that does not reach `want` today."""
    drafting = _first(list(drafted(t.model, t.context, sheet)), want)
    if drafting:
        return f"one sequence: with {assumed(drafting[1].config)} ({drafting[1].config})"
    best = max(_alone(t.model, t.context, sheet), key=lambda s: s.ceiling)
    return f"one sequence: no, at most {best.ceiling:.0f}{' speculating' if best.config.draft else ''}"


def _operations(want: float, best: Speed, sheet: DeviceSheet) -> float:
    """Operations per second that `want` tokens per second take."""
    work = model_of(best.config.model, best.config.dtype, sheet).decode(best.config.batch, best.config.context)
    return want * work.flops / work.rows


def _lacks(want: float, best: Speed, sheet: DeviceSheet) -> str:
    """What no batch, however large, could mend: arithmetic where it does not suffice, else memory."""
    return "int8" if _operations(want, best, sheet) > rate(sheet, "int8", "ceiling") else best.bound


def _needs(want: float, best: Speed, sheet: DeviceSheet) -> str:
    need, have = _operations(want, best, sheet), rate(sheet, "int8", "ceiling")
    stream = bandwidth(sheet, "ceiling")
    return (
        f"{want:g} tok/s need {want / best.ceiling * stream / 1e9:.0f} of {stream / 1e9:g} GB/s so, and "
        f"{need / 1e12:.1f} of {have / 1e12:g} T operations/s"
    )


def _first(options: Sequence[Speed], want: float) -> tuple[Verdict, Speed] | None:
    """The first that is expected to reach it, else the first whose ceiling does."""
    for s in options:
        if s.expected >= want:
            return "yes", s
    return next((("borderline", s) for s in options if s.ceiling >= want), None)


def _rates(s: Speed) -> str:
    return f"{s.expected:,.4g} tok/s (ceiling {s.ceiling:,.4g})"


def _bytes(t: Target, sheet: DeviceSheet) -> Answer:
    need, have = (t.want or 0) * (t.bytes or 0), bandwidth(sheet, "ceiling")
    most = have / (t.bytes or 1)
    return Answer(
        "yes" if have >= need else "no",
        f"needs {need / 1e9:.0f} GB/s of {have / 1e9:.1f}",
        "memory",
        f"at most {most:.1f} tok/s",
    )


def _first_token(t: Target, sheet: DeviceSheet) -> Answer:
    expected, ceiling = (
        longest_prompt(t.model, "q4_0", t.want or 0, sheet, level) for level in ("expected", "ceiling")
    )
    verdict: Verdict = "yes" if expected else "borderline" if ceiling else "no"
    once = estimate(model_of(t.model, "q4_0", sheet).decode(1, t.context), sheet, "ceiling")
    how = f"prompts up to {expected} tokens (ceiling {ceiling}), longer ones behind a cached prefix"
    if verdict == "no":
        how = f"one pass over the weights takes {1e3 * once.seconds:.0f} ms"
    longest = model_of(t.model, "q4_0", sheet).work("prefill", max(ceiling, 1), 1, max(ceiling, 32), 1)
    bound = estimate(longest, sheet, "ceiling").bound
    lacking = assumed(Config(t.model, "q4_0", 1, t.context))
    return Answer(verdict, how, bound, f"{expected} tokens (ceiling {ceiling})", lacking)


def _token_time(t: Target, sheet: DeviceSheet) -> Answer:
    want = 1 / (t.want or 1)
    found = _first(list(_alone(t.model, t.context, sheet)), want)
    best = max(plain(t.model, t.context, sheet, batches=(1,)), key=lambda s: s.ceiling)
    if found is None:
        modelled = f"{1e3 / best.expected:.0f} ms (ceiling {1e3 / best.ceiling:.0f})"
        return Answer("no", f"at best {best.config}", best.bound, modelled)
    verdict, s = found
    how = f"{s.config}; without a draft {1e3 / best.ceiling:.0f} ms at least" if s.config.draft else str(s.config)
    return Answer(
        verdict, how, s.bound, f"{1e3 / s.expected:.0f} ms (ceiling {1e3 / s.ceiling:.0f})", assumed(s.config)
    )


def _budget(t: Target, sheet: DeviceSheet) -> Answer:
    """The most sequences of the target's model that fit; for a model that does not, the largest one that does."""
    want = int(t.want or 0)
    for batch in (32, 16, 8, 4, 2, 1):
        need = memory_of(t.model, "q4_0", batch, t.context, sheet)
        if need <= want:
            how = f"q4_0 with up to {batch} sequences of {t.context} positions"
            return Answer("yes", how, "memory", show_bytes(need), assumed(Config(t.model, "q4_0", batch, t.context)))
    known = load_models()
    alike = [n for n in reversed(known) if t.model in known and known[n].model.family == known[t.model].model.family]
    smaller = [(n, d) for n in alike for d in TYPES if memory_of(n, d, 1, 2048, sheet) <= want]
    name, dtype = smaller[0] if smaller else ("nothing", "")
    least = show_bytes(memory_of(t.model, "q4_0", 1, t.context, sheet))
    return Answer("no", f"{t.model} needs {least}; the largest that fits is {name} {dtype}", "memory", least)


def _means(t: Target, sheet: DeviceSheet) -> Answer:
    if t.means in ("draft", "lookup"):
        return _speculation(t, sheet)
    if t.means == "npu_down":
        return _placement(t, sheet)
    config = Config(t.model, "q4_0", 1, t.context)
    work = model_of(config.model, config.dtype, sheet).decode(1, t.context)
    before = estimate(work, sheet, "ceiling").tokens_per_second
    after = before
    if t.means == "no_attention":
        saved = sum(i.nbytes - i.activations for i in work.items if i.op.endswith("attention"))
        after = bandwidth(sheet, "ceiling") / (work.streamed - saved)
    elif t.means == "both_engines":
        if sheet.device.shares is None:
            return Answer("no", "no second engine shares this device's memory", "memory", f"{before:.3g} tok/s")
        shared = find_sheet(sheet.device.shares)
        before, after = (bandwidth(s, "expected") / work.streamed for s in (sheet, shared))
    elif t.means == "mixture":
        mixed = subject(t.model, "q4_0", {"attn": "q8_0"}, capabilities=sheet.limits.capabilities)
        after = estimate(mixed.decode(1, t.context), sheet, "ceiling").tokens_per_second
    change = after / before - 1
    how = (
        f"changes one sequence's speed by {100 * change:+.1f} % at most (context {t.context})"
        if t.means != "none"
        else ""
    )
    return Answer("by means", how, "memory", f"{before:.3g} -> {after:.3g} tok/s")


def _placement(t: Target, sheet: DeviceSheet) -> Answer:
    """A long prompt with the schedule gemma3-hybrid, beside the iGPU alone."""
    if sheet.device.shares is None or sheet.device.shares != find_sheet("phoenix-npu").device.shares:
        return Answer("no", "no NPU shares this device's memory", "NPU", "-")
    model, chunks, tokens, parts = t.model.removeprefix("gemma3-"), 8, 512, SHIPPED["gemma3-hybrid"]
    g, (least, most) = gain(model, chunks, tokens, parts=parts), span(model, chunks, tokens, parts)
    how = f"a prompt of {chunks * tokens} tokens {g.over_gpu:.2f} times as quick, between {least:.1f} and {most:.2f}"
    return Answer("by means", how, "NPU", f"{g.gpu_alone:.3g} -> {g.in_flight:.3g} s")


def _speculation(t: Target, sheet: DeviceSheet) -> Answer:
    """One sequence as expected, plain and with the best draft length for each acceptance rate."""
    on = find_sheet(t.on) if t.on else None
    if on is not None and (sheet.device.shares is None or on.device.shares != sheet.device.shares):
        return Answer("no", f"{on.device.name} does not share this device's memory", "memory", "-")
    before = speed(Config(t.model, "q4_0", 1, t.context), sheet).expected
    lookup, pair = t.means == "lookup", pairs()[0]
    given = ACCEPTANCES if lookup else (*ACCEPTANCES, pair.agreed)
    found = {a: best_drafts(t.model, a, t.context, sheet, lookup, on) for a in given}
    shown = [f"{tokens:.3g} with k={k} at a={a:.2g}" for a, (k, tokens) in sorted(found.items())]
    how = f"tok/s of one sequence (context {t.context}): {', '.join(shown)}"
    how += "" if lookup else f"; a={pair.agreed:.2g}: {pair.source}"
    after = found[ACCEPTANCES[0] if lookup else pair.agreed][1]
    return Answer("by means", how, "memory", f"{before:.3g} -> {after:.3g} tok/s")


_KINDS = {
    "speed": _speed,
    "bytes": _bytes,
    "first_token": _first_token,
    "token_time": _token_time,
    "budget": _budget,
    "means": _means,
}


def _measured(t: Target, device: str) -> str:
    found = nearest_run(device, t.model, t.kind, t.want) if t.kind in ("speed", "token_time", "first_token") else None
    return found or "-"


# --------------------------------------------------------------------------------------------------------------- advice
def advice(memory: int, want: float, context: int, sheet: DeviceSheet) -> Iterator[Speed]:
    """For each model, largest first, the fewest sequences that reach `want` and fit in `memory`."""
    sizes = {n: m.model.parameters for n, m in load_models().items() if not (m.shape.dimensions or m.shape.backbone)}
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        if (
            memory_of(name, TYPES[-1], 1, context, sheet) > memory
        ):  # the least that it takes: its speeds need not be modelled
            continue
        for s in chain(_alone(name, context, sheet), plain(name, context, sheet)):
            if s.expected >= want and needed(s.config, sheet) <= memory:
                yield s
                break


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.targets",
        description="Every target judged against a device sheet, or what to run for a speed.",
    )
    p.add_argument(
        "--device", default="radeon-780m", metavar="SHEET", help="of specs/devices: h200, radeon-780m (radeon-780m)"
    )
    p.add_argument(
        "--measured-on", default="H200", metavar="TEXT", help="device whose recorded runs are shown beside (H200)"
    )
    p.add_argument("--memory", type=size, metavar="SIZE", help="answer what to run in this much memory, such as 16GiB")
    p.add_argument("--want", type=amount, metavar="N", help="tokens per second asked for (with --memory)")
    p.add_argument("--models", metavar="PATTERN", help="what the device makes of published sizes, such as 'gemma4-*'")
    p.add_argument(
        "--context",
        type=int,
        default=256,
        metavar="N",
        help="positions of each sequence, for --want and --models (256)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def _main(args: argparse.Namespace) -> int:
    if (args.memory is None) != (args.want is None):
        raise UsageError(
            "--memory and --want belong together: say how much memory there is and how many tokens per second"
        )
    if args.models is not None and args.want is not None:
        raise UsageError("--models and --want are two questions: ask one at a time")
    sheet = modelled_sheet(args.device)
    if args.models is not None:
        found = list(sizes(tracked(names(args.models), "models"), args.context, sheet))
        print(json.dumps([asdict(s) for s in found]) if args.json else sizes_table(found, sheet))
        return 0
    if args.want is not None:
        return _advise(args, sheet)
    rows = [judge(t, sheet, args.measured_on) for t in tracked(load_targets(), "targets")]
    print(json.dumps([asdict(r) for r in rows]) if args.json else table(rows, sheet))
    return 0


def _advise(args: argparse.Namespace, sheet: DeviceSheet) -> int:
    found = list(advice(args.memory, args.want, args.context, sheet))
    if args.json:
        print(json.dumps([asdict(s) for s in found]))
        return 0
    print(
        f"{args.want:g} tok/s in {show_bytes(args.memory)} on {sheet.device.name}, context {args.context}; modelled, largest first"
    )
    for s in found:
        c = s.config
        need = needed(c, sheet)
        lacking = assumed(c)
        basis = f"  needs {lacking}" if lacking else ""
        speeds = f"{s.expected:7.1f} expected, {s.ceiling:7.1f} ceiling, {show_bytes(need):>9}"
        print(f"  {c.model:12} {c!s:46} {speeds}{basis}")
    if not found:
        print("  nothing: no model reaches it within that memory, with up to 32 sequences")
    return 0


def table(rows: Sequence[Judged], sheet: DeviceSheet) -> str:
    lines = [
        f"Targets on {sheet.device.name}: modelled (ceiling: peak; expected: what was reached); measured: perf/records",
        "",
    ]
    for r in rows:
        lines += [f"{r.target:48} {r.shown:33} {r.modelled:36} bound by {r.bound}", f"    {r.how}"]
        lines += [f"    measured: {r.measured}"] if r.measured != "-" else []
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))
