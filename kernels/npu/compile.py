"""The NPU's tile kernels on the host: aie/*.cc compiled by g++ against hostapi/ and called through ctypes.

    gemm = kernel("gemm_i8", DIM_M=32, DIM_K=64, DIM_N=64)     an entry point of aie/*.toml; macros not given: defaults
    gemm(a, b, c)                                              NumPy arrays, in the order of gemm.args; outputs in place
    gemm.counts                                                instructions of the last call by unit (COUNTERS)
    gemm.entry.sizes(gemm.macros), .nbytes(...)                elements and bytes of each array

Arrays: C-contiguous, of the argument's NumPy type (TYPES: bf16 is its 16 bits as uint16, i4x2 bytes of two codes, low
half first) and of exactly the declared number of elements, any shape; they must start at a multiple of 32 bytes, as in
a tile's memory: `buffer(shape, dtype)` makes such arrays. Scalars are ints. Wrong types and sizes raise TypeError or
ValueError; what would go wrong on the core (a misaligned vector, a conversion that does not fit) raises KernelTrap.

A tile keeps its rounding and saturation modes between calls. Every kernel() object has its own: `modes` reads and sets
them (they begin as ("floor", "none"), the core's state after reset). A simulator of several tiles uses one library for
all of them, so it puts the tile's modes there before a call and keeps what it finds after it.

The compiler is what CXX names, or the first g++, c++ or clang++ in PATH that makes a shared library (one that compiles
and cannot link is none), with FLAGS and then the words of CXXFLAGS. It links with GNU's gold where it can, which takes
a tenth of a second less. Libraries are stored in $XDG_CACHE_HOME/hybrid-kernels/npu, named by the digest of everything that
they are made of: the source, its headers, hostapi/, macros, flags, the compiler's version. `digest(name, **macros)` is
the part of it that does not depend on this computer. `options` are further flags of the compiler: SANITISE builds with
AddressSanitizer and UBSan (the process must have their runtimes loaded).
`source=PATH` compiles another text of the kernel (mutations; headers beside it go before those of the folder);
`folder=PATH` takes entry points from another folder of declarations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.core import places
from hybrid.kernels.npu.catalogue import AIE, Arg, Entry, Number, entries, find

HOSTAPI = Path(__file__).resolve().parent / "hostapi"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fno-gnu-unique",
    "-fvisibility=hidden",
)
COMPILERS = ("g++", "c++", "clang++")
LINKERS: tuple[tuple[str, ...], ...] = (("-fuse-ld=gold",), ())
"""Flags that say which linker, the fastest first; none: the compiler's own. A compiler may not work with each that is
here: its files may be where another's linker does not look for them."""
SANITISE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-O0",
)  # -O1 takes three times as long to compile
ROUNDING = (
    "floor",
    "ceil",
    "symmetric_floor",
    "symmetric_ceil",
    "negative_inf",
    "positive_inf",
    "symmetric_zero",
    "symmetric_inf",
    "conv_even",
    "conv_odd",
)
SATURATION = ("none", "saturate", "symmetric")
COUNTERS = (
    "mac_i8",
    "mac_i8i4",
    "mac_i16",
    "mac_bf16",
    "mac_vector",
    "load",
    "store",
    "srs",
    "shuffle",
    "lookup",
    "alu",
)
"""One each: a native aie::mmul of that type; a lane-wise multiply(-accumulate) of 16 bfloat16, 16 int32 or 32 narrower
lanes; a load or store of 256 bits; an accumulator's conversion to 512 bits of vector; a shuffle; 16 table look-ups;
other vector operations of 512 bits."""


class KernelTrap(RuntimeError):
    """What the core would have got wrong."""


class CompileError(RuntimeError):
    """The compiler is missing or refused the source."""


class NoCompiler(CompileError):
    """No C++ compiler that makes shared libraries is here."""


class Kernel:
    """One entry point, compiled. Call it with its arguments in order."""

    def __init__(self, entry: Entry, macros: dict[str, Number], library: ctypes.CDLL) -> None:
        self.entry, self.macros, self.args = entry, macros, dict(entry.args)
        self._counts = (ctypes.c_uint64 * len(COUNTERS))()
        self.modes: tuple[str, str] = (ROUNDING[0], SATURATION[0])
        self._sizes = entry.sizes(macros)
        self._call = library[f"host_{entry.name}"]
        self._call.restype = ctypes.c_char_p
        self._call.argtypes = [ctypes.c_int32 if a.scalar else ctypes.c_void_p for a in self.args.values()] + [
            ctypes.c_void_p
        ] * 2

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def counts(self) -> dict[str, int]:
        """Instructions of the last call by unit."""
        return dict(zip(COUNTERS, self._counts, strict=True))

    def __call__(self, *values: Any) -> None:
        if len(values) != len(self.args):
            raise TypeError(f"{self.name} takes {', '.join(self.args)}; got {len(values)} arguments")
        pairs = zip(self.args.items(), values, strict=True)
        given = [self._scalar(n, v) if a.scalar else self._address(n, a, v) for (n, a), v in pairs]
        modes = (ctypes.c_int32 * 2)(ROUNDING.index(self.modes[0]), SATURATION.index(self.modes[1]))
        trap = self._call(*given, ctypes.addressof(modes), ctypes.addressof(self._counts))
        self.modes = (ROUNDING[modes[0]], SATURATION[modes[1]])
        if trap is not None:
            raise KernelTrap(f"{self.name}: {trap.decode()}")

    def _scalar(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{self.name}: {name} is an int32, not {type(value).__name__}")
        if not -(2**31) <= int(value) < 2**31:
            raise ValueError(f"{self.name}: {name} = {value} does not fit an int32")
        return int(value)

    def _address(self, name: str, arg: Arg, value: Any) -> int:
        if not isinstance(value, np.ndarray) or value.dtype != arg.numpy:
            got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"{self.name}: {name} is an array of {arg.numpy} ({arg.dtype}), not {got}")
        if value.size != self._sizes[name] or not value.flags.c_contiguous:
            raise ValueError(
                f"{self.name}: {name} has {self._sizes[name]} contiguous elements ({arg.size}), got shape {value.shape}"
            )
        if arg.access != "in" and not value.flags.writeable:
            raise ValueError(f"{self.name}: {name} is written, but the array is read-only")
        return int(value.__array_interface__["data"][0])  # .ctypes takes three times as long


def buffer(shape: int | tuple[int, ...], dtype: Any, fill: Any = 0) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes, every element `fill`."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + size].view(dtype).reshape(shape)
    out[...] = fill
    return out


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy of an array that starts at a multiple of 64 bytes."""
    out = buffer(array.shape, array.dtype)
    out[...] = array
    return out


def kernel(
    name: str, *, options: tuple[str, ...] = (), source: Path | None = None, folder: Path = AIE, **macros: Number
) -> Kernel:
    """The entry point `name` with those macros, compiled if the cache does not have it. SpecError for an unknown name
    or macro; NoCompiler without g++, CompileError where the source does not compile."""
    return compiled(find(name, folder), macros, options=options, source=source)


def compiled(
    entry: Entry, macros: Mapping[str, Number], *, options: tuple[str, ...] = (), source: Path | None = None
) -> Kernel:
    """As kernel(), for an entry at hand and macros as a mapping."""
    values = entry.values(macros)
    return Kernel(entry, values, _library(source or entry.source, entry.source, tuple(sorted(values.items())), options))


@lru_cache(maxsize=1024)
def digest(name: str, **macros: Number) -> str:
    """Content hash of a kernel: its source, the headers beside it, its declaration, its macros, as a process first read
    them."""
    entry = find(name)
    return _digest(entry.source, entry.source.with_suffix(".toml").read_text(), sorted(entry.values(macros).items()))


def _digest(source: Path, *more: Any) -> str:
    h = hashlib.sha256()
    included = [source.parent / name for name in re.findall(r'^#include "(\w+\.cc)"', source.read_text(), re.MULTILINE)]
    for path in [source, *included, *sorted(source.parent.glob("*.h"))]:
        h.update(f"{path.name}\0".encode() + path.read_bytes())
    h.update(repr(more).encode())
    return h.hexdigest()


def _candidates() -> list[str]:
    """What may be a C++ compiler, the first choice first: CXX alone if it is set, else COMPILERS in every folder of
    PATH."""
    if named := os.environ.get("CXX"):
        return [found] if (found := shutil.which(named)) else []
    once: dict[str, str] = {}
    for name in COMPILERS:
        for folder in os.get_exec_path():
            if path := shutil.which(name, path=folder):
                once.setdefault(os.path.realpath(path), path)
    return list(once.values())


def _refusal(compiler: str, more: tuple[str, ...]) -> str:
    """Make a shared library of one function, load it and call it: what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        unit, out = Path(folder) / "trial.cc", Path(folder) / "trial.so"
        unit.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
        command = [compiler, *_flags(more), str(unit), "-o", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            said = done.stderr.strip().splitlines() if done.returncode else []
            if done.returncode or ctypes.CDLL(str(out)).answer() != 42:
                return said[0] if said else f"ended with {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return ""


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, str, tuple[str, ...]]:
    """(path, version, flags for its linker) of the first compiler that makes a shared library. NoCompiler where there
    is none, with what each that was tried said."""
    tried = []
    for path in _candidates():
        for linker in LINKERS if shutil.which("ld.gold") else ((),):
            said = _refusal(path, linker)
            if not said:
                version = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, check=True
                ).stdout.splitlines()[0]
                return path, version, linker
            tried.append(f"{' '.join([path, *linker])}: {said}")
    wanted = os.environ.get("CXX")
    none = f"none of {', '.join(COMPILERS)} in PATH" if not wanted else f"not CXX={wanted!r}"
    raise NoCompiler(
        f"NPU kernels run here through a C++ compiler that makes shared libraries, and there is {none}: "
        "on Debian: apt-get install g++ (or set CXX)" + "".join(f"\n  {line}" for line in tried)
    )


def _flags(linker: tuple[str, ...]) -> tuple[str, ...]:
    """FLAGS, the linker's and the environment's own, of which the last counts where several set something."""
    return (*FLAGS, *linker, *shlex.split(os.environ.get("CXXFLAGS", "")))


def gxx() -> str:
    """The path of the C++ compiler. NoCompiler without one."""
    return _compiler()[0]


def cache_folder() -> Path:
    return places.cache_folder() / "npu"


@lru_cache(maxsize=256)
def _library(source: Path, of: Path, macros: tuple[tuple[str, Number], ...], options: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a source file's entry points (`of`: the file that declares them)."""
    compiler, version, linker = _compiler()
    flags = [*_flags(linker), *options]
    headers = [(p.relative_to(HOSTAPI).as_posix(), p.read_text()) for p in sorted(HOSTAPI.rglob("*.h*"))]
    wrapper = _wrapper(source, [e for e in entries(of.parent).values() if e.source == of])
    name = _digest(source, wrapper.replace(str(source), source.name), macros, flags, version, headers)[:32]
    target = cache_folder() / f"{of.stem}-{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unit, out = Path(folder) / "unit.cc", Path(folder) / "unit.so"
            unit.write_text(wrapper)
            paths = ["-I", str(HOSTAPI), "-I", str(of.parent)]
            command = [
                compiler,
                *flags,
                *define(dict(macros)),
                *_precompiled(options),
                *paths,
                str(unit),
                "-o",
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CompileError(f"{compiler} refused {source.name}:\n{done.stderr[-4000:]}")
            os.replace(out, target)  # whole or not at all, even if another process compiles it now
    return ctypes.CDLL(str(target))


def _precompiled(options: tuple[str, ...]) -> list[str]:
    """Options that include hostapi's headers in the compiler's own form: half of what compiling a kernel takes."""
    header = _header(options)
    return ["-include", str(header)] if header.exists() else ["-include", str(_header.__wrapped__(options))]


@lru_cache(maxsize=8)
def _header(options: tuple[str, ...]) -> Path:
    compiler, version, linker = _compiler()
    flags = [f for f in (*_flags(linker), *options) if f != "-shared"]
    text = "#include <aie_api/aie.hpp>\n#include <string>\n"
    headers = [(p.relative_to(HOSTAPI).as_posix(), p.read_text()) for p in sorted(HOSTAPI.rglob("*.h*"))]
    target = (
        cache_folder() / f"host-{hashlib.sha256(repr((text, flags, version, headers)).encode()).hexdigest()[:32]}.h"
    )
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made, source = Path(folder) / "made.gch", Path(folder) / "made.h"
            source.write_text(text)
            command = [compiler, *flags, "-I", str(HOSTAPI), "-x", "c++-header", str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CompileError(f"{compiler} refused the headers of {HOSTAPI.name}:\n{done.stderr[-4000:]}")
            os.replace(made, f"{target}.gch")
            os.replace(source, target)
    return target


def define(macros: Mapping[str, Number]) -> list[str]:
    """Macros as compiler options: a float is a float32 literal."""
    return [f"-D{n}={f'{v!r}f' if isinstance(v, float) else v}" for n, v in macros.items()]


def _wrapper(source: Path, found: list[Entry]) -> str:
    """The kernel and, for each entry point, a function that sets the tile's modes, counts, and returns a trap's
    text."""
    lines = [f'#include "{source}"', "#include <string>", "static std::string last;"]
    for e in found:
        args = [f"{a.declaration} {n}" for n, a in e.args.items()]
        types = ", ".join(a.declaration for a in e.args.values())
        lines += [
            f"static_assert(std::is_same_v<decltype(&{e.name}), void (*)({types})>,",
            f'              "the arguments of {e.name} differ from its declaration in the .toml");',
            f'extern "C" __attribute__((visibility("default"))) const char *host_{e.name}({", ".join(args)}, '
            "int32 *modes, std::uint64_t *counts) {",
            "    using namespace aie;",
            "    host::tile_modes = {static_cast<rounding_mode>(modes[0]), static_cast<saturation_mode>(modes[1])};",
            "    host::counts = {};",
            "    const char *text = nullptr;",
            f"    try {{ {e.name}({', '.join(e.args)}); }} catch (const host::trap &t) {{ last = t.text; text = last.c_str(); }}",
            "    modes[0] = static_cast<int32>(host::tile_modes.rounding);",
            "    modes[1] = static_cast<int32>(host::tile_modes.saturation);",
            "    for (unsigned i = 0; i < host::counters; i++) counts[i] = host::counts[i];",
            "    return text;",
            "}",
        ]
    return "\n".join(lines) + "\n"
