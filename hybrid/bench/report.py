"""Output of a benchmark: a JSON object or a text table of the same figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybrid.bench.ceiling import Ceiling
from hybrid.bench.measure import Row
from hybrid.bench.probe import Probes
from hybrid.core.units import show_rate
from hybrid.devices.about import driver_of, kernels_of, provenance
from hybrid.devices.energy import Energy
from hybrid.model import Model

SCHEMA = 1


def row_dict(row: Row, limit: Ceiling) -> dict[str, Any]:
    """One test as plain data."""
    rates = row.rates
    return {
        "test": row.name,
        "phase": row.phase,
        "n": row.n,
        "depth": row.depth,
        "batch": row.batch,
        "tokens": row.tokens,
        "seconds": list(row.seconds),
        "tokens_per_second": row.tokens_per_second,
        "mean": statistics.fmean(rates),
        "spread": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "gb_per_second": row.gb_per_second,
        "share_of_copy": limit.share_of_bytes(row),
        "tflops": row.tflops,
        "share_of_matrix": limit.share_of_flops(row),
        "host_us_per_token": row.host_us,
        "per_pass": dict(row.counted),
        **({} if row.energy is None else {"energy": energy_dict(row.energy, row.tokens * len(row.seconds))}),
    }


def energy_dict(energy: Energy, tokens: int) -> dict[str, Any]:
    """Energy of a run of `tokens`, as plain data."""
    return {
        **asdict(energy),
        "watts": energy.watts,
        "joules_per_token": energy.per(tokens),
        "line": energy.line(tokens),
    }


def about(model: Model, command: str) -> dict[str, Any]:
    """A report's header: schema, command, device, driver, kernels, model, types."""
    main = getattr(model.engine.device, "main", model.engine.device)
    return {
        "schema": SCHEMA,
        "command": command,
        "device": model.device,
        "driver": driver_of(main),
        "kernels": kernels_of(main),
        "model": model.checkpoint.name,
        "precision": {k: list(v) for k, v in model.engine.runner.precision.items()},
    }


def as_dict(
    about: Mapping[str, Any], rows: Sequence[Row], probes: Probes, limit: Ceiling, wrong: Sequence[str]
) -> dict[str, Any]:
    """The complete report as plain data."""
    return {
        "schema": SCHEMA,
        **about,
        "probes": asdict(probes),
        "ceiling": asdict(limit),
        "results": [row_dict(row, limit) for row in rows],
        "errors": list(wrong),
    }


def _activations(precision: Mapping[str, Sequence[str]]) -> str:
    """Types of matrix inputs, with those of prefill if different."""
    prefill = precision.get("prefill activations")
    return ", ".join(precision["activations"]) + (f" (prefill {', '.join(prefill)})" if prefill else "")


def say(lines: Sequence[str], beside: bool) -> None:
    """Print and flush partial results. beside: to standard error, if a JSON object goes to standard output."""
    print("\n".join(lines), file=sys.stderr if beside else sys.stdout, flush=True)


def text(report: Mapping[str, Any]) -> str:
    """The complete report as text."""
    return "\n".join([*head(report), *(line for r in report["results"] for line in row_lines(r))])


def head(report: Mapping[str, Any]) -> list[str]:
    """Lines before the rows. Speeds are medians; the spread is the standard deviation of the repetitions."""
    probes, limit = report["probes"], report["ceiling"]
    matrix = "no matrix units"
    if probes["matrix_tflops"] is not None:
        matrix = f"{show_rate(1e12 * probes['matrix_tflops'], 'FLOPS')} ({probes['matrix']})"
    return [
        f"{report['device']}, {report['driver']}; {provenance(report['device'])}",
        *(f"passed over: {reason}" for reason in report["passed_over"]),
        f"{report['model']}: {report['weights_bytes'] / 1e9:.2f} GB of weights ({', '.join(report['precision']['weights'])}), "
        f"activations {_activations(report['precision'])}, KV {', '.join(report['precision']['kv'])}; "
        f"ready in {report['load_seconds']:.1f} s",
        f"probes: copy {probes['copy_gb_s']:.1f} GB/s ({probes['copy']}), matrix {matrix}",
        f"shares: of bytes against {limit['of_bytes']} ({limit['gb_s']:.1f} GB/s), of operations against {limit['of_flops']}",
        "",
        f"{'test':22}{'tok/s':>10}{'mean':>10}{'spread':>9}{'GB/s':>9}{'share':>8}{'FLOPS':>8}{'share':>8}"
        f"{'host us/tok':>13}{'dispatches':>12}{'barriers':>10}",
    ]


def row_lines(r: Mapping[str, Any]) -> list[str]:
    """Table lines of a test in the form of `row_dict`."""
    host = "-" if r["host_us_per_token"] is None else f"{r['host_us_per_token']:.1f}"
    flops = "-" if r["share_of_matrix"] is None else f"{100 * r['share_of_matrix']:.1f} %"
    line = (
        f"{r['test']:22}{r['tokens_per_second']:10.1f}{r['mean']:10.1f}{r['spread']:9.2f}{r['gb_per_second']:9.1f}"
        f"{100 * r['share_of_copy']:6.1f} %{show_rate(1e12 * r['tflops'], ''):>8}{flops:>8}{host:>13}"
        f"{r['per_pass']['dispatches']:12.0f}{r['per_pass']['barriers']:10.0f}"
    )
    return [line, *([f"  {r['energy']['line']}"] if "energy" in r else [])]
