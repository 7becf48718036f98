"""The chat page in a browser: a conversation, stop, edit, regenerate, reload, markup shown as text, nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.serve.browser import NEEDED, available, browser
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, running, until
from hybrid.serve.pages import FOLDER
from hybrid.serve.settings import Settings

ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>**b**"


def test_the_policy_and_what_the_files_name() -> None:
    """Also where no browser is there: nothing inline, nothing from elsewhere, and nothing that makes markup of text."""
    for file in FOLDER.glob("*.html"):
        text = file.read_text()
        assert not re.search(r"<script(?! src=\"/page/)|\bstyle=|\son\w+=|https?://(?!www\.w3\.org/2000/svg)", text), file.name
    for file in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|https?://(?!www\.w3)", file.read_text()
        )
    with running(lambda: ScriptedModel(Script()), Settings(keys=("k",))) as server:
        for path in ("/", "/dashboard", "/page/chat.js", "/page/page.css"):
            answer = server.http.get(path)
            assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/../pages.py", "/page/..%2fpages.py", "/page/chat.html%00", "/page/none.js"):
            assert server.http.get(path).status_code in (401, 404)


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[Running, ScriptedModel, Any]]:
    if not available():
        pytest.skip(NEEDED)
    model = ScriptedModel(Script(text="The first answer.", pause=0.05), ctx=4000)
    with running(lambda: model) as server, browser() as driver:
        yield server, model, driver


def by(driver: Any, css: str) -> list[Any]:
    return driver.find_elements("css selector", css)


def ask(driver: Any, text: str) -> None:
    field = by(driver, "#text")[0]
    field.send_keys(text + "\n")


def settled(driver: Any, says: str) -> None:
    until(lambda: says in by(driver, "#status")[0].text and not by(driver, "#stop")[0].is_displayed(), 20)


def said(driver: Any) -> list[str]:
    return [e.text for e in by(driver, ".turn .say")]


@pytest.mark.slow
def test_a_conversation(page: tuple[Running, ScriptedModel, Any]) -> None:
    server, model, driver = page
    script = model.script
    driver.get(server.url)
    until(lambda: by(driver, "#model")[0].text == "demo-gemma3")
    ask(driver, "Hello")
    settled(driver, "complete")
    assert said(driver) == ["Hello", "The first answer."]
    assert re.search(r"tok/s.*3 of them cached", by(driver, ".turn.assistant .told")[0].text)

    script.text = ATTACK  # what a model says, and what is typed, is text
    ask(driver, ATTACK)
    settled(driver, "complete")
    assert said(driver)[2:] == [ATTACK, ATTACK]
    assert driver.title == "Hello" and not by(driver, "#log img, #log script")

    driver.refresh()  # conversations are the browser's own
    until(lambda: said(driver)[2:] == [ATTACK, ATTACK])
    assert driver.title == "Hello"

    script.text = "Another one."
    by(driver, "[aria-label='Regenerate this answer']")[1].click()
    settled(driver, "complete")
    assert said(driver) == ["Hello", "The first answer.", ATTACK, "Another one."]
    by(driver, "[aria-label='Edit this message']")[0].click()
    field = by(driver, ".turn textarea")[0]
    field.clear()
    field.send_keys("Hi there\n")
    settled(driver, "complete")
    assert said(driver) == ["Hi there", "Another one."]

    script.text, script.pause = "word " * 400, 0.01
    ask(driver, "Much")
    until(lambda: len(said(driver)[-1]) > 20)
    by(driver, "#stop")[0].click()
    settled(driver, "Stopped")
    until(lambda: model.open == 0)
    assert 20 < len(said(driver)[-1]) < 1900

    by(driver, "#new")[0].click()
    assert not said(driver)
    by(driver, "#list button")[0].click()
    assert len(said(driver)) == 4
    wrong = [e for e in driver.get_log("browser") if e["level"] == "SEVERE"]
    assert not wrong, wrong


@pytest.mark.slow
def test_settings_reach_the_model_and_errors_are_shown(page: tuple[Running, ScriptedModel, Any]) -> None:
    server, model, driver = page
    driver.get(server.url)
    model.script.text, model.script.pause = "fine", 0.0
    driver.execute_script("document.getElementById('settings').open = true")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "top_k": "7", "seed": "11", "max_tokens": "5"}.items():
        by(driver, f"#{name}")[0].send_keys(value)
    by(driver, "#new")[0].click()
    ask(driver, "Hello")
    settled(driver, "complete")
    got = model.script.submitted[-1]
    assert (got["temperature"], got["top_k"], got["seed"], got["max_tokens"]) == (0.5, 7, 11, 5)
    assert "Be brief." in model.decode(got["prompt"])
    model.script.error = lambda: RuntimeError("x")
    ask(driver, "Again")
    settled(driver, "the server failed on this request")
    model.script.error = None


@pytest.mark.slow
def test_the_dashboard(page: tuple[Running, ScriptedModel, Any]) -> None:
    server, _, driver = page
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    driver.get(f"{server.url}/dashboard")
    until(lambda: by(driver, "#state")[0].text == "ready" and "demo-gemma3" in by(driver, "#what")[0].text)
    until(lambda: "/v1/completions, ok" in by(driver, "#outcomes")[0].text)
    assert "2 cached" in by(driver, "#blocks")[0].text and len(by(driver, ".card")) >= 12
    assert not [e for e in driver.get_log("browser") if e["level"] == "SEVERE"]
