"""Measured runs, kept: perf/records/*.json, one file for each device and commit.

A run is taken in only with the conformance result of the same kernels on the same device, and only if it is possible: a
speed above the ceiling that perf.roofline gives its device is a mistake in the measurement, and is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

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
    model = subject(one.model, one.dtype, precision=one.precision)
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
