"""Several models in one server: listed, loaded when a request names one, put away for another when none uses it."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running, until
from conformance.support.synthetic import tiny_embedding, write_hf
from hybrid.checkpoint import open_checkpoint
from hybrid.core.errors import DeviceLost
from hybrid.engine.loading import HEADROOM
from hybrid.ready import has_room
from hybrid.serve import main
from hybrid.serve.models import Models, Several, Source

FILES = {"demo-gemma3": DEMO, "demo-gemma3-draft": DEMO.with_name("demo-gemma3-draft-q8_0.gguf")}
ONE, TWO = FILES
HOW: dict[str, Any] = {"device": "cpu", "slots": 4, "ctx": 128, "precision": "exact"}
ASKED = {"prompt": "import os\n", "max_tokens": 6, "temperature": 0}


def never(loaded: Any, name: str) -> bool:
    raise AssertionError("asked although the number is given")


def several(
    loads: Mapping[str, Callable[[], Any]],
    keep: int | None = 1,
    fits: Callable[[Any, str], bool] = never,
    queue: int = 8,
) -> Several:
    sources = {
        n: Source(load, "/models/", partial(open_checkpoint, FILES.get(n, DEMO)), False) for n, load in loads.items()
    }
    return Several(sources, keep, fits, queue)


def ask(server: Running, model: str | None, **more: Any) -> httpx.Response:
    return server.post("/v1/completions", {**ASKED, **({} if model is None else {"model": model}), **more})


def listed(server: Running) -> dict[str, bool]:
    return {m["id"]: m["loaded"] for m in server.http.get("/v1/models").json()["data"]}


def models_of(server: Running) -> Models:
    found: Models = server.app.state.service.models
    return found


# --- models of files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = {}
    for name, path in FILES.items():
        with hybrid.load(path, **HOW) as model:
            prompt, options = ASKED["prompt"], {k: v for k, v in ASKED.items() if k != "prompt"}
            found[name] = model.submit(prompt, **options).result(60).text
    assert found[ONE] != found[TWO]
    return found


@pytest.fixture(scope="module")
def swapping() -> Iterator[Running]:
    with running(several({name: lambda path=path: hybrid.load(path, **HOW) for name, path in FILES.items()})) as server:
        yield server


def test_a_model_is_loaded_when_it_is_named_and_put_away_for_another(swapping: Running, texts: dict[str, str]) -> None:
    assert listed(swapping) == {ONE: True, TWO: False}
    away = swapping.http.get(f"/v1/models/{TWO}").json()
    assert "context_length" not in away and "device" not in away
    for name, there in ((TWO, TWO), (None, ONE)):
        answer = ask(swapping, name)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["choices"][0]["text"], answer.json()["model"]) == (texts[there], there)
        assert listed(swapping) == {n: n == there for n in FILES}
        assert swapping.http.get("/ready").status_code == 200
    assert swapping.http.get(f"/v1/models/{ONE}").json()["context_length"] == HOW["ctx"]
    text = swapping.http.get("/metrics").text
    assert f'hybrid_loads_total{{model="{TWO}"}} 1.0' in text and f'hybrid_running{{model="{ONE}"}} 0.0' in text
    assert f'hybrid_running{{model="{TWO}"}}' not in text and "hybrid_ready 1.0" in text
    for name in (TWO, ONE):
        info = swapping.http.get("/tokenizer_info", params={"model": name})
        assert info.json()["model_max_length"] == HOW["ctx"] and listed(swapping)[name]
        assert swapping.http.head("/tokenizer_info", params={"model": name}).status_code == 200
    until(lambda: all(not backend.users for backend in models_of(swapping).backends.values()))


def test_requests_for_both_at_once_all_end_with_the_right_text(swapping: Running, texts: dict[str, str]) -> None:
    names = [ONE, TWO] * 2
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: ask(swapping, name), names))
    for name, answer in zip(names, answers, strict=True):
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == texts[name]
    assert sum(listed(swapping).values()) == 1


def test_an_unknown_name_is_refused_with_the_list(swapping: Running) -> None:
    for answer in (ask(swapping, "demo"), swapping.http.get("/v1/models/demo")):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        assert f"'{ONE}', '{TWO}'" in answer.json()["error"]["message"]


def test_ollamas_lists_load_nothing(swapping: Running) -> None:
    ask(swapping, ONE)
    tags = swapping.http.get("/api/tags").json()["models"]
    assert [m["name"] for m in tags] == [f"{name}:latest" for name in FILES] and tags[0]["digest"] != tags[1]["digest"]
    assert [m["size"] for m in tags] == [path.stat().st_size for path in FILES.values()]
    shown = swapping.post("/api/show", {"model": f"{TWO}:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"] and shown["model_info"]["gemma3.block_count"] == 4
    assert [m["name"] for m in swapping.http.get("/api/ps").json()["models"]] == [f"{ONE}:latest"]
    assert listed(swapping) == {ONE: True, TWO: False}
    asked = {"model": TWO, "prompt": ASKED["prompt"], "raw": True, "stream": False, "options": {"num_predict": 2}}
    answer = swapping.post("/api/generate", asked)
    assert answer.json().get("eval_count") == 2 and listed(swapping)[TWO], answer.text


def test_room_is_what_the_engine_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    with hybrid.load(DEMO, **HOW) as model, open_checkpoint(FILES[TWO]) as other:
        for free, room in ((1 << 30, True), (HEADROOM, False)):
            monkeypatch.setattr("hybrid.ready.usable_bytes", lambda free=free: free)
            assert has_room(other, model.engine.device, model.engine.config) == room


# --- scripted models: who waits for whom ------------------------------------------------------------------------------


class Pair:
    """Two scripted models, `a` and `b`. Each load makes a new model; `errors` are raised instead, in order."""

    def __init__(self) -> None:
        self.made: dict[str, list[ScriptedModel]] = {"a": [], "b": []}
        self.errors: list[Exception] = []
        self.scripts = {"a": Script(text="one"), "b": Script(text="two")}

    def loads(self) -> dict[str, Callable[[], ScriptedModel]]:
        return {name: lambda name=name: self._load(name) for name in self.made}  # type: ignore[misc]

    def _load(self, name: str) -> ScriptedModel:
        if name == "b" and self.errors:
            raise self.errors.pop(0)
        self.made[name].append(ScriptedModel(self.scripts[name]))
        return self.made[name][-1]

    @property
    def open(self) -> dict[str, int]:
        """Models that were not closed."""
        return {name: sum(not m.closed for m in made) for name, made in self.made.items()}


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    for script in found.scripts.values():
        if script.gate is not None:
            script.gate.set()


class Held:
    """A request for `a` whose answer waits for `pair.scripts["a"].gate`."""

    def __init__(self, pair: Pair, server: Running, threads: ThreadPoolExecutor, **more: Any) -> None:
        self.gate = pair.scripts["a"].gate = threading.Event()
        self.answer = threads.submit(ask, server, "a", **more)
        until(lambda: pair.made["a"][0].open == 1)


def waiting(server: Running, n: int) -> None:
    """Until n requests wait, so that `a` takes no further ones, or none, so that it does."""
    models = models_of(server)
    until(lambda: len(models._waiting) == n and models.backends["a"].draining == (n > 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_a_request_uses_is_closed_after_it(pair: Pair, stream: bool) -> None:
    with running(several(pair.loads())) as server, ThreadPoolExecutor(3) as threads:
        held = Held(pair, server, threads, stream=stream)
        other = threads.submit(ask, server, "b")
        waiting(server, 1)
        later = threads.submit(ask, server, "a")  # comes after b's: else requests for a could keep b away for ever
        waiting(server, 2)
        assert pair.open == {"a": 1, "b": 0} and not held.answer.done()
        held.gate.set()
        first = held.answer.result(60).text
        assert first.endswith("data: [DONE]\n\n") if stream else json.loads(first)["choices"][0]["text"] == "one"
        assert [f.result(60).json()["choices"][0]["text"] for f in (other, later)] == ["two", "one"]
        assert pair.open == {"a": 1, "b": 0} and len(pair.made["a"]) == 2


@contextmanager
def gone_from(server: Running, path: str, body: bytes, before: int) -> Iterator[None]:
    """A client that asks, waits behind `before` others, and leaves after the block."""
    with server.raw() as client:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        waiting(server, before + 1)
        yield
        client.shutdown(socket.SHUT_RDWR)
        waiting(server, before)


def test_a_client_that_leaves_waits_no_longer(pair: Pair) -> None:
    with running(several(pair.loads())) as server, ThreadPoolExecutor(2) as threads:
        held = Held(pair, server, threads)
        with (
            gone_from(server, "/v1/completions", b'{"prompt":"x","model":"b"}', 0),
            gone_from(server, "/detokenize", b'{"tokens":[5],"model":"a"}', 1),
        ):
            pass
        later = threads.submit(ask, server, "a")
        until(lambda: pair.made["a"][0].open == 2)
        held.gate.set()
        assert held.answer.result(60).status_code == later.result(60).status_code == 200
        assert pair.made["b"] == [] and len(pair.made["a"]) == 1


def test_more_than_the_queue_holds_are_refused_and_a_stop_refuses_the_rest(pair: Pair) -> None:
    with running(several(pair.loads(), queue=1)) as server, ThreadPoolExecutor(2) as threads:
        held = Held(pair, server, threads)
        other = threads.submit(ask, server, "b")
        waiting(server, 1)
        full = ask(server, "b")
        assert (
            full.status_code == 429 and full.json()["error"]["code"] == "queue_full" and "retry-after" in full.headers
        )
        models_of(server).stop()
        refused = other.result(60)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
        held.gate.set()
        assert held.answer.result(60).status_code == 200
    assert pair.open == {"a": 0, "b": 0} and pair.made["b"] == []


def test_a_load_that_fails_refuses_its_requests_alone(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    pair.errors = [ValueError("/models/b.gguf: is\ndamaged"), RuntimeError("no device"), KeyError("x")]
    with running(several(pair.loads())) as server:
        for line in ("b.gguf: is damaged", "no device", "its log says how"):
            failed = ask(server, "b")
            error = failed.json()["error"]
            assert failed.status_code == 503 and error["code"] == "load_failed"
            assert error["message"] == f"the model 'b' could not be loaded: {line}"
        assert "/models/b.gguf: is damaged" in capfd.readouterr().err
        assert server.http.get("/ready").status_code == 200 and ask(server, "a").status_code == 200
        assert ask(server, "b").json()["choices"][0]["text"] == "two" and server.ended == []


def test_as_many_stay_loaded_as_fit(pair: Pair) -> None:
    asked: list[str] = []
    room = [True, False, True]

    def fits(loaded: Any, name: str) -> bool:
        asked.append(name)
        return room.pop(0)

    loads = {**pair.loads(), "c": lambda: ScriptedModel(Script())}
    with running(several(loads, None, fits)) as server:
        assert ask(server, "b").status_code == 200 and pair.open == {"a": 1, "b": 1}
        assert ask(server, "a").status_code == 200
        assert ask(server, "c").status_code == 200
        assert asked == ["b", "c", "c"] and listed(server) == {"a": True, "b": False, "c": True}


def test_a_lost_device_of_one_model_loads_that_one_again(pair: Pair) -> None:
    with running(several(pair.loads(), keep=2)) as server:
        assert ask(server, "b").status_code == 200
        pair.scripts["b"].error = lambda: DeviceLost("gone")
        assert ask(server, "b").json()["error"]["code"] == "device_lost"
        pair.scripts["b"].error = None
        until(lambda: ask(server, "b").status_code == 200)
        assert ask(server, "a").status_code == 200 and server.http.get("/ready").status_code == 200
        text = server.http.get("/metrics").text
        assert 'hybrid_device_losses_total{model="b"} 1.0' in text and 'losses_total{model="a"} 0.0' in text
    assert len(pair.made["a"]) == 1 and len(pair.made["b"]) == 2


@pytest.mark.slow
def test_each_loaded_model_has_grammars_of_its_own(pair: Pair) -> None:
    """A second model's grammar leaves the first one's grammar processes running."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}}
    loads = {**pair.loads(), "c": lambda: ScriptedModel(Script())}
    with running(several(loads, keep=2)) as server:
        for name in ("a", "b"):
            assert ask(server, name, response_format=form).json()["choices"][0]["text"] == "7"
        kept = server.app.state.service._compiled
        assert list(kept) == pair.made["a"] + pair.made["b"] and all(g.memory() > 0 for g in kept.values())
        assert ask(server, "c").status_code == 200
        assert list(kept) == pair.made["b"], "what was made for a model that was put away is kept"


def test_one_model_has_no_label_and_makes_no_request_wait() -> None:
    gate = threading.Event()

    def load() -> ScriptedModel:
        assert gate.wait(60)
        return ScriptedModel(Script())

    with running(load, wait=False) as server:
        assert ask(server, None).json()["error"]["code"] == "not_ready"
        assert server.http.get("/v1/models").status_code == 503
        gate.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert listed(server) == {ONE: True} and "one model, 'demo-gemma3'" in ask(server, "x").text
        assert "model=" not in server.http.get("/metrics").text


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of `process.serve`, which is replaced."""
    found: list[Any] = []
    monkeypatch.setattr("hybrid.serve.process.serve", lambda load, *_, **__: found.append(load) or 0)
    return found


def test_a_folder_is_its_models(tmp_path: Path, started: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    for path in FILES.values():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert main([str(tmp_path), "--keep", "2", "--queue", "3"]) == 0
    (found,) = started
    assert list(found.sources) == [TWO, ONE] and (found.keep, found.queue) == (2, 3)
    said = capfd.readouterr().err
    assert said.startswith(f"passed over: {tmp_path}/bad.gguf") and said.count("\n") == 1
    (tmp_path / FILES[ONE].name).unlink()
    assert main([str(tmp_path)]) == 0 and callable(started[1]), "one model is served as if it were named"


def test_models_of_one_name_are_named_by_their_files(tmp_path: Path, started: list[Any]) -> None:
    again = shutil.copy(DEMO, tmp_path / "again.gguf")
    assert main([str(DEMO), str(again)]) == 0
    assert list(started[0].sources) == [DEMO.stem, "again"]


def test_a_model_of_embeddings_beside_one_that_writes(tmp_path: Path, started: list[Any]) -> None:
    folder = write_hf(tmp_path / "embedding", tiny_embedding(dense=64), dtype="f32")
    how = ["--device", "cpu", "--slots", "4", "--ctx", "128", "--no-warm-up"]
    assert main([str(DEMO), str(folder), *how]) == 0
    name = list(started[0].sources)[1]
    with running(started[0]) as server:
        for refused in (server.post("/v1/embeddings", {"input": "the"}), ask(server, name)):
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
        assert not listed(server)[name], "a refusal loads nothing"
        answer = server.post("/v1/embeddings", {"input": "the", "model": name}).json()
        assert answer["model"] == name and len(answer["data"][0]["embedding"]) == tiny_embedding().hidden
        assert ask(server, ONE).status_code == 200 and listed(server)[name], "both fit"


def test_wrong_use_of_several_is_one_line(
    tmp_path: Path, started: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    again = shutil.copy(DEMO, tmp_path / "again.gguf")
    (tmp_path / "empty").mkdir()
    both = [str(path) for path in FILES.values()]
    for more, code, words in [
        ([*both, "--name", "x"], 2, ["--name NAME belongs to one model"]),
        ([*both, "--draft", str(DEMO)], 2, ["--draft MODEL belongs to one model"]),
        ([*both, "--ray"], 2, ["--ray belongs to one model"]),
        ([*both, "--random", "gemma3-270m"], 2, ["one of the two"]),
        ([str(again), str(DEMO), str(again)], 1, [str(again), "'again'"]),
        ([str(tmp_path / "empty")], 1, ["no .gguf file"]),
        ([str(DEMO), str(tmp_path / "none.gguf")], 1, ["no such file"]),
    ]:
        assert main(more) == code
        said = capfd.readouterr().err
        assert all(word in said for word in words) and "Traceback" not in said and said.count("\n") == 1, said
    assert started == []
