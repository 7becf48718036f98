"""Mutants of host code: a module of hybrid/ with one piece of its text replaced. Named tests must fail with it.

mutants/host/<group>.toml holds tables [[mutant]] with

    name     what is broken
    file     from the project's root
    find     text that occurs exactly once in it; else the mutant is stale, which is an error
    replace  what it becomes
    tests    of which one must fail: names as pytest gives them, from conformance/ on

`python -m conformance.mutation.hosts GROUP` runs the tests of a group's mutants with the shipped text, where all must
pass, then each mutant's with its own, and prints a line of JSON for each: name, result, seconds, said (trial.Outcome).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.mutation.edits import edited, tables
from conformance.mutation.trial import ROOT, prepare, trial
from conformance.support.profile import LONG

FOLDER = Path(__file__).resolve().parent / "mutants" / "host"
SHIPPED = "as shipped"

SLOW = ("npu", "scheduler", "server", "serving", "cache", "choosing")


@dataclass(frozen=True, slots=True)
class Mutant:
    group: str
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError(f"{self.label}: tests is empty: name a test that fails with it")

    @property
    def label(self) -> str:
        return f"mutants/host/{self.group}.toml: {self.name}"

    @property
    def path(self) -> Path:
        return ROOT / self.file

    def mutated(self) -> str:
        """The file's text with the replacement made. Raises StaleMutant."""
        return edited(self.path, self.find, self.replace, self.label)


def groups() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(group: str) -> Iterator[Mutant]:
    for entry in tables(FOLDER / f"{group}.toml")["mutant"]:
        yield Mutant(group, tests=tuple(f"conformance/{t}" for t in entry.pop("tests")), **entry)


def tried(group: str) -> list[Mutant]:
    """All of a group in the long profile; else, where tests start a simulated NPU, the first of each file, and of the groups
    whose tests run for long, every third."""
    every = list(load(group))
    if LONG or group not in SLOW:
        return every
    return [*{m.file: m for m in reversed(every)}.values()][::-1] if group == "npu" else every[::3]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutation.hosts", description="Tests against mutants of host code.")
    parser.add_argument("group", choices=groups(), help="a file of conformance/mutation/mutants/host")
    mutants = tried(parser.parse_args().group)
    prepare()
    tests = list(dict.fromkeys(t for m in mutants for t in m.tests))
    _print(SHIPPED, asdict(trial(tests)))
    for mutant in mutants:
        outcome = trial(mutant.tests, mutant.path, mutant.mutated())
        if outcome.result == "hung":  # a machine that is busy: once more, for only a test that fails has caught it
            outcome = trial(mutant.tests, mutant.path, mutant.mutated(), limit=120.0)
        _print(mutant.name, asdict(outcome))
    return 0


def _print(name: str, outcome: dict[str, object]) -> None:
    print(json.dumps({"name": name, **outcome}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
