"""python -m hybrid.serve [MODEL ...]: a server of OpenAI's, Anthropic's and Ollama's APIs with a chat page and a dashboard.
All HTTP code is in this package."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.arguments import (
    EMBEDDING,
    ENGINE,
    UNSET,
    add_engine,
    add_random,
    add_ray,
    check_drafts,
    engine_options,
    open_model,
    replicas,
)
from hybrid.cli import Parser, UsageError, amount, positive, run, size, usage
from hybrid.core.places import DEMO
from hybrid.serve.settings import Settings, loopback_names

if TYPE_CHECKING:
    from hybrid.checkpoint import Checkpoint
    from hybrid.model import Model
    from hybrid.serve.models import Several

HOST, PORT = "127.0.0.1", 8000
SLOTS = 32


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m hybrid.serve",
        description="Serve a checkpoint: OpenAI's and Anthropic's endpoints under /v1, Ollama's under /api, a chat page at /, metrics at /dashboard.",
        epilog="SIGTERM and Ctrl-C drain running requests, then exit with 0; a second one exits at once. "
        "Exit codes: 0, 1 error, 2 wrong usage, 3 device lost.",
    )
    p.add_argument(
        "models",
        nargs="*",
        type=Path,
        metavar="MODEL",
        help=".gguf file, Hugging Face directory, OWNER/NAME[:FILE.gguf] on Hugging Face, or a folder of models (default: the embedded demonstration model)",
    )
    p.set_defaults(model=None)

    def listed(option: str, metavar: str, about: str) -> None:
        p.add_argument(option, action="append", default=[], metavar=metavar, help=f"{about}; may be repeated")

    def count(option: str, about: str, default: int | None = None) -> None:
        p.add_argument(option, type=positive, default=default, metavar="N", help=about)

    def seconds(option: str, default: float, about: str) -> None:
        p.add_argument(option, type=amount, default=default, metavar="SECONDS", help=f"{about} ({default:g})")

    add_random(p)
    count("--keep", "of several models, most that stay loaded; the least recently used one goes first (as many as fit)")
    p.add_argument("--host", default=HOST, help=f"address to listen on; 0.0.0.0 is every interface ({HOST})")
    p.add_argument("--port", type=_port, default=PORT, metavar="N", help=f"0 picks a free one and prints it ({PORT})")
    p.add_argument("--name", default="", help="the model's name in requests (the checkpoint's name)")
    listed("--api-key", "KEY", "require this key in requests")
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys, one a line; not visible in the process list"
    )
    about = "also accept this Host header on a loopback address, for example behind a proxy"
    listed("--allow-host", "NAME", about)
    listed("--cors", "ORIGIN", "allow requests from this origin's pages")
    add_engine(p)
    count("--slots", f"most running requests ({SLOTS})", SLOTS)
    p.add_argument("--no-warm-up", action="store_true", help="start sooner: compile a pass of a new size on first use")
    count("--queue", "most waiting requests; further ones get 429 (256)", 256)
    p.add_argument("--max-body", type=size, default="4MiB", metavar="SIZE", help="largest request body (4MiB)")
    count("--max-prompt", "most tokens of a prompt (the context)")
    count("--max-tokens", "most tokens of an answer (the context)")
    count("--max-choices", "most choices of a request (8)", 8)
    seconds("--idle", 30.0, "disconnect clients that neither send nor read for so long")
    seconds("--total", 600.0, "time limit of a request")
    seconds("--drain", 60.0, "time for running requests after SIGTERM")
    p.add_argument(
        "--on-device-loss",
        choices=("restart", "exit"),
        default="restart",
        help="after a device loss: reload the model, or exit with code 3 (restart)",
    )
    p.add_argument("--seed", type=int, metavar="N", help="base seed for requests without a seed (from the system)")
    add_ray(p, "one replica for each device, through Ray Serve")
    p.add_argument("--access-log", action="store_true", help="a line on standard error for each request")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    try:
        from hybrid.serve import process
    except ImportError as error:
        raise ValueError(
            f"the server needs {error.name}, which is not installed: pip install hybrid-kernels[serve]"
        ) from None
    given: list[Path] = [path for named in args.models for path in _inside(named)]
    args.model = given[0] if given else None
    if args.model is None and args.random is None:
        if not DEMO.is_file():
            raise ValueError(f"the embedded model {DEMO} does not exist: name a .gguf file or a Hugging Face directory")
        args.model = DEMO
    with open_model(args) as checkpoint:  # report usage errors and unreadable files before binding the port
        embeds = checkpoint.hparams.dimensions > 0 and len(given) < 2

    with usage():
        check_drafts(args)
    if len(given) > 1:
        _check_several(args)
    options = {**engine_options(args), "slots": args.slots, "queue": args.queue}
    devices = replicas(args)
    stray = [name for name in ENGINE if name not in EMBEDDING and options[name] not in UNSET] + ["ray"] * bool(devices)
    if embeds and stray:
        option = "gpu-memory" if stray[0] == "memory" else stray[0]
        raise UsageError(f"--{option} belongs to models that write text, and this one makes embeddings")
    if devices:
        if args.random is not None:
            raise UsageError("--random is for measuring one engine: leave out --ray")
        return _ray(args, {"path": args.model, **options}, devices)

    def load(opened: Callable[[], Checkpoint] = lambda: open_model(args)) -> Model:
        import hybrid
        from hybrid.text.chat import doubt

        checkpoint = opened()
        how: dict[str, Any] = {"device": args.device, "progress": sys.stderr.isatty(), "warm": not args.no_warm_up}
        if checkpoint.hparams.dimensions:
            slots = {} if args.slots == SLOTS else {"slots": args.slots}
            known = {name: options[name] for name in EMBEDDING}
            embedder: Any = hybrid.load_embedder(checkpoint, **known, **slots, **how)
            for reason in embedder.passed_over:
                print(f"passed over: {reason}", file=sys.stderr, flush=True)
            return embedder
        model = hybrid.load(checkpoint, **options, **how)
        c = model.checkpoint
        told = (*(f"passed over: {p}" for p in model.passed_over), *model.engine.runner.memory_lines())
        several = f"{c.name}: " if len(given) > 1 else ""
        for line in (*told, *doubt(c.tokenizer, c.chat_template)):
            print(several + line, file=sys.stderr, flush=True)
        return model

    loads = load if len(given) < 2 else _several(args, given, options, load)
    return process.serve(loads, settings(args), **_listening(args))


def _inside(path: Path) -> list[Path]:
    """The models of a folder, those that cannot be served passed over; else the path itself, which names one model.
    ValueError for a folder without any."""
    from hybrid.checkpoint.find import models_in

    if not path.is_dir() or (path / "config.json").exists():
        return [path]
    found = models_in(path)
    kept = [one for one in found if not _is_passed_over(one)]
    if not kept:
        refused, empty = f"none of its {len(found)} models can be served", "it holds no .gguf file or model directory"
        raise ValueError(f"{path}: {refused if found else empty}")
    return kept


def _is_passed_over(path: Path) -> bool:
    from hybrid.checkpoint import CheckpointError, open_checkpoint

    try:
        with open_checkpoint(path) as c:
            why = f"{path} is a drafter, for --draft" if c.hparams.backbone else ""
    except CheckpointError as error:
        why = str(error)
    if why:
        print(f"passed over: {why}", file=sys.stderr, flush=True)
    return bool(why)


def _check_several(args: argparse.Namespace) -> None:
    """UsageError for options that belong to one model."""
    for option, is_given in (
        ("--name NAME", bool(args.name)),
        ("--ray", args.ray),
        ("--draft MODEL", args.draft not in (None, "lookup")),
    ):
        if is_given:
            raise UsageError(f"{option} belongs to one model, and there are several")


def _several(
    args: argparse.Namespace, paths: list[Path], options: Mapping[str, Any], load: Callable[..., Model]
) -> Several:
    """The models at these paths, by their checkpoints' names; those that have one name by their files'. ValueError for two
    of one file name."""
    from hybrid.checkpoint import open_checkpoint
    from hybrid.serve.models import Several, Source

    found = []
    for path in paths:
        opening = partial(open_checkpoint, path)
        with opening() as c:
            source = Source(partial(load, opening), f"{c.path.parent}/", opening, c.hparams.dimensions > 0)
            found.append((c.name, c.path, source))
    names = Counter(name for name, _, _ in found)
    sources: dict[str, Source] = {}
    for name, path, source in found:
        named = name if names[name] == 1 else path.stem if path.is_file() else path.name
        if named in sources:
            raise ValueError(f"{path}: another of the models is named '{named}' too: leave one of them out")
        sources[named] = source

    def fits(loaded: Model, name: str) -> bool:
        from hybrid.engine.loading import EngineConfig
        from hybrid.ready import has_room

        own = {f.name: options[f.name] for f in fields(EngineConfig) if f.name in options}
        with sources[name].open() as c:
            return has_room(c, loaded.engine.device, EngineConfig(**own), args.schedule)

    return Several(sources, args.keep, fits, args.queue)


def _ray(args: argparse.Namespace, options: dict[str, Any], devices: list[str]) -> int:
    try:
        from hybrid.serve.scale import ray
    except ImportError as error:
        raise ValueError(
            f"--ray needs {error.name}, which is not installed: pip install hybrid-kernels[serve,ray]"
        ) from None
    return ray.run(options, settings(args), devices, address=args.ray_address, **_listening(args))


def _listening(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("host", "port", "drain", "access_log")}


def settings(args: argparse.Namespace) -> Settings:
    keys = [*args.api_key]
    if args.api_key_file is not None:
        keys += [line.strip() for line in args.api_key_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not keys:
            raise UsageError(f"--api-key-file {args.api_key_file} holds no key")
    if any(not k.isascii() or not k.strip() for k in keys):
        raise UsageError("an API key is empty or not ASCII: HTTP headers cannot carry it")
    hosts = loopback_names(args.host)
    if args.allow_host and not hosts:
        raise UsageError("--allow-host belongs to a loopback --host: elsewhere every name is taken")
    return Settings(
        name=args.name,
        keys=tuple(keys),
        hosts=(*hosts, *(h.lower() for h in args.allow_host)),
        cors=tuple(args.cors),
        max_body=args.max_body,
        max_prompt=args.max_prompt or 0,
        max_tokens=args.max_tokens or 0,
        max_choices=args.max_choices,
        idle=args.idle,
        total=args.total,
        on_loss=args.on_device_loss,
        seed=args.seed,
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)
