"""Pictures as SVG text, without a plotting library: one chart with linear or logarithmic axes, points, lines, bars.

c = Chart(640, 400, "title", Axis("batch", 1, 64, log=True), Axis("tok/s", 0, 200))
c.line([(1, 5), (32, 148)], 0, "ceiling"); Path("out.svg").write_text(page([c]))
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

# Okabe and Ito's colours: told apart by every kind of sight, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777", "#8c564b")
INK, FAINT, GRID = "#222222", "#777777", "#e4e4e4"
LETTER, LINE = 6.5, 13.0  # points that a letter takes at most, and a line of text
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 46, 56
Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
# Where a point's name may stand, nearest first: right, left, above, below, then farther off, with a line to the point.
_PLACES = [(9.0, 4.0, "start"), (-9.0, 4.0, "end"), (0.0, -9.0, "middle"), (0.0, 17.0, "middle")]
_WAYS = ((1, -1, "start"), (1, 1, "start"), (-1, -1, "end"), (-1, 1, "end"), (0, -1, "middle"), (0, 1, "middle"))
_PLACES += [(dx * r, dy * r + 4, a) for r in (16.0, 26.0, 38.0, 52.0, 70.0, 90.0, 115.0) for dx, dy, a in _WAYS]


def box_of(x: float, y: float, text: str, anchor: str) -> Box:
    """Width limit of a text of 11 points."""
    width = LETTER * len(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - 9, left + width, y + 3


def meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def crosses(a: Point, b: Point, box: Box) -> bool:
    """Does the way from a to b pass through the box?"""
    begin, end = 0.0, 1.0
    for i in (0, 1):
        step, low, high = b[i] - a[i], box[i] - a[i], box[i + 2] - a[i]
        if step:
            near, far = sorted((low / step, high / step))
            begin, end = max(begin, near), min(end, far)
        elif not low < 0 < high:
            return False
    return begin < end


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places at least `gap` apart, each as near as can be to the one wanted, within low..high if all fit
    there."""
    groups: list[list[float]] = []  # [sum of what its members want of the first one's place, members]
    for i, at in enumerate(wanted):
        groups.append([at - gap * i, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    found = [total / count for total, count in groups for _ in range(int(count))]
    least, most = low, high - gap * (len(wanted) - 1)
    return [max(least, min(at, most)) + gap * i for i, at in enumerate(found)]


def wrapped(text: str, letters: int) -> list[str]:
    """Lines of at most so many letters, broken at spaces and after hyphens; a longer word stays whole."""
    lines: list[str] = []
    for word in re.findall(r"[^\s-]+-?|-", text):
        joint = "" if lines and lines[-1].endswith("-") else " "
        if lines and len(lines[-1]) + len(joint) + len(word) <= letters:
            lines[-1] += joint + word
        else:
            lines.append(word)
    return lines


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
    _taken: list[Box] = field(default_factory=list)
    """Where points and texts are."""
    _drawn: list[tuple[Point, Point]] = field(default_factory=list)
    """Lines."""

    def __post_init__(self) -> None:
        """Names along the axis are wrapped to their slots; where a word is wider than one, some names are left out."""
        slot = self.x.place(1) - self.x.place(0) if self.names else 1.0
        letters = max(1, int(slot * (self.width - LEFT - RIGHT) / LETTER) - 1)
        self._names = [wrapped(name, letters) for name in self.names]
        widest = max((len(line) for lines in self._names for line in lines), default=0)
        self._every = max(1, math.ceil(widest / letters))
        self._low = self.height - BOTTOM - LINE * (max(map(len, self._names), default=1) - 1)

    def at(self, point: Point) -> Point:
        return (
            LEFT + self.x.place(point[0]) * (self.width - LEFT - RIGHT),
            self._low - self.y.place(point[1]) * (self._low - TOP),
        )

    def line(
        self, points: Sequence[Point], colour: int, name: str = "", dashed: bool = False, dots: bool = False
    ) -> None:
        corners = [self.at(p) for p in points]
        self._drawn += pairwise(corners)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(f'<polyline points="{path}" fill="none" stroke="{_colour(colour)}" stroke-width="2"{dash}/>')
        for p in points if dots else ():
            self.point(p, colour)
        if name:
            self._legend[name] = (_colour(colour), "dash" if dashed else "line")

    def point(self, point: Point, colour: int, name: str = "", title: str = "", hollow: bool = False) -> None:
        x, y = self.at(point)
        self._taken.append((x - 5, y - 5, x + 5, y + 5))
        fill = f'fill="#ffffff" stroke="{_colour(colour)}" stroke-width="2"' if hollow else f'fill="{_colour(colour)}"'
        self._marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" {fill}>{_title(title)}</circle>')
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
        if label and (
            not self.names or LETTER * len(label) <= (right - left) / width
        ):  # in narrower slots the title has it
            self.text((slot + 0.5, max(value, base)), label, dy=-5, anchor="middle")
        if name:
            self._legend[name] = (_colour(colour), "dot")

    def text(
        self, point: Point, text: str, dx: float = 0, dy: float = 0, anchor: str = "start", colour: str = INK
    ) -> None:
        x, y = self.at(point)
        self._taken.append(box_of(x + dx, y + dy, text, anchor))
        self._marks.append(
            f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="11">{escape(text)}</text>'
        )

    def ends(self, named: Sequence[tuple[Point, str, int]]) -> None:
        """Names right of the lines' last points, each in its line's colour (the number) and tied to it, in one
        column."""
        if not named:
            return
        rows = sorted(((*self.at(point), name, colour) for point, name, colour in named), key=lambda row: row[1])
        column = max(x for x, *_ in rows) + 26
        places = spread([y + 4 for _, y, *_ in rows], LINE, TOP + 4, self._low - 2)
        for (x, y, name, colour), at in zip(rows, places, strict=True):
            self._tie(x + 6, y, column - 3, at - 4)
            self._taken.append(box_of(column, at, name, "start"))
            self._marks.append(_label(column, at, name, "start", _colour(colour)))

    def labels(self, named: Sequence[tuple[Point, str]]) -> None:
        """Names beside their points, where no other point, no text and no line is; those farther off are tied to
        theirs. To be called when all else is drawn."""
        for point, name in sorted(named, key=lambda item: self.at(item[0])[1]):
            x, y = self.at(point)
            dx, dy, anchor = next(
                (p for p in _PLACES if self._free(box_of(x + p[0], y + p[1], name, p[2]))), _PLACES[0]
            )
            if max(abs(dx), abs(dy - 4)) > 13:
                self._tie(x, y, x + dx, y + dy - 4)
            self.text(point, name, dx=dx, dy=dy, anchor=anchor)

    def _free(self, box: Box) -> bool:
        inside = box[0] >= LEFT + 2 and box[1] >= TOP and box[2] <= self.width - 4 and box[3] <= self._low - 2
        return (
            inside
            and not any(meet(box, o) for o in self._taken)
            and not any(crosses(a, b, box) for a, b in self._drawn)
        )

    def _tie(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{FAINT}" stroke-width="0.8"/>'
        )

    def svg(self) -> str:
        """The chart as a <g> of its own size."""
        low, right = self._low, self.width - RIGHT
        out = [f'<text x="{LEFT}" y="20" font-size="14" font-weight="600" fill="{INK}">{escape(self.title)}</text>']
        for tick in self.y.ticks():
            _, y = self.at((self.x.low, tick))
            out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
            out.append(_label(LEFT - 7, y + 4, number(tick), "end"))
        for tick in () if self.names else self.x.ticks():
            x, _ = self.at((tick, self.y.low))
            out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{low}" stroke="{GRID}"/>')
            out.append(_label(x, low + 16, number(tick), "middle"))
        for i, lines in enumerate(self._names):
            for row, line in enumerate(lines) if i % self._every == 0 else ():
                out.append(_label(self.at((i + 0.5, self.y.low))[0], low + 16 + LINE * row, line, "middle"))
        out += self._marks
        out.append(f'<path d="M{LEFT} {TOP}V{low}H{right}" fill="none" stroke="{FAINT}"/>')
        out.append(_label((LEFT + right) / 2, self.height - 22, self.x.label, "middle", INK))
        out.append(
            f'<text transform="translate(15 {(TOP + low) / 2:.0f}) rotate(-90)" text-anchor="middle" font-size="11" '
            f'fill="{INK}">{escape(self.y.label)}</text>'
        )
        out += self._legend_marks()
        if self.note:
            out.append(_label(right, self.height - 6, self.note, "end"))
        return "<g>" + "".join(out) + "</g>"

    def _legend_marks(self) -> list[str]:
        out, x = [], float(LEFT)
        for name, (colour, kind) in self._legend.items():
            mark = f'<circle cx="{x + 7:.0f}" cy="33" r="4" fill="{colour}"/>'
            if kind != "dot":
                dash = ' stroke-dasharray="5 3"' if kind == "dash" else ""
                mark = (
                    f'<line x1="{x:.0f}" y1="33" x2="{x + 16:.0f}" y2="33" stroke="{colour}" stroke-width="2"{dash}/>'
                )
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
