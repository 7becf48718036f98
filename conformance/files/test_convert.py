"""The converter: it loses only what the target type cannot represent, and other programs read its files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import hybrid
from conformance.ops.test_quant import SEARCHED
from conformance.support.gguf_files import finish
from conformance.support.models import SHIPPED, demo
from conformance.support.paths import MODELS
from conformance.support.synthetic import PIECES, config, sentencepiece_model, tiny, weights, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.convert import SAME, Wanted, convert
from hybrid.convert.__main__ import main
from hybrid.convert.atomic import atomic_files
from hybrid.convert.verify import digests, verify
from hybrid.core.dtypes import DTYPES, WRITABLE_TYPES
from hybrid.engine.loading import stored_types
from hybrid.harness.compare import same_files
from hybrid.quant.codec import dequantise, quantise, to_ggml


def test_unquantised_types_lose_nothing(tmp_path: Path) -> None:
    hp = tiny(rope_factor=8.0, softcap=30.0, tied=False, attention_scale=0.3, layer_is_global=(True, False, False))
    with open_checkpoint(write_hf(tmp_path / "hf", hp)) as source:
        for dtype in ("f32", "bf16"):
            convert(source, tmp_path / f"{dtype}.gguf", dtype)
            with open_checkpoint(tmp_path / f"{dtype}.gguf") as target:
                assert target.names == source.names
                for name in source.names:
                    want, got = source.tensor(name), target.tensor(name)
                    assert got.dtype == ("f32" if len(got.shape) == 1 else dtype)
                    np.testing.assert_array_equal(dequantise(got, np.float32), dequantise(want, np.float32))
                before, after = source.hparams.as_dict(), target.hparams.as_dict()
                assert {k for k in before if before[k] != after[k]} <= {"eps", "attention_scale"}
                assert after["eps"] == np.float32(1e-6) and after["attention_scale"] == np.float32(0.3)


@pytest.mark.parametrize("dtype", WRITABLE_TYPES)
def test_the_reference_library_reads_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.gguf"
    hp = tiny(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64) if DTYPES[dtype].block > 32 else tiny()
    with open_checkpoint(write_hf(tmp_path / "hf", hp, dtype="f32")) as source:
        report = convert(source, path, dtype)
        fields, tensors = _read(path)
        assert fields["general.architecture"] == "gemma3" and fields["gemma3.block_count"] == 3
        assert fields["tokenizer.ggml.model"] == "llama" and len(fields["tokenizer.ggml.tokens"]) == 320
        assert fields["general.file_type"] == int(
            gguf.LlamaFileType[{"f32": "ALL_F32", "q3_k": "MOSTLY_Q3_K_M"}.get(dtype, f"MOSTLY_{dtype.upper()}")]
        )
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        for name in source.names:
            values = dequantise(source.tensor(name), np.float32)
            if values.ndim == 2 and dtype in SEARCHED:  # the library only decodes these
                got, want = gguf.quants.dequantize(tensors[name], kind), dequantise(quantise(values, dtype))
            else:
                got, want = tensors[name], values if values.ndim == 1 else gguf.quants.quantize(values, kind)
            np.testing.assert_array_equal(got, want)
    assert (
        report.paths == (str(path),)
        and report.bytes == path.stat().st_size
        and sum(report.types.values()) == len(tensors)
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t.data for t in reader.tensors}


def test_gguf_sources_are_copied_bit_for_bit(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        convert(source, tmp_path / "a.gguf", Wanted("q4_0", {"embed": "q8_0"}))
    with open_checkpoint(tmp_path / "a.gguf") as source:
        assert source.dtype("token_embd.weight") == "q8_0" and source.dtype("blk.0.ffn_up.weight") == "q4_0"
        convert(source, tmp_path / "b.gguf", Wanted("q4_0", {"embed": "q8_0"}))
        same_files(tmp_path / "a.gguf", tmp_path / "b.gguf", last=5000)
        with open_checkpoint(tmp_path / "b.gguf") as target:
            for name in source.names:
                np.testing.assert_array_equal(to_ggml(target.tensor(name)), to_ggml(source.tensor(name)))


def test_rows_that_do_not_fit_fall_back_to_f16_and_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hf(tmp_path / "hf", tiny(n_heads=3, n_kv_heads=1))
    assert main([str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--type", "q8_0", "--json"]) == 0
    out = capsys.readouterr()
    assert "note: 3 x attn_output.weight: written as f16" in out.err
    report = json.loads(out.out)
    assert report["types"] == {"q8_0": 19, "f32": 19, "f16": 3}
    assert report["fallbacks"] == {f"blk.{layer}.attn_output.weight": "f16" for layer in range(3)}
    assert open_checkpoint(tmp_path / "m.gguf").dtype("blk.0.attn_output.weight") == "f16"


def test_rows_that_do_not_fill_a_block_of_256_become_iq4_nl(tmp_path: Path) -> None:
    """A file of several types, as those of models with rows of 640 or 704; it loads, on the types that it has."""
    with open_checkpoint(write_hf(tmp_path / "hf", tiny(hidden=256, ffn=96))) as source:
        report = convert(source, tmp_path / "m.gguf", "q3_k")
    assert {n for n, t in report.fallbacks.items() if t == "iq4_nl"} >= {f"blk.{i}.ffn_down.weight" for i in range(3)}
    with hybrid.load(tmp_path / "m.gguf", "cpu") as model:
        assert model.checkpoint.dtype("blk.0.ffn_up.weight") == "q3_k"
        assert np.isfinite(model.logits([2, 5, 7])).all()


def test_quantised_matrices_are_quantised_again_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        convert(source, tmp_path / "a.gguf", Wanted("q8_0", {"attn": "f16"}))
    command = [str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--type", "q4_0"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "token_embd.weight is q8_0: as q4_0" in error and "--type-embed same" in error and "--requantize" in error
    assert main([*command, "--type-embed", "same", "--type-ffn", "f16"]) == 0, "nothing is quantised twice"
    with open_checkpoint(tmp_path / "b.gguf") as made:
        kinds = {made.dtype(n) for n in made.names}
        assert kinds == {"f32", "q8_0", "q4_0", "f16"} and made.dtype("blk.0.attn_q.weight") == "q4_0"
    assert main([*command, "--requantize", "--force"]) == 0
    with open_checkpoint(tmp_path / "b.gguf") as made:
        assert made.dtype("token_embd.weight") == "q4_0"
    with open_checkpoint(tmp_path / "a.gguf") as source:
        with pytest.raises(ValueError, match=r"a.gguf: tensor token_embd.weight is q8_0: as q4_0 .*--requantize"):
            stored_types(source, "q4_0")
        assert stored_types(source, "q4_0", requantize=True)["token_embd.weight"].dtype == "q4_0"
        assert stored_types(source, "f16")["token_embd.weight"].dtype == "f16"
        assert stored_types(source, "q8_0")["blk.0.attn_q.weight"].dtype == "q8_0", "f16 before: quantised once"


def test_classes_of_tensors_have_types_of_their_own(tmp_path: Path) -> None:
    source = open_checkpoint(write_hf(tmp_path / "hf", tiny(tied=False)))
    report = convert(source, tmp_path / "m.gguf", Wanted("q8_0", {"embed": "f16", "attn": SAME, "ffn": "q4_0"}))
    c = open_checkpoint(tmp_path / "m.gguf")
    kinds = {n.split(".")[-2]: c.dtype(n) for n in c.names}
    assert kinds["token_embd"] == kinds["output"] == "f16"  # the output matrix has the embedding's type
    assert {kinds[f"attn_{x}"] for x in ("q", "k", "v", "output")} == {"bf16"}
    assert {kinds[f"ffn_{x}"] for x in ("gate", "up", "down")} == {"q4_0"}
    assert {k for n, k in kinds.items() if n.endswith("norm")} == {"f32"}
    assert report.types == {"f32": 19, "bf16": 12, "q4_0": 9, "f16": 2}
    convert(source, tmp_path / "m.gguf", Wanted("q8_0", {"embed": "f16", "head": "q4_0"}), force=True)
    assert open_checkpoint(tmp_path / "m.gguf").dtype("output.weight") == "q4_0"


def test_types_that_can_only_be_read_are_copied_and_never_made(tmp_path: Path) -> None:
    """A file with k types, as other programs make them: copied bit for bit or re-quantised; no file is converted to k
    types."""
    hp = tiny(hidden=256, ffn=256)
    with open_checkpoint(write_hf(tmp_path / "hf", hp)) as plain:
        convert(plain, tmp_path / "plain.gguf", "q8_0")
        with pytest.raises(CheckpointError, match=r"q6_k can be read but not written.*token_embd.*bf16"):
            convert(plain, tmp_path / "no.gguf", "q6_k")
    rng, reader = np.random.default_rng(1), gguf.GGUFReader(tmp_path / "plain.gguf")
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "gemma3")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and not key.startswith("hybrid.sha256"):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for t in reader.tensors:
        if t.name == "token_embd.weight":  # random codes with finite scales
            blocks = rng.integers(0, 256, (int(t.shape[1]), 210), np.uint8)
            blocks[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            writer.add_tensor(t.name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
        else:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    finish(writer)
    with open_checkpoint(tmp_path / "k.gguf") as source:
        assert source.dtype("token_embd.weight") == "q6_k"
        convert(source, tmp_path / "same.gguf", SAME)
        convert(source, tmp_path / "f32.gguf", "f32")
        with open_checkpoint(tmp_path / "same.gguf") as same, open_checkpoint(tmp_path / "f32.gguf") as f32:
            for name in source.names:
                want = source.tensor(name)
                np.testing.assert_array_equal(to_ggml(same.tensor(name)), to_ggml(want))
                np.testing.assert_array_equal(f32.tensor(name).array, dequantise(want, np.float32))


def test_hugging_face_folders_from_both_formats(tmp_path: Path) -> None:
    hp = tiny(
        rope_factor=8.0, softcap=30.0, tied=False, attention_scale=168**-0.5, layer_is_global=(True, False, False)
    )
    write_hf(tmp_path / "hf", hp)
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ bos_token }}x")
    generation = {"eos_token_id": [1, 5], "top_k": 64, "top_p": 0.95, "temperature": 1.0}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    with open_checkpoint(tmp_path / "hf") as source:
        convert(source, tmp_path / "m.gguf", "bf16")
        text = "The  thing:\n\n abcd \u00e9t\u00e9 <end_of_turn> \U0001f600"
        ids = source.tokenizer.encode(text)
        with open_checkpoint(tmp_path / "m.gguf") as middle:
            report = convert(middle, tmp_path / "back", "bf16", format="hf", split=30_000)
        assert len(report.paths) > 2
        with open_checkpoint(tmp_path / "back") as back:
            assert back.names == source.names and back.tokenizer.encode(text) == ids
            for name in source.names:
                want, got = source.tensor(name), back.tensor(name)
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(dequantise(got, np.float32), dequantise(want, np.float32))
            before, after = source.hparams.as_dict(), back.hparams.as_dict()
            assert before.pop("attention_scale") == pytest.approx(after.pop("attention_scale"), rel=1e-12)
            assert before == after
            assert back.chat_template == source.chat_template and back.generation == source.generation
            assert back.tokenizer.vocabulary.scores == source.tokenizer.vocabulary.scores


def test_hugging_face_folders_load_in_the_fields_libraries(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from hybrid.checkpoint.sentencepiece_write import write_sentencepiece

    with open_checkpoint(MODELS / "demo-gemma3-q8_0.gguf") as source:
        convert(source, tmp_path / "hf", "f16", format="hf")
        library = sentencepiece.SentencePieceProcessor(model_proto=write_sentencepiece(source.tokenizer.vocabulary))
        text = "def f(x):\n    return  x + 1\n\n\n# caf\u00e9 \U0001f600"
        assert source.tokenizer.encode(text, bos=False) == library.encode(text)
        header = (tmp_path / "hf" / "model.safetensors").read_bytes()[:200_000]
        table = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
        assert (
            table["model.norm.weight"]["dtype"] == "F32"
            and table["model.layers.3.mlp.up_proj.weight"]["dtype"] == "F16"
        )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (
        config["rms_norm_eps"] == 1e-6 and config["query_pre_attn_scalar"] == 64 and config["torch_dtype"] == "float16"
    )
    with pytest.raises(CheckpointError, match="q8_0 is no type of Hugging Face"):
        convert(open_checkpoint(tmp_path / "hf"), tmp_path / "q", "q8_0", format="hf")
    assert not (tmp_path / "q").exists()


def test_a_folder_takes_over_only_a_model(tmp_path: Path) -> None:
    source = open_checkpoint(write_hf(tmp_path / "hf"))
    target = tmp_path / "out"
    target.mkdir()
    convert(source, target, "bf16", format="hf", split=20_000)  # an empty folder counts as missing
    assert len(list(target.glob("*.safetensors"))) > 2
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="--force"):
        convert(source, target, "bf16", format="hf")
    convert(source, target, "f32", format="hf", force=True)
    assert [f.name for f in target.glob("*.safetensors*")] == ["model.safetensors"]
    assert (target / "notes.txt").read_text() == "mine" and list(tmp_path.glob(".*")) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        convert(source, tmp_path / "other", "f32", format="hf", force=True)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf", dtype="f32")) as source:
        convert(source, tmp_path / "one.gguf", "q8_0")
        report = convert(source, tmp_path / "m.gguf", "q8_0", split=30_000)
        count = len(report.paths)
        assert count > 2 and Path(report.paths[-1]).name == f"m-{count:05}-of-{count:05}.gguf"
        assert report.bytes == sum(Path(p).stat().st_size for p in report.paths)
        whole = _read(tmp_path / "one.gguf")[1]
        seen: dict[str, np.ndarray] = {}
        for number, path in enumerate(report.paths):
            fields, tensors = _read(Path(path))
            assert fields["split.no"] == number and fields["split.count"] == count
            assert fields["split.tensors.count"] == len(whole)
            assert ("tokenizer.ggml.tokens" in fields) == (number == 0)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
            seen |= tensors
        assert list(seen) == list(whole)
        assert all(np.array_equal(seen[n], whole[n]) for n in whole)
    with open_checkpoint(report.paths[0]) as split, open_checkpoint(tmp_path / "one.gguf") as one:
        assert split.hparams == one.hparams and split.names == one.names
        convert(split, tmp_path / "joined.gguf", SAME)
        same_files(tmp_path / "joined.gguf", tmp_path / "one.gguf")


def test_digests_find_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_hf(tmp_path / "hf", dtype="f32")
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "m.gguf", "q4_0")
        shards = convert(source, tmp_path / "s.gguf", "q4_0", split=20_000).paths
        convert(source, tmp_path / "f", "bf16", format="hf", split=40_000)
    for path, tensors in ((tmp_path / "m.gguf", 41), (Path(shards[1]), 41), (tmp_path / "f", 41)):
        found = verify(digests(path))
        assert found.wrong == () and found.tensors == tensors
    part = gguf.GGUFReader(shards[1]).tensors[0]
    _flip(Path(shards[1]), part.data_offset + part.n_bytes - 1)
    assert main(["--verify", shards[0], "--json"]) == 1
    out = capsys.readouterr()
    assert json.loads(out.out)["wrong"] == [f"{shards[1]}: {part.name}"] and part.name in out.err
    file = sorted((tmp_path / "f").glob("*.safetensors"))[-1]
    _flip(file, file.stat().st_size - 1)
    assert main(["--verify", str(tmp_path / "f")]) == 1 and file.name in capsys.readouterr().err
    for path in (folder, tmp_path / "none"):
        assert main(["--verify", str(path)]) == 1 and capsys.readouterr().err.startswith("error: ")


def test_digests_cover_names_shapes_and_metadata_of_a_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    with open_checkpoint(write_hf(tmp_path / "hf", dtype="f32")) as source:
        convert(source, path, "f16")
    whole = path.read_bytes()

    def wrong(data: bytes) -> tuple[str, ...]:
        path.write_bytes(data)
        return verify(digests(path)).wrong

    header = f"{path}: its header (metadata, or the table of tensors)"
    assert wrong(whole) == ()
    key = whole.index(b"gemma3.attention.sliding_window") + len(b"gemma3.attention.sliding_window") + 4
    assert wrong(whole[:key] + b"\x09" + whole[key + 1 :]) == (header,)
    # Two tensors of one type and shape swap names; the digests keep their order.
    swapped = bytearray(whole)
    for layer, other in ((b"0", b"1"), (b"1", b"0")):
        at = whole.rindex(b"blk." + layer + b".ffn_up.weight")
        swapped[at + 4 : at + 5] = other
    found = wrong(bytes(swapped))
    assert header in found and f"{path}: blk.0.ffn_up.weight" in found and f"{path}: blk.1.ffn_up.weight" in found
    # [64, 96] and [96, 64] have as many bytes.
    at = whole.rindex(b"blk.2.ffn_up.weight") + len(b"blk.2.ffn_up.weight") + 4
    assert struct.unpack_from("<QQ", whole, at) == (64, 96)
    found = wrong(whole[:at] + struct.pack("<QQ", 96, 64) + whole[at + 16 :])
    assert header in found and f"{path}: blk.2.ffn_up.weight" in found
    digest = whole.index(b"hybrid.sha256.header") + len(b"hybrid.sha256.header") + 12
    assert wrong(whole[:digest] + b"f" * 64 + whole[digest + 64 :]) == (header,)
    assert wrong(whole + bytes(32)) == (f"{path}: its length",)
    path.write_bytes(whole.replace(b"hybrid.sha256.header", b"hybrid.sha256.hfader"))
    assert main(["--verify", str(path)]) == 1 and "earlier version" in capsys.readouterr().err


def test_digests_cover_names_shapes_and_files_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    with open_checkpoint(write_hf(tmp_path / "hf", dtype="f32")) as source:
        convert(source, folder, "f16", format="hf")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = f"{file}: its header (metadata, or the table of tensors)"
    assert verify(digests(folder)).wrong == ()
    for name, text in (("config.json", b" "), ("tokenizer.model", b"\0"), ("generation_config.json", b"\n")):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + text)
        assert verify(digests(folder)).wrong == (str(folder / name),)
        (folder / name).unlink()
        assert name in verify(digests(folder)).wrong[0]
        (folder / name).write_bytes(before)
    (folder / "README.md").write_text("what was not written here is not looked at")
    up = b'"model.layers.2.mlp.up_proj.weight":{"dtype":"F16","shape":'
    file.write_bytes(whole.replace(up + b"[96,64]", up + b"[64,96]"))
    assert verify(digests(folder)).wrong == (header, f"{file}: model.layers.2.mlp.up_proj.weight")
    file.write_bytes(whole.replace(b'"format":"pt"', b'"format":"tp"'))
    assert verify(digests(folder)).wrong == (header,)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="has no SHA256SUMS"):
        digests(folder)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_workers_and_blocks_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf", dtype="f32")) as source:
        convert(source, tmp_path / "a.gguf", "q4_0", jobs=1)
        monkeypatch.setattr("hybrid.convert.blocks.BLOCK_ELEMENTS", 500)
        convert(source, tmp_path / "b.gguf", "q4_0", jobs=5)
    same_files(tmp_path / "a.gguf", tmp_path / "b.gguf")


@pytest.mark.slow
def test_memory_is_that_of_blocks(tmp_path: Path) -> None:
    """A matrix of 134 MB, twice that in float32: with the interpreter's 40 MB the process stays below 160 MB."""
    hp = tiny(vocab=65536, hidden=1024, n_layers=1, layer_is_global=(False,))
    shapes = {f"model.{n}": t for n, t in weights(tiny(hidden=1024, n_layers=1, layer_is_global=(False,))).items()}
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(hp)))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    header, at = {}, 0
    for name, t in shapes.items():
        shape = [hp.vocab, hp.hidden] if name.endswith("embed_tokens.weight") else list(t.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * int(np.prod(shape))]}
        at += 2 * int(np.prod(shape))
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)  # sparse zeros
    code = (
        # ru_maxrss has the parent's
        "import sys; from hybrid.convert.__main__ import main; code = main(sys.argv[1:]); "
        "print(*(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM'))); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "m.gguf"), "--type", "q4_0", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 160_000, done.stdout


def test_template_and_sampling_travel(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ bos_token }}x")
    (tmp_path / "hf" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 5], "top_k": 64, "top_p": 0.95, "temperature": 1.0})
    )
    with open_checkpoint(tmp_path / "hf") as source:
        convert(source, tmp_path / "m.gguf", "f16")
    c = open_checkpoint(tmp_path / "m.gguf")
    assert c.chat_template == "{{ bos_token }}x" and c.name == "hf"
    assert c.generation.eos_ids == (1, 5) and c.generation.top_k == 64
    assert c.generation.top_p == pytest.approx(0.95) and c.generation.temperature == 1.0


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_are_what_the_converter_writes(tmp_path: Path, name: str) -> None:
    with open_checkpoint(demo("q8_0", name)) as source:
        convert(source, tmp_path / "m.gguf", SAME)
    same_files(tmp_path / "m.gguf", demo("q8_0", name))


def test_a_rename_that_fails_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for target in targets[1:]:
        target.write_bytes(b"old")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(target) == targets[0]:
            raise OSError(5, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output"), atomic_files(targets, force=True) as parts:
        for part in parts:
            part.write_bytes(b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {t.name: b"old" for t in targets[1:]}
    monkeypatch.undo()
    with atomic_files(targets, force=True) as parts:
        for part in parts:
            part.write_bytes(b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {t.name: b"new" for t in targets}
