"""Expected failures are data (expected_failures.toml) with a reason and an expiry; one that no longer fails is an
error.

[[failure]]
test = "test_ops.py::test_edge[linear-vulkan-K=32]"    # a test's id from its file on; * matches anything
reason = "why, and the planned fix"
expires = 2026-01-31
"""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from hybrid.harness.compare import Disagreement

FILE = Path(__file__).with_name("expected_failures.toml")


@dataclass(frozen=True, slots=True)
class Failure:
    test: str
    reason: str
    expires: datetime.date

    def matches(self, name: str) -> bool:
        # Brackets of test ids are not character classes.
        return fnmatch.fnmatchcase(name, self.test.replace("[", "[[]"))


def load(path: Path = FILE) -> list[Failure]:
    """Raises pytest.UsageError for an incomplete entry."""
    entries = tomli.loads(path.read_text()).get("failure", [])
    for i, entry in enumerate(entries):
        if set(entry) != {"test", "reason", "expires"} or not isinstance(entry["expires"], datetime.date):
            raise pytest.UsageError(
                f"{path.name}: failure[{i}]: needs test, reason and expires (a date), and nothing else"
            )
    return [Failure(**entry) for entry in entries]


def apply_expected(
    items: Sequence[pytest.Item], failures: Sequence[Failure] | None = None, today: datetime.date | None = None
) -> None:
    """Mark the tests that entries name as strict expected failures: only a Disagreement counts, and passing is an
    error.

    Raises pytest.UsageError for an entry past its expiry, and for one whose file was collected without its test."""
    files = {i.nodeid.split("::")[0].rsplit("/", 1)[-1] for i in items}
    whole = {f for f in files if not any("::" in str(a) for i in items[:1] for a in i.config.args)}
    for failure in load() if failures is None else failures:
        if failure.expires < (today or datetime.date.today()):
            raise pytest.UsageError(
                f"{FILE.name}: {failure.test}: expired on {failure.expires}: mend it or renew the entry "
                f"({failure.reason})"
            )
        found = [
            i
            for i in items
            if failure.matches(i.nodeid.rsplit("/", 1)[-1] if "/" in i.nodeid.split("::")[0] else i.nodeid)
        ]
        if not found and failure.test.split("::")[0] in whole:
            raise pytest.UsageError(f"{FILE.name}: no test is named {failure.test!r}: remove the entry")
        for item in found:
            item.add_marker(pytest.mark.xfail(reason=failure.reason, raises=Disagreement, strict=True))
