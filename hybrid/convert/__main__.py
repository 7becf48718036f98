"""python -m hybrid.convert SRC DST --type q4_0, or --verify FILE."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from hybrid.cli import Parser, positive, run, size, terminable
from hybrid.cli.progress import progress_bar
from hybrid.convert import Format
from hybrid.convert.kinds import CLASSES, SAME, Wanted, grouped
from hybrid.core.dtypes import WEIGHT_TYPES, WRITABLE_TYPES

EXIT = "Exit codes: 0, 1 error (nothing was written), 2 wrong usage, 129 hung up, 130 interrupted, 143 terminated."


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m hybrid.convert",
        description="Convert a checkpoint to another format or storage type, or verify a converted one.",
        epilog=EXIT,
    )
    p.add_argument(
        "src",
        nargs="?",
        type=Path,
        metavar="SRC",
        help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face",
    )
    p.add_argument(
        "dst", nargs="?", metavar="DST", help=".gguf file to write; a folder (or NAME/) for Hugging Face's format"
    )
    add_types(p, default=" (the default)")
    p.add_argument("--format", choices=("gguf", "hf"), help="format to write (by DST)")
    p.add_argument("--split", type=size, metavar="SIZE", help="split into files of at most SIZE, such as 4GiB")
    p.add_argument(
        "--jobs", type=positive, metavar="N", help="concurrent blocks of rows (one per processor, at most 8)"
    )
    p.add_argument(
        "--requantize", action="store_true", help="quantise matrices again that are quantised in another type"
    )
    p.add_argument("--force", action="store_true", help="replace what exists")
    p.add_argument(
        "--verify",
        type=Path,
        metavar="FILE",
        help="read FILE again and compare tensors, names, shapes and metadata with the digests inside it",
    )
    p.add_argument("--progress", action="store_true", help="a progress bar even where standard error is no terminal")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def add_types(p: argparse.ArgumentParser, default: str = "") -> None:
    """Add --type and --type-CLASS; shared with hybrid.inspect."""
    known = (*WEIGHT_TYPES, SAME)
    kept = [t for t in WEIGHT_TYPES if t not in WRITABLE_TYPES]
    text = f"of the matrices: {', '.join(WRITABLE_TYPES)}; or {SAME}, as stored{default} ({', '.join(kept)} can only be kept)"
    p.add_argument("--type", choices=known, metavar="TYPE", help=text)
    for kind, parts in CLASSES.items():
        other = {
            "head": "as --type-embed",
            "table": "as --type-embed",
            "streams": f"as --type, but {SAME} where that is quantised",
        }
        text = f"of {', '.join(parts)} ({other.get(kind, 'as --type')})"
        p.add_argument(f"--type-{kind}", choices=known, metavar="TYPE", help=text)


def wanted(args: argparse.Namespace) -> Wanted:
    chosen = {kind: getattr(args, f"type_{kind}") for kind in CLASSES}
    return Wanted(args.type, {k: v for k, v in chosen.items() if v is not None})


def main(argv: list[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if args.verify is not None:
        if args.src is not None or args.type is not None:
            p.error("--verify FILE stands alone")
        return run(lambda: _verify(args))
    missing = [n for n, v in (("SRC", args.src), ("DST", args.dst)) if v is None]
    if missing:
        p.error(f"{', '.join(missing)} must be given (or --verify FILE)")
    args.type = args.type or SAME
    return run(lambda: _convert(args))


def _convert(args: argparse.Namespace) -> int:
    from hybrid.checkpoint import open_checkpoint
    from hybrid.convert import convert, total_bytes

    format: Format = args.format or _format(args.dst)
    with terminable(), open_checkpoint(args.src) as source:
        notes = source.notes
        total = total_bytes(source, wanted(args), args.requantize)
        with progress_bar(total, Path(args.dst).name, args.progress, unit="B") as update:
            report = convert(
                source,
                Path(args.dst),
                wanted(args),
                format=format,
                split=args.split,
                jobs=args.jobs,
                force=args.force,
                requantize=args.requantize,
                progress=update,
            )
    removed = [f"removed {path}, which a run that was killed left" for path in report.removed]
    for line in (*notes, *grouped(report.fallbacks), *removed):
        print(f"note: {line}", file=sys.stderr)
    print(json.dumps(asdict(report)) if args.json else report.line())
    return 0


def _format(dst: str) -> Format:
    if Path(dst).is_dir() or dst.endswith(("/", os.sep)):
        return "hf"
    if not dst.endswith(".gguf"):
        raise ValueError(f"{dst}: end the name in .gguf, or in / for a Hugging Face directory, or give --format")
    return "gguf"


def _verify(args: argparse.Namespace) -> int:
    from hybrid.convert.verify import digests, verify

    if not args.verify.exists():
        raise ValueError(f"{args.verify}: no such file or directory")
    kept = digests(args.verify)
    with progress_bar(kept.size, args.verify.name, args.progress, unit="B") as update:
        found = verify(kept, update)
    if args.json:
        print(json.dumps({"ok": not found.wrong, **asdict(found)}))
    elif not found.wrong:
        print(f"{args.verify}: {found.tensors} tensors, {found.bytes / 1e6:.1f} MB: all digests match")
    for name in found.wrong:
        print(f"error: {name} does not match its digest: fetch or convert the file again", file=sys.stderr)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
