"""Embedding models: vectors of transformers and sentence-transformers, passes of many texts, commands, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybrid
from conformance.support import embeddings
from conformance.support.devices import BACKENDS, open_backend
from conformance.support.paths import DEMO
from conformance.support.synthetic import tiny, tiny_embedding, tiny_embedding2, write_hf
from hybrid.bench.__main__ import main as bench
from hybrid.checkpoint import CheckpointError, open_checkpoint
from hybrid.checkpoint.families import family_named
from hybrid.checkpoint.fields import Fields
from hybrid.checkpoint.random import random_checkpoint
from hybrid.checkpoint.sentence import prompts_of
from hybrid.convert import convert
from hybrid.core.errors import ContextExceeded
from hybrid.embed import main as embed
from hybrid.embedding import EmbeddingModel, normalised
from hybrid.engine.embedding import Embedder
from hybrid.generate import main as generate
from hybrid.inspect import main as inspect
from hybrid.prove import texts_of
from hybrid.proving import Text
from hybrid.schedule import main as schedule
from hybrid.spec.model import find_model

GOLDEN = json.loads(embeddings.FILE.read_text())
TEXTS = embeddings.texts()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: embeddings.folder_of(tmp_path_factory.mktemp(f), f) for f in embeddings.MODELS}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["gemma-embedding"]


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[EmbeddingModel]:
    with hybrid.load_embedder(folder, "cpu", precision="exact") as found:
        yield found


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("family", embeddings.MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_are_those_of_transformers(folders: dict[str, Path], backend: str, family: str) -> None:
    """Texts shorter and longer than the window, in one pass, and cut into several."""
    wanted, how = np.array(GOLDEN[family]), {"precision": "exact", "prove": False}
    with hybrid.load_embedder(folders[family], backend, **how) as model:
        found = model.embed(TEXTS)
        assert model.engine.passes == 1 and found.dtype == np.float32
        assert np.abs(found - wanted).max() < 2e-6
    with hybrid.load_embedder(folders[family], backend, ctx=128, chunk=128, slots=2, **how) as model:
        assert np.abs(model.embed(TEXTS) - wanted).max() < 2e-6
        assert model.engine.passes == 3  # at most two texts, and 128 rows


@pytest.mark.parametrize("family", embeddings.MODELS)
def test_a_gguf_file_has_the_same_vectors(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    file, small, wanted = tmp_path / "tiny.gguf", tmp_path / "small.gguf", np.array(GOLDEN[family])
    with open_checkpoint(folders[family]) as source:
        convert(source, file, "f32")
        convert(source, small, "q8_0")
        with pytest.raises(CheckpointError, match=r"written as GGUF only: name a \.gguf file"):
            convert(source, tmp_path / "folder", "f32", format="hf")
        with open_checkpoint(file) as made:
            assert replace(made.hparams, eps=1e-6) == source.hparams  # float32 in the file
            assert made.prompts == source.prompts and list(made.prompts) == ["query", "document"]
            assert not made.notes
    with hybrid.load_embedder(file, "cpu", precision="exact") as other:
        assert np.abs(other.embed(TEXTS) - wanted).max() < 2e-6
    for backend in BACKENDS:
        with hybrid.load_embedder(small, backend, prove=False) as other:
            assert cosines(other.embed(TEXTS), wanted).min() > 0.995  # the weights alone: 0.998


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
    with pytest.raises(ContextExceeded, match=r"does not fit in the 256 of a pass: shorten or truncate it$"):
        model.embed(["the", long])
    ids = model.encode(long, truncate=True)
    assert len(ids) == 256 and ids == model.encode(long)[:256]
    assert np.array_equal(model.embed([long], truncate=True), model.embed([ids]))
    assert len(model.engine._waiting) == 0


def test_texts_are_no_longer_than_a_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        hybrid.load_embedder(folder, "cpu", ctx=16) as small,
        pytest.raises(ContextExceeded, match=r"load the model with more \(ctx, up to 256\)"),
    ):
        small.embed(["the " * 30])
    random = ["--random", "embeddinggemma-2", "--layers", "1", "--vocab", "400", "--device", "cpu"]
    assert embed([*random, "--ctx", "8193", "a"]) == 1
    assert "ctx 8193: a text runs in one pass, which has at most 8192 rows" in capsys.readouterr().err
    assert inspect(["embeddinggemma-2", "--context", "262144"]) == 1
    assert "at most 8192 rows" in capsys.readouterr().err


def test_wrong_arguments(model: EmbeddingModel) -> None:
    for wrong, text in (
        ({"task": "querry"}, "knows no task 'querry'; did you mean 'query'"),
        ({"dimensions": 65}, "dimensions must be 1 to 64, not 65"),
        ({"dimensions": 0}, "dimensions must be 1 to 64, not 0"),
        ({"dimensions": 32.0}, r"dimensions must be 1 to 64, not 32\.0"),
    ):
        with pytest.raises(ValueError, match=text):
            model.embed(["the"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a list of texts"):
        model.embed("the")
    with pytest.raises(ValueError, match="takes texts, or lists of their ids"):
        model.embed([None])  # type: ignore[list-item]
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


def test_the_shown_plan_is_that_of_a_pass_of_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule(["show", "gemma-embedding", str(folder), "--rows", "200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]


def test_the_bench_measures_passes_of_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([str(folder), "--device", "cpu", "-p", "8,200", "-r", "1", "--json"]) == 0
    short, long = json.loads(capsys.readouterr().out)["results"]
    assert (short["n"], short["texts"], long["texts"]) == (8, 64, 2) and long["tokens_per_second"] > 0
    assert bench([str(folder), "--device", "cpu", "-p", "0"]) == 2
    assert "give -p lengths of texts" in capsys.readouterr().err
    assert bench([str(folder), "--device", "cpu", "-p", "8", "-b", "4", "--kv", "f16"]) == 2
    assert "--batch-size, --kv: of models that write text" in capsys.readouterr().err


def test_a_proof_compares_vectors_with_those_of_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared() -> Text:
        (text,) = texts_of([folder], lambda: open_backend("vulkan"), {})
        return text

    assert not compared().error
    run = Embedder._run

    def turned(self: Embedder, texts: Sequence[Sequence[int]]) -> np.ndarray:
        found = run(self, texts)
        return found[:, ::-1] if self.device.backend == "vulkan" else found

    monkeypatch.setattr(Embedder, "_run", turned)
    assert "vectors differ by" in compared().error


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


PUBLISHED2 = {  # of transformers' EmbeddingGemma2TextConfig
    "attention_bias": False,
    "embedding_dim": 768,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 512,
    "hidden_size_per_layer_input": 512,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    "max_position_embeddings": 262144,
    "model_type": "embedding_gemma2_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": 1} for i in (5, 11, 17, 23)},
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 512,
    "vocab_size": 262144,
}


class Sheet2(Sheet):
    """The same of EmbeddingGemma 2."""

    def __init__(self, rows: int | None = 768) -> None:
        super().__init__(rows)

    def has(self, name: str) -> bool:
        return name.endswith("attn_v.weight") or name.endswith("attn_k.weight")

    def values(self, name: str, finite: bool = True) -> np.ndarray:
        return np.ones(1, np.float32)


def test_a_second_generations_config_gives_the_sheets_hyper_parameters() -> None:
    hp, family = find_model("embeddinggemma-2").hparams(), family_named("gemma-embedding2")

    def read(config: dict[str, object], sheet: Sheet2 | None = None) -> tuple[object, list[str]]:
        fields = Fields(config, Path("config.json"))
        return family.hparams_from_hf(fields, sheet or Sheet2()), fields.notes  # type: ignore[arg-type]

    assert read(PUBLISHED2) == (hp, [])
    found, notes = read({"model_type": "embedding_gemma2", "text_config": {"vocab_size": 262144}})
    assert (
        found == hp and "omits hidden_size, intermediate_size," in notes[0] and "EmbeddingGemma 2's config" in notes[0]
    )
    written = {f"gemma-embedding2.{key}": value for key, value in family.gguf_fields(hp).items()}
    metadata = Fields(written, Path("model.gguf"))
    assert family.hparams_from_gguf(metadata, Sheet2()) == hp and not metadata.notes  # type: ignore[arg-type]
    for change, sheet, error in (
        ({"embedding_dim": 512}, None, "embedding_dim 512 is not the 768 rows of embedding_projection"),
        ({"hidden_size_per_layer_input": 0}, None, "hidden_size_per_layer_input 0 must be positive"),
        ({"attention_bias": True}, None, "attention_bias True is not supported"),
        ({}, Sheet2(None), r"embedding_projection\.weight \(GGUF: dense_2\.weight\) is missing"),
    ):
        with pytest.raises(CheckpointError, match=error):
            read(PUBLISHED2 | change, sheet)


@pytest.mark.parametrize("dialect", ["new", "multimodal"])
def test_both_layouts_of_a_second_generation(tmp_path: Path, dialect: str) -> None:
    path = write_hf(tmp_path, tiny_embedding2(), dialect)
    with open_checkpoint(path) as found:
        assert found.hparams == tiny_embedding2() and not found.notes and list(found.prompts) == ["query", "document"]
    (path / "modules.json").unlink()  # as transformers alone writes it
    (path / "config_sentence_transformers.json").unlink()
    with open_checkpoint(path) as found:
        assert found.hparams.dimensions == 96 and not found.prompts


def test_a_gguf_files_prompts_are_lists_of_equal_length() -> None:
    for texts in (["a"], "a", [1, 2]):
        with pytest.raises(CheckpointError, match=r"prompts\.tasks and prompts\.texts must be lists of as many texts"):
            prompts_of(Fields({"prompts.tasks": ["query", "document"], "prompts.texts": texts}, Path("m.gguf")))


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
        (
            "modules.json",
            lambda m: m[:3],
            "modules Transformer in '', Pooling in '1_Pooling', Dense in '2_Dense' are not supported",
        ),
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
        ("2_Dense/config.json", None, "2_Dense/config.json is missing: fetch the folder"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json is missing: fetch the folder"),
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
