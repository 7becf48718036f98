"""A real engine behind the server: more requests than its queue holds, clients that disconnect, slow readers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.server import Running, running, until
from hybrid.engine.handle import Handle

SLOTS, QUEUE = 2, 4
TEXTS = [{"prompt": f"def f{i}(path, name):", "max_tokens": 3 + i % 3, "temperature": 0} for i in range(10 * QUEUE)]


@pytest.fixture(scope="module")
def model() -> Iterator[hybrid.Model]:
    with hybrid.load(DEMO, device="cpu", slots=SLOTS, queue=QUEUE, ctx=256, precision="exact") as found:
        yield found


@pytest.fixture(scope="module")
def small(model: hybrid.Model) -> Iterator[Running]:
    with running(lambda: model) as server:
        yield server


def at_rest(model: hybrid.Model) -> bool:
    m = model.metrics()
    return not (m.running or m.waiting or any(states["used"] for states in m.blocks.values()))


@pytest.mark.slow
def test_requests_over_the_queue_limit_are_refused_at_once(model: hybrid.Model, small: Running) -> None:
    refused = model.metrics().refused

    def ask(body: dict[str, Any]) -> tuple[dict[str, Any], httpx.Response]:
        return body, small.post("/v1/completions", body)

    with ThreadPoolExecutor(len(TEXTS)) as threads:
        with model.engine.lock:  # no running request can free a place: all others are refused before any has ended
            asked = [threads.submit(ask, body) for body in TEXTS]
            until(lambda: sum(a.done() for a in asked) == len(TEXTS) - QUEUE)
            assert model.metrics().waiting == QUEUE
        answers = [a.result(60) for a in asked]
    busy = [a for _, a in answers if a.status_code != 200]
    assert len(busy) == len(TEXTS) - QUEUE == model.metrics().refused - refused
    for answer in busy:
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    for body, answer in answers:
        if answer.status_code == 200:
            alone = model.submit(body["prompt"], max_tokens=body["max_tokens"]).result(60)
            assert answer.json()["choices"][0]["text"] == alone.text
    until(lambda: at_rest(model))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows_within_two_passes(
    model: hybrid.Model, small: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at: list[int] = []
    cancel = Handle.cancel

    def noted(self: Handle) -> None:
        at.append(model.metrics().passes)
        cancel(self)

    monkeypatch.setattr(Handle, "cancel", noted)
    body = {"prompt": "import os", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=small.url, timeout=60, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
    until(lambda: at and at_rest(model))
    assert model.metrics().passes - at[0] <= 2


@pytest.mark.slow
def test_a_slow_reader_does_not_hold_up_another(model: hybrid.Model, small: Running) -> None:
    """One stream is opened and not read; the other completes meanwhile."""
    body = {"prompt": "import os", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    with small.http.stream("POST", "/v1/completions", json=body) as slow:
        quick = small.http.post("/v1/completions", json={**body, "stream": False, "max_tokens": 5}).json()
        assert quick["usage"]["completion_tokens"] == 5
        lines = list(slow.iter_lines())
    assert lines[-2] == "data: [DONE]"
    until(lambda: at_rest(model))


def test_a_full_server_still_answers_what_needs_no_engine(model: hybrid.Model, small: Running) -> None:
    with model.engine.lock:
        handles = [model.submit("a", max_tokens=1) for _ in range(QUEUE)]
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert small.http.get(path).status_code == 200
    assert all(len(h.result(60).ids) == 1 for h in handles)
    until(lambda: at_rest(model))


def test_plans_are_looked_through_once_for_all_requests(
    model: hybrid.Model, small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Describing a model takes long, and every answer includes it."""
    body = {"prompt": "a", "max_tokens": 1}
    first = small.post("/v1/completions", body).json()["system_fingerprint"]

    def asked(self: Any) -> None:
        raise AssertionError("called again")

    monkeypatch.setattr(type(model.engine.runner), "precision", property(asked))
    assert small.post("/v1/completions", body).json()["system_fingerprint"] == first
