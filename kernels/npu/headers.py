"""python -m kernels.npu.headers PATH: compile every tile kernel against a checkout of aie_api, with g++ and stubbed
intrinsics.

hostapi/ is this project's reading of aie_api; this module checks the kernels against the real headers: every call
exists with those types, and no static assertion fails. Nothing runs. The core's intrinsics, which only the
NPU's compiler has, are declared as functions that take and return anything: their names are read off the compiler's own
errors (hostapi/intrinsics.h has the types). So an error inside of aie_api that names such a stub says nothing, and is
counted apart. PATH is a checkout of Xilinx/aie_api, or include/ of the mlir_aie wheel. Nothing of it is copied.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hybrid.cli import Parser, run
from hybrid.kernels.npu.build import PEANO_FLAGS
from hybrid.kernels.npu.catalogue import AIE, entries
from hybrid.kernels.npu.compile import HOSTAPI, define, gxx

STUBS = HOSTAPI / "intrinsics.h"
# AIE2, and a version of its model whose features mlir-aie's compiler has: concatenation of 128 bits, byte shifts,
# bfloat16. Peano defines __AIENGINE__ by itself; what the build defines beside it counts here too.
FLAGS = (
    "-std=c++20",
    "-D__AIE_ARCH__=20",
    "-D__AIE_MODEL_VERSION__=10500",
    "-D__AIENGINE__",
    *(flag for flag in PEANO_FLAGS if flag.startswith("-D")),
    "-fsyntax-only",
    "-fpermissive",
    "-fmax-errors=0",
    "-w",
)
ROUNDS = 8
# What g++ says of a name that the NPU's compiler would know; constants are in capitals.
UNKNOWN = (
    r"error: ‘::(\w+)’ has not been declared",
    r"there are no arguments to ‘(\w+)’ that depend on a template parameter",
    r"error: ‘((?:__aie|__builtin|chess_|get_|set_|undef_)\w*)’ was not declared in this scope",
)
CONSTANT = r"error: ‘((?:T\d+_|rnd_|D?INTLV_|OP_TERM_)\w*|[A-Z][A-Z0-9]*_[A-Z0-9_]*)’ was not declared in this scope"
STUBBED = ("any_value", "reg<", "make_array_helper", "tuple_element", "class template argument deduction failed")


@dataclass(frozen=True, slots=True)
class Found:
    """What compiling one source showed."""

    source: Path
    errors: tuple[str, ...]
    """In the kernel, or in aie_api for a reason that is not a stub's."""
    set_aside: int
    """Errors inside of aie_api that name a stub."""


def headers_of(path: Path) -> Path:
    """The folder that has aie_api/aie.hpp: PATH or PATH/include. FileNotFoundError without it."""
    for folder in (path, path / "include"):
        if (folder / "aie_api" / "aie.hpp").exists():
            return folder.resolve()
    raise FileNotFoundError(f"{path}: no aie_api/aie.hpp in it or in its include/: it is no checkout of Xilinx/aie_api")


def stubs(include: Path, work: Path) -> Path:
    """intrinsics.h and a declaration for every intrinsic that aie_api names: compiled until nothing new is unknown."""
    header, unit = work / "stubs.h", work / "unit.cc"
    unit.write_text("#include <aie_api/aie.hpp>\n")
    functions, constants = set[str](), set[str]()
    for _ in range(ROUNDS):
        declared = [f"template <class... A> any_value {f}(A &&...);" for f in sorted(functions)]
        declared += [f"constexpr int {c} = 0;" for c in sorted(constants)]
        header.write_text("\n".join([STUBS.read_text(), *declared, ""]))
        said = _compile(unit, header, [include])
        found = {name for pattern in UNKNOWN for name in re.findall(pattern, said)} - functions
        numbers = set(re.findall(CONSTANT, said)) - constants
        if not found and not numbers:
            return header
        functions |= found
        constants |= numbers
    raise RuntimeError(f"{include}: aie_api names ever more intrinsics after {ROUNDS} rounds")


def held_against(include: Path, sources: Iterable[Path] | None = None) -> list[Found]:
    """Every kernel's source (or `sources`), with the default macros, against those headers."""
    found = []
    macros = {e.source: e.values({}) for e in entries().values()}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        header = stubs(include, work)
        (work / "utils").mkdir()  # of hostapi only the loop hints: aie_api is to come from the checkout
        (work / "utils" / "aie_kernel_utils.h").write_text((HOSTAPI / "aie_kernel_utils.h").read_text())
        for source in sources if sources is not None else sorted(macros):
            options = define(macros.get(source, {}))
            found.append(
                judged(source, _compile(source, header, [include, work / "utils", source.parent, AIE], options))
            )
    return found


def judged(source: Path, said: str) -> Found:
    """The compiler's errors on a source, those apart that are a stub's."""
    errors, aside = [], 0
    for line in said.splitlines():
        where, is_error, what = line.partition(" error: ")
        if not is_error:
            continue
        inside = "aie_api/" in where
        if inside and any(name in what for name in STUBBED):
            aside += 1
        else:
            errors.append(f"{where[where.rfind('aie_api/') if inside else where.rfind('/') + 1 :]} {what}")
    return Found(source, tuple(dict.fromkeys(errors)), aside)


def _compile(source: Path, header: Path, include: list[Path], options: Iterable[str] = ()) -> str:
    paths = [word for folder in include for word in ("-I", str(folder))]
    command = [gxx(), *FLAGS, *options, "-include", str(header), *paths, str(source)]
    return subprocess.run(
        command, capture_output=True, text=True, env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    ).stderr


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m kernels.npu.headers",
        description="Compile the NPU's tile kernels against a checkout of aie_api.",
    )
    p.add_argument(
        "path", type=Path, metavar="PATH", help="a checkout of Xilinx/aie_api, or include/ of the mlir_aie wheel"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _main(args.path))


def _main(path: Path) -> int:
    wrong = 0
    for found in held_against(headers_of(path)):
        print(f"{found.source.name}: {len(found.errors)} errors, {found.set_aside} of the stubs set aside")
        print("".join(f"  {error}\n" for error in found.errors), end="")
        wrong |= bool(found.errors)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
