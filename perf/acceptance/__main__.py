"""Acceptance rate of a draft model: `python -m perf.acceptance MODEL DRAFT --text FILE`.

A draft token is accepted where it equals the model's sample (specs: the sample depends on seed, position and logits alone,
and the draft shares the noise). So a pair need not be run together: the model writes a text, the draft samples at
every position of it, and speculation with k draft tokens a pass is simulated from where the two agree. What is measured is a property of the two models and the text; the device matters by its rounding alone.

perf.targets uses perf/acceptance/pairs.toml: --json prints the figures of a [[pair]] for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hybrid.cli import Parser, UsageError, positive, run, usage
from hybrid.cli.progress import tracked
from hybrid.engine.sampling import Sampling
from hybrid.kernels.oracle.sampling import choose
from hybrid.model import Model as Loaded
from hybrid.model import load
from hybrid.perf.acceptance import LENGTHS, Measured, summed

SEPARATOR = "\n\f\n"
"""Between documents of a text."""


def beginnings(text: str, model: Loaded, count: int, length: int) -> list[list[int]]:
    """The first `length` ids of the first `count` stretches of a text's documents. ValueError where it has none."""
    found: list[list[int]] = []
    for document in text.split(SEPARATOR):
        ids = model.encode(document)
        found += [ids[at : at + length] for at in range(0, len(ids) - length, 8 * length)]
    if not found:
        raise ValueError(f"the text is shorter than a beginning of {length} tokens: give a longer one")
    return [found[i] for i in np.linspace(0, len(found) - 1, min(count, len(found)), dtype=int)]


def measure(
    model: Loaded, draft: Loaded, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
) -> Measured:
    """Where the draft agrees with the texts of `tokens` tokens that the model writes after these prompts."""
    if model.engine.target.n_tokens != draft.engine.target.n_tokens:
        raise ValueError(
            f"{draft.checkpoint.name} has another tokenizer than {model.checkpoint.name}: it cannot draft for it"
        )
    texts = []
    for ids in tracked(prompts, "texts"):
        handle = model.submit(
            list(ids), max_tokens=tokens, ignore_eos=True, temperature=sampling.temperature, seed=sampling.seed
        )
        said = list(handle.result(3600).ids)
        texts.append([g == s for g, s in zip(_drafts(draft, ids, said, sampling), said, strict=True)])
    return summed(texts)


def _drafts(draft: Loaded, ids: Sequence[int], said: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """The draft's sample at each position of a text, given the text before it."""
    rows = draft.logits([*ids, *said])[len(ids) - 1 : -1, : draft.engine.target.n_tokens]
    for i, row in enumerate(rows):
        yield choose(row, sampling.words()[0], len(ids) - 1 + i, np.float32)


def table(found: Measured, model: str, draft: str) -> str:
    lines = [
        f"{draft} for {model}: {100 * found.agreed:.1f} % of {found.choices} choices predicted",
        "",
        f"{'drafts':>8} {'tokens per pass':>16} {'if independent':>15}",
    ]
    for k, tokens in zip(LENGTHS, found.tokens, strict=True):
        a = found.agreed
        alike = (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1
        lines.append(f"{k:>8} {tokens:>16.3f} {alike:>15.3f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.acceptance",
        description="Acceptance rate of a draft model, and the tokens per pass that it gives.",
    )
    p.add_argument(
        "model", metavar="MODEL", help=".gguf file, Hugging Face directory, or OWNER/NAME[:FILE.gguf] on Hugging Face"
    )
    p.add_argument("draft", metavar="DRAFT", help="the same, with the same tokenizer")
    p.add_argument("--text", type=Path, required=True, metavar="FILE", help="text whose beginnings the model continues")
    p.add_argument("--prompts", type=positive, default=40, metavar="N", help="how many beginnings (40)")
    p.add_argument("--prompt-length", type=positive, default=24, metavar="N", help="tokens of each (24)")
    p.add_argument(
        "--tokens", type=positive, default=48, metavar="N", help="tokens that the model writes after each (48)"
    )
    p.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy; else drawn, by the same noise (0)"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise (0)")
    p.add_argument("--device", default="cpu", metavar="NAME", help="of both (cpu)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def _main(args: argparse.Namespace) -> int:
    with usage():
        sampling = Sampling(args.temperature, seed=args.seed)
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--text {args.text}: {e}") from None
    ctx = args.prompt_length + args.tokens + 1
    with load(args.model, args.device, ctx=ctx) as model, load(args.draft, args.device, ctx=ctx) as draft:
        prompts = beginnings(text, model, args.prompts, args.prompt_length)
        found = measure(model, draft, prompts, args.tokens, sampling)
        names = model.checkpoint.name, draft.checkpoint.name
    print(json.dumps({"model": names[0], "draft": names[1], **asdict(found)}) if args.json else table(found, *names))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
