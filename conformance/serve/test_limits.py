"""Limits and failures of a server: keys, hosts, bodies, queue, disconnected clients, lost devices. The model's tokens
and failures are scripted."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running, until
from hybrid.core.errors import DeviceLost
from hybrid.serve.connection import LARGE
from hybrid.serve.settings import Settings

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_key_is_needed_where_one_is_set() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(keys=("first-key", "second-key"))) as server:
        for headers, status in [
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic first-key"}, 401),
            ({"authorization": b"Bearer \xff\xfe"}, 401),
            ({"authorization": "Bearer first-key"}, 200),
            ({"authorization": "bearer second-key"}, 200),
        ]:
            answer = server.http.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == status
            if status == 401:
                assert error_of(answer)["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200


@pytest.mark.slow
def test_only_known_hosts_and_no_cors_unless_named() -> None:
    origin = {"origin": "https://elsewhere.example"}
    with running(lambda: ScriptedModel(Script()), Settings(hosts=("127.0.0.1", "localhost"))) as server:
        assert server.http.get("/v1/models", headers={"host": "rebound.example"}).status_code == 403
        assert server.http.get("/v1/models", headers={"host": "LOCALHOST:80"}).status_code == 200
        assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=origin).headers
    with running(lambda: ScriptedModel(Script()), Settings(cors=(origin["origin"],), keys=("k",))) as server:
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert server.http.options("/v1/chat/completions", headers=asked).status_code == 200
        answer = server.http.get("/v1/models", headers={**origin, "authorization": "Bearer k"})
        assert answer.headers["access-control-allow-origin"] == origin["origin"]


def test_bodies_that_are_too_large_or_broken() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(max_body=2000)) as server:
        large = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]})
        for content in (large, iter([large[:1500].encode(), large[1500:].encode()])):  # with a length, and in chunks
            answer = server.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
        for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 1500, b'{"messages":', b"NaN"):
            answer = server.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json"), content
        plain = server.post("/v1/chat/completions", content=json.dumps(HI), headers={"content-type": "text/plain"})
        assert plain.status_code == 400
        assert server.http.get("/v1/chat/completions").status_code == 405
        assert error_of(server.http.get("/nowhere/%2e%2e/etc"))["code"] == "unknown_url"
        odd = {"messages": [{"role": "user", "content": "\ud800"}], "\udfff\n": 1}
        answer = server.post(
            "/v1/chat/completions", content=json.dumps(odd), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400


def test_a_full_queue_is_429_at_once_and_the_others_finish() -> None:
    gate = threading.Event()
    script = Script(queue=3, gate=gate)
    with running(lambda: ScriptedModel(script)) as server:
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", HI))) for _ in range(3)
        ]
        for t in asking:
            t.start()
        until(lambda: len(script.submitted) == 3)
        for body in (HI, {**HI, "stream": True}, {**HI, "n": 2}):
            answer = server.post("/v1/chat/completions", body)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "8"
            assert error_of(answer)["type"] == "rate_limit_error"
        gate.set()
        for t in asking:
            t.join(30)
        assert [a.status_code for a in answers] == [200] * 3
        assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {script.text}


def test_choices_are_submitted_all_or_none() -> None:
    gate = threading.Event()
    script = Script(queue=3, gate=gate)
    model = ScriptedModel(script)
    with running(lambda: model) as server:
        assert server.post("/v1/chat/completions", {**HI, "n": 5}).status_code == 429
        until(lambda: model.open == 0)


def head(length: int) -> bytes:
    """The head of a chat request whose body has that many bytes."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def ask_then_leave(server: Running, model: ScriptedModel, body: dict[str, Any]) -> None:
    """Send a request on a separate socket and disconnect while both choices run; of a stream after its first bytes."""
    with server.raw() as s:
        content = json.dumps(body).encode()
        s.sendall(head(len(content)) + content)
        if body.get("stream"):
            assert s.recv(10)
        until(lambda: len(model.script.submitted) == 2)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not an orderly close


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels(stream: bool) -> None:
    model = ScriptedModel(Script(text="word " * 300, pause=0.02))
    with running(lambda: model) as server:
        ask_then_leave(server, model, {**HI, "stream": stream, "n": 2})
        until(lambda: model.open == 0, 4)
        until(lambda: 'outcome="cancelled"' in server.http.get("/metrics").text)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped_and_delays_no_other() -> None:
    model = ScriptedModel(Script(text="word " * 4000), ctx=10_000)
    with running(lambda: model, Settings(idle=0.5)) as server, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", server.port))
        content = json.dumps({**HI, "stream": True, "logprobs": True, "top_logprobs": 2, "n": 8}).encode()
        s.sendall(head(len(content)) + content)
        until(lambda: len(model.script.submitted) == 8)
        quick = server.post("/v1/chat/completions", {**HI, "max_tokens": 3})
        assert quick.status_code == 200
        until(lambda: 'outcome="cancelled"' in server.http.get("/metrics").text)
        until(lambda: model.open == 0)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(idle=0.3)) as server, server.raw() as s:
        s.sendall(head(50) + b"{")
        assert s.recv(100).startswith(b"HTTP/1.1 408")


def test_a_body_that_comes_byte_by_byte_has_an_end() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(idle=20, total=0.5)) as server, server.raw() as s:
        s.sendall(head(50_000))
        s.settimeout(0.05)
        came, end = b"", time.monotonic() + 15  # a limit of `idle` between two bytes would not trigger
        while not came and time.monotonic() < end:
            try:
                s.sendall(b" ")
                came = s.recv(100)
            except TimeoutError:
                continue
        assert came.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("answered", [False, True])
def test_a_head_that_comes_byte_by_byte_is_not_waited_for(answered: bool) -> None:
    """On a new connection, and on one that is kept after an answer."""
    with running(lambda: ScriptedModel(Script()), Settings(idle=1.5)) as server, server.raw() as s:
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        if answered:
            for _ in range(2):
                s.sendall(whole)
                said = b""
                while not said.endswith(b"}"):
                    said += s.recv(1000)
                assert said.startswith(b"HTTP/1.1 200")
        came, endless = b"", itertools.chain(b"GET / HTTP/1.1\r\nX: ", itertools.repeat(ord("a")))
        s.settimeout(0.05)
        end = time.monotonic() + 30
        while not came and time.monotonic() < end:
            try:
                s.sendall(bytes([next(endless)]))
                came = s.recv(1000)
            except TimeoutError:
                continue
        assert came.startswith(b"HTTP/1.1 408")
        assert server.http.get("/health").status_code == 200


def test_a_head_that_does_not_end_is_refused() -> None:
    with running(lambda: ScriptedModel(Script())) as server, server.raw() as s:
        s.settimeout(10)
        said = LARGE
        try:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for n in range(10):  # 80 KiB in all
                s.sendall(b"X-%d: %b\r\n" % (n, b"a" * 8000))
            said = s.recv(1000)
        except ConnectionError:  # closed while the client still sent
            pass
        assert said == LARGE
        assert server.http.get("/health").status_code == 200


def test_an_idle_connection_is_closed() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(idle=0.3)) as server, server.raw() as s:
        assert s.recv(100) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_device_is_503_and_the_model_is_loaded_again(stream: bool) -> None:
    lost = Script(error=lambda: DeviceLost("vulkan:0 at /dev/dri/card0 was reset"), after=1)
    models = [ScriptedModel(lost), ScriptedModel(Script())]
    made = iter(models)
    reload = threading.Event()

    def load() -> ScriptedModel:
        model = next(made)
        if model is models[1]:
            assert reload.wait(30)
        return model

    with running(load) as server:
        answer = server.post("/v1/chat/completions", {**HI, "stream": stream})
        if stream:
            last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 503
            error = error_of(answer)
        assert error["code"] == "device_lost" and "/dev" not in error["message"]
        assert server.http.get("/ready").status_code == 503
        again = server.post("/v1/chat/completions", HI)
        assert again.status_code == 503 and "retry-after" in again.headers
        reload.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.post("/v1/chat/completions", HI).status_code == 200
        assert models[0].closed and "hybrid_device_losses_total 1.0" in server.http.get("/metrics").text


def test_a_device_that_is_lost_while_a_prompt_is_scored_is_loaded_again() -> None:
    models = [ScriptedModel(Script()), ScriptedModel(Script())]
    made = iter(models)

    def lost(ids: Any) -> Any:
        raise DeviceLost("gone")

    models[0].engine.logits_of = lost
    with running(lambda: next(made)) as server:
        answer = server.post("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "device_lost")
        until(lambda: models[0].closed and server.http.get("/ready").status_code == 200)


def test_a_lost_device_ends_the_process_where_that_is_asked_for() -> None:
    script = Script(error=lambda: DeviceLost("gone"))
    with running(lambda: ScriptedModel(script), Settings(on_loss="exit")) as server:
        assert server.post("/v1/chat/completions", HI).status_code == 503
        until(lambda: server.ended)
        assert server.ended == [(3, "error: the device was lost: gone")]


def test_an_unexpected_error_is_500_without_details() -> None:
    script = Script(error=lambda: RuntimeError("secret /root/place"))
    with running(lambda: ScriptedModel(script)) as server:
        answer = server.post("/v1/chat/completions", HI)
        assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
        assert "secret" not in answer.text and "Traceback" not in answer.text
        streamed = server.post("/v1/chat/completions", {**HI, "stream": True}).text
        assert "internal_error" in streamed and "secret" not in streamed


def test_a_model_that_is_loading_is_not_ready_and_not_asked() -> None:
    gate = threading.Event()

    def load() -> ScriptedModel:
        gate.wait(30)
        return ScriptedModel(Script())

    with running(load, wait=False) as server:
        assert server.http.get("/health").json() == {"status": "alive"}
        assert (server.http.get("/ready").status_code, server.post("/v1/chat/completions", HI).status_code) == (
            503,
            503,
        )
        gate.set()
        until(lambda: server.http.get("/ready").status_code == 200)


def test_settings_bound_prompts_and_answers() -> None:
    script = Script(text="word " * 100)
    with running(lambda: ScriptedModel(script), Settings(max_prompt=20, max_tokens=7, total=99.0)) as server:
        assert server.post("/v1/completions", {"prompt": "word " * 30}).status_code == 400
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 8}).status_code == 400
        assert server.post("/v1/completions", {"prompt": "a"}).json()["usage"]["completion_tokens"] == 7
        assert script.submitted[-1]["deadline"] == 99.0


def test_logprobs_and_cached_tokens_are_returned() -> None:
    script = Script(text="a file")
    with running(lambda: ScriptedModel(script)) as server:
        answer = server.post("/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 1}).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert "".join(e["token"] for e in entries) == "a file" and entries[0]["logprob"] == -0.5
        assert [len(e["top_logprobs"]) for e in entries] == [1] * len(entries)
        assert bytes(b for e in entries for b in e["bytes"]) == b"a file"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        reply = server.post("/v1/completions", {"prompt": "a", "logprobs": 2}).json()["choices"][0]["logprobs"]
        assert reply["tokens"][0] == entries[0]["token"] and len(reply["top_logprobs"][0]) == 2
        assert reply["text_offset"][1] == len(reply["tokens"][0])


def test_options_reach_the_engine() -> None:
    script = Script()
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -1,
        "stop": "x",
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100},
        "priority": 3,
        "ignore_eos": True,
        "max_completion_tokens": 9,
    }
    with running(lambda: ScriptedModel(script)) as server:
        assert server.post("/v1/chat/completions", {**HI, **asked, "n": 2}).status_code == 200
    one, two = script.submitted
    assert one["seed"] == 2**64 - 1 and two["seed"] == 0
    assert one["logit_bias"] == {5: -100.0} and one["max_tokens"] == 9 and one["stop"] == "x"
    for name in asked.keys() - {"seed", "logit_bias", "max_completion_tokens"}:
        assert one[name] == asked[name], name
