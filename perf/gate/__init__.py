"""Performance regression gates: counts, sizes, compiler statistics and ratios against committed values.

    python -m perf.gate                      # every group; worse than expected fails, better asks for renewal
    python -m perf.gate --only engine plans
    python -m perf.gate --update             # write what was measured, and print what changed

perf/gates/GROUP.toml holds the expected values, with a margin for all and for patterns of names; smaller is better
unless a name is under `higher`. Ratios are expected by kind of processor, and learned where none is expected
(perf.gate.ratios). Absolute times are never gated: perf/records keeps them, by device.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.cli import Parser, positive, run
from hybrid.cli.progress import progress_bar
from hybrid.core.errors import SpecError
from hybrid.core.places import clone
from hybrid.spec.load import Model, load_toml

GATES = Path(__file__).resolve().parent.parent / "gates"
Verdict = Literal["worse", "better", "new", "gone"]
_FAILS: tuple[Verdict, ...] = ("worse", "new", "gone")


class Gate(Model):
    """One file of perf/gates."""

    schema_version: Literal[1] = Field(alias="schema")
    margin: Annotated[float, Field(ge=0)]
    margins: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Pattern of names -> its own margin; the last that fits counts."""
    higher: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    expected: dict[str, float] = Field(default_factory=dict)
    processor: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Of ratios: expected values by kind of processor and driver."""
    most: dict[str, float] = Field(default_factory=dict)
    """Of ratios: the limit on any processor."""

    def margin_of(self, name: str) -> float:
        fitting = [m for pattern, m in self.margins.items() if fnmatch(name, pattern)]
        return fitting[-1] if fitting else self.margin


@dataclass(frozen=True, slots=True)
class Finding:
    """A number outside its expected range."""

    group: str
    name: str
    verdict: Verdict
    expected: float | None
    found: float | None
    margin: float

    def __str__(self) -> str:
        values = f"expected {_number(self.expected)}, found {_number(self.found)}"
        return f"{self.verdict:7} {self.group}: {self.name}: {values} (margin {100 * self.margin:g} %)"


def load_gate(group: str) -> Gate:
    path = GATES / f"{group}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in GATES.glob("*.toml")))
        raise SpecError(f"perf/gates has no group {group!r}; it has {known}")
    return load_toml(path, Gate)


def compare(group: str, gate: Gate, expected: Mapping[str, float], found: Mapping[str, float]) -> list[Finding]:
    """Every number that left its margin, has no expected value, or is missing."""
    findings = []
    for name in sorted({*expected, *found}):
        margin = gate.margin_of(name)
        if name not in expected or name not in found:
            verdict: Verdict = "new" if name in found else "gone"
            findings.append(Finding(group, name, verdict, expected.get(name), found.get(name), margin))
            continue
        want, have = expected[name], found[name]
        slack = abs(want) * margin + 1e-9
        if abs(have - want) <= slack:
            continue
        grew = have > want
        better = grew == any(fnmatch(name, pattern) for pattern in gate.higher)
        findings.append(Finding(group, name, "better" if better else "worse", want, have, margin))
    return findings


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.10g}" if value == int(value) else f"{value:.4g}"


# -------------------------------------------------------------------------------------------------------------- groups
def check(group: str, update: bool = False, share: int = 1) -> tuple[list[Finding], list[str]]:
    """Measure one group: (findings, lines to say). With `update` the findings are written as the new expectation.
    share: of the kernels whose SPIR-V has been compiled for gfx1103 before, one in `share` is again."""
    if group == "gfx1103":
        return _check_gfx1103(update, share)
    return _check_ratios(update) if group == "ratios" else _check_numbers(group, update)


def _check_numbers(group: str, update: bool) -> tuple[list[Finding], list[str]]:
    from hybrid.perf.gate.gated import GROUPS

    gate, found = load_gate(group), GROUPS[group]()
    findings = compare(group, gate, gate.expected, found)
    if update and findings:
        write_expected(GATES / f"{group}.toml", found)
    return findings, []


def _check_ratios(update: bool) -> tuple[list[Finding], list[str]]:
    from hybrid.perf.gate import ratios

    gate, kind = load_gate("ratios"), ratios.kind_of_processor()
    learned = ratios.load_store().processor.get(kind)
    expected = gate.processor.get(kind) or (learned.ratios if learned else {})
    found = ratios.measured(expected, gate.margin)
    whence = (
        "perf/gates/ratios.toml"
        if kind in gate.processor
        else f"learned {learned.date}"
        if learned
        else "not known yet"
    )
    lines = [f"{name} {ratio}, expected {_number(expected.get(name))}" for name, ratio in found.items()]
    lines.append(f"of {kind}: {whence}")
    nearest = {name: r.nearest(expected.get(name, r.value)) for name, r in found.items()}
    most = {
        name: Finding("ratios", name, "worse", gate.most[name], r.value, 0.0)
        for name, r in found.items()
        if r.low > gate.most.get(name, math.inf)
    }
    values = {name: r.value for name, r in found.items()}
    if update:
        write_expected(GATES / "ratios.toml", values, f'[processor."{kind}"]\n')
    elif not expected:
        if most:  # what no processor may exceed is not to be expected of this one
            return list(most.values()), lines
        ratios.learn(kind, values)
        lines.append(
            f"learned: these are expected here from now on ({ratios.store_path()}); nothing was compared with them yet"
        )
        return [], lines
    compared = compare("ratios", gate, expected, nearest)
    return [most.get(f.name, f) for f in compared] + [
        f for n, f in most.items() if n not in {c.name for c in compared}
    ], lines


def _check_gfx1103(update: bool, share: int) -> tuple[list[Finding], list[str]]:
    from hybrid.perf.isa import TABLES, committed, save
    from hybrid.perf.isa import check as check_rules

    gate, findings, lines = load_gate("gfx1103"), [], []
    tables = _tables(share)
    for version, table in tables.items():
        if not (committed(version) or update):  # another compiler's numbers are its own: nothing here has judged them
            lines.append(f"note: Mesa {version} has no reviewed table, so it was not compared (--update makes one)")
            continue
        found = _flat(table, gate.statistics)
        changed = compare(f"gfx1103 {version}", gate, _flat(committed(version), gate.statistics), found)
        findings += changed
        rules = check_rules(table, version)
        for line in (*rules.broken, *(f"{s}: an exception that nothing needs" for s in rules.stale)):
            findings.append(Finding(f"gfx1103 {version}", line, "worse", None, None, 0.0))
        if update and changed:
            save(version, table)
    missing = sorted({p.stem for p in TABLES.glob("*.json")} - set(tables))
    lines += [
        f"note: Mesa {version} is not here, so its table was not compared (python -m perf.mesa fetch)"
        for version in missing
    ]
    return findings, lines


def _tables(share: int) -> dict[str, Any]:
    from hybrid.perf.gate.gated import gfx1103

    return gfx1103(share)


def _flat(table: Mapping[str, Mapping[str, Any]], statistics: Iterable[str]) -> dict[str, float]:
    return {f"{kernel}: {s}": row[s] for kernel, row in table.items() for s in statistics}


def write_expected(path: Path, found: Mapping[str, float], section: str = "[expected]\n") -> None:
    """Replace what stands in a section; everything else stays. A kind of processor that is new gets a section at the
    end."""
    text = path.read_text(encoding="utf-8")
    if section not in text and section.startswith("[processor."):
        text += f"\n{section}"
    head, known, tail = text.partition(section)
    if not known:
        raise SpecError(f"{path.name}: has no {section.strip()} to write to")
    rest = tail.find("\n[")
    lines = [f'"{name}" = {_toml(value)}\n' for name, value in sorted(found.items())]
    path.write_text(head + section + "".join(lines) + (tail[rest:] if rest >= 0 else ""), encoding="utf-8")


def _toml(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.4g}"


# -------------------------------------------------------------------------------------------------------------- command
def groups() -> tuple[str, ...]:
    from hybrid.perf.gate.gated import GROUPS

    return (*GROUPS, "ratios", "gfx1103")


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.gate", description="Counts, sizes and ratios against the committed values of perf/gates."
    )
    p.add_argument(
        "--only", nargs="+", metavar="GROUP", help="these groups: plans, spirv, engine, ratios, gfx1103 (all)"
    )
    p.add_argument(
        "--update", action="store_true", help="write what was measured as what is expected, and print the changes"
    )
    p.add_argument(
        "--share",
        type=positive,
        default=1,
        metavar="N",
        help="of kernels compiled for gfx1103 before, compile one in N again (1)",
    )
    return p


def _each(wanted: Sequence[str]) -> Iterator[str]:
    with progress_bar(len(wanted), "gate", False, "group") as advance:
        for group in wanted:
            yield group
            advance(1)


def _main(args: argparse.Namespace) -> int:
    if args.update:
        clone("the expected values are renewed")
    failed = better = False
    wanted = args.only or groups()
    unknown = next((g for g in wanted if g not in groups()), None)
    if unknown:
        raise ValueError(f"no group {unknown!r}: there are {', '.join(groups())}")
    for group in _each(wanted):
        try:
            findings, lines = check(group, args.update, args.share)
        except SpecError as error:
            if os.environ.get("HYBRID_REQUIRE_VULKAN") == "1" or (
                "is not here" not in str(error) and "no RADV" not in str(error)
            ):
                raise
            print(f"note: {group} was not checked: {error}")
            continue
        for line in lines:
            print(line)
        for finding in findings:
            print(finding)
        failed = failed or any(f.verdict in _FAILS for f in findings)
        better = better or any(f.verdict == "better" for f in findings)
        rules = [f for f in findings if f.expected is None and f.found is None]
        print(
            f"gate {group}: {'renewed' if args.update and findings else 'holds' if not findings else f'{len(findings)} differ'}"
        )
        if args.update and rules:
            raise SpecError(
                f"{len(rules)} rules of perf/isa/isa.toml do not hold: mend the kernel, or argue an exception"
            )
    if args.update:
        return 0
    if better:
        print("better than expected: renew the tables with python -m perf.gate --update, and commit them")
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))
