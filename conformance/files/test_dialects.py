"""Every size and dialect of Gemma 3: the published files' hyper-parameters exactly, and the same logits from Hugging
Face directories and GGUF files, whole or split, of every shape."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import hybrid
from conformance.support.gemma3_sizes import SIZES, Size, gguf_metadata, published_config
from conformance.support.gguf_files import add_tokenizer, finish
from conformance.support.plain_gemma3 import forward
from conformance.support.profile import LONG
from conformance.support.synthetic import (
    PIECES,
    config,
    sentencepiece_model,
    tiny,
    weights,
    write_hf,
    write_safetensors,
)
from hybrid.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from hybrid.checkpoint.decoder import hf_name
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gemma3 import gguf_fields, hparams_from_gguf, hparams_from_hf
from hybrid.convert import convert
from hybrid.core.hparams import HParams
from hybrid.core.tensor import Tensor
from hybrid.quant.codec import dequantise, quantise

HERE = Path("config.json")


def same(got: HParams, want: HParams) -> None:
    """Equal in every field; scale and eps to float32."""
    ours, theirs = got.as_dict(), want.as_dict()
    for name in ("attention_scale", "eps"):
        assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-7)
    assert ours == theirs


@pytest.mark.parametrize("size", SIZES, ids=lambda s: s.name)
def test_published_files_of_every_size(size: Size) -> None:
    want = size.hparams()
    shapes = tensors(want)
    assert (len(shapes), sum(math.prod(s) for s in shapes.values())) == (size.tensors, size.parameters)
    fields = Fields(published_config(size), HERE)
    same(hparams_from_hf(fields, size.vocab), want)
    assert bool(fields.notes) == size.multimodal and ("head_dim" in "".join(fields.notes)) == (
        size.name in ("4b", "12b")
    )
    for dialect in ("old", "new", "multimodal"):
        fields = Fields(config(want, dialect), HERE)
        same(hparams_from_hf(fields, size.vocab), want)
        assert not fields.notes
    same(hparams_from_gguf(Fields(gguf_metadata(size, "llama.cpp"), HERE), size.vocab, True), want)
    same(
        hparams_from_gguf(Fields({f"gemma3.{k}": v for k, v in gguf_fields(want).items()}, HERE), size.vocab, True),
        want,
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda s: s.name)
def test_files_whose_writer_forgot_fields(size: Size) -> None:
    """Ollama's: no epsilon, no RoPE scaling although the model needs it, other names for the bases, a soft-cap."""
    fields = Fields(gguf_metadata(size, "ollama"), HERE)
    same(hparams_from_gguf(fields, size.vocab, True), size.hparams(softcap=30.0 if size.name == "1b" else 0.0))
    said = "\n".join(fields.notes)
    assert ("scaled by 1/8" in said) == size.multimodal and "1e-6" in said and len(fields.notes) == 1 + size.multimodal


def test_a_config_without_rope_scaling_is_taken_at_its_word(tmp_path: Path) -> None:
    """transformers' result is the definition. The absence is reported, since it may be a mistake."""
    text = config(SIZES[2].hparams(), "old")
    del text["rope_scaling"]
    fields = Fields(text, HERE)
    assert {x.rope_factor for x in hparams_from_hf(fields, 262208).layers} == {1.0} and "RoPE scaling" in "".join(
        fields.notes
    )


def test_rows_beyond_the_tokenizer_count_as_the_tensor_has_them() -> None:
    """The embedding's shape decides: 262144 and 262208 rows are both in use."""
    for rows in (262144, 262208, 262400):
        fields = Fields(config(SIZES[2].hparams(), "old"), HERE)
        assert hparams_from_hf(fields, rows).vocab == rows
        assert bool(fields.notes) == (rows != 262208)


def _reduced(size: Size) -> HParams:
    """A local and a global layer, a window shorter than the text, few rows of vocabulary. In the short profile the FFN
    is narrower, and 12b and 27b have only their global layer."""
    ffn = size.ffn if LONG or size.ffn < 4096 else size.ffn // 16 // 32 * 32
    layers = (False, True) if LONG or size.hidden < 3000 else (True,)
    return size.hparams(n_layers=len(layers), layer_is_global=layers, window=4, vocab=len(PIECES), ffn=ffn)


def _random(hp: HParams) -> dict[str, Tensor]:
    """bf16 weights by Hugging Face's names: the same few random numbers repeated, for speed."""
    base = np.random.default_rng(hp.hidden).normal(0, 1, 65521).astype(np.float32)
    out = {}
    for name, shape in tensors(hp).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        out[hf_name(name)] = Tensor.of(np.resize(quantise(base * np.float32(scale), "bf16").array, shape), "bf16")
    return out


def write_gguf(path: Path, hp: HParams, named: dict[str, Tensor], fields: dict[str, Any], split: int = 0) -> list[Path]:
    """A file, or parts of at most `split` tensors, as a converter makes it: 1 is added to norm weights."""
    w = gguf.GGUFWriter(path, "gemma3", split_max_tensors=split)
    for key, value in fields.items():
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
        add[type(value)](key, value)
    add_tokenizer(w)
    for name in tensors(hp):
        t = named[hf_name(name)]
        if len(t.shape) == 1:
            w.add_tensor(name, dequantise(t, np.float32) + np.float32(1))
        else:
            w.add_tensor(name, t.array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(w)
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def _fields_of(hp: HParams) -> dict[str, Any]:
    return {f"gemma3.{k}": v for k, v in gguf_fields(hp).items()}


def _logits(path: Path) -> np.ndarray:
    with hybrid.load(path, device="cpu", ctx=32, precision="exact") as m:
        return m.logits(m.encode("the thing abc"))


@pytest.mark.parametrize("size", SIZES, ids=lambda s: s.name)
def test_every_shape_gives_the_same_logits_from_both_formats(size: Size, tmp_path: Path) -> None:
    hp = _reduced(size)
    named = _random(hp)
    dialect, prefix = {
        "270m": ("old", "model."),
        "1b": ("new", "model."),
        "4b": ("multimodal", "language_model.model."),
        "12b": ("multimodal", "model.language_model."),
        "27b": ("old", "language_model.model."),
    }[size.name]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(hp, dialect)))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(PIECES))
    write_safetensors(folder / "model.safetensors", {prefix + n: t for n, t in named.items()})
    (file,) = write_gguf(tmp_path / "m.gguf", hp, named, _fields_of(hp))
    from_hf, from_gguf = _logits(folder), _logits(file)
    assert from_hf.shape[1] == len(PIECES) and len(from_hf) > hp.window and np.ptp(from_hf) > 1
    np.testing.assert_array_equal(from_hf, from_gguf)


def _split(folder: Path, seed: int = 0) -> list[Path]:
    hp = tiny()
    fields = {"general.name": f"m{seed}"} | _fields_of(hp)
    return write_gguf(folder / "m.gguf", hp, weights(hp, "bf16", seed), fields, split=15)


def test_a_split_file_opens_by_any_of_its_parts(tmp_path: Path) -> None:
    parts = _split(tmp_path)
    assert [p.name for p in parts] == [f"m-{k:05}-of-00003.gguf" for k in (1, 2, 3)]
    hp = tiny()
    (whole,) = write_gguf(tmp_path / "whole.gguf", hp, weights(hp), _fields_of(hp))
    one = open_checkpoint(whole)
    for path in parts:
        c = open_checkpoint(path)
        assert c.path == parts[0] and c.file_bytes == sum(p.stat().st_size for p in parts)
        assert c.names == one.names and c.hparams == one.hparams and c.tokenizer.n_tokens == len(PIECES)
        for name in c.names:
            np.testing.assert_array_equal(c.tensor(name).array, one.tensor(name).array)


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    def refuse(*words: str) -> None:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(parts[0])
        assert all(w in str(error.value) for w in words), error.value

    parts = _split(tmp_path)
    data = [p.read_bytes() for p in parts]
    parts[1].unlink()
    refuse(parts[1].name, "missing", "fetch")
    parts[1].write_bytes(data[2])
    refuse(parts[1].name, "split.no", "another model")
    parts[1].write_bytes(data[0])
    refuse("split.no")
    parts[1].write_bytes(data[1][: len(data[1]) // 2])
    refuse(parts[1].name, "cut short")
    other = tmp_path / "other"
    other.mkdir()
    hp = tiny(n_layers=2)
    longer = write_gguf(other / "m.gguf", hp, weights(hp), _fields_of(hp), split=10)
    parts[1].write_bytes(longer[1].read_bytes())
    refuse(parts[1].name)
    parts[1].write_bytes(data[1])
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(data[0])
    with pytest.raises(CheckpointError, match=r"renamed\.gguf is part 1 of 3.*name"):
        open_checkpoint(alone)


def test_layers_of_a_gguf_file_may_differ(tmp_path: Path) -> None:
    """Lists of head_count_kv, head_count and feed_forward_length by layer (pruned models), read, run and written."""
    uniform = tiny()
    layers = (
        replace(uniform.layers[0], n_kv_heads=1),
        replace(uniform.layers[1], ffn=64),
        replace(uniform.layers[2], n_heads=2),
    )
    hp = replace(uniform, layers=layers)
    fields = _fields_of(hp)
    assert fields["gemma3.attention.head_count_kv"] == [1, 2, 2] and fields["gemma3.feed_forward_length"] == [
        96,
        64,
        96,
    ]
    (path,) = write_gguf(tmp_path / "m.gguf", hp, weights(hp), fields)
    ids = [2, 5, 7, 11, 3, 9, 30, 31, 32, 33, 34]
    with hybrid.load(path, device="cpu", ctx=32) as m:
        assert m.hparams.layers == hp.layers
        want, _ = forward(m.checkpoint, ids)
        assert np.abs(m.logits(ids) - want).max() < 1e-4
        convert(m.checkpoint, tmp_path / "again.gguf", "q8_0")
        with pytest.raises(CheckpointError, match="write GGUF"):
            convert(m.checkpoint, tmp_path / "hf", "f32", format="hf")
    assert open_checkpoint(tmp_path / "again.gguf").hparams.layers == hp.layers
    (wrong,) = write_gguf(tmp_path / "w.gguf", hp, weights(hp), fields | {"gemma3.feed_forward_length": [96, 64]})
    with pytest.raises(CheckpointError, match="feed_forward_length must be one whole number for each of the 3 layers"):
        open_checkpoint(wrong)


def test_a_tensor_in_two_parts_or_shards_is_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    hp = tiny()
    both = {"model." + n: t for n, t in weights(hp).items()}
    write_safetensors(shard, both)
    with pytest.raises(CheckpointError, match=r"duplicated"):
        open_checkpoint(folder)
    write_safetensors(shard, dict(list(both.items())[:1]))
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: tensor .* is missing, which .*index\.json"
    ):
        open_checkpoint(folder)


def test_other_modalities_are_skipped_and_reported_once(tmp_path: Path) -> None:
    vision = Tensor.of(np.zeros((3, 3), np.float32))
    for prefix, outer in (("language_model.model.", ""), ("model.language_model.", "model.")):
        names = (f"{outer}vision_tower.vision_model.x.weight", f"{outer}multi_modal_projector.y.weight")
        extra = dict.fromkeys(names, vision)
        c = open_checkpoint(write_hf(tmp_path / prefix, tiny(), "multimodal", prefix=prefix, extra=extra))
        assert [n for n in c.notes if "2 tensors of other modalities" in n] == list(c.notes)
        assert not any("vision" in n for n in c.names)


def test_notes_reach_the_statistics(tmp_path: Path) -> None:
    hp = tiny(context_length=131072, rope_factor=8.0)
    fields = {k: v for k, v in _fields_of(hp).items() if "scaling" not in k}
    (path,) = write_gguf(tmp_path / "m.gguf", hp, weights(hp), fields)
    with hybrid.load(path, device="cpu", ctx=32) as m:
        "".join(m.generate("the", max_tokens=2, ignore_eos=True))
        assert m.stats is not None and any("scaled by 1/8" in line for line in m.stats.details())


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.3.attn_q.weight", "rope_freqs.weight"])
def test_a_tensor_that_would_change_a_layer_is_refused_and_another_named(tmp_path: Path, name: str) -> None:
    hp = tiny()
    path = tmp_path / "m.gguf"
    named = weights(hp)
    w = gguf.GGUFWriter(path, "gemma3")
    for key, value in _fields_of(hp).items():
        {int: w.add_uint32, float: w.add_float32}[type(value)](key, value)
    w.add_tensor(name, np.zeros(32, np.float32))
    for own in tensors(hp):
        w.add_tensor(own, dequantise(named[hf_name(own)], np.float32))
    finish(w)
    if name.startswith("blk."):
        with pytest.raises(CheckpointError, match=r"tensor blk\.\d\.attn_q\.\w+ is no part of this architecture"):
            open_checkpoint(path)
    else:
        assert _notes(open_checkpoint(path)) == ["tensors without a use in this model are left out: rope_freqs.weight"]


def _notes(checkpoint: Checkpoint) -> list[str]:
    return list(checkpoint.notes)
