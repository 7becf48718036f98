"""The chat page in a browser: a conversation, stop, edit, regenerate, reload, Markdown, markup shown as text, no external
resources; plain HTTP, several tabs, a loading model, servers that refuse, disconnect or are down."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from conformance.serve.browser import NEEDED, NO_GOODBYE, NO_TIMERS, Page, available, browser
from conformance.support.marked import checkpoint4
from conformance.support.paths import DEMO
from conformance.support.scripted import Script, ScriptedModel
from conformance.support.server import Running, listening_elsewhere, running, until
from hybrid.checkpoint import open_checkpoint
from hybrid.serve.models import Several, Source
from hybrid.serve.pages import FOLDER
from hybrid.serve.process import listen
from hybrid.serve.settings import Settings
from hybrid.text.marks import CLOSE, OPEN

ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>**b**"
DRAWN = ATTACK.replace("**", "")  # in bold
LONG = "word " * 3000  # streams for half a minute unless stopped
CUT = "Cut off: regenerate or continue by asking."
RETRY, REGENERATE = "[aria-label='Send this message again']", "[aria-label='Regenerate this answer']"
COPY = "[aria-label='Copy this message']"


def test_the_policy_and_what_the_files_name() -> None:
    """Also without a browser: no inline script or style, no external resources, and no use of text as markup."""
    for file in FOLDER.glob("*.html"):
        text = file.read_text()
        assert not re.search(r"<script(?! src=\"/page/)|\bstyle=|\son\w+=|https?://(?!www\.w3\.org/2000/svg)", text), (
            file.name
        )
    scripts = {file.name: file.read_text() for file in FOLDER.glob("*.*js")}
    assert scripts["markdown-it.mjs"].startswith("/*! markdown-it 15.0.3 ")
    for name, text in scripts.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\bimport\(|\bfetch\b.*https?:",
            text,
        )
        assert name == "markdown-it.mjs" or not re.search(r"https?://(?!www\.w3)", text)
    with running(lambda: ScriptedModel(Script()), Settings(keys=("k",))) as server:
        for path in ("/", "/dashboard", *(f"/page/{file.name}" for file in FOLDER.glob("*.*[jc]s*"))):
            answer = server.http.get(path)
            assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/../pages.py", "/page/..%2fpages.py", "/page/chat.html%00", "/page/none.js"):
            assert server.http.get(path).status_code in (401, 404)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Running, ScriptedModel, Page]]:
    if not available():
        pytest.skip(NEEDED)
    model = ScriptedModel(Script(text="The first answer.", pause=0.01), ctx=4000)
    with running(lambda: model) as server, browser() as driver:
        yield server, model, Page(driver)


@pytest.fixture
def page(shared: tuple[Running, ScriptedModel, Page]) -> Iterator[Page]:
    """One window, for a server of a test's own: its address has empty storage."""
    page = shared[2]
    first = page.driver.current_window_handle
    yield page
    page.close_all_but(first)
    page.driver.get("about:blank")


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(Script(text="Yes."), ctx=4000)


@pytest.fixture
def server(model: ScriptedModel) -> Iterator[Running]:
    with running(lambda: model) as server:
        yield server


@pytest.mark.slow
def test_a_conversation(shared: tuple[Running, ScriptedModel, Page]) -> None:
    server, model, page = shared
    script, driver = model.script, page.driver
    driver.get(server.url)
    until(lambda: page.one("#model").text == "demo-gemma3")
    page.ask("Hello")
    assert page.said == ["Hello", "The first answer."]
    assert re.search(r"tok/s.*3 of them cached", page.one(".turn.assistant .told").text)

    script.text = ATTACK  # a model's text, and typed text, is not markup
    page.ask(ATTACK)
    assert page.said[2:] == [ATTACK, DRAWN]
    assert driver.title == "Hello" and not page.by("#log img, #log script")

    driver.refresh()  # conversations are stored in the browser
    until(lambda: page.said[2:] == [ATTACK, DRAWN] and driver.title == "Hello")

    script.text = "Another one."
    page.click(REGENERATE, "complete")
    assert page.said == ["Hello", "The first answer.", ATTACK, "Another one."]
    page.by("[aria-label='Edit this message']")[0].click()
    field = page.one(".turn textarea")
    field.clear()
    field.send_keys("Hi there\n")
    page.settled()
    assert page.said == ["Hi there", "Another one."]

    script.text = LONG
    page.begin("Much")
    page.click("#stop", "Stopped")
    until(lambda: model.open == 0)
    assert 20 < len(page.said[-1]) < len(LONG) / 2

    page.click("#new")
    assert not page.said
    page.by("#list button")[0].click()
    assert len(page.said) == 4 and page.errors() == []


MARKDOWN = """# Title

A *file* and **more**, `code`.
Formulas: $a_1 * b_2 * c$, \\(x_1 * y_2 * z\\), for $5 and $6.

```python
print(1)  # <b>
```

1. one
   - nested

2. two

$$
- a_1 * b_2
$$

| a | b |
|---|--:|
| 1 | 2 |

> quoted

Title
---
[web](https://a.example/x) [mail](mailto:a@b.example) ![picture](https://a.example/p.png)
"""


@pytest.mark.slow
def test_an_answer_is_drawn_as_markdown(page: Page, model: ScriptedModel, server: Running) -> None:
    page.driver.get(server.url)
    model.script.text = MARKDOWN
    page.ask("Show it")
    tags = page.run("return [...document.querySelectorAll('.turn.assistant .say > *')].map((e) => e.tagName)")
    assert tags == ["H2", "P", "DIV", "OL", "PRE", "DIV", "BLOCKQUOTE", "H3", "P"]
    assert [e.text for e in page.by(".say em, .say strong, .say li li, .say td.right")] == [
        "file",
        "more",
        "nested",
        "2",
    ]
    assert [e.text for e in page.by(".formula")] == ["$a_1 * b_2 * c$", "\\(x_1 * y_2 * z\\)", "$$\n- a_1 * b_2\n$$"]
    assert page.one(".code code").text == "print(1)  # <b>" and page.one(".code span").text == "python"
    links = {e.text: e for e in page.by(".say a")}
    assert list(links) == ["web", "mail", "picture"] and not page.by("#log img")
    for e in links.values():
        assert e.get_attribute("target") == "_blank" and "noopener" in e.get_attribute("rel")
    page.click("[aria-label='Copy this code']", "Copied.")
    page.one("#text").send_keys("\ue009v\ue000")  # Control and V
    until(lambda: page.one("#text").get_property("value") == "print(1)  # <b>")
    assert page.errors() == []


@pytest.mark.slow
def test_a_growing_answer_is_drawn_as_the_whole(page: Page, server: Running) -> None:
    """Piece by piece, and finished blocks are not drawn again."""
    script = """
        const [text, step, done] = arguments;
        import("/page/markdown.js").then(({ Drawing }) => {
          const code = (text, language) => Object.assign(document.createElement("pre"), { textContent: `${language}: ${text}` });
          const grown = document.createElement("div"), whole = document.createElement("div"), growing = new Drawing(grown, code);
          const firsts = new Set();
          for (let n = 1; n <= text.length + step; n += step) {
            growing.draw(text.slice(0, n));
            if (n > text.length / 2) firsts.add(grown.firstChild);
          }
          new Drawing(whole, code).draw(text);
          done([grown.innerHTML, whole.innerHTML, firsts.size]);
        })"""
    page.driver.get(server.url)
    for text in (MARKDOWN, MARKDOWN.replace("\n", "\r\n"), "1. a\n\n2. b\n\nc\n===\n" + "- x\n\n  y\n" * 9):
        for step in (1, 7):
            grown, whole, firsts = page.driver.execute_async_script(script, text, step)
            assert grown == whole and firsts == 1


HOSTILE = [
    "[a](javascript:document.title='taken') [b](data:text/html,x) [c]( JaVaScRiPt:x) [d](vbscript:x) [e](/etc) [f](//x)",
    "<javascript:document.title='taken'> [g][h]\n\n[h]: javascript:document.title='taken'",
    "![x](https://elsewhere.example/x.png) ![y](data:image/png;base64,AAAA)\n\n<svg onload=alert(1)><iframe src=x>",
    '[a](https://x.example/"onclick=alert(1)//) `<script>` **<b onclick=x>**',
    "```\" onclick=alert(1) <script>\n</code></pre><script>document.title='taken'</script>\n```",
    "> " * 3000 + "deep\n\n" + "- " * 2000 + "deep\n\n" + "[" * 20_000 + "*_" * 10_000,
    "$" * 20_000 + "\\(" * 10_000 + "\n$$x" * 5_000,
    "| a | b | c |\n|---|---|---|\n" + "| 1 | **2** | [3](javascript:x) |\n" * 3000,
    "|" * 50_000 + "\n" + "|-" * 25_000,
]


@pytest.mark.slow
def test_hostile_markdown_is_text_and_quick(page: Page, server: Running) -> None:
    script = """
        const [texts, done] = arguments;
        import("/page/markdown.js").then(({ Drawing }) => {
          const code = (text, language) => Object.assign(document.createElement("pre"), { textContent: `${language}: ${text}` });
          done(texts.map((text) => {
            const into = document.createElement("div"), began = performance.now();
            document.body.append(into);
            new Drawing(into, code).draw(text);
            const took = performance.now() - began;
            const all = [...into.querySelectorAll("*")];
            const found = [took, all.flatMap((e) => e.getAttributeNames()), [...new Set(all.map((e) => e.tagName))], all.map((e) => e.href).filter(Boolean)];
            into.remove();
            return found;
          }));
        })"""
    page.driver.get(server.url)
    tags = {
        "A",
        "BLOCKQUOTE",
        "CODE",
        "DIV",
        "EM",
        "LI",
        "P",
        "PRE",
        "STRONG",
        "TABLE",
        "TBODY",
        "TD",
        "TH",
        "THEAD",
        "TR",
        "UL",
    }
    for text, (took, names, made, links) in zip(
        HOSTILE, page.driver.execute_async_script(script, HOSTILE), strict=True
    ):
        assert took < 5000, text[:60]
        assert set(names) <= {"href", "target", "rel", "class"} and set(made) <= tags, text[:60]
        assert all(link.startswith("https://") for link in links), links
    assert page.driver.title != "taken" and page.errors() == []


@pytest.mark.slow
def test_a_thought_is_folded_above_its_answer(page: Page, model: ScriptedModel, server: Running) -> None:
    model.checkpoint = checkpoint4()
    t = model.checkpoint.tokenizer
    opening, closing = t.token_id(OPEN), t.token_id(CLOSE)
    assert opening is not None and closing is not None
    thought = t.encode(f"thought\n{ATTACK}", bos=False)
    model.script.ids = [opening, *thought, closing, *t.encode("Yes.", bos=False)]
    page.driver.get(server.url)
    page.set_choice("#reasoning_effort", "low")
    page.record()
    page.ask("Hello")
    assert page.said == ["Hello", "Yes."] and not page.one(".thought").is_displayed()
    page.click(".turn summary")
    assert page.one(".thought").text == ATTACK and not page.by("#log img")
    assert "<|think|>" in [t.vocabulary.pieces[i] for i in model.script.submitted[-1]["prompt"]]
    page.driver.refresh()
    until(lambda: page.by(".thought"))
    page.record()
    page.ask("Again")
    assert page.sent()[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": ATTACK}
    assert page.errors() == []


@pytest.mark.slow
def test_one_of_several_models_is_chosen_in_the_settings(page: Page) -> None:
    sources = {
        name: Source(
            lambda name=name: ScriptedModel(Script(text=name), ctx=4000), "", partial(open_checkpoint, DEMO), False
        )
        for name in ("one", "two")
    }
    with running(Several(sources, 1, lambda loaded, name: False, 8)) as server:
        page.driver.get(server.url)
        until(lambda: page.one("#model").text == "one")
        page.ask("Hello")
        page.set_choice("#asked", "two")
        until(lambda: page.one("#model").text == "two")
        page.driver.refresh()
        until(lambda: page.one("#model").text == "two")
        page.ask("Again")
        assert page.said == ["Hello", "one", "Again", "two"]
        page.driver.get(f"{server.url}/dashboard")
        until(lambda: page.one("#what").text == "two on scripted")
        until(lambda: page.by("#blocks th") and page.one("#blocks th").text == "two, all")
        assert page.errors() == []
    with running(lambda: ScriptedModel(Script(text="Yes."), ctx=4000)) as server:
        page.driver.get(server.url)
        until(lambda: page.one("#model").text == "demo-gemma3")
        page.open_settings()
        assert not page.one("#models").is_displayed()
        page.record()
        page.ask("Hello")
        assert "model" not in json.loads(page.run("return window.last.body"))


@pytest.mark.slow
def test_settings_reach_the_model_and_errors_are_shown(shared: tuple[Running, ScriptedModel, Page]) -> None:
    server, model, page = shared
    page.driver.get(server.url)
    model.script.text, model.script.pause = "fine", 0.0
    for name, value in {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_k": "7",
        "seed": "11",
        "max_tokens": "5",
    }.items():
        page.set(f"#{name}", value)
    page.click("#new")
    page.ask("Hello")
    got = model.script.submitted[-1]
    assert (got["temperature"], got["top_k"], got["seed"], got["max_tokens"]) == (0.5, 7, 11, 5)
    assert "Be brief." in model.decode(got["prompt"])
    model.script.error = lambda: RuntimeError("x")
    page.ask("Again", "the server failed on this request")
    model.script.error = None


@pytest.mark.slow
def test_the_dashboard(shared: tuple[Running, ScriptedModel, Page]) -> None:
    server, _, page = shared
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
    page.driver.get(f"{server.url}/dashboard")
    shows = {"#state": "ready", "#what": "demo-gemma3", "#outcomes": "/v1/completions, ok"}
    until(lambda: all(text in page.one(css).text for css, text in shows.items()))
    assert "2 cached" in page.one("#blocks").text and len(page.by(".card")) >= 12 and page.errors() == []


@pytest.mark.slow
def test_at_a_plain_address(model: ScriptedModel) -> None:
    """On an address that is not a secure context, browsers have no clipboard and no random identifiers."""
    if not available():
        pytest.skip(NEEDED)
    with ExitStack() as stack:
        try:
            listening = stack.enter_context(listening_elsewhere())
        except OSError as error:
            pytest.skip(f"another address needs root, Debian's iproute2 and network namespaces: {error}")
        server = stack.enter_context(running(lambda: model, listening=listening))
        page = Page(stack.enter_context(browser(host=listening.getsockname()[0])))
        page.driver.get(server.url)
        assert page.run("return [isSecureContext, typeof navigator.clipboard]") == [False, "undefined"]
        page.ask("Hello")
        assert page.said == ["Hello", "Yes."]
        page.click(COPY, "Copied.")
        page.one("#text").send_keys("\ue009v\ue000")  # Control and V
        until(lambda: page.one("#text").get_property("value") == "Yes.")
        page.one("#text").clear()
        page.run("document.execCommand = () => false")
        page.click(COPY, "Could not copy: select the text by hand.")
        page.click("#new")
        page.ask("Another")
        assert page.titles == ["Another", "Hello"] and page.said == ["Another", "Yes."] and page.errors() == []


def two_tabs(page: Page, server: Running) -> tuple[str, str]:
    """A window with the conversation "Cats", and one with "Dogs", which is current."""
    one = page.driver.current_window_handle
    page.driver.get(server.url)
    page.ask("Cats")
    page.driver.switch_to.new_window("tab")
    page.driver.get(server.url)
    page.click("#new")
    page.ask("Dogs")
    return one, page.driver.current_window_handle


@pytest.mark.slow
def test_two_tabs_continue_their_own_conversations(page: Page, server: Running) -> None:
    one, two = two_tabs(page, server)
    page.go(one)
    until(lambda: page.titles == ["Dogs", "Cats"])
    page.ask("More cats")
    page.go(two)
    until(lambda: page.titles == ["Cats", "Dogs"])
    page.ask("More dogs")
    assert {title: len(turns) for title, turns in page.kept.items()} == {"Cats": 4, "Dogs": 4}
    page.driver.refresh()
    assert page.said[2] == "More dogs" and page.titles == ["Dogs", "Cats"]

    page.set("#seed", "7")  # settings, too
    page.go(one)
    until(lambda: page.one("#seed").get_property("value") == "7")
    page.set("#top_k", "5")
    page.driver.refresh()
    assert [page.one(name).get_property("value") for name in ("#seed", "#top_k")] == ["7", "5"]


@pytest.mark.slow
def test_one_conversation_in_two_tabs(page: Page, model: ScriptedModel, server: Running) -> None:
    """Both answer at once: neither answer is lost."""
    one, two = two_tabs(page, server)
    model.script.gate = threading.Event()
    page.send("Here")
    until(lambda: model.open == 1)
    page.go(one)
    until(lambda: page.titles == ["Dogs", "Cats"])
    page.by("#list button")[0].click()
    until(lambda: page.said == ["Dogs", "Yes.", "Here"])
    page.send("There")
    until(lambda: model.open == 2)
    model.script.gate.set()
    page.settled()
    page.go(two)
    page.settled("this tab's is kept as a second one")
    until(lambda: page.titles == ["Dogs", "Dogs", "Cats"])
    assert page.said == ["Dogs", "Yes.", "Here", "Yes."]
    page.driver.refresh()
    assert page.said == ["Dogs", "Yes.", "Here", "Yes."]
    page.go(one)
    page.driver.refresh()
    assert page.said == ["Dogs", "Yes.", "Here", "There", "Yes."]


@pytest.mark.slow
def test_a_conversation_deleted_in_a_tab_is_deleted(page: Page, model: ScriptedModel, server: Running) -> None:
    """Also in the middle of an answer."""
    one, two = two_tabs(page, server)
    model.script.text, model.script.pause = LONG, 0.01
    page.begin("Much")
    page.go(one)
    page.by("#list button")[0].click()
    until(lambda: "Much" in page.said)
    page.click("#delete")
    page.go(two)
    until(lambda: page.status == "This conversation was deleted in another tab.")
    for window in (one, two):
        page.go(window)
        assert not page.said and page.titles == ["Cats"] and list(page.kept) == ["Cats"]
        page.driver.refresh()
        assert not page.said and page.titles == ["Cats"]
    until(lambda: model.open == 0)


@pytest.mark.slow
@pytest.mark.parametrize("without", [NO_GOODBYE, NO_TIMERS], ids=["goodbye", "timers"])
def test_a_reload_in_the_midst_of_an_answer(page: Page, model: ScriptedModel, server: Running, without: str) -> None:
    """A page saves partial answers periodically, and when it is left: each suffices."""
    page.driver.get(server.url)
    page.run(without)
    model.script.text, model.script.pause = LONG, 0.01
    page.begin("Much")
    until(lambda: len(page.kept["Much"]) == 2 or without == NO_TIMERS)
    page.driver.refresh()
    until(lambda: model.open == 0)
    assert page.said[0] == "Much" and page.said[1].startswith("word ") and len(page.said[1]) < len(LONG) / 2
    assert page.one(".turn.assistant .cut").text == CUT
    model.script.text, model.script.pause = "Enough.", 0.0
    page.click(REGENERATE, "complete")
    assert page.said == ["Much", "Enough."] and not page.by(".cut")


@pytest.mark.slow
def test_a_reload_before_an_answer(page: Page, model: ScriptedModel, server: Running) -> None:
    """Earlier answers stay, and the open question has a Retry."""
    page.driver.get(server.url)
    page.ask("Much")
    model.script.gate = threading.Event()
    for begin in (lambda: page.click(REGENERATE), lambda: page.send("And?")):
        begin()
        until(lambda: model.open == 1)
        page.driver.refresh()
        until(lambda: model.open == 0)
        assert page.said[:2] == ["Much", "Yes."]
    model.script.gate.set()
    page.click(RETRY, "complete")
    assert page.said == ["Much", "Yes.", "And?", "Yes."]


@pytest.mark.slow
def test_sending_while_the_model_loads(page: Page, model: ScriptedModel) -> None:
    loaded = threading.Event()

    def load() -> ScriptedModel:
        assert loaded.wait(30)
        return model

    waiting = "The model is loading: the message is sent as soon as it is ready."
    with running(load, wait=False) as server:
        page.driver.get(server.url)
        page.send("Hello")
        page.waits(waiting)
        page.one("#text").send_keys("\ue00c")  # Escape
        page.settled("Stopped.")
        assert page.said == ["Hello"]
        page.click(RETRY)
        page.waits(waiting)
        loaded.set()
        page.settled()
        assert page.said == ["Hello", "Yes."] and len(model.script.submitted) == 1


@pytest.mark.slow
def test_a_server_that_breaks_off_and_is_gone(page: Page, model: ScriptedModel) -> None:
    with running(lambda: model) as server:
        page.driver.get(server.url)
        model.script.text, model.script.pause = LONG, 0.01
        page.begin("Much")
        server.break_off()
        page.settled("The connection to the server broke off: check that it runs, then try again.")
        assert 20 < len(page.said[1]) < len(LONG) / 2 and page.one(".turn.assistant .cut").text == CUT
        until(lambda: model.open == 0)
    unreachable = "The server cannot be reached: check that it runs, then try again."
    model.script.text, model.script.pause = "Yes.", 0.0
    before = page.said
    page.click(REGENERATE)  # removes no text where it fails
    page.settled(unreachable)
    assert page.said == before
    page.ask("Are you there?", unreachable)
    page.ask("Hello?", unreachable)
    page.record()
    with running(lambda: model, listening=listen("127.0.0.1", server.port)):
        page.click(RETRY, "complete")
        assert page.said == [*before, "Are you there?", "Hello?", "Yes."] and not page.by(RETRY)
        assert page.sent()[-1]["content"] == "Are you there?\n\nHello?"
        page.driver.get(f"{server.url}/dashboard")
        until(lambda: page.one("#state").text == "ready")
    page.run("document.getElementById('key').dispatchEvent(new Event('change'))")  # polls at once
    until(lambda: page.status == unreachable)


@pytest.mark.slow
def test_refusals_are_sentences(page: Page, model: ScriptedModel, server: Running) -> None:
    page.driver.get(server.url)
    model.script.queue = 0
    page.ask("Hello", "more requests wait than the queue holds: try again later")
    model.script.queue = 1
    page.driver.refresh()
    page.set("#temperature", "-1")
    refused = {"messages": [{"role": "user", "content": "Hello"}], "temperature": -1}
    page.click(RETRY, server.post("/v1/chat/completions", refused).json()["error"]["message"])
    page.set("#temperature", "")
    model.script.error, model.script.after, model.script.text = (
        (lambda: RuntimeError("x")),
        3,
        "one two three four five",
    )
    page.click(RETRY, "the server failed on this request")
    assert page.one(".turn.assistant .cut").text == CUT and page.said[1].startswith("one")
    none = "The server answered with status 502."
    said = {
        "<h1>Bad</h1>": none,
        '{"error": {"message": {"a": 1}}}': none,
        "[1]": none,
        '{"error": "Plain."}': "Plain.",
    }
    assert page.refusals(list(said)) == list(said.values())


@pytest.mark.slow
def test_the_browsers_storage(page: Page, server: Running) -> None:
    """The old list is migrated, the oldest conversation dropped; full or missing storage is reported."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "told": ""}]
    former = [{"id": f"former-{n}", "title": f"Title {n}", "turns": turns} for n in range(200)]
    page.driver.get(f"{server.url}/page/icon.svg")
    page.run("localStorage.setItem('conversations', arguments[0])", json.dumps(former))
    page.fill_storage(16 << 10)
    page.driver.get(server.url)  # both forms do not fit at once
    assert page.titles == [c["title"] for c in former] and page.said == ["Hi", "Yes."]
    assert page.run("return localStorage.getItem('conversations')") is None and len(page.kept) == 200

    page.fill_storage(0)
    page.click("#new")
    page.ask("Hello", "This browser's storage is full: delete conversations.")
    assert page.said == ["Hello", "Yes."] and "Hello" not in page.kept
    page.fill_storage(1 << 20)
    page.ask("Again")
    assert page.titles == ["Hello", *(f"Title {n}" for n in range(199))] and len(page.kept) == 200

    refuse = (
        "for (const n of ['local', 'session']) Object.defineProperty(window, n + 'Storage', {get() {throw Error()}})"
    )
    script = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": refuse})
    page.driver.refresh()
    assert page.status == "This browser keeps nothing for this page: conversations are lost at a reload."
    page.ask("Hello")
    assert page.titles == ["Hello"]
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 400])
def test_all_controls_are_in_view(page: Page, model: ScriptedModel, server: Running, width: int) -> None:
    with page.width(width):
        page.driver.get(server.url)
        model.script.text, model.script.error, model.script.after = "long" * 100, lambda: RuntimeError("x"), 9
        page.ask("wide" * 40, "the server failed")
        assert page.outside() == []
        model.script.queue = 0
        page.ask("wide" * 40, "more requests wait")
        assert page.is_inside("#log", RETRY) and page.outside() == []
        if page.one("#menu").is_displayed():
            page.click("#menu")
        page.open_settings()
        assert page.outside() == [] and page.one("#new").is_displayed() and page.one("#key").is_displayed()
        page.click("#new")
        assert page.one("#list").is_displayed() == (width > 1000) and page.one("#text").is_displayed()
