"""Tables of measured speeds that README.md and docs/performance.md quote, made from perf/records.

perf/report/quoted.toml lists the rows, with targets and the figures of the first kernels; tools/pages.py puts the
tables into the pages, and `make check` compares them. Functions return lines of Markdown. SpecError where a row has no
record.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.errors import SpecError
from hybrid.perf.record.schema import OpTime, Profile, Record, Run, newest
from hybrid.perf.report.tables import load_peer, profiles, table
from hybrid.spec.load import Model, load_toml

FILE = Path(__file__).with_name("quoted.toml")
Phase = Literal["decode", "prefill"]


class Row(Model):
    """One run of perf/records, and what stands beside it."""

    model: str
    dtype: str = "q4_0"
    phase: Phase
    batch: int = 1
    context: Annotated[int, Field(ge=0)]
    target: str = "-"
    before: Annotated[float, Field(gt=0)] | None = None
    """Tokens per second of the first right kernels."""
    share_of: int | None = None
    """Shown as a share of the same model's decode after that many positions."""
    headline: bool = False
    """In README.md too."""

    @property
    def shown(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.context}"
        return f"decode after {self.context}" + (f", {self.batch} sequences together" if self.batch > 1 else "")


class Which(Model):
    model: str
    phase: Phase
    context: int


class Step(Model):
    """An operation of the profile. before: us of each call then."""

    op: str
    shown: str
    before: Annotated[float, Field(gt=0)]
    what: str


class Quoted(Model):
    schema_version: Literal[1] = Field(alias="schema")
    device: str
    before: str
    """The commit of the figures `before`."""
    row: tuple[Row, ...]
    profile: Which
    step: tuple[Step, ...]


def load_quoted() -> Quoted:
    return load_toml(FILE, Quoted)


def headline(records: Sequence[Record]) -> list[str]:
    """README.md: tokens per second of each model, in brackets the peer's."""
    found, rows, peer = load_quoted(), [], load_peer()
    of = [r for r in found.row if r.headline]
    heads = tuple(dict.fromkeys(r.shown for r in of))
    used: list[Record] = []
    for model in dict.fromkeys(r.model for r in of):
        cells = [_short(model)]
        for row in (r for r in of if r.model == model):
            record, run = _run(records, found.device, row)
            used.append(record)
            theirs = peer.of(run, found.device)
            cells.append(_speed(run.tokens_per_second) + (f" ({_speed(theirs)})" if theirs else ""))
        rows.append(cells)
    lines = table(("Q4_0, tok/s", *heads), rows, ("Q4_0, tok/s",)).markdown()
    return [
        *lines,
        "",
        f"{_source(found.device, used)} In brackets: {peer.name} there, "
        "whose decode beside *after 512* began with an empty cache.",
    ]


def against_targets(records: Sequence[Record]) -> list[str]:
    """docs/performance.md: what was aimed at, the peer, the first kernels, and the newest record of each row."""
    found, rows, peer = load_quoted(), [], load_peer()
    used: list[Record] = []
    for row in found.row:
        record, run = _run(records, found.device, row)
        used.append(record)
        theirs, share = peer.of(run, found.device), ""
        if row.share_of is not None:
            _, whole = _run(records, found.device, row.model_copy(update={"context": row.share_of}))
            share = f" ({100 * run.tokens_per_second / whole.tokens_per_second:.0f} %)"
        host = f"{run.host_us:.0f}" if run.host_us is not None else "-"
        speeds = _speed(theirs), _speed(row.before), f"**{_speed(run.tokens_per_second)}**{share}"
        rows.append((f"{_short(row.model)} {row.dtype}", row.shown, row.target, *speeds, host, record.commit[:9]))
    words = ("model", "what", "target", "commit")
    heads = (*words[:3], "peer", "before", "now", "host us", "commit")
    lines = table(heads, rows, words).markdown()
    return [
        *lines,
        "",
        f"{_source(found.device, used)} Tokens per second; *peer*: {peer.name}; *before*: commit {found.before}.",
    ]


def steps(records: Sequence[Record]) -> list[str]:
    """docs/performance.md: the steps of a decode pass, before and now, and what the probes' rates would need."""
    found = load_quoted()
    record, one = _profile(records, found)
    by_op, rows = {o.op: o for o in one.ops}, []
    for step in found.step:
        if step.op not in by_op:
            raise SpecError(
                f"{FILE.name}: step {step.op!r} is not in the profile of {record.commit[:9]}: {', '.join(by_op)}"
            )
        o = by_op[step.op]
        rows.append(
            (step.shown, str(o.calls), f"{step.before:.0f}", _us(o.us / o.calls), _us(o.floor_us / o.calls), step.what)
        )
    rest = [o for o in one.ops if o.op not in {s.op for s in found.step}]
    rows.append(
        ("the rest", str(sum(o.calls for o in rest)), "", f"{_us(_all(rest))} in all", _us(_all(rest, True)), "")
    )
    words = ("step", "what changed")
    lines = table((words[0], "calls", "before, us each", "now, us each", "floor", words[1]), rows, words).markdown()
    total = f"{_all(one.ops) / 1e3:.2f} ms of the device in all; *floor*: at this run's copy probe, {one.copy_gb_s:,.0f} GB/s"
    total += f", and matrix probe, {one.matrix_tflops:,.0f} TFLOPS" * (one.matrix_tflops is not None)
    total += f", which would need {_all(one.ops, True) / 1e3:.2f} ms in all"
    return [*lines, "", f"Commit {record.commit[:9]}: {total}. *Before*: commit {found.before}. `{one.command}`"]


def _all(ops: Sequence[OpTime], floor: bool = False) -> float:
    return sum(o.floor_us if floor else o.us for o in ops)


def _run(records: Sequence[Record], device: str, row: Row) -> tuple[Record, Run]:
    wanted = (row.model, row.dtype, row.phase, row.batch, row.context, "auto", 1)
    for record, run in newest(records, device):
        if (run.model, run.dtype, run.phase, run.batch, run.context, run.precision, run.tokens_per_submit) == wanted:
            return record, run
    raise SpecError(f"{FILE.name}: no record of {row.model} {row.dtype}, {row.shown}, on {device} in perf/records")


def _profile(records: Sequence[Record], found: Quoted) -> tuple[Record, Profile]:
    wanted = found.profile
    for record, one in profiles(records, found.device):
        if (one.model, one.phase, one.context, one.batch) == (wanted.model, wanted.phase, wanted.context, 1):
            return record, one
    raise SpecError(f"{FILE.name}: no profile of {wanted.model}, {wanted.phase} {wanted.context}, in perf/records")


def _source(device: str, used: Sequence[Record]) -> str:
    last = max(used, key=lambda r: r.date)
    return (
        f"{device}, {last.driver}, random weights of the published shapes, medians; commit {', '.join(_commits(used))}."
    )


def _commits(used: Sequence[Record]) -> list[str]:
    newest_first = sorted(used, key=lambda r: r.date, reverse=True)
    return list(dict.fromkeys(r.commit[:9] for r in newest_first))


def _short(model: str) -> str:
    return model.removeprefix("gemma3-").upper()


def _speed(rate: float | None) -> str:
    """Four figures."""
    if rate is None:
        return "-"
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}".removesuffix(".0")


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"
