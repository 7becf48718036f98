"""python -m kernels.npu.build [NAME ... | --for MODEL | --list [MODEL]] [--out FOLDER] [--sim]: designs into what a runtime loads.

For an NPU: kernels by Peano (llvm-aie's clang), IRON source to MLIR by mlir-aie, xclbin and instruction stream by aiecc.
What of these is missing is said, exactly, and nothing is built. --sim makes the files of sim-npu1 instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, UsageError, positive, run
from hybrid.kernels.npu.artefact import ArtefactError, encode, stem, stream_digest, write
from hybrid.kernels.npu.artefact import find as find_built
from hybrid.kernels.npu.catalogue import AIE, find
from hybrid.kernels.npu.check import check, npu_limits
from hybrid.kernels.npu.compile import cache_folder, define
from hybrid.kernels.npu.design import Design, Move
from hybrid.kernels.npu.emitter import emit
from hybrid.kernels.npu.iron import IronError, check_program, installed, manifest

# Flags of mlir-aie's own examples for AIE2 (programming_examples/makefile-common, PEANOWRAP2_FLAGS).
PEANO_FLAGS = (
    "-O2",
    "-std=c++20",
    "--target=aie2-none-unknown-elf",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
    "-DNDEBUG",
)
# Dynamic object fifos: attention's loops over key tiles count to numbers in memory, so their buffers cannot be unrolled.
AIECC_FLAGS = (
    "--aie-generate-xclbin",
    "--aie-generate-npu-insts",
    "--no-compile-host",
    "--no-xchesscc",
    "--no-xbridge",
    "--dynamic-objFifos",
)


@dataclass(frozen=True, slots=True)
class Tools:
    clang: Path
    size: Path
    aiecc: Path
    include: Path
    peano: Path
    api: Mapping[str, Any] = field(default_factory=manifest)
    """Signatures of the installed package, that emitted programs are bound to before they run."""


def tools() -> tuple[Tools | None, list[str]]:
    """The toolchain, or what of it is missing and where it comes from."""
    missing = []
    release = manifest()
    spec = importlib.util.find_spec("aie")
    root = Path(next(iter(spec.submodule_search_locations))).parent if spec and spec.submodule_search_locations else None
    peano = _peano()
    api: Mapping[str, Any] = release
    if root is None:
        missing.append(
            f"Python package `aie` ({release['release']}): pip install mlir_aie -f {release['wheels']} (the wheel of commit "
            f"{release['commit'][:7]}), or build {release['repository']} at {release['commit']}"
        )
    else:
        try:
            api = installed()
        except IronError as error:
            missing.append(str(error))
    aiecc = shutil.which("aiecc.py") or shutil.which("aiecc")
    if aiecc is None:
        missing.append("aiecc.py on PATH: it is in the same wheel (mlir_aie/bin)")
    if peano is None:
        missing.append(
            "Peano, clang++ for AIE2: pip install llvm-aie -f https://github.com/Xilinx/llvm-aie/releases/expanded_assets/nightly, "
            "or set PEANO_INSTALL_DIR"
        )
    include = (
        next((p for p in (root.parent / "mlir_aie" / "include", root / "include") if (p / "aie_api").is_dir()), None)
        if root
        else None
    )
    if include is None:
        missing.append("aie_api headers: include/ of the mlir_aie wheel, or Xilinx/aie_api")
    if missing or peano is None or aiecc is None or include is None:
        return None, missing
    return Tools(peano / "bin" / "clang++", peano / "bin" / "llvm-size", Path(aiecc), include, peano, api), []


def _peano() -> Path | None:
    given = os.environ.get("PEANO_INSTALL_DIR")
    spec = importlib.util.find_spec("llvm-aie")
    places = [Path(given)] if given else [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return next((p for p in places if (p / "bin" / "clang++").exists()), None)


def build_sim(design: Design, folder: Path) -> None:
    """Files of sim-npu1: the emitted program, and the sequence as data. SpecError where the design is over a limit."""
    check(design).demand()
    write(folder, design, "sim-npu1", emit(design).encode(), encode(design))


def build_npu(design: Design, folder: Path, t: Tools) -> None:
    """xclbin and instruction stream. SpecError where the design is over a limit, RuntimeError with a tool's last words."""
    check(design).demand()
    work = folder / f"{stem(design)}.work"
    work.mkdir(parents=True, exist_ok=True)
    for kernel in {k.object: k for k in design.kernels}.values():
        source = find(kernel.name).source
        _tool(
            work,
            str(t.clang),
            *PEANO_FLAGS,
            *define(dict(kernel.macros)),
            "-I",
            str(t.include),
            "-I",
            str(AIE),
            "-c",
            str(source),
            "-o",
            kernel.object,
        )
        text = int(_tool(work, str(t.size), kernel.object).splitlines()[1].split()[0])
        limit = npu_limits().core.program_bytes
        if limit is not None and text > limit.value:
            raise RuntimeError(f"{kernel.object}: {text} bytes of code, a core has {limit.value}")
    program = emit(design)
    check_program(program, t.api)
    (work / "design.py").write_text(program)
    (work / "design.mlir").write_text(_tool(work, sys.executable, "design.py"))
    _tool(
        work,
        str(t.aiecc),
        *AIECC_FLAGS,
        f"--peano={t.peano}",
        "--xclbin-name=design.xclbin",
        "--npu-insts-name=design.bin",
        "design.mlir",
    )
    write(folder, design, manifest()["release"], (work / "design.xclbin").read_bytes(), (work / "design.bin").read_bytes())


def _tool(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} ... in {folder}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def default_folder(sim: bool) -> Path:
    return cache_folder() / ("sim-npu1" if sim else "npu1")


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m kernels.npu.build", description="Build NPU designs: xclbin and instruction streams.")
    p.add_argument("names", nargs="*", metavar="NAME", help="designs (default: all; see --list)")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (default: the cache folder)")
    p.add_argument("--sim", action="store_true", help="build what sim-npu1 runs; needs no toolchain")
    p.add_argument("--list", nargs="?", const="", metavar="MODEL", help="print the designs' names, or what a model needs, and stop")
    p.add_argument("--for", dest="model", metavar="MODEL", help="build what a model needs: a file, or a name of specs/models")
    p.add_argument("--schedule", default="gemma3-hybrid", metavar="NAME", help="with a MODEL: its schedule (gemma3-hybrid)")
    p.add_argument("--ctx", type=positive, metavar="N", help="with a MODEL: positions of a sequence (the model's, at most 4096)")
    p.add_argument("--slots", type=positive, default=1, metavar="N", help="with a MODEL: sequences at a time (1)")
    p.add_argument("--chunk", type=positive, metavar="N", help="with a MODEL: rows of a prefill pass (512)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _of_model(args: argparse.Namespace, model: str) -> dict[str, Callable[[], Design]]:
    """What the plans of a model need: a name (fabric, and the sizes of the sequence) -> its maker."""
    from hybrid.kernels.npu.needed import designs

    engine = importlib.import_module("hybrid.engine.plans")  # a command may use what lies above; the backend imports nothing of it
    found: dict[str, Callable[[], Design]] = {}
    seen: set[Any] = set()
    for plan in engine.plans_of_model(model, args.schedule, args.ctx, args.slots, args.chunk):
        for design in designs(plan, seen):
            found[f"{design.name} {sequence_name(design)}"] = lambda design=design: design  # type: ignore[misc]
    return found


def sequence_name(design: Design) -> str:
    """The sizes that an instruction stream is for, and the digest that its file is named by."""
    facts = design.facts
    sizes = f"{facts['M']}x{facts['K']}x{facts['N']}" if "K" in facts else ""
    if "tiles" in facts:
        size = design.argument("kv").size // (facts["heads"] * facts["tiles"])
        sent = [str(s.size // size) for s in design.sequence if isinstance(s, Move) and s.fifo == "kv_in0"]
        sizes = f"of {facts['tiles']} key tiles {', '.join(sent[: facts['blocks']])} to the blocks of queries"
    return f"({sizes or 'T x H'}: {stream_digest(design)[:12]})"


def listed(makers: Mapping[str, Callable[[], Design]], folder: Path) -> str:
    """A line for each design with whether it is built, and a sum."""
    lines, fabrics, built = [], set(), 0
    for name, make in makers.items():
        fabrics.add(stem(make()))
        try:
            find_built(folder, make())
            built += 1
            lines.append(f"{name}: built")
        except ArtefactError:
            lines.append(f"{name}: not built")
    return "\n".join([*lines, f"{len(makers)} instruction streams of {len(fabrics)} fabrics; {built} built in {folder}"])


def _main(args: argparse.Namespace) -> int:
    from hybrid.kernels.npu.designs import chosen, shipped

    folder = args.out or default_folder(args.sim)
    if args.model is not None and (args.names or args.list is not None):
        raise UsageError("--for MODEL builds what the model needs: no NAME beside it, no --list")
    if args.list == "":
        print("\n".join(shipped()))
        return 0
    if args.list is not None:
        print(listed(_of_model(args, args.list), folder))
        return 0
    makers = chosen(args.names) if args.model is None else _of_model(args, args.model)
    found, missing = (None, []) if args.sim else tools()
    if missing:
        raise RuntimeError(f"no NPU toolchain, nothing was built (--sim needs none). Missing: {'; '.join(missing)}")
    for name, make in makers.items():
        design = make()
        try:
            if found is None:
                build_sim(design, folder)
            else:
                build_npu(design, folder, found)
        except (RuntimeError, ArtefactError) as error:
            raise RuntimeError(f"{name}: {error}") from error
        print(f"{name}: {folder / stem(design)}.xclbin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
