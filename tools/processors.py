"""Tests that rest on NumPy's products, under the kernels of other processors; some of Vulkan's with other subgroups.

    python tools/processors.py                  # those of the short profile, as many at once as there are processors
    python tools/processors.py --only haswell-1
    python tools/processors.py --list
    HYBRID_CONFORMANCE=long python tools/processors.py          # all, and all that they run

OpenBLAS takes its kernels by OPENBLAS_CORETYPE, NumPy leaves out its own by NPY_DISABLE_CPU_FEATURES, llvmpipe's
subgroups are as wide as LP_NATIVE_VECTOR_WIDTH. Each kind is a pytest process of its own: a library reads these when it
is loaded. The short profile has each set of kernels, each number of threads and each width once, and rough products on
one of them: the suite itself runs this processor's own kernels on one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = os.environ.get("HYBRID_CONFORMANCE") == "long"
# The marker comes second. What compares with kernels that are compiled for it, or has two passes in flight, in the long
# profile.
SOME = "not vulkan and not test_pipeline"
BLAS = ("-m", "blas", "-k", "not vulkan" if LONG else f"{SOME} and not both_devices")
# Each shader is compiled for it: in the short profile those that lay their subgroups out in different ways, and one of
# products.
APART = (
    "attention",
    "linear-vulkan",
    "fused_ffn",
    "altup_correct",
    "rmsnorm",
    "sample",
    "logprobs",
    "quantize",
    "verify",
    "begin",
)
# Of decode attention's variants the two ways to merge KV splits, which lanes of a wide subgroup share.
MERGES = ("arrival", "for-D")
OTHERS = (
    f"vulkan and (past_failure or (prime and ({' or '.join(APART)}))) or (test_variants and ({' or '.join(MERGES)}))"
)
WIDTH = ("-m", "width", "-k", "not (cpu- or npu-)" if LONG else OTHERS)
SHORT = ("haswell-2", "nehalem-rough", "width-512")
# What simulates an NPU, whose sums NumPy has no part in, and int8 activations, whose codes depend on the processor,
# beside compiled kernels: once in the short profile.
ONCE = BLAS if LONG else (*BLAS[:3], f"{SOME} and (int8_activations or not both_devices) and not test_hybrid")
ROUGH = {"HYBRID_ROUGH_PRODUCTS": "1"}
AVX512, AVX = ("AVX512", "X86_V4"), ("AVX", "X86_V3", "X86_V4", "FMA", "F16C")


@dataclass(frozen=True, slots=True)
class Kind:
    """An environment that stands for a processor. without: beginnings of the NumPy features that it lacks; flag: of
    /proc/cpuinfo, without which this machine cannot run its kernels."""

    name: str
    env: dict[str, str]
    select: tuple[str, ...] = BLAS
    without: tuple[str, ...] = ()
    flag: str = ""
    x86: bool = False

    def environment(self) -> dict[str, str]:
        features = " ".join(f for f in dispatched() if f.startswith(self.without)) if self.without else ""
        left_out = {"NPY_DISABLE_CPU_FEATURES": features} if features else {}
        return {**os.environ, "OPENBLAS_NUM_THREADS": "1", **left_out, **self.env}

    def lacks(self, flags: frozenset[str]) -> str:
        """Why this machine cannot stand for it, or nothing."""
        if self.x86 and platform.machine() not in ("x86_64", "AMD64"):
            return f"OpenBLAS has its kernels on x86 only, this is {platform.machine()}"
        return f"this processor lacks {self.flag}" if self.flag and self.flag not in flags else ""


def _x86(name: str, core: str, threads: int, without: tuple[str, ...], flag: str, rough: bool = False) -> Kind:
    env = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": str(threads), **(ROUGH if rough else {})}
    return Kind(f"{name}-{'rough' if rough else threads}", env, ONCE if rough else BLAS, without, flag, x86=True)


KINDS = (
    Kind("own-2", {"OPENBLAS_NUM_THREADS": "2"}),
    *(_x86("haswell", "Haswell", threads, AVX512, "avx2") for threads in (1, 2)),
    *(_x86("nehalem", "Nehalem", threads, AVX, "sse4_2") for threads in (1, 2)),
    _x86("nehalem", "Nehalem", 1, AVX, "sse4_2", rough=True),
    Kind("own-rough", ROUGH, ONCE),
    Kind("width-512", {"LP_NATIVE_VECTOR_WIDTH": "512"}, WIDTH),
)


def dispatched() -> tuple[str, ...]:
    """Features that NumPy looks for when it is loaded."""
    try:
        from numpy._core import _multiarray_umath as core
    except ImportError:  # NumPy 1
        from numpy.core import _multiarray_umath as core  # type: ignore[no-redef]
    return tuple(core.__cpu_dispatch__)


def flags_of(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def files_with(marker: str) -> list[str]:
    """Test files that use a marker: collecting all of them takes longer than running these."""
    files = sorted(ROOT.glob("conformance/*/test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if f"pytest.mark.{marker}" in f.read_text()]


def usual(flags: frozenset[str], long: bool = LONG) -> list[str]:
    """The kinds that run if none is named. Where another processor's kernels cannot, what they prove beside is on its
    own."""
    stands_in = {"own-" + k.name.split("-")[1] for k in KINDS if k.name in SHORT and k.lacks(flags)}
    return [k.name for k in KINDS if long or k.name in {*SHORT, *stands_in}]


def prove(kind: Kind) -> tuple[Kind, int, str, float]:
    """Run a kind's tests: what pytest ended with, what it said, and its seconds."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *kind.select, *files_with(kind.select[1])]
    done = subprocess.run(command, cwd=ROOT, env=kind.environment(), capture_output=True, text=True, check=False)
    return kind, done.returncode, done.stdout + done.stderr, time.perf_counter() - begin


def run(kinds: Iterable[Kind], jobs: int) -> bool:
    """True where every kind passed or was left out with a reason."""
    flags, good = flags_of(), True
    able = [k for k in kinds if not k.lacks(flags)]
    for kind in kinds:
        if kind not in able:
            print(f"processors: {kind.name} left out: {kind.lacks(flags)}", flush=True)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for kind, code, said, seconds in pool.map(prove, able):
            words = [line for line in said.splitlines() if " passed" in line or " failed" in line or " error" in line]
            outcome = words[-1].strip("= ") if words else f"pytest ended with {code}"
            print(f"processors: {kind.name}: {outcome}; {seconds:.0f} s with what it took to start", flush=True)
            if code:
                shown = " ".join(f"{k}={v!r}" for k, v in kind.env.items())
                print(f"{said}\nagain: {shown} python -m pytest {' '.join(map(repr, kind.select))}", flush=True)
            good = good and not code
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/processors.py", description="Tests under the kernels of other processors."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="KIND",
        default=usual(flags_of()),
        help="these kinds (some; all in the long profile)",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="kinds at once (all processors)"
    )
    parser.add_argument("--list", action="store_true", help="print the kinds; run nothing")
    args = parser.parse_args(argv)
    known = {k.name: k for k in KINDS}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]}: there are {', '.join(known)}")
    if args.list:
        for kind in KINDS:
            print(f"{kind.name:10} {' '.join(f'{k}={v}' for k, v in kind.env.items())}: pytest {' '.join(kind.select)}")
        return 0
    return 0 if run([known[name] for name in args.only], args.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
