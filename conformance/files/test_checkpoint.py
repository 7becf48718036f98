"""Checkpoints: every dialect reads as the same model, and every error is one line that names its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conformance.support.gguf_files import finish, sparse
from conformance.support.paths import MODELS
from conformance.support.synthetic import tiny, weights, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.decoder import hf_name
from hybrid.checkpoint.families import tensors
from hybrid.core.hparams import HParams
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import dequantise


@pytest.mark.parametrize("dialect", ["new", "old", "multimodal"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_every_dialect_and_prefix_reads_the_same(tmp_path: Path, dialect: str, prefix: str) -> None:
    hp = tiny(rope_factor=8.0, softcap=30.0, attention_scale=168**-0.5, n_layers=5, rope_theta_local=2e4)
    vision = {"vision_tower.encoder.weight": Tensor.of(np.zeros((3, 3), np.float32))}
    folder = write_hf(tmp_path, hp, dialect, shards=3, prefix=prefix, extra=vision)
    with open_checkpoint(folder) as c:
        got = c.hparams.as_dict()
        assert got.pop("attention_scale") == pytest.approx(hp.attention_scale, rel=1e-12)
        assert got == {k: v for k, v in hp.as_dict().items() if k != "attention_scale"}
        truth = weights(hp)
        for name in c.names:
            stored, want = c.tensor(name), truth[hf_name(name)]
            assert (stored.dtype, stored.shape) == (c.dtype(name), c.shape(name))
            if name.endswith("_norm.weight"):
                np.testing.assert_array_equal(stored.array, dequantise(want, np.float32) + np.float32(1))
            else:
                assert stored.dtype == "bf16"
                np.testing.assert_array_equal(stored.array, want.array)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 48, "n_heads": 3, "n_kv_heads": 1, "hidden": 32, "ffn": 32, "vocab": 303, "n_layers": 1},
        {"head_dim": 256, "n_heads": 1, "n_kv_heads": 1, "hidden": 160, "ffn": 224, "window": 1000, "n_layers": 7},
        {"layer_is_global": (True, True, True), "window": 0},
    ],
)
def test_any_shape_is_read(tmp_path: Path, dtype: str, changes: dict[str, object]) -> None:
    hp = tiny(**changes)
    with open_checkpoint(write_hf(tmp_path, hp, dtype=dtype)) as c:
        assert c.hparams.layer_is_global == hp.layer_is_global
        assert c.shape("token_embd.weight") == (hp.vocab, hp.hidden)
        assert c.tensor("blk.0.attn_q.weight").dtype == dtype


def test_class_defaults_fill_a_short_config(tmp_path: Path) -> None:
    """The published multimodal 4B config lists five fields: the rest are transformers' class defaults."""
    from hybrid.checkpoint.fields import Fields
    from hybrid.checkpoint.gemma3 import hparams_from_hf

    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "model_type": "gemma3_text",
    }
    hp = hparams_from_hf(Fields({"model_type": "gemma3", "text_config": text}, tmp_path), 262208)
    layer = hp.layers[5]
    assert (layer.n_heads, layer.n_kv_heads, layer.head_dim, hp.context_length) == (8, 4, 256, 131072)
    assert (layer.rope_theta, hp.layers[0].rope_theta, layer.rope_factor, hp.attention_scale) == (1e6, 1e4, 8.0, 0.0625)
    assert hp.layers[0].rope_factor == 1.0
    assert [i for i, g in enumerate(hp.layer_is_global) if g] == [5, 11, 17, 23, 29]
    assert hp.tied and hp.softcap == 0 and hp.eps == 1e-6


def test_a_tied_output_matrix_is_ignored_and_an_untied_one_kept(tmp_path: Path) -> None:
    head = {"lm_head.weight": weights(tiny())["embed_tokens.weight"]}
    assert "output.weight" not in open_checkpoint(write_hf(tmp_path / "tied", extra=head)).names
    c = open_checkpoint(write_hf(tmp_path / "untied", tiny(tied=False)))
    assert not c.hparams.tied and c.shape("output.weight") == (320, 64)


def test_generation_and_template_come_from_the_directory(tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "top_k": 64, "top_p": 0.95}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "T"}))
    c = open_checkpoint(tmp_path)
    assert (c.generation.eos_ids, c.generation.top_k, c.generation.top_p) == ((1, 5), 64, 0.95)
    assert c.chat_template == "T" and c.tokenizer.eos_ids == {1, 5}


def _edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["config.json", "model_type", "'llama'", "gemma3_text"]),
        ({"head_dim": 24}, ["config.json", "head_dim 24", "multiple of 16"]),
        ({"hidden_size": 70}, ["config.json", "hidden 70", "multiple of 32"]),
        ({"intermediate_size": 100}, ["config.json", "ffn 100"]),
        ({"intermediate_size": "many"}, ["config.json", "intermediate_size", "'many'"]),
        ({"num_key_value_heads": 3}, ["config.json", "n_kv_heads 3", "n_heads 4"]),
        ({"num_hidden_layers": 4, "layer_types": None}, ["layers.3.input_layernorm.weight", "missing"]),
        ({"num_attention_heads": 6}, ["model.safetensors: tensor model.layers.0.self_attn.q_proj.weight", "[96, 64]"]),
        ({"layer_types": ["full_attention"]}, ["config.json", "layer_is_global", "3 layers"]),
        ({"layer_types": ["chunked", "x", "x"]}, ["layer_types", "chunked"]),
        ({"hidden_activation": "relu"}, ["hidden_activation", "'relu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["rope_parameters.full_attention.rope_type"]),
        ({"rope_parameters": 3}, ["rope_parameters", "object"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "positive"]),
    ],
)
def test_a_wrong_config_is_named(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    write_hf(tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert all(w in str(error.value) for w in words) and "\n" not in str(error.value), str(error.value)


def test_wrong_paths_are_explained(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", shards=2)
    for path, words in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "config.json is missing"),
        (folder / "config.json", "not a GGUF file"),
        (folder / "model-00001-of-00002.safetensors", "give the directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json.*model-00002-of-00002\.safetensors.*fetch"):
        open_checkpoint(folder)


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    file = write_hf(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for data, words in (
        (whole[:-1], "cut short"),
        (whole[:100], "cut short"),
        (b"", "cut short"),
        (b"\xff" * 64, "not a safetensors file"),
        (whole.replace(b'"shape": [320, 64]', b'"shape": [321, 64]'), "malformed"),
        (whole.replace(b'"shape": [320, 64]', b'"shape": [-32, 64]'), "malformed"),
        (whole[:8] + b"[" + whole[9:], "malformed"),
    ):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(tmp_path)


def test_an_unreadable_type_is_named(tmp_path: Path) -> None:
    file = write_hf(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"I16" ', 1))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is stored as I16"):
        open_checkpoint(tmp_path)


def test_misaligned_data_is_copied(tmp_path: Path) -> None:
    """safetensors need not align its data: an odd header length puts every float at an odd address."""
    folder = write_hf(tmp_path, dtype="f32")
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    pad = 1 + (size % 2)
    header = data[8 : 8 + size] + b" " * pad
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    array = open_checkpoint(folder).tensor("blk.1.ffn_up.weight").array
    assert array.flags.aligned
    np.testing.assert_array_equal(array, weights(tiny(), "f32")[hf_name("blk.1.ffn_up.weight")].array)


def test_a_closed_checkpoint_raises_but_tensors_stay_valid(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path)) as c:
        kept = c.tensor("token_embd.weight")
        with pytest.raises(CheckpointError, match=r"no tensor 'blk\.9\.x'"):
            c.tensor("blk.9.x")
    with pytest.raises(CheckpointError, match="closed"):
        c.tensor("token_embd.weight")
    np.testing.assert_array_equal(kept.array, weights(tiny())["embed_tokens.weight"].array)


@pytest.mark.slow
def test_gguf_dialects(tmp_path: Path) -> None:
    """Fields that other writers omit or rename; the error for an unreadable type names a fix."""
    hp = tiny(context_length=131072, rope_factor=8.0)
    path = _gguf(tmp_path / "ollama.gguf", hp, {"rope.local.freq_base": 2e4, "rope.global.freq_base": 5e5})
    got = open_checkpoint(path).hparams
    assert {(x.rope_factor, x.rope_theta) for x in got.layers} == {(1.0, 2e4)}
    assert got.attention_scale == 0.25 and got.layer_is_global == (False, False, False)
    ollama = {"rope.local.freq_base": 2e4, "rope.global.freq_base": 5e5, "attention.sliding_window_pattern": 3}
    got = open_checkpoint(_gguf(tmp_path / "period.gguf", hp, ollama)).hparams
    assert [(x.rope_factor, x.rope_theta) for x in got.layers] == [(1.0, 2e4), (1.0, 2e4), (8.0, 5e5)]
    path = _gguf(tmp_path / "pattern.gguf", tiny(), {"attention.sliding_window_pattern": [True, False, True]})
    assert open_checkpoint(path).hparams.layer_is_global == (False, True, False)
    path = _gguf(tmp_path / "no-window.gguf", tiny(), {"attention.sliding_window": 0})
    assert open_checkpoint(path).hparams.layer_is_global == (True, True, True)
    path = _gguf(tmp_path / "27b.gguf", tiny(n_layers=62, hidden=96), {})
    assert open_checkpoint(path).hparams.attention_scale == pytest.approx((96 / 4) ** -0.5)
    path = _gguf(tmp_path / "f64.gguf", tiny(), {}, {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.MXFP4})
    data, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # after the number of axes and two of them
    assert data[kind] == gguf.GGMLQuantizationType.MXFP4
    data[kind] = gguf.GGMLQuantizationType.F64
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"f64\.gguf: tensor blk\.0\.ffn_up\.weight .* f64.*--type q8_0"):
        open_checkpoint(path)


def _gguf(path: Path, hp: HParams, changes: dict[str, object], types: dict[str, Any] | None = None) -> Path:
    """A file as a minimal third-party writer makes it: only required keys, q8_0 data of zeros."""
    w = sparse(path, hp, window="attention.sliding_window" not in changes)
    for key, value in changes.items():
        kind = {float: "add_float32", int: "add_uint32", list: "add_array"}[type(value)]
        getattr(w, kind)(f"gemma3.{key}", value)
    w.add_tensor("v.patch_embd.weight", np.zeros((2, 2), np.float32))
    for name, shape in tensors(hp).items():
        ggml = (types or {}).get(name, gguf.GGMLQuantizationType.Q8_0)
        zeros = np.zeros(shape, np.float32)
        if len(shape) == 1:
            w.add_tensor(name, zeros)
        else:
            w.add_tensor(name, gguf.quants.quantize(zeros, ggml), raw_dtype=ggml)
    finish(w)
    return path


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_gguf_types_hold_what_the_reference_library_reads(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    hp = tiny()
    values = rng.normal(size=(hp.vocab, hp.hidden)).astype(np.float32)
    ggml = gguf.GGMLQuantizationType[kind.upper()]
    path = _gguf(tmp_path / "m.gguf", hp, {}, {"token_embd.weight": ggml})
    reader = gguf.GGUFReader(path, "r+")
    info = next(t for t in reader.tensors if t.name == "token_embd.weight")
    info.data[:] = gguf.quants.quantize(values, ggml)
    reader.data.flush()
    tensor = open_checkpoint(path).tensor("token_embd.weight")
    assert tensor.dtype == kind
    np.testing.assert_array_equal(dequantise(tensor, np.float32), gguf.quants.dequantize(info.data, ggml))


def test_damaged_gguf_is_refused(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "m.gguf", tiny(n_layers=1), {})
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for cut in [3, 4, 10, 23, *rng.integers(24, len(whole) - 1, 20).tolist()]:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(path)
    for _ in range(60):  # a flipped byte is either refused in one line or harmless
        data = bytearray(whole)
        data[rng.integers(4, 1500)] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_hparams_are_immutable_and_checked() -> None:
    hp = tiny()
    with pytest.raises(AttributeError):
        hp.hidden = 1  # type: ignore[misc]
    for field, value in (("window", 0), ("eps", float("nan")), ("vocab", 3.5)):
        with pytest.raises(ValueError, match=field):
            tiny(**{field: value, "layer_is_global": (False,) * 3})
    with pytest.raises(ValueError, match="rope_factor"):
        tiny(rope_factor=-1.0)
    with pytest.raises(ValueError, match="n_layers 0"):
        tiny(n_layers=0)
    with pytest.raises(AttributeError):
        hp.layers[0].ffn = 1  # type: ignore[misc]
    assert [x["window"] for x in json.loads(json.dumps(hp.as_dict()))["layers"]] == [8, 0, 8]


def test_shipped_models_open_without_reading_data() -> None:
    sizes = {
        "demo-gemma3": (12, 256),
        "demo-gemma3n": (10, 256),
        "demo-gemma4": (10, 256),
        "demo-gemma4-moe": (6, 256),
        "demo-gemma3-draft": (4, 128),
    }
    for name, size in sizes.items():
        with open_checkpoint(MODELS / f"{name}-q8_0.gguf") as c:
            assert c.dtype("blk.0.attn_q.weight") == "q8_0" and c.dtype("output_norm.weight") == "f32"
            assert (c.hparams.n_layers, c.hparams.hidden) == size and c.hparams.vocab == 4096
