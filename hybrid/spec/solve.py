"""Solve for axes from concrete shapes: each declared size is an expression equal to a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.core.errors import SpecError
from hybrid.spec.expr import Expr, ExprError


@dataclass(frozen=True, slots=True)
class Size:
    """The equation `expr` = `size`, declared at the key path `where`."""

    where: str
    expr: Expr
    size: int


def solve(file: str, sizes: Sequence[Size], bind: Mapping[str, int]) -> dict[str, int]:
    """Bound axes, those of `bind` included. A size that is linear in one unknown axis determines it; all are checked.

    Raises SpecError for a contradiction (naming both key paths) and for an undetermined axis.
    """
    known = dict(bind)
    origin = dict.fromkeys(bind, "the given binding")
    open_sizes = list(sizes)
    while True:
        left: list[Size] = []
        for s in sorted(open_sizes, key=lambda s: len(s.expr.names)):
            unknown = s.expr.names - known.keys()
            if not unknown:
                _agree(file, s, known, origin)
            elif len(unknown) == 1 and (value := _linear(file, s, next(iter(unknown)), known)) is not None:
                axis = next(iter(unknown))
                known[axis], origin[axis] = value, f"{s.where} = {s.size}"
            else:
                left.append(s)
        if not left:
            return known
        if len(left) == len(open_sizes):
            axes = sorted(left[0].expr.names - known.keys())
            raise SpecError(
                f"{file}: {left[0].where}: {left[0].expr} = {left[0].size} leaves {', '.join(axes)} open; "
                f"bind {axes[0]} or give another tensor's shape"
            )
        open_sizes = left


def _agree(file: str, s: Size, known: Mapping[str, int], origin: Mapping[str, str]) -> None:
    try:
        value = s.expr.eval(known)
    except ExprError as e:
        raise SpecError(f"{file}: {s.where}: {e}") from None
    if value != s.size:
        why = "; ".join(f"{n} = {known[n]} from {origin[n]}" for n in sorted(s.expr.names))
        raise SpecError(f"{file}: {s.where}: is {s.size} but {s.expr} = {value}" + (f" ({why})" if why else ""))


def _linear(file: str, s: Size, axis: str, known: Mapping[str, int]) -> int | None:
    """The value of `axis`, if the expression is linear in it; None if not."""
    if s.expr.text == axis:
        return s.size
    try:
        f0, f1, f2, f7 = (s.expr.eval({**known, axis: n}) for n in (0, 1, 2, 7))
    except ExprError:
        return None  # undefined at a point, so not linear
    slope = f1 - f0
    if not slope or f2 - f1 != slope or f7 - f0 != 7 * slope:
        return None
    value = (s.size - f0) / slope
    if value != int(value) or value < 0:
        raise SpecError(
            f"{file}: {s.where}: {s.expr} = {s.size} has no whole solution for {axis}"
            + "".join(f", {n} = {known[n]}" for n in sorted(s.expr.names & known.keys()))
        )
    return int(value)
