"""The tokenizer gives sentencepiece's ids from either file format, and decodes any ids without splitting characters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.support.paths import DATA, DEMO
from conformance.support.profile import LONG
from conformance.support.synthetic import PIECES, sentencepiece_model, tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.convert import convert
from hybrid.text.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    StreamDecoder,
    Tokenizer,
    TokenizerError,
    Vocabulary,
)

sentencepiece = pytest.importorskip("sentencepiece")

GOLDEN = DATA / "demo-gemma3"


@cache
def demo() -> Tokenizer:
    return open_checkpoint(DEMO).tokenizer


@cache
def reference(pieces: tuple[tuple[str, float, int], ...]) -> Any:
    """The sentencepiece library with the same vocabulary."""
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(pieces))


@cache
def ours(pieces: tuple[tuple[str, float, int], ...]) -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.model"
        file.write_bytes(sentencepiece_model(pieces))
        return Tokenizer(read_sentencepiece(file))


def demo_pieces() -> tuple[tuple[str, float, int], ...]:
    v = demo().vocabulary
    return tuple(zip(v.pieces, v.scores, v.types, strict=True))


# Texts for every rule: runs of spaces and newlines, markers, competing merges, accents, emoji, control bytes.
FRAGMENTS = st.sampled_from(
    [
        " ",
        "  ",
        "   ",
        "     ",
        "\n",
        "\n\n\n\n",
        "the",
        " the",
        "thing",
        "abcd",
        "aaaaa",
        "aaa",
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
        "def f(x):\n    ",
        "return",
        "<0x41>",
        "1234",
        "\r\n",
        "\u0301",
        "[PAD3]",
        "\ufffd",
    ]
)
TEXTS = st.one_of(st.lists(FRAGMENTS, max_size=12).map("".join), st.text(max_size=40))


@pytest.mark.slow
@settings(max_examples=300 if LONG else 100, deadline=None)
@given(TEXTS)
def test_ids_equal_sentencepiece(text: str) -> None:
    for pieces in (tuple(PIECES), demo_pieces()):
        tokenizer, library = ours(pieces), reference(pieces)
        ids = tokenizer.encode(text, bos=False)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.slow
@settings(max_examples=150 if LONG else 60, deadline=None)
@given(st.data())
def test_ids_equal_sentencepiece_for_any_vocabulary(data: st.DataObject) -> None:
    """Random merges with equal scores, unused pieces (split again) and pieces that contain spaces in the middle."""
    merged = data.draw(st.lists(st.text("ab\u2581", min_size=2, max_size=5), unique=True, max_size=10))
    scores = data.draw(st.lists(st.integers(-4, 0), min_size=len(merged), max_size=len(merged)))
    kinds = data.draw(st.lists(st.sampled_from([NORMAL, NORMAL, UNUSED]), min_size=len(merged), max_size=len(merged)))
    base = [("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    base += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)] + [(c, -9.0, NORMAL) for c in "ab\u2581"]
    pieces = tuple(base + [(p, float(s), k) for p, s, k in zip(merged, scores, kinds, strict=True)])
    texts = data.draw(st.lists(st.text("ab c", max_size=20), min_size=3, max_size=3))
    for text in texts:
        assert ours.__wrapped__(pieces).encode(text, bos=False) == reference.__wrapped__(pieces).encode(text)


def test_golden_prompts_and_held_out_text() -> None:
    tokenizer = demo()
    for case in json.loads((GOLDEN / "golden.json").read_text())["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["ids"]
        assert tokenizer.decode(case["greedy"]) == case["text"]
    documents = (GOLDEN / "held-out.txt").read_bytes().decode().split("\n\f\n")
    assert len(documents) == 12
    assert sum(len(tokenizer.encode(d)[:512]) - 1 for d in documents) == 3025
    library = reference(demo_pieces())
    for document in documents:
        ids = tokenizer.encode(document, bos=False)
        assert ids == library.encode(document) and tokenizer.decode(ids) == document


def test_both_sources_give_the_same_ids(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", tiny(vocab=333))
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "m.gguf", "f32")
        hf = source.tokenizer
    gguf = open_checkpoint(tmp_path / "m.gguf").tokenizer
    assert gguf.n_tokens == hf.n_tokens == len(PIECES)  # the file's is padded to the embedding's rows
    assert (gguf.bos_id, gguf.eos_ids) == (hf.bos_id, hf.eos_ids) == (2, {1, 5})
    assert [gguf.token_bytes(i) for i in range(gguf.n_tokens)] == [hf.token_bytes(i) for i in range(hf.n_tokens)]

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, st.booleans(), st.booleans())
    def same(text: str, bos: bool, special: bool) -> None:
        assert gguf.encode(text, bos, special) == hf.encode(text, bos, special)

    same()


def test_special_tokens_only_when_asked() -> None:
    t = ours(tuple(PIECES))
    assert t.encode("<bos>a<eos>", parse_special=True) == [2, t.token_id("a"), 1]  # no second <bos>
    assert t.encode("a<bos>", parse_special=True) == [2, t.token_id("a"), 2]
    assert 1 not in t.encode("<bos>a<eos>") and t.decode(t.encode("<bos>a<eos>")) == "<bos>a<eos>"
    assert t.encode("") == [2] and t.encode("", bos=False) == []
    assert t.encode("\ud800x", bos=False) == t.encode("\ufffdx", bos=False)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=40))
@example([10 + b for b in (0xED, 0xA0, 0x80, 0xF0, 0x9F, 0x98)])
@example([10 + b for b in (0xF4, 0x90, 0x80, 0x80, 0xC0, 0x80, 0xE2, 0x82)])
def test_streamed_pieces_join_to_decode(ids: list[int]) -> None:
    stream = StreamDecoder(demo())
    text = demo().decode(ids)
    for _ in range(2):  # flush resets the decoder
        assert "".join([stream.push(i) for i in ids] + [stream.flush()]) == text
    assert text == b"".join(map(demo().token_bytes, ids)).decode("utf-8", errors="replace")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(10, 265), max_size=24))
def test_streamed_bytes_never_split_a_character(ids: list[int]) -> None:
    stream = StreamDecoder(demo())
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert "".join(pieces) == bytes(i - 10 for i in ids).decode("utf-8", errors="replace")


def test_control_tokens_print_nothing_and_foreign_ids_are_refused() -> None:
    t = demo()
    assert t.decode([2, 1, 0, 3]) == "" and t.decode([4, 5]) == ""  # the turn markers, whatever the file's types
    assert Tokenizer(t.vocabulary).decode([4, 5]) == "<start_of_turn><end_of_turn>"
    for token in (-1, 4096):
        with pytest.raises(TokenizerError, match=r"outside 0\.\.4095"):
            t.token_bytes(token)


def test_rows_beyond_the_pieces_print_nothing() -> None:
    t = Tokenizer(demo().vocabulary, rows=4100)
    assert t.decode([4095, 4096, 4099]) == t.decode([4095]) and t.n_tokens == 4096
    with pytest.raises(TokenizerError, match=r"outside 0\.\.4099"):
        t.token_bytes(4100)


def test_tokenizer_config_can_make_markers_control_tokens(tmp_path: Path) -> None:
    write_hf(tmp_path)
    added = {
        "4": {"content": "<start_of_turn>", "special": True},
        "6": {"content": "\n", "special": False},
        "999": {"content": "<image>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    t = open_checkpoint(tmp_path).tokenizer
    assert t.decode([4, 6]) == "\n" and 4 not in t.encode("<start_of_turn>")
    assert t.encode("<start_of_turn>", parse_special=True) == [2, 4]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:5], "cut short"),
        (lambda data: b"", "no pieces"),
        (lambda data: b"\xff" * 40, "not a SentencePiece model"),
        (lambda data: data.replace(b"<0x41>", b"<0x4Z>"), "byte pieces"),
        (lambda data: data + b"\x12\x02\x18\x01", "model type 1"),
        (lambda data: data + b"\x1a\x02\x20\x01", "normaliser"),
    ],
)
def test_bad_tokenizer_files_are_refused(tmp_path: Path, spoil: object, words: str) -> None:
    file = write_hf(tmp_path) / "tokenizer.model"
    file.write_bytes(spoil(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=words) as error:
        _ = open_checkpoint(tmp_path).tokenizer
    assert "tokenizer.model" in str(error.value)


def test_a_missing_tokenizer_matters_only_when_it_is_used(tmp_path: Path) -> None:
    (write_hf(tmp_path) / "tokenizer.model").unlink()
    with (
        open_checkpoint(tmp_path) as c,
        pytest.raises(CheckpointError, match=r"tokenizer\.json and tokenizer\.model are missing"),
    ):
        _ = c.tokenizer


def test_vocabulary_is_checked() -> None:
    with pytest.raises(TokenizerError, match="2 tokens with 1 scores"):
        Vocabulary(("a", "b"), (0.0,), (1, 1), None, None)
    with pytest.raises(TokenizerError, match="bos_id 7"):
        Vocabulary(("a",), (0.0,), (1,), 7, None)


def test_long_words_merge_in_log_linear_time() -> None:
    t = demo()
    word = "ab" * 50_000  # quadratic merging would take minutes
    assert t.decode(t.encode(word)) == word
