"""Prove a Vulkan device: the kernels that models' plans use, each against the oracle.

A kernel runs small cases of its operation between guard bands and on poisoned memory, and is judged in float64
(hybrid.harness). `python -m hybrid.prove` runs many cases of each; a model's first load runs one (`first_load`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli.progress import tracked

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.core.plan import Plan
    from hybrid.engine.loading import EngineConfig
    from hybrid.harness.cases import Case
    from hybrid.kernels.vulkan.device import VulkanDevice
    from hybrid.kernels.vulkan.dry import DryDevice
    from hybrid.spec import OpSpec
    from hybrid.spec.schedule import Schedule

log = logging.getLogger("hybrid")

Types = tuple[tuple[str, str], ...]
Choices = tuple[Mapping[str, str], ...]
APART, LEAD = 0.15, 0.5
"""Limits of `Text`. f16 activations for cpu's int8 reach 0.10 and 0.01 (docs/proofs)."""


@dataclass(slots=True)
class Proof:
    """What is known of one kernel. worst: the largest share of the oracle's bound, over its cases. error: the first case
    that failed, and by how much; empty: none did."""

    kernel: str
    operation: str
    cases: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    error: str = ""

    def order(self) -> tuple[str, str]:
        """Sorts proofs."""
        return self.operation, self.kernel

    @property
    def verdict(self) -> str:
        return "WRONG" if self.error else "proved" if self.cases else "not run"


@dataclass(slots=True)
class Text:
    """A model on the device beside cpu. apart: the largest RMS difference of a position's logits, or of a text's vector;
    lead: by how much cpu's choice leads a decoded token; both in standard deviations of those logits or numbers. faults:
    aborted steps."""

    model: str
    apart: float
    lead: float
    faults: str = ""

    @property
    def error(self) -> str:
        if self.faults or self.apart >= APART:
            return self.faults or f"logits or vectors differ by {self.apart:.2f} standard deviations"
        return f"a token is {self.lead:.2f} standard deviations below cpu's choice" if self.lead >= LEAD else ""


@dataclass(slots=True)
class Report:
    """A device's proof; nothing in it tells whose machine it is."""

    device: str
    driver: str
    kernels: str
    models: list[str]
    proofs: list[Proof] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Kernels and models with an error."""
    options: dict[str, Any] | None = field(default_factory=dict)
    """Options of VulkanDevice with which everything is proved: none, or those of the first route; None: no route is."""
    plans: list[str] = field(default_factory=list)
    """Digests of the loads whose kernels were proved (`load_digest`)."""

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises ValueError, KeyError or TypeError for another file."""
        found = json.loads(path.read_text(encoding="utf-8"))
        proofs, texts = [Proof(**p) for p in found.pop("proofs")], [Text(**t) for t in found.pop("texts")]
        return cls(**found, proofs=proofs, texts=texts)

    def write(self, path: Path) -> str:
        """Write it as JSON, at once or not at all. Returns the text."""
        text = json.dumps(asdict(self), indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text + "\n")
        part.replace(path)
        return text

    def keep(self, proofs: Sequence[Proof]) -> None:
        """Add proofs of kernels of which nothing wrong is known."""
        wrong = [p for p in self.proofs if p.error]
        others = {p.kernel: p for p in (*self.proofs, *proofs)}
        self.proofs = sorted((others | {p.kernel: p for p in wrong}).values(), key=Proof.order)

    def add(self, before: Report) -> None:
        """Add what an earlier report of the device says. What it proved with other options does not count."""
        if same := self.options == before.options:
            self.plans, self.texts = [*before.plans, *self.plans], before.texts
        ours, self.proofs = self.proofs, [p for p in before.proofs if same or p.error]
        self.keep(ours)
        self.wrong = list(dict.fromkeys([*before.wrong, *self.wrong]))
        self.models = list(dict.fromkeys([*before.models, *self.models]))
        self.seconds += before.seconds

    @property
    def errors(self) -> list[str]:
        return [f"{p.kernel}: {p.error}" for p in self.proofs if p.error] + [
            f"{t.model}: {t.error}" for t in self.texts if t.error
        ]

    @property
    def unproved(self) -> list[str]:
        return [p.kernel for p in self.proofs if not p.cases and not p.error]

    @property
    def sentence(self) -> str:
        count, left = sum(not p.error and p.cases > 0 for p in self.proofs), self.unproved
        if self.errors:
            way = (
                "no other kernels are proved: use --device cpu"
                if self.options is None
                else f"runs with {self.options} instead"
            )
            return f"WRONG on {self.device}: {'; '.join(self.errors)}; {way}"
        rest = f"; not run: {', '.join(left)}" if left else ""
        return f"proved: {count} kernels and the texts of {len({t.model for t in self.texts})} models on {self.device}{rest}"


# --- what models' plans use ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is loaded with these options. schedule: default: the family's."""

    checkpoint: Checkpoint
    config: EngineConfig
    schedule: Schedule | None = None


def plans_of(subject: Subject, device: VulkanDevice) -> Iterator[Plan]:
    """The plans of plain requests, and of every sampling option."""
    from hybrid.engine.loading import fitted, sizes_for, target_for
    from hybrid.engine.runner import warm_programs
    from hybrid.planning.passes import bucket_of
    from hybrid.planning.planner import plan
    from hybrid.spec.schedule import find_schedule
    from hybrid.spec.step import OPTIONS

    checkpoint = subject.checkpoint
    schedule = subject.schedule or find_schedule(checkpoint.hparams.family)
    config, _ = fitted(subject.config, checkpoint, device, schedule)
    sizes = sizes_for(config, checkpoint.hparams, device)
    target = target_for(config, checkpoint, device, schedule, sizes)
    for phase, rows, outs, options in warm_programs(sizes):
        yield plan(target, rows, outs, phase, options=options)
    for rows in sizes.decode[:1]:
        yield plan(target, rows, rows, "decode", options=[o for o in OPTIONS if o != "verify"])
    if sizes.wanted > 1:
        outs = bucket_of(2, sizes.wants)
        yield plan(target, bucket_of(outs, sizes.rows), outs, "prefill", options=OPTIONS)


@dataclass(slots=True)
class Wanted:
    """kernels: those that plans select, with the operation whose step does. types: dtypes of each operation's tensors."""

    kernels: dict[str, str] = field(default_factory=dict)
    types: dict[str, dict[Types, None]] = field(default_factory=dict)
    others: dict[str, dict[Types, None]] = field(default_factory=dict)
    """Those with other types of cache (`add_caches`)."""
    on_outs: set[str] = field(default_factory=set)
    """Operations with steps that take the rows whose logits are wanted for all rows."""
    _cached: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, plan: Plan, dry: DryDevice) -> None:
        for step in plan.steps:
            found = tuple((arg, plan.tensors[name].dtype) for arg, name in step.args.items())
            self.types.setdefault(step.op, {})[found] = None
            if step.extent == "outs" and "T" in step.bind and "O" not in step.bind:
                self.on_outs.add(step.op)
        self._select(plan, dry)

    def add_caches(self, plan: Plan, dry: DryDevice) -> None:
        """Add types and kernels of the plan's cache steps for every cache type of --kv."""
        from hybrid.core.dtypes import CACHE_CHOICES, DTYPES
        from hybrid.spec import load_ops

        specs = load_ops()
        for step in plan.steps:
            spec = specs[step.op]
            caches = [name for arg, name in step.args.items() if spec.tensors[arg].role == "cache"]
            for kv in CACHE_CHOICES if caches and spec.runs_on("vulkan") else ():
                key = (step.op, plan.rows, step.extent, kv, repr((step.bind, step.attrs)))
                if kv == "auto" or key in self._cached:
                    continue
                self._cached.add(key)
                tensors = {name: plan.tensors[name] for name in (plan.control, *step.args.values())}
                tensors |= {name: replace(tensors[name], dtype=kv) for name in caches}
                found = tuple((arg, tensors[name].dtype) for arg, name in step.args.items())
                whole = all(tensors[name].shape[-1] % DTYPES[kv].block == 0 for name in caches)
                if whole and all(map(dry.has, spec.requirements("vulkan", dict(found)))):
                    self.others.setdefault(step.op, {})[found] = None
                    self._select(replace(plan, steps=(step,), tensors=tensors), dry)

    def _select(self, plan: Plan, dry: DryDevice) -> None:
        from hybrid.kernels.vulkan.dry import record

        for d in record(plan, dry).dispatches:
            self.kernels.setdefault(d.kernel.name, plan.steps[d.step].op)


def wanted_by(
    subjects: Sequence[Callable[[], AbstractContextManager[Subject]]], device: VulkanDevice, few: bool = False
) -> tuple[Wanted, DryDevice, list[str]]:
    """What the plans of subjects want, a stand-in of the device that records them, and the subjects' names. few: only
    with the cache's type that they are loaded with."""
    from hybrid.kernels.vulkan.dry import DryDevice

    wanted, dry, names = Wanted(), DryDevice.like(device.report), list[str]()
    dry.tuning = device.tuning
    for subject in tracked(subjects, "plans"):
        with subject() as found:
            names.append(found.checkpoint.path.name)
            for plan in plans_of(found, device):
                wanted.add(plan, dry)
                if not few:
                    wanted.add_caches(plan, dry)
    return wanted, dry, names


# --- cases that select them ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """A case, run with an entry of the tuning tables forced (family, use), or with what the device chooses."""

    case: Case
    selects: frozenset[str]
    forced: tuple[str, Mapping[str, Any]] | None = None

    def on(self, device: Any) -> AbstractContextManager[object]:
        return nullcontext() if self.forced is None else device.tuning.forced(*self.forced)


def trials(wanted: Wanted, dry: DryDevice) -> Iterator[Trial]:
    """Small cases of the plans' operations and types whose kernels the plans use, and for each kernel that they leave, a
    case that selects it with an entry of the tuning tables."""
    from hybrid.harness.tuned import asking, uses
    from hybrid.kernels.vulkan.tuning import space
    from hybrid.spec import load_ops

    left, specs = set(wanted.kernels), load_ops()
    for op, types in wanted.types.items():
        if not specs[op].runs_on("vulkan"):
            continue
        known = _choices(specs[op], types)
        others = _choices(specs[op], [found for found in wanted.others.get(op, {}) if found not in types])
        on_outs, edges = set[frozenset[str]](), set[tuple[str, frozenset[str]]]()
        for edge, case in _cases(specs[op], known, others):
            trial = _trial(specs[op], case, dry)
            if trial and (trial.selects <= wanted.kernels.keys() or trial.selects & left):
                if edge and (edge, trial.selects) in edges:
                    continue
                edges.add((edge, trial.selects))
                left -= trial.selects
                yield trial
                if op in wanted.on_outs and trial.selects not in on_outs:
                    on_outs.add(trial.selects)
                    # Of other values: scratch memory still holds those of the case before.
                    yield replace(trial, case=replace(case, wanted=True, seed=case.seed + 1))
    for family in space().family:
        if left and family.op in wanted.types and (not family.needs or dry.has(family.needs)):
            cases = asking(family, specs[family.op], dry)
            for use in uses(family):
                with dry.tuning.forced(family.name, use):
                    for case in cases:
                        trial = _trial(specs[family.op], case, dry)
                        if trial and trial.selects & left:
                            left -= trial.selects
                            yield Trial(case, trial.selects, (family.name, use))

    for spec in specs.values():  # kernels of another operation's steps
        for case in _any_cases(spec) if left and spec.runs_on("vulkan") else ():
            trial = _trial(spec, case, dry)
            if trial and trial.selects & left:
                left -= trial.selects
                yield trial


def _choices(spec: OpSpec, types: Collection[Types]) -> Choices:
    """The operation's combinations of types that steps have."""
    every, steps = spec.dtype_choices("vulkan"), [dict(found) for found in types]
    found = [next((c for c in every if all(step.get(n, t) == t for n, t in c.items())), None) for step in steps]
    return tuple(c for c in found if c is not None)


def _cases(spec: OpSpec, choices: Choices, others: Choices) -> Iterator[tuple[str, Case]]:
    """(edge or nothing, small case): a few of each combination of types, the edge cases with each, and the variants."""
    from hybrid.harness.fixed import dtype_cases, edge_cases, variant_cases

    for chosen in (*choices, *others):
        yield from (("", case) for case in dtype_cases(spec, chosen))
    for chosen in (*choices, *others):
        yield from edge_cases(spec, "vulkan", (chosen,))
    yield from (("", case) for _, case in variant_cases(spec, "vulkan") if case.dtypes in choices)


def _any_cases(spec: OpSpec) -> Iterator[Case]:
    """Small cases with every type of every tensor."""
    from hybrid.harness.fixed import dtype_cases, one_each, variant_cases

    for chosen in one_each(spec.dtype_choices("vulkan")):
        yield from dtype_cases(spec, chosen)
    yield from (case for _, case in variant_cases(spec, "vulkan"))


def _trial(spec: OpSpec, case: Case, dry: DryDevice) -> Trial | None:
    """None where the device does not run the case."""
    from hybrid.harness.sizes import fits
    from hybrid.harness.tuned import plan_for
    from hybrid.kernels.vulkan.dry import record

    if not fits(spec, "vulkan", case.bind, case.attrs, case.dtypes):
        return None
    return Trial(case, frozenset(d.kernel.name for d in record(plan_for(spec, case), dry).dispatches))


# --- running them ----------------------------------------------------------------------------------------------------


Comparison = Callable[[Callable[..., "VulkanDevice"], Mapping[str, Proof]], Iterable[Text]]


def prove(
    opened: Callable[..., VulkanDevice],
    subjects: Sequence[Callable[[], AbstractContextManager[Subject]]],
    texts: Comparison = lambda opened, proofs: (),
    few: bool = False,
    suspects: Collection[str] = (),
    known: Collection[str] = (),
) -> Report:
    """Prove a device. opened: opens it, with options of VulkanDevice. subjects: whose plans are proved. texts:
    compares texts, and counts them as cases of their kernels. few: one case of each kernel. suspects: kernels that were wrong with
    other options: their cases run first, and the first error ends all. known: kernels that are proved already."""
    from hybrid.devices.about import driver_of, kernels_of
    from hybrid.harness import GUARD

    begin = time.monotonic()
    with closing(opened(guard=GUARD)) as device:
        wanted, dry, names = wanted_by(subjects, device, few)
        report = Report(device.info.name, driver_of(device), kernels_of(device) or "", names)
    proofs = {name: Proof(name, op) for name, op in wanted.kernels.items() if name not in known}
    some = list(_covering(proofs, trials(wanted, dry)) if few else trials(wanted, dry))
    some.sort(key=lambda trial: not trial.selects & set(suspects))
    _run_all(some, opened, proofs, bool(suspects))
    if not suspects or not any(p.error for p in proofs.values()):
        report.texts = list(texts(opened, proofs))
    report.proofs = sorted(proofs.values(), key=Proof.order)
    report.seconds = time.monotonic() - begin
    report.wrong = [p.kernel for p in report.proofs if p.error] + [t.model for t in report.texts if t.error]
    return report


ROUTES: tuple[dict[str, Any], ...] = (
    {"without": ["matrix_lanes"]},
    {"without": ["f16_matrices"]},
    {"tuning": "default"},
    {"tuning": "default", "without": ["f16_matrices"]},
    {"subgroup": 64},
    {"exact": True},
    {"exact": True, "tuning": "default", "without": ["f16_matrices"]},
)
"""Options of VulkanDevice that select other kernels: without matrix units' register layout, without matrix units, without
tuned tiles and fused groups, with wider subgroups, with float32 activations (no packed dot products)."""


def routed(proving: Callable[..., Report], opened: Callable[..., VulkanDevice]) -> Report:
    """A device's proof; where kernels are wrong, with other options (`reroute`)."""
    report = proving(opened)
    if report.wrong:
        reroute(report, proving, opened, report.wrong)
    return report


def reroute(
    report: Report, proving: Callable[..., Report], opened: Callable[..., VulkanDevice], wrong: Collection[str]
) -> None:
    """Set a report's options to the first of ROUTES with which all kernels are proved."""
    report.options = None
    for options in ROUTES:
        try:
            other = proving(partial(opened, **options), suspects=wrong)
        except ValueError:  # the device has no such subgroups
            continue
        if not other.wrong:
            report.options = options
            report.keep(other.proofs)
            return


def _covering(proofs: Collection[str], some: Iterator[Trial]) -> Iterator[Trial]:
    """Trials that select a kernel for the first time."""
    left = set(proofs)
    while left and (trial := next(some, None)):
        if trial.selects & left:
            left -= trial.selects
            yield trial


def _run_all(
    some: Sequence[Trial], opened: Callable[..., VulkanDevice], proofs: Mapping[str, Proof], hasty: bool
) -> None:
    """Run cases; hasty: until one fails. One that the device does not survive is an error of its kernels; the rest run on a device opened anew."""
    from hybrid.core.errors import DeviceLost
    from hybrid.harness import GUARD

    lost, device = set[str](), opened(guard=GUARD)
    try:
        for trial in tracked(some, "kernels"):
            if hasty and any(p.error for p in proofs.values()):
                break
            if trial.selects & lost:
                continue
            try:
                _run(trial, device, proofs)
            except DeviceLost as error:
                lost |= trial.selects
                for name in trial.selects & proofs.keys():
                    proofs[name].error = proofs[name].error or f"{error} ({trial.case})"
                device.close()
                device = opened(guard=GUARD)
    finally:
        device.close()


def _run(trial: Trial, device: VulkanDevice, proofs: Mapping[str, Proof]) -> None:
    """Run one case and enter what it says of its kernels."""
    from hybrid.harness import run_case
    from hybrid.harness.compare import Disagreement
    from hybrid.spec import load_ops

    began, error, worst = time.monotonic(), "", 0.0
    try:
        with trial.on(device):
            found = run_case(load_ops()[trial.case.op], device, trial.case)
        worst = max(v.passes for v in found.verdicts.values())
    except Disagreement as e:
        error = str(e).removeprefix(f"{device.name}: ")
    for name in trial.selects & proofs.keys():
        proof = proofs[name]
        proof.cases, proof.worst, proof.error = proof.cases + 1, max(proof.worst, worst), proof.error or error
        proof.seconds += time.monotonic() - began


# --- the first load of a model ---------------------------------------------------------------------------------------


def first_load(device: VulkanDevice, subject: Subject) -> bool:
    """Whether the device computes a model's plans rightly. Kernels of which no report says so run one small case each, on
    a device of their own, and the report in the user's cache keeps the verdicts. False: the report says with which
    options to open the device instead, or that there are none."""
    from hybrid.devices.proofs import known, report_path
    from hybrid.kernels.vulkan.device import open_device
    from hybrid.kernels.vulkan.kernel import kernels_digest

    path, digest = report_path(device.info.name, device.report.driver, kernels_digest()), load_digest(subject)
    before = known(path)
    if before and digest in before.plans:
        return True
    used, proved = (before.options or {}, before.proved) if before else ({}, frozenset())
    opened = partial(open_device, f"vulkan:{device.info.index}")
    proving = partial(prove, subjects=[lambda: nullcontext(subject)], few=True)
    report = proving(partial(opened, **used), known=proved)
    report.options, report.plans = used, [digest]
    if left := report.unproved:
        log.warning(
            "%s: kernels of %s that no small case runs: %s (python -m hybrid.prove compares texts)",
            device.name,
            subject.checkpoint.path.name,
            ", ".join(left),
        )
    if report.wrong:
        reroute(report, proving, opened, {*report.wrong, *(before.wrong if before else ())})
    if before:
        report.add(Report.read(path))
    report.write(path)
    return report.options == used


def load_digest(subject: Subject) -> str:
    """Digest of what decides a load's plans."""
    checkpoint, schedule = subject.checkpoint, subject.schedule
    config = replace(subject.config, profile=False)
    types = [(name, checkpoint.dtype(name), tuple(checkpoint.shape(name))) for name in sorted(checkpoint.names)]
    text = repr((config, checkpoint.hparams, types, schedule and schedule.model_dump_json()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
