"""Chat: templates as Gemma's, bounded, without injected control tokens; conversations."""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybrid
from conformance.support.paths import DEMO
from conformance.support.synthetic import tiny, write_hf
from conformance.support.texts import ask, greedy
from hybrid import generate
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import ContextExceeded
from hybrid.engine.loading import EngineConfig
from hybrid.engine.loop import Engine
from hybrid.generate.chat_loop import Conversation, Options
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.text import chat
from hybrid.text.chat_template import ChatError, expand, expand_apart
from hybrid.text.tokenizer import CONTROL, Tokenizer


@cache
def demo() -> Tokenizer:
    return open_checkpoint(DEMO).tokenizer


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " hi\n"},
    {"role": "assistant", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "{{ x }}"},
]


def test_chat_is_rendered_as_gemma_does() -> None:
    assert chat.render(MESSAGES) == (
        "<bos><start_of_turn>user\nBe brief. \n\nhi<end_of_turn>\n<start_of_turn>model\nab<end_of_turn>\n"
        "<start_of_turn>user\n{{ x }}<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = chat.encode(demo(), MESSAGES)
    assert ids.count(2) == 1 and ids[:2] == [2, 4] and ids[-1] == 6
    assert chat.encode(demo(), MESSAGES[1:2], "{{ messages[0].content }}") == demo().encode(" hi\n", bos=False)


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        (MESSAGES[2:], None, "alternate"),
        ([{"role": "user"}], None, "message 0 needs"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "only text"),
        (MESSAGES[:1], "{{ nope.x }}", "template failed"),
        (MESSAGES[:1], "{% if", "template failed"),
        (MESSAGES[:1], "{{ messages.append(1) }}", "template failed"),
        (MESSAGES[:1], "{{ ''.__class__.__mro__ }}", "template failed"),
    ],
)
def test_bad_chats_are_refused(messages: list[dict[str, Any]], template: str | None, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        chat.encode(demo(), messages, template)


def test_a_model_without_turn_markers_has_no_chat() -> None:
    v = demo().vocabulary
    t = Tokenizer(replace(v, pieces=tuple("<x>" if p == "<start_of_turn>" else p for p in v.pieces)))
    with pytest.raises(ChatError, match="no turn markers"):
        chat.encode(t, MESSAGES)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}%s{% endfor %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS.replace("%s", ""), "does not end: stopped after 1 s"),
        (ENDLESS.replace("%s", "x"), "writes more than 1000 characters"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1024 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 // 0 }}", "template failed"),
        ("{{ raise_exception('no tools here') }}", "refuses: no tools here"),
    ],
)
def test_templates_are_bounded(template: str, words: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ChatError, match=words) as error:
        expand_apart(template, {"messages": []}, 1000, seconds=1.0 if "does not end" in words else 20.0)
    assert time.perf_counter() - begin < 20 and "\n" not in str(error.value)


def test_a_template_of_a_file_is_expanded_as_ours_is() -> None:
    other = chat.GEMMA_TEMPLATE + "{# another text, so that it is a stranger #}"
    assert chat.render(MESSAGES, other) == chat.render(MESSAGES)
    variables = {"messages": [{"role": "user", "content": "\ud83d \U0001f600"}]}
    assert expand_apart("{{ messages[0].content }}", variables, 10) == expand(
        "{{ messages[0].content }}", variables, 10
    )
    with pytest.raises(ChatError, match="neither text nor"):
        expand_apart("x", {"messages": [b"bytes"]}, 10)


PARTS = st.sampled_from(
    ["<end_of_turn>", "<start_of_turn>model\n", "<bos>", "<eos>", "<end_of", "_turn>", "<", "a b", "\n\n", "\ufdd0"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=8), st.booleans())
def test_messages_cannot_smuggle_control_tokens(parts: list[str], as_parts: bool) -> None:
    t = demo()
    content: Any = [{"type": "text", "text": p} for p in parts] if as_parts else "".join(parts)
    ids = chat.encode(t, [{"role": "user", "content": content}])
    assert [i for i in ids if t.types[i] == CONTROL] == [2, 4, 5, 4]
    said = "".join(p.strip() for p in parts) if as_parts else "".join(parts).strip()
    assert t.decode(ids) == f"user\n{said}\nmodel\n"
    if not as_parts and "<" not in said:  # and plain text is encoded as ever
        assert ids == t.encode(chat.render([{"role": "user", "content": said}]), parse_special=True)


def test_markers_in_messages_are_parsed_when_asked() -> None:
    message = [{"role": "user", "content": "a<end_of_turn>b"}]
    assert chat.encode(demo(), message, parse_special=True).count(5) == 2 and chat.encode(demo(), message).count(5) == 1


def test_transformers_renders_and_encodes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    import json

    from conformance.files.agreement import demo_pieces
    from conformance.files.tokenizer_files import tokenizer_json

    fast = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(demo_pieces())))
    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>")
    options = {"chat_template": chat.GEMMA_TEMPLATE, "add_generation_prompt": True}
    assert theirs.apply_chat_template(MESSAGES, tokenize=False, **options) == chat.render(MESSAGES)
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **options)
    assert list(ids) == chat.encode(demo(), MESSAGES)


@pytest.mark.blas
def test_a_branch_of_a_text_continues_as_a_new_one(tmp_path: Path) -> None:
    """From the cached part of a text, and from where the window of local layers is no longer cached."""
    rng = np.random.default_rng(5)
    ids = rng.integers(13, 300, 230).tolist()
    with open_checkpoint(write_hf(tmp_path, tiny())) as c:
        fresh, kept = Engine(c, CpuDevice(), EngineConfig(chunk=8)), Engine(c, CpuDevice(), EngineConfig(chunk=8))
        assert kept.cache.ring < kept.cache.table
        block, found = kept.cache.block, []
        for left in range(block // 2, len(ids), block // 2):
            for engine in (fresh, kept):
                engine.runner.blocks.clear()
            greedy(kept, ids, 1)
            other = [*ids[:left], *rng.integers(13, 300, 9).tolist()]
            handle = ask(kept, other, 13)
            assert list(handle.result().ids) == greedy(fresh, other, 13), left
            found.append(handle.request.cached)
            assert found[-1] in (0, left // block * block), left
        assert 0 in found[2:] and found[-1] == len(ids) // block * block, "some lack their window, the last do not"


def test_a_conversation_applies_its_penalties(tmp_path: Path) -> None:
    options = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": {9: 4.0}}
    with hybrid.load(write_hf(tmp_path), device="cpu") as model:
        talk = Conversation(model, Options({"max_tokens": 8, "ignore_eos": True, **options}))
        for text in ("the thing", "in the er"):
            ids = chat.encode(model.checkpoint.tokenizer, [*talk.messages, {"role": "user", "content": text}])
            "".join(talk.ask(text))
            said = model.stats.ids
            with_them, without = [], []
            for found, given in ((with_them, options), (without, {})):
                "".join(model.generate(ids, 8, ignore_eos=True, **given))
                found += model.stats.ids
            assert list(said) == with_them != without


@pytest.mark.blas
def test_a_conversation_equals_rerunning_everything(tmp_path: Path) -> None:
    texts = ["the thing " * 16, "abc " * 9, "e", "in the er"]
    folder = write_hf(tmp_path)
    with hybrid.load(folder, device="cpu") as model, hybrid.load(folder, device="cpu") as anew:
        talk = Conversation(model, Options({"max_tokens": 9, "temperature": 0.7, "seed": 4, "ignore_eos": True}))
        for n, text in enumerate(texts):
            turn = [*talk.messages, {"role": "user", "content": text}]
            said = "".join(talk.ask(text))
            ids = chat.encode(model.checkpoint.tokenizer, turn)
            anew.engine.runner.blocks.clear()
            assert said == "".join(anew.generate(ids, 9, temperature=0.7, seed=4, ignore_eos=True))
            assert model.stats.ids == anew.stats.ids
            assert model.stats.cached_tokens + model.stats.prompt_tokens == anew.stats.prompt_tokens == len(ids)
            assert (model.stats.cached_tokens > 0) == (n > 0)
            assert talk.messages[-1] == {"role": "assistant", "content": said} and len(talk.messages) == 2 * n + 2
        first = next(talk.ask("the"))  # dropped after a piece: the conversation keeps the partial answer
        assert talk.messages[-1]["content"] == first and model.stats.finish == "cancelled"
        with pytest.raises(ContextExceeded, match="context of 256"):
            talk.ask("ab " * 300)
        assert len(talk.messages) == 10
        talk.reset()
        assert talk.messages == [] and "".join(talk.ask("e")) and model.stats.cached_tokens == 0


@pytest.mark.slow
def test_the_oldest_turns_are_dropped_for_the_next(tmp_path: Path, capsys: Any) -> None:
    from hybrid.generate.chat_loop import Conversation, Options, _obey
    from hybrid.text.chat import encode

    with hybrid.load(write_hf(tmp_path, tiny()), device="cpu") as model:
        talk = Conversation(model, Options({"max_tokens": 4, "ignore_eos": True}, system="the bee"))
        texts = ["the " * 40, "bee", "abcd", "thing "]
        for text in texts[:3]:
            "".join(talk.ask(text))
        before = talk.messages
        while len(talk._ids([*before, {"role": "user", "content": texts[3]}])) < model.engine.cache.ctx:
            texts[3] += "thing "
        _obey(talk, texts[3], False)
        said = capsys.readouterr().err
        assert "leaves no room" in said and "/drop forgets the oldest turns" in said and talk.messages == before
        _obey(talk, "/drop", False)
        said = capsys.readouterr().err
        forgotten = int(re.search(r"(\d) of the oldest turns forgotten", said)[1])
        kept = talk.messages
        assert 0 < forgotten < 3 and kept[:-2] == before[2 * forgotten :] and kept[-2]["content"] == texts[3]
        asked = [{"role": "system", "content": "the bee"}, *kept[:-1]]
        fresh = "".join(model.generate(encode(model.checkpoint.tokenizer, asked), 4, ignore_eos=True))
        assert fresh == kept[-1]["content"]  # as if the dropped turns had never existed
        for _ in kept[::2]:
            _obey(talk, "/drop", False)
        _obey(talk, "/drop", False)
        assert "there is no turn to forget" in capsys.readouterr().err and talk.messages == []


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--chat"], "--chat needs --prompt TEXT"), (["--chat", "--prompt", "x"], "no chat template and no turn markers")],
)
def test_chats_that_cannot_be(tmp_path: Path, options: list[str], words: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    from conformance.support import synthetic

    plain = [("<x>" if p == "<start_of_turn>" else p, s, k) for p, s, k in synthetic.PIECES]
    folder = write_hf(tmp_path)
    (folder / "tokenizer.model").write_bytes(synthetic.sentencepiece_model(plain))
    assert generate.main([str(folder), "--device", "cpu", *options]) == (1 if "--prompt" in options else 2)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.slow
def test_control_tokens_in_a_prompt_count_when_asked(capsys: Any) -> None:
    import json

    for flags in ([], ["--parse-special"]):
        assert generate.main(["--device", "cpu", "-p", "<start_of_turn>", "-n", "1", "--json", *flags]) == 0
        assert (json.loads(capsys.readouterr().out)["prompt_tokens"] == 2) == bool(flags)


def test_one_turn_prints_the_answer_alone(tmp_path: Path, capsys: Any) -> None:
    folder = write_hf(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[{{ messages[0].content }}]")
    with hybrid.load(folder, device="cpu") as model:
        want = "".join(model.generate(model.encode("[the]"), 5, ignore_eos=True))
    assert generate.main([str(folder), "--device", "cpu", "--chat", "-p", "the", "-n", "5", "--ignore-eos"]) == 0
    assert capsys.readouterr().out == want + "\n"
    (folder / "chat_template.jinja").write_text("{{ 'x' * 9999999 }}")
    assert generate.main([str(folder), "--device", "cpu", "--chat", "-p", "the"]) == 1
    assert "chat template writes more than" in capsys.readouterr().err
