"""Files with unusual fields: these are reported, or refused where results would be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conformance.support.gguf_files import add_tokenizer, finish, sparse
from conformance.support.synthetic import tiny, weights, write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.decoder import hf_name
from hybrid.checkpoint.families import tensors
from hybrid.inspect import main as inspect
from hybrid.quant.codec import dequantise


def write_gguf(path: Path, fields: dict[str, Any], window: bool = True, norms: str = "F32") -> Path:
    """A model with further fields of gemma3, and all norms of a type."""
    hp = tiny()
    w = sparse(path, hp, window)
    add_tokenizer(w)
    for key, value in fields.items():
        {float: w.add_float32, int: w.add_uint32, list: w.add_array}[type(value)](f"gemma3.{key}", value)
    kind = gguf.GGMLQuantizationType[norms]
    for name, shape in tensors(hp).items():
        values = dequantise(weights(hp, "f32")[hf_name(name)], np.float32)
        if len(shape) == 1 and norms != "F32" and shape[0] % 32 == 0:
            w.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, values)
    finish(w)
    return path


def changed(folder: Path, dialect: str, outer: bool = False, **changes: Any) -> Path:
    """A Hugging Face folder whose config.json has other fields (`outer`: outside text_config); None removes one."""
    write_hf(folder, dialect=dialect)
    config = json.loads((folder / "config.json").read_text())
    inner = config if outer else config.get("text_config", config)
    for key, value in changes.items():
        inner[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DIALECTS = ("new", "old", "multimodal")


def test_a_gguf_file_without_a_window_is_refused_and_zero_is_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: gemma3\.attention\.sliding_window is missing.*write 0"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, window=False))
    zero = {"attention.sliding_window": 0}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", zero, window=False)) as c:
        assert all(c.hparams.layer_is_global)
    pattern = {"attention.sliding_window_pattern": [True, True, False]}
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern names local layers, but"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", zero | pattern, window=False))


def test_quantised_norms_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"attention.layer_norm_rms_epsilon": 1e-6}, norms="Q4_0")
    with open_checkpoint(path) as c:
        (note,) = c.notes
        assert note.startswith("blk.0.attn_norm.weight and 12 more norms are stored as q4_0: ")
    assert inspect([str(path)]) == 0 and note in capsys.readouterr().out
    with open_checkpoint(write_gguf(tmp_path / "f.gguf", {"attention.layer_norm_rms_epsilon": 1e-6}, norms="F16")) as c:
        assert c.notes == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_capped_attention_scores_are_refused(tmp_path: Path, dialect: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: .*attn_logit_softcapping 50.0 is not supported"):
        open_checkpoint(changed(tmp_path, dialect, attn_logit_softcapping=50.0))
    with pytest.raises(CheckpointError, match=r"gemma3\.attn_logit_softcapping 50.0 is not supported"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", {"attn_logit_softcapping": 50.0}))
    for none in (None, 0.0):
        open_checkpoint(changed(tmp_path, dialect, attn_logit_softcapping=none)).close()


@pytest.mark.parametrize(
    ("dialect", "outer"), [("new", False), ("old", False), ("multimodal", False), ("multimodal", True)]
)
def test_a_quantization_config_is_reported(tmp_path: Path, dialect: str, outer: bool) -> None:
    method = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with open_checkpoint(changed(tmp_path, dialect, outer, **method)) as c:
        assert sum("quantization_config (gptq): it is left out" in n for n in c.notes) == 1
    packed = weights(tiny())
    folder = write_hf(tmp_path / "packed", extra={"model.layers.0.mlp.up_proj.qweight": packed["norm.weight"]})
    config = json.loads((folder / "config.json").read_text()) | method
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"qweight .*quantization_config.*take the original checkpoint"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("dialect", "outer"), [("new", False), ("old", False), ("multimodal", False), ("multimodal", True)]
)
def test_a_vocab_size_that_contradicts_the_embedding_is_reported(tmp_path: Path, dialect: str, outer: bool) -> None:
    with open_checkpoint(changed(tmp_path, dialect, outer, vocab_size=4000)) as c:
        assert c.hparams.vocab == 320 and sum("vocab_size 4000: the embedding has 320 rows" in n for n in c.notes) == 1
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", {"vocab_size": 4000})) as c:
        assert any("vocab_size is 4000" in n for n in c.notes)


FLAT = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
BY_LAYER = {"full_attention": FLAT, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}


@pytest.mark.parametrize("parameters", [FLAT, BY_LAYER])
def test_two_rope_scalings_must_say_the_same(tmp_path: Path, parameters: dict[str, Any]) -> None:
    for scaling, words in (
        ({"rope_type": "yarn", "factor": 8.0}, "rope_scaling.rope_type 'yarn' is not supported"),
        ({"type": "yarn", "factor": 8.0}, "rope_scaling.rope_type 'yarn' is not supported"),
        ({"rope_type": "linear", "factor": 4.0}, "rope_scaling scales by 4 and rope_parameters by 8"),
        ({"rope_type": "default"}, "rope_scaling scales by 1 and rope_parameters by 8"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(changed(tmp_path, "new", rope_parameters=parameters, rope_scaling=scaling))
    for same in ({"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8}, None):
        with open_checkpoint(changed(tmp_path, "new", rope_parameters=parameters, rope_scaling=same)) as c:
            assert [x.rope_factor for x in c.hparams.layers if not x.window] == [8.0]
