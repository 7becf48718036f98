"""Texts in arrays: every text comes back, and is found by its own numbers alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest

from hybrid.text import pieces
from hybrid.text.pieces import Pieces

ODD = ["a", "", "▁▁b", "b▁c", "a", "\udce9x", "\ud83d\ude00", "\U0001f600", " ", "é", "\0", "", "▁"]


def test_every_text_comes_back_with_its_numbers() -> None:
    made = Pieces(iter(ODD))
    assert list(made) == ODD and made[2:4] == tuple(ODD[2:4]) and made[-1] == "▁"
    assert [list(made.numbers(text)) for text in ODD] == [[i for i, t in enumerate(ODD) if t == text] for text in ODD]
    assert "b" not in made and "é" in made and made == Pieces(ODD) != Pieces(ODD[1:])
    assert list(Pieces([])) == []
    with pytest.raises(IndexError):
        made[len(ODD)]


def test_texts_are_found_by_what_they_hold() -> None:
    made = Pieces(ODD)
    assert made.holding("▁") == [2, 3, 12] and made.holding("▁", inside=True) == [2, 3]
    assert made.holding(" ") == [8] and made.holding("xyz") == []


def test_texts_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "hash", lambda text: len(text), raising=False)
    made = Pieces(ODD)
    assert list(made.numbers("a")) == [0, 4] and list(made.numbers("z")) == []
    assert all(text in made for text in ODD)


def test_another_process_finds_them_with_its_own_hashes() -> None:
    code = "import pickle, sys; p = pickle.load(sys.stdin.buffer); print([list(p.numbers(t)) for t in p])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(Pieces(ODD)),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
        timeout=60,
    )
    assert json.loads(found.stdout) == [list(Pieces(ODD).numbers(text)) for text in ODD]
