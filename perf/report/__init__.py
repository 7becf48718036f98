"""A static page of all speed figures and pictures, or the measured tables as Markdown.

    python -m perf.report                 # build/report/index.html and *.svg
    python -m perf.report --markdown      # the tables of perf/records, printed

Measured: perf/records (device, driver, clock, commit and command under each). Modelled: perf.roofline on a device
sheet. The peer's figures come from perf/report/peer.toml and are named. Nothing is measured here; --gates also runs the
gates.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, run
from hybrid.cli.progress import tracked
from hybrid.core.errors import SpecError
from hybrid.perf.isa import TABLES, check, committed
from hybrid.perf.record.schema import Record, load_records, newest, slug
from hybrid.perf.report.measured import markdown
from hybrid.perf.report.pictures import by_commit, kernel_chart, shares, speedups, versus, where_time_goes
from hybrid.perf.report.tables import (
    Table,
    ablation,
    ablations,
    load_peer,
    measured,
    ordered,
    profile,
    profiles,
    table,
    what,
)
from hybrid.perf.roofline.model import estimate
from hybrid.perf.roofline.pictures import roofline_page
from hybrid.perf.svg import Chart, page
from hybrid.perf.targets import judge, load_targets
from hybrid.perf.targets.search import model_of
from hybrid.spec.devicesheet import find_sheet

MODEL, DEVICE = "gemma3-27b", "radeon-780m"
STYLE = Path(__file__).with_name("report.css")
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'


def html(found: Table, marked: Sequence[str] = ()) -> str:
    """`marked`: columns whose cells are HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        shown = [c if tag == "td" and found.heads[i] in marked else escape(c) for i, c in enumerate(cells)]
        return "".join(f"<{tag}{' class=n' if i in found.numbers else ''}>{c}</{tag}>" for i, c in enumerate(shown))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in found.rows)
    return f'<div class="wide"><table><tr>{line(found.heads, "th")}</tr>{body}</table></div>'


def tag(text: str, kind: str) -> str:
    return f'<span class="tag {kind}">{escape(text)}</span>'


MEASURED, MODELLED, COMPILED = tag("measured", "yes"), tag("modelled", "by"), tag("compiled", "by")


class Report:
    """Collects sections and the pictures beside them."""

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        self.folder, self.records = folder, records
        self.pictures: dict[str, str] = {}
        self.parts: list[str] = []
        self.titles: list[str] = []

    def picture(self, name: str, svg: str) -> str:
        self.pictures[f"{name}.svg"] = svg
        return f'<figure id="{name}">{svg}</figure>'

    def charts(self, name: str, charts: Sequence[Chart], columns: int = 2) -> str:
        return self.picture(name, page(charts, columns)) if charts else ""

    def section(self, title: str, kind: str, note: str, body: str) -> None:
        self.titles.append(title)
        self.parts.append(
            f'<section id="{slug(title)}"><h2>{escape(title)} {kind}</h2><p class="note">{note}</p>{body}</section>'
        )

    # ------------------------------------------------------------------------------------------------------ sections
    def measured(self) -> None:
        peer = load_peer()
        for device in sorted({r.device for r in self.records}):
            found = ordered(newest(self.records, device))
            if found:
                beside = versus(found, peer)
                charts = [*by_commit(self.records, device), *shares(found), *beside]
                body = self.charts(f"measured-{slug(device)}", charts) + html(measured(self.records, device))
                note = "Ceiling: modelled from the device's sheet. Probe: the run's own copy (decode) or matrix product (prefill)."
                if beside:
                    note += f" Peer: {escape(peer.name)}, {escape(peer.source)}."
                self.section(device, MEASURED, note, body + self.sources(device))
            self.profiles(device)
            self.ablations(device)
        if not self.records:
            heads = ("model", "type", "phase", "B", "context", f"{peer.name}, tok/s")
            rows = [
                (f.model, f.dtype, f.phase, str(f.batch), str(f.context), f"{f.tokens_per_second:,.1f}")
                for f in peer.figure
            ]
            note = (
                f"No run of ours is kept yet (python -m perf.campaign, perf.record). The peer: {escape(peer.source)}."
            )
            self.section(
                f"Measured on {peer.device}", MEASURED, note, html(table(heads, rows, ("model", "type", "phase")))
            )

    def sources(self, device: str) -> str:
        """Where the figures of a device come from."""
        own = [r for r in self.records if r.device == device]
        lines = [
            f"<li><code>{r.commit[:9]}</code>, {r.date}: {escape(r.driver)}; clock {escape(r.clock)}; <code>{r.kernels}</code>, "
            f"{r.conformance.passed} cases proved by <code>{escape(r.conformance.command)}</code></li>"
            for r in own
        ]
        made = dict.fromkeys(c for r in own for c in r.commands())
        lines += [f"<li><code>{escape(command)}</code></li>" for command in made]
        return f"<details><summary>sources: {len(own)} records, {len(made)} commands</summary><ul>{''.join(lines)}</ul></details>"

    def profiles(self, device: str) -> None:
        for _, one in profiles(self.records, device):
            matrix = f" and {one.matrix_tflops:,.0f} TFLOPS" if one.matrix_tflops else ""
            note = "Device time by timestamps after every step. Floor: what the declared bytes and operations take at the rates of "
            note += f"this run's probes, {one.copy_gb_s:,.0f} GB/s{matrix}; lost: above it. <code>{escape(one.command)}</code>"
            body = self.charts(f"profile-{slug(device)}-{slug(what(one))}", where_time_goes(one, device)) + html(
                profile(one)
            )
            self.section(f"Where the time goes: {what(one)}", MEASURED, note, body)

    def ablations(self, device: str) -> None:
        for _, one in ablations(self.records, device):
            note = f"{escape(device)}: one sequence decodes after {one.depth} positions with and without each optimisation, in turn; "
            note += (
                f"medians of {one.pairs} pairs, and the least and most that a pair showed. Speed-ups do not multiply. "
            )
            note += f"<code>{escape(one.command)}</code>"
            body = self.charts(f"ablation-{slug(device)}-{slug(one.model)}", [speedups(one, device)], 1) + html(
                ablation(one)
            )
            self.section(f"Speed-up of each optimisation: {one.model} {one.dtype}", MEASURED, note, body)

    def modelled(self) -> None:
        sheet = find_sheet(DEVICE)
        model = model_of(MODEL, "q4_0", sheet)
        works = [model.decode(b, 256) for b in (1, 8, 32)]
        body = self.picture("roofline", roofline_page(model, sheet, works, 256))
        note = f"From the plan's declared costs and the sheet of {escape(sheet.device.name)}; this project was never measured there."
        self.section("Roofline of the target machine", MODELLED, note, body)

    def targets(self) -> None:
        sheet, device, rows = find_sheet(DEVICE), load_peer().device, []
        for t in load_targets():
            j = judge(t, sheet, device)
            rows.append((j.target, tag(j.shown, j.verdict.split()[0]), j.modelled, j.bound, j.how, j.measured))
        heads = ("target", "on the APU", "modelled", "bound", "how", f"measured, {device}")
        note = "Verdicts follow from the roofline: expected speed reaches it (yes), only the ceiling does (borderline), or neither;"
        note += " or it is reached with something that does not exist here yet (needs)."
        self.section("Targets", MODELLED, note, html(table(heads, rows, heads), ("on the APU",)))

    def gates(self, ran: Sequence[tuple[str, list[Any]]] | None) -> None:
        rows: list[tuple[str, str, str]] = []
        for group, findings in ran or ():
            state = tag("differs", "no") if findings else tag("holds", "yes")
            rows.append((group, state, "; ".join(str(f) for f in findings[:8])))
        charts = []
        for path in sorted(TABLES.glob("*.json")):
            kernels, version = committed(path.stem), path.stem
            verdicts = check(kernels, version)
            state = tag("broken", "no") if verdicts.broken else tag("kept", "yes")
            reasons = dict.fromkeys(line.partition(" (")[2].removesuffix(")") for line in verdicts.excused)
            said = "; ".join(verdicts.broken[:6]) or f"{len(verdicts.excused)} excused: {'; '.join(reasons)}"
            rows.append((f"gfx1103 rules, Mesa {version}, {len(kernels)} kernels", state, said))
            charts.append(kernel_chart(kernels, version))
        heads = ("gate", "state", "what differs, or is excused and why")
        body = self.charts("gfx1103", charts, 1) + html(table(heads, rows, heads), ("state",))
        note = "Every kernel compiled for the Radeon 780M (gfx1103) by RADV's null device. Registers bound how many waves hide "
        note += "memory's latency; hollow points spill."
        self.section("Gates", COMPILED, note, body)

    def cards(self) -> str:
        sheet = find_sheet(DEVICE)
        model = model_of(MODEL, "q4_0", sheet)
        one, many = (estimate(model.decode(b, 256), sheet, "expected").tokens_per_second for b in (1, 32))
        mine = [r for _, r in newest(self.records, load_peer().device) if r.model == MODEL]
        alone = max((r.tokens_per_second for r in mine if r.phase == "decode" and r.batch == 1), default=None)
        prompt = max((r.tokens_per_second for r in mine if r.phase == "prefill"), default=None)
        kernels = sum(len(committed(p.stem)) for p in TABLES.glob("*.json"))
        cards = (
            (f"{alone:,.0f} tok/s" if alone else "-", f"27B on the {load_peer().device}, one sequence", MEASURED),
            (f"{prompt:,.0f} tok/s" if prompt else "-", f"27B on the {load_peer().device}, prompts", MEASURED),
            (f"{one:.1f} tok/s", "27B Q4_0 on the 780M, one sequence", MODELLED),
            (f"{many:.0f} tok/s", "the same, 32 sequences together", MODELLED),
            (f"{kernels:,}", "kernels for gfx1103, gated", COMPILED),
        )
        made = "".join(f'<div class="card"><b>{a}</b><span>{escape(b)}</span>{kind}</div>' for a, b, kind in cards)
        return f'<div class="cards">{made}</div>'

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, svg in self.pictures.items():
            (self.folder / name).write_text(svg, encoding="utf-8")
        links = "".join(f'<a href="#{slug(t)}">{escape(t)}</a>' for t in self.titles)
        intro = f"<h1>Hybrid Kernels: speed</h1><p class=note>Every figure is {MEASURED} (a run, on a named device), {MODELLED} (from "
        intro += f"a device sheet) or {COMPILED} (a compiler's own numbers), and says which.</p>"
        path = self.folder / "index.html"
        path.write_text(
            f"{HEAD}<title>Hybrid Kernels: speed</title><style>{STYLE.read_text()}</style><main>{intro}{self.cards()}"
            f"<nav>{links}</nav>{''.join(self.parts)}</main></html>\n",
            encoding="utf-8",
        )
        return path


def build(folder: Path, records: Sequence[Record], gates: Sequence[tuple[str, list[Any]]] | None = None) -> Path:
    """Write the page and its pictures; returns the page."""
    report = Report(folder, records)
    sections = (report.measured, report.modelled, report.targets, lambda: report.gates(gates))
    for section in tracked(sections, "sections"):
        section()
    return report.write()


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.report",
        description="One static page: speed, profiles, ablation, roofline, targets, gates.",
    )
    p.add_argument(
        "--out", type=Path, default=Path("build") / "report", metavar="DIR", help="where it goes (build/report)"
    )
    p.add_argument("--gates", action="store_true", help="run the gates and show their state")
    p.add_argument("--markdown", action="store_true", help="instead: print the tables of perf/records as Markdown")
    return p


def _main(args: argparse.Namespace) -> int:
    if args.markdown:
        print(markdown(load_records()))
        return 0
    ran: list[tuple[str, list[Any]]] | None = None
    if args.gates:
        from hybrid.perf.gate import check as check_group
        from hybrid.perf.gate import groups

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
