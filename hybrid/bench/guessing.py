"""What guessed tokens are worth on a device, whatever a trained pair of models would guess: a text is decoded plainly, then again
by passes that verify guesses of it, right with a set rate. With a draft model its passes are run for every guess and what they
choose is not used: drafting takes its time.

The text is drawn at so high a temperature that the noise alone chooses: it is the same however passes round, and costs what
sampling costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import hybrid
from hybrid.arguments import open_model
from hybrid.bench.report import SCHEMA
from hybrid.cli import UsageError
from hybrid.devices.about import driver_of, kernels_of, provenance
from hybrid.engine.draft_model import DraftModel
from hybrid.engine.drafts import Drafter, Replay
from hybrid.engine.engine import Engine
from hybrid.engine.interface import PassRunner
from hybrid.engine.sampling import Sampling
from hybrid.engine.speculation import MOST, Counts, Speculation, expected

NOISE = Sampling(temperature=1e6, seed=1)


@dataclass(frozen=True, slots=True)
class Guessed:
    """One test: `n` tokens after `depth` others, with guesses that are right with `rate`, `k` of them in a pass (None: by their
    worth). Seconds: medians of the repetitions."""

    n: int
    depth: int
    rate: float
    k: int | None
    draft: str
    plain: float
    """Tokens per second of the same text without guesses."""
    speed: float
    drafted: int
    """Of one repetition, so are the others."""
    accepted: int
    verified: int
    passes: int
    pass_ms: Mapping[int, float]
    """Milliseconds of a pass by its rows, as the host waits for it."""
    guess_ms: float
    """Of drafting, for each guess."""

    @property
    def tokens_per_pass(self) -> float:
        return self.n / self.passes

    @property
    def ideal(self) -> float:
        """Tokens of a verification if each guess were right by itself with `rate`: for the mean number of guesses."""
        return expected(self.rate, round(self.drafted / self.verified)) if self.verified else 1.0


class Rehearsed(DraftModel):
    """A draft model whose passes are run and whose guesses are a known text's: as if its cache held these."""

    replay: Drafter

    def propose_all(self, wanted: Mapping[Hashable, tuple[Sequence[int], int]]) -> dict[Hashable, list[int]]:
        vocab = self.engine.target.n_tokens  # the other model may have more
        wanted = {key: ([i % vocab for i in ids], most) for key, (ids, most) in wanted.items()}
        found = super().propose_all(wanted)
        for key, own in found.items():
            ids, most = wanted[key]
            found[key] = known = list(self.replay.propose(ids, most))[: len(own)]
            self._followed[key].ids = [*ids, *(i % vocab for i in known[: len(own) - 1])]
        return found


class Guessing:
    """Tests on an engine that nothing else uses, made with guesses. draft: the engine of a draft model, None where guesses are to
    cost nothing, and its name."""

    def __init__(self, engine: Engine, repeats: int, draft: PassRunner | None = None, name: str = "") -> None:
        self.engine, self.repeats, self.draft, self.name = engine, repeats, draft, name if draft is not None else "looked up"
        self._texts: dict[tuple[int, int], tuple[float, list[int]]] = {}

    def run(self, n: int, depth: int, rate: float, k: int | None) -> Guessed:
        """RuntimeError where a text with guesses is not the plain one."""
        prompt = [1 + i % 1000 for i in range(max(depth, 2))]
        if (n, depth) not in self._texts:
            self._texts[n, depth] = self._plain(prompt, n)
        plain, text = self._texts[n, depth]
        replay = Replay([*prompt, *text], rate)
        seconds, counts = [], Counts()
        drafter = self._drafter(replay)
        failures: list[str] = []
        guessing = Speculation(drafter, k, failures.append)
        try:
            for run in range(-1, self.repeats):
                counts = Counts()
                spent, found = self._timed(prompt, lambda slot: guessing.stream(self.engine, slot, prompt, n, NOISE, (), counts))  # noqa: B023
                if failures or found != text:
                    raise RuntimeError(f"the text with guesses is another ({failures or 'other tokens'}): the figures are void")
                if run >= 0:
                    seconds.append(spent)
        finally:
            drafter.close()
        costs = guessing.costs
        return Guessed(n, depth, rate, k, self.name, plain, (n - 1) / statistics.median(seconds), counts.drafted, counts.accepted,
                       counts.verified, counts.passes, {r: 1e3 * s for r, s in sorted(costs.passes.items())}, 1e3 * costs.guess)

    def _drafter(self, replay: Replay) -> Drafter:
        if self.draft is None:
            return replay
        made = Rehearsed(self.draft, self.name, lambda: None)
        made.replay = replay
        return made

    def _plain(self, prompt: Sequence[int], n: int) -> tuple[float, list[int]]:
        """Tokens per second, and the text."""
        runs = [self._timed(prompt, lambda slot: self.engine.stream(slot, prompt, n)) for _ in range(self.repeats + 1)]
        if len({tuple(text) for _, text in runs}) > 1:
            raise RuntimeError("plain texts differ from one another: the figures are void")
        return (n - 1) / statistics.median(seconds for seconds, _ in runs[1:]), runs[0][1]

    def _timed(self, prompt: Sequence[int], stream: Callable[[int], Any]) -> tuple[float, list[int]]:
        """Seconds from the first token to the last, and all of them."""
        engine = self.engine
        slot = engine.admit(engine.cache.ctx, NOISE)
        try:
            tokens = stream(slot)
            found = [next(tokens)]
            begin = time.perf_counter()
            found += tokens
            return time.perf_counter() - begin, found
        finally:
            engine.wait()
            engine.release(slot)


def as_dicts(found: Sequence[Guessed]) -> list[dict[str, Any]]:
    return [{**asdict(g), "tokens_per_pass": g.tokens_per_pass, "tokens_of_a_verification_expected": g.ideal} for g in found]


def text(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people."""
    lines = [f"{'guessed':18}{'right':>7}{'k':>6}{'plain':>9}{'tok/s':>9}{'times':>7}{'tokens/pass':>13}{'expected':>10}"
             f"{'accepted':>10}{'guess ms':>10}  pass ms by rows"]  # fmt: skip
    for g in found:
        share = f"{100 * g['accepted'] / g['drafted']:.0f} %" if g["drafted"] else "-"
        passes = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in g["pass_ms"].items())
        k = "auto" if g["k"] is None else g["k"]
        lines.append(f"{g['n']:>6} @ {g['depth']:<9}{g['rate']:7.2f}{k:>6}{g['plain']:9.1f}{g['speed']:9.1f}"
                     f"{g['speed'] / g['plain']:7.2f}{g['tokens_per_pass']:13.2f}{g['tokens_of_a_verification_expected']:10.2f}"
                     f"{share:>10}{g['guess_ms']:10.3f}  {passes}")  # fmt: skip
    return lines


def guessing(args: argparse.Namespace, command: str) -> int:
    """Run what the arguments of `hybrid.bench` ask for and print it."""
    if args.draft and args.draft_random:
        raise UsageError("--draft or --draft-random: one of the two")
    if max(args.batch_size) > 1 or not any(args.tokens):
        raise UsageError("--acceptance is of one sequence that generates tokens: leave -b, and give -n a number that is not 0")
    most = max((k for k in args.speculate if k is not None), default=MOST)
    ctx = max(max(args.ctx_depth), 2) + max(args.tokens) + 1
    options = {"schedule": args.schedule, "precision": args.precision, "kv": args.kv, "progress": True, "npu": args.npu}
    with ExitStack() as held:
        model = held.enter_context(hybrid.load(open_model(args), args.device, weights=args.weights, ctx=ctx, chunk=args.chunk,
                                               draft="lookup", speculate=most, **options))  # fmt: skip
        draft = name = None
        if args.draft or args.draft_random:
            draft, name = _draft(args, ctx, held), args.draft or args.draft_random
        tests = Guessing(model.engine, args.repetitions)
        if draft is not None:
            tests = Guessing(model.engine, args.repetitions, draft.engine, f"{name} on {draft.device}")
        found = as_dicts([tests.run(n, depth, rate, k) for depth in args.ctx_depth for n in args.tokens if n
                          for rate in args.acceptance for k in args.speculate])  # fmt: skip
        main = getattr(model.engine.device, "main", model.engine.device)
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "command": command,
            "device": model.device,
            "driver": driver_of(main),
            "kernels": kernels_of(main),
            "model": model.checkpoint.name,
            "precision": {k: list(v) for k, v in model.engine.precision.items()},
            "draft": tests.name,
            "passed_over": [*model.passed_over, *model.engine.faults],
            "guessed": found,
        }
    head = [f"{report['device']}, {report['driver']}; {provenance(report['device'])}",
            *(f"passed over: {reason}" for reason in report["passed_over"]),
            f"{report['model']}, guesses {report['draft']}, right by set rates"]  # fmt: skip
    print(json.dumps(report) if args.json else "\n".join([*head, "", *text(found)]))
    return 0


def _draft(args: argparse.Namespace, ctx: int, held: ExitStack) -> hybrid.Model:
    from hybrid.checkpoint.random import random_checkpoint

    found = args.draft or random_checkpoint(args.draft_random, args.type or "q4_0", args.head, None, args.vocab)
    return held.enter_context(hybrid.load(found, args.device, ctx=ctx, kv=args.kv, precision=args.precision, progress=True))
