"""Charts of the report: speed by commit, share of the ceiling, ours beside a peer's, time by operation and each
operation's place under the roof, speed-ups of optimisations, registers of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.perf.record.schema import Ablation, Profile, Record, Run, ceiling_of
from hybrid.perf.report.tables import Peer
from hybrid.perf.svg import Axis, Chart
from hybrid.spec.devicesheet import sheet_for


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
    own = [r for r in records if r.device == device and r.runs]
    for phase in ("decode", "prefill"):
        lines: dict[str, list[tuple[float, float]]] = {}
        for i, record in enumerate(own):
            for one in record.runs:
                if one.phase == phase:
                    lines.setdefault(short(one), []).append((i + 0.5, one.tokens_per_second))
        if not lines:
            continue
        speeds = [y for points in lines.values() for _, y in points]
        chart = Chart(
            570,
            330,
            f"{phase}, tokens per second by commit",
            Axis("commit", 0, 1.5 * max(len(own), 1)),  # room for names at the lines' ends
            Axis("tok/s", min(speeds) / 1.5, 1.5 * max(speeds), log=True),
            [r.commit[:7] for r in own],
            note=f"measured, {device}",
        )
        shown = sorted(lines.items(), key=lambda line: -line[1][-1][1])[:12]
        for i, (_, points) in enumerate(shown):
            chart.line(points, i, dots=True)
        chart.ends([(points[-1], name.replace(f" {phase}", ""), i) for i, (name, points) in enumerate(shown)])
        charts.append(chart)
    return charts


def shares(found: Sequence[tuple[Record, Run]]) -> list[Chart]:
    """Of the modelled ceiling, by the table's numbers; nothing where no ceiling is known."""
    known = [(i, one, most) for i, (record, one) in enumerate(found, 1) if (most := ceiling_of(one, record.device))]
    if not known:
        return []
    names = [str(i) for i, _, _ in known]
    x, y = Axis("number in the table", 0, len(known)), Axis("per cent", 0, 100)
    chart = Chart(570, 330, "share of the device's ceiling", x, y, names, note="measured over modelled")
    for at, (_, one, most) in enumerate(known):
        share = 100 * one.tokens_per_second / most
        about = f"{short(one)}: {share:.1f} %"
        chart.bar(at, share, 0 if one.phase == "decode" else 1, name=one.phase, label=f"{share:.0f}", title=about)
    return [chart]


def versus(found: Sequence[tuple[Record, Run]], peer: Peer) -> list[Chart]:
    """Ours over the peer's speed, by the table's numbers; 1 is as fast. Nothing where it has no figure."""
    pairs = [(i, one, theirs) for i, (record, one) in enumerate(found, 1) if (theirs := peer.of(one, record.device))]
    if not pairs:
        return []
    high = max(1.2, *(1.15 * one.tokens_per_second / theirs for _, one, theirs in pairs))
    x, y = Axis("number in the table", 0, len(pairs)), Axis("times", 0, high)
    chart = Chart(
        570, 330, f"ours over {peer.name}", x, y, [str(i) for i, _, _ in pairs], note="both measured on this device"
    )
    for at, (_, one, theirs) in enumerate(pairs):
        ratio = one.tokens_per_second / theirs
        chart.bar(at, ratio, 2 if ratio >= 1 else 1, label=f"{ratio:.2f}", title=f"{short(one)}: {ratio:.2f}")
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
    families = ("linear.gemv", "linear.gemm", "linear.tile", "ffn_up", "attention", "rmsnorm", "other")
    for name, row in table.items():
        family = next(
            (i for i, f in enumerate(families) if name.startswith(f) or f in name.split(".")[0]), len(families) - 1
        )
        spills = f", {row['spilled_vgprs']} spilled" if row["spilled_vgprs"] else ""
        about = f"{name}: {row['vgprs']} registers{spills}, {row['waves']} waves, {row['instructions']} instructions"
        hollow = bool(row["spilled_vgprs"] or row["scratch"])
        chart.point((row["code_bytes"], row["vgprs"]), family, families[family], title=about, hollow=hollow)
    return chart


def speedups(found: Ablation, device: str) -> Chart:
    """Speed-up of each optimisation; the line spans the single pairs."""
    high = 1.1 * max(2.0, *(w.high for w in found.speedups))
    chart = Chart(
        1110,
        300,
        f"{found.model} {found.dtype}: times faster with each",
        Axis("", 0, len(found.speedups)),
        Axis("times", 0, high),
        [w.name for w in found.speedups],
        note=f"measured, {device}",
    )
    for i, w in enumerate(found.speedups):
        about = f"{w.name}: {1e3 * w.with_it:.3f} ms with, {1e3 * w.without:.3f} without ({w.low:.2f} to {w.high:.2f})"
        chart.bar(i, w.times, 2 if w.low > 1 else 6, width=0.5, title=about)
        chart.line([(i + 0.5, w.low), (i + 0.5, w.high)], 1)
        chart.text((i + 0.5, w.high), f"{w.times:.2f}", dy=-6, anchor="middle")
    chart.line([(0, 1), (len(found.speedups), 1)], 6, dashed=True)
    return chart


def where_time_goes(found: Profile, device: str) -> list[Chart]:
    """Time by operation, stacked: what its bytes and operations need, and what is lost; and its place under the
    roof."""
    ops = sorted((o for o in found.ops if o.us), key=lambda o: -o.us)
    total = sum(o.us for o in ops)
    shown = [o for o in ops if o.us > 0.004 * total][:9]
    bars = Chart(
        660,
        380,
        f"{total / 1e3:.2f} ms of the device, by operation",
        Axis("", 0, len(shown)),
        Axis("us", 0, 1.12 * shown[0].us),
        [_wrapped(o.op) for o in shown],
        note=f"measured, {device}",
    )
    for i, o in enumerate(shown):
        about = f"{o.op}: {o.calls} calls, {o.us:.1f} us, floor {o.floor_us:.1f}"
        least = min(o.floor_us, o.us)
        bars.bar(i, least, 2, name="floor", title=about)
        bars.bar(i, o.us, 1, name="lost", title=about, base=least, label=f"{100 * o.us / total:.0f} %")
    return [bars, measured_roof(found, device)]


def measured_roof(found: Profile, device: str) -> Chart:
    """Operations per second over operations per byte, by operation; the roof is what this run's probes reached."""
    sheet = sheet_for(device)
    points = [(o.flops / o.nbytes, o.flops / o.us * 1e6, o) for o in found.ops if o.flops and o.nbytes and o.us]
    stream = 1e9 * found.copy_gb_s
    top = 1e12 * found.matrix_tflops if found.matrix_tflops else 2 * max(y for _, y, _ in points)
    x = Axis(
        "operations per byte", min(0.1, *(p[0] for p in points)) / 2, max(4096, *(p[0] for p in points)) * 2, log=True
    )
    y = Axis("operations per second", min(p[1] for p in points) / 3, top * 3, log=True)
    chart = Chart(450, 380, "operations under the roof", x, y, note="measured; line: this run's probes")
    ridge = top / stream
    chart.line([(max(x.low, y.low / stream), max(y.low, x.low * stream)), (ridge, top), (x.high, top)], 6)
    if sheet is not None and sheet.peak.bandwidth_gb_s is not None:
        peak = sheet.peak.bandwidth_gb_s.value * 1e9
        chart.line([(max(x.low, y.low / peak), max(y.low, x.low * peak)), (top / peak, top)], 5, dashed=True)
    longest = {o.op for o in sorted(found.ops, key=lambda o: -o.us)[:4]}
    for at, speed, o in points:
        about = f"{o.op}: {at:.2f} operations per byte, {speed / 1e12:.3g} T/s, {o.nbytes / o.us / 1e3:.0f} GB/s"
        chart.point((at, speed), 0, title=about)
    chart.labels([((at, speed), o.op) for at, speed, o in points if o.op in longest])
    return chart


def _wrapped(name: str) -> str:
    return name.replace("_", " ")
