"""tokenizer.json and GGUF's two kinds give the ids of tokenizer.model; features that they cannot express are refused."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.files import agreement
from conformance.files.tokenizer_files import from_gguf, from_json, gguf_fields, merges_of, tokenizer_json, write_gguf
from conformance.support.synthetic import PIECES, tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gguf_tokenizer import gguf_tokenizer
from hybrid.checkpoint.tokenizer_json import read_tokenizer_json
from hybrid.convert import convert
from hybrid.text.merges import with_scores
from hybrid.text.tokenizer import BYTE, CONTROL, MARKERS, NORMAL, SPACE, UNKNOWN, Tokenizer, TokenizerError, Vocabulary

TEXTS = st.one_of(st.lists(st.sampled_from(agreement.FRAGMENTS), max_size=12).map("".join), st.text(max_size=40))


@cache
def sources(which: str) -> dict[str, Tokenizer]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        pieces = tuple(PIECES) if which == "tiny" else agreement.with_runs(agreement.demo_pieces())
        made = agreement.ours(pieces, Path(name))
        return made | {"merges as texts": from_json(Path(name), pieces, pairs=False)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TEXTS, st.booleans(), st.booleans())
def test_every_format_gives_the_same_ids(text: str, bos: bool, special: bool) -> None:
    for which in ("tiny", "demo"):
        want = None
        for tokenizer in sources(which).values():
            ids = tokenizer.encode(text, bos, special)
            want = ids if want is None else want
            assert ids == want and max(ids, default=0) < tokenizer.n_tokens
            assert special or tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_every_format_has_the_same_tokens() -> None:
    for which in ("tiny", "demo"):
        base, *others = sources(which).values()
        for t in others:
            assert (t.n_tokens, t.bos_id, t.eos_ids) == (base.n_tokens, base.bos_id, base.eos_ids)
            assert [t.token_bytes(i) for i in range(t.n_tokens)] == [base.token_bytes(i) for i in range(t.n_tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [False, True])
def test_other_tokenizers_agree(runs: bool) -> None:
    """A small sample of `python -m conformance.files.agreement`: every installed engine, on every plain text."""
    pieces = agreement.with_runs(agreement.demo_pieces()) if runs else agreement.demo_pieces()
    for engine, (n, same, plain, plain_same) in agreement.table(pieces, 40).items():
        print(f"{engine}: {same} of {n}, plain {plain_same} of {plain}")
        assert plain_same == plain > 300, engine


def test_transformers_own_conversion_is_read(tmp_path: Path) -> None:
    """transformers makes the merges from tokenizer.model; we read the tokenizer.json that it saves. It parses control
    tokens in text, and adds a second <bos> before one in the text."""
    pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model with it")
    import transformers

    pieces = agreement.with_runs(agreement.demo_pieces())
    agreement.ours(pieces, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer", "add_bos_token": true}')
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    mine = Tokenizer(read_tokenizer_json(tmp_path / "saved" / "tokenizer.json"), (), None, MARKERS)
    plain = [t for t in agreement.texts(60) if agreement.is_plain(t, pieces)]
    plain = [t for t in plain if not t.startswith("<bos>")]
    assert [mine.encode(t, parse_special=True) for t in plain] == [theirs.encode(t) for t in plain]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_incomplete_and_reordered_merges_are_followed_as_listed(data: st.DataObject) -> None:
    """A list that no scores can express: ids as the tokenizers library has them; with_scores refuses or agrees."""
    tokenizers = pytest.importorskip("tokenizers")
    base = [("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    base += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)] + [(c, -99.0, NORMAL) for c in f"abc{SPACE}"]
    merged = data.draw(st.lists(st.text(f"abc{SPACE}", min_size=2, max_size=4), unique=True, max_size=10))
    pieces = base + [(p, -float(i), NORMAL) for i, p in enumerate(merged)]
    merges = data.draw(st.permutations(merges_of(pieces)))
    document = tokenizer_json(pieces)
    document["model"]["merges"] = [list(m) for m in merges[: data.draw(st.integers(0, len(merges)))]]
    text = json.dumps(document)
    library = tokenizers.Tokenizer.from_str(text)
    v = Vocabulary(
        tuple(p for p, _, _ in pieces),
        (0.0,) * len(pieces),
        tuple(t for _, _, t in pieces),
        2,
        1,
        3,
        0,
        merges=tuple(" ".join(m) for m in document["model"]["merges"]),
    )
    samples = data.draw(st.lists(st.text("abc d", max_size=20), min_size=3, max_size=3))
    mine = Tokenizer(v)
    assert [mine.encode(t) for t in samples] == [library.encode(t).ids for t in samples]
    try:
        scored = Tokenizer(with_scores(v))
    except TokenizerError:
        return
    assert [scored.encode(t) for t in samples] == [mine.encode(t) for t in samples]


def test_merges_from_scores_go_back_to_scores() -> None:
    for which in ("tiny", "demo"):
        made = sources(which)
        v = with_scores(made["tokenizer.json"].vocabulary)
        assert v.merges is None and with_scores(v) is v
        scored = Tokenizer(v, (), None, MARKERS)
        for text in agreement.texts(30):
            assert scored.encode(text) == made["tokenizer.model"].encode(text)


def test_tokenizer_json_is_converted(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.model").unlink()
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer_json(PIECES)))
    with open_checkpoint(tmp_path / "hf") as source:
        convert(source, tmp_path / "m.gguf", "f32")
    got = open_checkpoint(tmp_path / "m.gguf").tokenizer
    for text in agreement.texts(30):
        assert got.encode(text) == source.tokenizer.encode(text) == sources("tiny")["tokenizer.model"].encode(text)


def test_a_directory_with_tokenizer_json_alone(tmp_path: Path) -> None:
    write_hf(tmp_path)
    want = open_checkpoint(tmp_path).tokenizer
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(PIECES)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 8]}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<b>"}, "pad_token": "<pad>"}')
    got = open_checkpoint(tmp_path).tokenizer
    assert got.encode("the bee\n\n <bos>") == want.encode("the bee\n\n <bos>")
    assert got.eos_ids == {1, 5, 8, got.token_id("<b>")}
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "<eos>"}')
    assert open_checkpoint(tmp_path).tokenizer.encode("the") == [
        2,
        got.token_id("the"),
    ]  # the json's post_processor counts


def test_a_file_with_merges_opens_as_a_whole(tmp_path: Path) -> None:
    """As Ollama writes it, padding rows typed as user-defined included."""
    hp = tiny(vocab=len(PIECES) + 9, n_layers=1)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hp, gguf_fields(PIECES, "gpt2", 9))) as c:
        t = c.tokenizer
        assert (t.n_tokens, t.n_rows, t.eos_ids) == (len(PIECES), hp.vocab, {1, 5})
        assert t.decode([len(PIECES) + 3]) == "" and t.encode("[PAD307]") == sources("tiny")["tokenizer.model"].encode(
            "[PAD307]"
        )


def test_every_end_token_that_a_file_lists_is_one(tmp_path: Path) -> None:
    """Though no text and no other key tells that it is, in files of others and in converted ones."""
    listed = gguf_fields(PIECES, "gpt2") | {
        "tokenizer.ggml.eos_token_ids": [8, 9, 10],
        "tokenizer.ggml.eot_token_id": 11,
    }
    assert gguf_tokenizer(Fields(listed, Path("m.gguf")), len(PIECES)).eos_ids == {1, 5, 8, 9, 10, 11}
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [1, 8, 9, 10]}')
    with open_checkpoint(tmp_path / "hf") as source:
        convert(source, tmp_path / "m.gguf", "f32")
    assert open_checkpoint(tmp_path / "m.gguf").tokenizer.eos_ids == {1, 5, 8, 9, 10}


@pytest.mark.parametrize("kind", [NORMAL, 4])
def test_turn_markers_with_a_wrong_type_are_control_tokens(kind: int) -> None:
    wrong = [(p, s, kind if p in (*MARKERS, "<bos>", "<eos>") else t) for p, s, t in PIECES]
    t = from_gguf(wrong, "llama")
    assert t.decode([4, 5, 2, 1]) == "" and t.eos_ids == {1, 5}
    assert not {2, 4, 5} & set(t.encode("<start_of_turn><end_of_turn><bos>", bos=False))
    assert t.encode("<start_of_turn><end_of_turn>", parse_special=True) == [2, 4, 5]


def _json_with(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            document = document[int(key) if isinstance(document, list) else key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_json_with("model.type", "Unigram"), "model.type 'Unigram' is not supported"),
        (_json_with("model.byte_fallback", False), "model.byte_fallback must be true"),
        (_json_with("model.dropout", 0.1), "model.dropout 0.1 is not supported"),
        (_json_with("model.ignore_merges", True), "model.ignore_merges"),
        (_json_with("model.merges", None), "model.merges must be a list"),
        (_json_with("model.merges", ["a b c"]), "not two pieces"),
        (_json_with("model.merges", [["a"]]), "must be pairs"),
        (_json_with("model.merges", [["a", 1]]), "must be pairs"),
        (_json_with("model.merges", [["q", "q"]]), "merge 0, 'q q', makes no piece"),
        (_json_with("model.vocab.the", 0), "gives 'the' the id 0, which '<pad>' has too"),
        (_json_with("model.vocab.the", 10**12), "ids must fill 0"),
        (_json_with("model.vocab.the", "x"), "ids must fill 0"),
        (_json_with("model.vocab", []), "model.vocab must be an object"),
        (
            lambda d: d["model"]["vocab"].pop("<0x41>") and d["model"]["vocab"].update({"zz": 17 + 61}),
            "<0x41> is missing",
        ),
        (lambda d: d["model"]["vocab"].update({"\ud800": len(PIECES)}), "no Unicode"),
        (_json_with("normalizer", {"type": "NFKC"}), r"normalizer.type 'NFKC' is not supported"),
        (
            _json_with("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}]}),
            r"normalizer.normalizers\[0\].type 'Prepend'",
        ),
        (_json_with("pre_tokenizer", {"type": "ByteLevel"}), "byte-level BPE"),
        (_json_with("pre_tokenizer.behavior", "Isolated"), "pre_tokenizer.type 'Split' is not supported, or not with"),
        (_json_with("decoder", {"type": "WordPiece"}), "decoder.type 'WordPiece'"),
        (
            _json_with("post_processor.single", [{"SpecialToken": {"id": "<bos>"}}] * 2 + [{"Sequence": {"id": "A"}}]),
            "single is not",
        ),
        (_json_with("post_processor", {"type": "BertProcessing"}), "post_processor.type 'BertProcessing'"),
        (lambda d: d["added_tokens"][0].update(lstrip="yes"), r"added_tokens\[0\].lstrip must be true or false"),
        (lambda d: d["added_tokens"][0].update(id=7), r"added_tokens\[0\].id 7 differs from 0"),
        (lambda d: d["added_tokens"][0].update(id=[]), r"added_tokens\[0\]"),
        (lambda d: d["added_tokens"].append("x"), "needs an id and a content"),
    ],
)
def test_invalid_tokenizer_json(tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    document = tokenizer_json(PIECES)
    change(document)
    write_hf(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=words) as error:
        _ = open_checkpoint(tmp_path).tokenizer
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)


def _byte_level() -> dict[str, Any]:
    letters = [*string.printable[:94], "\u0120", "\u010a"]
    return {"model": "gpt2", "tokens": letters, "token_type": [1] * len(letters), "merges": ["a b"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (_byte_level(), "byte-level BPE"),
        ({"model": "gpt2", "tokens": ["a"], "token_type": [1], "merges": []}, "no SentencePiece vocabulary"),
        ({"model": "gpt2", "token_type": [1], "merges": []}, "token_type has 1 entries"),
        ({"model": "gpt2"}, "merges is missing"),
        ({"model": "gpt2", "merges": ["ab"]}, "not two pieces"),
        ({"model": "gpt2", "merges": ["q q"]}, "makes no piece"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"tokens": [1, 2]}, "tokens must be a list of texts"),
        ({"tokens": None}, "tokens is missing"),
        ({"scores": ["x"]}, "scores must be a list of numbers"),
        ({"scores": [0.0] * (len(PIECES) - 1)}, f"scores has {len(PIECES) - 1} entries for {len(PIECES)} tokens"),
        ({"scores": [0.0] * (len(PIECES) + 1)}, f"scores has {len(PIECES) + 1} entries for {len(PIECES)} tokens"),
        ({"scores": []}, "scores has 0 entries"),
        ({"token_type": [1] * (len(PIECES) - 2)}, f"token_type has {len(PIECES) - 2} entries for {len(PIECES)} tokens"),
        ({"token_type": [1] * (len(PIECES) + 2)}, f"token_type has {len(PIECES) + 2} entries for {len(PIECES)} tokens"),
        ({"bos_token_id": "x"}, "bos_token_id must be a whole number"),
        ({"eot_token_id": "x"}, "eot_token_id must be a whole number"),
        ({"eos_token_ids": 7}, "eos_token_ids must be a list"),
        ({"scores": [float("nan")] * len(PIECES)}, "score nan at id 0"),
        ({"bos_token_id": 9999}, "bos_id 9999 is outside"),
    ],
)
def test_invalid_gguf_metadata(changes: dict[str, Any], words: str) -> None:
    fields = gguf_fields(PIECES, "llama") | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(CheckpointError, match=words) as error:
        gguf_tokenizer(Fields(fields, Path("m.gguf")), len(PIECES))
    assert str(error.value).startswith("m.gguf: tokenizer.ggml") and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_vocabulary_of_262144_is_quick(tmp_path: Path) -> None:
    """Opened in 1.1 s, 400 kB encoded in 0.3 s on a free core; the bounds (of processor time) allow slower processors."""
    letters = string.ascii_lowercase
    words = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    start = [(p, s, t) for p, s, t in PIECES if t in (CONTROL, UNKNOWN, BYTE) or p in MARKERS]
    short = [
        *letters,
        *string.ascii_uppercase,
        *"\n.,:()='_[]0123456789\"#",
        SPACE,
        *(a + b for a in letters for b in letters),
    ]
    pieces = start + [(p, 0.0, NORMAL) for p in short]
    pieces += [(w, 0.0, NORMAL) for w in words[: 262144 - len(pieces)]]
    document = tokenizer_json([*start, *((p, 0.0, NORMAL) for p in short)])
    document["model"]["vocab"] = {p: i for i, (p, _, _) in enumerate(pieces)}
    document["model"]["merges"] += [[p[:2], p[2:]] for p, _, t in pieces if t == NORMAL and len(p) == 4]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))
    begin = time.process_time()
    tokenizer = Tokenizer(read_tokenizer_json(file), (), 262208, MARKERS)
    opened = time.process_time()
    text = (agreement.HELD_OUT.read_text() * 40)[:400_000]
    ids = tokenizer.encode(text)
    done = time.process_time()
    assert tokenizer.n_tokens == 262144 and tokenizer.decode(ids) == text
    print(f"opened in {opened - begin:.2f} s, encoded {len(text)} characters in {done - opened:.2f} s")
    assert opened - begin < 4 and done - opened < 2
