"""Compile Slang shaders to SPIR-V: `python -m kernels.vulkan.build [--check] [--only PREFIX] [--out DIR]`.

Each shader has a sidecar `shaders/<shader>.toml` that lists its kernels and the cross product of their defines. Lists
of storage types have names (kernels/vulkan/types.py). Bindings, push constants and specialisation constants come from
the compiler's reflection. The SPIR-V is committed with `manifest.json`, which records them and the digests of each
module's sources (includes followed) and compiler. The compiler is in the PyPI package `slangpy` (extra `kernels`); only
shader authors need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from hybrid.cli import Parser, positive
from hybrid.cli.progress import progress_bar
from hybrid.core.errors import nearest
from hybrid.core.places import in_clone
from hybrid.kernels.vulkan import modules
from hybrid.kernels.vulkan.spirv import SpirvError, stripped, written
from hybrid.kernels.vulkan.types import LISTS

HERE = Path(__file__).resolve().parent
SHADERS, SPIRV = HERE / "shaders", HERE / "spirv"
OPTIONS = ("-target", "spirv", "-profile", "spirv_1_5", "-stage", "compute", "-O3")
FORMAT = "3"  # of the output: a new value forces a full rebuild
RENEW = "python -m kernels.vulkan.build"
KEYS = {"name", "source", "entry", "defines"}
# SLANG_PARAMETER_CATEGORY_* of slang.h.
_UNIFORM, _DESCRIPTOR, _CONSTANT, _PUSH = 8, 9, 10, 11


class BuildError(RuntimeError):
    """A sidecar or a shader is wrong; the message names the file and what to change."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One module to build: a sidecar's kernel with chosen defines."""

    module: str
    source: Path
    entry: str
    defines: tuple[tuple[str, str], ...]

    def arguments(self) -> list[str]:
        """Compiler arguments. A define W = q4_0 arrives as W=q4_0 and, for #ifdef, as W_q4_0=1."""
        out = ["-entry", self.entry, *OPTIONS]
        for key, value in self.defines:
            out += [f"-D{key}={value}", f"-D{key}_{value}=1"]
        return out


@dataclass(frozen=True, slots=True)
class Interface:
    """A shader's declarations, used or not: ids of specialisation constants, storage buffers, push-constant bytes."""

    constants: Mapping[str, int]
    bindings: int
    push: int


# --- variants ---------------------------------------------------------------------------------------------------------


def _kernels(sidecar: Path) -> list[dict[str, Any]]:
    try:
        data = tomli.loads(sidecar.read_text())
    except tomli.TOMLDecodeError as error:
        raise BuildError(f"{sidecar}: {error}") from None
    if set(data) != {"kernel"}:
        raise BuildError(f"{sidecar}: only [[kernel]] tables belong here, found {sorted(data)}")
    for kernel in data["kernel"]:
        wrong = sorted(set(kernel) - KEYS) or sorted({"name"} - set(kernel))
        if wrong:
            raise BuildError(
                f"{sidecar}: kernel {kernel.get('name')!r}: unknown or missing keys {wrong}; known: "
                f"{', '.join(sorted(KEYS))}"
            )
    return data["kernel"]


def variants(source_dir: Path = SHADERS, only: str = "") -> list[Variant]:
    """Every module of a shader folder whose name starts with `only`, sorted; duplicate names are an error."""
    found: dict[str, Variant] = {}
    for sidecar in sorted(source_dir.glob("*.toml")):
        for kernel in _kernels(sidecar):
            defines = {key: _values(values) for key, values in kernel.get("defines", {}).items()}
            for choice in itertools.product(*defines.values()):
                chosen = dict(zip(defines, choice, strict=True))
                try:
                    module = kernel["name"].format(**chosen)
                except KeyError as error:
                    raise BuildError(f"{sidecar}: name {kernel['name']!r} uses {error}, which defines lacks") from None
                if module in found:
                    raise BuildError(f"{sidecar}: module {module} is declared twice; put every define into the name")
                source = source_dir / kernel.get("source", f"{kernel['name'].split('.')[0]}.slang")
                if not source.is_file():
                    raise BuildError(f"{sidecar}: no such source {source}")
                found[module] = Variant(module, source, kernel.get("entry", "main"), tuple(chosen.items()))
    return [v for name, v in sorted(found.items()) if name.startswith(only)]


def _values(written: str | list[str]) -> list[str]:
    """Values of a define, with list names (types.py) expanded."""
    return [v for w in ([written] if isinstance(written, str) else written) for v in LISTS.get(w, (w,))]


def sources(path: Path, seen: dict[Path, bytes] | None = None) -> dict[Path, bytes]:
    """The file and everything it includes, by path."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = path.read_bytes()
        for name in _included(seen[path]):
            child = path.parent / name
            if not child.is_file():
                raise BuildError(f"{path}: included file {child} does not exist")
            sources(child, seen)
    return seen


@lru_cache(maxsize=1024)
def _included(text: bytes) -> tuple[str, ...]:
    """Names of the files that a text includes; cached, since modules share includes."""
    return tuple(name.decode() for name in re.findall(rb'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE))


@lru_cache(maxsize=1024)
def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def digest(variant: Variant) -> str:
    """sha256 over the names and texts of all sources and the compiler arguments."""
    h = hashlib.sha256(json.dumps([FORMAT, *variant.arguments()]).encode())
    for path, text in sorted(sources(variant.source).items(), key=lambda item: item[0].name):
        h.update(path.name.encode() + b"\0" + _sha256(text))
    return h.hexdigest()


# --- the compiler ----------------------------------------------------------------------------------------------------


class Slang:
    """libslang-compiler.so of the slangpy package through its C API."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("slangpy")
        if spec is None or spec.origin is None:
            raise BuildError("the shader compiler is not installed; do: pip install 'hybrid-kernels[kernels]'")
        found = sorted(Path(spec.origin).parent.glob("libslang-compiler.so*"))
        if not found:
            raise BuildError(f"no libslang-compiler.so in {Path(spec.origin).parent}; reinstall slangpy")
        self.lib = ctypes.CDLL(str(found[0]))
        self.lib.spCreateSession.restype = ctypes.c_void_p
        self.lib.spCreateCompileRequest.restype = ctypes.c_void_p
        self.lib.spGetDiagnosticOutput.restype = ctypes.c_char_p
        self.lib.spGetEntryPointCode.restype = ctypes.c_void_p
        for name in (
            "spGetReflection",
            "spReflection_GetParameterByIndex",
            "spReflectionVariableLayout_GetVariable",
            "spReflectionVariableLayout_GetTypeLayout",
            "spReflectionTypeLayout_GetElementTypeLayout",
        ):
            getattr(self.lib, name).restype = ctypes.c_void_p
        self.lib.spReflectionVariable_GetName.restype = ctypes.c_char_p
        self.lib.spReflectionVariableLayout_GetOffset.restype = ctypes.c_size_t
        self.lib.spReflectionTypeLayout_GetSize.restype = ctypes.c_size_t
        self.session = ctypes.c_void_p(self.lib.spCreateSession(None))
        self.version = f"slangpy {importlib.metadata.version('slangpy')} ({found[0].name.split('.so.')[-1]})"

    def compile(self, source: Path, arguments: list[str], module: str) -> tuple[bytes, Interface]:
        """SPIR-V and interface of one entry point; BuildError carries the compiler's diagnostics."""
        request = ctypes.c_void_p(self.lib.spCreateCompileRequest(self.session))
        try:
            # Without -o the compiler discards the entry point's code.
            with tempfile.TemporaryDirectory() as scratch:
                words = [str(source), *arguments, "-I", str(source.parent), "-o", f"{scratch}/module.spv"]
                argv = (ctypes.c_char_p * len(words))(*[w.encode() for w in words])
                failed = self.lib.spProcessCommandLineArguments(request, argv, len(words))
                failed = failed or self.lib.spCompile(request)
            text = (self.lib.spGetDiagnosticOutput(request) or b"").decode(errors="replace").strip()
            if failed:
                raise BuildError(f"{module} ({source}) does not compile:\n{text}")
            size = ctypes.c_size_t()
            code = self.lib.spGetEntryPointCode(request, 0, ctypes.byref(size))
            if not code or not size.value:
                raise BuildError(f"{module}: the compiler made no code for its entry point\n{text}")
            return stripped(ctypes.string_at(code, size.value)), self._interface(request, module)
        finally:
            self.lib.spDestroyCompileRequest(request)

    def _interface(self, request: ctypes.c_void_p, module: str) -> Interface:
        lib, pointer = self.lib, ctypes.c_void_p
        reflection = pointer(lib.spGetReflection(request))
        constants: dict[str, int] = {}
        bindings = push = 0
        for index in range(lib.spReflection_GetParameterCount(reflection)):
            parameter = pointer(lib.spReflection_GetParameterByIndex(reflection, index))
            name = lib.spReflectionVariable_GetName(pointer(lib.spReflectionVariableLayout_GetVariable(parameter)))
            layout = pointer(lib.spReflectionVariableLayout_GetTypeLayout(parameter))
            category = lib.spReflectionTypeLayout_GetParameterCategory(layout)
            offset = lib.spReflectionVariableLayout_GetOffset(parameter, category)
            if category == _CONSTANT:
                constants[name.decode()] = offset
            elif category == _DESCRIPTOR:
                bindings = max(bindings, offset + lib.spReflectionTypeLayout_GetSize(layout, category))
            elif category == _PUSH:
                element = pointer(lib.spReflectionTypeLayout_GetElementTypeLayout(layout))
                push = lib.spReflectionTypeLayout_GetSize(element, _UNIFORM)
            else:
                raise BuildError(f"{module}: {name.decode()} is no storage buffer and no constant")
        ids = list(constants.values())
        twice = sorted(n for n, i in constants.items() if ids.count(i) > 1)
        if twice:
            raise BuildError(f"{module}: specialisation constants {', '.join(twice)} share an id")
        return Interface(constants, bindings, push)


@functools.cache
def compiler() -> Slang:
    """The process's compiler, created once: creating its session is slow."""
    return Slang()


def compile_variant(variant: Variant) -> tuple[bytes, dict[str, Any]]:
    """SPIR-V of a variant and its manifest entry."""
    slang = compiler()
    code, interface = slang.compile(variant.source, variant.arguments(), variant.module)
    made = _entry(variant, digest(variant), slang.version, code) | asdict(interface)
    return code, made | {"writes": sorted(written(code))}


def _entry(variant: Variant, of_sources: str, compiled_by: str, code: bytes) -> dict[str, Any]:
    """A module's manifest entry, without its interface."""
    return {
        "source": variant.source.name,
        "digest": of_sources,
        "compiler": compiled_by,
        "spirv": hashlib.sha256(code).hexdigest(),
        "defines": dict(variant.defines),
    }


def compile_all(wanted: list[Variant]) -> list[tuple[bytes, dict[str, Any]]]:
    """compile_variant of each; in worker processes where there are enough of them."""
    with progress_bar(len(wanted), "shaders", False, "modules", after=1.0) as advance, contextlib.ExitStack() as held:
        made: Iterator[tuple[bytes, dict[str, Any]]] = map(compile_variant, wanted)
        if len(wanted) >= 16:
            pool = held.enter_context(ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")))
            made = pool.map(compile_variant, wanted, chunksize=4)
        found = []
        for one in made:
            found.append(one)
            advance(1)
        return found


# --- output folder ----------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # Concurrent builds of different modules merge their entries under the lock.
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def build(source_dir: Path = SHADERS, out_dir: Path = SPIRV, only: str = "", force: bool = False) -> list[str]:
    """Compile what changed, write `<module>.spv.gz` and merge manifest.json; returns the names that were compiled.

    Modules whose sidecar entry is gone are removed (within `only`). `source_dir` may be a mutated copy of shaders/.
    """
    source_dir, out_dir = Path(source_dir), Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    wanted = variants(source_dir, only)
    old, stale = read_manifest(out_dir), []
    for v in wanted:
        entry, path = old.get(v.module), modules.path_of(out_dir, v.module)
        if (
            not force
            and entry
            and path.exists()
            and entry["digest"] == digest(v)
            and entry["compiler"] == compiler().version
        ):
            continue
        stale.append(v)
    fresh = {}
    for v, (code, entry) in zip(stale, compile_all(stale), strict=True):
        modules.write(out_dir, v.module, code)
        fresh[v.module] = entry
    with _locked(out_dir):
        merged = {**read_manifest(out_dir), **fresh}
        for name in [n for n in merged if n.startswith(only)]:
            if name not in {v.module for v in wanted}:
                del merged[name]
                modules.path_of(out_dir, name).unlink(missing_ok=True)
        # One line per module keeps merges and diffs readable.
        lines = [f"{json.dumps(k)}: {json.dumps(merged[k], sort_keys=True)}" for k in sorted(merged)]
        temporary = out_dir / f"manifest.{os.getpid()}.tmp"
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        temporary.replace(out_dir / "manifest.json")
    return list(fresh)


def check(source_dir: Path = SHADERS, out_dir: Path = SPIRV, only: str = "", share: int = 1) -> list[str]:
    """Rebuild in memory and compare with the committed files; returns one line per difference.

    Of modules whose source and SPIR-V digests match the manifest only one in `share` is rebuilt. The selection changes
    with
    the sources."""
    manifest, problems = read_manifest(out_dir), []
    wanted = [(v, digest(v)) for v in variants(source_dir, only)]
    rebuilt = [
        v for v, of in wanted if int(of, 16) % share == 0 or not _recorded(v, of, manifest.get(v.module), out_dir)
    ]
    for v, (code, entry) in zip(rebuilt, compile_all(rebuilt), strict=True):
        path = modules.path_of(out_dir, v.module)
        if v.module not in manifest or not path.exists():
            problems.append(f"{v.module}: not built")
        elif manifest[v.module]["compiler"] != entry["compiler"]:
            problems.append(f"{v.module}: built by {manifest[v.module]['compiler']}, this is {entry['compiler']}")
        elif manifest[v.module] != entry:
            problems.append(f"{v.module}: the sources or the sidecar changed since it was built")
        elif _stored(out_dir, v.module) != code:
            problems.append(f"{v.module}: {path.name} is not what its sources compile to")
    names = {v.module for v, _ in wanted}
    stray = {*modules.names(out_dir), *manifest}
    problems += [f"{n}: built, but no sidecar declares it" for n in sorted(stray - names) if n.startswith(only)]
    return problems


def stale(source_dir: Path = SHADERS, out_dir: Path = SPIRV) -> list[str]:
    """Modules whose sources differ from those that they were built from; needs no compiler."""
    manifest = read_manifest(out_dir)
    return [v.module for v in variants(source_dir) if manifest.get(v.module, {}).get("digest") != digest(v)]


def _stored(out_dir: Path, name: str) -> bytes | None:
    """The stored module, or None if it is missing or damaged."""
    try:
        return modules.read(out_dir, name)
    except (FileNotFoundError, SpirvError):
        return None


def _recorded(v: Variant, of_sources: str, entry: Mapping[str, Any] | None, out_dir: Path) -> bool:
    """Whether the manifest's entry matches these sources, this compiler and the stored SPIR-V."""
    code = _stored(out_dir, v.module)
    if entry is None or code is None:
        return False
    return _entry(v, of_sources, compiler().version, code).items() <= entry.items()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=RENEW, description="Compile the Slang shaders to SPIR-V.")
    parser.add_argument("--check", action="store_true", help="rebuild in memory and compare; exit 1 on a difference")
    parser.add_argument(
        "--share",
        type=positive,
        default=1,
        metavar="N",
        help="with --check: rebuild one module in N, compare the others' digests",
    )
    parser.add_argument("--only", default="", metavar="PREFIX", help="only modules whose name starts so")
    parser.add_argument(
        "--out", type=Path, default=SPIRV, metavar="DIR", help="the folder of the SPIR-V (the package's)"
    )
    parser.add_argument("--source", type=Path, default=SHADERS, metavar="DIR", help="the folder of the shaders")
    parser.add_argument("--force", action="store_true", help="compile even what is up to date")
    args = parser.parse_args(argv)
    if not args.check and args.out == SPIRV and not in_clone():
        parser.error(f"the modules of an installation ({SPIRV}) are not rewritten: name another folder with --out")
    try:
        names = {v.module for v in variants(args.source)} | set(read_manifest(args.out))
        if not any(name.startswith(args.only) for name in names):
            families = sorted({name.split(".")[0] for name in names})
            parser.error(f"--only {args.only}: no module begins so{nearest(args.only, families)}")
        if args.check:
            problems = check(args.source, args.out, args.only, args.share)
            for line in problems:
                print(line)
            print(
                f"renew with: {RENEW}"
                if problems
                else f"{len(variants(args.source, args.only))} modules are up to date"
            )
            return bool(problems)
        done = build(args.source, args.out, args.only, args.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    total = len(variants(args.source, args.only))
    named = f": {', '.join(done)}" if len(done) <= 8 else ""
    print(f"{len(done)} of {total} modules compiled{named or ('' if done else ', all up to date')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
