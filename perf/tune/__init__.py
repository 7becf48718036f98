"""Tune each kernel family's tile, split or variant on this device: a sweep of tuning/space.toml.

    python -m perf.tune linear.gemv --workload gemma3-27b --write

Method: a candidate is first proved: cases of its operation that ask for the family, with the workload's types, must
agree with the oracle; what does not is reported and never timed. Then the workload's step is timed (perf.op's method:
copies beyond the cache, medians of device timestamps) for every proved candidate. Where they are many, one number is
changed at a time, from the binding's default, until nothing gains.
The table gets an entry for each group of workloads with the same types, and one of its own for a workload that gains
more than --margin over it; what the default does as well gets none.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid.cli import Parser, amount, run
from hybrid.cli.progress import progress_bar
from hybrid.core.errors import DeviceLost
from hybrid.core.units import show_rate
from hybrid.devices.opening import open_device
from hybrid.harness import run_case
from hybrid.harness.cases import Case
from hybrid.harness.compare import Disagreement
from hybrid.harness.fixed import dtype_cases, edge_cases, variant_cases
from hybrid.harness.tuned import facts_of, plan_for
from hybrid.kernels.vulkan.api import VulkanError
from hybrid.kernels.vulkan.dry import asked
from hybrid.kernels.vulkan.tuning import Family, Value, space
from hybrid.perf.op import case_of, changed, measure, repeated, setting, workloads
from hybrid.perf.tune.table import commit_of, section, written
from hybrid.spec import OpSpec, load_op
from hybrid.spec.fields import Workload

MOST = 48  # combinations that are all tried
PROOFS = 2  # cases for each candidate and set of types
Use = tuple[tuple[str, Value], ...]


@dataclass(slots=True)
class Sweep:
    """One workload: seconds by candidate, the binding's own choice among them."""

    workload: str
    facts: Mapping[str, Value]
    default: Use
    nbytes: int
    flops: int
    seconds: dict[Use, float] = field(default_factory=dict)

    @property
    def types(self) -> tuple[tuple[str, Value], ...]:
        """The facts that are no numbers: kernels of other types are other kernels."""
        return tuple((k, v) for k, v in self.facts.items() if isinstance(v, (str, bool)))


@dataclass(slots=True)
class Tuner:
    """One family on one device. `wrong` collects candidates that disagree with the oracle, `unfit` those that this
    device cannot run."""

    device: Any
    family: Family
    spec: OpSpec
    seconds: float
    footprint: int
    changed: Mapping[str, str] = field(default_factory=dict)
    """Axes and dtypes that workloads get instead of their own."""
    wrong: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    _proved: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def sweeps(self, wanted: Sequence[str]) -> Iterator[Sweep]:
        """One for each workload of the operation that asks for the family, and for each way in which it asks."""
        named = workloads(self.spec, wanted) if wanted else self.spec.workload
        with progress_bar(len(named), self.family.name, False, "workload") as advance:
            for workload in named:
                yield from self._asked(workload)
                advance(1)

    def _asked(self, workload: Workload) -> Iterator[Sweep]:
        case = self._case(workload)
        questions = [a for a in asked(plan_for(self.spec, case), self.device) if a.family == self.family.name]
        for facts in {tuple(a.facts.items()): None for a in questions}:
            default = next(a.use for a in questions if tuple(a.facts.items()) == facts)
            yield self.sweep(workload.id, case, dict(facts), tuple(default.items()))

    def _case(self, workload: Workload) -> Case:
        return case_of(self.spec, changed(self.spec, workload, self.changed))

    def sweep(self, name: str, case: Case, facts: Mapping[str, Value], default: Use) -> Sweep:
        nbytes, flops = self.spec.nbytes(case.bind, case.dtypes, case.attrs), self.spec.flops(case.bind, case.attrs)
        found = Sweep(name, facts, default, nbytes, flops)
        tried: set[Use] = set()
        while new := [use for use in self._next(found, tried) if use not in tried]:
            tried |= set(new)
            self._time(found, case, [use for use in new if self._proof(use, found.types, case)])
        return found

    def _next(self, sweep: Sweep, tried: set[Use]) -> list[Use]:
        """Candidates to try: all, or (of many) the default and then neighbours of the best so far."""
        candidates = self.family.candidates
        if math.prod(map(len, candidates.values())) <= MOST:
            return [tuple(zip(candidates, values, strict=True)) for values in itertools.product(*candidates.values())]
        if not tried:
            return [sweep.default]
        if not sweep.seconds:
            return []
        best = dict(min(sweep.seconds.items(), key=lambda timed: timed[1])[0])
        return [tuple({**best, key: value}.items()) for key, values in candidates.items() for value in values]

    def _proof(self, use: Use, types: tuple[tuple[str, Value], ...], like: Case) -> bool:
        """Does the candidate agree with the oracle, on cases of these types? Run once for each."""
        key = (use, types)
        if key not in self._proved:
            cases = self._cases(types, like)
            if not cases:
                raise ValueError(
                    f"no case of {self.spec.name} proves {self.family.name} with {dict(types)}: add one to its edge cases"
                )
            self._proved[key] = False
            try:
                with self.device.tuning.forced(self.family.name, dict(use)):
                    for case in cases:
                        run_case(self.spec, self.device, case)
                self._proved[key] = True
            except DeviceLost:  # nothing that follows would be about its candidate
                raise
            except VulkanError as error:
                self.unfit.append(f"{shown(use)}: {error}")
            except Disagreement as error:
                self.wrong.append(f"{self.family.name} {shown(use)}: {error}")
        return self._proved[key]

    def _cases(self, types: tuple[tuple[str, Value], ...], like: Case) -> list[Case]:
        """Small cases of the workload's dtypes, else of the same types, that ask for the family; those of as many rows
        first."""
        known = [case for _, case in (*edge_cases(self.spec, "vulkan"), *variant_cases(self.spec, "vulkan"))]
        found = []
        for case in (*dtype_cases(self.spec, like.dtypes), *known):
            for facts in facts_of(self.family.name, self.spec, self.device, case)[:1]:
                if all(facts[k] == v for k, v in types):
                    found.append(case)
        found.sort(key=lambda c: (c.dtypes != like.dtypes, c.bind.get("T", 1) != like.bind.get("T", 1)))
        return found[:PROOFS]

    def _time(self, sweep: Sweep, case: Case, uses: Sequence[Use]) -> None:
        if not uses:
            return
        self.device.reset()
        plan, copies = repeated(self.spec, case, self.device, self.footprint, noise=True)
        for use in uses:
            with self.device.tuning.forced(self.family.name, dict(use), **sweep.facts):
                sweep.seconds[use] = measure(self.device, plan, copies, self.seconds)
        self.device.reset()


@dataclass(frozen=True, slots=True)
class Found:
    """An entry for the table: where it holds, what it uses, and what that is worth (for the comment)."""

    when: Mapping[str, Value]
    use: Mapping[str, Value]
    notes: tuple[str, ...]


def entries(sweeps: Sequence[Sweep], margin: float) -> list[Found]:
    """What the table should say: for each set of types the candidate with the least geometric mean of slowdowns, before
    it the workloads that another serves better by more than `margin`. Defaults that are within the margin get none."""
    out: list[Found] = []
    for types in dict.fromkeys(s.types for s in sweeps):
        group = [s for s in sweeps if s.types == types and s.seconds]
        shared = set.intersection(*(set(s.seconds) for s in group)) if group else set()
        if not shared:
            continue
        slow = {
            use: statistics.fmean(math.log(s.seconds[use] / min(s.seconds.values())) for s in group)
            for use in sorted(shared, key=str)
        }
        general = min(slow, key=lambda use: slow[use])
        defaults = {s.default for s in group}
        if (
            len(defaults) == 1
            and next(iter(defaults)) in slow
            and slow[next(iter(defaults))] - slow[general] <= math.log1p(margin)
        ):
            general = next(iter(defaults))
        for s in group:
            best = min(s.seconds, key=lambda use: s.seconds[use])
            if s.seconds[general] > (1 + margin) * s.seconds[best]:
                out.append(Found(dict(s.facts), dict(best), (_note(s, best),)))
        if {general} != defaults:
            out.append(Found(dict(types), dict(general), tuple(_note(s, general) for s in group)))
    return out


def _note(s: Sweep, use: Use) -> str:
    rate = _rates(s, s.seconds[use])
    worst = max(s.seconds, key=lambda u: s.seconds[u])
    default = f"default {1e6 * s.seconds[s.default]:.1f}" if s.default in s.seconds else "default unfit"
    last = f"worst {1e6 * s.seconds[worst]:.1f} ({shown(worst)})"
    return f"{s.workload}: {1e6 * s.seconds[use]:.1f} us, {rate}; {default}; {last}"


def shown(use: Use) -> str:
    return " ".join(f"{k}={v}" for k, v in use)


def _rates(s: Sweep, seconds: float) -> str:
    return f"{show_rate(s.nbytes / seconds, 'B/s')}, {show_rate(s.flops / seconds, 'FLOPS')}"


def text(sweep: Sweep) -> str:
    """Every candidate of a workload, the fastest first."""
    lines = [f"{sweep.workload}  {' '.join(f'{k}={v}' for k, v in sweep.facts.items())}"]
    for use, seconds in sorted(sweep.seconds.items(), key=lambda item: item[1]):
        default = "  (default)" if use == sweep.default else ""
        lines.append(f"  {shown(use):44}{1e6 * seconds:10.1f} us  {_rates(sweep, seconds)}{default}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(
        prog="python -m perf.tune",
        description="Sweep the tuning space on this device; each candidate is proved, then timed.",
    )
    p.add_argument("family", nargs="*", metavar="FAMILY", help="families of kernels/vulkan/tuning/space.toml (all)")
    p.add_argument(
        "--workload", action="append", default=[], metavar="ID", help="only workloads whose id begins so (repeatable)"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="an axis or a dtype of the workloads: T=2048, x=f16",
    )
    p.add_argument("--device", default="vulkan", help="vulkan or vulkan:N (vulkan)")
    p.add_argument("--seconds", type=amount, default=0.05, metavar="S", help="how long to repeat each candidate (0.05)")
    p.add_argument("--footprint", type=amount, default=256.0, metavar="MB", help="as for perf.op (256)")
    p.add_argument("--margin", type=amount, default=0.03, metavar="X", help="a smaller gain is none (0.03)")
    p.add_argument(
        "--write",
        action="store_true",
        help="write the families' sections of this device class's table (installed: into tuning/)",
    )
    p.add_argument("--table", metavar="NAME", help="the table to write, for a device of no known class (its own)")
    p.add_argument("--commit", metavar="ID", help="for the table's header, where there is no git")
    p.add_argument("--json", action="store_true", help="print one JSON object for each workload instead")
    args = p.parse_args(argv)
    command = f"python -m perf.tune {shlex.join(sys.argv[1:] if argv is None else argv)}"
    return run(lambda: _main(args, command))


def _main(args: Any, command: str) -> int:
    families = [space().named(name) for name in args.family] or [f for f in space().family if not f.fused]
    device: Any = open_device(args.device).device
    try:
        if device.backend == "cpu":
            raise ValueError("the cpu device has no tuning table: give --device vulkan")
        name = args.table or device.tuning.name
        if args.write and name == "default":
            raise ValueError(f"{device.name} is of no known class: name its new table with --table")
        about = {
            "device": device.name,
            "driver": device.report.driver,
            "commit": args.commit or commit_of(),
            "command": command,
        }
        wrong: list[str] = []
        for family in families:
            tuner = Tuner(device, family, load_op(family.op), args.seconds, int(args.footprint * 1e6), dict(args.set))
            sweeps = []
            for sweep in tuner.sweeps(args.workload):
                sweeps.append(sweep)
                print(json.dumps(as_dict(family.name, about, sweep)) if args.json else text(sweep), flush=True)
            if not sweeps:
                raise ValueError(f"no workload of {family.op} {' or '.join(args.workload)} asks for {family.name} here")
            made = section(family.name, about, entries(sweeps, args.margin), tuner.unfit)
            if args.write and not tuner.wrong:
                print(f"wrote {written(name, device, family.name, made)}", file=sys.stderr)
            elif not args.json:
                print(made)
            wrong += tuner.wrong
        if wrong:
            raise ValueError(f"candidates that disagree with the oracle, not timed: {'; '.join(wrong)}")
    finally:
        device.close()
    return 0


def as_dict(family: str, about: Mapping[str, str], sweep: Sweep) -> dict[str, Any]:
    """A sweep as plain data."""
    tried = [{"use": dict(use), "seconds": seconds} for use, seconds in sweep.seconds.items()]
    return {
        **about,
        "family": family,
        "workload": sweep.workload,
        "facts": dict(sweep.facts),
        "default": dict(sweep.default),
        "nbytes": sweep.nbytes,
        "flops": sweep.flops,
        "candidates": tried,
    }
