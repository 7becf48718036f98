"""Make a plan from a schedule and a checkpoint: type-check every edge and place activations in the arena."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hybrid.core.dtypes import DTYPES, CacheChoice
from hybrid.core.errors import SpecError, nearest
from hybrid.core.hparams import HParams
from hybrid.core.plan import CONTROL_WORDS, FEW_ROWS, INBOX_SETS, TARGET_EMBEDDING, Plan, Step, TensorDecl
from hybrid.planning.arena import Life, place
from hybrid.planning.cache import CacheShape
from hybrid.planning.expand import Names, UnboundStep, WeightInfo, choices, declared, expand, fused, housed
from hybrid.planning.kept import KEPT
from hybrid.spec.op import OpSpec, load_op, op_names
from hybrid.spec.schedule import Phase, Profile, Schedule
from hybrid.spec.step import Option, StepSpec

PrecisionName = Literal["auto", "exact", "fast"]
_VALUES = (
    "hparams",
    "cache",
    "n_tokens",
    "precision",
    "kv",
    "device",
    "capabilities",
    "few_rows",
)  # of a target, to compare by


@dataclass(frozen=True, slots=True)
class Target:
    """Inputs that all plans of an engine share. `weights`: the checkpoint's tensors with their types on the device."""

    schedule: Schedule
    hparams: HParams
    weights: Mapping[str, WeightInfo]
    cache: CacheShape
    n_tokens: int
    """Ids that may be sampled: the tokenizer's size, at most the vocabulary's rows."""
    precision: PrecisionName = "auto"
    kv: CacheChoice = "auto"
    device: str = "cpu"  # the backend of the schedule's device `main`
    capabilities: frozenset[str] = frozenset()
    """The device's features that select precisions (hybrid.planning.passes.capabilities_of)."""
    few_rows: int = FEW_ROWS  # Device.few_rows

    def profile(self, weight_dtype: str) -> Profile:
        """Dtypes of matrix inputs and the KV cache for weights of this type."""
        quantised = DTYPES[weight_dtype].quantised
        beside = not quantised and any(DTYPES[w.dtype].quantised for w in self.weights.values())
        profile = self.schedule.precision[self.precision].of(quantised, beside)
        return profile if self.kv == "auto" else profile.model_copy(update={"kv": self.kv})


def plan(
    target: Target,
    rows: int,
    outs: int,
    phase: Phase,
    capture: bool = False,
    sample: bool = True,
    layout: Plan | None = None,
    options: Collection[Option] = (),
) -> Plan:
    """The plan of one pass over at most `rows` rows, with logits for at most `outs` of them (0: none).

    sample=False leaves the logits in the io tensor `logits` f32 [outs, vocab], and the experts of a mixture's layer l in
    `chosen.{l}` i32 [rows, experts_used]; capture=True instead leaves the residual stream in the io tensors `hidden.0` ..
    `hidden.{layers}` f32 [rows, hidden].
    options: include steps of the schedule with these options (`option`); requires sampling.
    layout: a plan of the same phase for at least as many rows whose offsets are reused, so that both fit in one arena
    (placed on its own, a smaller plan may need more).
    Raises SpecError for an edge whose shape or dtype does not fit; the line names step, tensor and both sides.
    """
    if options and not sample:
        raise ValueError(f"options {sorted(options)} belong to sampling passes: make the plan with sample=True")
    asked = (target, rows, outs, phase, capture, sample, frozenset(options))
    values = (*(getattr(target, f) for f in _VALUES), tuple(target.weights.items()), *asked[1:])
    return KEPT.get(values, (target.schedule, layout), lambda: _plan(_Planner(*asked), layout))


def _plan(made: _Planner, layout: Plan | None) -> Plan:
    picks = any(d.spec.alias and d.spec.extent == "wanted" for d in made.unbound_steps)
    if (
        layout is not None and made.capture and picks
    ):  # without the row-picking steps, their inputs live longer than in the layout
        layout = _Planner(made.target, layout.rows, made.outs, made.phase, True, made.sample, frozenset()).plan(None)
    return made.plan(layout)


class _Planner:
    def __init__(
        self,
        target: Target,
        rows: int,
        outs: int,
        phase: Phase,
        capture: bool,
        sample: bool,
        options: frozenset[Option],
    ) -> None:
        self.target, self.rows, self.outs, self.phase = target, rows, outs, phase
        self.capture, self.sample, self.options = capture, sample, options
        cache = target.cache
        sizes = {
            "T": rows,
            "O": max(outs, 1),
            "S": cache.slots,
            "C": cache.ctx,
            "BS": cache.block,
            "MB": cache.table,
            "inbox": INBOX_SETS * cache.message,
            "inbox_sets": INBOX_SETS,
            "local_blocks": cache.local_blocks,
            "global_blocks": cache.global_blocks,
            "n_tokens": target.n_tokens,
        }
        self.names = Names(target.schedule, target.hparams, sizes)
        self.unbound_steps = expand(self.names, phase)
        self.choice = choices(self.names, target.weights)
        self.fused = fused(self.names, target.weights)
        self.declared = declared(self.names, self.unbound_steps)
        self.tensors: dict[str, TensorDecl] = {
            "control": TensorDecl("control", "u32", (CONTROL_WORDS,), "io", per_pass=True)
        }
        self.lives: dict[str, tuple[int, int]] = {}
        self.reserved: dict[str, int] = {}

    def plan(self, layout: Plan | None) -> Plan:
        edges = self._aliased([(d, self._args(d)) for d in self.unbound_steps])
        wanted = self._wanted_dtypes(edges)  # includes steps that this plan omits, so that all buckets agree
        edges = [e for e in edges if self._included(e[0])]
        steps = [self._step(i, unbound, args, wanted) for i, (unbound, args) in enumerate(edges)]
        self._outlive(edges)
        steps = self._share(steps)
        size = self._place() if layout is None else self._place_as(layout)
        t = self.target
        name = f"{t.schedule.schedule.name}.{self.phase}.r{self.rows}.o{self.outs}"
        name += ".hidden" * self.capture + ".logits" * (bool(self.outs) and not self.sample)
        name += "".join(f".{option}" for option in sorted(self.options))
        return Plan(
            name, self.rows, self.outs, tuple(steps), self.tensors, size, reserved=self.reserved, phase=self.phase
        )

    def _included(self, unbound: UnboundStep) -> bool:
        if self._extent(unbound) == "outs" and self.outs == 0:
            return False
        return self.sample or unbound.spec.op != "sample"

    @property
    def _every_row(self) -> bool:
        """Whether all rows are output rows, so that row-picking steps are omitted. In decode each row gets a token."""
        return self.phase == "decode" or self.capture

    def _extent(self, unbound: UnboundStep) -> str:
        if unbound.extent == "wanted":
            return "rows" if self._every_row else "outs"
        return "rows" if unbound.extent == "rows" else "outs"

    def _left_out(self, spec: StepSpec, args: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
        """Whether to omit a step: its option is off, it picks rows and all rows are output rows, or it converts a dtype
        and its readers accept the input's dtype."""
        if spec.option is not None:
            return spec.option not in self.options
        if spec.extent == "wanted":
            return bool(spec.alias or spec.same) and self._every_row
        return bool(spec.alias) and all(wanted.get(args[y]) == wanted.get(args[x]) for y, x in spec.alias.items())

    def _aliased(self, edges: list[tuple[UnboundStep, dict[str, str]]]) -> list[tuple[UnboundStep, dict[str, str]]]:
        """Remove omitted steps; readers of their results get their inputs (`alias`)."""
        new: dict[str, str] = {}
        kept, wanted = [], self._wanted_dtypes(edges)
        for unbound, args in edges:
            own = {key: new.get(name, name) for key, name in args.items()}
            op = load_op(unbound.spec.op)
            for result, given in unbound.spec.alias.items():
                if result not in op.outputs or given not in op.inputs:
                    raise self._error(unbound, f"alias: {op.name} has no result {result} or no input {given}")
            if unknown := unbound.same.keys() - op.outputs.keys():
                raise self._error(unbound, f"same: {op.name} has no result {min(unknown)}")
            if not self._left_out(unbound.spec, args, wanted):
                kept.append((unbound, own))
                continue
            new |= {args[result]: new.get(name, name) for result, name in unbound.same.items()}
            new |= {args[result]: own[given] for result, given in unbound.spec.alias.items()}
        return kept

    def _args(self, unbound: UnboundStep) -> dict[str, str]:
        """Every tensor of the operation -> tensor of the plan; the default is its own name."""
        if unbound.spec.op not in op_names():
            raise self._error(unbound, f"unknown operation {unbound.spec.op!r}{nearest(unbound.spec.op, op_names())}")
        op = load_op(unbound.spec.op)
        for kind, written, known in (
            ("args", unbound.args, op.tensors),
            ("act", unbound.spec.act, {**op.inputs, **op.scratch}),
            ("attrs", unbound.spec.attrs, op.attributes),
        ):
            if unknown := set(written) - set(known):
                key = min(unknown)
                raise self._error(unbound, f"{kind}.{key}: {op.name} has no such name{nearest(key, known)}")
        args = {}
        for key in op.tensors:
            name = unbound.args.get(key, key)
            args[key] = self._read_back(self.choice.get(name, name))
        return args

    def _read_back(self, name: str) -> str:
        """The name of a tensor for the host: of the residual stream, or of chosen experts."""
        (stem, _, index), head = name.rpartition("."), self.target.schedule.schedule
        if self.capture:
            return f"hidden.{index}" if stem == head.residual else name
        return f"chosen.{index}" if not self.sample and stem == head.experts else name

    # ------------------------------------------------------------------------------------------------------- dtypes
    def _weight(self, name: str) -> WeightInfo | None:
        return self.fused[name][0] if name in self.fused else self.target.weights.get(name)

    def _act(self, unbound: UnboundStep, args: Mapping[str, str], key: str) -> str | None:
        """The dtype of a matrix input by the schedule's `act`, or None."""
        text = unbound.spec.act.get(key)
        if text is None or not text.startswith("auto:"):
            return text
        arg = text.removeprefix("auto:")
        info = self._weight(args.get(arg, ""))
        if info is None:
            shown = args.get(arg, "no argument of this step")
            raise self._error(unbound, f"act.{key} = {text!r}: {arg} is {shown}, not a weight of the checkpoint")
        return self.target.profile(info.dtype).act_in(
            self.phase, self.rows, self.target.capabilities, self.target.few_rows
        )

    def _wanted_dtypes(self, edges: list[tuple[UnboundStep, dict[str, str]]]) -> dict[str, str]:
        """Activation -> the dtype that its readers require. Raises SpecError if two readers differ."""
        wanted: dict[str, tuple[str, UnboundStep]] = {}
        for unbound, args in edges:
            op = load_op(unbound.spec.op)
            for key in (*op.inputs, *op.scratch):
                dtype = self._act(unbound, args, key)
                options = op.tensors[op.tensors[key].same or key].dtype
                if dtype is None and len(options) == 1:
                    dtype = options[0]
                if dtype is None:
                    continue
                if dtype not in options:
                    raise self._error(unbound, f"{key} cannot be {dtype}: {op.name} takes {', '.join(options)}")
                other, first = wanted.setdefault(args[key], (dtype, unbound))
                if other != dtype:
                    raise self._error(
                        unbound,
                        f"reads {args[key]} as {dtype}, but {first.name} reads it as {other}: give both the same act",
                    )
        return {name: dtype for name, (dtype, _) in wanted.items()}

    # -------------------------------------------------------------------------------------------------------- steps
    def _step(self, index: int, unbound: UnboundStep, args: dict[str, str], wanted: Mapping[str, str]) -> Step:
        op = load_op(unbound.spec.op)
        made = {**op.outputs, **op.scratch}
        shapes = {k: self._read(index, unbound, k, n).shape for k, n in args.items() if k not in made}
        shapes |= {k: self._outlasting(n).shape for k, n in args.items() if k in made and n in self.declared}
        counts, word = self._counts(index, unbound)
        try:
            bind, bound = self._solved(op, shapes, self._axes(unbound, op))
            for key, shape in bound.items():
                if key in made:
                    self._write(index, unbound, key, args[key], shape, wanted)
            attrs = {
                k: self.names.number(e, unbound.layer, f"{unbound.name}.attrs.{k}")
                for k, e in unbound.spec.attrs.items()
            }
            attrs = {k: float(v) if op.attributes[k].type == "float" else v for k, v in attrs.items()}
            step = Step(
                op.name,
                unbound.name,
                bind,
                args,
                op.attrs(bind, attrs),
                self._device(unbound),
                word,
                unbound.layer,
                counts,
            )
            for name in args.values() if unbound.spec.spill else ():
                if self.tensors[name].kind == "weight":
                    self.tensors[name] = replace(self.tensors[name], pool="any")
            self._check(op, step, {k: self.tensors[n] for k, n in args.items()})
        except SpecError as e:
            raise self._error(unbound, str(e)) from None
        return step

    def _counts(self, index: int, unbound: UnboundStep) -> tuple[str, str]:
        """(tensor of a step's live count, word in it); an empty name is the plan's control tensor."""
        if unbound.spec.live is None:
            return "", self._extent(unbound)
        name, _, word = self.names.fill(unbound.spec.live, unbound.layer).rpartition(":")
        if not word.isdigit() or not name:
            raise self._error(unbound, f"live = {unbound.spec.live!r}: write TENSOR:WORD")
        decl = self._read(index, unbound, "live", name)
        if decl.dtype != "u32" or int(word) >= min(decl.shape[-1], 255):
            raise self._error(
                unbound, f"live: {name} is {decl.dtype} {list(decl.shape)}; word {word} of a u32 vector is needed"
            )
        return name, word

    def _solved(
        self, op: OpSpec, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Axes of an operation, and the shape of every tensor. Memoised, since layers and plans repeat."""

        def solved() -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
            bind = op.solve(shapes, axes)
            return bind, {n: shapes[n] if n in shapes else op.shape(n, bind) for n in op.tensors}

        return op.once(("solved", *shapes.items(), *axes.items()), solved)

    def _check(self, op: OpSpec, step: Step, tensors: Mapping[str, TensorDecl]) -> None:
        """Check that the step's device supports its axes, attributes and dtypes, including those of each run of rows.
        Raises SpecError."""
        backend = step.device.partition(":")[0]

        def checked() -> bool:
            dtypes = {k: d.dtype for k, d in tensors.items()}
            op.check(step.bind, step.attrs, dtypes, backend)
            for name, decl in tensors.items():
                for dtype in decl.dtypes:
                    if dtype != decl.dtype:
                        op.check_dtypes({**dtypes, name: dtype}, backend)
            return True

        found = ((k, d.dtype, d.dtypes) for k, d in tensors.items())
        op.once((backend, *step.bind.items(), *step.attrs.items(), *found), checked)

    def _axes(self, unbound: UnboundStep, op: OpSpec) -> dict[str, int]:
        """Axes of the operation that the schedule's [axes] or the step fixes; shapes must agree with them."""
        axes = {k: v for k, v in self.names.axes(unbound.layer).items() if k in op.axes}
        return axes | {
            k: int(self.names.number(e, unbound.layer, f"{unbound.name}.axes.{k}"))
            for k, e in unbound.spec.axes.items()
        }

    def _device(self, unbound: UnboundStep) -> str:
        return self.target.device if unbound.spec.device == "main" else unbound.spec.device

    def _read(self, index: int, unbound: UnboundStep, key: str, name: str) -> TensorDecl:
        """Resolve an input: a tensor written by an earlier step, declared in [tensors], or of the checkpoint."""
        if name in self.tensors:
            if name in self.lives:
                self.lives[name] = (self.lives[name][0], index)
        elif name in self.declared:
            self._outlasting(name)
        elif name in self.fused:
            info, sources = self.fused[name]
            self.tensors[name] = TensorDecl(
                name, info.dtype, info.shape, "weight", sources=sources, row_types=info.row_types
            )
        elif name in self.target.weights:
            info = self.target.weights[name]
            self.tensors[name] = TensorDecl(name, info.dtype, info.shape, "weight")
        elif name == TARGET_EMBEDDING:  # planned without the target: of the type of the drafter's own
            hp, info = self.target.hparams, self.target.weights["token_embd.weight"]
            self.tensors[name] = TensorDecl(name, info.dtype, (hp.vocab, hp.backbone), "weight")
        else:
            known = [*self.tensors, *self.declared, *self.fused, *self.target.weights]
            raise self._error(
                unbound,
                f"{key} reads {name}, which no step has written and the checkpoint does not have{nearest(name, known)}",
            )
        return self.tensors[name]

    def _outlasting(self, name: str) -> TensorDecl:
        """A tensor of [tensors], declared at its first use."""
        if name not in self.tensors:
            decl, layer, text = self.declared[name]
            dtype = decl.dtype
            if dtype.startswith("kv:"):
                weight = self.names.fill(dtype.removeprefix("kv:"), layer)
                info = self._weight(weight)
                if info is None:
                    raise self.names.error(f"tensors.{text}.dtype", f"no weight {weight}")
                dtype = self.target.profile(info.dtype).kv
            shape, role = self.names.shape(decl, layer, text), decl.role or ""
            rows = decl.kind != "state" and bool({"T", "O"} & {n for e in decl.shape for n in e.names})
            self.tensors[name] = TensorDecl(
                name, dtype, shape, decl.kind, role=role, layer=layer if role else None, per_pass=rows
            )
        return self.tensors[name]

    def _write(
        self, index: int, unbound: UnboundStep, key: str, name: str, shape: tuple[int, ...], wanted: Mapping[str, str]
    ) -> None:
        """Declare a result; its dtype is the one that its readers require."""
        if name in self.declared:
            return  # op.solve has checked its shape
        if name in self.tensors:
            raise self._error(unbound, f"{key} writes {name}, which is written before or is a weight: use a new name")
        spec = load_op(unbound.spec.op).tensors[key]
        options = spec.dtype
        dtype = wanted.get(name, options[0])
        if dtype not in options:
            raise self._error(
                unbound,
                f"{key} is {' or '.join(options)}, but {name} is read as {dtype}: "
                "put a quantize_act step between them or change the reader's act",
            )
        host = name.startswith(("hidden.", "chosen.")) or (unbound.extent == "outs" and not self.sample)
        self.tensors[name] = TensorDecl(name, dtype, shape, "io" if host else "activation", per_pass=True)
        if not host:
            self.lives[name] = (index, index)
        if unbound.extent == "wanted" and self._extent(unbound) == "outs":
            every = (self.rows, *shape[1:]) if shape[0] == max(self.outs, 1) else shape
            self.reserved[name] = replace(self.tensors[name], shape=every).nbytes

    def _share(self, steps: list[Step]) -> list[Step]:
        """Turn activations that a second device uses into io tensors outside the arenas. Ones of equal shape and dtype
        with disjoint lifetimes share one tensor, under the name of the first and its dtype, which phases may differ in."""
        users: dict[str, set[str]] = {}
        for step in steps:
            for name in (*step.args.values(), *filter(None, [step.counts])):
                users.setdefault(name, set()).add(step.device)
        taken: dict[
            tuple[str, tuple[int, ...]], dict[str, int]
        ] = {}  # dtype and shape -> tensor: the last step that uses it
        found: dict[str, str] = {}
        away = (n for n in self.lives if users[n] - {self.target.device})
        for name in sorted(away, key=lambda n: self.lives[n]):
            (first, last), decl = self.lives.pop(name), self.tensors.pop(name)
            pool = taken.setdefault((decl.dtype, decl.shape), {})
            found[name] = next(
                (n for n, end in pool.items() if end < first), name if decl.dtype == "f32" else f"{name}.{decl.dtype}"
            )
            pool[found[name]] = last
            self.tensors[found[name]] = replace(decl, name=found[name], kind="io")
        self.tensors |= housed(self.tensors, users, self.target.schedule, self.target.device)
        if not found:
            return steps
        moved = ((s, {k: found.get(n, n) for k, n in s.args.items()}) for s in steps)
        return [replace(s, args=args, counts=found.get(s.counts, s.counts)) for s, args in moved]

    def _outlive(self, edges: list[tuple[UnboundStep, dict[str, str]]]) -> None:
        """Extend the lifetime of each alias's source to that of the result. Plans with and without the step then have
        the same layout."""
        for unbound, args in edges:
            for result, given in unbound.spec.alias.items() if unbound.spec.extent != "wanted" else ():
                if {args[result], args[given]} <= self.lives.keys():
                    first, last = self.lives[args[given]]
                    self.lives[args[given]] = (first, max(last, self.lives[args[result]][1]))

    def _reserved_bytes(self, name: str) -> int:
        """Bytes reserved for an activation: enough for all rows, even if it holds output rows only. Passes that read
        back hidden states or many rows' logits have the same layout."""
        return self.reserved.get(name, self.tensors[name].nbytes)

    def _place(self) -> int:
        """Place all activations; returns the arena's bytes. In decode an input lives one step longer: in a fused group
        some workgroups may still read it while others write the next step's results."""
        lives = [Life(n, self._reserved_bytes(n), a, b + (self.phase == "decode")) for n, (a, b) in self.lives.items()]
        offsets, size = place(lives)
        self.tensors |= {name: replace(self.tensors[name], offset=offset) for name, offset in offsets.items()}
        return size

    def _place_as(self, layout: Plan) -> int:
        """Use the offsets of a larger plan of the same steps: its tensors have the same lifetimes and are at least as
        large. Returns the arena's bytes."""
        for name in self.lives:
            own, other = self.tensors[name], layout.tensors.get(name)
            nbytes = 0 if other is None else layout.reserved.get(name, other.nbytes)
            if other is None or other.kind != "activation" or nbytes < self._reserved_bytes(name):
                raise ValueError(f"plan {layout.name} has too few bytes for {name} {own.dtype} {list(own.shape)}")
            self.tensors[name] = replace(own, offset=other.offset)
        return layout.arena_bytes

    def _error(self, unbound: UnboundStep, text: str) -> SpecError:
        return SpecError(f"schedule {self.target.schedule.schedule.name}: step {unbound.name}: {text}")
