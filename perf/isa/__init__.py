"""Compile every pipeline that a schedule can use for the Radeon 780M, without the GPU: statistics, instruction mix, rules,
and a modelled token time.

    python -m perf.isa                      # every kernel on every RADV that is here, rules checked
    python -m perf.isa --model gemma3-27b   # modelled time of a token on the 780M, with the instructions counted

perf/gfx1103/VERSION.json keeps the table of each Mesa version; perf.gate compares with it. Modelled time: a step takes
what perf.roofline expects, or the vector cycles that its kernels' hot loops issue for its multiply-adds on 24 SIMDs at
2.8 GHz, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from hybrid.cli import Parser, UsageError, run
from hybrid.cli.progress import progress_bar
from hybrid.core.errors import SpecError
from hybrid.kernels.vulkan.dry import manifest
from hybrid.perf.isa.assembly import summary
from hybrid.perf.mesa import installed, version_of
from hybrid.perf.roofline.model import estimate
from hybrid.perf.roofline.work import Planned, subject
from hybrid.planning.passes import capabilities_of
from hybrid.spec.devicesheet import find_sheet
from hybrid.spec.load import Model, load_toml
from hybrid.spec.op import load_op

TABLES = Path(__file__).resolve().parent.parent / "gfx1103"
RULES = Path(__file__).with_name("isa.toml")
SIMDS, CLOCK = 24, 2.8e9  # 12 CU of two SIMD32 each
Table = dict[str, dict[str, Any]]


class Rule(Model):
    name: str
    kernels: tuple[str, ...]
    statistic: str
    most: int | None = None
    least: int | None = None

    @model_validator(mode="after")
    def _validate_bound(self) -> Rule:
        if (self.most is None) == (self.least is None):
            raise ValueError(f"rule {self.name!r} needs either most or least")
        return self

    def broken(self, row: Mapping[str, Any]) -> bool:
        value = row[self.statistic]
        return value > self.most if self.most is not None else value < (self.least or 0)


class Exemption(Model):
    rule: str
    kernels: str
    why: Annotated[str, Field(min_length=10)]
    mesa: str = "*"
    """Versions that it is for."""


class Rules(Model):
    schema_version: int = Field(alias="schema")
    rule: tuple[Rule, ...]
    exception: tuple[Exemption, ...] = ()

    @model_validator(mode="after")
    def _validate_names(self) -> Rules:
        unknown = {e.rule for e in self.exception} - {r.name for r in self.rule}
        if unknown:
            raise ValueError(f"exceptions to unknown rules: {', '.join(sorted(unknown))}")
        return self


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Check a table by the rules: lines for broken rules, exceptions in use, and unused exceptions."""

    broken: tuple[str, ...]
    excused: tuple[str, ...]
    stale: tuple[str, ...]


def load_rules() -> Rules:
    return load_toml(RULES, Rules)


def check(table: Table, version: str, rules: Rules | None = None) -> Verdicts:
    rules = rules or load_rules()
    broken, excused, used = [], [], set()
    for rule in rules.rule:
        for name, row in table.items():
            if not any(fnmatch(name, pattern) for pattern in rule.kernels) or not rule.broken(row):
                continue
            line = f"{name}: {rule.name}: {rule.statistic} is {row[rule.statistic]}"
            excuse = next(
                (
                    e
                    for e in rules.exception
                    if e.rule == rule.name and fnmatch(name, e.kernels) and fnmatch(version, e.mesa)
                ),
                None,
            )
            if excuse is None:
                broken.append(line)
            else:
                used.add(excuse)
                excused.append(f"{line} ({excuse.why})")
    stale = [e for e in rules.exception if e not in used and fnmatch(version, e.mesa)]
    return Verdicts(tuple(broken), tuple(excused), tuple(f"{e.rule}: {e.kernels}" for e in stale))


def compiled(share: int = 1) -> dict[str, tuple[Table, dict[str, bool]]]:
    """Mesa version -> (a row for each kernel, what its RADV offers), compiled now. SpecError without any RADV.
    share: of the kernels whose SPIR-V is that of the version's committed table, one in `share` is compiled; the others
    have that table's rows, as the same compiler makes the same code of the same SPIR-V."""
    found, here = {}, installed()
    with progress_bar(len(here), "kernels for gfx1103", False, "drivers", after=1.0) as advance:
        tables = []
        for mesa in here:
            tables.append(mesa.table(share, TABLES))
            advance(1)
    for data in tables:
        version = version_of(data["driver"])
        rows = {name: summary(kernel) for name, kernel in data["kernels"].items()}
        reviewed = committed(version)
        rows |= {name: reviewed[name] for name in data["spared"]}
        found[version] = dict(sorted(rows.items())), data["features"]
    if not found:
        raise SpecError("no RADV is here: apt-get install mesa-vulkan-drivers, or python -m perf.mesa fetch")
    return found


def committed(version: str) -> Table:
    """The table of a Mesa version as it was reviewed; empty where there is none."""
    path = TABLES / f"{version}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(version: str, table: Table) -> Path:
    """One line for each kernel, so that a change can be read."""
    path = TABLES / f"{version}.json"
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items()))
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------------- model
@dataclass(frozen=True, slots=True)
class TokenTime:
    """Modelled seconds of one decode pass on the 780M: by the roofline, by issue, and of the longer of both per
    step."""

    batch: int
    roofline: float
    issue: float
    seconds: float
    slowest: str
    """The operation that issue delays most, with its vector cycles per multiply-add."""


def token_time(model: Planned, batch: int, context: int, table: Table, features: Mapping[str, bool]) -> TokenTime:
    """SpecError for a kernel that the table does not have."""
    from hybrid.kernels.vulkan.dry import record
    from hybrid.perf.isa.radv import Collector

    made = model.plan("decode", batch, batch, context, batch)
    recording = record(made, Collector(features))
    by_step: dict[int, list[str]] = {}
    for d in recording.dispatches:
        by_step.setdefault(d.step, []).append(d.kernel.name)
    expected = estimate(model.decode(batch, context), find_sheet("radeon-780m"), "expected")
    issue = 0.0
    total = expected.seconds - sum(t.seconds for t in expected.steps)  # the submit
    delays: dict[str, float] = {}
    for index, timed in enumerate(expected.steps):
        matrix = any(t.role == "weight" and len(t.shape) == 2 for t in load_op(timed.item.op).inputs.values())
        spent = (
            _issue(timed.item.flops, by_step.get(index, []), table) if matrix else 0.0
        )  # others are memory or dispatches
        issue += spent
        total += max(spent, timed.seconds)
        delays[timed.item.op] = delays.get(timed.item.op, 0.0) + max(0.0, spent - timed.seconds)
    worst = max(delays, key=lambda op: delays[op])
    return TokenTime(batch, expected.seconds, issue, total, worst if delays[worst] > 0 else "")


def _issue(flops: int, kernels: Sequence[str], table: Table) -> float:
    """Seconds of vector issue for a step's multiply-adds, by its slowest kernel that multiplies."""
    missing = [k for k in kernels if k not in table]
    if missing:
        raise SpecError(f"perf/gfx1103 has no kernel {missing[0]!r}: renew it with python -m perf.gate --update")
    loops = [loop for k in kernels if (loop := table[k]["loop"])]
    worst = max((loop["cycles"] / loop["macs"] for loop in loops), default=0.0)
    return flops / 2 * worst / (SIMDS * CLOCK)


# -------------------------------------------------------------------------------------------------------------- command
_SHOWN = (
    "instructions",
    "vgprs",
    "sgprs",
    "spilled_vgprs",
    "scratch",
    "lds",
    "code_bytes",
    "waves",
    "latency",
    "inverse_throughput",
    "dot4",
    "wmma",
    "load_128",
    "load_narrow",
    "wait",
)


def text(table: Table, pattern: str) -> list[str]:
    heads = (
        "instr",
        "vgpr",
        "sgpr",
        "spill",
        "scr",
        "lds",
        "code",
        "waves",
        "latency",
        "invthr",
        "dot4",
        "wmma",
        "ld128",
        "ld<",
        "wait",
    )
    lines = [f"{'kernel':58}" + "".join(f"{h:>8}" for h in heads) + f"{'cyc/mac':>9}"]
    for name, row in table.items():
        if fnmatch(name, pattern):
            loop = row["loop"]
            share = f"{loop['cycles'] / loop['macs']:>9.4f}" if loop else f"{'-':>9}"
            lines.append(f"{name:58}" + "".join(f"{row[s]:>8}" for s in _SHOWN) + share)
    return lines


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.isa", description="Kernels compiled for the Radeon 780M (gfx1103) by RADV's null device."
    )
    p.add_argument("--kernels", default="*", metavar="PATTERN", help="only these, such as 'linear.gemv.*' (all)")
    p.add_argument("--model", metavar="NAME", help="also model the time of its tokens")
    p.add_argument("--type", default="q4_0", metavar="TYPE", help="storage type of the model's matrices (q4_0)")
    p.add_argument("--context", type=int, default=256, metavar="N", help="positions that each sequence holds (256)")
    p.add_argument("--json", action="store_true", help="print the tables as one JSON object instead")
    return p


def known(pattern: str) -> bool:
    """Can a kernel's name fit, as far as can be said without compiling: one of a committed table, or a module that is
    built? Names of kernels are those of modules with constants after them."""
    tables = (committed(path.stem) for path in sorted(TABLES.glob("*.json")))
    return any(fnmatch(name, pattern) for table in tables for name in table) or any(
        fnmatch(name, pattern) or pattern.startswith(name) for name in manifest()
    )


def _main(args: argparse.Namespace) -> int:
    if not known(args.kernels):
        raise UsageError(f"--kernels: no kernel is called {args.kernels!r}; names are such as linear.gemv.q4_0.q8_act")
    found = compiled()
    if not any(fnmatch(name, args.kernels) for table, _ in found.values() for name in table):
        raise SpecError(f"--kernels: no kernel of a schedule is called {args.kernels!r}")
    if args.json:
        shown = {v: {n: row for n, row in table.items() if fnmatch(n, args.kernels)} for v, (table, _) in found.items()}
        print(json.dumps(shown))
        return 0
    failed = False
    for version, (table, features) in found.items():
        units = "with matrix units" if features["cooperative_matrix"] else "no matrix units"
        print(f"gfx1103, RADV of Mesa {version}, {len(table)} kernels, {units}")
        print("\n".join(text(table, args.kernels)))
        verdicts = check(table, version)
        failed = failed or bool(verdicts.broken or verdicts.stale)
        for title, lines in (
            ("rule broken", verdicts.broken),
            ("excused", verdicts.excused),
            ("stale exception", verdicts.stale),
        ):
            print("\n".join(f"{title}: {line}" for line in lines) or f"{title}: none")
        if args.model:
            print("\n".join(_modelled(args, table, features)))
        print()
    return int(failed)


def _modelled(args: argparse.Namespace, table: Table, features: Mapping[str, bool]) -> list[str]:
    model = subject(args.model, args.type, capabilities=capabilities_of(features.__getitem__))
    if not isinstance(model, Planned):
        raise SpecError(f"{args.model} has no schedule: no kernels can be counted for it")
    lines = [
        f"{args.model} {args.type}, context {args.context}, on the Radeon 780M: modelled (roofline and issue of these kernels)"
    ]
    for batch in (1, 8, 32):
        t = token_time(model, batch, args.context, table, features)
        held = f"; held up by issue in {t.slowest}" if t.slowest else ""
        lines.append(
            f"  B={batch:<3} {1e3 * t.seconds:8.1f} ms, {batch / t.seconds:7.1f} tok/s "
            f"(roofline {1e3 * t.roofline:.1f} ms, issue alone {1e3 * t.issue:.1f} ms){held}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))
