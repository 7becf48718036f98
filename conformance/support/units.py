"""Report tests skipped for lack of matrix units, and the runs that had them: one line at the end of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hybrid.perf.record.schema import Record

WANT = re.compile(r"matrix units|f16_matrices")  # in the reason of every such skip
FILE = re.compile(r"conformance/(?:\w+/)*(test_\w+)\.py")


def left_out(skips: Iterable[tuple[str, str]]) -> Counter[str]:
    """Of (node id, reason) of skipped tests, those that needed matrix units, by test file."""
    return Counter(FILE.findall(node)[0] for node, reason in skips if WANT.search(reason))


def elsewhere(skipped: Mapping[str, int], records: Sequence[Record], kernels: str) -> str:
    """How often campaigns proved the operations on a device with matrix units, when last, in which test files, and
    whether with these `kernels` (digest). skipped: tests by file; records: oldest first."""
    what = f"matrix units: {sum(skipped.values())} tests left out for want of them"
    proofs = [r for r in records if "llvmpipe" not in r.device]
    if not proofs:
        return f"{what}; perf/records has no campaign on a device that has them"
    last = proofs[-1]
    files = FILE.findall(last.conformance.command)
    same = "these kernels" if last.kernels == kernels else f"kernels {last.kernels}, not these ({kernels})"
    line = f"{what}. Campaigns on devices that have them: {len(proofs)}, last {last.date} on {last.device}: "
    line += f"{', '.join(files)}, {last.conformance.passed} passed, {same}"
    missing = sorted(set(skipped) - set(files))
    return f"{line}; not in it: {', '.join(missing)}" if missing else line
