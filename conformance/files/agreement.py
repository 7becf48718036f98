"""python -m conformance.files.agreement: on how many texts every tokenizer gives the same ids. Its table is in
docs/models.md.

Two vocabularies, written in each format and read back: the demonstration model's, and the same with Gemma's runs of 2
to 31 spaces and newlines and HTML tags as user-defined pieces. Texts: the held-out documents, their lines, windows of
them, and random texts of runs, markers, accents, emoji and control bytes. `plain` ones hold no run of spaces longer
than the longest such piece and no U+2581; the other engines may differ on the rest.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformance.files.tokenizer_files import Pieces, from_gguf, from_json, tokenizer_json
from conformance.support.paths import ROOT
from conformance.support.synthetic import sentencepiece_model
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.text.tokenizer import MARKERS, SPACE, USER_DEFINED, Tokenizer

DEMO = ROOT / "models" / "demo-gemma3-q8_0.gguf"
HELD_OUT = ROOT / "conformance" / "data" / "demo-gemma3" / "held-out.txt"
FRAGMENTS = (
    " ",
    "  ",
    "   ",
    "     ",
    " " * 40,
    "\n",
    "\n\n\n\n",
    "the",
    " the",
    "thing",
    "abcd",
    "aaaaa",
    "abc",
    "\u00e9t\u00e9",
    "\u20ac",
    "\U0001f600",
    "\u2581",
    "<b>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of",
    "\t",
    "\x00",
    "e\u0301",
    "def f(x):\n    ",
    "return",
    "<0x41>",
    "1234",
    "\r\n",
    "\u0301",
    "[PAD3]",
    "\ufffd",
    "\u4e2d\u6587",
    "self.",
)

Encode = Callable[[str], list[int]]
"""Ids of plain text, without begin-of-text, control tokens as ordinary characters."""


def demo_pieces() -> tuple[tuple[str, float, int], ...]:
    """The demonstration model's vocabulary as in its tokenizer.model."""
    v = open_checkpoint(DEMO).tokenizer.vocabulary
    return tuple(zip(v.pieces, v.scores, v.types, strict=True))


def with_runs(pieces: Pieces) -> tuple[tuple[str, float, int], ...]:
    """The vocabulary with the user-defined pieces that Gemma has and the demonstration model lacks."""
    runs = [c * n for c in (SPACE, "\n") for n in range(2, 32)] + ["<b>", "</b>", "<table>"]
    first = 1 + max(i for i, (p, _, _) in enumerate(pieces) if p in MARKERS)  # at Gemma's positions: some sort by id
    rest = [piece for piece in pieces[first:] if piece[0] not in runs]
    return (*pieces[:first], *((p, 0.0, USER_DEFINED) for p in runs), *rest)


def ours(pieces: Pieces, folder: Path) -> dict[str, Tokenizer]:
    """This project's tokenizer from every format."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(pieces))
    return {
        "tokenizer.model": Tokenizer(read_sentencepiece(folder / "tokenizer.model"), (), None, MARKERS),
        "tokenizer.json": from_json(folder, pieces),
        "GGUF llama": from_gguf(pieces, "llama", padding=7),
        "GGUF gpt2": from_gguf(pieces, "gpt2", padding=7),
    }


def libraries(pieces: Pieces, folder: Path) -> dict[str, Encode]:
    """Other tokenizer libraries, if installed, with the same vocabulary."""
    out: dict[str, Encode] = {}
    if find_spec("sentencepiece"):
        import sentencepiece

        # Its control tokens are never parsed from text: the turn markers become some here, as everywhere.
        same = [(p, s, 3 if p in MARKERS else t) for p, s, t in pieces]
        out["sentencepiece"] = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(same)).encode
    text = json.dumps(tokenizer_json(pieces))
    if find_spec("tokenizers"):
        import tokenizers

        fast = tokenizers.Tokenizer.from_str(text)
        fast.encode_special_tokens = True
        out["tokenizers"] = lambda t: fast.encode(t, add_special_tokens=False).ids
    if find_spec("transformers"):
        import transformers

        file = folder / "for-transformers.json"
        file.write_text(text)
        full: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), split_special_tokens=True)
        out["transformers"] = lambda t: full.encode(t, add_special_tokens=False, split_special_tokens=True)
    return out


def texts(drawn: int, seed: int = 0) -> list[str]:
    """Held-out documents, their lines and windows, and `drawn` random texts from FRAGMENTS and from all of Unicode."""
    documents = HELD_OUT.read_bytes().decode().split("\n\f\n")
    rng = random.Random(seed)
    out = [*documents, *(line for d in documents for line in d.split("\n") if line)]
    for _ in range(drawn):
        document = rng.choice(documents)
        at = rng.randrange(len(document))
        out.append(document[at : at + rng.randrange(1, 200)])
        out.append("".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 13))))
        points = (
            rng.choice((rng.randrange(128), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))) for _ in range(20)
        )
        out.append("".join(map(chr, points)))
    return out


def is_plain(text: str, pieces: Pieces) -> bool:
    """True if engines are not known to differ on the text (docs/models.md)."""
    longest = max(len(p) for p, _, _ in pieces if set(p) == {SPACE})
    return SPACE not in text and all(len(run) <= longest for run in re.findall(" +", text))


def table(pieces: Pieces, drawn: int) -> dict[str, tuple[int, int, int, int]]:
    """Engine -> (texts, same ids, of them plain, same ids), against tokenizer.model as this project reads it."""
    with tempfile.TemporaryDirectory() as name:
        mine = ours(pieces, Path(name))
        base = mine.pop("tokenizer.model")
        engines: dict[str, Encode] = {k: partial(e.encode, bos=False) for k, e in mine.items()}
        engines |= libraries(pieces, Path(name))
        samples = texts(drawn)
        plain = [is_plain(t, pieces) for t in samples]
        want = [base.encode(t, bos=False) for t in samples]
        out = {}
        for key, encode in engines.items():
            same = [encode(t) == w for t, w in zip(samples, want, strict=True)]
            both = sum(s and p for s, p in zip(same, plain, strict=True))
            out[key] = (len(same), sum(same), sum(plain), both)
        return out


def main() -> int:
    drawn = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| vocabulary | engine | texts | same ids | plain texts | same ids |\n|---|---|---|---|---|---|")
    wrong = False
    for name, pieces in (("demonstration", demo_pieces()), ("with runs", with_runs(demo_pieces()))):
        for engine, counts in table(pieces, drawn).items():
            print(f"| {name} | {engine} | " + " | ".join(map(str, counts)) + " |")
            wrong |= counts[2] != counts[3]
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
