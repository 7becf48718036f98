"""python -m hybrid.bench MODEL|--random NAME: speed of prefill and decode, and their shares of the device's measured
roofs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hybrid.arguments import add_devices, add_model, add_weights, fallbacks, open_devices, open_model
from hybrid.cli import CACHES, Parser, UsageError, amount, positive, run
from hybrid.cli.progress import tracked
from hybrid.devices.about import driver_of, kernels_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybrid.bench.measure import Row
    from hybrid.core.device import Device
    from hybrid.devices.energy import Meter
    from hybrid.engine.loop import Engine

OF_WRITERS = ("tokens", "batch_size", "ctx_depth", "kv", "deterministic", "energy", "schedule")
"""Options that embedding models have no use for."""
SPECULATION = ("speculate", "draft", "draft_random", "draft_head")
SERVED = ("batch_size", "deterministic", "energy", "prompt_lengths", "output_lengths", "seed")
USES = {
    "acceptance": ("tokens", "batch_size", "ctx_depth", "repetitions", *SPECULATION),
    "requests": ("rate", "shared_prefix", "acceptance", *SPECULATION, *SERVED),
    "conversation": SERVED,
    "": ("prompt", "tokens", "batch_size", "ctx_depth", "repetitions", "deterministic", "energy"),
}
"""Mode ("": prefill and decode) -> its options, besides those of the model and devices. A mode that is listed as an
option of another mode acts as that option if both are given."""


def counts(text: str) -> tuple[int, ...]:
    """Parse counts such as 512,2048; 0 omits the test."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if any(n < 0 for n in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of counts such as 512,2048")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """Parse `counts` without 0."""
    if 0 in (found := counts(text)):
        raise argparse.ArgumentTypeError(f"{text!r} has a 0: give counts such as 1,8,32")
    return found


def span(text: str) -> tuple[int, int]:
    """Parse a range of lengths such as 16,1024, or one length."""
    found = sizes(text)
    if len(found) > 2 or found[0] > found[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length and no pair of them such as 16,1024")
    return found[0], found[-1]


def rates(text: str) -> tuple[float, ...]:
    """Parse probabilities such as 0.6,0.8."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if any(not 0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of probabilities such as 0.6,0.8")
    return found


def drafts(text: str) -> tuple[int | None, ...]:
    """Parse numbers of draft tokens such as auto,0,7; None: auto."""
    from hybrid.engine.loading import MOST_DRAFTS

    try:
        found = tuple(None if part == "auto" else int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if any(k is not None and not 0 <= k <= MOST_DRAFTS for k in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of auto and numbers from 0 to {MOST_DRAFTS} such as auto,3,7"
        )
    return found


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m hybrid.bench",
        description="Speed of prefill and of decode, measured separately after warm-up, with their bytes and operations "
        "(by the operations' declared costs) and shares of the roofs that this device reached in the same run. The cache is "
        "filled by running random tokens. A rate above the device's peak is an error. With --requests or "
        "--conversation: latencies of a server's clients.",
        epilog="Exit codes: 0, 1 error or an impossible figure, 2 wrong usage, 3 device lost or not answering.",
    )
    add_model(p)
    p.add_argument(
        "-p", "--prompt", type=counts, default=(512,), metavar="N,..", help="tokens of a prompt; 0: none (512)"
    )
    p.add_argument(
        "-n", "--tokens", type=counts, default=(128,), metavar="N,..", help="tokens to generate; 0: none (128)"
    )
    p.add_argument("-b", "--batch-size", type=sizes, default=(1,), metavar="N,..", help="batch sizes to measure (1)")
    p.add_argument(
        "--ctx-depth", type=counts, default=(0,), metavar="N,..", help="positions in the cache before a test (0)"
    )
    p.add_argument(
        "-r",
        "--repetitions",
        type=positive,
        default=5,
        metavar="N",
        help="repetitions of each test, after a warm-up (5)",
    )
    add_devices(p)
    add_weights(p)
    p.add_argument(
        "--precision", default="auto", choices=("auto", "exact", "fast"), help="as for hybrid.generate (auto)"
    )
    p.add_argument(
        "--kv", default="auto", choices=CACHES, metavar="TYPE", help=f"type of the KV cache: {', '.join(CACHES)} (auto)"
    )
    p.add_argument("--chunk", type=positive, metavar="N", help="rows of a prefill pass (the engine's)")
    p.add_argument(
        "--deterministic", action="store_true", help="one pass size, for bit-identical results with any prompt chunks"
    )
    p.add_argument("--energy", action="store_true", help="joules per token and watts, if the machine can measure them")
    p.add_argument(
        "--json", action="store_true", help="print one JSON object; the table, row by row, on standard error"
    )
    about = (
        "With --acceptance alone: drafts of a known text in one sequence, instead of -p. With --requests: the requests run "
        "without drafts and again with drafts, of the draft model or, with --acceptance, of known texts."
    )
    g = p.add_argument_group("speculative decoding", about)
    g.add_argument("--acceptance", type=rates, metavar="P,..", help="acceptance rates of draft tokens to measure")
    g.add_argument(
        "--speculate", type=drafts, metavar="K,..", help="draft tokens of a pass to measure: auto, or up to 16 (auto)"
    )
    g.add_argument(
        "--draft",
        metavar="FILE",
        help="a draft model, an assistant, or `lookup`; with --acceptance only its time counts",
    )
    g.add_argument(
        "--draft-random", metavar="NAME", help="instead: random weights in the shape of a sheet of specs/models"
    )
    g.add_argument("--draft-head", metavar="TYPE", help="with --draft-random: of its embedding and head (as --head)")
    g = p.add_argument_group(
        "server workloads", "Random requests, up to -b running, instead of -p, -n and --ctx-depth."
    )
    g.add_argument("--requests", type=positive, metavar="N", help="number of requests; reports their latencies")
    g.add_argument("--rate", type=amount, metavar="R", help="mean arrival rate, R per second (all at once)")
    g.add_argument(
        "--prompt-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of a prompt or message (128)"
    )
    g.add_argument("--output-lengths", type=span, default=(128, 128), metavar="A,B", help="tokens of an answer (128)")
    g.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="length of the prompts' common prefix (0)")
    g.add_argument(
        "--conversation",
        type=positive,
        metavar="TURNS",
        help="one conversation: time to first token with and without prefix reuse",
    )
    g.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and tokens (0)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command = f"python -m hybrid.bench {shlex.join(sys.argv[1:] if argv is None else argv)}"
    return run(lambda: _main(args, command, _given(argv)))


def _given(argv: list[str] | None) -> list[str]:
    """The given options of `USES`, including those given with their default value."""
    p, names = parser(), dict.fromkeys(name for mode, used in USES.items() for name in (mode, *used) if name)
    p.set_defaults(**names)
    return [name for name, value in vars(p.parse_args(argv)).items() if name in names and value is not None]


def _check(given: list[str]) -> None:
    """UsageError for options that the mode does not use."""
    modes = [
        name for name in given if name in USES and not any(name in USES[other] for other in given if other in USES)
    ]
    if len(modes) > 1:
        raise UsageError(f"--{modes[0]} or --{modes[1]}: one of the two")
    mode = modes[0] if modes else ""
    stray = {name: f"--{name.replace('_', '-')}" for name in given if name != mode and name not in USES[mode]}
    if stray and mode:
        raise UsageError(f"--{mode} takes no {', no '.join(stray.values())}: leave out one or the other")
    owners = {name: " or ".join(f"--{mode}" for mode, used in USES.items() if name in used) for name in stray}
    if stray:
        belong = ", ".join(f"{option} belongs to {owners[name]}" for name, option in stray.items())
        raise UsageError(f"{belong}: give that too, or leave it out")


def _main(args: argparse.Namespace, command: str, given: list[str]) -> int:
    from hybrid.bench.ceiling import ceiling, impossible
    from hybrid.bench.probe import probe
    from hybrid.bench.report import as_dict, head, row_dict, row_lines, say
    from hybrid.devices.energy import meter_for
    from hybrid.spec.devicesheet import sheet_for

    _check(given)
    if args.requests or args.conversation:
        from hybrid.bench.online import online

        return online(args, command)
    if args.acceptance:
        from hybrid.bench.acceptance import acceptance

        return acceptance(args, command)
    if not any((*args.prompt, *args.tokens)):
        raise UsageError("nothing to measure: give -p or -n a number that is not 0")
    with ExitStack() as held:
        begin = time.perf_counter()
        checkpoint = held.enter_context(open_model(args))
        if checkpoint.hparams.dimensions:
            from hybrid.bench.embedding import embeddings

            unused = [name for name in OF_WRITERS if getattr(args, name) != parser().get_default(name)]
            if unused:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
                raise UsageError(f"{options}: of models that write text, and {checkpoint.name} makes embeddings")
            return embeddings(args, checkpoint, command, held)
        schedule, opened = open_devices(args, checkpoint, held)
        device = opened.device
        opening = time.perf_counter() - begin
        probes = probe(opened.main)
        begin = time.perf_counter()
        engine = _engine(args, checkpoint, device, schedule)
        seconds = opening + time.perf_counter() - begin
        about = {
            "command": command,
            "device": device.name,
            "driver": driver_of(opened.main),
            "kernels": kernels_of(opened.main),
            "model": checkpoint.name,
            "schedule": schedule.schedule.name,
            "precision": {k: list(v) for k, v in engine.runner.precision.items()},
            "weights_bytes": device.memory()["weights"],
            "context": engine.cache.ctx,
            "chunk": engine.sizes.rows[-1],
            "deterministic": args.deterministic,
            "load_seconds": seconds,
            "passed_over": fallbacks(opened, engine),
        }
        sheet = sheet_for(about["device"])
        limit, rows = ceiling(probes, sheet), []
        say(head(as_dict(about, [], probes, limit, ())), args.json)
        for row in _rows(args, engine, meter_for(opened.main) if args.energy else None):
            rows.append(row)
            say(row_lines(row_dict(row, limit)), args.json)
        later = [reason for reason in fallbacks(opened, engine) if reason not in about["passed_over"]]
        about["passed_over"] = [*about["passed_over"], *later]
    if later:
        say([f"passed over: {reason}" for reason in later], args.json)
    wrong = impossible(rows, probes, sheet)
    if args.json:
        print(json.dumps(as_dict(about, rows, probes, limit, wrong)))
    if wrong:
        raise ValueError(f"the measurement is wrong: {'; '.join(wrong)}")
    return 0


def _engine(args: argparse.Namespace, checkpoint: Any, device: Device, schedule: Any) -> Engine:
    """An engine with enough context for the longest test."""
    from hybrid.engine.loading import EngineConfig, LoadClock
    from hybrid.engine.loop import Engine

    depth, longest = max(args.ctx_depth), max((*args.prompt, *args.tokens))
    # Decoding begins with two tokens and samples one after the last.
    ctx = max(depth + max(args.prompt) + 1, max((max(depth, 2) + n + 1 for n in args.tokens if n), default=0))
    if ctx > checkpoint.hparams.context_length:
        raise ValueError(
            f"a depth of {depth} and {longest} tokens more need {ctx} positions: the model was made for "
            f"{checkpoint.hparams.context_length}"
        )
    config = EngineConfig(
        precision=args.precision,
        kv=args.kv,
        weights=args.weights,
        requantize=args.requantize,
        ctx=ctx,
        slots=max(args.batch_size),
        chunk=args.chunk,
        n_tokens=checkpoint.hparams.vocab,
        deterministic=args.deterministic,
    )
    clock = LoadClock()
    with clock.shown(True):
        return Engine(checkpoint, device, config, schedule=schedule, clock=clock)


def _rows(args: argparse.Namespace, engine: Engine, meter: Meter | None) -> Iterator[Row]:
    """Run the tests in order."""
    from hybrid.bench.measure import Bench

    tests = []
    for batch in args.batch_size:
        bench = Bench(engine, args.repetitions, batch=batch, meter=meter)
        tests += [(bench.prefill, n, d) for d in args.ctx_depth for n in args.prompt if n]
        tests += [(bench.decode, n, d) for d in args.ctx_depth for n in args.tokens if n]
    for test, n, depth in tracked(tests, "tests"):
        yield test(n, depth)


if __name__ == "__main__":
    sys.exit(main())
