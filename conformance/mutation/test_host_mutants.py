"""Each mutant of host code, a module of hybrid/ with one piece of its text replaced, makes a named test fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.mutation.hosts import ROOT, SHIPPED, groups, in_turn, load, tried


@pytest.mark.parametrize("share", [in_turn()[i::2] for i in range(2)], ids="-".join)
@pytest.mark.slow
def test_caught(share: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "conformance.mutation.hosts", *share], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    outcomes = {(o["group"], o["name"]): o for o in map(json.loads, run.stdout.splitlines())}
    shipped = (" ".join(share), SHIPPED)
    assert list(outcomes) == [shipped, *((g, m.name) for g in share for m in tried(g))]
    assert outcomes[shipped]["result"] == "passed", f"without a mutation: {outcomes[shipped]['said']}"
    del outcomes[shipped]
    # `hung`, twice, may be the machine; `broken` is a mutant that cannot be imported: neither proves anything.
    wrong = {key: f"{o['result']}: {o['said'][-300:]}" for key, o in outcomes.items() if o["result"] != "failed"}
    assert not wrong, f"mutants/host: not caught by their tests: {wrong}"


def test_trials_have_their_own_profile(tmp_path: Path) -> None:
    """Whatever that of the program: in another a failure is shrunk, and long tests run out of the limit."""
    test = tmp_path / "test_profile.py"
    test.write_text("from conformance.support.profile import PROFILE\ndef test():\n    assert PROFILE == 'trial'\n")
    code = "import sys; from conformance.mutation.hosts import trial; print(trial(sys.argv[1:]).result)"
    run = subprocess.run([sys.executable, "-c", code, str(test)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "passed\n"


def test_no_mutant_is_stale() -> None:
    """Includes those that the short profile skips: their `find` text occurs once in the file, and their test files
    exist."""
    for mutant in (m for group in groups() for m in load(group)):
        assert mutant.mutated() != mutant.path.read_text()
        assert all((ROOT / t.partition("::")[0]).is_file() for t in mutant.tests), mutant.label


def test_every_part_of_the_host_has_mutants() -> None:
    mutated = {m.file for group in groups() for m in load(group)}
    engine = ("loop", "request", "runner", "scheduler", "blocks", "sampling", "speculation", "stats", "loading", "lock")
    parts = {
        "model",
        "text/stops",
        "text/tokenizer",
        "planning/passes",
        "planning/cache",
        "planning/pipeline",
        "devices/multi",
        "spec/cost",
        "checkpoint/assemble",
    }
    parts |= {f"engine/{p}" for p in engine} | {"convert/shards", "convert/blocks"}
    missing = sorted(f"hybrid/{p}.py" for p in parts if f"hybrid/{p}.py" not in mutated)
    assert not missing, f"no mutant in conformance/mutation/mutants/host mutates {', '.join(missing)}"
