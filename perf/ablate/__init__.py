"""Speed-up of each optimisation on a device: the same decode with and without it, run alternately.

    python -m perf.ablate --random gemma3-27b --device vulkan
    python -m perf.ablate model.gguf --only fused-ffn int8-activations

Each optimisation of perf/ablate/switches.toml is switched off alone: speed-ups are measured, never multiplied together.
The baseline with all of them is measured again beside every switch, in alternating order, so that a drifting clock
slows both. Seconds are of one token on the host's clock, the median over repetitions. Last, all that are in the plan are
switched off at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybrid.arguments import add_model, open_model
from hybrid.checkpoint import Checkpoint
from hybrid.cli import Parser, UsageError, positive, run
from hybrid.cli.progress import progress_bar
from hybrid.core.device import Program
from hybrid.devices.about import driver_of, kernels_of
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options, Request
from hybrid.perf.ablate.switches import (
    Switch,
    bindings_without,
    find_switch,
    load_switches,
    schedule_without,
    tuning_without,
)
from hybrid.spec.schedule import find_schedule

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """One switch: median seconds per token with and without the optimisation, and the smallest and largest ratio
    seen."""

    name: str
    summary: str
    with_it: float
    without: float
    ratios: tuple[float, float]

    @property
    def times(self) -> float:
        """How many times faster a token is with it."""
        return self.without / self.with_it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"times": self.times}


KEY = ("decode", 1, 1, False, True, frozenset[str]())
"""Of the decode plan of one sequence among an engine's programs."""


def program_without(made: Engine, switches: Sequence[Switch]) -> Program:
    """The engine's decode plan, compiled without some optimisations: the weights are the same."""
    device: Any = made.device
    with tuning_without(switches, device.tuning):
        program: Program = device.compile(made.runner.plan("decode", 1, 1), bindings=bindings_without(switches))
    return program


@contextmanager
def opened(
    checkpoint: Checkpoint, device: str, switches: Sequence[Switch], depth: int, tokens: int
) -> Iterator[Engine]:
    """An engine with the remaining switches' schedule and a filled cache."""
    from hybrid.kernels.vulkan.device import open_device

    with open_device(device) as found:
        schedule = schedule_without(find_schedule(checkpoint.hparams.family), switches)
        config = EngineConfig(ctx=depth + tokens + 2, n_tokens=checkpoint.hparams.vocab)
        made = Engine(checkpoint, found, config, schedule=schedule)
        decode(made, depth, 1, 0)
        yield made


def decode(made: Engine, depth: int, tokens: int, start: int) -> tuple[float, list[int]]:
    """Seconds of one token, over `tokens` of them after `depth` positions and a first one, and all ids. start: positions
    that count as computed."""
    prompt = np.random.default_rng(0).integers(2, 1000, depth).tolist()
    request = Request(0, prompt, Options(max_tokens=tokens + 1, ignore_eos=True), start=start)
    request.private = True
    handle = made.drive(request)
    while not request.generated:
        made.drive_step()
    begin = time.perf_counter()
    found = handle.result()
    return (time.perf_counter() - begin) / tokens, list(found.ids)


def seconds(made: Engine, program: Program, depth: int, tokens: int) -> float:
    """Of one token that a program decodes."""
    made.runner._programs[KEY] = program  # type: ignore[index]  # options are a set of names
    return decode(made, depth, tokens, depth - 1)[0]


class Ablation:
    """One checkpoint on one device; engines are opened once for each schedule."""

    def __init__(self, checkpoint: Checkpoint, device: str, depth: int, tokens: int, repeats: int) -> None:
        self.checkpoint, self.device, self.depth, self.tokens, self.repeats = checkpoint, device, depth, tokens, repeats
        self._held = ExitStack()
        self._engines: dict[tuple[str, ...], tuple[Engine, Program]] = {}

    def __enter__(self) -> Ablation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def _engine(self, switches: Sequence[Switch]) -> tuple[Engine, Program]:
        """The engine for the schedule without these switches, and its own decode program."""
        profiled = [s for s in switches if s.profile]
        key = tuple(s.name for s in profiled)
        if key not in self._engines:
            made = self._held.enter_context(opened(self.checkpoint, self.device, profiled, self.depth, self.tokens))
            self._engines[key] = made, program_without(made, [])
        return self._engines[key]

    @property
    def about(self) -> dict[str, Any]:
        """Description of the baseline and its device."""
        made, _ = self._engine([])
        return {
            "device": made.device.name,
            "driver": driver_of(made.device),
            "kernels": kernels_of(made.device),
            "model": self.checkpoint.name,
            "precision": {k: list(v) for k, v in made.runner.precision.items()},
            "depth": self.depth,
            "tokens": self.tokens,
            "pairs": self.repeats,
        }

    def speed_up(
        self, switches: Sequence[Switch], name: str, advance: Callable[[int], object] = lambda done: None
    ) -> SpeedUp:
        """The baseline beside the same without `switches`; `advance` is called with 1 after each pair."""
        baseline, ours = self._engine([])
        other, theirs = self._engine(switches)
        removed = [find_switch(n) for s in switches for n in s.beside if n not in {s.name for s in switches}]
        if removed or any(s.split or s.tuning for s in switches):
            ours, theirs = program_without(baseline, removed), program_without(other, [*switches, *removed])
        pairs = []
        for i in range(self.repeats + 1):
            first = seconds(baseline, ours, self.depth, self.tokens) if i % 2 else 0.0
            without = seconds(other, theirs, self.depth, self.tokens)
            pairs.append((first or seconds(baseline, ours, self.depth, self.tokens), without))
            advance(1)
        pairs = pairs[1:]  # the first warms up
        ratios = [b / a for a, b in pairs]
        medians = [statistics.median(p[i] for p in pairs) for i in (0, 1)]
        summary = switches[0].summary if len(switches) == 1 else "those of the plan at once"
        summary += f"; both sides without {', '.join(s.name for s in removed)}" if removed else ""
        return SpeedUp(name, summary, medians[0], medians[1], (min(ratios), max(ratios)))


def text(about: Mapping[str, Any], found: Sequence[SpeedUp]) -> str:
    lines = [
        f"{about['model']} on {about['device']}, {about['driver']}, decode of one sequence at {about['depth']} positions; "
        f"measured, medians of {about['pairs']} pairs",
        "",
        f"{'optimisation':22}{'ms with':>10}{'without':>10}{'times':>8}{'from':>8}{'to':>7}  what it is",
    ]
    for s in found:
        lines.append(
            f"{s.name:22}{1e3 * s.with_it:10.3f}{1e3 * s.without:10.3f}{s.times:8.2f}{s.ratios[0]:8.2f}"
            f"{s.ratios[1]:7.2f}  {s.summary}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.ablate",
        description="The speed-up of each optimisation on this device: decode with and without it.",
    )
    add_model(p)
    p.add_argument("--device", default="vulkan", metavar="NAME", help="vulkan or vulkan:N (vulkan)")
    p.add_argument("--only", nargs="+", metavar="SWITCH", help="these switches of perf/ablate/switches.toml (all)")
    p.add_argument("--depth", type=positive, default=512, metavar="N", help="positions in the cache (512)")
    p.add_argument("--tokens", type=positive, default=16, metavar="N", help="tokens of one repetition (16)")
    p.add_argument("-r", "--repetitions", type=positive, default=7, metavar="N", help="pairs of repetitions (7)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return p


def _main(args: argparse.Namespace, command: str) -> int:
    from hybrid.kernels.vulkan.instance import list_devices, select

    if args.device == "cpu":
        raise UsageError("--device cpu: the switches are of Vulkan's plans and submits; give vulkan or vulkan:N")
    select(list_devices(), args.device)  # before a model is made
    chosen = [find_switch(name) for name in args.only or load_switches()]
    measure: list[tuple[list[Switch], str]] = [([s], s.name) for s in chosen]
    if not args.only:
        measure.append((chosen, "all in the plan"))
    with ExitStack() as held:
        checkpoint = held.enter_context(open_model(args))
        needed, most = args.depth + args.tokens + 2, checkpoint.hparams.context_length
        if needed > most:
            raise ValueError(
                f"--depth {args.depth} and --tokens {args.tokens} need {needed} positions: the model was made for {most}"
            )
        ablation = held.enter_context(Ablation(checkpoint, args.device, args.depth, args.tokens, args.repetitions))
        advance = held.enter_context(progress_bar(len(measure) * (args.repetitions + 1), "ablate", False, "pair"))
        found = [ablation.speed_up(switches, name, advance) for switches, name in measure]
        about = {"schema": SCHEMA, "command": command, **ablation.about}
    print(json.dumps({**about, "speedups": [s.as_dict() for s in found]}) if args.json else text(about, found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command = f"python -m perf.ablate {shlex.join(sys.argv[1:] if argv is None else argv)}"
    return run(lambda: _main(args, command))
