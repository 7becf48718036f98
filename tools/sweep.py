"""One sweep of a mutation tool over hybrid/: which single changes of host code no test detects.

    pip install cosmic-ray coverage
    python -m tools.sweep measure TESTS...     which test runs which line (once; a plain run of the tests, about twice
    as slow) python -m tools.sweep run --most 12        mutants, each against the tests that run its line; goes on where
    it stopped python -m tools.sweep show                 the counts, and each survivor as a diff of a line

Mutants are cosmic-ray's, one for each place and kind of change, chosen by a fixed seed; changes of annotations and of
the options of data classes (frozen, slots) are none. They are tried in memory (conformance/mutation/trial.py). The list
that CI keeps is conformance/mutation/mutants/host.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.mutation.trial import ROOT, prepare, trial

OUT = ROOT / "build" / "sweep"
BUDGET = 6.0  # seconds of tests for a mutant, as they took when measured


def measure(tests: list[str]) -> int:
    """Run tests under coverage, with the test's name as the context of each line."""
    OUT.mkdir(parents=True, exist_ok=True)
    settings = OUT / "coverage.ini"
    settings.write_text(f"[run]\nsource = hybrid\ndynamic_context = test_function\ndata_file = {OUT / 'coverage'}\n")
    run = [
        sys.executable,
        "-m",
        "coverage",
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        f"--junitxml={OUT / 'tests.xml'}",
    ]
    return subprocess.run([*run, "-p", "no:xdist", *tests], cwd=ROOT).returncode


def seconds_of_tests() -> dict[str, float]:
    """Seconds of each test function that passed, all its parameters, by pytest's name of it."""
    found: defaultdict[str, float] = defaultdict(float)
    failed = set()
    for case in ET.parse(OUT / "tests.xml").iter("testcase"):
        test = _test(f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}")
        found[test] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(test)
    return {test: seconds for test, seconds in found.items() if test not in failed}


def _test(dotted: str) -> str:
    """conformance.engine.test_kv.test_ring as conformance/engine/test_kv.py::test_ring."""
    folder, module, *names = dotted.split(".")
    return "::".join([f"{folder}/{module}.py", *names])


def tests_by_line(path: Path, seconds: dict[str, float]) -> dict[int, list[str]]:
    """The tests that run each line of a file, the quickest first; under 0 those that run any."""
    from coverage import CoverageData

    data = CoverageData(str(OUT / "coverage"))
    data.read()
    found = data.contexts_by_lineno(str(path))
    by_line = {line: {_test(c) for c in contexts if c} & seconds.keys() for line, contexts in found.items()}
    by_line[0] = set().union(*by_line.values())
    return {line: sorted(tests, key=lambda t: seconds[t]) for line, tests in by_line.items()}


def mutants(path: Path, seed: int) -> Iterator[dict[str, Any]]:
    """A file's mutants in random order: one for each place and family of operators, none that only changes
    annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    source, provider = path.read_text(), OperatorProvider()
    nodes, plain, rng = (
        list(ast_nodes(get_ast(source))),
        _bare(source),
        random.Random(f"{seed} {path.relative_to(ROOT)}"),
    )
    places: defaultdict[tuple[str, Any], list[tuple[str, int]]] = defaultdict(list)
    for name in provider:
        if name.startswith("Variable"):  # needs the name of a variable
            continue
        operator, occurrences = provider[name](), 0
        for node in nodes:
            for place in operator.mutation_positions(node):
                places[name.partition("_")[0], place].append((name, occurrences))
                occurrences += 1
    for (_, place), choices in rng.sample(sorted(places.items()), len(places)):
        name, occurrence = rng.choice(choices)
        text = mutate_code(source, provider[name](), occurrence)
        if text and (bare := _bare(text)) and bare != plain:
            yield {
                "file": str(path.relative_to(ROOT)),
                "line": place[0][0],
                "column": place[0][1],
                "operator": name,
                "text": text,
            }


def _bare(source: str) -> str | None:
    """The program without what is never evaluated; None for text that is no program."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dataclass":
            node.keywords = []
    return ast.dump(tree)


def chosen(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """The quickest tests that fit into BUDGET, at least one."""
    total, found = 0.0, []
    for test in tests:
        total += seconds[test]
        if found and total > BUDGET:
            break
        found.append(test)
    return found


def run(most: int, seed: int, minutes: float, only: list[str]) -> None:
    """Try up to `most` mutants of each file, a few of every file before more of any, and write each outcome at once."""
    prepare()
    seconds, results = seconds_of_tests(), OUT / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    done = {(r["file"], r["line"], r["column"], r["operator"]) for r in map(json.loads, lines)}
    files = [
        p
        for p in sorted((ROOT / "hybrid").rglob("*.py"))
        if str(p.relative_to(ROOT)).startswith(tuple(only or ["hybrid"]))
    ]
    wanted = {p: mutants(p, seed) for p in files}
    covered = {p: tests_by_line(p, seconds) for p in files}
    end = time.monotonic() + 60 * minutes
    for _ in range(most):
        for path in files:
            if time.monotonic() > end:
                return
            mutant = next(wanted[path], None)
            if mutant is None or (mutant["file"], mutant["line"], mutant["column"], mutant["operator"]) in done:
                continue
            text, by_line = mutant.pop("text"), covered[path]
            # Lines that no test's own frames run are run on import or by a fixture.
            tests = chosen(by_line.get(mutant["line"]) or by_line[0], seconds)
            was = path.read_text().splitlines()[mutant["line"] - 1].strip()
            mutant |= {"was": was, "is": text.splitlines()[mutant["line"] - 1].strip(), "tests": len(tests)}
            mutant |= {"covered": bool(by_line.get(mutant["line"])), "result": "uncovered", "seconds": 0.0}
            if tests:
                outcome = trial(tests, path, text, limit=20 + 4 * sum(seconds[t] for t in tests))
                mutant |= {"result": outcome.result, "seconds": round(outcome.seconds, 1)}
            with results.open("a") as out:
                out.write(json.dumps(mutant) + "\n")


def show() -> None:
    """Counts by outcome, then what survived."""
    found = [json.loads(line) for line in (OUT / "results.jsonl").read_text().splitlines()]
    print(dict(Counter(r["result"] for r in found)), "of", len(found))
    for r in sorted(found, key=lambda r: (r["file"], r["line"])):
        if r["result"] in ("passed", "uncovered"):
            print(f"{r['file']}:{r['line']}  {r['operator']}  ({r['tests']} tests)\n  - {r['was']}\n  + {r['is']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("tests", nargs="+")
    trying = commands.add_parser("run")
    trying.add_argument("--most", type=int, default=12, help="mutants of a file")
    trying.add_argument("--seed", type=int, default=1)
    trying.add_argument("--minutes", type=float, default=60)
    trying.add_argument("--only", action="append", default=[], help="files that begin so")
    commands.add_parser("show")
    given = parser.parse_args()
    for name in ("coverage", "cosmic_ray"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name} is not installed: pip install cosmic-ray coverage")
    needed = {"run": OUT / "tests.xml", "show": OUT / "results.jsonl"}.get(given.command)
    if needed is not None and not needed.exists():
        parser.error(f"{needed} is missing: `{'run' if given.command == 'show' else 'measure TESTS...'}` comes first")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if given.command == "measure":
        return measure(given.tests)
    if given.command == "run":
        run(given.most, given.seed, given.minutes, given.only)
    else:
        show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
