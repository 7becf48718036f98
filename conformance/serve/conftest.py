"""Servers that tests share: one of the embedded model, and for each module one of a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

import hybrid
from conformance.support.paths import DEMO
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(lambda: hybrid.load(DEMO, device="cpu", slots=4, ctx=512, precision="exact")) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(Script(), ctx=4000)


@pytest.fixture(scope="module")
def scripted(model: ScriptedModel) -> Iterator[Running]:
    with running(lambda: model) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    plain = openai.DefaultHttpxClient(verify=False)  # reading every certificate takes longer than a request
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=plain
    ) as found:
        yield found
