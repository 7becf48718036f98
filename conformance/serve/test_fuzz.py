"""A share of perf.serving.fuzz: a server survives random requests, and a faulty server is detected."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from conformance.support.profile import LONG
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import running, until
from hybrid.engine.handle import Handle
from hybrid.engine.request import Request, Wakeups
from hybrid.perf.serving import fuzz
from hybrid.serve.process import configured, listen
from hybrid.serve.settings import LOOPBACK, Settings

REQUESTS = 20_000 if LONG else 250
SETTINGS = Settings(max_tokens=4, idle=3.0, hosts=LOOPBACK)


class Model(ScriptedModel):
    """A scripted model that scores prompts, and whose requests fail where their constraint does."""

    def __init__(self) -> None:
        super().__init__(Script("ok"))
        self.engine.logits_of = lambda texts: iter([np.zeros((len(texts[0]), self.hparams.vocab), np.float32)])

    def submit(self, prompt: Sequence[int], **options: Any) -> Handle:
        self.script.submitted.clear()  # which would keep every grammar
        return super().submit(prompt, **options)

    def _run(self, request: Request, prompt: list[int], options: dict[str, Any]) -> None:
        try:
            super()._run(request, prompt, options)
        except ValueError as error:
            wakeups = Wakeups()
            with self._lock:
                self._open -= 1
            request.end(error=error)
            request.notify(wakeups)
            wakeups.send()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for failing requests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz, "SETTLING", 0.05)
    return tmp_path


@pytest.mark.slow
def test_a_server_stays_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SETTLING", 10.0)
    with running(Model, SETTINGS) as server:
        code = fuzz.main([server.url, "--requests", str(REQUESTS), "--seed", "2", "--stall", "5", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    found = json.loads(said.out)
    assert found["requests"] == REQUESTS and found["asked_health"] > 10
    assert {"200", "400", "403", "404", "405", "left"} <= set(found["statuses"])


def test_a_seed_draws_the_same_requests() -> None:
    drawn = [fuzz.request_of(3, n) for n in range(200)]
    assert drawn == [fuzz.request_of(3, n) for n in range(200)] and len(set(drawn)) == 200
    assert [fuzz.Request.of(json.loads(json.dumps(r.record()))) for r in drawn] == drawn


# ------------------------------------------------------------------------------------------------- servers that are not
# whole

ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}


def refusal(message: str) -> bytes:
    return json.dumps({"error": {**ERROR["error"], "message": message}}).encode()


class Fake:
    """A server that answers everything with `answer`, (status, headers, body), after the requests known to be valid."""

    def __init__(self, answer: tuple[int, dict[str, str], bytes] = (400, {}, refusal("no")), **wrong: float) -> None:
        self._answer, self._wrong, self._posts, self._metrics = answer, wrong, 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self._posts += scope["method"] == "POST"
        path, answer = scope["path"], (200, {}, b"{}")
        if path == "/health":
            await asyncio.sleep(self._wrong.get("stall", 0.0))
        elif path == "/metrics":
            answer = (200, {"content-type": "text/plain"}, self._figures())
        elif path != "/ready" and self._posts > len(fuzz.CORPUS):
            answer = self._answer
        headers = {"content-type": "application/json", **answer[1], "content-length": str(len(answer[2]))}
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": answer[0], "headers": raw})
        await send({"type": "http.response.body", "body": answer[2]})

    def _figures(self) -> bytes:
        self._metrics += 1
        if self._metrics > 1 and self._wrong.get("silent"):
            return b""
        grown = {name: self._wrong.get(name, 0) * self._metrics for name in ("memory", "start")}
        return (
            f"hybrid_running {self._wrong.get('running', 0)}\nhybrid_waiting 0\n"
            f"process_resident_memory_bytes {grown['memory']}\nprocess_start_time_seconds {grown['start']}\n"
        ).encode()


@contextmanager
def answering(app: Fake) -> Iterator[str]:
    config = configured(app, SETTINGS, drain=1)
    config.lifespan = "off"
    server, listening = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield "http://{}:{}".format(*listening.getsockname())
    finally:
        server.should_exit = True
        thread.join(30)


def asked(app: Fake, *more: str) -> int:
    with answering(app) as url:
        return fuzz.main([url, "--requests", "45", "--seed", "3", "--stall", "2", *more])


def stream(*events: Any) -> tuple[int, dict[str, str], bytes]:
    return (
        200,
        {"content-type": "text/event-stream"},
        b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in events),
    )


@pytest.mark.parametrize(
    ("app", "word"),
    [
        (Fake((500, {}, refusal("no"))), "500: no declared refusal"),
        (Fake((503, {}, refusal("no"))), "503: no Retry-After"),
        (Fake((429, {}, refusal("no"))), "429: no Retry-After"),
        (Fake((422, {}, b'{"detail": []}')), "422: no declared refusal"),
        (Fake((400, {}, b'{"detail": []}')), "not the declared error"),
        (Fake((400, {}, b"no")), "no JSON"),
        (Fake((400, {"content-type": "text/plain"}, b"no")), "a refusal of type 'text/plain'"),
        (Fake((400, {}, refusal(f"in {fuzz.__file__}"))), "an error tells"),
        (Fake((400, {}, refusal("Traceback (most recent call last):"))), "an error tells"),
        (Fake((400, {}, refusal("a" * 5000))), "a refusal of 5"),
        (Fake((400, {}, refusal(f"{fuzz.UNINFORMATIVE}, sent as it is"))), "an object is refused"),
        (Fake((200, {"x-injected": "1"}, b"{}")), "the head holds"),
        (Fake((200, {}, b"[NaN]")), "no JSON object"),
        (Fake(stream({"choices": []})), "a stream ended with"),
        (Fake(stream({"error": {**ERROR["error"], "code": "internal_error"}})), "a stream failed"),
        (Fake(), "a valid request was answered 400"),
        (Fake(running=1), "requests still run"),
        (Fake(memory=100 << 20), "memory grew"),
        (Fake(silent=1), "does not tell its figures"),
        (Fake(start=1), "the process is another one"),
    ],
)
def test_faulty_servers_are_detected(app: Fake, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(app) == 1
    assert word in capsys.readouterr().err


def test_a_server_that_is_right_is_not_accused(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Fake((200, {}, b"{}"))) == 0
    assert "0 wrong" in capsys.readouterr().err


def test_a_stall_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Fake((200, {}, b"{}"), stall=0.1), "--stall", "0.05") == 1
    assert "/health took" in capsys.readouterr().err


def test_findings_are_reproduced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Fake((500, {}, refusal("no"))), "--seed", "5") == 1
    assert "fuzz-5.json" in capsys.readouterr().err
    kept = str(folder / "fuzz-5.json")
    assert asked(Fake((500, {}, refusal("no"))), "--replay", kept) == 1
    assert asked(Fake((200, {}, b"{}")), "--replay", kept) == 0
    assert capsys.readouterr().out.startswith("1 requests")


def test_fuzzing_is_for_servers_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["http://203.0.113.9:8000"]) == 2
    assert "loopback" in capsys.readouterr().err
