"""python -m hybrid.prove [MODEL ...]: prove this machine's device: every kernel that a model's plans use there.

Each kernel runs small cases of its operation between guard bands and on poisoned memory, and is judged by the float64
oracle (hybrid.harness). Fused groups, which no single operation selects, run in the model: the logits of a prompt and
the choices of a decoded text are compared with those of cpu.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli import Parser, run
from hybrid.cli.progress import progress_bar
from hybrid.core.dtypes import DTYPES
from hybrid.core.places import MODELS, SPECS

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.core.plan import Plan
    from hybrid.harness.cases import Case
    from hybrid.kernels.vulkan.device import VulkanDevice
    from hybrid.kernels.vulkan.dry import DryDevice
    from hybrid.spec import OpSpec

Types = tuple[tuple[str, str], ...]
APART, LEAD = 0.15, 0.5
"""Limits of `Text`. f16 activations for cpu's int8 reach 0.10 and 0.01 (docs/proofs)."""
PROMPT, TEXT, CONTEXT, LAYERS = 40, 12, 96, 6
ON_CPU = 1 << 30  # bytes of weights of the largest model whose texts are compared


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

    @property
    def verdict(self) -> str:
        return "WRONG" if self.error else "proved" if self.cases else "not run"


@dataclass(slots=True)
class Text:
    """A model on the device beside cpu. apart: the largest RMS difference of a position's logits; lead: by how much cpu's
    choice leads a decoded token; both in standard deviations of the position's logits. faults: aborted steps."""

    model: str
    apart: float
    lead: float
    faults: str = ""

    @property
    def error(self) -> str:
        if self.faults or self.apart >= APART:
            return self.faults or f"logits differ by {self.apart:.2f} standard deviations"
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


# --- what the models' plans use --------------------------------------------------------------------------------------


def model_names() -> list[str]:
    """Published sizes of specs/models."""
    return sorted(path.stem for path in (SPECS / "models").glob("*.toml"))


def open_model(name: str) -> Checkpoint:
    """A file, or a published size with random weights and its first layers, which have every kind."""
    from hybrid.checkpoint import open_checkpoint
    from hybrid.checkpoint.random import random_checkpoint

    return random_checkpoint(name, layers=LAYERS) if name in model_names() else open_checkpoint(name)


def plans_of(checkpoint: Checkpoint, device: VulkanDevice) -> Iterator[Plan]:
    """The plans of requests with the default options, and of every sampling option."""
    from hybrid.engine.loading import EngineConfig, fitted, sizes_for, target_for
    from hybrid.engine.runner import warm_programs
    from hybrid.planning.planner import plan
    from hybrid.spec.schedule import find_schedule
    from hybrid.spec.step import OPTIONS

    schedule = find_schedule(checkpoint.hparams.family)
    config, _ = fitted(EngineConfig(slots=1, shared=True, drafts=2), checkpoint, device, schedule)
    sizes = sizes_for(config, checkpoint.hparams, device)
    target = target_for(config, checkpoint, device, schedule, sizes)
    for phase, rows, outs, options in warm_programs(sizes):
        yield plan(target, rows, outs, phase, options=options)
    for rows in sizes.decode[:1]:
        yield plan(target, rows, rows, "decode", options=[o for o in OPTIONS if o != "verify"])


@dataclass(slots=True)
class Wanted:
    """kernels: those that plans select, with the operation whose step does. types: dtypes of each operation's tensors."""

    kernels: dict[str, str] = field(default_factory=dict)
    types: dict[str, dict[Types, None]] = field(default_factory=dict)

    def add(self, plan: Plan, dry: DryDevice) -> None:
        from hybrid.kernels.vulkan.dry import record

        for step in plan.steps:
            found = tuple((arg, plan.tensors[name].dtype) for arg, name in step.args.items())
            self.types.setdefault(step.op, {})[found] = None
        for d in record(plan, dry).dispatches:
            self.kernels.setdefault(d.kernel.name, plan.steps[d.step].op)


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
    from hybrid.harness.fixed import variant_cases
    from hybrid.harness.tuned import asking, uses
    from hybrid.kernels.vulkan.tuning import space
    from hybrid.spec import load_ops

    left, specs = set(wanted.kernels), load_ops()
    for op, types in wanted.types.items():
        if not specs[op].runs_on("vulkan"):
            continue
        choices = [_choice(specs[op], dict(found)) for found in types]
        known = tuple(c for c in choices if c is not None)
        for case in _cases(specs[op], known):
            trial = _trial(specs[op], case, dry)
            if trial and (trial.selects <= wanted.kernels.keys() or trial.selects & left):
                left -= trial.selects
                yield trial
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
        for _, case in variant_cases(spec, "vulkan") if left and spec.runs_on("vulkan") else ():
            trial = _trial(spec, case, dry)
            if trial and trial.selects & left:
                left -= trial.selects
                yield trial


def _choice(spec: OpSpec, dtypes: Mapping[str, str]) -> Mapping[str, str] | None:
    """The operation's combination of types that a step has."""
    return next((c for c in spec.dtype_choices("vulkan") if all(dtypes.get(n, t) == t for n, t in c.items())), None)


def _cases(spec: OpSpec, choices: tuple[Mapping[str, str], ...]) -> Iterator[Case]:
    """Small cases: a few of each combination of types, the edge cases, and the variants with these types."""
    from hybrid.harness.fixed import dtype_cases, edge_cases, variant_cases

    for chosen in choices:
        yield from dtype_cases(spec, chosen)
    if choices:
        yield from (case for _, case in edge_cases(spec, "vulkan", choices))
        yield from (case for _, case in variant_cases(spec, "vulkan") if case.dtypes in choices)


def _trial(spec: OpSpec, case: Case, dry: DryDevice) -> Trial | None:
    """None where the device does not run the case."""
    from hybrid.harness.sizes import fits
    from hybrid.harness.tuned import plan_for
    from hybrid.kernels.vulkan.dry import record

    if not fits(spec, "vulkan", case.bind, case.attrs, case.dtypes):
        return None
    return Trial(case, frozenset(d.kernel.name for d in record(plan_for(spec, case), dry).dispatches))


# --- running them ----------------------------------------------------------------------------------------------------


def prove(opened: Callable[..., VulkanDevice], models: Sequence[str]) -> Report:
    """Prove a device. opened: opens it, with options of VulkanDevice. models: .gguf files, Hugging Face directories, and
    names of specs/models, whose plans are proved in q4_0 without weights. Raises VulkanLost where the device does not
    survive a kernel."""
    from hybrid.devices.about import driver_of, kernels_of
    from hybrid.harness import GUARD
    from hybrid.kernels.vulkan.dry import DryDevice

    begin, wanted, device = time.monotonic(), Wanted(), opened(guard=GUARD)
    try:
        report = Report(device.info.name, driver_of(device), kernels_of(device) or "", [Path(m).name for m in models])
        dry = DryDevice.like(device.report)
        with progress_bar(len(models), "plans", False, "models", after=1.0) as advance:
            for name in models:
                with open_model(name) as checkpoint:
                    for plan in plans_of(checkpoint, device):
                        wanted.add(plan, dry)
                advance(1)
        proofs = {name: Proof(name, op) for name, op in wanted.kernels.items()}
        some = list(trials(wanted, dry))
        with progress_bar(len(some), "kernels", False, "cases", after=1.0) as advance:
            for trial in some:
                _run(trial, device, proofs)
                advance(1)
    finally:
        device.close()
    report.proofs = sorted(proofs.values(), key=lambda p: (p.operation, p.kernel))
    for path in (Path(m) for m in models if m not in model_names()):
        with open_model(str(path)) as checkpoint:
            size = sum(DTYPES[e.dtype].nbytes(e.shape) for e in checkpoint.entries.values())
        for weights in (None, "q4_0") if size <= ON_CPU else ():  # the published sizes' type
            if weights is None or any(weights in name for name in report.unproved):
                text, used = _compare(path, opened, weights)
                report.texts.append(text)
                for kernel in used & proofs.keys():
                    proofs[kernel].cases += 1
    report.seconds = time.monotonic() - begin
    report.wrong = [p.kernel for p in report.proofs if p.error] + [t.model for t in report.texts if t.error]
    return report


ROUTES: tuple[dict[str, Any], ...] = (
    {"without": ["matrix_lanes"]},
    {"without": ["f16_matrices"]},
    {"tuning": "default"},
    {"tuning": "default", "without": ["f16_matrices"]},
)
"""Options of VulkanDevice that select other kernels: without matrix units' register layout, without matrix units, without
tuned tiles and fused groups."""


def routed(opened: Callable[..., VulkanDevice], models: Sequence[str]) -> Report:
    """Prove a device; where kernels are wrong, find options that avoid them, and with which all others are proved."""
    report = prove(opened, models)
    if report.wrong:
        report.options = None
        for options in ROUTES:
            other = prove(lambda **more: opened(**more, **options), models)  # noqa: B023
            if not other.wrong:
                report.options = options
                break
    return report


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


def _compare(path: Path, opened: Callable[..., VulkanDevice], weights: str | None) -> tuple[Text, frozenset[str]]:
    """How a model's logits and text differ from those of cpu, and the kernels that it used."""
    import numpy as np

    import hybrid
    from hybrid.devices.opening import Opened

    device = opened()
    with hybrid.load(path, Opened(device, device), ctx=CONTEXT, weights=weights) as model:
        tokenizer = model.checkpoint.tokenizer
        drawn = np.random.default_rng(0).integers(0, tokenizer.n_tokens, PROMPT - 1).tolist()
        ids = [tokenizer.bos_id or 0, *drawn]
        ours = model.logits(ids)
        text = model.submit(ids, max_tokens=TEXT, ignore_eos=True).result().ids
        used = frozenset(d.kernel.name for p in device.programs for d in p.recording.dispatches)
        faults = "; ".join(model.engine.faults)
    with hybrid.load(path, "cpu", ctx=CONTEXT, weights=weights) as model:
        theirs = model.logits([*ids, *text])
    spread = theirs.std(-1)
    apart = np.sqrt(np.square(ours - theirs[: len(ids)]).mean(-1)) / spread[: len(ids)]
    chosen = theirs[len(ids) - 1 : -1]
    leads = (chosen.max(-1) - np.take_along_axis(chosen, np.array(text)[:, None], -1)[:, 0]) / spread[len(ids) - 1 : -1]
    name = path.name + (f" as {weights}" if weights else "")
    return Text(
        name, float(np.nan_to_num(apart, nan=np.inf).max()), float(np.nan_to_num(leads, nan=np.inf).max()), faults
    ), used


# --- the command -----------------------------------------------------------------------------------------------------


def table(report: Report) -> Iterator[str]:
    """Report lines."""
    wide = max(len(p.kernel) for p in report.proofs)
    yield f"{report.device}, {report.driver}, kernels {report.kernels}"
    yield f"{'kernel':{wide}}  {'operation':20} {'cases':>5} {'worst/bound':>11}  verdict"
    for p in report.proofs:
        yield f"{p.kernel:{wide}}  {p.operation:20} {p.cases:5} {p.worst:11.2f}  {p.verdict}"
    for t in report.texts:
        yield f"{t.model}: logits within {t.apart:.3f}, text within {t.lead:.3f} of cpu: {t.error or 'agrees'}"
    yield f"{report.sentence} ({report.seconds:.0f} s)"


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m hybrid.prove", description="Prove this machine's Vulkan device against the oracle.")
    made.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face directory or a published size such as gemma3-27b (the embedded models and all "
        "published sizes)",
    )
    made.add_argument("--device", default="auto", metavar="NAME", help="auto, vulkan or vulkan:N (auto)")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    made.add_argument("--output", type=Path, metavar="FILE", help="where to write the report (the user's cache)")
    return made


def main(argv: list[str] | None = None) -> int:
    """0: proved; 1: a kernel or a text is wrong."""
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    from hybrid.devices.proofs import report_path
    from hybrid.kernels.vulkan.device import open_device

    models = args.models or [*(str(m) for m in sorted(MODELS.glob("*.gguf"))), *model_names()]
    report = routed(lambda **options: open_device(args.device, **options), models)
    text = json.dumps(asdict(report), indent=1)
    path = args.output or report_path(report.device, report.driver, report.kernels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text if args.json else "\n".join([*table(report), f"report: {path}"]))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
