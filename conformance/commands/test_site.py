"""`make docs`: every page exists, every link and picture of the site resolves, every command is listed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from conformance.support.paths import ROOT
from tools import help as commands
from tools import pages, site

WORKERS = {"hybrid.text.chat_template", "hybrid.text.grammar_worker", "perf.isa.radv"}
"""Modules that the project's own processes start: not for users."""


class Page(HTMLParser):
    """The ids of a page, and the targets of its links and pictures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.leads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src"):
                self.leads.append(value or "")


@pytest.mark.slow
def test_links_and_pictures_of_the_site_lead_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ROOFLINE", (("hybrid.perf.roofline", "gemma3-270m"),))  # the others take 10 s each
    written = site.build(tmp_path, site.sources())
    assert len(written) == len(pages.pages()) + len(site.PRINTED)
    found = {path.name: Page(path) for path in written}
    for name, page in found.items():
        for link in page.leads:
            file, _, heading = link.partition("#")
            if "://" in link:
                continue
            assert not file or (tmp_path / file).is_file(), f"{name}: {link}"
            assert not heading or heading in found[file or name].ids, f"{name}: {link}"
    assert "linear" in found["operations.html"].ids and "python--m-hybridserve" in found["commands.html"].ids


def test_a_link_to_a_file_of_the_clone_becomes_text(tmp_path: Path) -> None:
    text = "# One\n\n[code](../hybrid/model.py) [two](two.md#here) [out](https://x.org/)\n"
    site.build(tmp_path, {"docs/one.md": text, "docs/two.md": "# Two\n\n## Here\n"})
    made = (tmp_path / "one.html").read_text()
    assert '<p>code <a href="two.html#here">two</a> <a href="https://x.org/">out</a></p>' in made
    with pytest.raises(ValueError, match="two pages have one name"):
        site.build(tmp_path, {"docs/one.md": text, "models/one.md": text})


def test_every_module_that_starts_as_a_command_is_listed() -> None:
    folders = [ROOT / name for name in ("hybrid", "perf", "kernels")]
    started = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in folders
        for path in folder.rglob("*.py")
        if path.name == "__main__.py" or '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    assert started - WORKERS == {c for c in commands.COMMANDS if not c.startswith("hybrid.harness.")}
