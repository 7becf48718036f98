"""Gemma 3n and Gemma 4: published sizes by hyper-parameters only, both dialects, conversion both ways, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.support.gemma_sizes import (
    GEMMA3N,
    GEMMA4,
    gemma3n_config,
    gemma3n_metadata,
    gemma4_config,
    gemma4_metadata,
)
from conformance.support.synthetic import PIECES, tiny, tiny_gemma3n, tiny_gemma4, weights, write_hf, write_safetensors
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.families import FAMILIES, family_named, family_of, is_exact, tensors
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.checkpoint.random import random_checkpoint, random_types
from hybrid.convert import convert
from hybrid.convert.kinds import Wanted, plan_types
from hybrid.convert.verify import digests, verify
from hybrid.core.hparams import HParams, LayerParams
from hybrid.core.tensor import Tensor
from hybrid.inspect import main as inspect
from hybrid.quant.codec import dequantise
from hybrid.spec.model import find_model

HERE = Path("config.json")
MODELS: dict[str, tuple[HParams, str]] = {
    "3n": (tiny_gemma3n(), "new"),
    "3n multimodal": (tiny_gemma3n(), "multimodal"),
    "4 by layer": (tiny_gemma4(), "new"),
    "4 as published": (tiny_gemma4(), "global"),
    "4 multimodal": (tiny_gemma4(), "multimodal"),
    "4 without inputs": (tiny_gemma4(inputs=False), "global"),
}


class Sheet:
    """A stand-in for the tensors of a file of a published size, with the attributes that readers use."""

    def __init__(self, hp: HParams, without: tuple[str, ...] = ()) -> None:
        family = family_of(hp)
        made = family.made(hp)
        self.shapes = {n: s for n, s in family.kept(hp).items() if n not in without}
        self.made = {n: v for n, v in made.items() if n not in without}

    def has(self, name: str) -> bool:
        return name in self.shapes

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    height = rows

    def values(self, name: str, finite: bool = True) -> np.ndarray | None:
        return self.made.get(name)


# ------------------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("name", GEMMA4)
@pytest.mark.parametrize("dialect", ["published", "by layer"])
def test_a_published_gemma4_config_gives_the_sheets_hyper_parameters(name: str, dialect: str) -> None:
    hp = find_model(f"gemma4-{name}").hparams()
    config = Fields(gemma4_config(name, dialect), HERE)
    assert family_named("gemma4").hparams_from_hf(config, Sheet(hp)) == hp and not config.notes


@pytest.mark.parametrize("name", GEMMA4)
def test_gemma4_metadata_gives_the_sheets_hyper_parameters_and_counts(name: str) -> None:
    hp, size, family = find_model(f"gemma4-{name}").hparams(), GEMMA4[name], family_named("gemma4")
    assert family.hparams_from_gguf(Fields(gemma4_metadata(name), HERE), Sheet(hp)) == hp
    kept = family.kept(hp)
    assert len(kept) == size["tensors"]  # of a public file
    assert sum(math.prod(s) for n, s in kept.items() if n != "rope_freqs.weight") == size["parameters"]
    divisors = family.made(hp)["rope_freqs.weight"]
    assert divisors.tolist() == [1.0] * 64 + [np.float32(1e30)] * 192
    written = {f"gemma4.{key}": value for key, value in family.gguf_fields(hp).items()}
    assert written == {k: v for k, v in gemma4_metadata(name).items() if k != "general.architecture"}


def test_where_the_layers_of_gemma4_read() -> None:
    e2b, e4b = (find_model(f"gemma4-{n}").hparams() for n in ("e2b", "e4b"))
    assert {x.kv_from for x in e2b.layers[15:] if x.window} == {13} and {
        x.kv_from for x in e2b.layers[15:] if not x.window
    } == {14}
    assert {x.kv_from for x in e4b.layers[24:] if x.window} == {22} and {
        x.kv_from for x in e4b.layers[24:] if not x.window
    } == {23}
    assert [x.ffn for x in e2b.layers] == [6144] * 15 + [12288] * 20 and e2b.n_kv_layers == 15 and e4b.n_kv_layers == 24
    large = find_model("gemma4-31b").hparams()
    kinds = {(x.head_dim, x.n_kv_heads, x.k_as_v) for x in large.layers}
    assert large.n_kv_layers == 60 and kinds == {(256, 16, False), (512, 4, True)}
    assert large.layers[5].rope_dim == 128 and large.layers[0].rope_dim == 256


@pytest.mark.parametrize("name", GEMMA3N)
def test_every_writers_gemma3n_gives_the_sheets_hyper_parameters(name: str) -> None:
    hp, family = find_model(f"gemma3n-{name}").hparams(), family_named("gemma3n")
    config = Fields(gemma3n_config(name), HERE)
    assert family.hparams_from_hf(config, Sheet(hp)) == hp
    assert bool(config.notes) == (name == "e4b")  # which leaves most to the class defaults: reported
    for writer in ("llama.cpp", "ollama"):
        metadata = Fields(gemma3n_metadata(name, writer), HERE)
        assert family.hparams_from_gguf(metadata, Sheet(hp)) == hp
        assert ("activation_sparsity_scale" in "".join(metadata.notes)) == (writer == "ollama")
    assert sum(math.prod(s) for s in family.kept(hp).values()) == GEMMA3N[name]["parameters"]  # of a public file
    assert {x.kv_from for x in hp.layers[20:]} == {18, 19} and hp.n_kv_layers == 20


def test_widths_may_differ_by_layer() -> None:
    """Sizes between E2B and E4B have some layers of each width."""
    hp = find_model("gemma3n-e4b").hparams()
    mixed = replace(hp, layers=tuple(replace(x, ffn=8192 if i % 3 else 16384) for i, x in enumerate(hp.layers)))
    family = family_of(mixed)
    config = {"model_type": "gemma3n_text", **family.hf_config(mixed)}
    assert family.hparams_from_hf(Fields(config, HERE), Sheet(mixed)) == mixed
    fields = {f"gemma3n.{k}": v for k, v in family.gguf_fields(mixed).items()}
    assert family.hparams_from_gguf(Fields(fields, HERE), Sheet(mixed)) == mixed


def test_the_last_layer_of_gemma4_is_global_whatever_is_written() -> None:
    text = gemma4_config("12b", "published")["text_config"]
    text["layer_types"] = ["sliding_attention"] * 48
    hp = find_model("gemma4-12b").hparams()
    found = family_named("gemma4").hparams_from_hf(Fields(text, HERE), Sheet(hp))
    assert [i for i, g in enumerate(found.layer_is_global) if g] == [47]


def test_absent_fields_of_gemma4_are_its_class_defaults() -> None:
    hp = tiny_gemma4()
    made = family_of(hp).made(hp)
    found = family_named("gemma4").hparams_from_hf(Fields({"num_hidden_layers": 5}, HERE), Sheet(hp))
    local, wide = found.layers[0], found.layers[-1]
    assert (found.hidden, found.per_layer_dim, found.softcap, found.context_length) == (2304, 256, 0.0, 131072)
    assert (local.head_dim, local.n_heads, local.n_kv_heads, local.window) == (256, 8, 4, 512)
    assert (local.ffn, local.rope_theta, local.rotated) == (9216, 1e4, 1.0)
    assert (wide.head_dim, wide.n_kv_heads, wide.rotated, wide.rope_theta, wide.k_as_v) == (512, 4, 0.25, 1e6, False)
    assert found.n_kv_layers == 5 and [x.scalar for x in found.layers] == [
        float(v[0]) for n, v in made.items() if "blk" in n
    ]


# ------------------------------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("name", MODELS)
def test_conversion_is_lossless_both_ways(name: str, tmp_path: Path) -> None:
    """Hugging Face -> GGUF -> Hugging Face: the same hyper-parameters, the same bits, valid digests."""
    hp, dialect = MODELS[name]
    with open_checkpoint(write_hf(tmp_path / "hf", hp, dialect, prefix="model.language_model.")) as source:
        assert source.hparams == hp
        convert(source, tmp_path / "m.gguf", "bf16")
        with open_checkpoint(tmp_path / "m.gguf") as middle:
            convert(middle, tmp_path / "again", "bf16", format="hf")
        for path in (tmp_path / "m.gguf", tmp_path / "again"):
            assert not verify(digests(path)).wrong
            with open_checkpoint(path) as copy:
                assert replace(copy.hparams, eps=hp.eps) == hp and copy.hparams.eps == pytest.approx(hp.eps, rel=1e-6)
                assert copy.names == source.names
                for n in source.names:
                    assert np.array_equal(dequantise(copy.tensor(n)), dequantise(source.tensor(n))), n
                    packed = copy.packed(n)
                    if packed is not None:
                        assert packed.shape == source.shape(n)
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["model_type"] == f"{hp.family}_text" and again["num_kv_shared_layers"] == hp.n_layers - hp.n_kv_layers


def test_stacks_are_one_tensor_of_three_axes_in_gguf_and_separate_elsewhere(tmp_path: Path) -> None:
    hp = tiny_gemma3n()
    with open_checkpoint(write_hf(tmp_path / "hf", hp, shards=3)) as source:
        assert source.shape("altup_proj.weight") == (192, 64)
        convert(source, tmp_path / "m.gguf", "f32")
        rows = dequantise(source.rows("altup_unembd_proj.weight", 60, 130))
        packed = source.packed("altup_unembd_proj.weight")
        assert packed is not None
        raw = np.empty(192 * 64 * 2, np.uint8)
        packed.read_into(0, raw[:9000])
        packed.read_into(9000, raw[9000:])
    values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(192, 64)
    parts = weights(hp)
    whole = np.concatenate([dequantise(parts[f"altup_unembed_projections.{i}.weight"]) for i in range(3)])
    assert np.array_equal(rows, whole[60:130]) and np.array_equal(values, whole)
    stored = read_gguf(tmp_path / "m.gguf").stored
    assert stored["altup_proj.weight"].shape == (3, 64, 64) and "altup_proj.0.weight" not in stored


def test_other_modalities_and_unused_tensors_are_reported(tmp_path: Path) -> None:
    """Audio towers hold tensors without an axis."""
    one = Tensor.of(np.zeros((), np.float32))
    extra = {
        "model.audio_tower.layers.0.input_min": one,
        "model.embed_vision.x.weight": Tensor.of(np.zeros((2, 2), np.float32)),
    }
    with open_checkpoint(write_hf(tmp_path / "hf", tiny_gemma4(), "multimodal", extra=extra)) as c:
        said = "\n".join(c.notes)
    assert (
        "2 tensors of other modalities" in said
        and "5 tensors (blk.3.attn_k.weight, ...) of layers that read another" in said
    )


def test_a_file_without_the_unused_tensors_is_whole(tmp_path: Path) -> None:
    hp = tiny_gemma3n()
    folder = write_hf(tmp_path / "hf", hp)
    unused = {f"layers.{i}.self_attn.{k}.weight" for i in (3, 4) for k in ("k_proj", "v_proj", "k_norm")}
    own = {f"model.{n}": t for n, t in weights(hp).items() if n not in unused}
    write_safetensors(folder / "model.safetensors", own)
    with open_checkpoint(folder) as c:
        assert c.hparams == hp and not c.notes and set(c.names) == set(tensors(hp))


@pytest.mark.parametrize("hp", [tiny_gemma3n(), tiny_gemma4()], ids=["3n", "4"])
def test_quantising_leaves_what_it_would_cost_too_much_in(hp: HParams, tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path / "hf", hp)) as source:
        convert(source, tmp_path / "m.gguf", "q8_0")
        with open_checkpoint(tmp_path / "m.gguf") as c:
            kinds = {n: c.dtype(n) for n in c.names}
            exact = [n for n in kinds if is_exact(n, c.shape(n))]
    assert (
        kinds["token_embd.weight"] == kinds["per_layer_token_embd.weight"] == kinds["blk.0.inp_gate.weight"] == "q8_0"
    )
    assert kinds["per_layer_model_proj.weight"] == "bf16"
    assert {kinds[n] for n in exact} == {"f32"}
    if hp.family == "gemma3n":
        assert kinds["altup_proj.weight"] == kinds["blk.1.laurel_r.weight"] == "bf16"
        assert "blk.2.altup_predict_coef.weight" in exact and "blk.2.altup_correct_scale.weight" in exact
    shapes = {n: (kinds[n], s) for n, s in tensors(hp).items()}
    asked = plan_types(shapes, Wanted("q4_0", {"streams": "q8_0", "table": "f16"})).kinds
    assert asked["per_layer_model_proj.weight"] == "q8_0" and asked["per_layer_token_embd.weight"] == "f16"


@pytest.mark.parametrize("name", ["gemma3n-e2b", "gemma3n-e4b", "gemma4-e2b", "gemma4-e4b", "gemma4-12b", "gemma4-31b"])
def test_random_checkpoints_of_every_size(name: str) -> None:
    """Also of the first layers only, unless one of them reads a dropped layer's cache."""
    with random_checkpoint(name, "q4_0") as c:
        assert set(c.names) == set(tensors(c.hparams)) and c.dtype("token_embd.weight") == "q6_k"
        last = f"blk.{c.hparams.n_layers - 1}.ffn_down.weight"
        assert c.rows(last, 3, 5).shape == (2, c.hparams.layers[-1].ffn)
    with random_checkpoint(name, "q4_0", layers=7, vocab=512) as c:
        assert c.hparams.n_layers == 7 and c.shape("token_embd.weight") == (512, c.hparams.hidden)
        assert random_types(c.hparams, "q8_0", "q8_0")["blk.6.attn_norm.weight"] == "f32"


def test_inspect_says_how_layers_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hybrid.inspect import _layer_lines

    lines = _layer_lines(find_model("gemma4-e2b").hparams().as_dict()["layers"])
    said = "\n".join(lines)
    assert "keys and values of layer 13" in said and "keys and values of layer 14" in said and "ffn 12288" in said
    assert "12 local" in said and "3 global" in said and "rotated 0.25" in said and "scalar" not in said
    assert "0.5 to 1.25" in "\n".join(_layer_lines(tiny_gemma4().as_dict()["layers"]))
    assert inspect(["gemma4-e2"]) == 1 and "did you mean" in capsys.readouterr().err
    lines = _layer_lines(find_model("gemma4-26b-a4b").hparams().as_dict()["layers"])
    assert "n_experts          128" in "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- refusals
MIXTURE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("4", {"enable_moe_block": True, "num_experts": 0}, "num_experts 0 must be positive in a mixture"),
    "too many chosen": ("4", MIXTURE | {"top_k_experts": 9}, "top_k_experts 9 is more than the 8 experts"),
    "both branches": ("4", MIXTURE, "hidden_size_per_layer_input is 32, beside 8 experts: no model has both"),
    "other layer": ("4", {"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config names a layer '5', of 5"),
    "no layer": ("4", {"per_layer_config": {"x": {}}}, "per_layer_config names a layer 'x'"),
    "more by layer": (
        "4",
        {"per_layer_config": {"4": {"sliding_window": 3}}},
        "per_layer_config.4.sliding_window is not known",
    ),
    "not a table": ("4", {"per_layer_config": {"4": 3}}, "per_layer_config.4 must be an object"),
    "all share": ("4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers cannot be: 5 of 5 layers"),
    "negative": ("4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers cannot be"),
    "no source": ("4", {"num_kv_shared_layers": 3}, "no global layer before layer 2 has a cache"),
    "partial share": (
        "4",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "rotated 1.5 must be a share above 0",
    ),
    "nothing rotates": (
        "4",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.01}}},
        "rotates none of the 16 pairs",
    ),
    "yarn": (
        "4",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "'yarn' is not supported; known: default, prop",
    ),
    "old scaling": ("4", {"rope_scaling": {"factor": 2}}, "rope_scaling is not a field of Gemma 4"),
    "bidirectional": (
        "4",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention 'all' is not supported",
    ),
    "widths": (
        "4",
        {"intermediate_size": [64, 64]},
        "intermediate_size must be one whole number for each of the 5 layers",
    ),
    "no inputs": ("4", {"hidden_size_per_layer_input": None}, "is no part of this architecture"),
    "kinds": ("4", {"layer_types": ["full_attention"]}, "layer_is_global of 1 entries"),
    "window": ("4", {"sliding_window": None}, "window 0 must be positive: 3 layers are local"),
    "unscaled": ("3n", {"altup_correct_scale": False}, "altup_correct_scale false is not supported"),
    "sparsity list": (
        "3n",
        {"activation_sparsity_pattern": [0.5]},
        "activation_sparsity_pattern must be a list of one number",
    ),
    "sparsity": ("3n", {"activation_sparsity_pattern": [1.0] * 5}, "sparsity 1.0 must be a share from 0, below 1"),
    "streams": ("3n", {"altup_num_inputs": 0}, "n_streams 0 must be positive"),
    "active": ("3n", {"altup_active_idx": 4}, "altup_active 4 must be one of 4 streams"),
    "two streams": ("3n", {"altup_num_inputs": 2}, "but the hyper-parameters say"),
    "rank": (
        "3n",
        {"laurel_rank": 64},
        "laurel.linear_left.weight has shape [32, 64], but the hyper-parameters say [64, 64]",
    ),
    "capped": ("3n", {"attn_logit_softcapping": 50.0}, "Gemma 3n caps no attention scores"),
    "many layers": ("3n", {"num_hidden_layers": 10**9}, "is not believable: the file is damaged"),
    "inputs": ("3n", {"hidden_size_per_layer_input": 64}, "embed_tokens_per_layer.weight has shape [310, 160]"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_cannot_be_are_one_line(name: str, tmp_path: Path) -> None:
    kind, changes, words = CONFIGS[name]
    folder = write_hf(tmp_path / "hf", tiny_gemma3n() if kind == "3n" else tiny_gemma4())
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | changes))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


def _other_type(t: Tensor) -> Tensor:
    return Tensor.of(dequantise(t))


TENSORS: dict[str, tuple[str, str, Any, str]] = {
    "scalar is missing": ("4", "layers.2.layer_scalar", None, "the scalar of layer 2 (layers.2.layer_scalar; GGUF"),
    "two scalars": ("4", "layers.1.layer_scalar", np.ones(2, np.float32), "has 2 numbers, not one"),
    "scalar is nan": ("4", "layers.1.layer_scalar", np.full(1, np.nan, np.float32), "element 0 is nan"),
    "scalar is a matrix": ("4", "layers.1.layer_scalar", np.ones((1, 1), np.float32), "must be a small vector"),
    "part is missing": ("3n", "altup_projections.1.weight", None, "tensor altup_projections.1.weight is missing"),
    "part is other": ("3n", "altup_projections.1.weight", _other_type, "is stored as f32, but"),
    "part is small": ("3n", "altup_projections.2.weight", np.ones((32, 64), np.float32), "has shape [32, 64]"),
    "table is a vector": ("3n", "embed_tokens_per_layer.weight", np.ones(7, np.float32), "not [vocab, hidden]"),
    "more layers": ("4", "layers.7.mlp.up_proj.weight", np.ones((2, 2), np.float32), "no part of this architecture"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_cannot_be_are_one_line(name: str, tmp_path: Path) -> None:
    kind, which, how, words = TENSORS[name]
    hp = tiny_gemma3n() if kind == "3n" else tiny_gemma4()
    folder, found = write_hf(tmp_path / "hf", hp), weights(hp)
    if how is None:
        del found[which]
    else:
        found[which] = how(found[which]) if callable(how) else Tensor.of(how)
    write_safetensors(folder / "model.safetensors", {f"model.{n}": t for n, t in found.items()})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert words in str(error.value) and "\n" not in str(error.value)


METADATA: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "experts": ({"expert_count": 128}, (), "gemma4.expert_used_count is missing"),
    "value width": ({"attention.value_length": 64}, (), "value_length must equal attention.key_length 32"),
    "narrow value width": (
        {"attention.value_length_swa": 64},
        (),
        "value_length_swa must equal attention.key_length_swa 16",
    ),
    "kv heads": (
        {"attention.head_count_kv": [1, 2]},
        (),
        "head_count_kv must be one whole number for each of the 5 layers",
    ),
    "kv heads are text": ({"attention.head_count_kv": ["1"] * 5}, (), "head_count_kv must be one whole number"),
    "pattern": (
        {"attention.sliding_window_pattern": [True]},
        (),
        "sliding_window_pattern layer_is_global of 1 entries",
    ),
    "shared": ({"attention.shared_kv_layers": 9}, (), "shared_kv_layers cannot be: 9 of 5 layers"),
    "scalar": ({}, ("blk.0.layer_output_scale.weight",), "the scalar of layer 0"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_gemma4_that_cannot_be_is_one_line(name: str) -> None:
    changes, without, words = METADATA[name]
    hp = tiny_gemma4()
    values = {f"gemma4.{k}": v for k, v in {**family_of(hp).gguf_fields(hp), **changes}.items()}
    with pytest.raises(ValueError) as error:
        family_of(hp).hparams_from_gguf(Fields(values, HERE), Sheet(hp, without))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "divisors",
    [[1.0] * 3, [1e30] * 16, [1e30, *[1.0] * 15], [-1.0, *[1e30] * 15], [1.0, 2.0, *[1e30] * 14], [math.nan] * 16],
)
def test_ambiguous_divisors_are_refused(divisors: list[float]) -> None:
    hp = tiny_gemma4()
    look, values = Sheet(hp), {f"gemma4.{k}": v for k, v in family_of(hp).gguf_fields(hp).items()}
    look.made["rope_freqs.weight"] = np.array(divisors, np.float32)
    with pytest.raises(ValueError, match=r"rope_freqs.weight must have one divisor for each of the 16 pairs"):
        family_of(hp).hparams_from_gguf(Fields(values, HERE), look)
    look.made["rope_freqs.weight"] = np.array([4.0] * 8 + [1e30] * 8, np.float32)
    wide = family_of(hp).hparams_from_gguf(Fields(values, HERE), look).layers[2]
    assert (wide.rotated, wide.rope_factor) == (0.5, 4.0)
    del look.made["rope_freqs.weight"]
    fields = Fields(values, HERE)
    assert family_of(hp).hparams_from_gguf(fields, look).layers[2].rotated == 1.0
    assert "rope_freqs.weight is absent" in fields.notes[0]


def test_layers_that_cannot_be_are_refused() -> None:
    hp, layer = tiny_gemma4(), LayerParams(head_dim=16, n_heads=2, n_kv_heads=1, window=0, rope_theta=1e4, ffn=32)
    with pytest.raises(ValueError, match="kv_from 3 of layer 4 must be an earlier layer with a cache of its own"):
        replace(hp, layers=(*hp.layers[:4], replace(hp.layers[4], kv_from=3)))
    with pytest.raises(ValueError, match="kv_from 1 of layer 4: the two differ in window"):
        replace(hp, layers=(*hp.layers[:4], replace(hp.layers[4], kv_from=1)))
    with pytest.raises(ValueError, match="kv_from none of layer 4: layer 3 has no cache"):
        replace(hp, layers=(*hp.layers[:4], replace(hp.layers[4], kv_from=None)))
    with pytest.raises(ValueError, match=r"window \[8, 9\] must be one number"):
        replace(hp, layers=(replace(hp.layers[1], window=9), *hp.layers[1:]))
    with pytest.raises(ValueError, match="layer 4 reads the cache of layer 2, which is left out"):
        hp.only((0, 1, 3, 4))
    assert [x.kv_from for x in hp.only((1, 2, 3, 4)).layers] == [None, None, 0, 1]
    wrong = {
        "rotated": 0.0,
        "sparsity": 1.0,
        "scalar": math.inf,
        "kv_from": True,
        "n_experts": -1,
        "experts_used": 1,
        "expert_ffn": 32,
        "ffn": 33,
    }
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=field):
            replace(layer, **{field: value})
    assert replace(layer, sparsity=0.95).sparsity_scale == pytest.approx(1.6448536)


def test_there_is_one_registry() -> None:
    names = ["gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma-embedding", "gemma-embedding2"]
    assert [f.name for f in FAMILIES] == names and family_of(tiny()).hf_norm_offset == 1.0
    with pytest.raises(ValueError, match=f"no family is called 'gemma5'; known: {', '.join(names)}"):
        family_named("gemma5")
    assert len(PIECES) < tiny_gemma4().vocab
