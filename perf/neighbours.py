"""The text of a generation alone, and beside programs that use the same GPU: it must be the same.

    python -m perf.neighbours --random gemma3-4b --tokens 2000 --beside matrix --beside engines --kills 20
    python -m perf.neighbours models/demo-gemma3-q8_0.gguf --device vulkan --tokens 40 --prompt 8 --beside copy --kills
    2

Neighbours are separate processes (perf.neighbour). Tokens are drawn at temperature 1 from one seed: one wrong
number changes all that follows. The run alone is made twice, since a comparison with what does not repeat would mean
nothing. With --kills, neighbours start and are killed with SIGKILL while one generation runs; it is slowed where it
would end first.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybrid.arguments import add_model, open_model
from hybrid.bench.probe import products
from hybrid.cli import Parser, UsageError, amount, positive, run
from hybrid.devices.about import driver_of, kernels_of
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.engine.request import Options
from hybrid.perf.neighbour import BUSY, open_gpu

BESIDE = ("copy", "matrix", "engines")
AT_ONCE = 3  # neighbours that start, run and are killed side by side
LONGEST_LIFE = 0.4  # seconds from a neighbour's first work to its end
STOP_S = 20.0  # for a neighbour that was asked to end


class NeighbourFailed(RuntimeError):
    """A neighbour did not do its work: the run proves nothing."""


class Neighbour:
    """One process of perf.neighbour. It ends with its parent, by its own clock after `seconds`, or by stop() and
    kill()."""

    def __init__(self, options: Sequence[str], seconds: float) -> None:
        self.options = " ".join(options)
        command = [sys.executable, "-m", "hybrid.perf.neighbour", *options, "--seconds", f"{seconds:.1f}", "--attached"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill up)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._errors)

    def wait_busy(self, deadline: float) -> None:
        """Until its first work is done. NeighbourFailed where it ends before that, or `deadline` (monotonic) comes."""
        assert self._process.stdout is not None
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            raise NeighbourFailed(
                f"neighbour {self.options}: not busy in the time that was left ({left:.0f} s): raise --limit"
            )
        if self._process.stdout.readline().decode().strip() != BUSY:
            raise NeighbourFailed(f"neighbour {self.options}: {self._said()}")

    def wait_ended(self, deadline: float) -> None:
        """Until it has ended by itself."""
        self._process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> str:
        """End the neighbour and return its report. NeighbourFailed where it had already ended."""
        early = self._process.poll() is not None
        try:
            said = self._process.communicate(timeout=STOP_S)[0].decode().strip()  # closes its standard input
        except subprocess.TimeoutExpired:
            self.kill()
            raise NeighbourFailed(
                f"neighbour {self.options} did not end within {STOP_S:.0f} s of being asked to"
            ) from None
        if early or self._process.returncode:
            raise NeighbourFailed(f"neighbour {self.options} ended too early: {said or self._said()}")
        return said

    def kill(self) -> None:
        """SIGKILL, as a crash would end it; harmless where it has ended. NeighbourFailed where even that does not end
        it."""
        self._process.kill()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            said = f"neighbour {self.options} is still there {STOP_S:.0f} s after SIGKILL: the driver holds it"
            raise NeighbourFailed(said) from None

    def _said(self) -> str:
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return "it said nothing, and does not end"
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or f"exit code {self._process.returncode}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One generation. first_difference: index of the first token that is not that of the run alone; None: the same
    text."""

    name: str
    tokens: int
    seconds: float
    """From the first token to the last."""
    first_difference: int | None
    faults: tuple[str, ...]
    """The engine's reports during the run."""
    neighbours: tuple[str, ...]
    """The neighbours' reports."""
    kills: int

    @property
    def per_second(self) -> float:
        return (self.tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.per_second}

    def line(self) -> str:
        text = "same text" if self.first_difference is None else f"DIFFERS from token {self.first_difference} on"
        more = [f"{self.kills} kills"] if self.kills else []
        more += [f"fault: {f}" for f in self.faults] + list(self.neighbours)
        return f"{self.name:24} {self.per_second:8.1f} tok/s  {text}" + "".join(f"; {m}" for m in more)


class Trials:
    """Generations of the same text with one engine. deadline (monotonic): when everything has to be over."""

    def __init__(self, engine: Engine, prompt: int, tokens: int, deadline: float, options: Sequence[str] = ()) -> None:
        self.engine, self.tokens, self.deadline = engine, tokens, deadline
        self.options = tuple(options)
        """Of every neighbour: its device."""
        self.done: list[Trial] = []
        self._ids = np.random.default_rng(0).integers(0, engine.target.n_tokens, prompt).tolist()
        self._first: list[int] = []  # the text of the run alone

    def alone(self) -> Trial:
        return self._trial("alone" if not self._first else "alone, again")

    def beside(self, name: str, neighbours: Sequence[Sequence[str]]) -> Trial:
        """While a neighbour with each of these options runs."""
        with self._neighbours(neighbours) as started:
            trial = self._trial(f"beside {name}", lambda: [n.stop() for n in started])
        return trial

    def killing(self, count: int, kinds: Sequence[str]) -> Trial:
        """While `count` neighbours of these kinds in turn start, work and are killed."""
        killer = Killer(count, [["--kind", kind, *self.options] for kind in kinds], self.deadline)
        trial = self._trial(f"{count} starts and kills", each=lambda n: killer.pace(n, self.tokens), during=killer)
        return trial

    @contextmanager
    def _neighbours(self, options: Sequence[Sequence[str]]) -> Iterator[list[Neighbour]]:
        started: list[Neighbour] = []
        try:
            for more in options:
                started.append(Neighbour([*more, *self.options], max(1.0, self.deadline - time.monotonic())))
            for neighbour in started:
                neighbour.wait_busy(self.deadline)
            yield started
        finally:
            for neighbour in started:
                neighbour.kill()

    def _trial(
        self,
        name: str,
        after: Callable[[], Sequence[str]] = tuple,
        each: Callable[[int], None] | None = None,
        during: Killer | None = None,
    ) -> Trial:
        before = len(self.engine.faults)
        ids, seconds = self._generate(each, during)
        said, kills = tuple(after()), during.kills if during else 0
        if len(set(ids)) < min(3, len(ids)):
            raise NeighbourFailed(
                f"a text of {len(ids)} tokens has {len(set(ids))} different ones: a wrong number would not show"
            )
        self._first = self._first or ids
        trial = Trial(
            name, len(ids), seconds, difference(self._first, ids), tuple(self.engine.faults[before:]), said, kills
        )
        self.done.append(trial)
        return trial

    def _generate(self, each: Callable[[int], None] | None, during: Killer | None) -> tuple[list[int], float]:
        """The text and its seconds. TimeoutError at the deadline."""
        engine, out = self.engine, list[int]()
        engine.runner.warm_up(len(self._ids))
        begin = time.monotonic()
        options = Options(max_tokens=self.tokens, ignore_eos=True, temperature=1.0, seed=0)
        handle = engine.generate(self._ids, options)
        try:
            with ExitStack() as held:
                for event in handle.events():
                    out.extend(event.ids)
                    if len(out) == 1:
                        begin = time.monotonic()
                        if during is not None:
                            held.enter_context(during)
                    if time.monotonic() > self.deadline:
                        raise TimeoutError(f"{len(out)} of {self.tokens} tokens when the time was up: raise --limit")
                    if each is not None:
                        each(len(out))
                seconds = time.monotonic() - begin
        finally:
            engine.finish([handle.request])
        return out, seconds


class Killer:
    """Threads that start neighbours and kill them shortly after their first work, `count` in all, while the block
    runs."""

    def __init__(self, count: int, options: Sequence[Sequence[str]], deadline: float) -> None:
        self.count, self.options, self.deadline = count, options, deadline
        self.kills = 0
        self._begun = 0
        self._random = random.Random(0)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._errors: list[NeighbourFailed] = []
        self._alive: set[Neighbour] = set()
        self._threads = [threading.Thread(target=self._work, name=f"killer {i}") for i in range(min(AT_ONCE, count))]
        self._since = 0.0

    def __enter__(self) -> Killer:
        self._since = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        with self._lock:
            alive = list(self._alive)
        for neighbour in alive:  # their threads wait for them
            neighbour.kill()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        if kind is None and self.kills < self.count:
            raise NeighbourFailed(
                f"{self.kills} of {self.count} neighbours were killed before the text ended: ask for more tokens"
            )

    def pace(self, done: int, tokens: int) -> None:
        """After each token: sleep so long that the text lasts until the last kill, as fast as they come now."""
        if self.kills == self.count or self._errors:
            return
        per_kill = (time.monotonic() - self._since) / max(self.kills, 1)
        left = max(tokens - done - 1, 0)
        if left:
            time.sleep(min(1.0, per_kill * (self.count - self.kills) / left / 2))
        while not left and self.kills < self.count and not self._errors and time.monotonic() < self.deadline:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            with self._lock:
                turn, life = self._begun, self._random.uniform(0, LONGEST_LIFE)
                self._begun += 1
            if turn >= self.count or self._stop.is_set():
                return
            neighbour = Neighbour(self.options[turn % len(self.options)], max(1.0, self.deadline - time.monotonic()))
            with self._lock:
                self._alive.add(neighbour)
            try:
                neighbour.wait_busy(self.deadline)
                self._stop.wait(life)
                neighbour.kill()
            except NeighbourFailed as error:
                if not self._stop.is_set():
                    self._errors.append(error)
                neighbour.kill()
                return
            with self._lock:
                self._alive.discard(neighbour)
                self.kills += 1


def difference(alone: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token that is another; None for the same text."""
    for i, (a, b) in enumerate(zip(alone, found, strict=False)):
        if a != b:
            return i
    return None if len(alone) == len(found) else min(len(alone), len(found))


def run_all(
    trials: Trials,
    beside: Mapping[str, Sequence[Sequence[str]]],
    kills: int,
    kinds: Sequence[str],
    say: Callable[[Trial], None],
) -> list[Trial]:
    """The run alone, twice; then beside each set of neighbours, by name; then while `kills` neighbours are killed."""
    say(trials.alone())
    say(trials.alone())
    for name, options in beside.items():
        say(trials.beside(name, options))
    if kills:
        say(trials.killing(kills, kinds))
    return trials.done


def probe_kinds(device: Any) -> tuple[str, ...]:
    """Kinds of neighbours that make a device busy without a model."""
    return ("matrix", "copy") if products(device, device.max_range) else ("copy",)


def sets_of(args: argparse.Namespace) -> dict[str, list[list[str]]]:
    """--beside as options of neighbours, by name."""
    found: dict[str, list[list[str]]] = {}
    for kind in dict.fromkeys(args.beside):
        if kind == "engines":
            model = [] if args.model is None else [args.model]
            for option in ("random", "type", "head", "layers", "vocab"):
                value = getattr(args, option)
                model += [] if value is None else [f"--{option}", str(value)]
            one = ["--kind", "engine", *model, "--prompt", str(args.prompt), "--tokens", str(args.tokens)]
            found[f"{args.engines} engines"] = [one] * args.engines
        else:
            found[kind] = [["--kind", kind]]
    return found


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.neighbours",
        description="Generates a text alone and beside other programs on the same GPU, and compares the tokens.",
        epilog="Exit codes: 0 the same text everywhere, 1 a difference or an error, 2 wrong usage, 3 device lost or not answering.",
    )
    add_model(p)
    p.add_argument("--device", default="gpu", metavar="NAME", help="gpu (a real one), vulkan, or vulkan:N (gpu)")
    p.add_argument("--prompt", type=positive, default=512, metavar="N", help="tokens before the text (512)")
    p.add_argument("--tokens", type=positive, default=2000, metavar="N", help="tokens of the text (2000)")
    p.add_argument(
        "--beside", action="append", default=[], choices=BESIDE, help="a neighbour of this kind; may be repeated"
    )
    p.add_argument("--engines", type=positive, default=2, metavar="N", help="of --beside engines: how many (2)")
    p.add_argument(
        "--kills", type=int, default=0, metavar="N", help="start and kill so many neighbours during one text (0)"
    )
    p.add_argument(
        "--limit", type=amount, default=540.0, metavar="S", help="give up after so many seconds in all (540)"
    )
    p.add_argument(
        "--json", action="store_true", help="print one JSON object instead, each run's line on standard error"
    )
    return p


def _main(args: argparse.Namespace, command: str) -> int:
    if args.kills < 0:
        raise UsageError(f"--kills {args.kills} is negative")
    deadline = time.monotonic() + args.limit
    with ExitStack() as held:
        checkpoint = held.enter_context(open_model(args))
        device = open_gpu(args.device)
        held.callback(device.close)
        engine = Engine(
            checkpoint, device, EngineConfig(ctx=args.prompt + args.tokens, n_tokens=checkpoint.hparams.vocab)
        )
        out = sys.stderr if args.json else sys.stdout
        about = {
            "command": command,
            "device": device.name,
            "driver": driver_of(device),
            "kernels": kernels_of(device),
            "model": checkpoint.name,
            "prompt": args.prompt,
            "tokens": args.tokens,
        }
        what = f"{checkpoint.name}: {args.tokens} tokens after {args.prompt}"
        print(f"{device.name}, {about['driver']}; {what}", file=out, flush=True)
        trials = Trials(engine, args.prompt, args.tokens, deadline, ["--device", args.device])
        found = run_all(
            trials, sets_of(args), args.kills, probe_kinds(device), lambda t: print(t.line(), file=out, flush=True)
        )
    same = all(t.first_difference is None for t in found)
    if args.json:
        print(json.dumps({**about, "same": same, "trials": [t.as_dict() for t in found]}))
    return 0 if same else 1


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command = f"python -m perf.neighbours {shlex.join(sys.argv[1:] if argv is None else argv)}"
    return run(lambda: _main(args, command))


if __name__ == "__main__":
    sys.exit(main())
