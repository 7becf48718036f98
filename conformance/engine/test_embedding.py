"""Embedding models: vectors of transformers and sentence-transformers, passes of many texts, commands, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support.devices import BACKENDS
from conformance.support.paths import DATA, DEMO
from conformance.support.synthetic import tiny, tiny_embedding, write_hf
from hybrid.bench.__main__ import main as bench
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.families import family_named
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.random import random_checkpoint
from hybrid.convert import convert
from hybrid.core.errors import ContextExceeded
from hybrid.embed import main as embed
from hybrid.embedding import EmbeddingModel, normalised
from hybrid.generate import main as generate
from hybrid.spec.model import find_model

GOLDEN = json.loads((DATA / "embedding" / "golden.json").read_text())
TEXTS: list[list[int]] = GOLDEN["texts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("embedding"), tiny_embedding(), dtype="f32", seed=11)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[EmbeddingModel]:
    with hybrid.load_embedder(folder, "cpu", precision="exact") as found:
        yield found


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_those_of_transformers(folder: Path, backend: str) -> None:
    """Texts shorter and longer than the window, in one pass, and cut into several."""
    wanted = np.array(GOLDEN["vectors"])
    with hybrid.load_embedder(folder, backend, precision="exact", prove=False) as model:
        found = model.embed(TEXTS)
        assert model.engine.passes == 1 and found.dtype == np.float32
        assert np.abs(found - wanted).max() < 2e-6
    with hybrid.load_embedder(folder, backend, precision="exact", ctx=128, chunk=128, slots=2, prove=False) as model:
        assert np.abs(model.embed(TEXTS) - wanted).max() < 2e-6
        assert model.engine.passes == 3  # at most two texts, and 128 rows


def test_a_gguf_file_has_the_same_vectors(folder: Path, model: EmbeddingModel, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    with open_checkpoint(folder) as source:
        convert(source, file, "f32")
        convert(source, small := tmp_path / "small.gguf", "q8_0")
        with pytest.raises(CheckpointError, match=r"written as GGUF only: name a \.gguf file"):
            convert(source, tmp_path / "folder", "f32", format="hf")
    with open_checkpoint(file) as made:
        assert replace(made.hparams, eps=1e-6) == model.hparams  # float32 in the file
        assert made.prompts["query"] == "task: search result | query: "
    with hybrid.load_embedder(file, "cpu", precision="exact") as other:
        assert np.allclose(other.embed(TEXTS), model.embed(TEXTS), atol=1e-6)
    with hybrid.load_embedder(small, "cpu") as other:
        assert cosines(other.embed(TEXTS), model.embed(TEXTS)).min() > 0.999


def test_texts_tasks_and_dimensions(model: EmbeddingModel) -> None:
    assert model.tasks == ("query", "document") and model.dimensions == 64
    (whole,) = model.embed(["the abc"], task="query")
    assert np.array_equal(whole, model.embed([model.encode("task: search result | query: the abc")])[0])
    (short,) = model.embed(["the abc"], task="query", dimensions=5)
    assert np.allclose(short, whole[:5] / np.linalg.norm(whole[:5])) and abs(np.linalg.norm(whole) - 1) < 1e-6
    assert model.embed([]).shape == (0, 64)
    assert np.array_equal(normalised(np.zeros((1, 3), np.float32)), np.zeros((1, 3)))


def test_texts_that_are_too_long(model: EmbeddingModel) -> None:
    long = "the " * 300
    with pytest.raises(ContextExceeded, match="does not fit in 256, the most of this model"):
        model.embed(["the", long])
    ids = model.encode(long, truncate=True)
    assert len(ids) == 256 and ids == model.encode(long)[:256]
    assert np.array_equal(model.embed([long], truncate=True), model.embed([ids]))
    assert len(model.engine._waiting) == 0


def test_wrong_arguments(model: EmbeddingModel) -> None:
    for wrong, text in (
        ({"task": "querry"}, "knows no task 'querry'; did you mean 'query'"),
        ({"dimensions": 65}, "dimensions must be 1 to 64, not 65"),
        ({"dimensions": 0}, "dimensions must be 1 to 64, not 0"),
    ):
        with pytest.raises(ValueError, match=text):
            model.embed(["the"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a list of texts"):
        model.embed("the")
    with pytest.raises(ValueError, match=r"token id outside 0\.\.319"):
        model.embed([[5, 320]])
    with pytest.raises(ValueError, match="has no token"):
        model.embed([[]])


def test_texts_of_several_threads_share_passes(folder: Path) -> None:
    with hybrid.load_embedder(folder, "cpu", precision="exact") as model:
        wanted, before = model.embed(TEXTS), model.engine.passes
        found: dict[int, np.ndarray] = {}

        def one(i: int) -> None:
            found[i] = model.embed([TEXTS[i]])[0]

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(TEXTS))]
        with model.engine._passing:  # a pass that runs meanwhile
            for thread in threads:
                thread.start()
            while len(model.engine._waiting) < len(TEXTS):
                pass
        for thread in threads:
            thread.join(60)
        assert np.allclose(np.stack([found[i] for i in range(len(TEXTS))]), wanted, atol=1e-6)
        assert model.engine.passes == before + 1


def test_an_error_of_a_pass_is_that_of_its_texts_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hybrid.load_embedder(folder, "cpu", precision="exact") as model:
        with monkeypatch.context() as broken:
            broken.setattr(model.engine.device, "read", lambda *a: (_ for _ in ()).throw(RuntimeError("lost")))
            with pytest.raises(RuntimeError, match="lost"):
                model.embed(TEXTS)
        assert model.embed(TEXTS[:1]).shape == (1, 64)
        model.engine._run = lambda texts: np.full((len(texts), 64), np.nan, np.float32)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="is NaN or infinite"):
            model.embed(TEXTS[:1])
    with pytest.raises(ValueError, match="closed"):
        model.embed(TEXTS)


def test_models_of_one_kind_are_refused_where_the_other_is_needed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate([str(folder), "--prompt", "the", "--device", "cpu"]) == 1
    assert "is an embedding model, which writes no text: python -m hybrid.embed" in capsys.readouterr().err
    with pytest.raises(ValueError, match="makes no embeddings: load an embedding model"):
        hybrid.load_embedder(DEMO, "cpu")


def test_the_command(folder: Path, model: EmbeddingModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = model.embed(["the abc", "in"], "document", 8)
    asked = [str(folder), "--device", "cpu", "--precision", "exact", "--task", "document", "--dimensions", "8"]
    assert embed([*asked, "the abc", "in", "--json"]) == 0
    out = capsys.readouterr().out
    assert np.allclose(json.loads(out)["embeddings"], wanted, atol=1e-6)
    (tmp_path / "texts.txt").write_text("the abc\nin\n")
    assert embed([*asked, "--file", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "v.npy")]) == 0
    assert np.allclose(np.load(tmp_path / "v.npy"), wanted, atol=1e-6)
    assert embed([*asked, "in"]) == 0
    said = capsys.readouterr()
    assert len(said.out.split()) == 8 and "1 texts of" in said.err
    for wrong, text in (
        (["in", "--file", "x"], "TEXT or --file"),
        (["in", "--json", "--output", str(tmp_path / "w.npy")], "--json or --output"),
    ):
        assert embed([*asked, *wrong]) == 2 and text in capsys.readouterr().err


def test_the_bench_measures_passes_of_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([str(folder), "--device", "cpu", "-p", "8,200", "-r", "1", "--json"]) == 0
    short, long = json.loads(capsys.readouterr().out)["results"]
    assert (short["n"], short["texts"], long["texts"]) == (8, 64, 2) and long["tokens_per_second"] > 0
    assert bench([str(folder), "--device", "cpu", "-p", "0"]) == 2
    assert "give -p lengths of texts" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ files
PUBLISHED = {
    "attention.head_count": 3,
    "attention.head_count_kv": 1,
    "attention.key_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 512,
    "attention.value_length": 256,
    "block_count": 24,
    "context_length": 2048,
    "dense_2_feat_in": 768,
    "dense_2_feat_out": 3072,
    "dense_3_feat_in": 3072,
    "dense_3_feat_out": 768,
    "embedding_length": 768,
    "feed_forward_length": 1152,
    "pooling_type": 1,
    "rope.freq_base": 1e6,
}


class Sheet:
    """A stand-in for the tensors of a file of the published size."""

    path = Path("model.gguf")

    def __init__(self, dense: int | None = 3072) -> None:
        self._dense = dense

    def rows(self, name: str) -> int:
        return 262144

    def height(self, name: str) -> int | None:
        return self._dense


def test_published_metadata_gives_the_sheets_hyper_parameters() -> None:
    hp, family = find_model("embeddinggemma-300m").hparams(), family_named("gemma-embedding")

    def metadata(**changes: object) -> Fields:
        values = {f"gemma-embedding.{key}": value for key, value in (PUBLISHED | changes).items()}
        return Fields(values, Path("model.gguf"))

    assert family.hparams_from_gguf(metadata(), Sheet()) == hp  # type: ignore[arg-type]
    written = {f"gemma-embedding.{key}": value for key, value in family.gguf_fields(hp).items()}
    assert family.hparams_from_gguf(Fields(written, Path("model.gguf")), Sheet()) == hp  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="pooling_type 2 is not supported; known: 1"):
        family.hparams_from_gguf(metadata(pooling_type=2), Sheet())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"dense_2\.weight is missing.*--sentence-transformers-dense-modules"):
        family.hparams_from_gguf(metadata(), Sheet(None))  # type: ignore[arg-type]
    with random_checkpoint("embeddinggemma-300m", layers=1, vocab=64) as made:
        assert len(made.prompts) == 14 and made.hparams.window == 257


@pytest.mark.parametrize("dialect", ["old", "new"])
def test_both_dialects_of_a_config(tmp_path: Path, dialect: str) -> None:
    with open_checkpoint(write_hf(tmp_path, tiny_embedding(dense=32), dialect)) as found:
        assert found.hparams == tiny_embedding(dense=32) and not found.notes


def test_without_the_flag_it_is_a_gemma3(tmp_path: Path) -> None:
    with open_checkpoint(write_hf(tmp_path, tiny())) as found:
        assert found.hparams.family == "gemma3" and not found.prompts


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("modules.json", lambda m: m[:3], "modules Transformer, Pooling, Dense are not supported"),
        ("modules.json", lambda m: {"a": 1}, "modules no list are not supported"),
        (
            "1_Pooling/config.json",
            lambda c: {"pooling_mode_cls_token": True},
            "pooling_mode.*is not supported; known: mean",
        ),
        ("1_Pooling/config.json", lambda c: {"pooling_mode": "max"}, "'max' is not supported; known: mean"),
        ("1_Pooling/config.json", lambda c: c | {"include_prompt": False}, "include_prompt must be true"),
        ("2_Dense/config.json", lambda c: c | {"bias": True}, "bias must be false"),
        ("3_Dense/config.json", lambda c: c | {"activation_function": "torch.nn.Tanh"}, "Tanh is not supported"),
        ("2_Dense/model.safetensors", None, "2_Dense/model.safetensors"),
        ("modules.json", None, "modules.json is missing: fetch the folder with all of its parts"),
    ],
)
def test_folders_that_are_not_what_is_computed(tmp_path: Path, file: str, change, error: str) -> None:
    path = write_hf(tmp_path, tiny_embedding(dense=32)) / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=error):
        open_checkpoint(tmp_path)
