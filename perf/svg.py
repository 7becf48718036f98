"""Pictures as SVG text, without a plotting library: one chart with linear or logarithmic axes, points, lines, bars.

c = Chart(640, 400, "title", Axis("batch", 1, 64, log=True), Axis("tok/s", 0, 200))
c.line([(1, 5), (32, 148)], 0, "ceiling"); Path("out.svg").write_text(page([c]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Okabe and Ito's colours: told apart by every kind of sight, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", "#8c564b")
INK, FAINT, GRID = "#222222", "#777777", "#e4e4e4"
LETTER = 6.5  # points, at most, that one letter takes
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 46, 50
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A labelled range; `log` needs low > 0. ValueError for an empty one."""

    label: str
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"axis {self.label!r} cannot reach from {self.low} to {self.high}")

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; outside values are clamped to the frame."""
        if self.log:
            at = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            at = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, at))

    def ticks(self) -> list[float]:
        if not self.log:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
            for factor in (1, 2, 5, 10):
                if (self.high - self.low) / (step * factor) <= 8:
                    step *= factor
                    break
            first = math.ceil(self.low / step)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        ratio = self.high / self.low
        base = 2 if math.log2(ratio).is_integer() and ratio <= 128 else 10
        powers = range(math.floor(math.log(self.low, base) + 1e-9), math.floor(math.log(self.high, base) + 1e-9) + 1)
        within = (1, 2, 5) if base == 10 and ratio <= 1000 else (1,)
        found = [factor * float(base) ** p for p in powers for factor in within]
        return [t for t in found if self.low * (1 - 1e-9) <= t <= self.high * (1 + 1e-9)]


def number(value: float) -> str:
    """As on an axis: 0.05, 12, 1.5k, 10T."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:.4g}"


@dataclass
class Chart:
    width: int
    height: int
    title: str
    x: Axis
    y: Axis
    names: Sequence[str] = ()
    """Names along the x axis in place of numbers, at 0.5, 1.5, ..."""
    note: str = ""
    _marks: list[str] = field(default_factory=list)
    _legend: dict[str, tuple[str, str]] = field(default_factory=dict)

    def at(self, point: Point) -> Point:
        return (
            LEFT + self.x.place(point[0]) * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - self.y.place(point[1]) * (self.height - TOP - BOTTOM),
        )

    def line(self, points: Sequence[Point], colour: int, name: str = "", dashed: bool = False, dots: bool = False) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(f'<polyline points="{path}" fill="none" stroke="{_colour(colour)}" stroke-width="2"{dash}/>')
        for p in points if dots else ():
            self.point(p, colour)
        if name:
            self._legend[name] = (_colour(colour), "dash" if dashed else "line")

    def point(self, point: Point, colour: int, name: str = "", label: str = "", title: str = "", hollow: bool = False) -> None:
        x, y = self.at(point)
        fill = f'fill="#ffffff" stroke="{_colour(colour)}" stroke-width="2"' if hollow else f'fill="{_colour(colour)}"'
        self._marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" {fill}>{_title(title)}</circle>')
        if label:
            self.text((point[0], point[1]), label, dx=7, dy=-6)
        if name:
            self._legend[name] = (_colour(colour), "dot")

    def bar(
        self,
        slot: float,
        value: float,
        colour: int,
        width: float = 0.7,
        name: str = "",
        label: str = "",
        title: str = "",
        base: float = 0.0,
    ) -> None:
        """A bar of `width` slots around slot + 0.5."""
        left, top = self.at((slot + 0.5 - width / 2, max(value, base)))
        right, bottom = self.at((slot + 0.5 + width / 2, min(value, base)))
        self._marks.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(bottom - top, 0.8):.1f}" '
            f'fill="{_colour(colour)}">{_title(title)}</rect>'
        )
        if label:
            self.text((slot + 0.5, max(value, base)), label, dy=-5, anchor="middle")
        if name:
            self._legend[name] = (_colour(colour), "dot")

    def text(self, point: Point, text: str, dx: float = 0, dy: float = 0, anchor: str = "start", colour: str = INK) -> None:
        x, y = self.at(point)
        self._marks.append(
            f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="11">{escape(text)}</text>'
        )

    def labels(self, named: Sequence[tuple[Point, str]]) -> None:
        """Names right of their points (left, where the chart ends), moved apart where they would lie on each other."""
        last = -math.inf
        for point, name in sorted(named, key=lambda item: self.at(item[0])[1]):
            x, y = self.at(point)
            last = max(y + 4, last + 12)
            fits = x + 8 + LETTER * len(name) < self.width
            self.text(point, name, dx=8 if fits else -8, dy=last - y, anchor="start" if fits else "end")

    def svg(self) -> str:
        """The chart as a <g> of its own size."""
        low, right = self.height - BOTTOM, self.width - RIGHT
        out = [f'<text x="{LEFT}" y="20" font-size="14" font-weight="600" fill="{INK}">{escape(self.title)}</text>']
        for tick in self.y.ticks():
            _, y = self.at((self.x.low, tick))
            out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
            out.append(_label(LEFT - 7, y + 4, number(tick), "end"))
        for tick in () if self.names else self.x.ticks():
            x, _ = self.at((tick, self.y.low))
            out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{low}" stroke="{GRID}"/>')
            out.append(_label(x, low + 16, number(tick), "middle"))
        for i, name in enumerate(self.names):
            out.append(_label(self.at((i + 0.5, self.y.low))[0], low + 16, name, "middle"))
        out += self._marks
        out.append(f'<path d="M{LEFT} {TOP}V{low}H{right}" fill="none" stroke="{FAINT}"/>')
        out.append(_label((LEFT + right) / 2, self.height - 14, self.x.label, "middle", INK))
        out.append(
            f'<text transform="translate(15 {(TOP + low) / 2:.0f}) rotate(-90)" text-anchor="middle" font-size="11" '
            f'fill="{INK}">{escape(self.y.label)}</text>'
        )
        out += self._legend_marks()
        if self.note:
            out.append(_label(right, self.height - 2, self.note, "end"))
        return "<g>" + "".join(out) + "</g>"

    def _legend_marks(self) -> list[str]:
        out, x = [], float(LEFT)
        for name, (colour, kind) in self._legend.items():
            mark = f'<circle cx="{x + 7:.0f}" cy="33" r="4" fill="{colour}"/>'
            if kind != "dot":
                dash = ' stroke-dasharray="5 3"' if kind == "dash" else ""
                mark = f'<line x1="{x:.0f}" y1="33" x2="{x + 16:.0f}" y2="33" stroke="{colour}" stroke-width="2"{dash}/>'
            out += [mark, _label(x + 20, 37, name, "start", INK)]
            x += 32 + 6.1 * len(name)
        return out


def page(charts: Sequence[Chart], columns: int = 2) -> str:
    """A whole SVG file: charts side by side, `columns` to a row."""
    rows = [charts[i : i + columns] for i in range(0, len(charts), columns)]
    width = max(sum(c.width for c in row) for row in rows)
    out, y = [], 0
    for row in rows:
        x = 0
        for chart in row:
            out.append(f'<g transform="translate({x} {y})">{chart.svg()}</g>')
            x += chart.width
        y += max(c.height for c in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        f'font-family="Inter, Helvetica, Arial, sans-serif"><rect width="{width}" height="{y}" fill="#ffffff"/>'
        f"{''.join(out)}</svg>\n"
    )


def _label(x: float, y: float, text: str, anchor: str, colour: str = FAINT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="{colour}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
