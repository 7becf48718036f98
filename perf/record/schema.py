"""Schema of measured runs: perf/records/*.json, one file per device and commit.

    python -m perf.record bench.json ablate.json profile.json --proof proof.xml --clock "not locked"

takes in what `hybrid.bench`, `perf.ablate` and `perf.profile` printed with --json (perf.record.taking; `python -m
perf.campaign` makes all of it on a device). A record is kept only with the conformance result of the same kernels on
the same device, and only if it is possible: a speed above the ceiling that perf.roofline gives its device is a mistake
in the measurement, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from hybrid.core.errors import SpecError
from hybrid.perf.roofline.model import estimate
from hybrid.perf.roofline.work import subject
from hybrid.spec.devicesheet import sheet_for
from hybrid.spec.load import Model
from hybrid.spec.model import load_models

RECORDS = Path(__file__).resolve().parent.parent / "records"
SLACK = 1.02  # clocks of host and device differ by less
Phase = Literal["decode", "prefill"]
Command = Annotated[str, Field(min_length=1)]


class Proof(Model):
    """The conformance run that stands behind a record."""

    command: str
    passed: Annotated[int, Field(gt=0)]
    failed: Literal[0]
    """A record of kernels that failed is none."""
    kernels: str
    """Digest of the SPIR-V manifest that was proved."""


class Run(Model):
    """One measured speed. decode: tokens per second of all sequences together; prefill: prompt tokens per second."""

    model: str
    dtype: str
    phase: Phase
    batch: Annotated[int, Field(gt=0)] = 1
    context: Annotated[int, Field(ge=0)] = 0
    """Positions that each sequence held before (prefill: those and the tokens of the prompt)."""
    tokens_per_second: Annotated[float, Field(gt=0)]
    """Median of the repetitions."""
    spread: float = 0.0
    """Their standard deviation."""
    precision: Literal["auto", "exact", "fast"] = "auto"
    schedule: str = ""
    tokens_per_submit: int = 1
    share: float | None = None
    """Share of the same run's probe: of the copy in decode, of the matrix product in prefill."""
    host_us: float | None = None
    dispatches: float = 0.0
    """Of a pass."""
    note: str = ""
    command: Command

    @property
    def key(self) -> tuple[object, ...]:
        """A later run of the same replaces an earlier one."""
        return (
            self.model,
            self.dtype,
            self.phase,
            self.batch,
            self.context,
            self.precision,
            self.schedule,
            self.tokens_per_submit,
        )


class Speedup(Model):
    """One optimisation: seconds of a token with and without it (medians), the least and largest ratio of a pair."""

    name: str
    summary: str
    with_it: Annotated[float, Field(gt=0)]
    without: Annotated[float, Field(gt=0)]
    low: float
    high: float

    @property
    def times(self) -> float:
        """How many times faster a token is with it."""
        return self.without / self.with_it


class Ablation(Model):
    """Results of perf.ablate for one model."""

    model: str
    dtype: str
    depth: int
    tokens: int
    pairs: int
    speedups: Annotated[tuple[Speedup, ...], Field(min_length=1)]
    command: Command

    @property
    def key(self) -> tuple[object, ...]:
        return self.model, self.dtype, self.depth


class OpTime(Model):
    """All steps of one operation in a pass: device time, and time at the probes' rates."""

    op: str
    calls: int
    us: float
    nbytes: int
    flops: int
    floor_us: float


class Profile(Model):
    """Where the device time of a token, or of a prompt, went (perf.profile)."""

    model: str
    dtype: str
    phase: Phase
    context: int
    batch: int = 1
    """Sequences in a pass."""
    copy_gb_s: float
    matrix_tflops: float | None
    host_us: float
    ops: Annotated[tuple[OpTime, ...], Field(min_length=1)]
    command: Command

    @property
    def key(self) -> tuple[object, ...]:
        return self.model, self.dtype, self.phase, self.context, self.batch


class Record(Model):
    """One file of perf/records."""

    schema_version: Literal[1] = Field(alias="schema")
    device: str
    """As the device names itself."""
    driver: Annotated[str, Field(min_length=1)]
    clock: str
    """The device's clock settings during the run."""
    host: str = ""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}(\+changes)?$")]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2})?$")]
    """A day, or a minute (UTC) where the order within the day is of interest."""
    kernels: str
    """Digest of the SPIR-V manifest that ran."""
    conformance: Proof
    runs: tuple[Run, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    profiles: tuple[Profile, ...] = ()

    def commands(self) -> list[str]:
        """Provenance of the figures."""
        return [
            *(r.command for r in self.runs),
            *(p.command for p in self.profiles),
            *(a.command for a in self.ablations),
        ]

    @model_validator(mode="after")
    def _validate_proof(self) -> Record:
        if self.conformance.kernels != self.kernels:
            raise ValueError(
                "conformance.kernels: the kernels that were proved are not those that ran: prove these first"
            )
        if not (self.runs or self.ablations or self.profiles):
            raise ValueError("runs: there are neither runs nor ablations nor profiles: nothing was measured")
        for i, one in enumerate(self.runs):
            most = ceiling_of(one, self.device)
            if most is not None and one.tokens_per_second > most * SLACK:
                raise ValueError(
                    f"runs.{i}.tokens_per_second: {one.tokens_per_second:g} is above what {self.device} allows, {most:.4g}: "
                    "the measurement is wrong, or the sheet in specs/devices is"
                )
        return self


@lru_cache(maxsize=256)
def ceiling_of(one: Run, device: str) -> float | None:
    """Modelled upper limit of a run on a device; None where the model or the device has no sheet."""
    sheet = sheet_for(device)
    if sheet is None or sheet.peak.bandwidth_gb_s is None or one.model not in load_models():
        return None
    model = subject(one.model, one.dtype, precision=one.precision, capabilities=sheet.limits.capabilities)
    context = max(one.context, 32)
    rows, outs, slots = (one.batch,) * 3 if one.phase == "decode" else (context, 1, 1)
    return estimate(
        model.work(one.phase, rows, outs, context, slots, counted=False), sheet, "ceiling"
    ).tokens_per_second


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


def slug(text: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`"""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def file_of(record: Record, folder: Path = RECORDS) -> Path:
    """perf/records/DATE-DEVICE-COMMIT.json"""
    return folder / f"{record.date[:10]}-{slug(record.device)}-{record.commit.split('+')[0][:9]}.json"


def add(record: Record, folder: Path = RECORDS) -> Path:
    """Write a record (merged into the file of the same device and commit). Returns the file."""
    path = file_of(record, folder)
    if path.exists():
        before = load_record(path)
        if before.kernels != record.kernels:
            raise SpecError(
                f"{path}: holds runs of kernels {before.kernels}, these are of {record.kernels}: commit them first"
            )
        joined = {
            field: tuple({one.key: one for one in (*getattr(before, field), *getattr(record, field))}.values())
            for field in ("runs", "ablations", "profiles")
        }
        record = record.model_copy(update=joined)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record.model_dump(by_alias=True, mode="json"), indent=1) + "\n", encoding="utf-8")
    load_records.cache_clear()
    return path


def newest(records: Iterable[Record], device: str) -> list[tuple[Record, Run]]:
    """The last run of each configuration on devices whose name contains `device`."""
    found: dict[tuple[object, ...], tuple[Record, Run]] = {}
    for record in records:
        if device in record.device:
            found.update({one.key: (record, one) for one in record.runs})
    return [found[key] for key in sorted(found, key=str)]


def nearest_run(device: str, model: str, kind: str, want: float | None) -> str | None:
    """The recorded run that says most about a target, as text; None where nothing was recorded. speed: the fewest
    sequences that reach it, else the fastest run; first_token: the longest prompt within the time, else the shortest;
    anything else: the fastest single sequence."""
    phase = "prefill" if kind == "first_token" else "decode"
    found = [f for f in newest(load_records(), device) if (f[1].model, f[1].phase) == (model, phase)]
    if kind not in ("speed", "first_token"):
        found = [f for f in found if f[1].batch == 1]
    if not found:
        return None
    fastest = max(found, key=lambda f: f[1].tokens_per_second)
    if kind == "first_token":
        within = [f for f in found if want is None or f[1].context / f[1].tokens_per_second <= want]
        record, one = max(within, key=lambda f: f[1].context) if within else min(found, key=lambda f: f[1].context)
        shown = f"{1e3 * one.context / one.tokens_per_second:.0f} ms for {one.context} tokens"
    elif kind == "token_time":
        record, one = fastest
        shown = f"{1e3 / one.tokens_per_second:.1f} ms"
    else:
        enough = [f for f in found if want is not None and f[1].tokens_per_second >= want]
        record, one = min(enough, key=lambda f: (f[1].batch, -f[1].tokens_per_second)) if enough else fastest
        shown = f"{one.tokens_per_second:.4g} tok/s"
    return f"{shown} ({record.device}, {one.dtype}, B={one.batch}, context {one.context}, {record.commit[:9]})"
