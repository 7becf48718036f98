"""Charts of the report: speed by commit, share of the ceiling, ours beside a peer's, registers and waves of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.record import Record, Run, ceiling_of
from perf.svg import Axis, Chart


def short(one: Run) -> str:
    """`27b q4_0 decode x8 @512`"""
    model = one.model.removeprefix("gemma3-").split(",")[0]
    return (
        f"{model} {one.dtype} {one.phase}"
        + (f" x{one.batch}" if one.batch > 1 else "")
        + (f" @{one.context}" if one.context else "")
    )


def by_commit(records: Sequence[Record], device: str) -> list[Chart]:
    """One chart for each phase: a line for every configuration that was measured more than once, else a point."""
    charts = []
    for phase in ("decode", "prefill"):
        lines: dict[str, list[tuple[float, float]]] = {}
        own = [r for r in records if r.device == device]
        for i, record in enumerate(own):
            for one in record.runs:
                if one.phase == phase:
                    lines.setdefault(short(one), []).append((i + 0.5, one.tokens_per_second))
        if not lines:
            continue
        high = max(y for points in lines.values() for _, y in points)
        chart = Chart(
            570,
            330,
            f"{phase}, tokens per second by commit",
            Axis("commit", 0, max(len(own), 1)),
            Axis("tok/s", 0, 1.15 * high),
            [r.commit[:7] for r in own],
            note=f"measured, {device}",
        )
        for i, (name, points) in enumerate(sorted(lines.items(), key=lambda line: -line[1][-1][1])[:6]):
            chart.line(points, i, dots=True)
            chart.text(points[-1], name, dx=7, dy=4)
        charts.append(chart)
    return charts


def shares(found: Sequence[tuple[Record, Run]]) -> list[Chart]:
    """Of the modelled ceiling, by configuration; nothing where no ceiling is known."""
    known = [(one, most) for record, one in found if (most := ceiling_of(one, record.device))]
    if not known:
        return []
    chart = Chart(
        570,
        330,
        "share of the device's ceiling",
        Axis("", 0, len(known)),
        Axis("per cent", 0, 100),
        [str(i + 1) for i in range(len(known))],
        note="measured over modelled",
    )
    for i, (one, most) in enumerate(known):
        share = 100 * one.tokens_per_second / most
        chart.bar(
            i, share, 0 if one.phase == "decode" else 1, name=one.phase, label=f"{share:.0f}", title=f"{short(one)}: {share:.1f} %"
        )
    return [chart]


def versus(pairs: Sequence[tuple[Run, float]], peer: str) -> list[Chart]:
    """Ours over the peer's speed; 1 is as fast."""
    if not pairs:
        return []
    high = max(1.2, *(1.15 * one.tokens_per_second / theirs for one, theirs in pairs))
    chart = Chart(
        570,
        330,
        f"ours over {peer}",
        Axis("", 0, len(pairs)),
        Axis("times", 0, high),
        [str(i + 1) for i in range(len(pairs))],
        note="both measured on the same device",
    )
    for i, (one, theirs) in enumerate(pairs):
        ratio = one.tokens_per_second / theirs
        chart.bar(i, ratio, 2 if ratio >= 1 else 1, label=f"{ratio:.2f}", title=f"{short(one)}: {ratio:.2f}")
    chart.line([(0, 1), (len(pairs), 1)], 6, dashed=True)
    return [chart]


def kernel_chart(table: Mapping[str, Mapping[str, Any]], version: str) -> Chart:
    """Every kernel as a point: registers against code size, spills marked."""
    sizes = [row["code_bytes"] for row in table.values()]
    chart = Chart(
        1100,
        300,
        f"kernels for gfx1103, Mesa {version}",
        Axis("bytes of code", min(sizes) * 0.8, max(sizes) * 1.3, log=True),
        Axis("vector registers", 0, 272),
        note="compiled by RADV's null device",
    )
    families = ("linear.gemv", "ffn_up", "linear.tile", "attention", "rmsnorm", "other")
    for name, row in table.items():
        family = next((i for i, f in enumerate(families) if name.startswith(f) or f in name.split(".")[0]), len(families) - 1)
        about = f"{name}: {row['vgprs']} registers, {row['waves']} waves, {row['instructions']} instructions"
        spills = row["spilled_vgprs"] or row["scratch"]
        chart.point(
            (row["code_bytes"], row["vgprs"]),
            family,
            families[family],
            title=about,
            hollow=bool(spills),
            label=f"spills {row['spilled_vgprs']}" if spills else "",
        )
    return chart
