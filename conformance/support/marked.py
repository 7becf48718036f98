"""The embedded model with the marks and the template of a family that calls tools by marks (Gemma 4, FunctionGemma), in
place of rarely used pieces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from conformance.support.paths import DEMO, ROOT
from hybrid.checkpoint import Checkpoint, open_checkpoint
from hybrid.text.tokenizer import CONTROL, MARKERS, NORMAL, PRINTED_MARKS, USER_DEFINED, Tokenizer

TEMPLATES = {p.stem: p.read_text() for p in sorted((ROOT / "conformance/data/templates").glob("*.jinja"))}
CONTROLS = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|think|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
MARKS = (*CONTROLS, *PRINTED_MARKS, *TURNS)


@cache
def with_marks(family: str, printed: int) -> Tokenizer:
    """The embedded vocabulary with some pieces replaced by marks; of Gemma 4 without the turns of earlier families.
    printed: the type of the marks that GGUF files print."""
    v = open_checkpoint(DEMO).tokenizer.vocabulary
    pieces, types = list(v.pieces), list(v.types)
    marks = (*(CONTROLS if family == "gemma4" else ()), *PRINTED_MARKS)
    normal = [i for i, t in enumerate(types) if t == NORMAL][100 : 100 + len(marks)]
    for i, mark in zip(normal, marks, strict=True):
        pieces[i], types[i] = mark, CONTROL if mark in CONTROLS else printed
    for i in [i for i, p in enumerate(pieces) if p in TURNS] if family == "gemma4" else ():
        pieces[i] = f"<unused{i}>"
    return Tokenizer(replace(v, pieces=tuple(pieces), types=tuple(types)), markers=MARKERS)


gemma4 = partial(with_marks, "gemma4")


def checkpoint_with(family: str, printed: int = USER_DEFINED) -> Checkpoint:
    """The embedded checkpoint with that vocabulary and the family's template."""
    return replace(
        open_checkpoint(DEMO), make_tokenizer=lambda: with_marks(family, printed), chat_template=TEMPLATES[family]
    )


checkpoint4 = partial(checkpoint_with, "gemma4")
