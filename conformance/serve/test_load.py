"""A share of perf.serving.load: requests of every kind at once, each text equal to its single run, everything given back."""

from __future__ import annotations

import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.server import running
from hybrid.perf.serving.load import KEY, main
from hybrid.serve.settings import Settings


@pytest.mark.slow
def test_under_load_every_text_is_that_of_its_single_run(capsys: pytest.CaptureFixture[str]) -> None:
    with running(lambda: hybrid.load(DEMO, device="cpu", slots=4, ctx=256, precision="exact"), Settings(keys=(KEY,))) as server:
        asked = ["--url", server.url, "--requests", "60", "--texts", "6", "--most", "5", "--at-a-time", "8"]
        code = main(asked)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.startswith("60 requests") and "0 wrong" in said.err


def test_load_is_for_servers_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://203.0.113.9:8000"]) == 2
    assert "loopback" in capsys.readouterr().err
