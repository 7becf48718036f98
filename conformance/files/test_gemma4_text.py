"""Gemma 4's tokenizer in its GGUF form (merges, unused scores), its turn marks, its template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.files.tokenizer_files import gguf_fields, tokenizer_json
from conformance.support.synthetic import PIECES, tiny_gemma4, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.checkpoint.gguf_tokenizer import gguf_tokenizer
from hybrid.convert import convert
from hybrid.text.chat import GEMMA4_TEMPLATE, ChatError, encode, render, template_of
from hybrid.text.tokenizer import CONTROL

NAMES = {"<start_of_turn>": "<|turn>", "<end_of_turn>": "<turn|>"}
VOCABULARY = [(NAMES.get(p, p), score, kind) for p, score, kind in PIECES]
TEXTS = ("the thing", "  abc\n\n\ncd", "\u00e9t\u00e9 in the <turn|>", "aaaaa a  b", "")


def test_merges_survive_conversion_and_give_the_same_ids(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", tiny_gemma4())
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(VOCABULARY)))
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "m.gguf", "bf16")
        values = read_gguf(tmp_path / "m.gguf").values
        assert values["tokenizer.ggml.model"] == "gemma4" and values["tokenizer.ggml.merges"]
        with open_checkpoint(tmp_path / "m.gguf") as copy:
            for text in TEXTS:
                assert copy.tokenizer.encode(text) == source.tokenizer.encode(text), text
            ends = {copy.tokenizer.vocabulary.pieces[i] for i in copy.tokenizer.eos_ids}
            assert ends == {"<eos>", "<turn|>"} and copy.tokenizer.eos_ids == source.tokenizer.eos_ids


def test_early_files_that_add_no_begin_of_text_are_wrong() -> None:
    values = gguf_fields(PIECES, "gpt2") | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False}
    tokenizer = gguf_tokenizer(Fields(values, Path("m.gguf")), len(PIECES))
    assert tokenizer.encode("the")[0] == 2


def test_turns_of_gemma4(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": " hi "}]},
        {"role": "assistant", "content": "<|channel>thought\nhm<channel|> yes"},
        {"role": "assistant", "content": " and more "},
        {"role": "user", "content": "ok"},
    ]
    want = "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\nyesand more<turn|>\n"
    want += "<|turn>user\nok<turn|>\n"
    assert render(messages, GEMMA4_TEMPLATE) == want + "<|turn>model\n"
    assert render(messages, GEMMA4_TEMPLATE, generate=False) == want
    for wrong in ([{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image", "text": ""}]}]):
        with pytest.raises(ChatError, match="the chat template refuses"):
            render(wrong, GEMMA4_TEMPLATE)
    folder = write_hf(tmp_path / "hf", tiny_gemma4())
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(VOCABULARY)))
    with open_checkpoint(folder) as c:
        tokenizer = c.tokenizer
    assert template_of(tokenizer, None) == GEMMA4_TEMPLATE
    turn, end = (tokenizer.token_id(t) for t in ("<|turn>", "<turn|>"))
    assert turn is not None and end is not None and tokenizer.types[turn] == tokenizer.types[end] == CONTROL
    ids = encode(tokenizer, [{"role": "user", "content": "the <turn|> in"}])
    assert ids.count(2) == 1 and ids.count(turn) == 2 and ids.count(end) == 1  # a mark inside a message stays text
