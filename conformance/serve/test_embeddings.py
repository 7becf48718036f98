"""The endpoints of an embedding model, by the official client and as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import hybrid
from conformance.support.server import Running, running
from conformance.support.synthetic import tiny_embedding, write_hf
from hybrid.serve import main as serve
from hybrid.serve.settings import Settings

NAME = "tiny"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = write_hf(tmp_path_factory.mktemp("embedding"), tiny_embedding(dense=64), dtype="f32")
    with running(lambda: hybrid.load_embedder(folder, "cpu", precision="exact"), Settings(name=NAME)) as found:
        yield found


@pytest.fixture(scope="module")
def openai_client(embedding: Running) -> Iterator[openai.OpenAI]:
    plain = openai.DefaultHttpxClient(verify=False)  # reading every certificate takes longer than a request
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0, http_client=plain) as found:
        yield found


def model_of(server: Running) -> Any:
    return server.app.state.backend.model


def test_the_official_client(embedding: Running, openai_client: openai.OpenAI) -> None:
    """Whose default is base64."""
    model = model_of(embedding)
    texts = ["the abc", "in"]
    answer = openai_client.embeddings.create(model=NAME, input=texts)
    assert np.allclose([d.embedding for d in answer.data], model.embed(texts), atol=1e-6)
    assert [d.index for d in answer.data] == [0, 1] and answer.model == NAME
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(model.encode(t)) for t in texts)
    ids = [model.encode(t) for t in texts]
    for asked in (texts[0], ids[0], ids[:1]):
        found = openai_client.embeddings.create(model=NAME, input=asked, dimensions=5, encoding_format="float")
        assert np.allclose([d.embedding for d in found.data], model.embed(texts[:1], dimensions=5), atol=1e-6)
    for extra in ({"task": "query"}, {"prompt_name": "query"}):
        found = openai_client.embeddings.create(model=NAME, input="in", extra_body=extra)
        assert np.allclose(found.data[0].embedding, model.embed(["in"], task="query")[0], atol=1e-6)
    with pytest.raises(openai.NotFoundError, match="this server has one model, 'tiny'"):
        openai_client.embeddings.create(model="other", input="in")
    assert openai_client.models.retrieve(NAME).id == NAME


def test_long_texts_are_cut_where_they_may_be(embedding: Running) -> None:
    answer = embedding.post("/v1/embeddings", {"input": "the " * 300, "truncate": True}).json()
    wanted = model_of(embedding).embed(["the " * 300], truncate=True)[0]
    assert np.allclose(answer["data"][0]["embedding"], wanted, atol=1e-6) and answer["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": "in", "task": "x"}, "task", "knows no task 'x'; known: query, document"),
        ({"input": "in", "task": "query", "prompt_name": "document"}, "prompt_name", "two names of one field"),
        ({"input": [2, 5], "task": "query"}, "task", "before texts, and these are token ids"),
        ({"input": "in", "dimensions": 65}, "dimensions", "dimensions must be 1 to 64"),
        ({"input": [[5, 320]]}, None, "token id outside 0..319"),
        ({"input": "the " * 300}, None, "does not fit in the 256 of a pass: shorten or truncate it"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [5, "in"]}, "input[1]", "valid integer"),
        ({"input": {}}, "input", "Invalid value for 'input'"),
        ({"input": "in", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ],
)
def test_wrong_requests(embedding: Running, body: Any, param: str | None, message: str) -> None:
    answer = embedding.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == param


def test_rerank_orders_documents(embedding: Running) -> None:
    model, documents = model_of(embedding), ["in", "the abc", "abcd the"]
    answer = embedding.post(
        "/v1/rerank", {"query": "the", "documents": documents, "top_n": 2, "return_documents": True}
    )
    scores = model.embed(documents, task="document") @ model.embed(["the"], task="query")[0]
    found = answer.json()["results"]
    assert [r["index"] for r in found] == np.argsort(-scores)[:2].tolist()
    for result in found:
        assert result["relevance_score"] == pytest.approx(float(scores[result["index"]]), abs=1e-6)
        assert result["document"] == {"text": documents[result["index"]]}
    objects = [{"text": text} for text in documents]
    whole = embedding.post("/v1/rerank", {"query": "the", "documents": objects}).json()["results"]
    assert len(whole) == 3 and whole[:2] == [{k: v for k, v in r.items() if k != "document"} for r in found]
    wrong = embedding.post("/v1/rerank", {"query": "the", "documents": ["in", {"title": "in"}]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("documents[1]")


def test_ollamas_forms(embedding: Running) -> None:
    model = model_of(embedding)
    found = embedding.post("/api/embed", {"model": NAME, "input": ["the", "in"], "dimensions": 4}).json()
    assert np.allclose(found["embeddings"], model.embed(["the", "in"], dimensions=4), atol=1e-6)
    assert found["prompt_eval_count"] == len(model.encode("the") + model.encode("in")) and found["total_duration"] > 0
    long = "the " * 300
    (cut,) = embedding.post("/api/embed", {"input": long}).json()["embeddings"]
    assert np.allclose(cut, model.embed([long], truncate=True)[0], atol=1e-6)
    assert embedding.post("/api/embed", {"input": long, "truncate": False}).status_code == 400
    old = embedding.post(
        "/api/embeddings", {"model": f"{NAME}:latest", "prompt": "the", "options": {"num_gpu": 1}}
    ).json()
    assert np.allclose(old["embedding"], model.embed(["the"])[0], atol=1e-6)


def test_ollamas_client(embedding: Running) -> None:
    client = pytest.importorskip("ollama").Client(embedding.url)
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == f"{NAME}:latest" and client.show(NAME).capabilities == ["embedding"]
    found = client.embed(listed.model, ["the", "in"])
    assert np.allclose(found.embeddings, model_of(embedding).embed(["the", "in"]), atol=1e-6)


def test_each_kind_of_model_refuses_the_others_endpoints(embedding: Running, server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**chat, "max_tokens": 5}),
        ("/api/chat", chat),
        ("/api/generate", {"prompt": "Hi"}),
    ):
        answer = embedding.post(path, body)
        assert answer.status_code == 400 and "POST /v1/embeddings" in answer.text
    for path, body in (
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/embeddings", {"prompt": "Hi"}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "serve and name an embedding model" in answer.text


def test_options_of_models_that_write_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_hf(tmp_path, tiny_embedding(dense=64))
    for option in (["--draft", "lookup"], ["--kv", "f16"], ["--deterministic"], ["--gpu-memory", "1GiB"], ["--ray"]):
        assert serve([str(folder), *option]) == 2
        said = f"{option[0]} belongs to models that write text, and this one makes embeddings"
        assert said in capsys.readouterr().err


def test_ids_of_texts_and_figures(embedding: Running) -> None:
    ids = embedding.post("/tokenize", {"prompt": "the abc"}).json()["tokens"]
    assert ids == model_of(embedding).encode("the abc")
    assert embedding.post("/detokenize", {"tokens": ids}).json()["prompt"] == model_of(embedding).decode(ids)
    embedding.post("/v1/embeddings", {"input": "the abc"})
    text = embedding.http.get("/metrics").text
    assert 'hybrid_requests_total{endpoint="/v1/embeddings",outcome="ok"}' in text
