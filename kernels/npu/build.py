"""python -m kernels.npu.build [NAME ... | --for MODEL | --list [MODEL]] [--out FOLDER] [--sim]: build designs
into the files that a runtime loads.

For an NPU: kernels by Peano (llvm-aie's clang), IRON source to MLIR by mlir-aie, xclbin and instruction stream by
aiecc. If a tool is missing, the message names it and nothing is built. --sim makes the files of sim-npu1 instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid.cli import Parser, UsageError, positive, run
from hybrid.kernels.npu.artefact import ArtefactError, encode, stem, stream_digest, write
from hybrid.kernels.npu.artefact import find as find_built
from hybrid.kernels.npu.catalogue import AIE, find
from hybrid.kernels.npu.check import check, npu_limits
from hybrid.kernels.npu.compile import cache_folder, define
from hybrid.kernels.npu.design import Design, Kernel, Move
from hybrid.kernels.npu.emitter import emit
from hybrid.kernels.npu.iron import MANIFEST, IronError, check_program, installed, manifest

# Flags of mlir-aie's own compilation for AIE2 (python/utils/compile/utils.py). The last one stands for a header that
# aie_api includes for AMD's own compiler alone: Peano defines __AIENGINE__ too, and has no <adf.h>.
PEANO_FLAGS = (
    "-O2",
    "-std=c++20",
    "--target=aie2-none-unknown-elf",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
    "-DNDEBUG",
    "-D__AIE_API_AIE_ADF_HPP__",
)
# Dynamic object fifos: attention's loops over key tiles count to numbers in memory, so their buffers cannot be
# unrolled. iron.toml has what only some releases need.
AIECC_FLAGS = ("--get-xclbin", "--get-npu-insts", "--get-core-elfs", "--dynamic-objFifos")


CORE_FRAME = 256
"""Bytes of stack left to the program that calls a core's kernels."""


@dataclass(frozen=True, slots=True)
class Tools:
    clang: Path
    aiecc: Path
    include: Path
    """The wheel's include folder: aie_api, and aie_kernels with aie_kernel_utils.h."""
    peano: Path
    api: Mapping[str, Any] = field(default_factory=manifest)
    """Signatures of the installed package, that emitted programs are bound to before they run."""
    release: str = ""
    """Of the installed package, one of iron.toml's [build]."""


def tools() -> tuple[Tools | None, list[str]]:
    """The toolchain, or what of it is missing and where it comes from."""
    missing = []
    release = manifest()
    root, importable = _mlir_aie()
    peano = _peano()
    api: Mapping[str, Any] = release
    version = _version()
    if root is None:
        missing.append(f"Python package `aie` ({release['release']}): pip install mlir_aie -f {release['wheels']}")
    elif not importable:
        missing.append(f"Python package `aie` on the path: set PYTHONPATH={root / 'python'}, which has it")
    else:
        try:
            api = installed()
        except IronError as error:
            missing.append(str(error))
        if version not in release["build"]:
            missing.append(
                f"mlir_aie {' or '.join(release['build'])} ({version or 'no version'} is installed): its flags are in "
                f"{MANIFEST.name}, [build]: pip install mlir_aie=={release['tag'][1:]} -f {release['wheels']}"
            )
    aiecc = _aiecc(root)
    if aiecc is None:
        missing.append("aiecc.py on PATH: it is in the same wheel (mlir_aie/bin)")
    if peano is None:
        missing.append(
            f"Peano, clang++ for AIE2: pip install llvm-aie=={release['build'][release['tag'][1:]]['peano']} -f https://github.com/Xilinx/llvm-aie/releases/expanded_assets/nightly, "
            "or set PEANO_INSTALL_DIR"
        )
    include = root / "include" if root and (root / "include" / "aie_api" / "aie.hpp").exists() else None
    if include is None:
        missing.append("aie_api headers: mlir_aie/include/aie_api of the wheel")
    elif not (include / "aie_kernels" / "aie_kernel_utils.h").exists():
        missing.append(f"aie_kernel_utils.h: {include / 'aie_kernels'} of the wheel lacks it")
    if missing or peano is None or aiecc is None or include is None:
        return None, missing
    return Tools(peano / "bin" / "clang++", aiecc, include, peano, api, version), []


def _version() -> str:
    """The installed release of mlir-aie; empty where no wheel of it is."""
    try:
        return importlib.metadata.version("mlir_aie")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mlir_aie() -> tuple[Path | None, bool]:
    """The folder mlir_aie of the wheel (python/aie, include, bin); can `aie` be imported?"""
    for name in ("aie", "mlir_aie"):
        spec = importlib.util.find_spec(name)
        for found in map(Path, (spec.submodule_search_locations or []) if spec else []):
            root = found.parents[1] if name == "aie" else found
            if (root / "python" / "aie").is_dir():
                return root, name == "aie"
    return None, False


def _aiecc(root: Path | None) -> Path | None:
    places = [Path(p) for p in map(shutil.which, ("aiecc.py", "aiecc")) if p]
    places += [root / "bin" / name for name in ("aiecc.py", "aiecc")] if root else []
    return next((p for p in places if p.exists()), None)


def _peano() -> Path | None:
    given = os.environ.get("PEANO_INSTALL_DIR")
    spec = importlib.util.find_spec("llvm-aie")
    places = [Path(given)] if given else [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return next((p for p in places if (p / "bin" / "clang++").exists()), None)


def frame_bytes(usage: str, entries: Collection[str]) -> dict[str, int]:
    """The most stack that each entry point of an object can take, by the text of its .su file
    (`file:line:column:function TAB bytes TAB kind`): its own frame and those of every function that is no entry point.
    No kernel calls itself."""
    frames: dict[str, int] = {}
    for line in filter(None, usage.splitlines()):
        where, size, kind = line.split("\t")
        if "dynamic" in kind and "bounded" not in kind:
            raise RuntimeError(f"{where}: its frame has no bound")
        frames[where] = int(size)
    entry = {name: frames.pop(w) for name in entries for w in list(frames) if w.endswith(f":{name}")}
    return {name: own + sum(frames.values()) for name, own in entry.items()}


def compiler(t: Tools) -> str:
    """What Peano says it is: its version and the commit of llvm-aie."""
    return _tool(t.peano, str(t.clang), "--version").splitlines()[0]


def unpinned(t: Tools, found: str) -> str:
    """Why the compiler is not the one that the release was made with; empty where it is."""
    pin = manifest()["build"][t.release].get("peano")
    if pin is None:
        return f'{found}: {MANIFEST.name}, [build."{t.release}"], has no `peano` to compare it with'
    return "" if pin.partition("+")[2] in found else f"{found}: mlir-aie {t.release} is made with llvm-aie {pin}"


def program_bytes(elf: bytes) -> int:
    """Program memory that a linked core takes, from address 0 to the end of its code. ValueError for no such ELF."""
    if elf[:6] != b"\x7fELF\x01\x01":
        raise ValueError("not an ELF of 32 bits, little-endian")
    (at,), (size, count) = struct.unpack_from("<I", elf, 32), struct.unpack_from("<HH", elf, 46)
    headers = (struct.unpack_from("<6I", elf, at + i * size) for i in range(count))
    code = [address + n for _, _, flags, address, _, n in headers if flags & 6 == 6]  # in memory, and executed
    if not code:
        raise ValueError("no section of it is code")
    return max(code)


def build_sim(design: Design, folder: Path) -> None:
    """Files of sim-npu1: the emitted program, and the sequence as data. SpecError where the design is over a limit."""
    check(design).demand()
    write(folder, design, "sim-npu1", emit(design).encode(), encode(design))


def build_npu(design: Design, folder: Path, t: Tools) -> None:
    """xclbin and instruction stream. SpecError where the design is over a limit, RuntimeError with a tool's last
    words."""
    check(design).demand()
    work = folder / f"{stem(design)}.work"
    work.mkdir(parents=True, exist_ok=True)
    for kernel in {k.object: k for k in design.kernels}.values():
        entry = find(kernel.name)
        _tool(
            work,
            str(t.clang),
            *PEANO_FLAGS,
            *define(dict(kernel.macros)),
            "-I",
            str(t.include),
            "-I",
            str(t.include / "aie_kernels"),
            "-I",
            str(AIE),
            "-fstack-usage",
            "-c",
            str(entry.source),
            "-o",
            kernel.object,
        )
        _frames(design, kernel, work)
    program = emit(design)
    check_program(program, t.api)
    (work / "design.py").write_text(program)
    (work / "design.mlir").write_text(_tool(work, sys.executable, "design.py"))
    _tool(
        work,
        str(t.aiecc),
        *AIECC_FLAGS,
        *manifest()["build"][t.release]["aiecc"],
        f"--peano={t.peano}",
        "--xclbin-name=design.xclbin",
        "--npu-insts-name=design.bin",
        "design.mlir",
    )
    _fits(design, work)
    builder = f"mlir-aie {t.release}, {compiler(t)}"
    write(folder, design, builder, (work / "design.xclbin").read_bytes(), (work / "design.bin").read_bytes())


def _fits(design: Design, work: Path) -> None:
    """Every linked core against the program memory: mlir-aie's linker script allows eight times as much.
    RuntimeError where one is too long."""
    cores = {p.name: p for p in work.rglob("elfs_*.elf")}  # aiecc keeps a copy among its intermediate files
    if len(cores) != len(design.workers):
        raise RuntimeError(f"{work}: aiecc wrote {len(cores)} linked cores (elfs_*.elf) of {len(design.workers)}")
    limit = npu_limits().core.program_bytes
    assert limit is not None
    for path in cores.values():
        try:
            found = program_bytes(path.read_bytes())
        except ValueError as error:
            raise RuntimeError(f"{path}: {error}") from None
        if found > limit.value:
            raise RuntimeError(f"{path}: {found} bytes of program, a core has {limit.value}")


def _frames(design: Design, kernel: Kernel, work: Path) -> None:
    """The frames of an object against the stacks of the workers that call it. RuntimeError where one is too deep."""
    written = (work / kernel.object).with_suffix(".su")
    if not written.exists():
        raise RuntimeError(
            f"{kernel.object}: the compiler wrote no {written.name}: its frames are unknown (-fstack-usage)"
        )
    of = [k.name for k in design.kernels if k.object == kernel.object]
    for name, deepest in frame_bytes(written.read_text(), of).items():
        stack = min(w.stack_bytes for w in design.workers if any(b.name == name for _, b in w.binds))
        if deepest + CORE_FRAME > stack:
            raise RuntimeError(
                f"{kernel.object}: {name} takes up to {deepest} bytes of stack and the core's program {CORE_FRAME}, its worker has "
                f"{stack}: it would grow into the tile's buffers"
            )


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
    p.add_argument(
        "--list", nargs="?", const="", metavar="MODEL", help="print the designs' names, or what a model needs, and stop"
    )
    p.add_argument(
        "--for", dest="model", metavar="MODEL", help="build what a model needs: a file, or a name of specs/models"
    )
    p.add_argument(
        "--schedule", default="gemma3-hybrid", metavar="NAME", help="with a MODEL: its schedule (gemma3-hybrid)"
    )
    p.add_argument(
        "--ctx", type=positive, metavar="N", help="with a MODEL: positions of a sequence (the model's, at most 4096)"
    )
    p.add_argument("--slots", type=positive, metavar="N", help="with a MODEL: sequences at a time (as hybrid.load has)")
    p.add_argument("--chunk", type=positive, metavar="N", help="with a MODEL: rows of a prefill pass (512)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args))


def _of_model(args: argparse.Namespace, model: str) -> dict[str, Callable[[], Design]]:
    """What the plans of a model need: a name (fabric, and the sizes of the sequence) -> its maker."""
    from hybrid.kernels.npu.needed import designs

    engine = importlib.import_module(
        "hybrid.engine.loading"
    )  # only a command may import upper layers; the backend does not
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
    return "\n".join(
        [*lines, f"{len(makers)} instruction streams of {len(fabrics)} fabrics; {built} built in {folder}"]
    )


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
    if found is not None and (other := unpinned(found, compiler(found))):
        print(f"note: {other}; it is recorded with what is built", file=sys.stderr)
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
