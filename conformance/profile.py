"""Which profile runs: the short one for every change, the long one by hand (HYBRID_CONFORMANCE=long), or the quick one for
whoever changes a line (HYBRID_CONFORMANCE=quick, `make quick`)."""

import os
import re
from collections import defaultdict

import pytest

LONG = os.environ.get("HYBRID_CONFORMANCE") == "long"
QUICK = os.environ.get("HYBRID_CONFORMANCE") == "quick"
BACKEND = re.compile(r"(?<![a-z])(cpu|vulkan|npu)(?![a-z])")  # in the name of a parameter
EACH = 2  # parameters of a test that are run for each backend


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Every test that does not take seconds, with the first and a middle one of its parameters for each backend."""
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            name, _, parameter = item.nodeid.partition("[")
            backend = BACKEND.search(parameter)
            groups[name, backend[0] if backend else ""].append(item)
    kept = {id(g[i]) for g in groups.values() for i in {n * len(g) // EACH for n in range(min(EACH, len(g)))}}
    return [item for item in items if id(item) in kept]
