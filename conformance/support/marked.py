"""The embedded model with the marks and the template of a family that calls tools by marks: Gemma 4's, in place of
rarely used pieces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from conformance.support.paths import DEMO, ROOT
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.text.tokenizer import CONTROL, MARKERS, NORMAL, PRINTED_MARKS, USER_DEFINED, Tokenizer

TEMPLATES = {p.stem: p.read_text() for p in sorted((ROOT / "conformance/data/templates").glob("*.jinja"))}
CONTROLS = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|think|>")
MARKS = (*CONTROLS, *PRINTED_MARKS)


@cache
def gemma4(printed: int) -> Tokenizer:
    """The embedded vocabulary with some pieces replaced by Gemma 4's marks. printed: the type of the marks that GGUF
    files print."""
    v = open_checkpoint(DEMO).tokenizer.vocabulary
    pieces, types = list(v.pieces), list(v.types)
    normal = [i for i, t in enumerate(types) if t == NORMAL][100 : 100 + len(MARKS)]
    for i, mark in zip(normal, MARKS, strict=True):
        pieces[i], types[i] = mark, CONTROL if mark in CONTROLS else printed
    old = [i for i, p in enumerate(pieces) if p in ("<start_of_turn>", "<end_of_turn>")]
    for i in old:
        pieces[i] = f"<unused{i}>"
    return Tokenizer(replace(v, pieces=tuple(pieces), types=tuple(types)), markers=MARKERS)


def checkpoint4(printed: int = USER_DEFINED) -> Checkpoint:
    """The embedded checkpoint with that vocabulary and Gemma 4's template."""
    return replace(open_checkpoint(DEMO), make_tokenizer=lambda: gemma4(printed), chat_template=TEMPLATES["gemma4"])
