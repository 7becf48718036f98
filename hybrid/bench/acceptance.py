"""Benchmark of speculative decoding at set acceptance rates, independent of a trained pair of models. A text is decoded
without drafts, then again with passes that verify drafts of it. A draft model's passes run for their time; its tokens
are discarded.

The temperature is so high that only the noise decides the samples. The text is then independent of rounding and has
the cost of sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import hybrid
from hybrid.arguments import open_model
from hybrid.bench.report import about, say
from hybrid.checkpoint import Checkpoint
from hybrid.cli import UsageError
from hybrid.devices.about import provenance
from hybrid.engine.speculation import MOST, Replay, expected

NOISE = 1e6  # the temperature


@dataclass(frozen=True, slots=True)
class AtRate:
    """One test: `n` tokens after `depth` positions, with `k` draft tokens of acceptance `rate` in a pass (None: chosen
    by the speculation controller). Times are medians of the repetitions."""

    n: int
    depth: int
    rate: float
    k: int | None
    draft: str
    plain: float
    """Tokens per second of the same text without drafts."""
    speed: float
    drafted: int
    """Draft tokens of one repetition, like the other counts."""
    accepted: int
    verified: int
    passes: int
    pass_ms: Mapping[int, float]
    """Milliseconds of a pass by its rows, measured on the host."""
    draft_ms: float
    """Milliseconds to draft one token, at the largest number of drafts in a pass."""

    @property
    def tokens_per_pass(self) -> float:
        return self.n / self.passes

    @property
    def ideal(self) -> float:
        """Expected tokens of a verify pass with independent acceptances of `rate`, for the mean number of drafts."""
        return expected(self.rate, round(self.drafted / self.verified)) if self.verified else 1.0


class AcceptanceTests:
    """Tests on an otherwise idle model, loaded with a draft model or `lookup`, whose drafter it replaces."""

    def __init__(self, model: hybrid.Model, repeats: int) -> None:
        assert model.speculator is not None
        self.model, self.speculator, self.repeats = model, model.speculator, repeats
        self.draft = model.speculator.draft
        self.name = "what was looked up" if self.draft is None else self.draft.name
        self._texts: dict[tuple[int, int], tuple[float, list[int]]] = {}

    def run(self, n: int, depth: int, rate: float, k: int | None) -> AtRate:
        """Run one test. RuntimeError if the text with drafts differs from that without."""
        prompt, spec = [1 + i % 1000 for i in range(max(depth, 2))], self.speculator
        if (n, depth) not in self._texts:
            self._texts[n, depth] = self._timed(prompt, n, None)
        plain, text = self._texts[n, depth]
        spec.drafter, spec.k = Replay({tuple(prompt): text}, rate, self.draft), k
        spec.forget()
        before = self.model.metrics()
        speed, _ = self._timed(prompt, n, text)
        after, runs = self.model.metrics(), self.repeats + 1
        passes, drafts = spec.costs.known("pass"), spec.costs.known("draft")
        most = max(drafts, default=1)
        names = ("drafted", "accepted", "verified", "passes")
        counted = {name: (getattr(after, name) - getattr(before, name)) // runs for name in names}
        return AtRate(
            n,
            depth,
            rate,
            k,
            self.name,
            plain,
            speed,
            **counted,
            pass_ms={r: 1e3 * s for r, s in sorted(passes.items())},
            draft_ms=1e3 * drafts.get(most, 0.0) / most,
        )

    def _timed(self, prompt: Sequence[int], n: int, wanted: list[int] | None) -> tuple[float, list[int]]:
        """(tokens per second after the first token, the text). wanted: the text to draft; None: no drafts."""
        speeds, text = [], wanted
        for _ in range(self.repeats + 1):
            for _ in self.model.generate(
                prompt, n, temperature=NOISE, seed=1, ignore_eos=True, speculate=0 if wanted is None else None
            ):
                pass
            stats = self.model.stats
            assert stats is not None
            if self.model.engine.faults or list(stats.ids) != (text or list(stats.ids)):
                raise RuntimeError(
                    f"texts differ ({'; '.join(self.model.engine.faults) or 'other tokens'}): the measurement is invalid"
                )
            text = list(stats.ids)
            speeds.append(stats.tokens_per_second)
        assert text is not None
        return statistics.median(speeds[1:]), text


def as_dict(g: AtRate) -> dict[str, Any]:
    return {**asdict(g), "tokens_per_pass": g.tokens_per_pass, "tokens_of_a_verification_expected": g.ideal}


HEADER = (
    f"{'speculation':18}{'rate':>7}{'k':>6}{'plain':>9}{'tok/s':>9}{'times':>7}{'tokens/pass':>13}{'expected':>10}"
    f"{'accepted':>10}{'draft ms':>10}  pass ms by rows"
)


def line(g: Mapping[str, Any]) -> str:
    """A table line of a test in the form of `as_dict`."""
    share = f"{100 * g['accepted'] / g['drafted']:.0f} %" if g["drafted"] else "-"
    passes = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in g["pass_ms"].items())
    k = "auto" if g["k"] is None else g["k"]
    return (
        f"{g['n']:>6} @ {g['depth']:<9}{g['rate']:7.2f}{k:>6}{g['plain']:9.1f}{g['speed']:9.1f}"
        f"{g['speed'] / g['plain']:7.2f}{g['tokens_per_pass']:13.2f}{g['tokens_of_a_verification_expected']:10.2f}"
        f"{share:>10}{g['draft_ms']:10.3f}  {passes}"
    )


def acceptance(args: argparse.Namespace, command: str) -> int:
    """Run the benchmark of `hybrid.bench --acceptance` and print it."""
    check_draft(args)
    wanted: Sequence[int | None] = args.speculate or (None,)
    if max(args.batch_size) > 1 or not any(args.tokens):
        raise UsageError(
            "--acceptance is of one sequence that generates tokens: leave -b, and give -n a number that is not 0; of "
            "several sequences it is with --requests"
        )
    if 0 in wanted:
        raise UsageError(
            "--speculate 0 belongs to --requests: --acceptance alone is always compared with a run without drafts"
        )
    most = max((k for k in wanted if k is not None), default=MOST)
    ctx = max(max(args.ctx_depth), 2) + max(args.tokens) + 1
    options = {"schedule": args.schedule, "precision": args.precision, "kv": args.kv, "progress": True, "npu": args.npu}
    with hybrid.load(
        open_model(args),
        args.device,
        weights=args.weights,
        requantize=args.requantize,
        ctx=ctx,
        chunk=args.chunk,
        slots=1,
        draft=draft_of(args),
        speculate=most,
        **options,
    ) as model:
        tests, found = AcceptanceTests(model, args.repetitions), list[dict[str, Any]]()
        report: dict[str, Any] = {
            **about(model, command),
            "draft": tests.name,
            "passed_over": [*model.passed_over, *model.engine.faults],
            "speculation": found,
        }
        say(
            [
                f"{report['device']}, {report['driver']}; {provenance(report['device'])}",
                *(f"passed over: {reason}" for reason in report["passed_over"]),
                f"{report['model']}, drafts of {report['draft']} with set acceptance rates",
                "",
                HEADER,
            ],
            args.json,
        )
        for depth, n, rate, k in product(args.ctx_depth, (n for n in args.tokens if n), args.acceptance, wanted):
            found.append(as_dict(tests.run(n, depth, rate, k)))
            say([line(found[-1])], args.json)
    if args.json:
        print(json.dumps(report))
    return 0


def check_draft(args: argparse.Namespace) -> None:
    """UsageError for conflicting options of the draft model."""
    if args.draft and args.draft_random:
        raise UsageError("--draft or --draft-random: one of the two")
    if args.draft_head and not args.draft_random:
        raise UsageError("--draft-head belongs to --draft-random: a file has the types that it has")


def draft_of(args: argparse.Namespace) -> Checkpoint | str:
    """The `draft` argument of hybrid.load: a checkpoint, a file's name, or `lookup` by default."""
    from hybrid.checkpoint.random import random_checkpoint

    if args.draft_random:
        return random_checkpoint(
            args.draft_random, args.type or "q4_0", args.draft_head or args.head, args.layers, args.vocab
        )
    return args.draft or "lookup"
