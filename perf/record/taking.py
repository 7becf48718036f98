"""Import measurements into a record: the JSON of hybrid.bench, perf.ablate and perf.profile, with the proof of the kernels
that ran (`python -m perf.record`).

The proof is the JUnit file of conformance/ops/test_ops.py, run whole on that device: it names the device and the digest
of the SPIR-V that it proved, which must be the measurement's own and, where the commit is at hand, the commit's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, run
from hybrid.core.errors import SpecError
from hybrid.core.places import ROOT, clone
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.perf.record.schema import Ablation, OpTime, Profile, Proof, Record, Run, Speedup, add

MANIFEST = "kernels/vulkan/spirv/manifest.json"
Made = Mapping[str, Any]
"""A command's --json output."""


def proof_of(path: Path, device: str) -> Proof:
    """The proof in a JUnit file of the suite. SpecError where a test failed, or for another device."""
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    said = {p.get("name"): p.get("value", "") for p in suite.iter("property")}
    count = {k: int(suite.get(k, "0")) for k in ("tests", "failures", "errors", "skipped")}
    missing = {"device", "kernels", "command"} - said.keys()
    if missing:
        raise SpecError(f"{path}: does not say its {', '.join(sorted(missing))}: run the suite with --junitxml")
    if count["failures"] or count["errors"]:
        raise SpecError(
            f"{path}: {count['failures'] + count['errors']} tests failed: what is not right is not recorded"
        )
    command = str(said["command"])
    if re.search(r"pytest.* (-k|--deselect|--lf|-m)\b|::", command) or "test_ops.py" not in command:
        raise SpecError(f"{path}: {command} ran a selection: a proof is the whole of conformance/ops/test_ops.py")
    if device not in str(said["device"]):
        raise SpecError(f"{path}: proves kernels on {said['device']}, but the run was on {device}")
    command = re.sub(r"(--junitxml[= ])\S*/", r"\1", command)  # not where it lay
    return Proof(command=command, passed=count["tests"] - count["skipped"], failed=0, kernels=str(said["kernels"]))


def called(made: Made) -> str:
    """A model that was cut (--layers, --vocab) is not called by its sheet's name."""
    name = str(made["model"]).removesuffix(" (random)")
    return name + "".join(
        f", {key} {value}" for key, value in re.findall(r"--(layers|vocab)[ =](\d+)", made["command"])
    )


def dtype_of(made: Made) -> str:
    """Of a random model the type that was asked for, which its head need not have; of a file all that its matrices
    have."""
    if "--random" in made["command"]:
        asked = re.search(r"--type[ =](\w+)", made["command"])
        return asked[1] if asked else "q4_0"
    return "/".join(made["precision"]["weights"])


def run_of(bench: Made, result: Made) -> Run:
    """One result of hybrid.bench."""
    precision = re.search(r"--precision[ =](\w+)", bench["command"])
    prompt = result["phase"] == "prefill"
    return Run(
        model=called(bench),
        dtype=dtype_of(bench),
        phase=result["phase"],
        batch=result["batch"],
        context=result["depth"] + (result["n"] if prompt else 0),
        tokens_per_second=result["tokens_per_second"],
        spread=result["spread"],
        precision=precision[1] if precision else "auto",  # type: ignore[arg-type]
        schedule=bench["schedule"],
        share=result["share_of_matrix"] if prompt else result["share_of_copy"],
        host_us=result["host_us_per_token"],
        dispatches=result["per_pass"]["dispatches"],
        note=f"{result['test']}; weights {'/'.join(bench['precision']['weights'])}, {bench['weights_bytes'] / 1e9:.2f} GB",
        command=bench["command"],
    )


def ablation_of(made: Made) -> Ablation:
    own = ("name", "summary", "with_it", "without")
    speedups = [
        Speedup(**{key: w[key] for key in own}, low=w["ratios"][0], high=w["ratios"][1]) for w in made["speedups"]
    ]
    return Ablation(
        model=called(made),
        dtype=dtype_of(made),
        depth=made["depth"],
        tokens=made["tokens"],
        pairs=made["pairs"],
        speedups=tuple(speedups),
        command=made["command"],
    )


def profile_of(made: Made) -> Profile:
    fields = OpTime.model_fields
    return Profile(
        model=called(made),
        dtype=dtype_of(made),
        phase=made["phase"],
        context=made["context"],
        batch=made.get("batch", 1),
        copy_gb_s=made["probes"]["copy_gb_s"],
        matrix_tflops=made["probes"]["matrix_tflops"],
        host_us=sum(p["host_us"] for p in made["passes"]),
        ops=tuple(OpTime(**{key: row[key] for key in fields}) for row in made["ops"]),
        command=made["command"],
    )


KINDS: dict[str, tuple[str, Callable[[Made], tuple[Any, ...]]]] = {
    "results": ("runs", lambda made: tuple(run_of(made, r) for r in made["results"])),
    "speedups": ("ablations", lambda made: (ablation_of(made),)),
    "ops": ("profiles", lambda made: (profile_of(made),)),
}
"""The key that tells a command's output -> the record's field, and what goes into it."""


def read(path: Path) -> Made:
    """SpecError for a file that none of the commands printed."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        made = None
    if not isinstance(made, dict) or not any(key in made for key in KINDS):
        raise SpecError(f"{path}: not what hybrid.bench, perf.ablate or perf.profile print with --json")
    return made


def device_of(made: Made) -> str:
    """`vulkan:0 (NVIDIA H200)` -> `NVIDIA H200`"""
    inner = re.search(r"\((.*)\)$", made["device"])
    return inner[1] if inner else str(made["device"])


def take(made: Made, proof: Proof, commit: str, clock: str, date: str) -> Record:
    """A record of one command's output. SpecError for one that reports errors of its own, or of kernels never
    proved."""
    if made.get("errors"):
        raise SpecError(f"the bench says itself that it is wrong: {'; '.join(made['errors'])}")
    if made["kernels"] != proof.kernels:
        raise SpecError(
            f"ran kernels {made['kernels']}, but {proof.kernels} were proved: run {proof.command} on the same tree"
        )
    field, take_in = next(kind for key, kind in KINDS.items() if key in made)
    values: dict[str, Any] = {field: take_in(made)}
    return Record(
        schema=1,
        device=device_of(made),
        driver=made["driver"],
        clock=clock,
        commit=commit,
        date=date,
        kernels=made["kernels"],
        conformance=proof,
        **values,
    )


def commit_here() -> str:
    """The commit that is checked out, with `+changes` where tracked files differ from it."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode == 0
    return head if clean else f"{head}+changes"


def kernels_at(commit: str) -> str | None:
    """Digest of the SPIR-V of a commit; None where the commit is not at hand."""
    shown = subprocess.run(["git", "show", f"{commit}:{MANIFEST}"], cwd=ROOT, capture_output=True, check=False)
    return None if shown.returncode else kernels_digest(shown.stdout)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.record", description="Keep measurements whose kernels were proved on the same device."
    )
    p.add_argument("proof", type=Path, metavar="PROOF", help="--junitxml of conformance/ops/test_ops.py on that device")
    p.add_argument(
        "made", nargs="+", type=Path, metavar="FILE", help="--json of hybrid.bench, perf.ablate, perf.profile"
    )
    p.add_argument(
        "--clock", default="not known", metavar="TEXT", help="what is known of the device's clocks (not known)"
    )
    p.add_argument("--commit", metavar="ID", help="the commit that ran (the one checked out)")
    p.add_argument("--date", metavar="DAY", help="when (UTC), as 2026-11-21 or 2026-11-21T07:33 (now)")
    return p


def _main(args: argparse.Namespace) -> int:
    clone("records are kept in perf/records,")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M")
    commit, date = args.commit or commit_here(), args.date or now
    records = []
    for path in args.made:
        made = read(path)
        try:
            records.append(take(made, proof_of(args.proof, device_of(made)), commit, args.clock, date))
        except ValueError as error:
            raise SpecError(f"{path}: {error}") from None
        of_commit = None if commit.endswith("+changes") else kernels_at(commit)
        if of_commit not in (None, made["kernels"]):
            raise SpecError(
                f"{path}: ran kernels {made['kernels']}; commit {commit[:9]} has {of_commit}: name its own (--commit)"
            )
    for path in dict.fromkeys(add(record) for record in records):  # only when all are fit to be kept
        print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))
