"""Several replicas behind one front: routing of requests, and handling of requests whose replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import product
from typing import Any

import httpx
import pytest

from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import without_collections
from hybrid.serve.app import make_app
from hybrid.serve.scale import front as front_module
from hybrid.serve.scale import routing
from hybrid.serve.scale.calls import Call, Head, answers
from hybrid.serve.scale.front import Front, ReplicaGone, guarded
from hybrid.serve.scale.routing import LOOKED, PIECE, PIECES, Routes, beginning, keys_of
from hybrid.serve.settings import Settings

LONG = "a sentence that is said again and again. " * 20


def chat(*said: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": s} for s in said]}).encode()


# ------------------------------------------------------------------------------------------------------------- routing
def test_a_longer_conversation_has_the_keys_of_the_shorter_one() -> None:
    short, longer = (keys_of(beginning("/v1/chat/completions", chat(*said))) for said in ([LONG], [LONG, "and then?"]))
    other = keys_of(beginning("/v1/chat/completions", chat("x" + LONG)))
    assert len(short) >= 4 and longer[: len(short)] == short
    assert not set(short) & set(other)


def test_keys_follow_from_everything_before() -> None:
    a, b = "a" * PIECE, "b" * PIECE
    assert keys_of(a + b)[1] != keys_of(b + b)[1] and keys_of(a + b)[0] == keys_of(a)[0]
    assert keys_of("a" * (PIECE - 1)) == ()


def repr_of(body: object) -> str:
    """A short name of a case."""
    return repr(body)[:20]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"model": "m"}', b'"text"', b"[" * 100_000, b"\xff\xfe", b'{"prompt": null}'],
    ids=repr_of,
)
def test_requests_without_a_prompt_have_no_routing_keys(body: bytes) -> None:
    assert beginning("/v1/completions", body) == ""


def test_system_prompts_and_tools_are_part_of_the_beginning() -> None:
    plain = beginning("/v1/chat/completions", chat("hello"))
    tools = json.loads(chat("hello")) | {"tools": [{"type": "function"}]}
    assert beginning("/v1/chat/completions", json.dumps(tools).encode()) != plain


def test_a_conversation_of_any_length_keeps_its_keys() -> None:
    """Also where the body is cut in the middle of a character."""
    said = ["é" * 3000] * 100
    for length in (5, 20, 40):
        shorter, longer = (keys_of(beginning("/v1/chat/completions", chat(*said[:n]))) for n in (length, 100))
        assert len(shorter) > 4 and longer[: len(shorter)] == shorter
    one = json.dumps({"prompt": "ü" * LOOKED}, ensure_ascii=False).encode()
    assert len(keys_of(beginning("/v1/completions", one))) == PIECES


@pytest.mark.parametrize(
    "begun", ["[" * 100_000, "[[]", '[{"a":{}}', '[{"a":' * 100_000, "[" + "9" * 100_000, "[1", '["\\n'], ids=repr_of
)
def test_of_a_hostile_body_a_bounded_part_is_read(monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    more = begun[-2:] if begun.endswith("\\n") else "," + begun[1:]
    body = ('{"messages": ' + begun + more * (LOOKED // len(more) + 1)).encode()
    read: list[int] = []
    parse = routing.from_json

    def counted(body: bytes, **options: Any) -> Any:
        read.append(len(body))
        return parse(body, **options)

    monkeypatch.setattr(routing, "from_json", counted)
    assert len(keys_of(beginning("/v1/chat/completions", body))) <= PIECES and read == [LOOKED]


def test_a_request_goes_where_its_beginning_ran_until_that_replica_is_too_busy() -> None:
    routes, keys = Routes(3, imbalance=4), keys_of("x" * 4 * PIECE)
    routes.ran(keys, 2)
    assert routes.choose(keys, [0, 0, 3]) == 2
    assert routes.choose(keys, [0, 1, 4]) == 0
    assert routes.choose(keys[:2], [0, 0, 0]) == 2
    routes.ran(keys[:2], 1)  # another branch: the longest part decides
    assert routes.choose(keys, [0, 0, 0]) == 2 and routes.choose(keys[:2], [0, 0, 0]) == 1
    routes.forget(2)
    assert routes.choose(keys, [0, 0, 0]) == 1


def test_unknown_requests_go_to_the_least_busy_and_none_to_one_that_is_down() -> None:
    routes = Routes(3)
    assert routes.choose((), [2, 1, 3]) == 1
    assert {routes.choose((), [0, 0, 0]) for _ in range(9)} == {0, 1, 2}
    assert {routes.choose((), [None, 0, None]) for _ in range(3)} == {1}
    assert routes.choose((), [None, None, None]) is None
    routes.ran((b"k",), 0)
    assert routes.choose((b"k",), [None, 5, 6]) == 1


def test_remembered_routes_are_bounded() -> None:
    routes = Routes(2, remembered=2)
    routes.ran((b"a", b"b"), 1)
    routes.ran((b"a",), 1)
    routes.ran((b"c",), 0)
    assert routes.choose((b"a",), [0, 5]) == 1 and len(routes._ran) == 2


# --------------------------------------------------------------------------------------------------------------- front
class Fake:
    """A replica in this process. dies: before the head ("before"), after it ("after"), or not at all."""

    def __init__(self, script: Script | None = None) -> None:
        self.dies: str | None = None
        self.calls: list[Call] = []
        self.model = ScriptedModel(script or Script())
        self.app = make_app(lambda: self.model, Settings(), lambda code, line: None)  # type: ignore[arg-type,return-value]

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        self.calls.append(call)
        if self.dies == "before":
            raise ReplicaGone("killed")
        async for piece in answers(self.app, call):
            yield piece
            if self.dies == "after":
                raise ReplicaGone("killed")

    async def ready(self) -> bool:
        if self.dies:
            raise ReplicaGone("killed")
        return self.app.state.backend.state == "ready"  # type: ignore[no-any-return]

    @property
    def asked(self) -> list[str]:
        return [c.path for c in self.calls]


Test = Callable[[httpx.AsyncClient, Front, list[Fake]], Coroutine[Any, Any, None]]


def with_front(test: Test, replicas: int = 2, script: Script | None = None, settings: Settings | None = None) -> None:
    """Runs `test` with a front over fakes whose models are loaded, and its client."""

    async def run() -> None:
        fakes = [Fake(script) for _ in range(replicas)]
        for fake in fakes:
            fake.app.state.backend.start()
            while not await fake.ready():
                await asyncio.sleep(0.01)
        front = Front(fakes, settings or Settings())
        app = guarded(front, settings or Settings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            await test(client, front, fakes)
        await front.close()
        for fake in fakes:
            await fake.app.state.backend.close()

    with without_collections():
        asyncio.run(asyncio.wait_for(run(), 60))


BODY = {"prompt": LONG, "max_tokens": 8}
SAID = [{"role": "user", "content": LONG}]


@pytest.mark.slow
def test_a_conversation_stays_with_its_replica_and_answers_pass_unchanged() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for turn in range(4):
            more = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go"}] * turn
            said = {"messages": [{"role": "user", "content": LONG}, *more]}
            answer = await client.post("/v1/chat/completions", json=said)
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "some text."
        assert sorted(len(f.calls) for f in fakes) == [0, 4]
        refused = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_json"

    with_front(test)


@pytest.mark.slow
def test_a_stream_comes_in_pieces_and_ends_as_the_replica_ends_it() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            text = b"".join([piece async for piece in answer.aiter_bytes()])
        assert text.endswith(b"data: [DONE]\n\n") and b"some" in text
        assert [f.model.open for f in fakes] == [0, 0] and front._open == [0, 0]

    with_front(test)


@pytest.mark.slow
def test_requests_that_a_lost_replica_has_not_begun_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "PROBE", 0.02)

    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        await client.post("/v1/completions", json=BODY)
        first = next(f for f in fakes if f.calls)
        first.dies = "before"
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "some text."
        assert front.rerouted == 1 and len(first.calls) == 2
        front._down.pop(fakes.index(first)).cancel()  # as if the loss had not been noticed
        assert (await client.get("/metrics")).status_code == 200 and len(first.calls) == 3
        assert (await client.get("/health")).json()["down"] == [fakes.index(first)]
        await client.post("/v1/completions", json=BODY)
        assert len(first.calls) == 3  # not called while it is down
        first.dies = None
        while (await client.get("/health")).json()["down"]:
            await asyncio.sleep(0.02)
        other = next(f for f in fakes if f is not first)
        other.dies = "before"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200 and len(first.calls) == 4

    with_front(test)


@pytest.mark.parametrize(
    ("path", "body", "ending"),
    [
        ("/v1/completions", BODY, b'data: {"error": {"message": '),
        ("/v1/messages", {"messages": SAID, "max_tokens": 8}, b'event: error\ndata: {"type": "error", "error": '),
        ("/api/chat", {"messages": SAID}, b'{"error": "'),
    ],
)
def test_a_stream_whose_replica_is_lost_ends_with_its_apis_error(path: str, body: Any, ending: bytes) -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for fake in fakes:
            fake.dies = "after"
        answer = await client.post(path, json=body | {"stream": True})
        assert answer.content.count(ending) == 1
        assert b"the replica was lost" in answer.content[answer.content.index(ending) :]
        assert sum(len(f.calls) for f in fakes) == 1  # begun: not run again

    with_front(test)


@pytest.mark.slow
def test_a_replica_that_loads_is_passed_over_also_when_it_is_known_to_be_down() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        await client.post("/v1/completions", json=BODY)
        first = next(i for i, f in enumerate(fakes) if f.calls)
        fakes[first].app.state.backend.state = "loading"
        for calls in (2, 2):  # called once, then known
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(fakes[first].calls) == calls
        asked, front._routes.choose = [first, 1 - first], lambda keys, load: asked.pop(0)  # type: ignore[method-assign,assignment]
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200 and not asked

    with_front(test)


@pytest.mark.slow
def test_no_replica_left_is_503_at_once() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for fake in fakes:
            fake.dies = "before"
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert sum(len(f.calls) for f in fakes) == 2

    with_front(test)


def test_a_client_that_goes_away_cancels_its_request_on_the_replica() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        async def ask() -> None:
            await client.post("/v1/completions", json=BODY)

        task = asyncio.create_task(ask())
        while not any(f.model.open for f in fakes):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while any(f.model.open for f in fakes):
            await asyncio.sleep(0.01)
        assert front._open == [0, 0]

    with_front(test, script=Script(pause=0.05, text="word " * 200))


@pytest.mark.slow
def test_bodies_are_bounded_and_figures_name_their_replica() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 413
        assert not any(f.calls for f in fakes)
        figures = (await client.get("/metrics")).text
        assert 'replica="0"' in figures and 'replica="1"' in figures
        assert figures.count("# TYPE hybrid_running gauge") == 1

    with_front(test, settings=Settings(max_body=100))


PATHS = [
    "/",
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/page/page.css",
    "/nowhere",
    "/-/healthz",
    "/-/routes",
    "/a%0Ab",
]


def test_no_path_is_answered_under_an_unknown_name_or_two() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for method, path in product(["GET", "HEAD", "POST", "OPTIONS", "DELETE"], PATHS):
            for names, status in ((["rebound.example"], 403), (["front", "front"], 400)):
                answer = await client.request(method, path, headers=[("host", name) for name in names])
                assert answer.status_code == status, (method, path)
        assert not any(f.calls for f in fakes)
        assert (await client.get("/health")).json() == {"status": "alive", "replicas": 2, "down": []}
        assert (await client.get("/nowhere")).json()["error"]["code"] == "unknown_url"  # a replica's answer

    with_front(test, settings=Settings(hosts=("front",)))


def test_no_path_but_the_open_ones_is_answered_without_a_key_or_to_another_origin() -> None:
    closed = [path for path in PATHS if path not in ("/", "/health", "/ready", "/page/page.css")]

    async def keyless(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for path in closed:
            answer = await client.post(path, json=BODY, headers={"origin": "https://elsewhere.example"})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin"
        assert not any(f.calls for f in fakes)

    async def keyed(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for path in closed:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert not any(f.calls for f in fakes)
        assert "hybrid_running" not in (await client.options("/metrics")).text
        key = {"authorization": "Bearer right"}
        assert (await client.get("/metrics", headers=key)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY, headers=key)).status_code == 200
        assert [(await client.get(path)).status_code for path in ("/", "/health", "/ready")] == [200] * 3

    with_front(keyless)
    with_front(keyed, settings=Settings(keys=("right",)))


def test_a_body_that_comes_too_slowly_or_is_too_large_is_refused() -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield b"x" * size
        await asyncio.Event().wait()

    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        for size, status, code in ((1, 408, "timeout"), (1001, 413, "body_too_large")):
            answer = await client.post("/v1/completions", content=pieces(size))
            assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert not any(f.calls for f in fakes)

    with_front(test, settings=Settings(idle=0.2, max_body=1000))


def test_a_client_that_does_not_read_is_dropped() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        body, asked, begun = json.dumps(BODY | {"stream": True}).encode(), [False], [False]
        kind = [(b"host", b"front"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": kind}

        async def receive() -> dict[str, Any]:
            if asked[0]:
                await asyncio.Event().wait()
            asked[0] = True
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun[0] = True
                await asyncio.Event().wait()

        await guarded(front, Settings(idle=0.2))(scope, receive, send)
        while any(f.model.open for f in fakes):
            await asyncio.sleep(0.01)
        assert begun[0] and front._open == [0, 0]

    with_front(test, settings=Settings(idle=0.2), script=Script(text="word " * 200))


def test_refused_requests_leave_no_route() -> None:
    async def test(client: httpx.AsyncClient, front: Front, fakes: list[Fake]) -> None:
        assert (await client.post("/v1/completions", json={**BODY, "max_tokens": "x"})).status_code == 400
        assert not front._routes._ran
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert front._routes._ran

    with_front(test)
