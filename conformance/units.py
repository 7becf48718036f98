"""What was skipped for want of matrix units, and where it ran instead: one line at the end of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from perf.record import Record

WANT = re.compile(r"matrix units|f16_matrices")  # in the reason of every skip for want of them


def left_out(reasons: Iterable[str]) -> int:
    return sum(bool(WANT.search(r)) for r in reasons)


def elsewhere(count: int, records: Sequence[Record], kernels: str) -> str:
    """Of `count` skipped tests: how often campaigns ran the operations on a device with matrix units, when last, and whether
    those were these `kernels` (digest). records: oldest first."""
    what = f"matrix units: {count} tests left out for want of them"
    proofs = [r for r in records if "llvmpipe" not in r.device]
    if not proofs:
        return f"{what}; perf/records has no campaign on a device that has them: nothing proves these kernels"
    last = proofs[-1]
    files = re.findall(r"conformance/(test_\w+)\.py", last.conformance.command)
    same = "these kernels" if last.kernels == kernels else f"kernels {last.kernels}, not these ({kernels}): prove them anew"
    times = f"{len(proofs)} time{'s' if len(proofs) > 1 else ''}"
    return (
        f"{what}; they run with each campaign on a device that has them: {times} so far, last {last.date} on {last.device} "
        f"({', '.join(files)}: {last.conformance.passed} passed; {same})"
    )
