"""python -m hybrid.bench --requests, --conversation: latencies of a served model's clients."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import hybrid
from hybrid.arguments import open_model
from hybrid.bench import requests, talk
from hybrid.bench.acceptance import check_draft, draft_of
from hybrid.bench.report import about, energy_dict, say
from hybrid.bench.speculating import WARM, Drafts, Runs
from hybrid.cli import UsageError
from hybrid.core import garbage
from hybrid.devices.about import provenance
from hybrid.devices.energy import meter_for
from hybrid.engine.speculation import MOST


def online(args: argparse.Namespace, command: str) -> int:
    """Run the benchmark of `hybrid.bench --requests` or `--conversation` and print it."""
    _check(args)
    begin = time.perf_counter()
    slots = max(
        args.batch_size[0], 3 if args.conversation else 1
    )  # the conversation and its prompt without reuse need a cache each
    with hybrid.load(
        open_model(args),
        args.device,
        args.schedule,
        args.weights,
        _context(args),
        args.kv,
        args.precision,
        deterministic=args.deterministic,
        slots=slots,
        queue=max(slots, args.requests or 1),
        chunk=args.chunk,
        progress=True,
        npu=args.npu,
        requantize=args.requantize,
        warm=True,
        **_drafts(args),
    ) as model:
        garbage.keep()
        device = model.engine.device
        main = getattr(device, "main", device)
        report: dict[str, Any] = {
            **about(model, command),
            "weights_bytes": device.memory()["weights"],
            "context": model.engine.cache.ctx,
            "slots": slots,
            "deterministic": args.deterministic,
            "load_seconds": time.perf_counter() - begin,
            "passed_over": _passed_over(model),
            "seed": args.seed,
        }
        say(_head(report), args.json)
        run = _conversation if args.conversation else _requests
        found = run(args, model, meter_for(main) if args.energy else None)
        later = [reason for reason in _passed_over(model) if reason not in report["passed_over"]]
    if later:
        say([f"passed over: {reason}" for reason in later], args.json)
    if args.json:
        print(json.dumps({**report, "passed_over": [*report["passed_over"], *later], **found}))
    return 0


def _check(args: argparse.Namespace) -> None:
    if len(args.batch_size) > 1:
        raise UsageError("-b takes one number with --requests and --conversation: as many sequences run at a time")
    if not 0 <= args.shared_prefix < args.prompt_lengths[0]:
        raise UsageError(
            f"--shared-prefix must be 0 or more, and less than the shortest prompt ({args.prompt_lengths[0]})"
        )
    check_draft(args)
    if args.speculate and not any(k != 0 for k in args.speculate):
        raise UsageError(
            "--speculate 0 alone: the run without drafts is always measured: add auto or a number, or leave out all "
            "speculation options"
        )


def _drafts(args: argparse.Namespace) -> dict[str, Any]:
    """Speculation options of hybrid.load; empty without speculation."""
    if not (args.acceptance or args.speculate or args.draft or args.draft_random):
        return {}
    most = max(MOST if k is None else k for k in _numbers(args))
    return {"draft": draft_of(args), "speculate": most}


def _numbers(args: argparse.Namespace) -> Sequence[int | None]:
    """Draft tokens of a pass (`Drafts`) of each run."""
    return args.speculate or (None,)


def _passed_over(model: hybrid.Model) -> list[str]:
    return [*model.passed_over, *model.engine.device.failures, *model.engine.faults]


def _context(args: argparse.Namespace) -> int:
    """Context for the longest sequence, with a margin."""
    turns = args.conversation or 1
    return talk.length(turns, args.prompt_lengths, args.output_lengths) + 1


def _requests(args: argparse.Namespace, model: hybrid.Model, meter: Any) -> dict[str, Any]:
    """A run without drafts, then one for each acceptance rate and number of drafts."""
    vocab, spans, rates = (
        model.engine.target.n_tokens,
        (args.prompt_lengths, args.output_lengths),
        args.acceptance or (None,),
    )
    wanted = requests.requests(args.requests, args.rate, *spans, vocab, args.shared_prefix, args.seed)
    runs = Runs(model, wanted, args.batch_size[0], meter, bool(args.acceptance))

    def one(drafts: Drafts) -> dict[str, Any]:
        found = runs.run(drafts)
        say(["", *([drafts.title] if runs.name else []), *runs.text(found)], args.json)
        return found

    plain = one(Drafts())
    if runs.name is None:
        return {"requests": plain}
    tests = [Drafts(k, None if k == 0 else rate) for rate, k in product(rates, _numbers(args))]
    return {"draft": runs.name, "requests": plain, "speculation": [one(drafts) for drafts in tests]}


def _conversation(args: argparse.Namespace, model: hybrid.Model, meter: Any) -> dict[str, Any]:
    vocab, spans = model.engine.target.n_tokens, (args.prompt_lengths, args.output_lengths)
    talk.talk(model.submit, 1, spans[0], (WARM, WARM), vocab, args.seed + 1)
    counted = nullcontext if meter is None else meter.running
    turns = talk.as_dicts(talk.talk(model.submit, args.conversation, *spans, vocab, args.seed, counted))
    found: dict[str, Any] = {"turns": turns}
    say(["", *talk.text(turns)], args.json)
    if meter is not None:
        found["energy"] = energy_dict(meter.take(), sum(turn["answer"] for turn in turns))
        say([found["energy"]["line"]], args.json)
    return found


def _head(report: dict[str, Any]) -> list[str]:
    return [
        f"{report['device']}, {report['driver']}; {provenance(report['device'])}",
        *(f"passed over: {reason}" for reason in report["passed_over"]),
        f"{report['model']}: up to {report['slots']} sequences of {report['context']} positions, KV "
        f"{', '.join(report['precision']['kv'])}; ready in {report['load_seconds']:.1f} s",
    ]
