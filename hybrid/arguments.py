"""Command-line arguments that model commands share, and the checkpoint, schedule and devices that they name."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hybrid.cli import CACHES, PRECISIONS, UsageError, positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybrid.checkpoint import Checkpoint
    from hybrid.devices.opening import Opened
    from hybrid.engine.loop import Engine
    from hybrid.spec.schedule import Schedule

# Functions import readers and backends lazily, so that --help, --version and usage errors are fast.


def add_model(p: argparse.ArgumentParser) -> None:
    """Add MODEL and --random NAME with its options, of which benchmark commands take either."""
    p.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face",
    )
    add_random(p)


def add_random(p: argparse.ArgumentParser) -> None:
    """Add --random NAME, a model without a file, and its options."""
    p.add_argument(
        "--random", metavar="NAME", help="instead: random weights in the shape of a sheet of specs/models, no file"
    )
    p.add_argument("--type", metavar="TYPE", help="with --random: of matrices (q4_0)")
    p.add_argument("--head", metavar="TYPE", help="with --random: of embedding and head (q6_k; q8_0 for odd rows)")
    p.add_argument("--layers", type=int, metavar="N", help="with --random: only the first N layers")
    p.add_argument("--vocab", type=int, metavar="N", help="with --random: a vocabulary of N tokens")


def open_model(args: argparse.Namespace) -> Checkpoint:
    """The checkpoint that the arguments of `add_model` name. UsageError for none or both; ValueError for an invalid
    one."""
    from hybrid.checkpoint import open_checkpoint
    from hybrid.checkpoint.random import random_checkpoint

    if (args.model is None) == (args.random is None):
        raise UsageError("name a MODEL, or give --random NAME: one of the two")
    if args.random is not None:
        return random_checkpoint(args.random, args.type or "q4_0", args.head, args.layers, args.vocab)
    stray = next((k for k in ("type", "head", "layers", "vocab") if getattr(args, k) is not None), None)
    if stray:
        raise UsageError(f"--{stray} belongs to --random: a file has its own")
    return open_checkpoint(args.model)


def add_devices(p: argparse.ArgumentParser) -> None:
    """Add --device, --schedule and --npu."""
    p.add_argument(
        "--device", default="auto", metavar="NAME", help="auto (a real GPU, else cpu), cpu, vulkan, or vulkan:N (auto)"
    )
    p.add_argument(
        "--schedule",
        metavar="NAME",
        help="a shipped schedule such as gemma3-hybrid, or a file (default: the one of the model's family)",
    )
    p.add_argument(
        "--npu",
        default="npu",
        choices=("npu", "sim"),
        help="run a schedule's NPU steps on the hardware or on its simulator (npu)",
    )


ENGINE = (
    "schedule",
    "npu",
    "weights",
    "requantize",
    "precision",
    "kv",
    "ctx",
    "chunk",
    "deterministic",
    "memory",
    "draft",
    "speculate",
    "prove",
)
"""Arguments of `add_engine` with the same name in hybrid.load."""
EMBEDDING = ("weights", "requantize", "precision", "ctx", "chunk", "prove")
"""Those that hybrid.load_embedder has too."""
UNSET = (None, False, "auto", "npu")
"""Values of the others where they are not given."""


def add_weights(p: argparse.ArgumentParser) -> None:
    """Add --weights and --requantize."""
    from hybrid.core.dtypes import WRITABLE_TYPES

    p.add_argument(
        "--weights",
        choices=WRITABLE_TYPES,
        metavar="TYPE",
        help=f"convert matrices to {', '.join(WRITABLE_TYPES)} while loading; those of another quantised type only with "
        "--requantize",
    )
    p.add_argument("--requantize", action="store_true", help="with --weights: quantise quantised matrices again")


def add_engine(p: argparse.ArgumentParser) -> None:
    """Add the load options of commands that generate: --device and `ENGINE`."""
    add_devices(p)
    add_weights(p)
    p.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        metavar="NAME",
        help="auto (int8 activations for quantised weights, else float32), exact (float32), fast (auto)",
    )
    p.add_argument(
        "--kv", default="auto", choices=CACHES, metavar="TYPE", help=f"type of the KV cache: {', '.join(CACHES)} (auto)"
    )
    p.add_argument(
        "--ctx", type=positive, metavar="N", help="most tokens of prompt and text (the model's, at most 4096)"
    )
    p.add_argument("--chunk", type=positive, metavar="N", help="most rows of a prefill pass (what suits the device)")
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="bit-identical results, independent of prompt chunks and other requests (slower)",
    )
    p.add_argument(
        "--gpu-memory",
        dest="memory",
        metavar="SIZE",
        help="device memory budget such as 16GiB; the KV cache gets the rest after weights and activations (full contexts)",
    )
    p.add_argument(
        "--no-prove",
        dest="prove",
        action="store_false",
        help="do not prove a model's kernels on its first load with this GPU and driver",
    )
    add_drafts(p)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of hybrid.load from the arguments of `add_engine`."""
    return {name: getattr(args, name) for name in ENGINE}


def add_ray(p: argparse.ArgumentParser, what: str) -> None:
    """Add --ray, --replica and --ray-address: several engines, started by Ray. what: --ray's help."""
    p.add_argument("--ray", action="store_true", help=f"{what} (extra: ray)")
    p.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="DEVICE",
        help="with --ray: a replica on this device, as of --device; may be repeated (every real GPU here, else cpu)",
    )
    p.add_argument(
        "--ray-address", metavar="ADDRESS", help="with --ray: a running cluster's (one of this machine's own)"
    )


def replicas(args: argparse.Namespace) -> list[str]:
    """Device of each replica that --ray starts; empty without --ray. UsageError."""
    if not args.ray:
        if args.replica or args.ray_address:
            raise UsageError("--replica and --ray-address belong to --ray")
        return []
    if args.replica or args.device != "auto":
        return args.replica or [args.device]
    from hybrid.kernels.vulkan.api import VulkanUnavailable
    from hybrid.kernels.vulkan.instance import list_devices

    try:
        found = [f"vulkan:{d.index}" for d in list_devices() if d.kind != "cpu"]
    except VulkanUnavailable:
        found = []
    return found or ["cpu"]


def _speculate(text: str) -> str | int:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write auto, or a number of draft tokens") from None


def add_drafts(p: argparse.ArgumentParser) -> None:
    """Add --draft and --speculate, as of hybrid.load (`check_drafts`)."""
    p.add_argument(
        "--draft",
        metavar="MODEL",
        help="speculative decoding with a smaller model of the same tokenizer, with the assistant of a Gemma 4, or with `lookup`",
    )
    p.add_argument(
        "--speculate",
        type=_speculate,
        metavar="K",
        help="draft tokens of a pass: auto, or 0 to 16; without --draft by `lookup` (auto with --draft, else 0)",
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write ID=B, a token id and a number, such as 107=-100") from None


SAMPLING: tuple[tuple[str, Callable[[str], Any], Any, str, str], ...] = (
    ("temperature", float, 0.0, "T", "0 takes the most likely token (0)"),
    ("top_k", int, 0, "K", "sample from the K most likely; 0 is off (0)"),
    ("top_p", float, 1.0, "P", "sample within this probability mass; 1 is off (1)"),
    ("min_p", float, 0.0, "P", "drop tokens below this share of the most likely one's probability; 0 is off (0)"),
    (
        "repetition_penalty",
        float,
        1.0,
        "R",
        "divide logits of tokens that prompt or text have by R (multiply negative ones); 1 is off (1)",
    ),
    ("presence_penalty", float, 0.0, "P", "subtract P from logits of tokens the text has (0)"),
    ("frequency_penalty", float, 0.0, "P", "subtract P as often as the text has the token (0)"),
    ("seed", int, 0, "N", "the same seed gives the same text (0)"),
    ("logprobs", int, 0, "N", "with --json or --output: of each token, and of the N best (0)"),
)
"""Options of hybrid.engine.sampling.Sampling with the same names: type, default, placeholder, help."""


def add_sampling(p: argparse.ArgumentParser) -> None:
    """Add the sampling options (`sampling_options`)."""
    for name, kind, default, metavar, about in SAMPLING:
        p.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar=metavar, help=about)
    p.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=B",
        help="add B, -100 to 100, to the logit of token ID; may be repeated",
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling options of Model.generate."""
    return {name: getattr(args, name) for name, *_ in SAMPLING} | {"logit_bias": dict(args.logit_bias)}


def check_drafts(args: argparse.Namespace) -> None:
    """Validate --draft and --speculate before loading. ValueError."""
    from hybrid.engine.speculation import most_drafts

    most_drafts(args.draft, args.speculate)


def open_devices(args: argparse.Namespace, checkpoint: Checkpoint, held: ExitStack) -> tuple[Schedule, Opened]:
    """The schedule and the devices that the arguments of `add_devices` name, closed with `held`."""
    from hybrid.devices import opening
    from hybrid.spec.schedule import find_schedule, named_schedule

    schedule = find_schedule(checkpoint.hparams.family) if args.schedule is None else named_schedule(args.schedule)
    opened = opening.open_devices(schedule, args.device, args.npu)
    held.callback(opened.device.close)
    return schedule, opened


def fallbacks(opened: Opened, engine: Engine) -> list[str]:
    """For reports: requested devices that are not or no longer used, and the reasons."""
    return [*opened.passed_over, *opened.device.failures, *engine.faults]
