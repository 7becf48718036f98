"""The report's charts are readable: texts overlap neither one another, nor points, nor the edge of the picture."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest

from hybrid.perf.record.schema import OpTime, Speedup
from hybrid.perf.report.pictures import by_commit, shares, speedups, versus, where_time_goes
from hybrid.perf.svg import TOP, Axis, Chart, page, spread, wrapped

WIDTH = 6.2  # of a letter of 11 points in Helvetica, Arial and DejaVu Sans, on the average of such names
DEVICE = "some device"
NAMES = (
    "fused-qkv",
    "int8-activations",
    "device-sampling",
    "recorded-commands",
    "several-per-submit",
    "all in the plan",
)


def texts(svg: str) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, text) of every horizontal text, in the picture's points."""
    found = []
    for part in re.finditer(r'<g transform="translate\((\S+) (\S+)\)"><g>(.*?)</g></g>', svg, re.S):
        for text in re.finditer(r"<text ([^>]*)>([^<]*)</text>", part[3]):
            own = dict(re.findall(r'([\w-]+)="([^"]*)"', text[1]))
            if "transform" not in own:
                width = WIDTH * len(text[2]) * float(own["font-size"]) / 11
                left = (
                    float(own["x"]) - {"start": 0, "middle": width / 2, "end": width}[own.get("text-anchor", "start")]
                )
                x, y = float(part[1]) + left, float(part[2]) + float(own["y"])
                found.append((x, y - 9, x + width, y + 2, text[2]))
    return found


def circles(svg: str) -> list[tuple[float, float, float, float]]:
    found = []
    for part in re.finditer(r'<g transform="translate\((\S+) (\S+)\)"><g>(.*?)</g></g>', svg, re.S):
        for x, y in re.findall(r'<circle cx="(\S+)" cy="(\S+)" r="4.2"', part[3]):
            cx, cy = float(part[1]) + float(x), float(part[2]) + float(y)
            found.append((cx - 4, cy - 4, cx + 4, cy + 4))
    return found


def check_no_overlap(svg: str) -> None:
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    boxes = texts(svg)
    for a, b in combinations(boxes, 2):
        assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]), f"{a[4]!r} runs into {b[4]!r}"
    for a in boxes:
        assert a[0] >= 0 and a[1] >= 0 and a[2] <= width and a[3] <= height, f"{a[4]!r} is cut off"
    for a in (b for b in boxes if not b[4].isdigit()):
        for c in circles(svg):
            assert not (a[0] < c[2] - 1 and c[0] < a[2] - 1 and a[1] < c[3] - 1 and c[1] < a[3] - 1), (
                f"{a[4]!r} lies on a point"
            )


def run(model: str, speed: float, phase: str = "decode", context: int = 512) -> SimpleNamespace:
    return SimpleNamespace(
        model=f"gemma3-{model}", dtype="q4_0", phase=phase, batch=1, context=context, tokens_per_second=speed
    )


def test_lines_that_end_together_have_names_of_their_own():
    speeds = {256: 183.0, 512: 182.5, 1024: 182.4, 2048: 181.0, 8192: 174.0, 16384: 173.9, 32768: 173.8}
    records = [
        SimpleNamespace(
            device=DEVICE, commit=f"{i:09x}", runs=[run("27b", s + i, context=c) for c, s in speeds.items()]
        )
        for i in range(14)
    ]
    (chart,) = by_commit(records, DEVICE)
    svg = page([chart], 1)
    check_no_overlap(svg)
    named = [t for t in texts(svg) if "q4_0" in t[4]]
    assert len(named) == 7 and [t[4] for t in sorted(named, key=lambda t: t[1])] == [f"27b q4_0 @{c}" for c in speeds]


def test_names_below_bars_are_wrapped_or_thinned_out():
    found = tuple(
        Speedup(name=n, summary="one thing", with_it=0.006, without=0.007, low=1.1, high=1.2) for n in NAMES * 2
    )
    chart = speedups(SimpleNamespace(model="gemma3-27b", dtype="q4_0", speedups=found), DEVICE)
    check_no_overlap(page([chart], 1))
    shown = {t[4] for t in texts(page([chart], 1))}
    assert {"recorded-", "commands", "several-per-", "submit"} <= shown
    pairs = [(None, run("27b", 100.0 + i)) for i in range(60)]
    beside = SimpleNamespace(name="peer", of=lambda one, device: 50.0)
    found = [(SimpleNamespace(device=DEVICE), one) for _, one in pairs]
    check_no_overlap(page(versus(found, beside), 1))


def test_shares_are_readable_however_many(monkeypatch):
    monkeypatch.setattr("hybrid.perf.report.pictures.ceiling_of", lambda one, device: 200.0)
    for count in (3, 19, 60):
        check_no_overlap(page(shares([(SimpleNamespace(device=DEVICE), run("27b", 99.0)) for _ in range(count)]), 1))


def test_operations_under_the_roof_are_named_beside_one_another():
    close = {
        "fused_ffn": (3844.0, 3.6),
        "linear": (3700.0, 3.61),
        "fused_qkv": (3600.0, 3.62),
        "qk_norm_rope_append": (3500.0, 3.6),
        "attention": (40.0, 2.0),
    }
    ops = tuple(
        OpTime(op=name, calls=62, us=us, nbytes=int(3e6 * us), flops=int(3e6 * us * at), floor_us=us / 2)
        for name, (us, at) in close.items()
    )
    profile = SimpleNamespace(ops=ops, copy_gb_s=4303.0, matrix_tflops=620.0)
    bars, roof = where_time_goes(profile, "NVIDIA H200")
    check_no_overlap(page([bars, roof]))
    names = [t[4] for t in texts(page([roof], 1))]
    assert {"fused_ffn", "linear", "fused_qkv", "qk_norm_rope_append"} <= set(names)


@pytest.mark.parametrize("wanted", [[5.0, 5, 5, 5], [0.0, 100], [90.0, 95, 99], [1.0, 2, 50, 51, 52, 99]])
def test_places_are_spread_within_bounds(wanted):
    found = spread(wanted, 10, 0, 100)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(found)) and found[0] >= 0 and found[-1] <= 100
    alone = [w for w in wanted if all(abs(w - o) >= 40 for o in wanted if o is not w)]
    assert all(w in found for w in alone)


def test_words_are_broken_where_words_break():
    assert wrapped("several-per-submit", 12) == ["several-per-", "submit"]
    assert wrapped("all in the plan", 10) == ["all in the", "plan"]
    assert wrapped("recorded", 3) == ["recorded"]


def test_a_label_without_space_beside_its_point_has_a_line():
    chart = Chart(300, 260, "t", Axis("x", 0, 10), Axis("y", 0, 10))
    for i in range(33):
        chart.point((i % 11, (4.2, 5, 5.8)[i // 11]), 0)
    chart.labels([((5, 5), "a rather long name")])
    svg = page([chart], 1)
    check_no_overlap(svg)
    assert svg.count('stroke-width="0.8"') == 1 and all(t[1] >= TOP - 12 for t in texts(svg) if "long" in t[4])
