"""Keep the committed pages current: renew their generated parts and check their paths, links and speeds.

    python tools/pages.py            # renew what is generated
    python tools/pages.py --check    # write nothing; 1 for a stale part, a dead path or link, a speed without a source

A generated part stands between `<!-- made: NAME -->` and `<!-- end -->`. In the pages of SPEEDS a speed (a number with
tok/s, GB/s, TFLOPS and the like) stands either in a generated part or between `<!-- figures of: SOURCE -->` and `<!--
end -->`, where SOURCE says what was measured.

In code spans, `path/to/file` must exist (capitals stand for any name), `path/file.py:Class.method` must be defined in
it, and a module behind `python -m` must be there. Entries of docs/decisions.md begin with a date, newest first.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_RUNS = ROOT / "conformance" / "data" / "long_runs.toml"
PAGES = ("README.md", "docs/*.md", "models/*.md", "conformance/*.md")
SPEEDS = ("README.md", "docs/performance.md", "docs/architecture.md", "docs/verification.md")
DECISIONS = "docs/decisions.md"
FOLDERS = "hybrid|kernels|perf|conformance|specs|tools|docs|models"

PART = re.compile(r"<!-- made: ([\w-]+) -->\n(.*?)<!-- end -->", re.S)
TOLD = re.compile(r"<!-- figures of: [^>]*?\S -->\n.*?<!-- end -->", re.S)
MARK = re.compile(r"<!-- (?:made|figures of|end)\b.*?-->")
SPEED = re.compile(
    r"\d+(?:[.,]\d+)*\s*(?:tok/s|tokens/s|tokens (?:per|a) second|[GT]B/s|TFLOPS|us (?:a|per) (?:layer|token))"
)
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*[\w*/])(?::([A-Za-z_][\w.]*))?")
MODULE = re.compile(rf"python -m ((?:{FOLDERS})(?:\.\w+)+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
ENTRY = re.compile(r"\*\*(\d{4}-\d\d-\d\d): \S.*?\.\*\* \S")


def measured(name: str) -> list[str]:
    """A table of perf/records (perf/report/quoted.py)."""
    from hybrid.perf.record.schema import load_records
    from hybrid.perf.report import quoted

    return getattr(quoted, name)(load_records())


def long_runs() -> list[str]:
    """Runs of the suite and the fuzzer that somebody started by hand (conformance/data/long_runs.toml)."""
    from hybrid.spec.load import parse_toml

    runs = parse_toml(LONG_RUNS.name, LONG_RUNS.read_text(encoding="utf-8"))["run"]
    rows = [f"| {r['date']}, {r['commit']} | {r['what']} | {r['count']:,} {r['of']} | {r['found']} |" for r in runs]
    return ["| reported | what ran | how much | what it found |", "|---|---|---|---|", *rows]


def proofs() -> list[str]:
    """Reports of hybrid.prove (docs/proofs)."""
    import json

    rows = []
    for path in sorted((ROOT / "docs" / "proofs").glob("*.json")):
        r = json.loads(path.read_text(encoding="utf-8"))
        wrong, cases = sum(bool(p["error"]) for p in r["proofs"]), sum(p["cases"] for p in r["proofs"])
        texts = max((t["apart"] for t in r["texts"]), default=0.0)
        rows.append(
            f"| [{r['device']}](proofs/{path.name}), {r['driver']} | {r['kernels'][:6]} | {len(r['proofs'])}, {wrong} | {cases} | {texts:.2f} | "
            f"{r['seconds']:.0f} s |"
        )
    head = [
        "| device, driver | digest | kernels, wrong | cases | logits beside cpu, standard deviations | took |",
        "|---|---|---|---:|---:|---:|",
    ]
    return [*head, *rows]


PARTS: dict[str, Callable[[], list[str]]] = {
    "headline": lambda: measured("headline"),
    "speeds": lambda: measured("speeds"),
    "steps": lambda: measured("steps"),
    "long-runs": long_runs,
    "proofs": proofs,
}


def support_matrix() -> str:
    from hybrid.spec.docs import support
    from hybrid.spec.op import load_ops

    return support(load_ops())


WHOLE: dict[str, Callable[[], str]] = {"docs/support.md": support_matrix}
"""Pages of which everything is generated."""


def pages(root: Path = ROOT) -> list[Path]:
    return sorted(p for pattern in PAGES for p in root.glob(pattern))


def filled(text: str, name: str) -> str:
    """A page's text with its generated parts, or all of it, renewed. ValueError for a part that nothing makes."""
    if name in WHOLE:
        return WHOLE[name]()

    def part(found: re.Match[str]) -> str:
        if found[1] not in PARTS:
            raise ValueError(f"{name}: nothing makes the part {found[1]!r}; known: {', '.join(PARTS)}")
        return "\n".join([f"<!-- made: {found[1]} -->", *PARTS[found[1]](), "<!-- end -->"])

    return PART.sub(part, text)


def loose(text: str, name: str) -> Iterator[str]:
    """Speeds outside of the parts that say where they come from, and marks that do not pair."""
    if name not in SPEEDS:
        return
    rest = TOLD.sub("", PART.sub("", text))
    yield from (f"{name}: the mark {m[0]} has no partner, or no name" for m in MARK.finditer(rest))
    for found in SPEED.finditer(rest):
        yield f"{name}: {found[0]!r} is quoted by hand: make it part of a table of perf/report/quoted.toml, or name its source"


def astray(text: str, page: Path, root: Path = ROOT) -> Iterator[str]:
    """What a page names and is not there."""
    name, plain = page.relative_to(root).as_posix(), FENCE.sub("", text)
    for span in SPAN.findall(plain):
        for path, member in PATH.findall(span):
            yield from (f"{name}: {fault}" for fault in _missing(path, member, root))
    for module in MODULE.findall(text):
        if not _module(module, root):
            yield f"{name}: python -m {module}: there is no such module"
    for link in LINK.findall(SPAN.sub("", plain)):
        target, _, heading = link.partition("#")
        if "://" in link:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists():
            yield f"{name}: the link {link} leads nowhere"
        elif heading and heading not in _anchors(there):
            yield f"{name}: the link {link}: {there.name} has no such heading"


def _missing(path: str, member: str, root: Path) -> Iterator[str]:
    if (root / path).exists():
        if member and member not in _members(root / path):
            yield f"{path} does not define {member}"
    elif not any(root.glob(re.sub(r"(?<![a-z])[A-Z][A-Z_0-9]*(?![a-z])", "*", path).rstrip("/"))):
        yield f"{path} does not exist"


def _module(dotted: str, root: Path) -> bool:
    path = root.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists() or (path / "__init__.py").exists()


@cache
def _members(path: Path) -> frozenset[str]:
    """Functions and classes of a module, methods as Class.method."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in (n for n in tree.body if isinstance(n, kinds)):
        found |= {node.name, *(f"{node.name}.{m.name}" for m in node.body if isinstance(m, kinds))}
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
    return frozenset(found | {t.id for t in targets if isinstance(t, ast.Name)})


@cache
def _anchors(path: Path) -> frozenset[str]:
    """Of a page's headings, as GitHub makes them."""
    if path.suffix != ".md":
        return frozenset()
    return frozenset(map(anchor, HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8")))))


def anchor(heading: str) -> str:
    """What a link to a heading says, as GitHub makes it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def decisions(text: str, name: str) -> Iterator[str]:
    """Entries without a date, or out of order."""
    for section in text.split("\n## ")[1:] if name == DECISIONS else ():
        title, *entries = section.strip().split("\n\n")
        last = ""
        for entry in entries:
            found = ENTRY.match(entry)
            if found is None:
                yield f"{name}, {title}: an entry begins like **2026-11-22: What was decided.** not {entry[:40]!r}"
            elif last and found[1] > last:
                yield f"{name}, {title}: newest first, but {entry[2:42]!r} is younger than the entry above it"
            last = found[1] if found else last


def faults(page: Path, text: str, root: Path = ROOT) -> list[str]:
    """Everything that is wrong with a page."""
    name = page.relative_to(root).as_posix()
    stale = [] if filled(text, name) == text else [f"{name}: a generated part is stale: run `make docs`"]
    return [*stale, *loose(text, name), *astray(text, page, root), *decisions(text, name)]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Fill the generated parts of pages, and check what pages name.")
    p.add_argument("--check", action="store_true", help="write nothing; 1 for anything stale or astray")
    args, found = p.parse_args(argv), []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            wanted = text if args.check else filled(text, page.relative_to(ROOT).as_posix())
            if wanted != text:
                page.write_text(wanted, encoding="utf-8")
                print(f"renewed {page.relative_to(ROOT)}")
            found += faults(page, wanted)
        except ValueError as error:
            found.append(str(error))
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    if not found:
        print(f"{len(pages())} pages: generated parts match, paths and links lead somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
