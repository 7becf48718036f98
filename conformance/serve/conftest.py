"""One server with the embedded model, shared by tests that only send requests."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.server import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(lambda: hybrid.load(DEMO, device="cpu", slots=4, ctx=512, precision="exact")) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    plain = openai.DefaultHttpxClient(verify=False)  # reading every certificate takes longer than a request
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=plain
    ) as found:
        yield found
