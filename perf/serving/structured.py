"""python -m perf.serving.structured: passes and tokens per pass of answers with a JSON schema, without and with the tokens
that the grammar expects.

Method: requests one after another, each with another prompt, greedy. Blanks between JSON's tokens are free, as of
response_format, or fixed, as of tool calls. A grammar is compiled for each run, so it knows no earlier text. A run of one
answer comes first and is not counted: it compiles the programs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybrid.cli import Parser, positive, run
from hybrid.core.places import DEMO
from hybrid.model import Model, load
from hybrid.serve.grammars import Grammars
from hybrid.serve.structured import json_rule

FLAG: dict[str, Any] = {"type": "boolean"}
TEXT: dict[str, Any] = {"type": "string", "maxLength": 12}
ARGUMENT = {"name": TEXT, "optional": FLAG, "description": TEXT}
SCHEMA = {
    "type": "object",
    "properties": {
        "function": TEXT,
        "description": TEXT,
        "visibility": {"enum": ["public", "protected", "private"]},
        "arguments": {
            "type": "array",
            "items": {"type": "object", "properties": ARGUMENT, "required": [*ARGUMENT], "additionalProperties": False},
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "required": ["function", "description", "visibility", "arguments"],
    "additionalProperties": False,
}
NAMES = ("area", "open", "close", "read", "write", "parse", "encode", "decode", "sort", "merge", "split", "join")


class Answers(NamedTuple):
    """Counts of one run. texts: the ids of each answer."""

    texts: list[list[int]]
    passes: int
    drafted: int
    accepted: int
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def measure(model: Model, count: int, fixed: bool, drafts: bool) -> Answers:
    """Run `count` requests with different prompts. fixed: fixed blanks. drafts: with the grammar's drafts."""
    lark = f"start: {json_rule(SCHEMA, exact=fixed, strict=True)}"
    grammars = Grammars(model.checkpoint.tokenizer, model.hparams.vocab)
    try:
        before, begun, texts = model.metrics(), time.perf_counter(), []
        for n in range(count):
            constraint = grammars.constraint(lark, "schema")
            prompt = f"def {NAMES[n % len(NAMES)]}_{n}("
            asked = {"max_tokens": 200, "constraint": constraint, "speculate": None if drafts else 0}
            texts.append(list(model.submit(prompt, **asked).result(600).ids))
        seconds, after = time.perf_counter() - begun, model.metrics()
    finally:
        grammars.close()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    return Answers(texts, after.passes - before.passes, drafted, accepted, seconds)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.serving.structured",
        description="Passes and tokens per pass of answers with a JSON schema.",
    )
    p.add_argument("model", metavar="MODEL", nargs="?", default=DEMO, help="model (the embedded one)")
    p.add_argument("--device", default="cpu", metavar="NAME", help="device (cpu)")
    p.add_argument("--slots", type=positive, default=8, metavar="N", help="rows of a pass that has drafts (8)")
    p.add_argument("--answers", type=positive, default=12, metavar="N", help="answers of a run (12)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _main(args: argparse.Namespace) -> int:
    with load(args.model, args.device, slots=args.slots, ctx=256, precision="exact") as model:
        print(f"{'blanks':>8}{'drafts':>8}{'tokens':>8}{'passes':>8}{'tokens a pass':>15}{'tok/s':>8}{'accepted':>14}")
        for blanks in ("free", "fixed"):
            texts = []
            for drafts in ("no", "yes"):
                how = blanks == "fixed", drafts == "yes"
                measure(model, 1, *how)
                one = measure(model, args.answers, *how)
                texts.append(one.texts)
                rate, speed = one.tokens / one.passes, one.tokens / one.seconds
                counts = f"{one.tokens:8}{one.passes:8}{rate:15.2f}{speed:8.1f}"
                print(f"{blanks:>8}{drafts:>8}{counts}{f'{one.accepted} of {one.drafted}':>14}")
            if texts[0] != texts[1]:
                raise RuntimeError("a text differs: in exact precision drafts must not change it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
