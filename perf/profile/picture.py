"""A profile as a picture: time by operation, and the steps of the first pass in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.perf.profile import subject

KINDS = (".png", ".svg")


def check(path: Path) -> None:
    """ValueError, with what to do, where the picture could not be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError('--picture needs matplotlib: pip install "hybrid-kernels[perf]"') from None
    if path.suffix not in KINDS:
        raise ValueError(f"--picture {path}: give a name that ends in {' or '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--picture {path}: there is no folder {path.parent}")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a profile."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ops = report["ops"]
    colours = {r["op"]: f"C{i % 10}" for i, r in enumerate(ops)}
    device = sum(p["device_us"] for p in report["passes"])
    figure, (top, bottom) = plt.subplots(
        2,
        1,
        figsize=(11, 2.1 + 0.28 * len(ops) + 1.7),
        layout="constrained",
        height_ratios=[0.28 * len(ops) + 0.6, 1.5],
    )
    top.barh([r["op"] for r in ops], [r["us"] for r in ops], color=[colours[r["op"]] for r in ops])
    top.barh(
        [r["op"] for r in ops],
        [r["floor_us"] for r in ops],
        color="black",
        height=0.25,
        label="floor: at the probes' rates",
    )
    top.legend(loc="lower right", frameon=False, fontsize=8)
    top.invert_yaxis()
    for i, r in enumerate(ops):
        rate = f"{r['tflops']:.1f} TFLOPS" if report["phase"] == "prefill" else f"{r['gb_per_second']:.4g} GB/s"
        note = f" {100 * r['share']:.1f} %, {r['calls']} x {r['us'] / r['calls']:.1f} us, {rate}"
        top.text(r["us"], i, note, va="center", fontsize=8)
    top.set_xlim(0, 1.35 * max(r["us"] for r in ops))
    top.set_xlabel("us of the device")
    top.spines[["top", "right"]].set_visible(False)
    top.set_title(
        f"{report['model']}, {subject(report)}: {device / 1e3:.2f} ms of the device, measured\n"
        f"{report['device']}, {report['driver']}",
        fontsize=9,
    )
    first = report["passes"][0]["device_us"]
    for op, colour in colours.items():
        spans = [(s["start"], s["us"]) for s in report["steps"] if s["op"] == op and s["start"] < first]
        bottom.broken_barh(spans, (0, 1), color=colour, linewidth=0)
    starts: dict[int, float] = {}
    for s in report["steps"]:
        if s["layer"] is not None and s["start"] < first:
            starts.setdefault(s["layer"], s["start"])
    every = max(1, len(starts) // 16)
    shown = [layer for layer in starts if layer % every == 0]
    bottom.set_xticks([starts[layer] for layer in shown], [str(layer) for layer in shown], fontsize=8)
    bottom.set(xlim=(0, first), ylim=(0, 1), yticks=[], xlabel="steps of the first pass in their order; ticks: layers")
    figure.savefig(path, dpi=100)
    plt.close(figure)
