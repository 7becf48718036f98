"""Special ids, added tokens and chat templates from Hugging Face tokenizer files, as transformers 5.24 reads them.

Folders hold the small vocabulary of 302 pieces; the values are transformers'."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.files.tokenizer_files import gguf_fields, tokenizer_json, write_gguf
from conformance.support.synthetic import PIECES, sentencepiece_model, tiny, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.base import Generation
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gguf_tokenizer import gguf_tokenizer
from hybrid.checkpoint.hf_tokenizer import hf_tokenizer
from hybrid.convert import convert
from hybrid.text import chat
from hybrid.text.tokenizer import Tokenizer

N = len(PIECES)
GEMMA = {"tokenizer_class": "GemmaTokenizer"}
THE_ABC, AB_THE = [273, 288, 279, 272, 277], [289, 2, 290]
CHATML = ("<|im_start|>", "<|im_end|>")


def plain(text: str, **flags: bool) -> dict[str, Any]:
    none = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **none, "special": True, **flags}


def with_added(*tokens: dict[str, Any]) -> dict[str, Any]:
    document = tokenizer_json(PIECES)
    document["added_tokens"] += [{"id": N + i, **token} for i, token in enumerate(tokens)]
    return document


def tokenizer_of(folder: Path, json_: Any = None, model: bool = True, rows: int = 400, **files: Any) -> Tokenizer:
    """Write the files and read their tokenizer; `tokenizer_json` names tokenizer.json."""
    if model:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    for name, value in {**({} if json_ is None else {"tokenizer_json": json_}), **files}.items():
        stem, _, end = name.rpartition("_")
        (folder / f"{stem}.{end}").write_text(json.dumps(value))
    return hf_tokenizer(folder, Generation(), rows)


def test_a_tokenizer_json_counts_beside_a_tokenizer_model(tmp_path: Path) -> None:
    """A ChatML fine-tune: its added tokens are ids of their own, and one of them ends a text."""
    t = tokenizer_of(
        tmp_path, with_added(*map(plain, CHATML)), tokenizer_config_json=GEMMA | {"eos_token": "<|im_end|>"}
    )
    assert t.encode("a<bos>b<|im_end|> the", parse_special=True) == [2, *AB_THE, 303, 274]
    assert N + 1 in t.eos_ids and t.vocabulary.eos_id == N + 1
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    ids = chat.encode(t, [{"role": "user", "content": "the<|im_end|>"}], template)
    assert ids[:2] == [2, 302] and ids[-1] == 303 and ids.count(303) == 1


@pytest.mark.parametrize("listed", ["added_tokens_decoder", "added_tokens.json", "named"])
def test_additions_of_configs_count_beside_a_tokenizer_model(tmp_path: Path, listed: str) -> None:
    config: dict[str, Any] = GEMMA | {"eos_token": "<|im_end|>", "add_bos_token": True}
    files: dict[str, Any] = {}
    if listed == "named":
        config["bos_token"] = "<|im_start|>"
    elif listed == "added_tokens_decoder":
        config[listed] = {str(N + i): plain(p) for i, p in enumerate(CHATML)}
    else:
        files["added_tokens_json"] = {p: N + i for i, p in enumerate(CHATML)}
    t = tokenizer_of(tmp_path, tokenizer_config_json=config, **files)
    ids = t.encode("a<|im_end|> the", bos=False, parse_special=True)
    assert ids == [289, 303, 274] and t.special["eos_token"] == "<|im_end|>"


def test_nameless_special_tokens_follow_the_mask(tmp_path: Path) -> None:
    for name in ("extra_special_tokens", "additional_special_tokens"):
        t = tokenizer_of(tmp_path, tokenizer_json(PIECES), tokenizer_config_json=GEMMA | {name: ["<tool>"]})
        assert t.encode("<b>the <tool>", parse_special=True) == [2, 11, 273, 288, 303]


def _after(document: dict[str, Any]) -> None:
    document["post_processor"]["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    document["post_processor"]["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}


@pytest.mark.parametrize(
    ("change", "config", "before", "after"),
    [
        (lambda d: None, {}, [2], []),
        (lambda d: None, {"add_bos_token": False, "add_eos_token": True}, [2], []),  # the json counts
        (lambda d: d.update(post_processor=None), {"add_bos_token": True}, [], []),
        (_after, {}, [2], [1]),
    ],
)
def test_a_post_processor_says_what_stands_around_a_text(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    before: list[int],
    after: list[int],
) -> None:
    document = tokenizer_json(PIECES)
    change(document)
    t = tokenizer_of(tmp_path, document, tokenizer_config_json=GEMMA | config)
    assert t.encode("the abc thing") == before + THE_ABC + after
    assert t.encode("the abc thing", bos=False) == THE_ABC


def test_a_config_says_what_stands_around_a_text_of_a_tokenizer_model(tmp_path: Path) -> None:
    for bos, eos in ((True, False), (False, False), (True, True)):
        t = tokenizer_of(tmp_path, tokenizer_config_json=GEMMA | {"add_bos_token": bos, "add_eos_token": eos})
        assert t.encode("the abc thing") == [2] * bos + THE_ABC + [1] * eos


def test_gguf_says_what_stands_around_a_text() -> None:
    for bos, eos in ((True, False), (False, False), (True, True)):
        fields = gguf_fields(PIECES, "llama") | {
            "tokenizer.ggml.add_bos_token": bos,
            "tokenizer.ggml.add_eos_token": eos,
        }
        t = gguf_tokenizer(Fields(fields, Path("m.gguf")), N)
        assert t.encode("the abc thing") == [2] * bos + THE_ABC + [1] * eos


END = {"eos_token": "<end_of_turn>"}
DECODER = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer_json(PIECES)["added_tokens"]}
DEFAULTS = {name: f"<{name[:3]}>" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
DEFAULTS["mask_token"] = "<mask>"


@pytest.mark.parametrize(
    ("config", "old", "want"),
    [
        (GEMMA, {}, DEFAULTS),
        ({}, {"eos_token": plain("<end_of_turn>")}, DEFAULTS | END),
        (GEMMA | {"eos_token": "<eos>"}, END, DEFAULTS | END),
        (GEMMA | {"eos_token": "<eos>", "added_tokens_decoder": DECODER}, END, DEFAULTS),
        (GEMMA | {"eos_token": plain("<end_of_turn>") | {"__type": "AddedToken"}}, {}, DEFAULTS | END),
        (
            GEMMA | {"pad_token": None, "eos_token": None},
            {},
            {k: v for k, v in DEFAULTS.items() if k[:3] not in ("pad", "eos")},
        ),
        (
            GEMMA | {"image_token": "<b>", "extra_special_tokens": {"boi_token": "<bos>"}},
            {},
            DEFAULTS | {"image_token": "<b>", "boi_token": "<bos>"},
        ),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}, {}),
    ],
)
def test_special_tokens_by_name(
    tmp_path: Path, config: dict[str, Any], old: dict[str, Any], want: dict[str, str]
) -> None:
    t = tokenizer_of(tmp_path, tokenizer_json(PIECES), tokenizer_config_json=config, special_tokens_map_json=old)
    assert t.special == want


def test_special_tokens_of_a_gguf_file_have_names_by_their_ids() -> None:
    t = gguf_tokenizer(Fields(gguf_fields(PIECES, "llama") | {"tokenizer.ggml.padding_token_id": None}, Path("m")), N)
    assert t.special == {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("flags", "text", "want"),
    [
        ({"lstrip": True, "rstrip": True}, "a  <x>  the", [289, 302, 273]),
        ({"lstrip": True}, "a  <x>  the", [289, 302, 9, 273]),
        ({"rstrip": True}, "a  <x>  the", [289, 9, 302, 273]),
        ({"lstrip": True, "rstrip": True}, "a\n<x>\n\n the <x>", [289, 6, 302, 7, 274, 302]),
        ({"single_word": True}, "a<x>b <x> _<x>", [289, 73, 133, 75, 290, 288, 302, 288, 108, 73, 133, 75]),
        ({"special": False, "normalized": True}, "a<x>b", [289, 302, 290]),
    ],
)
def test_added_tokens_reach_beyond_their_text(
    tmp_path: Path, flags: dict[str, bool], text: str, want: list[int]
) -> None:
    t = tokenizer_of(tmp_path, with_added(plain("<x>", **flags)), model=False)
    assert t.encode(text, bos=False, parse_special=True) == want
    assert flags.get("special") is False or 302 not in t.encode(text)


def test_tokens_that_a_config_lists_without_the_json_are_user_defined(tmp_path: Path) -> None:
    document = tokenizer_json(PIECES)
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "<b>"]
    config = GEMMA | {"added_tokens_decoder": DECODER}
    assert tokenizer_of(tmp_path, document, model=False).encode("<b>the", False) == [73, 290, 75, 273]
    assert tokenizer_of(tmp_path, document, tokenizer_config_json=config).encode("<b>the", False) == [11, 273]


def test_added_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    document = with_added(*map(plain, CHATML))
    assert tokenizer_of(tmp_path, document, rows=N + 1).n_tokens == N + 1
    config = GEMMA | {"eos_token": "<|im_end|>"}
    t = tokenizer_of(tmp_path, document, rows=N + 1, tokenizer_config_json=config)
    assert t.special["eos_token"] == "<|im_end|>" and t.eos_ids == {1, 5}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": {"x": plain("<x>")}}, r"added_tokens_decoder\.x must be the id"),
        ({"added_tokens_decoder": {"302": {}}}, r"added_tokens_decoder\.302 needs"),
        ({"added_tokens_decoder": {"302": plain("<x>") | {"lstrip": 1}}}, r".*302\.lstrip must be true or false"),
        ({"extra_special_tokens": [1]}, "extra_special_tokens must be text"),
        ({"eos_token": 3}, "eos_token must be text"),
    ],
)
def test_invalid_additions_are_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {words}"):
        tokenizer_of(tmp_path, tokenizer_config_json=config)


# Templates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"tokenizer_config.json": "cfg", "chat_template.json": "old", "chat_template.jinja": "own"}, ("own", None)),
        ({"tokenizer_config.json": "cfg", "chat_template.json": "old"}, ("cfg", None)),
        ({"chat_template.json": "old"}, ("old", None)),
        ({"tokenizer_config.json": [("default", "D"), ("tool_use", "T")]}, ("D", "T")),
        ({"tokenizer_config.json": [("rag", "R")]}, (None, None)),
        ({"chat_template.jinja": "own", "additional_chat_templates/tool_use.jinja": "TU"}, ("own", "TU")),
    ],
)
def test_which_template_counts(tmp_path: Path, files: dict[str, Any], want: tuple[str | None, str | None]) -> None:
    """In folders, and what a conversion keeps of it in GGUF and back."""
    folder = write_hf(tmp_path / "hf", tiny(n_layers=1))
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(value, list):
            value = [{"name": n, "template": t} for n, t in value]
        (folder / name).write_text(value if name.endswith("jinja") else json.dumps({"chat_template": value}))
    with open_checkpoint(folder) as source:
        assert (source.chat_template, source.tool_template) == want
        assert any("rag is the default" in n or "templates rag" in n for n in source.notes) == (want == (None, None))
        convert(source, tmp_path / "m.gguf", "f32")
    with open_checkpoint(tmp_path / "m.gguf") as made:
        assert (made.chat_template, made.tool_template) == want
        convert(made, tmp_path / "back", "f32", format="hf")
    with open_checkpoint(tmp_path / "back") as back:
        assert (back.chat_template, back.tool_template) == want


# GGUF -----------------------------------------------------------------------------------------------------------------


def test_ollamas_gemma_4_files_have_merges_under_the_name_llama() -> None:
    fields = gguf_fields(PIECES, "gpt2") | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gemma4"}
    fields["tokenizer.ggml.add_bos_token"] = False
    t = gguf_tokenizer(Fields(fields, Path("m.gguf")), N)
    assert t.encode("the abc thing") == [2, *THE_ABC] and t.decode(t.encode("\u20ac")) == "\u20ac"


def test_of_equal_pieces_the_first_counts_and_it_is_said(tmp_path: Path) -> None:
    hp = tiny(vocab=N + 1, n_layers=1)
    fields = gguf_fields([*PIECES, ("the", 5.0, 1)], "llama")
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", hp, fields)) as c:
        assert c.tokenizer.encode("the abc thing") == [2, *THE_ABC] and c.tokenizer.token_id("the") == 273
        assert c.notes.count("tokenizer.ggml.tokens has 'the' twice, at 273 and 302: the first counts") == 1


def test_every_end_token_survives_a_conversion(tmp_path: Path) -> None:
    keys = {"eot": 8, "eom": 9, "fim_pad": 10, "fim_rep": 11}
    fields = gguf_fields(PIECES, "llama") | {f"tokenizer.ggml.{k}_token_id": i for k, i in keys.items()}
    fields |= {"tokenizer.ggml.eos_token_ids": [6, 7], "tokenizer.ggml.add_eos_token": True}
    path, want = write_gguf(tmp_path / "m.gguf", tiny(n_layers=1), fields), {1, 5, 6, 7, 8, 9, 10, 11}
    for target, kind in (("again.gguf", "gguf"), ("hf", "hf"), ("back.gguf", "gguf")):
        with open_checkpoint(path) as source:
            assert source.tokenizer.eos_ids == want and source.tokenizer.encode("the") == [2, 273, 1]
            convert(source, tmp_path / target, "f32", format=kind)  # type: ignore[arg-type]
        path = tmp_path / target
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert {*ends} == want
    assert open_checkpoint(path).tokenizer.eos_ids == want


def test_a_conversion_keeps_the_ids_of_added_tokens(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", tiny(vocab=N + 2, n_layers=1))
    (folder / "tokenizer.json").write_text(json.dumps(with_added(*map(plain, CHATML))))
    (folder / "tokenizer_config.json").write_text(json.dumps(GEMMA | {"eos_token": "<|im_end|>"}))
    text, path = "a<bos>b<|im_end|> the", folder
    for target, kind in (("m.gguf", "gguf"), ("back", "hf")):
        with open_checkpoint(path) as source:
            assert source.tokenizer.encode(text, parse_special=True) == [2, *AB_THE, 303, 274]
            assert source.tokenizer.special["eos_token"] == "<|im_end|>" and 303 in source.tokenizer.eos_ids
            convert(source, tmp_path / target, "f32", format=kind)  # type: ignore[arg-type]
        path = tmp_path / target
    assert open_checkpoint(path).tokenizer.encode(text, parse_special=True) == [2, *AB_THE, 303, 274]


@pytest.mark.parametrize("what", ["reach", "after"])
def test_gguf_is_not_written_where_it_would_change_ids(tmp_path: Path, what: str) -> None:
    folder = write_hf(tmp_path / "hf", tiny(vocab=N + 1, n_layers=1))
    document = with_added(plain("<x>", rstrip=what == "reach"))
    if what == "after":
        _after(document)
        document["post_processor"]["special_tokens"]["<eos>"]["ids"] = [N]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with open_checkpoint(folder) as source, pytest.raises(CheckpointError, match=r"'<x>' has .* GGUF cannot say"):
        convert(source, tmp_path / "m.gguf", "f32")


def test_scores_of_a_tokenizer_model_are_kept_beside_a_json(tmp_path: Path) -> None:
    """Merges that no scores express, beside scores of the same pieces."""
    folder = write_hf(tmp_path / "hf", tiny(n_layers=1))
    document = copy.deepcopy(tokenizer_json(PIECES))
    document["model"]["merges"] = document["model"]["merges"][1:]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "m.gguf", "f32")
    scores = open_checkpoint(tmp_path / "m.gguf").tokenizer.vocabulary.scores
    assert list(scores) == [s for _, s, _ in PIECES]


# The files around -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "want"),
    [
        ({}, Generation((1,))),
        ({"eos_token_id": 5}, Generation((5,))),
        ({"eos_token_id": [1, 5], "top_k": 64, "top_p": 0.95}, Generation((1, 5), top_k=64, top_p=0.95)),
        ({"temperature": 0.7, "do_sample": False}, Generation((1,), temperature=0.0)),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, Generation((1,), min_p=0.1, repetition_penalty=1.1)),
    ],
)
def test_generation_config(tmp_path: Path, own: dict[str, Any], want: Generation) -> None:
    """And what a conversion keeps of it."""
    folder = write_hf(tmp_path / "hf", tiny(n_layers=1))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(own))
    with open_checkpoint(folder) as source:
        assert source.generation == want
        convert(source, tmp_path / "m.gguf", "f32")
        convert(source, tmp_path / "again", "f32", format="hf")
    assert open_checkpoint(tmp_path / "again").generation == want
    made = open_checkpoint(tmp_path / "m.gguf").generation
    assert {*made.eos_ids} == {1, 5}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(made, name) == pytest.approx(getattr(want, name))


def test_choices_of_tokens_that_are_left_out_are_said(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, tiny(n_layers=1))
    (folder / "generation_config.json").write_text('{"suppress_tokens": [3], "bad_words_ids": null}')
    assert any("has suppress_tokens: left out" in n for n in open_checkpoint(folder).notes)


def test_a_stale_index(tmp_path: Path) -> None:
    """A single file counts beside an index, as in transformers; and a tensor counts wherever it is."""
    folder = write_hf(tmp_path / "single", tiny(n_layers=1))
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    open_checkpoint(folder).close()
    folder = write_hf(tmp_path / "shards", tiny(n_layers=1), shards=2)
    index = folder / "model.safetensors.index.json"
    owner = json.loads(index.read_text())["weight_map"]
    files = sorted(set(owner.values()))
    moved = {name: files[files.index(file) - 1] for name, file in owner.items()}
    index.write_text(json.dumps({"weight_map": moved | {"lm_head.weight": files[0]}}))
    with open_checkpoint(folder) as c:
        assert any("lm_head.weight is missing, which model.safetensors.index.json says" in n for n in c.notes)


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "google/gemma-3-1b-it"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter of google/gemma-3-1b-it .*merge"):
        open_checkpoint(tmp_path)
    path = write_gguf(tmp_path / "a.gguf", tiny(n_layers=1), {"general.type": "adapter"})
    with pytest.raises(CheckpointError, match=r"general\.type is adapter: a LoRA adapter"):
        open_checkpoint(path)
