"""python -m hybrid.generate [MODEL] --prompt TEXT: stream generated text, then print a line of statistics. With --chat
and no prompt, a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hybrid.arguments import add_engine, add_ray, add_sampling, check_drafts, engine_options, replicas, sampling_options
from hybrid.cli import Parser, UsageError, check_writable, input_waits, positive, run, usage
from hybrid.core.places import DEMO

DEFAULT_TOKENS, CONVERSATION_TOKENS = 64, 1024
BATCH_SLOTS = 8
DEFAULT_PROMPT = "def read_file(path):\n    "


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m hybrid.generate",
        description="Generate text from a checkpoint.",
        epilog="Text goes to standard output, statistics and errors to standard error. "
        "Exit codes: 0, 1 error, 2 wrong usage, 3 device lost or not answering, 130 interrupted.",
    )
    p.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face (default: the embedded demonstration model)",
    )
    p.add_argument("--prompt", "-p", help="text to continue; - reads standard input")
    p.add_argument(
        "--max-tokens", "-n", type=positive, metavar="N", help="stop after N tokens (64; 1024 in a conversation)"
    )
    add_sampling(p)
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    p.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is one user turn, in the model's chat format; without --prompt, a conversation at the terminal",
    )
    p.add_argument(
        "--system", default="", metavar="TEXT", help="with --chat: how the model is to answer (no system prompt)"
    )
    p.add_argument(
        "--parse-special",
        action="store_true",
        help="recognise control tokens such as <start_of_turn> in what is typed (else they are ordinary text)",
    )
    add_engine(p)
    p.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="batch of prompts: one a line, or a JSON object a line with prompt and any option of Model.submit; - reads "
        "standard input",
    )
    p.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --batch: append a JSON object a line for each result; resumes after existing results",
    )
    p.add_argument("--slots", type=positive, metavar="N", help="with --batch: most running prompts (8)")
    add_ray(p, "with --batch: distribute prompts over engines with Ray Data")
    p.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-text token")
    p.add_argument("--json", action="store_true", help="print one JSON object with text, ids and statistics instead")
    p.add_argument("--stats", action="store_true", help="more statistics: loading, precision, counts per pass, memory")
    p.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write device times of every step as a Chrome trace (slower: waits after each pass)",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    import hybrid
    from hybrid.engine.sampling import Sampling
    from hybrid.text.chat import doubt
    from hybrid.text.stops import StopFilter

    path = args.model
    if path is None:
        if not DEMO.is_file():
            raise ValueError(f"the embedded model {DEMO} does not exist: name a .gguf file or a Hugging Face directory")
        path = DEMO
    with usage():  # before the model is loaded
        Sampling(**sampling_options(args))
        check_drafts(args)
        StopFilter(args.stop)
    if args.logprobs and not args.json and args.output is None:
        raise UsageError("--logprobs are printed with --json, or written with --batch FILE --output FILE")
    if args.system and not args.chat:
        raise UsageError("--system belongs to --chat: a plain prompt has no turns")
    if args.trace is not None:
        check_writable("--trace", args.trace)
    asked = _batch(args)
    text = args.prompt
    converse = args.chat and text is None and asked is None
    if converse and not sys.stdin.isatty():
        raise UsageError("--chat needs --prompt TEXT (- reads standard input), or a terminal for a conversation")
    if converse and (args.json or args.trace is not None):
        raise UsageError("--json and --trace are about one answer: give --prompt with --chat")
    if text == "-":
        text = sys.stdin.read()
    elif text is None:
        text = DEFAULT_PROMPT
        if asked is None and not converse and input_waits():
            print("note: standard input is not read: give --prompt - to continue its text", file=sys.stderr)
    options = {**engine_options(args), "slots": 1 if asked is None else args.slots or BATCH_SLOTS}
    if devices := replicas(args):
        if asked is None:
            raise UsageError("--ray belongs to --batch FILE")
        return _ray(path, options, asked, args, devices)
    model = hybrid.load(path, args.device, **options, profile=args.trace is not None, progress=True)
    for line in model.engine.runner.memory_lines():
        print(line, file=sys.stderr)
    with model:
        if asked is not None or converse:  # one answer's statistics say it
            for reason in model.passed_over:
                print(f"passed over: {reason}", file=sys.stderr)
        for line in doubt(model.checkpoint.tokenizer, model.checkpoint.chat_template) if args.chat else ():
            print(line, file=sys.stderr)
        if asked is not None:
            return _run_batch(model, asked, args)
        return _converse(model, args) if converse else _generate(model, text, args)


def _batch(args: argparse.Namespace) -> Any:
    """The prompts of --batch, or None; read before the model is loaded."""
    if args.batch is None:
        if args.output is not None or args.slots is not None:
            raise UsageError("--output and --slots belong to --batch FILE")
        return None
    if args.prompt is not None or args.trace is not None:
        raise UsageError("--batch has its own prompts: leave out --prompt and --trace")
    from hybrid.generate.many import decoded, read, written

    if args.output is not None:
        check_writable("--output", args.output)
    with usage():
        piped = str(args.batch) == "-"
        asked = read(args.batch, _standard_input() if piped else decoded(args.batch, args.batch.read_bytes()))
        if args.output is not None:
            written(args.output, asked)
    return asked


def _standard_input() -> str:
    """All of standard input, its line ends as they are."""
    from hybrid.generate.many import decoded

    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else decoded(Path("standard input"), binary.read())


def _run_batch(model: Any, asked: Any, args: argparse.Namespace) -> int:
    from hybrid.generate.many import run_batch

    drafts = model.speculator.name if args.stats and model.speculator is not None else ""
    return run_batch(
        model,
        lambda text: _encoded(model, text, args),
        asked,
        _options(args),
        output=args.output,
        as_json=args.json,
        drafts=drafts,
    )


def _ray(path: Path, loading: dict[str, Any], asked: Any, args: argparse.Namespace, devices: list[str]) -> int:
    try:
        from hybrid.generate import scale
    except ImportError as error:
        raise ValueError(f"--ray needs {error.name}, which is not installed: pip install hybrid-kernels[ray]") from None
    from hybrid.engine.speculation import most_drafts
    from hybrid.generate.many import write_all

    drafts = (args.draft or "lookup") if args.stats and most_drafts(args.draft, args.speculate) else ""
    load = {"path": str(path.resolve()), **loading}
    prompts = scale.Prompts(args.chat, args.system, args.parse_special)
    with scale.engines(load, devices, args.ray_address) as pool:

        def results(rest: Any, first: int) -> Any:
            return pool.results(rest, first, _options(args), prompts)

        return write_all(results, asked, ", ".join(devices), output=args.output, as_json=args.json, drafts=drafts)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of Model.generate and Model.submit."""
    most = CONVERSATION_TOKENS if args.chat and args.prompt is None and args.batch is None else DEFAULT_TOKENS
    most = most if args.max_tokens is None else args.max_tokens
    return {**sampling_options(args), "stop": args.stop, "ignore_eos": args.ignore_eos, "max_tokens": most}


def _encoded(model: Any, text: str, args: argparse.Namespace) -> list[int]:
    """A prompt's ids; with --chat those of a user message."""
    from hybrid.generate.many import encoded

    return encoded(model, text, args.chat, args.system, args.parse_special)


def _converse(model: Any, args: argparse.Namespace) -> int:
    from hybrid.generate.chat_loop import Options, run_loop

    options = Options(_options(args), args.parse_special, args.system)
    return run_loop(model, options, args.stats)


def _generate(model: Any, text: str, args: argparse.Namespace) -> int:
    prompt = _encoded(model, text, args)
    pieces = model.generate(prompt, **_options(args))
    if not args.json and not args.chat:
        print(text, end="", flush=True)
    out, interrupted = [], False
    try:
        for piece in pieces:
            out.append(piece)
            if not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        pieces.close()
    stats = model.stats
    if stats is None:  # interrupted before the first pass
        return 130
    if args.json:
        print(json.dumps({"prompt": text, "text": "".join(out), **stats.as_dict()}))
    else:
        print(flush=True)
        print("\n".join([stats.line(), *stats.reasons(), *(stats.details() if args.stats else [])]), file=sys.stderr)
    if args.trace is not None:
        from hybrid.engine.trace import write_trace

        write_trace(args.trace, model.engine.runner.trace, model.device)
    return 130 if interrupted else 0
