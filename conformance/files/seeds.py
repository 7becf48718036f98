"""Small valid files of every readable format: seeds of mutations and fuzzing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from conformance.files.targets import pack_directory
from conformance.support.gguf_files import add_tokenizer, finish
from conformance.support.paths import DATA
from conformance.support.synthetic import PIECES, config, sentencepiece_model, tiny, weights
from hybrid.checkpoint.families import tensors
from hybrid.checkpoint.gemma3 import gguf_fields
from hybrid.core.hparams import HParams
from hybrid.core.places import ROOT
from hybrid.text.tokenizer import CONTROL, USER_DEFINED

SEEDS = DATA / "seeds"
"""Minimal files kept from fuzzing: SEEDS/TARGET/NAME."""


def small() -> HParams:
    """The smallest model that a file can hold."""
    return tiny(
        n_layers=2, hidden=32, ffn=32, n_heads=2, n_kv_heads=1, vocab=len(PIECES), softcap=30.0, rope_factor=8.0
    )


def gguf_file(
    kind: str = "q8_0", tokenizer: bool = True, extra: Mapping[str, Any] | None = None, hp: HParams | None = None
) -> bytes:
    """A whole GGUF file whose matrices have the type `kind`; `extra` adds keys after those of the architecture."""
    hp = hp or small()
    rng = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        w = gguf.GGUFWriter(path, "gemma3")
        fields = {f"gemma3.{k}": v for k, v in gguf_fields(hp).items()} | dict(extra or {})
        for key, value in fields.items():
            add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
            getattr(w, add[type(value)])(key, value)
        if tokenizer:
            add_tokenizer(w)
            w.add_unk_token_id(3)
        ggml = gguf.GGMLQuantizationType[kind.upper()]
        for name, shape in tensors(hp).items():
            values = rng.normal(0, 0.1, shape).astype(np.float32)
            if len(shape) == 1:
                w.add_tensor(name, values + 1)
            else:
                w.add_tensor(name, gguf.quants.quantize(values, ggml), raw_dtype=ggml)
        finish(w)
        return path.read_bytes()


def directory(dialect: str = "new", prefix: str = "model.", dtype: str = "bf16") -> bytes:
    """config.json and model.safetensors in the form of conformance.files.targets.directory."""
    hp = tiny(n_layers=1, hidden=32, ffn=32, n_heads=2, n_kv_heads=1, vocab=8)
    header, body, at = {}, b"", 0
    for name, t in weights(hp, dtype).items():
        header[prefix + name] = {"dtype": dtype.upper(), "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        body += t.array.tobytes()
        at += t.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return pack_directory(json.dumps(config(hp, dialect)).encode(), text, body)


def tokenizer_json() -> bytes:
    """The vocabulary of conformance.support.synthetic as a fast tokenizer."""
    ids = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
    pairs = sorted(
        (-score, f"{p[:k]} {p[k:]}")
        for p, score, kind in PIECES
        if kind == 1 and len(p) > 1
        for k in range(1, len(p))
        if p[:k] in ids and p[k:] in ids
    )
    added = [
        {
            "id": i,
            "content": p,
            "special": kind == CONTROL,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i, (p, _, kind) in enumerate(PIECES)
        if kind in (CONTROL, USER_DEFINED)
    ]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": space,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {
                "type": "BPE",
                "byte_fallback": True,
                "unk_token": "<unk>",
                "fuse_unk": True,
                "vocab": ids,
                "merges": [pair for _, pair in pairs],
            },
        }
    ).encode()


def valid(target: str) -> list[bytes]:
    """Files that the target loads."""
    if target == "gguf":
        keys = {"split.count": 1, "gemma3.attention.scale": 0.25, "general.alignment": 32}
        pattern = {"gemma3.attention.sliding_window_pattern": [True, False]}
        bools = {"general.tags": ["a", "b"], "tokenizer.ggml.add_bos_token": True, **pattern}
        return [gguf_file("q8_0", extra=bools), gguf_file("q4_0", extra=keys), gguf_file("bf16")]
    if target == "gguf_header":
        hp = tiny(n_layers=1, hidden=32, ffn=32, n_heads=2, n_kv_heads=1, vocab=8)
        few = {
            "general.alignment": 64,
            "general.tags": ["a", "b"],
            "gemma3.flags": [True, False],
            "gemma3.levels": [1, 2, 3],
        }
        return [gguf_file("q4_0", tokenizer=False, hp=hp), gguf_file("f32", tokenizer=False, extra=few, hp=hp)]
    if target == "directory":
        kinds = (
            ("new", "model.", "bf16"),
            ("old", "language_model.model.", "f32"),
            ("multimodal", "model.language_model.", "f16"),
        )
        return [directory(*kind) for kind in kinds]
    if target == "tokenizer_model":
        return [sentencepiece_model(PIECES)]
    if target == "tokenizer_json":
        return [tokenizer_json()]
    files = ("schedules/gemma3", "schedules/gemma3-hybrid", "ops/linear", "ops/sample")
    return [(ROOT / f"specs/{f}.toml").read_bytes() for f in files]


def kept(target: str) -> list[Path]:
    return sorted((SEEDS / target).glob("*"))
