"""The tables of perf/records as Markdown, for `python -m perf.report --markdown` and the site."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.perf.record.schema import Record
from hybrid.perf.report.tables import ablation, ablations, load_peer, measured, profile, profiles, what

HEAD = """# Measured

Every measured speed of `perf/records`, with its device, commit and command. How to add to it:
[performance](performance.md#records).
"""
COLUMNS = """\
*tok/s*: the median, all sequences together; *spread*: standard deviation of the repetitions; *of ceiling*: of what
`perf.roofline` allows that device; *of probe*: of the copy (decode) or matrix product (prefill) of the same run; *peer*,
*times*: {peer}, and ours over it ({source}); *host us*: the engine's own work per token, without waiting."""


def _source(r: Record) -> str:
    proof = f"{r.conformance.passed} cases proved (`{r.conformance.command}`)"
    return f"- {r.commit[:9]}, {r.date}: {r.driver}; clock {r.clock}; kernels {r.kernels}, {proof}"


def markdown(records: Sequence[Record]) -> str:
    peer = load_peer()
    lines = [HEAD]
    if not records:
        lines += ["Nothing is kept yet.", ""]
    for device in sorted({r.device for r in records}):
        own = [r for r in records if r.device == device]
        lines += [f"## {device}", ""]
        lines += [*map(_source, own), ""]
        if any(r.runs for r in own):
            lines += [*measured(records, device).markdown(), "", COLUMNS.format(peer=peer.name, source=peer.source), ""]
        for r, found in ablations(records, device):
            lines += [
                f"### Speed-up of each optimisation: {found.model} {found.dtype}, one sequence after {found.depth} positions",
                "",
            ]
            lines += [*ablation(found).markdown(), ""]
            lines += [
                f"`{found.command}`, commit {r.commit[:9]}: host's time of a token with and without each, medians of "
                f"{found.pairs} pairs; *least*, *most*: of a pair. Speed-ups are not multiplied together.",
                "",
            ]
        for r, one in profiles(records, device):
            matrix = f" and {one.matrix_tflops:,.0f} TFLOPS" if one.matrix_tflops else ""
            lines += [f"### Where the time goes: {what(one)}", "", *profile(one).markdown(), ""]
            rates = f"at {one.copy_gb_s:,.0f} GB/s{matrix}, this run's probes"
            lines += [f"`{one.command}`, commit {r.commit[:9]}: device time; *floor*: {rates}.", ""]
        commands = dict.fromkeys(run.command for r in own for run in r.runs)
        if commands:
            lines += ["```sh", *commands, "```", ""]
    return "\n".join(lines)
