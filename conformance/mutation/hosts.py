"""Mutants of host code: a module of hybrid/ with one piece of its text replaced. Named tests must fail with it.

mutants/host/<group>.toml holds tables [[mutant]] with

    name     the fault
    file     from the project's root
    find     text that occurs exactly once in the file; else the mutant is stale, which is an error
    replace  its replacement
    tests    tests of which one must fail: names as pytest prints them, from conformance/ on

`python -m conformance.mutation.hosts GROUP...` runs the tests of these groups with the shipped text, where all must
pass, then each mutant's tests with its text. It prints a line of JSON for each: group, name, result, seconds, said
(trial.Outcome). In the short profile every second group runs a share of its mutants; both change with the mutated files.
"""

from __future__ import annotations

import argparse
import hashlib
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

SHARE = 16
"""In the short profile one mutant in so many runs, at least one of a group."""


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
    """All of a group in the long profile; else every SHARE-th, in an order that follows from the text of the mutated
    files."""
    every = list(load(group))
    return every if LONG else sorted(every, key=_digest)[::SHARE]


def in_turn() -> list[str]:
    """All groups in the long profile; else every second, in the order of their first mutants' digests."""
    every = groups()
    return every if LONG else sorted(sorted(every, key=lambda group: _digest(tried(group)[0]))[::2])


def _digest(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.path.read_bytes() + mutant.name.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.mutation.hosts", description="Tests against mutants of host code."
    )
    parser.add_argument("group", choices=groups(), nargs="+", help="files of conformance/mutation/mutants/host")
    mutants = {group: tried(group) for group in parser.parse_args().group}
    prepare()
    tests = list(dict.fromkeys(t for found in mutants.values() for m in found for t in m.tests))
    # All at once, with kernels not yet compiled: longer than the limit for a hanging test.
    _print(" ".join(mutants), SHIPPED, asdict(trial(tests, limit=300.0)))
    for group, found in mutants.items():
        for mutant in found:
            outcome = trial(mutant.tests, mutant.path, mutant.mutated())
            if outcome.result == "hung":  # a busy machine: try once more, since only a failing test catches the mutant
                outcome = trial(mutant.tests, mutant.path, mutant.mutated(), limit=120.0)
            _print(group, mutant.name, asdict(outcome))
    return 0


def _print(group: str, name: str, outcome: dict[str, object]) -> None:
    print(json.dumps({"group": group, "name": name, **outcome}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
