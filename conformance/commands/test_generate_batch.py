"""generate --batch: many prompts, results in order, output that resumes after an interruption."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import hybrid
from conformance.support.synthetic import tiny, write_hf
from hybrid import generate
from hybrid.generate import many

PROMPTS = ["the bee", "in the", "abc", "the", "the bee in", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny(), dtype="f32")


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[str]:
    with hybrid.load(folder, "cpu", ctx=64) as model:
        return ["".join(model.generate(p, 6, ignore_eos=True)) for p in PROMPTS]


def command(folder: Path, *more: Any) -> int:
    options = ["--device", "cpu", "--ctx", "64", "-n", "6", "--ignore-eos", "--slots", "3"]
    return generate.main([str(folder), *options, *map(str, more)])


def test_a_prompt_a_line(folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    assert command(folder, "--batch", file) == 0
    said = capsys.readouterr()
    assert said.out == "\n\f\n".join(texts) + "\n"
    assert said.err.startswith("cpu | 6 results | prompts ") and "| generated 36, " in said.err


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["a\u2028b\u0085c", "d\u2029\x1c\x0b\x0ce", "plain \u2028 text\rhere"]
    rows = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts[:2]] + prompts[2:]
    text = "\r\n".join(rows) + "\n"
    assert [a.prompt for a in many.read(file, text)] == prompts
    results = "".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts)
    file.write_bytes(results.encode())
    assert many.written(file, many.read(file, text)) == 3 and file.read_bytes() == results.encode()


def test_a_file_that_is_not_utf8_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"one\ncaf\xe9\n")
    assert command(folder, "--batch", file) == 2
    assert capsys.readouterr().err == f"error: {file}: line 2 is not UTF-8: save the file in that encoding\n"


def test_objects_with_options_and_json(
    folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        PROMPTS[0],
        json.dumps({"prompt": PROMPTS[1], "max_tokens": 3, "logprobs": 2, "logit_bias": {"7": -100}}),
        PROMPTS[2],
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert command(folder, "--batch", "-", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["index"] for f in found] == [0, 1, 2] and [f["prompt"] for f in found] == PROMPTS[:3]
    assert (found[0]["text"], found[2]["text"]) == (texts[0], texts[2])
    assert len(found[1]["ids"]) == 3 and found[1]["finish"] == "length" and 7 not in found[1]["ids"]
    assert [len(p["top"]) for p in found[1]["logprobs"]] == [2, 2, 2] and "logprobs" not in found[0]
    assert found[0]["usage"]["completion_tokens"] == 6 and found[0]["timings"]["total"] > 0


def test_drafts_of_all_prompts_are_summed(
    folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --stats; a line may leave the number of drafts to the model."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(json.dumps({"prompt": p, "speculate": "auto"}) for p in PROMPTS), encoding="utf-8")
    assert command(folder, "--batch", file, "--draft", "lookup", "--stats", "--json") == 0
    said = capsys.readouterr()
    found = [json.loads(line) for line in said.out.splitlines()]
    assert [f["text"] for f in found] == texts
    drafted, accepted = (sum(f["usage"][f"{name}_tokens"] for f in found) for name in ("drafted", "accepted"))
    assert said.err.splitlines()[-1].startswith(f"speculation (lookup): drafted {drafted}, accepted {accepted}")
    assert command(folder, "--batch", file, "--speculate", "2", "--json") == 1
    said = capsys.readouterr()
    assert (
        "loaded with 2 draft tokens a pass: give a number, 0 to 16, or load it with speculate='auto'"
        in said.out + said.err
    )
    assert "speculation (" not in said.err


def test_totals_count_drafts() -> None:
    totals = many._Totals()
    for drafted, accepted, tokens in ((6, 3, 8), (4, 4, 3), (0, 0, 5)):
        used = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": tokens}
        totals.add({"usage": {**used, "drafted_tokens": drafted, "accepted_tokens": accepted}})
    assert (totals.drafted, totals.accepted, totals.generated, totals.prompt) == (10, 7, 16, 3)


def test_a_prompt_that_cannot_run_has_an_error_and_others_continue(
    folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join([PROMPTS[0], "the bee " * 40, PROMPTS[2]]), encoding="utf-8")
    assert command(folder, "--batch", file, "--output", output) == 1
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [f.get("text") for f in found] == [texts[0], None, texts[2]] and [f["index"] for f in found] == [0, 1, 2]
    assert found[1]["error"].startswith(f"{file}: line 2: a prompt of ") and "leaves no room" in found[1]["error"]
    said = capsys.readouterr().err
    assert f"error: {found[1]['error']}" in said and "2 results, 1 errors" in said
    assert command(folder, "--batch", file) == 1  # as text: an empty line where there is none
    assert capsys.readouterr().out == "\n\f\n".join([texts[0], "", texts[2]]) + "\n"


def test_output_continues_where_it_was_interrupted(
    folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    assert command(folder, "--batch", file, "--output", output) == 0
    whole = output.read_text(encoding="utf-8")
    assert [json.loads(line)["text"] for line in whole.splitlines()] == texts
    kept = whole.splitlines(keepends=True)[:2]
    output.write_text("".join(kept) + whole.splitlines()[2][:9], encoding="utf-8")  # in the middle of a line
    capsys.readouterr()
    assert command(folder, "--batch", file, "--output", output) == 0
    assert "2 of 6 results exist already" in capsys.readouterr().err
    again = output.read_text(encoding="utf-8").splitlines(keepends=True)
    assert again[:2] == kept and [json.loads(line)["text"] for line in again] == texts
    file.write_text("another\n", encoding="utf-8")
    assert command(folder, "--batch", file, "--output", output) == 2
    assert "line 1 is no result of this batch's prompt 1" in capsys.readouterr().err


def test_wrong_files_and_options_are_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "load", None, raising=False)
    file = tmp_path / "prompts.txt"
    for text, words in (
        ("\n", "has no prompt"),
        ('a\n{"prompt": 5}', "line 2: prompt must be text"),
        ('{"prompt": "a", "max_token": 5}', "line 1: unknown option 'max_token'; did you mean 'max_tokens'?"),
        ('{"prompt": "a", "temperature": -1}', "line 1: temperature must be"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be"),
        ('{"prompt": "a", "stop": [""]}', "line 1: a stop string is empty"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 1: "),
        ('{"prompt"', "line 1: no JSON object"),
    ):
        file.write_text(text, encoding="utf-8")
        assert command(folder, "--batch", file) == 2
        assert words in capsys.readouterr().err
    file.write_text("a\n", encoding="utf-8")
    for more in (["--prompt", "b"], ["--trace", "t.json"]):
        assert command(folder, "--batch", file, *more) == 2
    assert generate.main([str(folder), "--output", str(file)]) == 2 and "belong to --batch" in capsys.readouterr().err


def test_engines_of_ray_are_for_batches(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in [
        (["--ray", "--prompt", "a"], "--ray belongs to --batch"),
        (["--replica", "cpu", "--prompt", "a"], "belong to --ray"),
        (["--ray-address", "auto", "--prompt", "a"], "belong to --ray"),
    ]:
        assert generate.main([str(folder), *more]) == 2
        assert said in capsys.readouterr().err


def test_parts_of_a_batch_are_some_for_each_engine_and_keep_its_slots_full() -> None:
    pytest.importorskip("ray.data", reason="the extra `ray` is not installed")
    from hybrid.generate.scale import part_of

    assert [part_of(n, 2, 8) for n in (1, 64, 100, 400, 10_000)] == [8, 8, 13, 50, 64]
