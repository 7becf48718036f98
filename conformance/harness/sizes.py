"""Sizes and attributes that suit an operation, for drawn and fixed cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybrid.core.dtypes import DTYPES
from hybrid.harness import inbox
from hybrid.harness.cases import Case, context, one_row_per_slot, takes_runs
from hybrid.spec import OpSpec, SpecError
from hybrid.spec.axes import roles


def attribute_choices(spec: OpSpec, name: str, bind: Mapping[str, int]) -> list[Any]:
    """Values worth drawing for an attribute, the usual one first."""
    a = spec.attributes[name]
    if not a.draw:
        return list(a.values or ())
    kind = int if a.type == "int" else float
    return [kind(value.eval(bind)) for value in a.draw]


def attributes(spec: OpSpec, bind: Mapping[str, int], turn: int = 0) -> dict[str, Any]:
    """A value for each attribute: the usual ones at turn 0, others at the next turns."""
    choices = {name: attribute_choices(spec, name, bind) for name in spec.attributes}
    return {name: values[turn % len(values)] for name, values in choices.items()}


def sizes(spec: OpSpec, name: str, dtypes: Mapping[str, str]) -> list[int]:
    """Sizes of one axis worth drawing: the smallest, around the tiles, primes, and a spread; small ones first."""
    axis, tile = spec.axes[name], tile_of(spec, name)
    step = granule(spec, name, dtypes)
    role = roles()[axis.role]
    most = min(axis.max, max(role.most * axis.multiple_of, 2 * step))
    wanted = {axis.min, step, 2 * step, 3 * step, 5 * step, 7 * step, most, role.prime or step}
    if axis.role == "block_size":  # some devices want powers of two
        wanted |= {4, 8, 16}
    edges = {n for n in (tile - step, tile, tile + step, 2 * tile + step) if tile and n <= axis.max}
    return sorted(n for n in wanted | edges if axis.min <= n <= max(most, *edges, 0) and n % step == 0)


def granule(spec: OpSpec, axis: str, dtypes: Mapping[str, str]) -> int:
    """Multiple for the sizes of an axis: rows of tensors are whole blocks of their dtypes."""
    blocks = [DTYPES[dtypes[n]].block for n, t in spec.tensors.items() if n in dtypes and str(t.shape[-1]) == axis]
    return math.lcm(spec.axes[axis].multiple_of, *blocks)


def rounded_up(
    spec: OpSpec, bind: Mapping[str, int], dtypes: Mapping[str, str], fixed: frozenset[str] = frozenset()
) -> dict[str, int]:
    """The sizes rounded up to whole blocks of the dtypes, except the `fixed` ones."""
    return {
        n: v if n in fixed else -(-v // granule(spec, n, dtypes)) * granule(spec, n, dtypes) for n, v in bind.items()
    }


def tile_of(spec: OpSpec, axis: str) -> int:
    """The tile size of a backend along an axis, 0 if no backend declares one."""
    return max((b.tile.get(axis, 0) for b in spec.backends.values()), default=0)


def complete(spec: OpSpec, bind: Mapping[str, int], fixed: frozenset[str] = frozenset()) -> dict[str, int]:
    """Consistent sizes: enough blocks, slots and positions for the rows. `fixed` axes keep their size."""
    b = dict(bind)

    def at_least(axis: str, n: int) -> None:
        if axis in b and axis not in fixed:
            b[axis] = max(b[axis], n)

    if {"O", "S", "T"} <= b.keys():  # every output row belongs to another sequence
        at_least("S", b["O"])
        at_least("T", b["O"])
    if one_row_per_slot(spec):
        at_least("S", b["T"])
        b["T"] = min(b["T"], b["S"])
    if {"HQ", "HK"} <= b.keys() and b["HQ"] % b["HK"]:
        b["HQ" if "HQ" not in fixed else "HK"] = b["HK"] * max(1, b["HQ"] // b["HK"]) if "HQ" not in fixed else 1
    if {"T", "S"} <= b.keys() and "BS" in b:
        at_least("MB", -(-b["T"] // (b["S"] * b["BS"])))
    if {"E", "P"} <= b.keys() and "E" not in fixed:  # whole layers, and whole blocks of every type
        step = math.lcm(b["P"], 256)
        b["E"] = -(-b["E"] // step) * step
    if "R" in b and "D" in b and "R" not in fixed:
        b["R"] = min(b["R"], b["D"])
    if "BS" in b and "C" in b:
        b["C"] = b["MB"] * b["BS"]
    if "I" in b and "I" not in fixed:
        b["I"] = 4 * inbox.words(b)
    if "B" in b and "B" not in fixed:
        b["B"] = b["S"] * b["MB"] + min(b["B"], 3)
    return b


def fits(
    spec: OpSpec, backend: str, bind: Mapping[str, int], attrs: Mapping[str, Any], dtypes: Mapping[str, str]
) -> bool:
    """Whether the spec allows the case, and the rows fit into their sequences."""
    try:
        spec.check(bind, attrs, dtypes, backend)
    except SpecError:
        return False
    return "positions" not in spec.inputs or bind["T"] <= bind["S"] * context(bind)


def base_bind(spec: OpSpec) -> dict[str, int]:
    return {name: roles()[axis.role].edge for name, axis in spec.axes.items()}


def most_outs(spec: OpSpec, bind: Mapping[str, int], rows: int) -> int:
    """Most output rows for these rows: one of each sequence, except for runs."""
    return min(bind.get("O", 1), rows, rows if takes_runs(spec) else bind["S"])


def whole(
    spec: OpSpec,
    bind: Mapping[str, int],
    dtypes: Mapping[str, str],
    attrs: Mapping[str, Any],
    seed: int,
    kinds: Mapping[str, str] | None = None,
    style: str = "ragged",
) -> Case:
    """A case with all rows live."""
    rows = bind.get("T", 1)
    outs = most_outs(spec, bind, rows) if "slots" in spec.inputs else bind.get("O", 1)
    return Case(spec.name, dict(bind), dict(dtypes), dict(attrs), rows, outs, seed, kinds=kinds or {}, style=style)
