"""Modelled times of NPU designs, and the model's residuals against published measurements.

Nothing here is a measurement of this project: no design has run on an NPU. A core's step over K takes the longer of its
multiply-adds and its loads, then loads, adds to and stores its tile of C. A run takes the longest of its cores, its
streams, its shim channels and memory; then the last tile of C, the host's dispatch and the locks at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import tomli

from hybrid.kernels.npu.check import npu_limits
from hybrid.spec.npusheet import Rates

MEASURED = Path(__file__).with_name("measured.toml")
# Of an element in a core; a block of 32 weights has two multipliers of 2 bytes.
BYTES = {"i8": 1.0, "q4_0": 0.625, "q8_0": 1.125, "i16": 2.0, "bf16": 2.0, "i32": 4.0, "f32": 4.0}
# aie::mmul by operand type: M x K x N, and the bytes of its operands.
MMUL = {"i8": (4, 8, 8, 32, 64), "q4_0": (4, 16, 8, 64, 64), "q8_0": (4, 8, 8, 32, 64), "bf16": (4, 8, 4, 64, 64)}
# Weights in blocks: vector operations beside the matrix unit's, of a block of 32 for 4 x 8 results, and of those
# results once a tile over K (the kernels' own counts: test_npu_kernels.py).
BLOCKS = {"q4_0": (2, 32), "q8_0": (4, 40)}
# Vector instructions per bundle of a hot loop from the open compiler, by the type of A: the rates that it was seen to
# reach on mlir-aie's own products (measured.toml, source ignite). Nobody has read them off this project's kernels.
ISSUE = {"i8": 0.8, "bf16": 0.485}
CORES = 4


@dataclass(frozen=True, slots=True)
class Product:
    """C[M,N] = A[M,K] B[K,N] on 4 x columns cores with tiles m, k, n. inputs: type of B (A is int8 beside weights in
    blocks)."""

    tile: tuple[int, int, int]
    size: tuple[int, int, int]
    inputs: str = "i8"
    output: str = "i32"
    columns: int = 4
    issue: float = 1.0
    held: int = 1
    """Times that a mem tile sends a row block of A which it holds (Gemm.repeat); 1: it passes tiles on."""

    @property
    def a_bytes(self) -> float:
        return BYTES["bf16" if self.inputs == "bf16" else "i8"]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run, modelled."""

    cores: float
    streams: float
    channels: float
    ddr: float
    tail: float
    dispatch: float

    @property
    def total(self) -> float:
        return max(self.cores, self.streams, self.channels, self.ddr) + self.tail + self.dispatch

    @property
    def bound(self) -> str:
        return max(("cores", "streams", "channels", "ddr"), key=lambda k: getattr(self, k))


def rates(sheet: str = "phoenix-npu") -> Rates:
    return npu_limits(sheet).rates


def step_cycles(p: Product, r: Rates) -> float:
    """One step over K on one core: m x k by k x n into m x n."""
    m, k, n = p.tile
    unit = MMUL[p.inputs]
    instructions = m * k * n / prod(unit[:3])
    macs = {"q4_0": r.macs_i8_i4, "bf16": r.macs_bf16}.get(p.inputs, r.macs_i8)
    share = {"q4_0": (1, 2), "q8_0": (1, 1)}.get(
        p.inputs, (2, 2)
    )  # tiles of C that use a B, and an A, that is loaded once
    loads = instructions * (unit[3] / share[1] + unit[4] / share[0]) / (2 * r.load_bytes.value)
    accumulate = m * n * (r.accumulate_cycles.value + r.accumulate_cycles_per_byte.value * BYTES[p.output])
    per_block, per_tile = BLOCKS.get(p.inputs, (0, 0))
    scaled = m * n / 32 * (k / 32 * per_block + per_tile)
    return max(m * k * n / macs.value / p.issue + scaled, loads) + accumulate


def run_times(p: Product, r: Rates, chained: bool = False) -> Times:
    (m, k, n), (M, K, N) = p.tile, p.size
    hertz, cores, b = r.clock_ghz.value * 1e9, CORES * p.columns, BYTES[p.inputs]
    tiles, steps = M / m * (N / n) / cores, K / k
    drain = m * n * BYTES[p.output] / r.stream_bytes.value
    core = tiles * (
        steps * (step_cycles(p, r) + r.object_cycles.value) + drain
    )  # C is one buffer: it waits for its DMA
    if p.held > 1:  # the next row block comes when the one before has been sent for the last time
        core += tiles / p.held * m * K * p.a_bytes / r.stream_bytes.value
    stream = tiles * steps * max(m * k * p.a_bytes, k * n * b) / r.stream_bytes.value
    writes = M * N * BYTES[p.output]
    a_reads, b_reads = M * K * N / (n * p.columns * p.held) * p.a_bytes, M * K * N / (m * CORES) * b
    channel = max(a_reads, b_reads) / p.columns / (r.channel_gb_s.value * 1e9)
    host = (r.chained_dispatch_us if chained else r.dispatch_us).value * 1e-6
    return Times(
        core / hertz,
        stream / hertz,
        channel,
        (a_reads + b_reads + writes) / (r.ddr_gb_s.value * 1e9),
        drain / hertz,
        host + r.dispatch_cycles.value / hertz,
    )


# --- published measurements


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and its modelled value."""

    name: str
    source: str
    tile: tuple[int, int, int]
    measured: float
    modelled: float
    unit: str
    fitted: bool

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1

    @property
    def stock(self) -> bool:
        """Of the design that mlir-aie ships, on which nothing of the model was fitted."""
        return self.source == "stock"


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    return tomli.loads(MEASURED.read_text())


def rows() -> list[Row]:
    """Every published measurement, the fitted ones first."""
    table, found = measured(), []
    runs = [{**sweep, **run} for sweep in table["sweep"] for run in sweep["runs"]]
    for kind, given in (("kernel", table["kernel"]), ("array", table["array"]), ("array", runs)):
        for m in given:
            sheet = table["source"][m["source"]]["sheet"]
            p = Product(
                tuple(m["tile"]), tuple(m.get("size", m["tile"])), m["input"], m["output"], issue=m.get("issue", 1.0)
            )
            name = f"{m['input']} -> {m['output']} {'x'.join(map(str, m['tile']))}"
            if kind == "kernel":
                got, unit, value = prod(p.tile) / step_cycles(p, rates(sheet)), "MAC/cycle", m["macs"]
            else:
                name += f", {'x'.join(map(str, m['size']))}"
                got, unit, value = 2 * prod(p.size) / run_times(p, rates(sheet)).total / 1e12, "TOPS", m["tops"]
            found.append(Row(name, m["source"], p.tile, value, got, unit, m.get("fit", False)))
    return sorted(found, key=lambda row: (row.stock, not row.fitted))


def slower(m: int = 1, n: int = 1) -> tuple[float, float]:
    """How many times as long as modelled runs of mlir-aie's own design took, the least and the most, with tiles of at
    least m rows and n columns of C."""
    ratios = [1 + row.error for row in rows() if row.stock and row.tile[0] >= m and row.tile[2] >= n]
    return min(ratios), max(ratios)


def fit() -> dict[str, float]:
    """accumulate_cycles and accumulate_cycles_per_byte from two kernels, ddr_gb_s from a run that memory bounds."""
    table = measured()
    one, two = (k for k in table["kernel"] if k.get("fit"))
    (array,) = (a for a in table["array"] if a.get("fit"))
    extra = []
    for k in (one, two):
        m, _, n = k["tile"]
        extra.append((prod(k["tile"]) / k["macs"] - prod(k["tile"]) / prod(MMUL[k["input"]][:3])) / (m * n))
    per_byte = (extra[1] - extra[0]) / (BYTES[two["output"]] - BYTES[one["output"]])
    r = rates(table["source"][array["source"]]["sheet"])
    p = Product(tuple(array["tile"]), tuple(array["size"]), array["input"], array["output"])
    t = run_times(p, r)
    seconds = 2 * prod(p.size) / (array["tops"] * 1e12) - t.tail - t.dispatch
    return {
        "accumulate_cycles": extra[0] - per_byte * BYTES[one["output"]],
        "accumulate_cycles_per_byte": per_byte,
        "ddr_gb_s": t.ddr * r.ddr_gb_s.value / seconds,
    }


def residuals() -> str:
    lines = [f"{'published measurement':<52}{'source':<9}{'measured':>10}{'modelled':>10}{'error':>8}  "]
    for row in rows():
        lines.append(
            f"{row.name:<52}{row.source:<9}{row.measured:>10.2f}{row.modelled:>10.2f}{row.error:>+8.1%}  {row.unit}"
            f"{', fitted' if row.fitted else ', beside the fit' if row.stock else ', predicted'}"
        )
    held = [abs(row.error) for row in rows() if not row.fitted and not row.stock]
    lines.append(f"{len(held)} predicted: mean error {sum(held) / len(held):.1%}, largest {max(held):.1%}")
    lines += provenance()
    return "\n".join([*lines, *(f"{name}: {s['text']}" for name, s in measured()["source"].items())])


def provenance() -> list[str]:
    """Summary of the predictions, and their limits."""
    held = [row for row in rows() if not row.fitted and not row.stock]
    stock = [1 + row.error for row in rows() if row.stock]
    given = [k for kind in ("kernel", "array") for k in measured()[kind] if "issue" in k]
    paper = [row for row in held if row.source == "taka"]
    (least, most), (low, high) = slower(), slower(64, 64)
    return [
        f"The design that mlir-aie ships, {len(stock)} runs: {least:.2f} to {most:.2f} times as long as modelled, in the middle "
        f"{median(stock):.2f}; with tiles of 64 rows and 64 columns {low:.2f} to {high:.2f}. Not modelled: "
        "short reads of A from memory, a floor for each object, loads that meet in a bank.",
        f"{len(paper)} of the {len(held)} are tables of one paper, with which the three fitted ones were measured too: kernels "
        "scheduled as that paper's, products of about 4096 cubed.",
        f"The other {len(given)} take their issue rate as an input, read off the same kernel's listing: they check the rest of the "
        "model, not that rate.",
        f"No product of this project's shapes has been measured. Its tables take the open compiler's rate, {ISSUE['i8']} for int8 "
        f"and {ISSUE['bf16']} for bfloat16; between that and 1 a time bound by cores is uncertain by {1 / ISSUE['i8'] - 1:.0%} and "
        f"{1 / ISSUE['bf16'] - 1:.0%}.",
    ]


def designs() -> str:
    from hybrid.kernels.npu.designs import shipped

    lines = [
        f"modelled, never measured, at {rates().clock_ghz.value} GHz: {'design':<20}{'ms':>9}{'TOPS':>7}  bound by"
    ]
    for name, make in shipped().items():
        f = make().facts
        if "K" in f:
            p = Product(
                (f["m"], f["k"], f["n"]),
                (f["M"], f["K"], f["N"]),
                name.rsplit(".", 1)[1] if name.endswith(tuple(BLOCKS)) else "i8",
                "f32" if name.endswith(tuple(BLOCKS)) else "i32",
                make().columns,
                ISSUE["i8"],
            )
            t = run_times(replace(p, held=f["repeat"]), rates())
            lines.append(f"{'':<39}{name:<20}{1e3 * t.total:>9.3f}{2 * prod(p.size) / t.total / 1e12:>7.2f}  {t.bound}")
    return "\n".join(lines)
