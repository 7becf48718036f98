"""Measured runs, kept: perf/records/*.json, one file for each device and commit.

    python -m pytest -n 0 conformance/test_ops.py --junitxml=proof.xml     # on the device
    python -m hybrid.bench --random gemma3-27b --json > bench.json             # on the device
    python -m perf.record bench.json --proof proof.xml --clock "not locked"    # here, on the commit that ran

A run is taken in only with the conformance result of the same kernels on the same device, and only if it is possible: a
speed above the ceiling that perf.roofline gives its device is a mistake in the measurement, and is refused.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hybrid.cli import Parser, run
from hybrid.spec.devicesheet import sheet_for
from hybrid.spec.errors import SpecError
from hybrid.spec.load import ROOT, Model
from hybrid.spec.model import load_models
from perf.roofline import estimate
from perf.work import load_sizes, subject

RECORDS = Path(__file__).resolve().parent / "records"
MANIFEST = ROOT / "kernels" / "vulkan" / "spirv" / "manifest.json"
SLACK = 1.02  # clocks of host and device differ by less


class Proof(Model):
    """The conformance run that stands behind a record."""

    command: str
    passed: Annotated[int, Field(gt=0)]
    failed: Literal[0]
    """A record of kernels that failed is none."""
    kernels: str
    """Digest of the SPIR-V manifest that was proved (kernels_digest)."""


class Run(Model):
    """One measured speed. decode: tokens per second of all sequences together; prefill: prompt tokens per second."""

    model: str
    dtype: str
    phase: Literal["decode", "prefill"]
    batch: Annotated[int, Field(gt=0)] = 1
    context: Annotated[int, Field(ge=0)] = 0
    """Positions that each sequence held before (prefill: tokens of the prompt)."""
    tokens_per_second: Annotated[float, Field(gt=0)]
    precision: Literal["auto", "exact", "fast"] = "auto"
    note: str = ""


class Record(Model):
    """One file of perf/records."""

    schema_version: Literal[1] = Field(alias="schema")
    device: str
    """As the device names itself."""
    driver: Annotated[str, Field(min_length=1)]
    clock: str
    """What is known of the device's clocks during the run."""
    host: str = ""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}(\+changes)?$")]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    command: Annotated[str, Field(min_length=1)]
    kernels: str
    """Digest of the SPIR-V manifest that ran."""
    conformance: Proof
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _validate_proof(self) -> Record:
        if self.conformance.kernels != self.kernels:
            raise ValueError("conformance.kernels: the kernels that were proved are not those that ran: prove these first")
        for i, one in enumerate(self.runs):
            most = ceiling_of(one, self.device)
            if most is not None and one.tokens_per_second > most * SLACK:
                raise ValueError(
                    f"runs.{i}.tokens_per_second: {one.tokens_per_second:g} is above what {self.device} allows, {most:.4g}: "
                    "the measurement is wrong, or the sheet in specs/devices is"
                )
        return self


def kernels_digest() -> str:
    """Of the SPIR-V in this tree: which kernels a result is about."""
    return hashlib.sha256(MANIFEST.read_bytes()).hexdigest()[:16]


def ceiling_of(one: Run, device: str) -> float | None:
    """Modelled upper limit of a run on a device; None where the model or the device has no sheet."""
    sheet = sheet_for(device)
    if sheet is None or sheet.peak.bandwidth_gb_s is None or one.model not in {**load_models(), **load_sizes()}:
        return None
    model = subject(one.model, one.dtype, precision=one.precision, capabilities=sheet.limits.capabilities)
    context = max(one.context, 32)
    if one.phase == "decode":
        return estimate(model.decode(one.batch, context), sheet, "ceiling").tokens_per_second
    return estimate(model.work("prefill", context, 1, context, 1), sheet, "ceiling").tokens_per_second


def load_record(path: Path) -> Record:
    """SpecError naming file and field for one that may not be kept."""
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None


@lru_cache(maxsize=4)
def load_records(folder: Path = RECORDS) -> tuple[Record, ...]:
    """All records, oldest first."""
    return tuple(sorted((load_record(p) for p in folder.glob("*.json")), key=lambda r: (r.date, r.commit)))


def file_of(record: Record, folder: Path = RECORDS) -> Path:
    """perf/records/DATE-DEVICE-COMMIT.json"""
    device = "".join(c if c.isalnum() else "-" for c in record.device.lower()).strip("-")
    while "--" in device:
        device = device.replace("--", "-")
    return folder / f"{record.date}-{device}-{record.commit.split('+')[0][:9]}.json"


def add(record: Record, folder: Path = RECORDS) -> Path:
    """Write a record (merged into the file of the same device and commit). Returns the file."""
    path = file_of(record, folder)
    if path.exists():
        before = load_record(path)
        new = {_key(r): r for r in (*before.runs, *record.runs)}
        record = record.model_copy(update={"runs": tuple(new.values())})
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record.model_dump(by_alias=True, mode="json"), indent=1) + "\n", encoding="utf-8")
    load_records.cache_clear()
    return path


def _key(one: Run) -> tuple[object, ...]:
    return one.model, one.dtype, one.phase, one.batch, one.context, one.precision


def runs(device: str, model: str, phase: str, records: Iterable[Record] | None = None) -> list[tuple[Record, Run]]:
    """Runs of a model on devices whose name contains `device`, newest record of each configuration only."""
    newest: dict[tuple[object, ...], tuple[Record, Run]] = {}
    for record in load_records() if records is None else records:
        if device in record.device:
            newest.update({_key(r): (record, r) for r in record.runs if r.model == model and r.phase == phase})
    return list(newest.values())


def nearest_run(device: str, model: str, kind: str, want: float | None) -> str | None:
    """The recorded run that says most about a target, as text; None where nothing was recorded."""
    phase = "prefill" if kind == "first_token" else "decode"
    found = runs(device, model, phase)
    if kind == "token_time":
        found = [f for f in found if f[1].batch == 1]
    if not found:
        return None
    enough = [f for f in found if want is None or kind != "speed" or f[1].tokens_per_second >= want]
    record, one = min(enough, key=lambda f: f[1].batch) if enough else max(found, key=lambda f: f[1].tokens_per_second)
    shown = f"{1e3 * one.context / one.tokens_per_second:.0f} ms for {one.context} tokens" if kind == "first_token" else ""
    shown = shown or (f"{1e3 / one.tokens_per_second:.1f} ms" if kind == "token_time" else f"{one.tokens_per_second:.4g} tok/s")
    return f"{shown} ({record.device}, {one.dtype}, B={one.batch}, context {one.context}, {record.commit[:9]})"


# --------------------------------------------------------------------------------------------------------------- taking in
def proof_of(path: Path, device: str) -> Proof:
    """What a JUnit file of the suite proves. SpecError where anything failed, or it is about another device."""
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    said = {p.get("name"): p.get("value", "") for p in suite.iter("property")}
    count = {k: int(suite.get(k, "0")) for k in ("tests", "failures", "errors", "skipped")}
    missing = {"device", "kernels", "command"} - said.keys()
    if missing:
        raise SpecError(f"{path}: does not say its {', '.join(sorted(missing))}: run the suite with --junitxml and -n 0")
    if count["failures"] or count["errors"]:
        raise SpecError(f"{path}: {count['failures'] + count['errors']} tests failed: what is not right is not recorded")
    if re.search(r"pytest.* (-k|--deselect|--lf|-m)\b|::", str(said["command"])):
        raise SpecError(f"{path}: {said['command']} ran a selection: a proof is the whole of conformance/test_ops.py")
    if device not in str(said["device"]):
        raise SpecError(f"{path}: proves kernels on {said['device']}, but the run was on {device}")
    passed = count["tests"] - count["skipped"]
    return Proof(command=str(said["command"]), passed=passed, failed=0, kernels=str(said["kernels"]))


def run_of(bench: Mapping[str, Any], result: Mapping[str, Any]) -> Run:
    """One result of hybrid.bench. A model that was cut (--layers, --vocab) is not called by its sheet's name."""
    name = str(bench["model"]).removesuffix(" (random)")
    cut = re.findall(r"--(layers|vocab)[ =](\d+)", bench["command"])
    name += "".join(f", {key} {value}" for key, value in cut)
    precision = re.search(r"--precision[ =](\w+)", bench["command"])
    prompt = result["phase"] == "prefill"
    return Run(
        model=name,
        dtype=bench["precision"]["weights"][0],
        phase=result["phase"],
        batch=result["batch"],
        context=result["depth"] + (result["n"] if prompt else 0),
        tokens_per_second=result["tokens_per_second"],
        precision=precision[1] if precision else "auto",  # type: ignore[arg-type]
        note=f"{result['test']}; weights {'/'.join(bench['precision']['weights'])}, {bench['weights_bytes'] / 1e9:.2f} GB",
    )


def take(bench: Mapping[str, Any], proof: Proof, commit: str, clock: str, date: str) -> Record:
    """A record of one `hybrid.bench --json`. SpecError for one that reports errors of its own."""
    if bench["errors"]:
        raise SpecError(f"the bench says itself that it is wrong: {'; '.join(bench['errors'])}")
    inner = re.search(r"\((.*)\)$", bench["device"])
    return Record(
        schema=1,
        device=inner[1] if inner else bench["device"],
        driver=bench["driver"],
        clock=clock,
        commit=commit,
        date=date,
        command=bench["command"],
        kernels=proof.kernels,
        conformance=proof,
        runs=tuple(run_of(bench, r) for r in bench["results"]),
    )


def commit_here() -> str:
    """The commit that is checked out, with `+changes` where tracked files differ from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode == 0
    return head if clean else f"{head}+changes"


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m perf.record", description="Keep runs of hybrid.bench whose kernels were proved on the same device.")
    p.add_argument("bench", nargs="+", type=Path, metavar="BENCH.json", help="output of python -m hybrid.bench --json")
    p.add_argument("--proof", type=Path, required=True, metavar="FILE", help="--junitxml of the conformance suite on that device")
    p.add_argument("--clock", required=True, metavar="TEXT", help="what is known of the device's clocks")
    p.add_argument("--commit", metavar="ID", help="the commit that ran (the one checked out)")
    p.add_argument("--date", metavar="DAY", help="when, as 2026-11-21 (today)")
    return p


def _main(args: argparse.Namespace) -> int:
    commit, date = args.commit or commit_here(), args.date or datetime.date.today().isoformat()
    for path in args.bench:
        bench = json.loads(path.read_text(encoding="utf-8"))
        name = re.sub(r"^vulkan:\d+ \(|\)$", "", bench["device"])
        print(add(take(bench, proof_of(args.proof, name), commit, args.clock, date)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
