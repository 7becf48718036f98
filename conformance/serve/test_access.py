"""Access checks and non-application answers: origins, Host headers, HTTP/1.0, HEAD, the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from conformance.serve.test_openapi import POSTS
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running
from hybrid.serve import parser, settings
from hybrid.serve.errors import internal, printable
from hybrid.serve.process import announce, configured, listen
from hybrid.serve.settings import LOOPBACK, Settings, loopback_names

HI = {"messages": [{"role": "user", "content": "Hi"}]}
ELSEWHERE = "https://elsewhere.example"


def error_of(raw: bytes) -> dict[str, Any]:
    """The error object of a refusal, from the bytes of a connection."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head
    found: dict[str, Any] = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def said(server: Running, sent: bytes) -> bytes:
    """All data of a connection until the server closes it."""
    out = b""
    with server.raw() as s:
        s.sendall(sent)
        while piece := s.recv(65536):
            out += piece
    return out


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with running(lambda: ScriptedModel(Script())) as found:
        yield found


def test_pages_of_other_origins_are_refused_without_a_key() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(cors=("https://friend.example",))) as server:
        own = f"http://127.0.0.1:{server.port}"
        for headers, status in [
            ({}, 200),
            ({"origin": own, "sec-fetch-site": "same-origin"}, 200),
            ({"origin": "https://friend.example", "sec-fetch-site": "cross-site"}, 200),
            ({"sec-fetch-site": "none"}, 200),
            ({"origin": ELSEWHERE}, 403),
            ({"origin": "null"}, 403),
            ({"origin": "http://127.0.0.1:1"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
        ]:
            answer = server.post("/v1/chat/completions", HI, headers=headers)
            assert answer.status_code == status, headers
            assert server.http.get("/v1/models", headers=headers).status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "origin"
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert server.http.get("/", headers=link).status_code == 200, "a link to the page"
    with running(lambda: ScriptedModel(Script()), Settings(keys=("k",))) as server:
        answer = server.post("/v1/chat/completions", HI, headers={"origin": ELSEWHERE, "authorization": "Bearer k"})
        assert answer.status_code == 200, "a request with the key is accepted"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_simple_cross_origin_requests_are_refused(plain: Running, kind: str | None) -> None:
    for path in POSTS:
        headers = {} if kind is None else {"content-type": kind}
        answer = plain.post(path, content=json.dumps(HI).encode(), headers=headers)
        assert answer.status_code == 400 and "Content-Type: application/json" in answer.text
    answer = plain.post(
        "/v1/chat/completions", content=json.dumps(HI), headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert answer.status_code == 200


def test_two_host_headers_are_refused() -> None:
    with running(lambda: ScriptedModel(Script()), Settings(hosts=LOOPBACK)) as server:
        for first, second in (
            ("localhost", "rebound.example"),
            ("rebound.example", "localhost"),
            ("localhost", "localhost"),
        ):
            sent = f"GET /v1/models HTTP/1.1\r\nHost: {first}\r\nHost: {second}\r\nConnection: close\r\n\r\n".encode()
            answer = said(server, sent)
            assert answer.startswith(b"HTTP/1.1 400") and error_of(answer)["code"] == "host"


def test_every_loopback_address_checks_the_host() -> None:
    assert loopback_names("127.0.0.2") == (*LOOPBACK, "127.0.0.2")
    assert loopback_names("::1") == (*LOOPBACK, "[::1]") and loopback_names("LocalHost") == LOOPBACK
    assert loopback_names("0.0.0.0") == loopback_names("192.0.2.1") == loopback_names("::") == ()


def test_an_open_address_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    for words, warned in ([], False), (["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "k"], False):
        args = parser().parse_args([*words, "--port", "0"])
        with listen("127.0.0.1", 0) as listening:
            announce(args.host, listening, settings(args))
        assert ("has no authentication" in capsys.readouterr().err) == warned


def test_cors_takes_the_headers_that_clients_ask_for() -> None:
    wanted = "authorization, content-type, x-stainless-lang, x-stainless-retry-count"
    asked = {"origin": ELSEWHERE, "access-control-request-method": "POST", "access-control-request-headers": wanted}
    with running(lambda: ScriptedModel(Script()), Settings(cors=(ELSEWHERE,))) as server:
        answer = server.http.options("/v1/chat/completions", headers=asked)
        allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
        assert answer.status_code == 200 and {"x-stainless-lang", "x-stainless-retry-count"} <= set(allowed)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/v1/models", "/metrics", "/page/chat.js", "/tokenizer_info"]
)
def test_head_is_get_without_a_body(plain: Running, path: str) -> None:
    answer = plain.http.head(path)
    assert answer.status_code == 200 and not answer.content
    whole = plain.http.get(path)
    assert whole.content and answer.headers["content-type"] == whole.headers["content-type"]
    assert plain.http.head("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_to_http_1_0_are_not_chunked(plain: Running, version: str) -> None:
    body = json.dumps({**HI, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = said(plain, head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    headers, _, stream = answer.partition(b"\r\n\r\n")
    assert (b"chunked" in headers.lower()) == (version == "1.1")
    if version == "1.0":
        assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    whole = said(plain, f"GET /v1/models HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["object"] == "list"


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_refusals_before_there_is_a_request_are_error_objects(plain: Running, sent: bytes) -> None:
    answer = said(plain, sent)
    assert answer.startswith(b"HTTP/1.1 400") and error_of(answer)["code"] == "invalid_http"


def test_log_lines_cannot_be_injected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an unconnected client's name, nor line breaks and control characters of a terminal."""
    monkeypatch.setattr("conformance.support.server.configured", partial(configured, access_log=True))
    with running(lambda: ScriptedModel(Script())) as server:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("uvicorn.access").addHandler(handler)
        try:
            assert server.http.get("/health", headers={"x-forwarded-for": "203.0.113.9"}).status_code == 200
            for path in ("/x%0aready: forged", "/x%1b[31m", "/x?a=%0aforged"):
                sent = f"GET {path.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
                assert b" 404 " in said(server, sent).splitlines()[0]
            for path in (b"/x?a=\x1b[31m", b"/x?a=\xc3\xa9", b"/\x01"):
                assert said(server, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        finally:
            logging.getLogger("uvicorn.access").removeHandler(handler)
        assert server.http.get("/health").status_code == 200
    assert records and not any("203.0.113.9" in r or not r.isprintable() for r in records), records
    internal(RuntimeError("a\nforged: line\x1b[31m"))
    err = capsys.readouterr().err
    assert "forged: line" in err.splitlines()[-1] and "\x1b" not in err
    assert printable("a\tb\x00") == "a b\\x00"


def test_answers_hold_no_nan() -> None:
    from hybrid.serve.forms import finite
    from hybrid.serve.http import packed

    assert [finite(v) for v in (float("nan"), float("-inf"), -1.5)] == [-9999.0, -9999.0, -1.5]
    with pytest.raises(ValueError):
        packed({"a": float("nan")})


def test_an_address_that_is_not_there_is_an_error_object(plain: Running) -> None:
    for answer in (plain.http.get("/v2"), plain.http.delete("/v1/models"), httpx.get(f"{plain.url}/v1/models/none")):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
