"""Make a device's whole record: the proof of its kernels, then benches, profiles and ablation.

    python -m perf.campaign --device vulkan                  # build/campaign/*.json, and what to keep them with
    python -m perf.campaign --only proof '1b-*'              # a small device
    python -m perf.campaign --list                           # the commands, to be run by hand

The commands are those of perf/campaign.toml, each in a process of its own. What was made before is kept: a campaign
that was stopped resumes. No git is needed on the device; perf.record takes the files in where the commit
is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.cli import Parser, UsageError, positive, run
from hybrid.cli.progress import progress_bar
from hybrid.core.places import ROOT, clone
from hybrid.spec.load import Model, load_toml

FILE = Path(__file__).with_name("campaign.toml")
PROOF = "proof.xml"


class Step(Model):
    """One command, as `python -m` takes it."""

    name: str
    command: Annotated[str, Field(min_length=1)]

    @property
    def prints(self) -> bool:
        """Does it print the JSON that is kept?"""
        return self.command.endswith("--json")

    def made(self, out: Path) -> Path:
        return out / (f"{self.name}.json" if self.prints else PROOF)

    def arguments(self, out: Path, device: str, jobs: int) -> list[str]:
        return shlex.split(self.command.format(out=shlex.quote(str(out)), device=device, jobs=jobs))


class Campaign(Model):
    schema_version: Literal[1] = Field(alias="schema")
    step: tuple[Step, ...]


def chosen(patterns: Sequence[str]) -> Iterator[Step]:
    """Steps whose name fits a pattern (all without any). UsageError for a pattern that none fits."""
    steps = load_toml(FILE, Campaign).step
    for pattern in patterns:
        if not any(fnmatch(s.name, pattern) for s in steps):
            raise UsageError(f"--only {pattern}: there are {', '.join(s.name for s in steps)}")
    yield from (s for s in steps if not patterns or any(fnmatch(s.name, p) for p in patterns))


def perform(step: Step, out: Path, device: str, jobs: int) -> None:
    """Run one step; its file appears when it has ended well. RuntimeError with its last words."""
    env = {**os.environ, "HYBRID_VULKAN_DEVICE": device, "HYBRID_REQUIRE_VULKAN": "1"}
    made, command = step.made(out), [sys.executable, "-m", *step.arguments(out, device, jobs)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise RuntimeError(f"{step.name}: python -m {shlex.join(command[2:])} ended with {done.returncode}: {said}")
    if step.prints:
        made.write_text(done.stdout, encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m perf.campaign",
        description="Prove, bench, profile and ablate on this device: what a record needs.",
    )
    p.add_argument("--device", default="vulkan", metavar="NAME", help="vulkan or vulkan:N (vulkan)")
    p.add_argument(
        "--out", type=Path, default=Path("build") / "campaign", metavar="DIR", help="where it goes (build/campaign)"
    )
    p.add_argument(
        "--only", nargs="+", default=[], metavar="STEP", help="these steps of perf/campaign.toml, such as '1b-*' (all)"
    )
    p.add_argument(
        "--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes of the proof (all cores)"
    )
    p.add_argument("--again", action="store_true", help="also what was made before")
    p.add_argument("--list", action="store_true", help="print the commands; run nothing")
    return p


def _main(args: argparse.Namespace) -> int:
    out, steps = args.out.resolve(), list(chosen(args.only))
    if args.list:
        for step in steps:
            end = f" > {shlex.quote(str(step.made(out)))}" if step.prints else ""
            print(f"python -m {shlex.join(step.arguments(out, args.device, args.jobs))}{end}")
        return 0
    if not all(step.prints for step in steps):
        clone("the proof runs conformance/ops/test_ops.py, which is")
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar(len(steps), "campaign", False, "step") as advance:
        for step in steps:
            if args.again or not step.made(out).exists():
                perform(step, out, args.device, args.jobs)
            print(f"{step.name}: {step.made(out)}", flush=True)
            advance(1)
    files = " ".join(shlex.quote(str(s.made(out))) for s in steps if s.prints)
    print(f"\nkeep them, on the commit that ran: python -m perf.record {out / PROOF} {files} --clock 'WHAT IS KNOWN'")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


if __name__ == "__main__":
    sys.exit(main())
