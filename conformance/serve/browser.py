"""A headless Chromium, Debian's or another one on the path, for tests of the page and for its pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NEEDED = "the page's tests need Debian's chromium and chromium-driver (apt-get install chromium chromium-driver) and selenium"


def available() -> bool:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return False
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@contextmanager
def browser(width: int = 1200, height: int = 800, dark: bool = False) -> Iterator[Any]:
    """A driver; nothing but the loopback address can be reached with it."""
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
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
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
