"""The running profile (HYBRID_CONFORMANCE): `short` for every change, `long` by hand, `quick` for one-line changes
(`make quick`), or `trial`, that of a mutant (conformance/mutation/trial.py), where one failure is enough and none is
shrunk."""

import os
import re
from collections import defaultdict

import pytest

PROFILE = os.environ.get("HYBRID_CONFORMANCE") or "ci"
LONG, QUICK = PROFILE == "long", PROFILE == "quick"
BACKEND = re.compile(r"(?<![a-z])(cpu|vulkan|npu)(?![a-z])")  # in the name of a parameter


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Drop tests that take seconds, and all but the first parameters for each backend."""
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            name, _, parameter = item.nodeid.partition("[")
            backend = BACKEND.search(parameter)
            groups[name, backend[0] if backend else ""].append(item)
    kept = {id(group[0]) for group in groups.values()}
    return [item for item in items if id(item) in kept]
