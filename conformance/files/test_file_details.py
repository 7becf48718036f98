"""Details of readers and writers of files: each was broken once without another test noticing."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from conformance.support.synthetic import PIECES, sentencepiece_model, tiny, write_hf
from hybrid import inspect
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.assemble import _account_for_rest
from hybrid.checkpoint.gemma3_config import hf_config
from hybrid.checkpoint.gguf_split import part_paths
from hybrid.checkpoint.hf_files import tokenizer_config
from hybrid.checkpoint.sentencepiece_file import read_sentencepiece
from hybrid.checkpoint.tokenizer_json import _is_metaspace
from hybrid.convert import Report, convert
from hybrid.convert.__main__ import main, parser
from hybrid.convert.blocks import default_jobs
from hybrid.convert.shards import divide
from hybrid.core.dtypes import DTYPES, FILE_TYPES
from hybrid.harness.compare import same_files
from hybrid.text.tokenizer import SPACE


def test_numbers_of_types_are_those_of_the_format() -> None:
    for name, files in FILE_TYPES.items():
        assert gguf.GGMLQuantizationType[name.upper()] == files.number
    theirs = {t.name.lower(): t.value for t in gguf.LlamaFileType}
    for name, files in FILE_TYPES.items():
        (wanted,) = {theirs[t] for t in (f"all_{name}", f"mostly_{name}", f"mostly_{name}_m") if t in theirs}
        assert files.file_type == wanted, name


def test_bytes_of_a_tensor_without_axes_are_those_of_its_element() -> None:
    assert DTYPES["f32"].nbytes(()) == 4 and DTYPES["q8_0"].nbytes((3, 64)) == 3 * 2 * 34
    with pytest.raises(ValueError, match="q8_0 needs rows of a multiple of 32"):
        DTYPES["q8_0"].nbytes(())


def test_a_part_under_another_name_is_refused_with_its_own() -> None:
    values = {"split.count": 12, "split.no": 4}
    with pytest.raises(
        CheckpointError, match=r"m.gguf is part 5 of 12, but its name does not end in -00005-of-00012.gguf: give"
    ):
        part_paths(Path("m.gguf"), values)
    with pytest.raises(CheckpointError, match=r"a-00001-of-00012.gguf is missing: it is one of the 12 parts"):
        part_paths(Path("a-00005-of-00012.gguf"), values)
    assert part_paths(Path("m.gguf"), {}) == [Path("m.gguf")]


def test_left_out_tensors_are_counted() -> None:
    notes: list[str] = []
    _account_for_rest(dict.fromkeys(("a", "b", "c", "d", "e")), notes)  # type: ignore[arg-type]
    _account_for_rest(dict.fromkeys(("a", "b", "c")), notes)  # type: ignore[arg-type]
    _account_for_rest({"v.x": None, "mm.y": None, "b.rotary_emb.inv_freq": None}, notes)  # type: ignore[dict-item]
    assert notes == [
        "tensors without a use in this model are left out: a, b, c and 2 more",
        "tensors without a use in this model are left out: a, b, c",
        "2 tensors of other modalities (v.x, ...) are left out: text only",
    ]


@pytest.mark.parametrize("path", ["~nobody-of-that-name/m.gguf", "\0.gguf"])
def test_a_path_that_is_none_is_one_line(path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_folder_of_gguf_files_names_the_first(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "c.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a folder of GGUF files: name one, for example .*/a.gguf$"):
        open_checkpoint(tmp_path)


def test_a_type_that_a_device_holds_as_another_needs_more_there(capsys: pytest.CaptureFixture[str]) -> None:
    """q4_k takes 4.5 bits in its file; Vulkan devices store it as q4_1, 5 bits. Vectors keep their type."""
    assert inspect.main(["gemma3-270m", "--type", "q4_k", "--context", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    needs = found["needs"]
    assert found["parameters"] == sum(math.prod(t["shape"]) for t in found["tensors"]) > 2.6e8
    assert 1.08 < needs["vulkan"]["weights"] / sum(found["types"].values()) < 5 / 4.5


def test_a_template_of_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    file = write_hf(tmp_path) / "chat_template.jinja"
    for size, fits in ((3 << 20, True), ((4 << 20) + 1, False)):
        file.write_text("x" * size)
        if fits:
            with open_checkpoint(tmp_path) as source:
                assert source.chat_template == "x" * size
            continue
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja"), open_checkpoint(tmp_path):
            pass


def test_a_space_before_the_text_is_sentencepieces_default(tmp_path: Path) -> None:
    for given, prefix in ((b"\x18\x00", False), (b"\x18\x01", True), (b"", True)):  # field 3, add_dummy_prefix
        data = sentencepiece_model(PIECES)
        at = data.rindex(b"\x0a\x08identity")
        data = data[: at - 1] + bytes([12 + len(given)]) + b"\x0a\x08identity" + given + b"\x20\x00"
        (tmp_path / "t.model").write_bytes(data)
        assert read_sentencepiece(tmp_path / "t.model").add_space_prefix == prefix


def test_roles_that_no_file_names_are_sentencepieces_own(tmp_path: Path) -> None:
    data = sentencepiece_model(PIECES)
    at = data.rindex(b"\x0a\x08identity") - 2
    begin = data.rindex(b"\x12", 0, at)
    (tmp_path / "t.model").write_bytes(data[:begin] + b"\x12\x02\x18\x02" + data[at:])  # only field 3, BPE
    made = read_sentencepiece(tmp_path / "t.model")
    assert (made.unk_id, made.bos_id, made.eos_id, made.pad_id) == (0, 1, 2, None)


@pytest.mark.parametrize(("begins", "bos"), [(True, 2), (False, 2), (True, None)])
def test_whether_texts_begin_with_a_token_is_kept(tmp_path: Path, begins: bool, bos: int | None) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        made = source.tokenizer
        made.vocabulary = replace(made.vocabulary, add_bos=begins, bos_id=bos)
        convert(source, tmp_path / "m.gguf", "f16")
        assert tokenizer_config(source)["add_bos_token"] == (begins and bos is not None)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() == (begins and bos is not None)


@pytest.mark.parametrize(("scale", "scalar"), [(1 / 16, 256), (168**-0.5, 168), (0.3, 1 / 0.09), (1.0, 1)])
def test_the_attentions_scale_is_written_as_a_whole_number_only_where_it_is_one(scale: float, scalar: float) -> None:
    written = hf_config(tiny(attention_scale=scale))["query_pre_attn_scalar"]
    assert written == pytest.approx(scalar) and isinstance(written, type(scalar))


def test_rotation_is_written_as_scaled_only_where_it_is() -> None:
    assert hf_config(tiny())["rope_scaling"] is None
    assert hf_config(tiny(rope_factor=8.0))["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("value", "wanted"), [(b"\x00", 0), (b"\x07", 7), (b"\xff" * 9 + b"\x01", None), (b"\xff" * 4 + b"\x0f", None)]
)
def test_roles_below_zero_are_none(tmp_path: Path, value: bytes, wanted: int | None) -> None:
    """As unsigned 64-bit and 32-bit numbers, by writer."""
    data = sentencepiece_model(PIECES)
    trainer = b"\x18\x02" + b"\xd8\x02" + value  # field 3, BPE; field 43, pad_id
    at = data.rindex(b"\x0a\x08identity") - 2
    (tmp_path / "t.model").write_bytes(data[:at] + b"\x12" + bytes([len(trainer)]) + trainer + data[at:])
    assert read_sentencepiece(tmp_path / "t.model").pad_id == wanted


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"type": "Whitespace"}, False),
        ({"replacement": "_"}, False),
        ({"split": True}, False),
        ({"prepend_scheme": "always"}, False),
        ({"prepend_scheme": None}, False),
    ],
)
def test_a_metaspace_that_does_more_than_replace_spaces_is_none_of_ours(change: dict[str, object], plain: bool) -> None:
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False} | change
    assert bool(_is_metaspace(step)) == plain  # type: ignore[arg-type]


def test_tokens_that_are_added_strip_nothing_around_them(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path)) as source:
        made = tokenizer_config(source)
    assert (
        made["add_bos_token"] is True
        and made["add_eos_token"] is False
        and made["clean_up_tokenization_spaces"] is False
    )
    assert (made["bos_token"], made["eos_token"], made["unk_token"], made["pad_token"]) == (
        "<bos>",
        "<eos>",
        "<unk>",
        "<pad>",
    )
    for token in made["added_tokens_decoder"].values():
        assert not (token["lstrip"] or token["rstrip"] or token["normalized"] or token["single_word"])
    special = {t["content"] for t in made["added_tokens_decoder"].values() if t["special"]}
    assert special == {"<pad>", "<eos>", "<bos>", "<unk>"} and len(made["added_tokens_decoder"]) == 4 + 9


def test_a_folders_own_tokenizer_files_are_taken_over(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "a")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer", "own": 1}')
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "b", "bf16", format="hf")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        same_files(tmp_path / "b" / name, folder / name)


def test_a_folder_is_replaced_file_by_file_and_its_config_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its config.json a folder is no model: a half replaced one is never opened."""
    with open_checkpoint(write_hf(tmp_path / "a", tiny(n_layers=1))) as source:
        convert(source, tmp_path / "b", "bf16", format="hf")
        moved: list[str] = []
        replace_file = os.replace
        monkeypatch.setattr("os.replace", lambda old, new: (moved.append(Path(new).name), replace_file(old, new)))
        convert(source, tmp_path / "b", "f16", format="hf", force=True)
    assert moved[-1] == "config.json" and "model.safetensors" in moved


def test_padding_tokens_are_the_last_to_be_merged(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf", tiny(vocab=512))) as source:
        pieces = source.tokenizer.n_tokens
        convert(source, tmp_path / "m.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("scores", "token_type"))
    assert len(scores) == len(types) == 512 and pieces < 512
    assert max(scores[pieces:]) < min(scores[:pieces]) and set(types[pieces:]) == {gguf.TokenType.UNUSED}


def test_a_report_says_how_much_was_read_and_written() -> None:
    report = Report(("a.gguf",), 3_000_000, 12_000_000, {"q8_0": 2, "f32": 1}, {}, 4.0)
    assert report.line() == "a.gguf: 3.0 MB (25% of the source), 2 q8_0, 1 f32 tensors, 4.0 s, 3 MB/s read"
    assert "(300000000% of the source)" in replace(report, source_bytes=0).line()
    assert replace(report, paths=("a", "b", "c")).line().startswith("a and 2 more: ")


def test_headers_of_safetensors_end_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for layers in (1, 2, 3):
        with open_checkpoint(write_hf(tmp_path / f"{layers}", tiny(n_layers=layers))) as source:
            convert(source, tmp_path / f"b{layers}", "f16", format="hf")
        assert (tmp_path / f"b{layers}" / "model.safetensors").read_bytes()[0] % 8 == 0


def test_jobs_are_as_many_as_the_process_may_use_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, jobs in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(
            "os.sched_getaffinity", lambda pid, n=here: set(range(n)) if pid == 0 else set(), raising=False
        )
        assert default_jobs() == jobs
    monkeypatch.delattr("os.sched_getaffinity")
    for there, jobs in ((2, 2), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda n=there: n)
        assert default_jobs() == jobs


def test_a_shard_is_as_large_as_asked_and_no_larger() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 10, "e": 11, "f": 3}
    assert divide(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert divide(sizes, 11) == [["a", "b", "c"], ["d"], ["e"], ["f"]] and divide(sizes, None) == [list(sizes)]


def test_one_job_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_hf(tmp_path / "hf", tiny(n_layers=1)))
    assert main([folder, str(tmp_path / "a.gguf"), "--type", "q8_0", "--jobs", "1"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([folder, str(tmp_path / "b.gguf"), "--type", "q8_0", "--jobs", "0"])
    assert "'0' is not a positive number" in capsys.readouterr().err


def test_help_says_what_a_class_of_tensors_follows() -> None:
    text = " ".join(parser().format_help().split())
    assert "of output (as --type-embed)" in text and "of token_embd (as --type)" in text


def test_f16_rows_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path, dtype="f16")) as source:
        whole = source.tensor("blk.0.ffn_up.weight").array
        assert np.array_equal(source.rows("blk.0.ffn_up.weight", 3, 9).array, whole[3:9])
        packed = source.packed("blk.0.ffn_up.weight")
        assert packed is not None
        out = np.empty(10, np.uint8)
        packed.read_into(128 * 3 + 2, out)
        assert struct.unpack("<5e", out.tobytes()) == tuple(whole[3, 1:6].tolist())
