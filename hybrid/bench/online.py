"""python -m hybrid.bench --requests, --conversation: what readers see of a model that serves."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

import hybrid
from hybrid.arguments import open_model
from hybrid.bench import requests, talk
from hybrid.bench.report import SCHEMA, energy_dict
from hybrid.cli import UsageError
from hybrid.devices.about import driver_of, kernels_of, provenance
from hybrid.devices.energy import meter_for

WARM = 4  # tokens that the requests before the run generate


def online(args: argparse.Namespace, command: str) -> int:
    """Run what the arguments of `hybrid.bench` ask for and print it."""
    _check(args)
    begin = time.perf_counter()
    slots = max(args.batch_size[0], 3 if args.conversation else 1)  # a conversation and the same without reuse take two caches
    with hybrid.load(
        open_model(args), args.device, args.schedule, args.weights, _context(args), args.kv, args.precision,
        deterministic=args.deterministic, slots=slots, queue=max(slots, args.requests or 1), chunk=args.chunk, progress=True,
        npu=args.npu,
    ) as model:  # fmt: skip
        device = model.engine.device
        main = getattr(device, "main", device)
        about: dict[str, Any] = {
            "schema": SCHEMA,
            "command": command,
            "device": model.device,
            "driver": driver_of(main),
            "kernels": kernels_of(main),
            "model": model.checkpoint.name,
            "precision": {k: list(v) for k, v in model.engine.precision.items()},
            "weights_bytes": device.memory()["weights"],
            "context": model.engine.cache.ctx,
            "slots": slots,
            "deterministic": args.deterministic,
            "load_seconds": time.perf_counter() - begin,
            "passed_over": list(model.passed_over),
            "seed": args.seed,
        }
        meter = meter_for(main) if args.energy else None
        run = _conversation if args.conversation else _requests
        found, lines = run(args, model, meter)
    report = {**about, **found}
    print(json.dumps(report) if args.json else "\n".join([*_head(report), "", *lines]))
    return 0


def _check(args: argparse.Namespace) -> None:
    if len(args.batch_size) > 1:
        raise UsageError("-b takes one number with --requests and --conversation: as many sequences run at a time")
    if not 0 <= args.shared_prefix < args.prompt_lengths[0]:
        raise UsageError(f"--shared-prefix must be 0 or more, and less than the shortest prompt ({args.prompt_lengths[0]})")


def _context(args: argparse.Namespace) -> int:
    """Positions of the longest sequence, and room for the end of it."""
    turns = args.conversation or 1
    return talk.length(turns, args.prompt_lengths, args.output_lengths) + 1


def _requests(args: argparse.Namespace, model: hybrid.Model, meter: Any) -> tuple[dict[str, Any], list[str]]:
    def drawn(n: int, rate: float | None, outputs: tuple[int, int], seed: int) -> list[requests.Request]:
        vocab = model.engine.target.n_tokens
        return requests.requests(n, rate, args.prompt_lengths, outputs, vocab, args.shared_prefix, seed)

    requests.serve(model.submit, drawn(min(args.requests, args.batch_size[0]), None, (WARM, WARM), args.seed + 1))
    wanted, before = drawn(args.requests, args.rate, args.output_lengths, args.seed), model.metrics()
    if meter is None:
        served = requests.serve(model.submit, wanted)
    else:
        with meter.running():
            served = requests.serve(model.submit, wanted)
    found = requests.summary(served, before, model.metrics())
    lines = requests.text(found)
    if meter is not None:
        found["energy"] = energy_dict(meter.take(), found["generated_tokens"])
        lines.append(found["energy"]["line"])
    return {"requests": found}, lines


def _conversation(args: argparse.Namespace, model: hybrid.Model, meter: Any) -> tuple[dict[str, Any], list[str]]:
    vocab, spans = model.engine.target.n_tokens, (args.prompt_lengths, args.output_lengths)
    talk.talk(model.submit, 1, spans[0], (WARM, WARM), vocab, args.seed + 1)
    counted = nullcontext if meter is None else meter.running
    turns = talk.as_dicts(talk.talk(model.submit, args.conversation, *spans, vocab, args.seed, counted))
    found, lines = {"turns": turns}, talk.text(turns)
    if meter is None:
        return found, lines
    energy = energy_dict(meter.take(), sum(turn["answer"] for turn in turns))
    return {**found, "energy": energy}, [*lines, energy["line"]]


def _head(report: dict[str, Any]) -> list[str]:
    return [
        f"{report['device']}, {report['driver']}; {provenance(report['device'])}",
        *(f"passed over: {reason}" for reason in report["passed_over"]),
        f"{report['model']}: up to {report['slots']} sequences of {report['context']} positions, KV "
        f"{', '.join(report['precision']['kv'])}; ready in {report['load_seconds']:.1f} s",
    ]
