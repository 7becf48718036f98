"""Tables of measurements, which perf.report renders as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.perf.record.schema import Ablation, Profile, Record, Run, ceiling_of, newest
from hybrid.spec.load import Model, load_toml
from hybrid.spec.model import load_models

PEER = Path(__file__).with_name("peer.toml")


class Figure(Model):
    model: str
    dtype: str
    phase: Literal["decode", "prefill"]
    batch: int = 1
    context: int = 0
    tokens_per_second: Annotated[float, Field(gt=0)]


class Peer(Model):
    """Another engine's figures on one device, with their source."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    device: str
    source: str
    figure: tuple[Figure, ...]

    def of(self, one: Run, device: str) -> float | None:
        """Its speed at the same; its decode beside ours up to 512 positions began with an empty cache."""
        for f in self.figure if self.device in device else ():
            near = f.context == one.context or (f.phase == "decode" and max(f.context, one.context) <= 512)
            if near and (f.model, f.dtype, f.phase, f.batch) == (one.model, one.dtype, one.phase, one.batch):
                return f.tokens_per_second
        return None


def load_peer() -> Peer:
    return load_toml(PEER, Peer)


@dataclass(frozen=True, slots=True)
class Table:
    """`numbers`: indices of the columns that hold them."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int]

    def markdown(self) -> list[str]:
        ends = ["---:" if i in self.numbers else "---" for i in range(len(self.heads))]
        return [f"| {' | '.join(cells)} |" for cells in (self.heads, ends, *self.rows)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> Table:
    """`words`: the columns that hold none."""
    return Table(tuple(heads), tuple(map(tuple, rows)), frozenset(i for i, h in enumerate(heads) if h not in words))


def ordered(found: Iterable[tuple[Record, Run]]) -> list[tuple[Record, Run]]:
    """Largest model first."""
    sizes = {n: m.model.parameters for n, m in load_models().items()}

    def place(item: tuple[Record, Run]) -> tuple[object, ...]:
        one = item[1]
        return (
            -sizes.get(one.model.split(",")[0], 0),
            one.model,
            one.dtype,
            one.phase,
            one.batch,
            one.context,
            str(one.key),
        )

    return sorted(found, key=place)


def measured(records: Iterable[Record], device: str) -> Table:
    """The newest run of every configuration on a device."""
    peer, rows = load_peer(), []
    for i, (record, one) in enumerate(ordered(newest(records, device)), 1):
        most, theirs = ceiling_of(one, record.device), peer.of(one, record.device)
        rows.append(
            (
                str(i),
                one.model,
                one.dtype,
                one.phase + (f", {one.tokens_per_submit} a submit" if one.tokens_per_submit > 1 else ""),
                str(one.batch),
                str(one.context),
                f"{one.tokens_per_second:,.1f}",
                f"{one.spread:,.1f}",
                f"{100 * one.tokens_per_second / most:.0f} %" if most else "-",
                f"{100 * one.share:.0f} %" if one.share is not None else "-",
                f"{theirs:,.1f}" if theirs else "-",
                f"{one.tokens_per_second / theirs:.2f}" if theirs else "-",
                f"{one.host_us:.1f}" if one.host_us is not None else "-",
                record.commit[:9],
            )
        )
    heads = (
        "#",
        "model",
        "type",
        "phase",
        "B",
        "context",
        "tok/s",
        "spread",
        "of ceiling",
        "of probe",
        "peer",
        "times",
        "host us",
    )
    return table((*heads, "commit"), rows, ("model", "type", "phase", "commit"))


def ablation(found: Ablation) -> Table:
    rows = [
        (
            w.name,
            *(f"{1e3 * s:.3f}" for s in (w.with_it, w.without)),
            *(f"{n:.2f}" for n in (w.times, w.low, w.high)),
            w.summary,
        )
        for w in found.speedups
    ]
    words = ("optimisation", "what it is")
    return table((words[0], "ms with", "without", "times", "least", "most", words[1]), rows, words)


def profile(found: Profile) -> Table:
    """By operation, the longest first, then their sum."""
    device = sum(o.us for o in found.ops)
    rows = [
        (
            o.op,
            str(o.calls),
            f"{o.us:,.1f}",
            f"{o.us / o.calls:.2f}",
            f"{100 * o.us / device:.1f} %",
            f"{o.nbytes / o.us / 1e3:,.0f}",
            f"{o.flops / o.us / 1e6:.1f}",
            f"{o.floor_us:,.1f}",
            f"{o.us - o.floor_us:,.1f}",
        )
        for o in sorted(found.ops, key=lambda o: -o.us)
        if o.us
    ]
    least, calls = sum(o.floor_us for o in found.ops), sum(o.calls for o in found.ops)
    rows.append(("all", str(calls), f"{device:,.1f}", "", "", "", "", f"{least:,.1f}", f"{device - least:,.1f}"))
    return table(
        ("operation", "calls", "us", "each", "share", "GB/s", "TFLOPS", "floor us", "lost us"), rows, ("operation",)
    )


def what(found: Profile) -> str:
    tokens = f"one token after {found.context}" if found.phase == "decode" else f"a prompt of {found.context} tokens"
    return f"{found.model} {found.dtype}, {tokens}" + (f", {found.batch} sequences" if found.batch > 1 else "")


def ablations(records: Iterable[Record], device: str) -> list[tuple[Record, Ablation]]:
    """The newest of each model on a device."""
    return list({one.key: (r, one) for r in records if r.device == device for one in r.ablations}.values())


def profiles(records: Iterable[Record], device: str) -> list[tuple[Record, Profile]]:
    return list({one.key: (r, one) for r in records if r.device == device for one in r.profiles}.values())
