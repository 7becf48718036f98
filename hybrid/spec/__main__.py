"""python -m hybrid.spec check | list | show OP | schema | docs"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from hybrid.cli import Parser
from hybrid.core.errors import SpecError
from hybrid.spec import docs
from hybrid.spec.fields import BACKENDS
from hybrid.spec.load import read_toml, shown_path
from hybrid.spec.op import SPECS_DIR, OpSpec, load_op, load_ops
from hybrid.spec.schedule import SCHEDULES, extended, load_schedule

EXIT = "exit status: 0 fine, 1 a spec is wrong, 2 wrong usage"


def parser() -> argparse.ArgumentParser:
    about = "The operation specs in specs/ops."
    p = Parser(prog="python -m hybrid.spec", description=about, epilog=EXIT)
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    c = sub.add_parser("check", help="validate specs; one line for each invalid file", epilog=EXIT)
    c.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="TOML files or operation names (default: all of specs/ops and specs/schedules)",
    )
    c.add_argument("--json", action="store_true", help="print {file: error or null} instead")

    c = sub.add_parser("list", help="one line for each operation")
    c.add_argument("--json", action="store_true", help="print a list of objects instead")

    c = sub.add_parser("show", help="one spec in full, with the cost of each workload")
    c.add_argument("op", metavar="OP", help="an operation's name, or the path of a TOML file")
    c.add_argument("--json", action="store_true", help="print the spec as JSON instead")

    sub.add_parser("schema", help="the JSON schema of a spec file, for editors")

    sub.add_parser("docs", help="every operation in full, as Markdown")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. Errors are one line each on stderr."""
    args = parser().parse_args(argv)
    try:
        return {"check": _check, "list": _list, "show": _show, "schema": _schema, "docs": _docs}[args.command](args)
    except SpecError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has exited
        sys.stderr.close()
        return 0
    except OSError as e:  # for example standard output on a full disk
        print(f"error: {e.filename or 'standard output'}: {e.strerror}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    names: list[str | Path] = list(args.files) or [
        *sorted((SPECS_DIR / "ops").glob("*.toml")),
        *sorted(SCHEDULES.glob("*.toml")),
    ]
    if not names:
        raise SpecError(f"{SPECS_DIR / 'ops'}: holds no operation specs (*.toml)")
    errors: dict[str, list[str]] = {}
    fitting: list[int] = []  # workloads of each valid operation
    schedules: list[str] = []
    for name in names:
        try:
            if _is_schedule(name):
                schedules.append(_described(Path(name)))
                errors[shown_path(Path(name))] = []
            else:
                spec = load_op(name)
                fitting.append(len(spec.workload))
                errors[spec.file] = []
        except SpecError as e:
            errors[str(name)] = [str(e).removesuffix(f" (and {len(e.more)} more)"), *e.more]
    bad = [found for found in errors.values() if found]
    if args.json:
        print(json.dumps(errors, indent=2))
    else:
        for line in itertools.chain(*bad):
            print(f"error: {line}", file=sys.stderr)
        counts = [f"{len(fitting)} operation specs are sound, {sum(fitting)} workloads fit"]
        counts += [f"{len(schedules)} schedules are sound: {', '.join(schedules)}"] if schedules else []
        counts += [f"{len(bad)} are wrong"] if bad else []
        print("; ".join(counts))
    return 1 if bad else 0


def _is_schedule(name: str | Path) -> bool:
    return str(name).endswith(".toml") and "schedule" in read_toml(name)


def _described(path: Path) -> str:
    """`gemma3`, `gemma3-hybrid (extends gemma3)`. SpecError for an invalid schedule."""
    name, bases = load_schedule(path).schedule.name, extended(path)
    return f"{name} (extends {', '.join(bases)})" if bases else name


def _list(args: argparse.Namespace) -> int:
    ops = load_ops()
    if args.json:
        print(
            json.dumps(
                [
                    {
                        "name": o.name,
                        "kind": o.op.kind,
                        "members": list(o.op.members),
                        "summary": o.op.summary,
                        "backends": [b for b in BACKENDS if o.runs_on(b)],
                        "workloads": len(o.workload),
                        "dtype_choices": len(o.dtype_choices()),
                        "digest": o.digest,
                    }
                    for o in ops.values()
                ],
                indent=2,
            )
        )
        return 0
    width = max(map(len, ops))
    for o in ops.values():
        where = " ".join(b for b in BACKENDS if o.runs_on(b))
        print(f"{o.name:{width}}  {o.op.kind:6}  {where:18}  {o.op.summary}")
    return 0


def _show(args: argparse.Namespace) -> int:
    o = load_op(args.op)
    if args.json:
        data: dict[str, Any] = o.model_dump(mode="json", by_alias=True, exclude_none=True)
        data["workload"] = [
            w.model_dump(mode="json", by_alias=True, exclude_none=True)
            | {"flops": o.flops(w.bind, w.attrs), "bytes": o.nbytes(w.bind, w.dtypes, w.attrs)}
            for w in o.workload
        ]
        print(json.dumps(data | {"digest": o.digest}, indent=2))
        return 0
    print(docs.plain(o))
    return 0


def _schema(args: argparse.Namespace) -> int:
    print(json.dumps(OpSpec.model_json_schema(by_alias=True), indent=2))
    return 0


def _docs(args: argparse.Namespace) -> int:
    print(docs.reference(load_ops()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
