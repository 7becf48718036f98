"""Invalid headers: impossible counts, lengths, offsets, shapes, types and numbers. One line names each."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.files.broken import head, refusal, string, tensor, value
from conformance.files.mutations import within
from conformance.files.seeds import gguf_file
from conformance.files.targets import refused
from conformance.support.synthetic import write_hf
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.files import OpenFile, read_json
from hybrid.checkpoint.finite import FIELDS, check_scales
from hybrid.checkpoint.gguf_header import read_header
from hybrid.core.dtypes import DTYPES, QUANTISED_TYPES

ARCH = value("general.architecture", 8, string("gemma3"))
BIG = 1 << 63
NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(5000))

HEADS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("not a GGUF",)),
    "other": (b"PK\x03\x04" + bytes(100), ("not a GGUF",)),
    "version-1": (head([], [], version=1), ("version 1",)),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ("big-endian",)),
    "values": (head([ARCH], [], n_values=1 << 60), ("metadata count", str(1 << 60))),
    "tensors": (head([ARCH], [], n_tensors=(1 << 64) - 1), ("tensor count",)),
    "one-value-more": (head([ARCH], [], n_values=2), ("key of 0 bytes",)),
    "key-length": (head([struct.pack("<Q", BIG)], []), ("key of",)),
    "key-utf8": (head([value(b"\xff\xfe", 4, bytes(4))], []), ("key", "UTF-8")),
    "key-twice": (head([ARCH, ARCH], []), ("general.architecture", "duplicated")),
    "value-type": (head([value("a", 99, bytes(8))], []), ("a has value type 99",)),
    "text-length": (head([value("a", 8, struct.pack("<Q", BIG))], []), ("cut short",)),
    "array-count": (head([value("a", 9, struct.pack("<IQ", 4, 1 << 62))], []), ("a has an array", str(1 << 62))),
    "array-texts": (head([value("a", 9, struct.pack("<IQ", 8, 1 << 40))], []), ("a has an array",)),
    "array-depth": (head([value("a", 9, NESTED)], []), ("a holds arrays nested",)),
    "array-of-unknown": (head([value("a", 9, struct.pack("<IQ", 77, 2))], []), ("value type 77",)),
    "bool": (head([value("a", 7, b"\x02")], []), ("a has the truth value 2",)),
    "alignment-0": (head([ARCH, value("general.alignment", 4, struct.pack("<I", 0))], []), ("general.alignment", "0")),
    "alignment-48": (
        head([ARCH, value("general.alignment", 4, struct.pack("<I", 48))], []),
        ("general.alignment", "48"),
    ),
    "alignment-huge": (
        head([ARCH, value("general.alignment", 4, struct.pack("<I", 1 << 31))], []),
        ("general.alignment",),
    ),
    "alignment-text": (head([ARCH, value("general.alignment", 8, string("32"))], []), ("general.alignment", "'32'")),
    "alignment-bool": (head([ARCH, value("general.alignment", 7, b"\x01")], []), ("general.alignment", "True")),
    "axes": (head([ARCH], [tensor("t", (2, 2), 0, axes=1 << 30)]), ("t has 1073741824 axes",)),
    "overflow": (head([ARCH], [tensor("t", (1 << 33, 1 << 33), 0)]), ("t has shape", "2**63")),
    "wraps-to-zero": (head([ARCH], [tensor("t", (1 << 32, 1 << 32), 0)]), ("t has shape", "2**63")),
    "outside": (head([ARCH], [tensor("t", (64, 64), 0)]), ("cut short", "tensor t")),
    "offset": (head([ARCH], [tensor("t", (2, 2), BIG)]), ("cut short", "tensor t")),
    "offset-odd": (head([ARCH], [tensor("t", (2, 2), 33)]), ("tensor t", "33", "alignment")),
    "overlap": (head([ARCH], [tensor("t", (8, 8), 0), tensor("u", (8, 8), 32)]), ("t and u overlap",)),
    "same-place": (head([ARCH], [tensor("t", (8, 8), 64), tensor("u", (8, 8), 64)]), ("overlap",)),
    "tensor-twice": (head([ARCH], [tensor("t", (2,), 0), tensor("t", (2,), 32)]), ("tensor t", "duplicated")),
    "tensor-name": (head([ARCH], [tensor("t" * 5000, (2,), 0)]), ("tensor name of 5000",)),
    "rows": (head([ARCH], [tensor("t", (33, 2), 0, kind=8)]), ("tensor t of q8_0", "32")),
    "no-architecture": (head([], []), ("general.architecture", "missing")),
    "architecture": (head([value("general.architecture", 8, string("llama"))], []), ("'llama'", "gemma3")),
    "architecture-type": (head([value("general.architecture", 4, bytes(4))], []), ("general.architecture", "text")),
    "line-break": (head([value("general.architecture", 8, string("a\nb\x1b[2J"))], []), (r"a\nb",)),
    "no-tensors": (head([ARCH], []), ("token_embd.weight", "missing")),
    "split-count": (head([ARCH, value("split.count", 2, struct.pack("<H", 65535))], []), ("split.count", "65535")),
}


def test_texts_of_an_array_are_read_whatever_they_hold(tmp_path: Path) -> None:
    """Many are read at once, up to one that is empty, long or has a NUL; some end in another buffer."""
    draw, path = np.random.default_rng(1), tmp_path / "m.gguf"
    odd = [
        b"",
        b"\0",
        bytes(7),
        b"a" + bytes(8),
        b"\xff\xe2\x96",
        "\u2581".encode(),
        b"x" * 255,
        b"y" * 256,
        b"z" * 600,
    ]
    for share in (0.0, 0.01, 0.5):
        texts = [odd[draw.integers(len(odd))] if draw.random() < share else b"%d" % i for i in range(70_000)]
        items = struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))
        path.write_bytes(head([value("a", 9, items), value("b", 4, struct.pack("<I", 7))], []))
        values, _ = read_header(OpenFile(path))
        assert values == {"a": [t.decode("utf-8", "surrogateescape") for t in texts], "b": 7}


@pytest.mark.parametrize("name", list(HEADS))
def test_lying_gguf_headers(name: str, tmp_path: Path) -> None:
    data, words = HEADS[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refusal(path, "m.gguf", *words)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 0, ("n_layers 0",)),
        ("block_count", 2**31, ("block_count", "damaged")),
        ("block_count", 1, ("blk.1.", "no part of this architecture")),
        ("block_count", 3, ("blk.2.", "missing")),
        ("embedding_length", 64, ("token_embd.weight", "[302, 32]")),
        ("embedding_length", 33, ("hidden 33",)),
        ("feed_forward_length", 64, ("ffn_gate", "[32, 32]")),
        ("attention.head_count", 0, ("n_heads 0",)),
        ("attention.head_count", 3, ("attn_q",)),
        ("attention.head_count_kv", 0, ("n_kv_heads 0",)),
        ("attention.key_length", 8, ("key_length 8",)),
        ("attention.value_length", 8, ("value_length",)),
        ("attention.layer_norm_rms_epsilon", math.nan, ("layer_norm_rms_epsilon", "nan")),
        ("attention.layer_norm_rms_epsilon", 0.0, ("eps",)),
        ("rope.freq_base", math.inf, ("rope.freq_base", "inf")),
        ("rope.freq_base", 0.0, ("rope_theta 0.0",)),
        ("rope.freq_base", 7, ()),
        ("rope.freq_base", "many", ("rope.freq_base", "'many'")),
        ("rope.scaling.type", "yarn", ("rope.scaling.type", "'yarn'")),
        ("rope.scaling.factor", -8.0, ("rope_factor",)),
        ("attention.sliding_window_pattern", 0, ("sliding_window_pattern",)),
        ("attention.sliding_window_pattern", [True], ("layer_is_global",)),
        ("attention.sliding_window_pattern", "x", ("sliding_window_pattern",)),
        ("final_logit_softcapping", -1.0, ("softcap",)),
        ("context_length", 0, ("context_length 0",)),
    ],
)
def test_wrong_gguf_fields_are_named(tmp_path: Path, key: str, value: Any, words: tuple[str, ...]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("q8_0", extra={f"gemma3.{key}": value}))
    if words:
        refusal(path, "m.gguf", *words)
    else:
        assert open_checkpoint(path).hparams.layers[1].rope_theta == 7


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.eos_token_id", 999999, ("eos_token_id", "999999", "302 rows")),
        ("tokenizer.ggml.bos_token_id", 4000000, ("bos",)),
        ("tokenizer.chat_template", 3, ("chat_template", "text")),
        ("general.sampling.temp", math.inf, ("general.sampling.temp",)),
        ("general.name", 1, ("general.name",)),
    ],
)
def test_wrong_gguf_tokens_are_named(tmp_path: Path, key: str, value: Any, words: tuple[str, ...]) -> None:
    """The writer refuses a key twice, so the tokenizer's own ids are renamed."""
    data = gguf_file("q8_0", extra={key.replace("eos", "eoS").replace("bos", "boS"): value})
    if "_token_id" in key:
        role = key[len("tokenizer.ggml.") :][:3].encode()
        data = data.replace(role + b"_token_id", b"zzz_token_id").replace(role[:2] + b"S_token_id", role + b"_token_id")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    refusal(path, "m.gguf", *words)


def test_unknown_types_are_named(tmp_path: Path) -> None:
    whole = gguf_file("q8_0", tokenizer=False)
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    for kind, name in ((10, "q2_k"), (24, "i8"), (4, "ggml type 4"), (12345, "ggml type 12345")):
        path = tmp_path / "m.gguf"
        path.write_bytes(whole[:at] + struct.pack("<I", kind) + whole[at + 4 :])
        refusal(path, "m.gguf", "blk.0.attn_q.weight", name)


# -------------------------------------------------------------------------------------------------- NaN and infinity
@pytest.mark.parametrize("kind", QUANTISED_TYPES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_are_named(tmp_path: Path, kind: str, bits: int) -> None:
    elements = DTYPES[kind].block
    size = DTYPES[kind].nbytes((elements,))
    for offset in FIELDS[kind]:
        raw = np.zeros(6 * size, np.uint8)
        check_scales(tmp_path, "t", kind, (2, 3 * elements), raw)
        raw[4 * size + offset : 4 * size + offset + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
        with pytest.raises(
            CheckpointError, match=rf"tensor t of {kind} .* row 1, elements {elements} to {2 * elements - 1}"
        ):
            check_scales(tmp_path, "t", kind, (2, 3 * elements), raw)


def test_places_of_scales_are_those_of_the_format() -> None:
    assert FIELDS["q6_k"] == {208: "scale"} and FIELDS["q4_k"] == FIELDS["q5_1"] == {0: "scale", 2: "minimum"}
    assert FIELDS["q5_0"] == FIELDS["q8_0"] == {0: "scale"} and set(FIELDS) == set(QUANTISED_TYPES)


def test_a_file_with_a_bad_scale_or_norm_opens_but_its_tensor_does_not(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = bytearray(gguf_file("q8_0"))
    path.write_bytes(whole)
    c = open_checkpoint(path)
    where = {name: c.entries[name].load.__self__.offset for name in c.names if not name.endswith("_norm.weight")}  # type: ignore[attr-defined]
    at = where["blk.1.ffn_up.weight"] + 34 * 5
    whole[at : at + 2] = b"\x00\x7e"
    path.write_bytes(whole)
    c = open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight of q8_0 .* row 5, elements 0 to 31, is nan"
    ):
        c.tensor("blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match="is nan"):
        c.rows("blk.1.ffn_up.weight", 4, 8)
    with pytest.raises(CheckpointError, match="is nan"):
        hybrid.load(path, device="cpu", ctx=16)
    folder = write_hf(tmp_path / "hf", dtype="f32")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    info = json.loads(data[8 : 8 + n])["model.norm.weight"]
    begin = 8 + n + info["data_offsets"][0] + 4 * 7
    data[begin : begin + 4] = struct.pack("<f", math.inf)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is damaged: element 7 is inf"):
        open_checkpoint(folder).tensor("output_norm.weight")


# --------------------------------------------------------------------------------------------------------- safetensors
def _st(header: Any, body: bytes = bytes(64), size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def _info(shape: Any = (4, 4), begin: Any = 0, end: Any = 64, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut short"),
        (_st({"t": _info()}, size=1 << 62), "not a safetensors"),
        (_st({"t": _info()})[:30], "cut short"),
        (_st(b"\xff\xfe{}"), "malformed"),
        (_st(b"[" * 200000), "nested too deeply"),
        (_st(b'{"a":' * 100000), "nested too deeply"),
        (_st(b'{"a":' + b"9" * 20000 + b"}"), "malformed"),
        (_st(b'{"t": 1, "t": 2}'), "'t' is duplicated"),
        (_st(b'{"t": {"dtype": "F32", "dtype": "F16"}}'), "'dtype' is duplicated"),
        (_st([1]), "object"),
        (_st({"t": 3}), "tensor t is no object"),
        (_st({"t": {}}), "tensor t needs dtype"),
        (_st({"t": _info(dtype=3)}), "tensor t needs dtype"),
        (_st({"t": _info(shape=[4, -4])}), "tensor t"),
        (_st({"t": _info(shape=[4, 4.0])}), "tensor t"),
        (_st({"t": _info(shape=[True, 16])}), "tensor t"),
        (_st({"t": _info(shape="44")}), "tensor t"),
        (_st({"t": _info(shape=[1 << 32, 1 << 32, 0])}), r"2\*\*63"),
        (_st({"t": _info(shape=[1 << 70])}), "tensor t"),
        (_st({"t": _info(begin=64, end=0)}), "tensor t"),
        (_st({"t": _info(end=128)}), "tensor t ends at byte"),
        (_st({"t": _info(end=1 << 62)}), "tensor t ends at byte"),
        (_st({"t": _info(end=60)}), "tensor t has 60 bytes"),
        (_st({"t": _info(), "u": _info()}), "overlap"),
        (_st({"t": _info(), "u": _info(begin=72, end=136)}, bytes(136)), "hole"),
        (_st({"t": _info()}, bytes(80)), "16 bytes after tensor t"),
        (_st({"__metadata__": 3, "t": _info()}), "__metadata__"),
        (_st({"__metadata__": {"format": 0}, "t": _info()}), "__metadata__"),
        (_st({"t": _info(dtype="F8_E4M3")}), "64 bytes for shape"),
        (_st({"t": _info(dtype="F8_E5M2")}), "embed_tokens.weight is missing"),
    ],
)
def test_lying_safetensors_headers(tmp_path: Path, data: bytes, words: str) -> None:
    folder = write_hf(tmp_path)
    (folder / "model.safetensors").write_bytes(data)
    with within(2.0), pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(folder)
    refused(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{",
        b"[" * 100000,
        b'{"a":' * 100000,
        b'{"model_type": "gemma3_text", "model_type": "gemma3"}',
        b'{"x": ' + b"1" * 100000 + b"}",
        b'{"model_type": 3}',
        b'{"model_type": "\\ud800"}',
        b'{"model_type": "gemma3", "text_config": 3}',
        b'{"model_type": "gemma3_text", "hidden_size": 1e400}',
        b'{"model_type": "gemma3_text", "hidden_size": NaN}',
        b'{"model_type": "gemma3_text", "num_hidden_layers": 1' + b"0" * 4000 + b"}",
        b'{"model_type": "gemma3_text", "num_hidden_layers": 1000000000}',
        b'{"model_type": "gemma3_text", "layer_types": [[], {}]}',
        b'{"model_type": "gemma3_text", "layer_types": {}}',
        b'{"model_type": "gemma3_text", "sliding_window_pattern": 0}',
        b'{"model_type": "gemma3_text", "_sliding_window_pattern": "6"}',
        b'{"model_type": "gemma3_text", "rope_scaling": []}',
        b'{"model_type": "gemma3_text", "tie_word_embeddings": "no"}',
    ],
)
def test_config_bombs_and_lies(tmp_path: Path, data: bytes) -> None:
    folder = write_hf(tmp_path)
    (folder / "config.json").write_bytes(data)
    assert "config.json" in refusal(folder) or "layer" in refusal(folder)


def test_side_files_are_read_with_the_same_care(tmp_path: Path) -> None:
    for name, data, words in (
        ("generation_config.json", b'{"eos_token_id": [1, 99999]}', ("generation_config.json", "99999")),
        ("generation_config.json", b'{"temperature": "hot"}', ("temperature",)),
        ("generation_config.json", b'{"eos_token_id": "x"}', ("eos_token_id", "x")),
        ("tokenizer_config.json", b'{"chat_template": 3}', ("tokenizer_config.json", "chat_template")),
        ("tokenizer_config.json", b"[" * 100000, ("tokenizer_config.json", "deeply")),
        ("chat_template.jinja", b"\xff\xfe", ("chat_template.jinja", "UTF-8")),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', ("weight_map",)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "..", "b": 3}}', ("weight_map",)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "x\\u0000.safetensors"}}', ("x",)),
        ("tokenizer.model", b"", ("tokenizer.model",)),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", ("tokenizer.model",)),
    ):
        folder = write_hf(tmp_path / f"{name}-{abs(hash(data))}")
        (folder / name).write_bytes(data)
        refusal(folder, *words)
    big = tmp_path / "big.json"
    with open(big, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointError, match="not believable"):
        read_json(big)
