"""Tables of measured speeds that README.md and docs/performance.md quote, made from perf/records.

perf/report/quoted.toml lists the rows; tools/pages.py puts the tables into the pages, and `make check` compares them.
Functions return lines of Markdown. SpecError where a row has no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.core.errors import SpecError
from hybrid.perf.record.schema import OpTime, Profile, Record, Run, ceiling_of, newest
from hybrid.perf.report.tables import load_peer, profiles, table
from hybrid.spec.load import Model, load_toml

FILE = Path(__file__).with_name("quoted.toml")
Phase = Literal["decode", "prefill"]


class Row(Model):
    """One run of perf/records."""

    model: str
    dtype: str = "q4_0"
    phase: Phase
    batch: int = 1
    context: Annotated[int, Field(ge=0)]
    headline: bool = False
    """In README.md too."""

    @property
    def shown(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.context}"
        return f"decode after {self.context}" + (f", {self.batch} sequences" if self.batch > 1 else "")


class Which(Model):
    model: str
    phase: Phase
    context: int


class Step(Model):
    """An operation of the profile, and its name on the page."""

    op: str
    shown: str


class Quoted(Model):
    schema_version: Literal[1] = Field(alias="schema")
    device: str
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


def speeds(records: Sequence[Record]) -> list[str]:
    """docs/performance.md: the newest record of each row, beside the modelled ceiling and the peer."""
    found, rows, peer = load_quoted(), [], load_peer()
    used: list[Record] = []
    for row in found.row:
        record, run = _run(records, found.device, row)
        used.append(record)
        theirs, most = peer.of(run, found.device), ceiling_of(run, found.device)
        rows.append(
            (
                f"{_short(row.model)} {row.dtype}",
                row.shown,
                f"**{_speed(run.tokens_per_second)}**",
                f"{100 * run.tokens_per_second / most:.0f} %" if most else "-",
                _speed(theirs),
                f"{run.host_us:.0f}" if run.host_us is not None else "-",
            )
        )
    lines = table(("model", "what", "tok/s", "of ceiling", "peer", "host us"), rows, ("model", "what")).markdown()
    return [*lines, "", f"{_source(found.device, used)} *Peer*: {peer.name}."]


def steps(records: Sequence[Record]) -> list[str]:
    """docs/performance.md: the steps of a decode pass, and what the probes' rates would need."""
    found = load_quoted()
    record, one = _profile(records, found)
    by_op, rows = {o.op: o for o in one.ops}, []
    for step in found.step:
        if step.op not in by_op:
            raise SpecError(
                f"{FILE.name}: step {step.op!r} is not in the profile of {record.commit[:9]}: {', '.join(by_op)}"
            )
        o = by_op[step.op]
        rows.append((step.shown, str(o.calls), _us(o.us / o.calls), _us(o.floor_us / o.calls), _us(o.us)))
    rest = [o for o in one.ops if o.op not in {s.op for s in found.step}]
    rows.append(("the rest", str(sum(o.calls for o in rest)), "", "", _us(_all(rest))))
    lines = table(("step", "calls", "us each", "floor", "us in all"), rows, ("step",)).markdown()
    total = f"{_all(one.ops) / 1e3:.2f} ms of the device, of which the floor is {_all(one.ops, True) / 1e3:.2f} ms"
    return [*lines, "", f"Commit {record.commit[:9]}: {total}. `{one.command}`"]


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
