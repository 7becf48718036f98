"""python -m perf.roofline: the roofline of a model on a device (perf/roofline/model.py), as tables, JSON or a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid.cli import Parser, UsageError, amount, run
from hybrid.perf.acceptance import pairs
from hybrid.perf.roofline.model import Speculation, modelled_sheet, report, text
from hybrid.perf.roofline.pictures import roofline_page
from hybrid.perf.roofline.work import subject
from hybrid.spec.devicesheet import find_sheet


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.roofline",
        description="What a device sheet allows a model: time, bytes and operations by step and what bounds each. Modelled.",
    )
    p.add_argument("model", metavar="MODEL|NAME", help="a checkpoint, or a name of specs/models such as gemma3-27b")
    p.add_argument(
        "--device", default="radeon-780m", metavar="SHEET", help="of specs/devices: h200, radeon-780m (radeon-780m)"
    )
    p.add_argument("--type", default="q4_0", metavar="TYPE", help="storage type of a NAME's matrices (q4_0)")
    p.add_argument("--batch", type=_numbers, default=(1,), metavar="N,N", help="sequences at a time (1)")
    p.add_argument("--context", type=int, default=512, metavar="N", help="positions that each sequence holds (512)")
    p.add_argument(
        "--prefill", type=_numbers, metavar="N,N", help="instead of decoding: passes over prompts of so many tokens"
    )
    p.add_argument(
        "--precision",
        default="auto",
        choices=("auto", "exact", "fast"),
        metavar="NAME",
        help="auto, exact or fast (auto)",
    )
    p.add_argument(
        "--draft", metavar="NAME", help="also with this draft model, one sequence; lookup: drafts from the text itself"
    )
    p.add_argument(
        "--draft-device", metavar="SHEET", help="that the draft runs on, sharing the memory (the model's own device)"
    )
    p.add_argument("--draft-length", type=int, default=4, metavar="N", help="tokens drafted per pass (4)")
    p.add_argument(
        "--acceptance",
        type=amount,
        metavar="A",
        help="chance that a drafted token is right (what the demonstration pair showed)",
    )
    p.add_argument("--plot", type=Path, metavar="FILE", help="write the roofline and the speeds by batch as SVG")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,8,32") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be positive")
    return found


def _main(args: argparse.Namespace) -> int:
    if args.draft_device and args.draft in (None, "lookup"):
        raise UsageError("--draft-device belongs to a draft model: name it with --draft")
    sheet = modelled_sheet(args.device)
    can = sheet.limits.capabilities
    model = subject(args.model, args.type, precision=args.precision, capabilities=can)
    if args.prefill:
        works = [model.work("prefill", n, 1, max(n, args.context), 1) for n in args.prefill]
    else:
        works = [model.decode(b, args.context) for b in args.batch]
    data = report(model, sheet, works, args.context)
    if args.draft:
        draft = None if args.draft == "lookup" else subject(args.draft, args.type, capabilities=can)
        on = find_sheet(args.draft_device) if args.draft_device else None
        acceptance = pairs()[0].agreed if args.acceptance is None else args.acceptance
        s = Speculation(draft, args.draft_length, acceptance, on)
        data["speculation"] = {
            "draft": args.draft,
            "device": (on or sheet).device.name,
            "length": s.length,
            "acceptance": s.acceptance,
            "yields": s.yields,
            **{level: s.tokens_per_second(model, args.context, sheet, level) for level in ("ceiling", "expected")},
        }
        if on is not None:
            waits = Speculation(draft, args.draft_length, acceptance, on, waits=True)
            data["speculation"]["waiting"] = waits.tokens_per_second(model, args.context, sheet, "expected")
    if args.plot:
        args.plot.write_text(roofline_page(model, sheet, works, args.context), encoding="utf-8")
    print(json.dumps(data) if args.json else text(data))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
