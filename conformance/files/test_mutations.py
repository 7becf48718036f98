"""Real files mutated thousands of times: each is refused in one line, or read exactly as the formats' own libraries
read it; never a crash, a hang or a silent difference. Fuzzing's findings are replayed (tools/fuzz.py)."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.files.mutations import binary, directories, gguf_fields, text, within
from conformance.files.seeds import kept, valid
from conformance.files.targets import REFUSALS, TARGETS, refused
from conformance.support.profile import LONG
from hybrid.checkpoint import Checkpoint
from hybrid.checkpoint.gguf_file import read_gguf
from hybrid.quant.codec import from_ggml, to_ggml

SECONDS = 2.0
OUTCOMES: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def counts() -> Iterator[None]:
    """Shown with -s, and checked: mutations that are all refused, or all loaded, would prove little."""
    yield
    print("\nmutations: " + ", ".join(f"{k} {n}" for k, n in sorted(OUTCOMES.items())))


def outcome(target: str, folder: Path, data: bytes) -> Any:
    """The loaded object; None where the target refuses."""
    try:
        with within(SECONDS):
            loaded = TARGETS[target](folder, data)
    except REFUSALS as error:
        refused(error)
        loaded = None
    OUTCOMES[f"{target} {'refused' if loaded is None else 'loaded'}"] += 1
    return loaded


def examples(count: int) -> Any:
    return settings(max_examples=count * (20 if LONG else 1))


def _strategy(target: str, folder: Path) -> st.SearchStrategy[bytes]:
    strategies = []
    for data in valid(target):
        path = folder / "whole"
        path.write_bytes(data)
        if target.startswith("gguf"):
            fields = gguf_fields(path)
            strategies.append(binary(data, fields, fields[-1][0] + 8))
        elif target == "directory":
            n, m = struct.unpack("<HH", data[:4])
            strategies.append(directories(data[4 : 4 + n], data[4 + n : 4 + n + m], data[4 + n + m :]))
        elif target == "tokenizer_model":
            strategies.append(binary(data, [], len(data)))
        else:
            strategies.append(text(data))
    return st.one_of(strategies)


COUNTS = {
    "gguf_header": 900 if LONG else 450,
    "gguf": 150,
    "directory": 700 if LONG else 350,
    "tokenizer_model": 200,
    "tokenizer_json": 200,
    "toml": 150,
}


@pytest.mark.slow
@pytest.mark.parametrize("target", list(COUNTS))
def test_mutated_files_are_refused_or_read_as_they_are(target: str, tmp_path: Path) -> None:
    @examples(COUNTS[target])
    @given(_strategy(target, tmp_path))
    def run(data: bytes) -> None:
        loaded = outcome(target, tmp_path, data)
        if loaded is not None and target == "gguf_header":
            _same_as_gguf(tmp_path / "m.gguf", loaded)
        if loaded is not None and target == "directory":
            _same_as_safetensors(tmp_path / "model.safetensors", loaded)

    run()
    assert OUTCOMES[f"{target} refused"] > 10 and OUTCOMES[f"{target} loaded"]


def _same_as_gguf(path: Path, checkpoint: Checkpoint) -> None:
    """Metadata, table and bytes as the gguf package reads them."""
    reader, part = gguf.GGUFReader(path), read_gguf(path)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert set(fields) == set(part.values)
    for key, field in fields.items():
        ours, theirs = part.values[key], _contents(field)
        assert repr(ours) == repr(theirs), (key, ours, theirs)
    tensors = {t.name: t for t in reader.tensors}
    assert set(tensors) == set(part.stored)
    for name, stored in part.stored.items():
        assert stored.shape == tuple(int(n) for n in tensors[name].shape[::-1])
        if name in checkpoint.names and not name.endswith("_norm.weight"):
            theirs = np.ascontiguousarray(tensors[name].data).view(np.uint8).reshape(-1)
            want = to_ggml(from_ggml(theirs, stored.dtype, stored.shape))
            np.testing.assert_array_equal(to_ggml(checkpoint.tensor(name)), want)


def _contents(field: Any) -> Any:
    """A field's value; texts as our reader keeps them."""
    string, kind = gguf.GGUFValueType.STRING, field.types[-1]
    texts = [str(bytes(field.parts[i]), "utf-8", "surrogateescape") for i in field.data] if kind == string else None
    if field.types[0] == gguf.GGUFValueType.ARRAY:
        return texts if texts is not None else [field.parts[i][0].item() for i in field.data]
    return texts[0] if texts is not None else field.parts[field.data[0]][0].item()


def _same_as_safetensors(path: Path, checkpoint: Checkpoint) -> None:
    """Names, shapes and bytes as the safetensors package reads them."""
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    for name in checkpoint.names:
        if name == "token_embd.weight":
            found = next(t for n, t in theirs.items() if n.endswith("embed_tokens.weight"))
            tensor = checkpoint.tensor(name)
            assert tuple(found["shape"]) == tensor.shape and found["dtype"] == tensor.dtype.upper()
            assert bytes(found["data"]) == tensor.array.tobytes()


@pytest.mark.parametrize("target", ["gguf", "gguf_header", "directory", "tokenizer_model", "tokenizer_json", "toml"])
def test_every_cut_of_a_file_is_refused(target: str, tmp_path: Path) -> None:
    """Truncation at any byte (in the long profile; every 97 bytes else): no prefix of a file is accepted as the file."""
    for data in valid(target) if LONG else valid(target)[:1]:
        step = 1 if LONG else 97
        for cut in range(0, len(data) - 40, step):
            loaded = outcome(target, tmp_path, data[:cut])
            assert loaded is None or target in ("tokenizer_model", "toml"), cut


@pytest.mark.parametrize("path", [p for t in TARGETS for p in kept(t)], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_findings_of_fuzzing_stay_fixed(path: Path, tmp_path: Path) -> None:
    outcome(path.parent.name, tmp_path, path.read_bytes())
