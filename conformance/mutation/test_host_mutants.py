"""Each mutant of host code, a module of hybrid/ with one piece of its text replaced, makes a named test fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conformance.mutation.hosts import ROOT, SHIPPED, groups, load, tried


@pytest.mark.parametrize("group", groups())
@pytest.mark.slow
def test_caught(group: str) -> None:
    run = subprocess.run([sys.executable, "-m", "conformance.mutation.hosts", group], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    outcomes = {o["name"]: o for o in map(json.loads, run.stdout.splitlines())}
    assert list(outcomes) == [SHIPPED, *(m.name for m in tried(group))]
    shipped = outcomes.pop(SHIPPED)
    assert shipped["result"] == "passed", f"without a mutation: {shipped['said']}"
    # `hung`, twice, may be the machine; `broken` is a mutant that cannot be imported: neither proves anything.
    wrong = {name: f"{o['result']}: {o['said'][-300:]}" for name, o in outcomes.items() if o["result"] != "failed"}
    assert not wrong, f"mutants/host/{group}.toml: not caught by their tests: {wrong}"


def test_every_part_of_the_host_has_mutants() -> None:
    mutated = {m.file for group in groups() for m in load(group)}
    runs = ("engine", "request", "session", "streams", "teacher_forcing", "chunks", "kv", "sampling")
    engine = (*runs, "blocks", "queue", "scheduler", "sequence", "stats", "loading", "weights")
    parts = {"model", "text/stops", "text/tokenizer", "planning/passes", "planning/cache", "spec/cost", "checkpoint/assemble"}
    parts |= {f"engine/{p}" for p in engine} | {"convert/shards", "convert/blocks"}
    missing = sorted(f"hybrid/{p}.py" for p in parts if f"hybrid/{p}.py" not in mutated)
    assert not missing, f"no mutant in conformance/mutation/mutants/host mutates {', '.join(missing)}"
