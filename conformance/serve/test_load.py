"""A share of perf.serving.load: requests of every kind at once, each text equal to its single run, all resources
released; and the measurements of perf.serving.clients."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.profile import LONG
from conformance.support.server import Running, running
from hybrid.arguments import open_model
from hybrid.bench import requests
from hybrid.perf.serving import clients, pairs
from hybrid.perf.serving.load import KEY, main
from hybrid.serve import parser
from hybrid.serve.settings import Settings

REQUESTS = 60 if LONG else 24


@pytest.mark.slow
def test_under_load_every_text_is_that_of_its_single_run(capsys: pytest.CaptureFixture[str]) -> None:
    with running(
        lambda: hybrid.load(DEMO, device="cpu", slots=4, ctx=256, precision="exact"), Settings(keys=(KEY,))
    ) as server:
        asked = ["--url", server.url, "--requests", str(REQUESTS), "--texts", "6", "--most", "5", "--at-a-time", "8"]
        code = main(asked)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.startswith(f"{REQUESTS} requests") and "0 wrong" in said.err


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    args = parser().parse_args(["--random", "gemma3-270m", "--layers", "1", "--vocab", "512"])
    with running(lambda: hybrid.load(open_model(args), device="cpu", slots=4, ctx=64)) as server:
        yield server


@pytest.mark.slow
def test_clients_see_the_requests_of_the_bench(small: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """The same draws as hybrid.bench --requests, each with as many tokens as requested."""
    asked = [
        "--requests",
        "6",
        "--prompt-lengths",
        "5,9",
        "--output-lengths",
        "3,8",
        "--shared-prefix",
        "2",
        "--seed",
        "5",
    ]
    assert clients.main([small.url, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["requests"]
    wanted = requests.requests(6, None, (5, 9), (3, 8), 512, 2, 5)
    assert found["requests"] == 6 and found["generated_tokens"] == sum(r.n for r in wanted)
    assert found["prompt_tokens"] == sum(len(r.ids) for r in wanted) and found["passes"] >= 8
    assert clients.main([small.url, "--requests", "2", "--output-lengths", "2", "--prompt-lengths", "4"]) == 0
    assert "to the first token" in capsys.readouterr().out


def test_clients_report_errors(small: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, word in [
        (["http://203.0.113.9:80"], 2, "loopback"),
        ([small.url, "--shared-prefix", "128"], 2, "shortest prompt"),
        ([small.url, "--requests", "1", "--prompt-lengths", "80"], 1, "context_length_exceeded"),
    ]:
        assert clients.main(arguments) == code
        assert word in capsys.readouterr().err


async def _broken(pieces: list[bytes]) -> clients.Reader:
    reader = clients.Reader()
    for piece in pieces:
        reader.data_received(piece)
    return reader


@pytest.mark.parametrize(
    ("pieces", "word"),
    [
        ([b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\n'], "not whole"),
        ([b"HTTP/1.1 500 Oh\r\n\r\n{}"], "not whole"),
        ([b"HTTP/1.1 200 OK\r\n\r\n4\r\ndata: [DONE]\n\n\r\n0\r\n", b"\r\n"], "no usage"),
        ([b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": 1}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'], "ended with 1"),
        ([], "closed the connection"),
    ],
)
def test_answers_that_are_not_whole_are_no_figures(pieces: list[bytes], word: str) -> None:
    with pytest.raises(RuntimeError, match=word):
        clients.served(asyncio.run(_broken(pieces)), 0.0, 0.0)


def test_load_is_for_servers_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://203.0.113.9:8000"]) == 2
    assert "loopback" in capsys.readouterr().err


@pytest.mark.slow
def test_the_server_beside_its_engine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--random",
        "gemma3-270m",
        "--layers",
        "1",
        "--vocab",
        "512",
        "--device",
        "cpu",
        "--slots",
        "2",
        "--pairs",
        "1",
    ]
    assert pairs.main([*small, "--requests", "3", "--prompt-lengths", "4", "--output-lengths", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ((engine, server),) = [(r["engine"], r["server"]) for r in found["rounds"]]
    assert engine["generated_tokens"] == server["generated_tokens"] == 9
    for side, stations in ((engine, pairs.STATIONS[1:]), (server, pairs.STATIONS)):
        ways = [side["stations_ms"][s] for s in stations]
        assert all(0 < a[q] <= b[q] for a, b in itertools.pairwise(ways) for q in ("p5", "p50", "p95"))
    assert len(pairs.text(found["about"], [(engine, server)])) == 5 + len(pairs.STATIONS)
