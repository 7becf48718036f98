"""A headless Chromium, Debian's or another one on the path, for tests and pictures of the page; actions of a user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance.support.server import until

NEEDED = "the page's tests need Debian's chromium and chromium-driver (apt-get install chromium chromium-driver) and selenium"


def available() -> bool:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return False
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@contextmanager
def browser(width: int = 1200, height: int = 800, dark: bool = False, host: str = "127.0.0.1") -> Iterator[Any]:
    """A driver that can reach only `host`."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--no-proxy-server",
        f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {host}",
        f"--window-size={width},{height}",
        *(
            ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
            if dark
            else ["--blink-settings=preferredColorScheme=1"]
        ),
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


NO_GOODBYE = "addEventListener('beforeunload', () => { Storage.prototype.setItem = () => {}; })"
NO_TIMERS = "window.setTimeout = () => 1"
"""Scripts that disable a page's last writes: on leaving, and by timers."""
SETTLE = 20.0
"""Limit of an answer in seconds."""


class Page:
    """The chat page in a driver's window. Elements are named by CSS selectors."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def by(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def one(self, css: str) -> Any:
        """The last matching element, once there is one."""
        until(lambda: self.by(css), SETTLE)
        return self.by(css)[-1]

    def click(self, css: str, says: str | None = None) -> None:
        """Click until the status matches."""
        self.one(css).click()
        if says is not None:
            self.settled(says)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def send(self, text: str) -> None:
        self.one("#text").send_keys(text + "\n")

    def begin(self, text: str) -> None:
        """Send, and wait for a first part of the answer."""
        self.send(text)
        until(lambda: len(self.said[-1]) > 20, SETTLE)

    def ask(self, text: str, says: str = "complete") -> None:
        """Send, and wait until the status matches."""
        self.send(text)
        self.settled(says)

    def settled(self, says: str = "complete") -> None:
        until(lambda: says in self.status and not self.one("#stop").is_displayed(), SETTLE)

    def waits(self, says: str) -> None:
        until(lambda: self.status == says and self.one("#stop").is_displayed(), SETTLE)

    @property
    def status(self) -> str:
        return str(self.one("#status").text)

    @property
    def said(self) -> list[str]:
        return [e.text for e in self.by(".turn .say")]

    @property
    def titles(self) -> list[str]:
        return list(self.run("return [...document.querySelectorAll('#list button')].map((e) => e.textContent)"))

    @property
    def kept(self) -> dict[str, list[dict[str, str]]]:
        """Turns in the browser's storage, by title."""
        every = self.run("return Object.entries(localStorage).filter(([key]) => key.startsWith('conversation:'))")
        return {c["title"]: c["turns"] for c in (json.loads(value) for _, value in every)}

    def go(self, window: str) -> None:
        self.driver.switch_to.window(window)

    def close_all_but(self, window: str) -> None:
        for other in set(self.driver.window_handles) - {window}:
            self.go(other)
            self.driver.close()
        self.go(window)

    def open_settings(self) -> None:
        self.run("document.getElementById('settings').open = true")

    def set(self, css: str, value: str) -> None:
        """Set a field of the settings."""
        self.open_settings()
        self.one(css).clear()
        self.one(css).send_keys(f"{value}\t")

    def set_choice(self, css: str, value: str) -> None:
        """Choose an option of the settings."""
        self.open_settings()
        self.one(css).send_keys(f"{value}\t")

    def record(self) -> None:
        self.run("const real = fetch; window.fetch = (path, options) => real(path, (window.last = options))")

    def sent(self) -> list[dict[str, str]]:
        """The messages of the last recorded request."""
        return list(json.loads(self.run("return window.last.body"))["messages"])

    def errors(self) -> list[Any]:
        """Severe messages of the console."""
        return [e for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    @contextmanager
    def width(self, width: int) -> Iterator[None]:
        """A window has a minimum width."""
        screen = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def is_inside(self, outer: str, inner: str) -> bool:
        """True if a box is within another's height."""
        o, i = self.one(outer).rect, self.one(inner).rect
        return bool(o["y"] <= i["y"] and i["y"] + i["height"] <= o["y"] + o["height"])

    def outside(self) -> list[str]:
        """Controls that need horizontal scrolling, and elements that scroll horizontally."""
        script = """
            const boxes = [...document.querySelectorAll("html, body, main, #log, #side")];
            const controls = [...document.querySelectorAll("button, input, textarea, a, summary, .cut, #status")];
            const isOut = ({ left, right, width }) => left < 0 || right > innerWidth || !width;
            return [
              ...boxes.filter((e) => e.scrollWidth > e.clientWidth),
              ...controls.filter((e) => e.checkVisibility() && !e.matches(".skip, .hidden") && isOut(e.getBoundingClientRect())),
            ].map((e) => e.outerHTML.slice(0, 90));"""
        return list(self.run(script))

    def fill_storage(self, left: int) -> None:
        """Leave space for so many characters."""
        script = """
            for (const key of Object.keys(localStorage)) if (key.startsWith("filler")) localStorage.removeItem(key);
            localStorage.setItem("left", "x".repeat(arguments[0]));
            for (let size = 1 << 24; size >= 1; size /= 2)
              try { localStorage.setItem(`filler ${size}`, "x".repeat(size)); } catch {}
            localStorage.removeItem("left");"""
        self.run(script, left)

    def refusals(self, bodies: list[str]) -> list[str]:
        """The page's messages for replies of status 502 with these bodies."""
        script = """
            const [bodies, done] = arguments;
            import("/page/server.js").then(async ({ refusal }) => {
              const said = [];
              for (const body of bodies) said.push((await refusal(new Response(body, { status: 502 }))).message);
              done(said);
            })"""
        return list(self.driver.execute_async_script(script, bodies))
