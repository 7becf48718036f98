"""The converter: nothing lost that the type can hold, files that others read, all or nothing on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conformance.synthetic import tiny, weights, write_hf, write_safetensors
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.convert import convert, main
from hybrid.spec.dtypes import WEIGHT_TYPES
from hybrid.spec.tensor import Tensor
from kernels.oracle.quant import dequantise, to_ggml

MODELS = Path(__file__).parent.parent / "models"


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


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_the_reference_library_reads_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "m.gguf"
    with open_checkpoint(write_hf(tmp_path / "hf", dtype="f32")) as source:
        report = convert(source, path, dtype)
        fields, tensors = _read(path)
        assert fields["general.architecture"] == "gemma3" and fields["gemma3.block_count"] == 3
        assert fields["tokenizer.ggml.model"] == "llama" and len(fields["tokenizer.ggml.tokens"]) == 320
        assert fields["general.file_type"] == int(gguf.LlamaFileType[_FILE_TYPE[dtype]])
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        for name in source.names:
            values = dequantise(source.tensor(name), np.float32)
            want = values if values.ndim == 1 else gguf.quants.quantize(values, kind)
            np.testing.assert_array_equal(tensors[name], want)
    assert report.bytes == path.stat().st_size and sum(report.types.values()) == len(tensors)


_FILE_TYPE = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t.data for t in reader.tensors}


def test_gguf_sources_are_copied_bit_for_bit(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        convert(source, tmp_path / "a.gguf", "q4_0", embed_dtype="q8_0")
    with open_checkpoint(tmp_path / "a.gguf") as source:
        assert source.dtype("token_embd.weight") == "q8_0" and source.dtype("blk.0.ffn_up.weight") == "q4_0"
        convert(source, tmp_path / "b.gguf", "q4_0", embed_dtype="q8_0")
        assert (tmp_path / "a.gguf").read_bytes()[-5000:] == (tmp_path / "b.gguf").read_bytes()[-5000:]
        with open_checkpoint(tmp_path / "b.gguf") as target:
            for name in source.names:
                np.testing.assert_array_equal(to_ggml(target.tensor(name)), to_ggml(source.tensor(name)))


def test_rows_that_do_not_fit_fall_back_to_f16_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hf(tmp_path / "hf", tiny(n_heads=3, n_kv_heads=1))
    assert main([str(tmp_path / "hf"), str(tmp_path / "m.gguf"), "--type", "q8_0", "--json"]) == 0
    out = capsys.readouterr()
    assert "blk.0.attn_output.weight: kept as f16" in out.err
    report = json.loads(out.out)
    assert report["types"] == {"q8_0": 19, "f32": 19, "f16": 3} and len(report["fallbacks"]) == 3
    assert open_checkpoint(tmp_path / "m.gguf").dtype("blk.0.attn_output.weight") == "f16"


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


def test_a_failure_midway_leaves_nothing(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", dtype="f32")
    truth = {f"model.{n}": t for n, t in weights(tiny(), "f32").items()}
    bad = truth["model.layers.2.mlp.down_proj.weight"].array
    for value, dtype, words in (
        (np.nan, "q8_0", "NaN"),
        (1e6, "f16", "--type bf16"),
        (1e38, "q4_0", "too large"),
    ):
        bad[3, 3] = value
        write_safetensors(folder / "model.safetensors", truth)
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        (out / "m.gguf").write_bytes(b"before")
        with open_checkpoint(folder) as source, pytest.raises(CheckpointError, match=rf"blk\.2\.ffn_down.*{words}"):
            convert(source, out / "m.gguf", dtype, force=True)
        assert [(p.name, p.read_bytes()) for p in out.iterdir()] == [("m.gguf", b"before")]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with open_checkpoint(write_hf(tmp_path / "hf")) as source, pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out" / "m.gguf", "f32", progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_can_replace_its_own_source(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with open_checkpoint(write_hf(tmp_path / "hf")) as source:
        convert(source, path, "bf16")
    with open_checkpoint(path) as source:
        convert(source, path, "q8_0", force=True)
        assert source.tensor("token_embd.weight").dtype == "bf16"  # the old file lives as long as it is mapped
    assert open_checkpoint(path).dtype("token_embd.weight") == "q8_0"


def test_existing_files_are_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(write_hf(tmp_path / "hf")), str(tmp_path / "m.gguf"), "--type", "q4_0"]
    assert main(args) == 0
    out = capsys.readouterr()
    assert "m.gguf" in out.out and "q4_0" in out.out and "100%" in out.err
    assert main(args) == 1 and "--force" in capsys.readouterr().err
    assert main([*args, "--force"]) == 0
    for target, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "m.gguf", "create the folder")):
        assert main([args[0], str(target), "--type", "q4_0"]) == 1 and words in capsys.readouterr().err


def test_the_command_gives_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybrid.convert", str(tmp_path / "none"), str(tmp_path / "x"), "--type", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "no such file" in done.stderr


def test_shipped_models_are_what_the_converter_makes_of_the_bf16_one(tmp_path: Path) -> None:
    with open_checkpoint(MODELS / "demo-gemma3-bf16.gguf") as source:
        for dtype in ("q8_0", "q4_0"):
            convert(source, tmp_path / "m.gguf", dtype, force=True)
            assert (tmp_path / "m.gguf").read_bytes() == (MODELS / f"demo-gemma3-{dtype}.gguf").read_bytes()
        one = source.tensor("token_embd.weight")
        assert isinstance(one, Tensor) and one.dtype == "bf16"
