"""Pictures of the roofline: each operation against its device's roof, and tokens per second by batch."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.core.errors import SpecError
from hybrid.perf.roofline.model import Level, Timed, bandwidth, estimate, rate
from hybrid.perf.roofline.work import Rate, Subject, Work
from hybrid.perf.svg import Axis, Chart, page
from hybrid.spec.devicesheet import DeviceSheet

SHOWN = 5  # operations that get a label: those that take longest
BATCHES = (1, 2, 4, 8, 16, 32)


def roofline_page(model: Subject, sheet: DeviceSheet, works: Sequence[Work], context: int) -> str:
    """SVG: the roofline with the operations of every pass, and speeds by batch."""
    return page([roof(model, sheet, works, context), speeds(model, sheet, context)])


def roof(model: Subject, sheet: DeviceSheet, works: Sequence[Work], context: int) -> Chart:
    """Attainable operations per second over operations per byte; one point per operation and pass, at its expected
    speed."""
    stream = bandwidth(sheet, "ceiling")
    rates: dict[Rate, float] = {}
    kinds: tuple[Rate, ...] = ("int8", "f16", "f32")
    for kind in kinds:
        try:
            rates[kind] = rate(sheet, kind, "ceiling")
        except SpecError:
            continue  # a sheet need not know every unit: its roof is then not drawn
    top = max(rates.values())
    x = Axis("operations per byte", 0.25, 4096, log=True)
    y = Axis("operations per second", stream * 0.1, top * 2.5, log=True)
    chart = Chart(
        620,
        430,
        f"{model.name} on {sheet.device.name}, context {context}",
        x,
        y,
        note="modelled; line: peak, point: expected",
    )
    ridge = top / stream
    chart.line([(x.low, x.low * stream), (ridge, top)], 6)
    drawn: dict[float, list[str]] = {}
    for kind, value in rates.items():
        drawn.setdefault(value, []).append(kind)
    for value, names in drawn.items():
        chart.line([(value / stream, value), (x.high, value)], 6)
        chart.text((x.high, value), f"{', '.join(names)}: {value / 1e12:g} T/s", dx=-4, dy=-5, anchor="end")
    chart.text((2, 2 * stream), f"memory: {stream / 1e9:g} GB/s", dx=-10, dy=-14, anchor="end")
    named: list[tuple[tuple[float, float], str]] = []
    for i, work in enumerate(works):
        groups: dict[str, list[Timed]] = {}
        for t in estimate(work, sheet, "expected").steps:
            groups.setdefault(t.item.op, []).append(t)
        ranked = sorted(groups.items(), key=lambda g: -sum(t.seconds for t in g[1]))
        for place, (op, steps) in enumerate(ranked):
            flops, moved = sum(t.item.flops for t in steps), max(1, sum(t.item.nbytes for t in steps))
            seconds = sum(t.seconds for t in steps)
            if not flops or flops / seconds < y.low:
                continue
            chart.point(
                (flops / moved, flops / seconds),
                i,
                f"{work.rows} row{'s' * (work.rows > 1)}",
                title=f"{op}, {work.rows} rows: "
                f"{flops / moved:.2f} per byte, {flops / seconds / 1e9:.0f} G/s, {1e3 * seconds:.3f} ms",
            )
            if i == len(works) - 1 and place < SHOWN and op in ("fused_ffn", "attention"):
                named.append(((flops / moved, flops / seconds), op))
    chart.labels(named)
    return chart


def speeds(model: Subject, sheet: DeviceSheet, context: int) -> Chart:
    """Aggregate decode speed over the batch, ceiling and expected."""
    lines: dict[Level, list[tuple[float, float]]] = {}
    levels: tuple[Level, ...] = ("ceiling", "expected")
    for level in levels:
        lines[level] = [(b, estimate(model.decode(b, context), sheet, level).tokens_per_second) for b in BATCHES]
    high = max(y for points in lines.values() for _, y in points)
    chart = Chart(
        460,
        430,
        "decode, all sequences together",
        Axis("sequences", 1, BATCHES[-1], log=True),
        Axis("tokens per second", 0, 1.12 * high),
        note="modelled",
    )
    for i, (level, points) in enumerate(lines.items()):
        chart.line(points, i, level, dashed=level == "ceiling", dots=True)
    chart.labels([((b, y), f"{y:.3g}") for (b, y) in (*lines["ceiling"][::2], *lines["expected"][1::2])])
    return chart
