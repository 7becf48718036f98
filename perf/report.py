"""One static page of everything that is known about speed, with its pictures.

    python -m perf.report                 # build/report/index.html and *.svg

Measured: perf/records (device, driver, clock, commit and command under each). Modelled: perf.roofline on a device
sheet. The peer's figures come from perf/peer.toml and are named. Nothing is measured here; --gates also runs the gates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.cli import Parser, run
from hybrid.spec.devicesheet import find_sheet
from hybrid.spec.errors import SpecError
from hybrid.spec.load import ROOT, Model, load_toml
from perf.isa import TABLES, check, committed
from perf.pictures import roofline_page
from perf.record import Record, Run, ceiling_of, load_records
from perf.report_pictures import by_commit, kernel_chart, shares, versus
from perf.search import model_of
from perf.svg import Chart, page
from perf.targets import judge, load_targets

PEER = Path(__file__).with_name("peer.toml")
MODEL, DEVICE = "gemma3-27b", "radeon-780m"
STYLE = Path(__file__).with_name("report.css")


class Figure(Model):
    model: str
    dtype: str
    phase: Literal["decode", "prefill"]
    batch: int = 1
    context: int = 0
    tokens_per_second: Annotated[float, Field(gt=0)]


class Peer(Model):
    schema_version: Literal[1] = Field(alias="schema")
    name: str
    device: str
    source: str
    figure: tuple[Figure, ...]


def load_peer() -> Peer:
    return load_toml(PEER, Peer)


def newest(records: Iterable[Record], device: str) -> list[tuple[Record, Run]]:
    """The last run of each configuration on devices whose name contains `device`."""
    found: dict[tuple[object, ...], tuple[Record, Run]] = {}
    for record in records:
        if device in record.device:
            found.update({(r.model, r.dtype, r.phase, r.batch, r.context, r.precision): (record, r) for r in record.runs})
    return [found[key] for key in sorted(found, key=str)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{c}</{tag}>" for i, c in enumerate(cells))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(heads, 'th')}</tr>{body}</table>"


def section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'


class Report:
    """Collects sections and the pictures beside them."""

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        self.folder, self.records = folder, records
        self.pictures: dict[str, str] = {}
        self.parts: list[str] = []

    def picture(self, name: str, svg: str) -> str:
        self.pictures[f"{name}.svg"] = svg
        return svg

    def charts(self, name: str, charts: Sequence[Chart], columns: int = 2) -> str:
        return self.picture(name, page(charts, columns)) if charts else "<p>Nothing was recorded yet.</p>"

    # ------------------------------------------------------------------------------------------------------ sections
    def measured(self) -> None:
        peer = load_peer()
        for device in sorted({r.device for r in self.records}):
            found = newest(self.records, device)
            beside = peer.figure if peer.device in device else ()
            rows, pairs = [], []
            for record, one in found:
                theirs = next((f for f in beside if _same(f, one)), None)
                most = ceiling_of(one, record.device)
                share = f"{100 * one.tokens_per_second / most:.0f} %" if most else "-"
                rows.append(
                    (
                        escape(one.model),
                        one.dtype,
                        one.phase,
                        str(one.batch),
                        str(one.context),
                        f"{one.tokens_per_second:,.1f}",
                        f"{most:,.0f}" if most else "-",
                        share,
                        f"{theirs.tokens_per_second:,.1f}" if theirs else "-",
                        f"<code>{record.commit[:9]}</code>",
                    )
                )
                if theirs:
                    pairs.append((one, theirs.tokens_per_second))
            heads = ("model", "type", "phase", "B", "context", "tok/s", "ceiling", "share", "peer", "commit")
            body = table(heads, rows, (3, 4, 5, 6, 7, 8))
            charts = [*by_commit(self.records, device), *shares(found), *versus(pairs, peer.name)]
            slug = "".join(c if c.isalnum() else "-" for c in device.lower())
            body += self.charts(f"measured-{slug}", charts)
            sources = sorted({(r.driver, r.clock, r.command, r.conformance.passed) for r, _ in found})
            body += "".join(
                f"<p><small>{escape(d)}; clock {escape(c)}; {n} cases proved; <code>{escape(k)}</code></small></p>"
                for d, c, k, n in sources
            )
            note = "Measured. Ceiling: modelled from the device's sheet."
            if beside:
                note += f" Peer: {peer.name}, {peer.source}."
            self.parts.append(section(device, note, body))
        if not self.records:
            figures = [
                (f.model, f.dtype, f.phase, str(f.batch), str(f.context), f"{f.tokens_per_second:,.1f}") for f in peer.figure
            ]
            body = table(("model", "type", "phase", "B", "context", f"{peer.name}, tok/s"), figures, (3, 4, 5))
            note = f"No run of ours is kept yet (python -m perf.record). The peer: {peer.source}."
            self.parts.append(section(f"Measured on {peer.device}", note, body))

    def modelled(self) -> None:
        sheet = find_sheet(DEVICE)
        model = model_of(MODEL, "q4_0", sheet)
        works = [model.decode(b, 256) for b in (1, 8, 32)]
        body = self.picture("roofline", roofline_page(model, sheet, works, 256))
        note = (
            f"Modelled from the plan's declared costs and the sheet of {sheet.device.name}; this project was never measured there."
        )
        self.parts.append(section("Roofline of the target machine", note, body))

    def targets(self) -> None:
        sheet, rows = find_sheet(DEVICE), []
        for t in load_targets():
            j = judge(t, sheet, load_peer().device)
            tag = f'<span class="tag {j.verdict.split()[0]}">{j.verdict}</span>'
            rows.append((escape(j.target), tag, escape(j.modelled), escape(j.bound), f"{escape(j.how)}", escape(j.measured)))
        body = table(("target", "on the APU", "modelled", "bound", "how", f"measured, {load_peer().device}"), rows)
        self.parts.append(
            section(
                "Targets",
                "Verdicts follow from the roofline: expected speed reaches it (yes), only the ceiling does (borderline).",
                body,
            )
        )

    def gates(self, ran: Sequence[tuple[str, list[Any]]] | None) -> None:
        rows: list[tuple[str, str, str]] = []
        for group, findings in ran or ():
            tag = f'<span class="tag {"no" if findings else "yes"}">{"differs" if findings else "holds"}</span>'
            rows.append((group, tag, "<br>".join(escape(str(f)) for f in findings[:8])))
        charts = []
        for path in sorted(TABLES.glob("*.json")):
            kernels, version = committed(path.stem), path.stem
            verdicts = check(kernels, version)
            tag = f'<span class="tag {"no" if verdicts.broken else "yes"}">{"broken" if verdicts.broken else "kept"}</span>'
            worst = "<br>".join(escape(v) for v in (*verdicts.broken, *verdicts.excused)[:6])
            rows.append((f"gfx1103 rules, Mesa {version}, {len(kernels)} kernels", tag, worst))
            charts.append(kernel_chart(kernels, version))
        body = table(("gate", "state", "what differs, or is excused"), rows) + self.charts("gfx1103", charts, 1)
        note = "gfx1103: compiled for the Radeon 780M by RADV's null device. Registers bound how many waves hide memory's latency."
        self.parts.append(section("Gates", note, body))

    def cards(self) -> str:
        sheet = find_sheet(DEVICE)
        model = model_of(MODEL, "q4_0", sheet)
        from perf.roofline import estimate

        one, many = (estimate(model.decode(b, 256), sheet, "expected").tokens_per_second for b in (1, 32))
        runs = [r for _, r in newest(self.records, "H200") if r.phase == "decode" and r.model == MODEL]
        best = max((r.tokens_per_second for r in runs), default=None)
        kernels = sum(len(committed(p.stem)) for p in TABLES.glob("*.json"))
        cards = (
            (f"{one:.1f} tok/s", "27B Q4_0 on the 780M, one sequence, modelled"),
            (f"{many:.0f} tok/s", "the same, 32 sequences, modelled"),
            (f"{best:,.0f} tok/s" if best else "-", "27B on the H200, best batch, measured"),
            (str(kernels), "kernels compiled for gfx1103 and gated"),
        )
        return '<div class="cards">' + "".join(f'<div class="card"><b>{a}</b><span>{b}</span></div>' for a, b in cards) + "</div>"

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, svg in self.pictures.items():
            (self.folder / name).write_text(svg, encoding="utf-8")
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        intro = "<h1>Hybrid Kernels: speed</h1><p class=note>Every figure is measured (a run, on a named device) or modelled "
        intro += "(from a device sheet), and says which.</p>"
        path = self.folder / "index.html"
        path.write_text(
            f"{head}<title>Hybrid Kernels: speed</title><style>{STYLE.read_text()}</style><main>{intro}{self.cards()}"
            f"{''.join(self.parts)}</main></html>\n",
            encoding="utf-8",
        )
        return path


def _same(figure: Figure, one: Run) -> bool:
    near = figure.context == one.context or (figure.phase == "decode" and max(figure.context, one.context) <= 512)
    return near and (figure.model, figure.dtype, figure.phase, figure.batch) == (one.model, one.dtype, one.phase, one.batch)


def build(folder: Path, records: Sequence[Record], gates: Sequence[tuple[str, list[Any]]] | None = None) -> Path:
    """Write the page and its pictures; returns the page."""
    report = Report(folder, records)
    report.measured()
    report.modelled()
    report.targets()
    report.gates(gates)
    return report.write()


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m perf.report", description="One static page: measured speed, roofline, targets, gates.")
    p.add_argument("--out", type=Path, default=ROOT / "build" / "report", metavar="DIR", help="where it goes (build/report)")
    p.add_argument("--gates", action="store_true", help="run the gates and show their state")
    return p


def _main(args: argparse.Namespace) -> int:
    ran: list[tuple[str, list[Any]]] | None = None
    if args.gates:
        from perf.gate import check as check_group
        from perf.gate import groups

        ran = []
        for group in groups():
            try:
                ran.append((group, list(check_group(group)[0])))
            except SpecError as error:
                ran.append((group, [str(error)]))
    print(build(args.out, load_records(), ran))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
