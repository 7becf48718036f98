"""The documentation as static HTML: every committed page, and the references that commands print.

python -m tools.site             # build/docs/index.html
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from posixpath import dirname, join, normpath

from markdown_it import MarkdownIt
from markdown_it.token import Token

from hybrid.perf.record.schema import load_records
from hybrid.perf.report.measured import markdown as measured
from hybrid.spec.docs import reference
from hybrid.spec.op import load_ops
from tools import help as commands
from tools import pages

STYLE = Path(__file__).with_name("site.css")
NAMES = {"README.md": "index", "models/README.md": "embedded-models", "conformance/sweep.md": "sweep"}
GUIDES = (
    "index",
    "architecture",
    "models",
    "serving",
    "performance",
    "quantisation",
    "adding-an-operation",
    "verification",
    "npu",
    "decisions",
)
"""In the order of reading; every other page is a reference."""
ROOFLINE = (
    ("hybrid.perf.targets", "--models", "*"),
    ("hybrid.perf.roofline", "gemma3-27b", "--batch", "1,8,32"),
    ("hybrid.perf.targets",),
)


def roofline() -> str:
    """What device sheets allow the models: the commands' own output."""
    from importlib import import_module

    parts = [
        "# Roofline\n\nModelled from the device sheets of `specs/devices`. What was measured: [measured](measured.md).\n"
    ]
    for module, *argv in ROOFLINE:
        shown = " ".join(f"'{a}'" if "*" in a else a for a in argv)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = import_module(f"{module}.__main__").main(argv)
        if status:
            raise RuntimeError(f"{module} {shown} ended with {status}")
        parts.append(f"`python -m {module.removeprefix('hybrid.')} {shown}`\n\n```\n{out.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


PRINTED: dict[str, Callable[[], str]] = {
    "docs/operations.md": lambda: reference(load_ops()),
    "docs/commands.md": commands.page,
    "docs/measured.md": lambda: measured(load_records()),
    "docs/roofline.md": roofline,
}
"""Pages that no file holds, under the name that links would give them."""


def sources(root: Path = pages.ROOT) -> dict[str, str]:
    """The Markdown of every page, by its path in the repository."""
    kept = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in pages.pages(root)}
    return kept | {name: make() for name, make in PRINTED.items()}


def build(out: Path, texts: Mapping[str, str], root: Path = pages.ROOT) -> list[Path]:
    """Write the site; returns its pages."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.html"):
        old.unlink()
    shutil.copy(STYLE, out / "site.css")
    targets = {path: NAMES.get(path, Path(path).stem) for path in texts}
    if len(set(targets.values())) != len(targets):
        raise ValueError(f"two pages have one name: {sorted(targets.values())}")
    titles = {path: re.sub(r"[*`]", "", pages.HEADING.search(text)[1]) for path, text in texts.items()}
    guides = sorted((p for p in texts if targets[p] in GUIDES), key=lambda p: GUIDES.index(targets[p]))
    references = sorted((p for p in texts if p not in guides), key=lambda p: titles[p])
    written = []
    for path, text in texts.items():
        links = {
            p: f'<a href="{targets[p]}.html"{" class=here" if p == path else ""}>{html.escape(titles[p])}</a>'
            for p in texts
        }
        menu = [*(links[p] for p in guides), "<b>Reference</b>", *(links[p] for p in references)]
        body = render(text, path, targets, out, root)
        written.append(out / f"{targets[path]}.html")
        written[-1].write_text(
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f'<title>{html.escape(titles[path])}</title><link rel="stylesheet" href="site.css">'
            f"<nav>{''.join(menu)}</nav><main>{body}</main></html>\n",
            encoding="utf-8",
        )
    return written


def render(text: str, path: str, targets: Mapping[str, str], out: Path, root: Path) -> str:
    """A page's HTML. Headings get GitHub's anchors, links lead to pages of the site, pictures are copied beside it."""
    reader = MarkdownIt("commonmark").enable("table")
    tokens = reader.parse(pages.MARK.sub("", text))
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", pages.anchor(tokens[i + 1].content))
        _relink(token.children or (), path, targets, out, root)
    return reader.renderer.render(tokens, reader.options, {})


def _relink(tokens: Sequence[Token], path: str, targets: Mapping[str, str], out: Path, root: Path) -> None:
    open_links: list[bool] = []
    for token in tokens:
        if token.type == "image":
            there = normpath(join(dirname(path), str(token.attrs["src"])))
            shutil.copy(root / there, out / os.path.basename(there))
            token.attrSet("src", os.path.basename(there))
        elif token.type == "link_open":
            kept = _target(str(token.attrs["href"]), path, targets)
            open_links.append(kept is None)
            token.attrSet("href", kept or "")
        if (token.type == "link_open" and open_links[-1]) or (token.type == "link_close" and open_links.pop()):
            token.type, token.tag, token.nesting = "text", "", 0  # a file of the clone: its name is left as text


def _target(link: str, path: str, targets: Mapping[str, str]) -> str | None:
    """Where a link leads in the site; None for a file of the repository that is no page."""
    file, _, heading = link.partition("#")
    if "://" in link or not file:
        return link
    there = normpath(join(dirname(path), file))
    if there not in targets:
        return None
    return f"{targets[there]}.html" + (f"#{heading}" if heading else "")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Build the documentation as static HTML pages.")
    p.add_argument("--out", type=Path, default=pages.ROOT / "build" / "docs", metavar="DIR", help="(build/docs)")
    out = p.parse_args(argv).out
    print(f"{len(build(out, sources()))} pages: {out}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
