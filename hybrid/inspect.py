"""python -m hybrid.inspect FILE|NAME: contents of a checkpoint, and the devices that it fits on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli import CACHES, PRECISIONS, Parser, UsageError, positive, run, size
from hybrid.cli.progress import progress_bar
from hybrid.core.names import LAYER, layer_of, part_of
from hybrid.core.units import show_bytes
from hybrid.devices.memories import UNITS, alike, asked_of, memories

if TYPE_CHECKING:
    from hybrid.core.plan import Plan
    from hybrid.spec.schedule import Schedule

_NEEDS = {
    "weights": ("weights",),
    "KV, global layers": ("kv_global",),
    "KV, local layers": ("kv_local",),
    "activations": ("scratch",),
    "kernels' scratch": ("beside",),
    "tables and state": ("tables", "state", "io"),
    "total": ("total",),
}
_FORMS = {"own": "are dequantised at every use", "file": "are read from the file at every use"}
"""Descriptions of a cpu device's slow forms of a matrix (kernels/host/device.py:held_as)."""


def parser() -> argparse.ArgumentParser:
    from hybrid.convert.__main__ import add_types

    p = Parser(
        prog="python -m hybrid.inspect",
        description="Hyper-parameters, tokenizer, tensors and types of a checkpoint, and its memory needs on devices. "
        "Reads headers only and allocates nothing.",
    )
    p.add_argument(
        "model",
        nargs="?",
        metavar="FILE|NAME",
        help="file, directory, OWNER/NAME[:FILE.gguf] on Hugging Face, or a name such as gemma3-27b",
    )
    p.add_argument(
        "--find", action="store_true", help="instead: list local models of Hugging Face's cache, Ollama, GGUF files"
    )
    p.add_argument("--tensors", action="store_true", help="every tensor, not one line for each kind")
    p.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences at a time (1)")
    p.add_argument("--context", type=int, metavar="N", help="positions of each sequence (the model's, at most 4096)")
    p.add_argument("--memory", type=size, metavar="SIZE", help="also compare with this much memory, such as 16GiB")
    p.add_argument(
        "--schedule", metavar="NAME", help="a shipped schedule such as gemma3-hybrid, or a file (the family's)"
    )
    p.add_argument(
        "--precision", default="auto", choices=PRECISIONS, metavar="NAME", help=f"{', '.join(PRECISIONS)} (auto)"
    )
    p.add_argument(
        "--kv", default="auto", choices=CACHES, metavar="TYPE", help=f"type of the KV cache: {', '.join(CACHES)} (auto)"
    )
    add_types(p, default=" (the default; a NAME is stored in bf16)")
    p.add_argument(
        "--check-finite",
        action="store_true",
        help="instead: read every tensor and name those that hold NaN or infinity; exit code 1 where one does",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    if args.find == (args.model is not None):
        raise UsageError("name a FILE or a NAME, or give --find: one of the two")
    if args.find:
        return _find(args.json)
    if args.check_finite:
        return _check_finite(args)
    report = inspect(args)
    print(json.dumps(report) if args.json else text(report, args.tensors))
    return 0


def _check_finite(args: argparse.Namespace) -> int:
    from hybrid.checkpoint import open_checkpoint
    from hybrid.checkpoint.finite import damaged
    from hybrid.core.dtypes import DTYPES

    with open_checkpoint(args.model) as c:
        tensors, total = len(c.names), sum(DTYPES[c.dtype(n)].nbytes(c.shape(n)) for n in c.names)
        with progress_bar(total, Path(args.model).name, False, unit="B") as update:
            wrong = list(damaged(c, update))
    if args.json:
        print(json.dumps({"ok": not wrong, "tensors": tensors, "bytes": total, "wrong": wrong}))
    elif not wrong:
        print(f"{args.model}: {tensors} tensors, {total / 1e6:.1f} MB: every number is finite")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _find(as_json: bool) -> int:
    from hybrid.checkpoint.find import ADVICE, find_models, places
    from hybrid.checkpoint.open import problem

    found = find_models(problem)
    if as_json:
        print(json.dumps([f.as_dict() for f in found]))
        return 0
    for f in found:
        print(
            f"{f.kind:13} {f.name}, {show_bytes(f.bytes)}" + (f": cannot be loaded: {f.problem}" if f.problem else "")
        )
        print(f"    {f.path}")
    if not found:
        print(f"no model was found in {', '.join(map(str, places()))}; {ADVICE}")
    return 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint's headers, or a model sheet."""

    head: dict[str, Any]
    hparams: Any
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Stored type and shape by name."""
    tokenizer: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def inspect(args: argparse.Namespace) -> dict[str, Any]:
    """The report as plain data. ValueError for unreadable files and invalid plans."""
    from hybrid.convert.__main__ import wanted
    from hybrid.convert.kinds import SAME, plan_types
    from hybrid.core.dtypes import DTYPES
    from hybrid.kernels.host.device import weight_bytes
    from hybrid.kernels.vulkan.dry import scratch_bytes
    from hybrid.planning.cache import DEFAULT_CTX, MAX_SLOTS, MOST_ROWS
    from hybrid.planning.expand import WeightInfo
    from hybrid.planning.footprint import footprint, laid_out_again
    from hybrid.quant.native import native
    from hybrid.spec.schedule import find_schedule, named_schedule

    subject = _subject(args.model)
    args.type = args.type or SAME
    types = plan_types(subject.tensors, wanted(args), writing=False)
    shapes = {name: shape for name, (_, shape) in subject.tensors.items()}
    table: list[dict[str, Any]] = [
        {"name": n, "type": k, "shape": list(shapes[n]), "bytes": DTYPES[k].nbytes(shapes[n])}
        for n, k in types.kinds.items()
    ]
    by_type: dict[str, int] = {}
    for row in table:
        by_type[row["type"]] = by_type.get(row["type"], 0) + row["bytes"]
    hp = subject.hparams
    if not 1 <= args.batch <= MAX_SLOTS:
        raise UsageError(f"--batch {args.batch} is outside 1..{MAX_SLOTS}, the sequences that run at once")
    context = min(hp.context_length, DEFAULT_CTX) if args.context is None else args.context
    if hp.dimensions and context > MOST_ROWS:
        raise ValueError(f"--context {context}: a text runs in one pass, which has at most {MOST_ROWS} rows")
    schedule = find_schedule(hp.family) if args.schedule is None else named_schedule(args.schedule)
    devices = memories(args.memory)
    asked = asked_of(devices)
    sizes = {"batch": args.batch, "context": context, "precision": args.precision, "kv": args.kv}

    def needs_of(schedule: Schedule, asked: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        needs: dict[str, dict[str, int]] = {}
        for (storage, capabilities), group in alike(asked).items():
            infos = {
                n: WeightInfo(native(k, storage) if len(shapes[n]) > 1 else k, shapes[n])
                for n, k in types.kinds.items()
            }
            plans: list[Plan] = []

            def noted(plan: Plan, plans: list[Plan] = plans) -> int:
                plans.append(plan)
                return 0

            held = footprint(
                hp, infos, **sizes, schedule=schedule, device=storage, capabilities=capabilities, beside=noted
            )
            if storage == "cpu":
                memory = devices[-1].bytes
                made, forms = weight_bytes(plans, infos, memory - (held.total - held.weights), memory // 2)
                needs |= dict.fromkeys(group, replace(held, weights=made, spill=0).as_dict() | forms)
                continue
            for name, dry in group.items():
                weights = held.weights + laid_out_again(hp, infos, dry.second_layout)
                scratch = max(scratch_bytes(plan, dry) for plan in plans)
                needs[name] = replace(held, weights=weights, beside=scratch).as_dict()
        return needs

    needs = needs_of(schedule, asked)
    fits = []
    for m in devices:
        spare = m.bytes - needs[m.needs]["total"]
        spill = min(max(0, -spare), needs[m.needs]["spill"], m.host)
        fits.append({**m.as_dict(), "spare": spare + spill, "spill": spill})
    for name in schedule.schedule.without_room if args.schedule is None else ():
        short = [row for row in fits if row["spare"] < 0 and row["needs"] != "cpu" and "problem" not in row]
        instead = needs_of(find_schedule(name), {row["needs"]: asked[row["needs"]] for row in short})
        for row in short:
            if (spare := row["bytes"] - instead[row["needs"]]["total"]) >= 0:
                row |= {"schedule": name, "spare": spare}
    return {
        **subject.head,
        "parameters": sum(_product(s) for s in shapes.values()),
        "hparams": hp.as_dict(),
        "tokenizer": subject.tokenizer,
        "notes": list(subject.notes),
        "fallbacks": dict(types.fallbacks),
        "types": by_type,
        "tensors": table,
        "batch": args.batch,
        "context": context,
        "precision": args.precision,
        "needs": needs,
        "fits": fits,
    }


def _subject(model: str) -> Subject:
    from hybrid.checkpoint.families import tensors as tensors_of
    from hybrid.spec.model import find_model, load_models

    if not Path(model).exists() and (model in load_models() or not (Path(model).suffix or "/" in model)):
        sheet = find_model(model)
        hp = sheet.hparams()
        tensors = {n: ("bf16" if len(s) > 1 else "f32", s) for n, s in tensors_of(hp).items()}
        return Subject(
            {"name": model, "path": None, "file_bytes": None, "source": sheet.model.source}, hp, tensors, None
        )
    from hybrid.checkpoint import open_checkpoint

    with open_checkpoint(model) as c:
        head = {"name": c.name, "path": str(c.path), "file_bytes": c.file_bytes}
        tensors = {n: (c.dtype(n), c.shape(n)) for n in c.names}
        return Subject(head, c.hparams, tensors, _tokenizer(c), tuple(c.notes))


def _tokenizer(checkpoint: Any) -> dict[str, Any]:
    from hybrid.checkpoint import CheckpointError
    from hybrid.text.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

    try:
        tokenizer = checkpoint.tokenizer
    except CheckpointError as error:  # the rest of the report is still valid
        return {"problem": str(error)}
    v = tokenizer.vocabulary
    names = {
        NORMAL: "normal",
        UNKNOWN: "unknown",
        CONTROL: "control",
        USER_DEFINED: "user_defined",
        UNUSED: "unused",
        BYTE: "byte",
    }
    return {
        "tokens": tokenizer.n_tokens,
        "kinds": {name: sum(t == kind for t in v.types) for kind, name in names.items() if kind in v.types},
        "bos": v.bos_id,
        "ends": {str(i): v.pieces[i] for i in sorted(tokenizer.eos_ids)},
        "add_space_prefix": v.add_space_prefix,
        "chat_template": checkpoint.chat_template is not None,
    }


def text(report: Mapping[str, Any], every: bool) -> str:
    """The report as text."""
    from hybrid.convert.kinds import grouped

    hp, tokenizer = report["hparams"], report["tokenizer"]
    size = "" if report["file_bytes"] is None else f", {report['file_bytes'] / 1e6:.1f} MB"
    lines = [f"{report['path'] or report['name']}: {hp['family']}, {_count(report['parameters'])} parameters{size}"]
    lines += [f"  note: {note}" for note in report["notes"]]
    plain = {key: value for key, value in hp.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    lines += ["", "hyper-parameters", *(f"  {key:18} {value:g}" for key, value in plain.items())]
    lines += [
        f"  {'output matrix':18} {'the embedding' if hp['tied'] else 'its own'}",
        "",
        "layers",
        *_layer_lines(hp["layers"]),
    ]
    if tokenizer and "problem" in tokenizer:
        lines += ["", f"tokenizer: {tokenizer['problem']}"]
    elif tokenizer:
        kinds = ", ".join(f"{n} {k.replace('_', '-')}" for k, n in tokenizer["kinds"].items())
        ends = ", ".join(f"{i} {piece}" for i, piece in tokenizer["ends"].items())
        lines += [
            "",
            f"tokenizer: {tokenizer['tokens']} tokens ({kinds}); begin {tokenizer['bos']}; ends {ends}; "
            f"{'with' if tokenizer['chat_template'] else 'no'} chat template",
        ]
    lines += ["", "tensors", *_tensor_lines(report["tensors"], every)]
    types = ", ".join(f"{kind} {show_bytes(n)}" for kind, n in report["types"].items())
    lines += [f"  {len(report['tensors'])} tensors: {types}"]
    lines += [f"  {line}" for line in grouped(report["fallbacks"])]
    return "\n".join([*lines, "", *_needs_lines(report)])


def _layer_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields common to all layers, then a line for each kind of layer. `kv_from` and `scalar` do not distinguish
    kinds."""
    kinds: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for index, layer in enumerate(layers):
        of = {**layer, "kv_from": layer["kv_from"] is not None}
        kinds.setdefault(tuple((k, v) for k, v in of.items() if k != "scalar"), []).append(index)
    alike = [item for item in next(iter(kinds)) if all(item in kind for kind in kinds)]
    lines = [f"  {key:18} {value:g}" for key, value in alike if value or key not in _UNLESS]
    scalars = [layer["scalar"] for layer in layers]
    if set(scalars) != {1.0}:
        lines.append(f"  {'scalar':18} {min(scalars):g} to {max(scalars):g}")
    for kind, members in kinds.items():
        said = []
        for key, value in kind:
            if key == "kv_from":
                said += sorted({f"keys and values of layer {layers[i]['kv_from']}" for i in members}) if value else []
            elif (key, value) not in alike and (value or key not in _UNLESS):
                said.append(key if value is True else f"{key} {value:g}")
        seen = "local" if dict(kind)["window"] else "global"
        lines.append(f"  {f'{len(members)} {seen}':18} {_spans(members)}: {', '.join(said) or 'as all'}")
    return lines


_UNLESS = ("kv_from", "k_as_v", "sparsity", "n_experts", "experts_used", "expert_ffn", "window")
"""Fields of a layer that are omitted if 0."""


def _spans(members: Sequence[int]) -> str:
    """`0-3, 5`"""
    runs: list[list[int]] = []
    for m in members:
        if runs and m == runs[-1][-1] + 1:
            runs[-1].append(m)
        else:
            runs.append([m])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _tensor_lines(table: list[dict[str, Any]], every: bool) -> list[str]:
    """One line for each tensor, or for each group of equal name, type and shape."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for row in table:
        name = row["name"]
        if not every and layer_of(name) is not None:
            name = f"{LAYER}*.{part_of(name)}"
        groups.setdefault((name, row["type"], tuple(row["shape"])), []).append(row["bytes"])
    return [
        f"  {name:34} {f'{len(sizes)} x ' if not every else '':>6}{kind:6} {list(shape)!s:16} {show_bytes(sum(sizes)):>10}"
        for (name, kind, shape), sizes in groups.items()
    ]


def _needs_lines(report: Mapping[str, Any]) -> list[str]:
    titles = ("vulkan", UNITS, "cpu")
    needs = [report["needs"][title] for title in titles]
    lines = [f"needs, for {report['batch']} x {report['context']} positions, precision {report['precision']}"]
    lines += [f"  {'':18}" + "".join(f" {t:>12}" for t in titles)]
    for key, parts in _NEEDS.items():
        lines.append(f"  {key:18}" + "".join(f" {show_bytes(sum(n[p] for p in parts)):>12}" for n in needs))
    lines += ["", "fits"]
    for row in report["fits"]:
        if "problem" in row:
            lines.append(f"  {row['device']}: {row['problem']}")
            continue
        spare = "" if row["spill"] else f", {show_bytes(row['spare'])} to spare"
        verdict = f"fits{spare}" if row["spare"] >= 0 else f"{show_bytes(-row['spare'])} short"
        if "schedule" in row:
            verdict += f" with schedule {row['schedule']}"
        if row["spill"]:
            verdict += f", with {show_bytes(row['spill'])} of experts in host memory"
        if row["device"] == "cpu":
            of = report["needs"]["cpu"]
            verdict += "".join(
                f"; {show_bytes(of[form])} of matrices {what}" for form, what in _FORMS.items() if of[form]
            )
        lines.append(f"  {row['device']:44} {show_bytes(row['bytes']):>10}  {verdict}")
    return lines


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} G" if n >= 1e9 else f"{n / 1e6:.1f} M"


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for axis in shape:
        n *= axis
    return n


if __name__ == "__main__":
    sys.exit(main())
