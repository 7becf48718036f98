"""A checkpoint that is cut short or removed under a running command: one clear error, or the same output as before.

Each command runs in a subprocess, so that a SIGBUS would show as its exit code (-7).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybrid
from conformance.engine.test_loading import raw_tensor, same, stored
from conformance.support.paths import DEMO as MODEL
from conformance.support.profile import LONG
from hybrid.core.dtypes import WEIGHT_TYPES
from hybrid.core.plan import TensorDecl
from hybrid.kernels.oracle.device import CpuDevice
from hybrid.quant.codec import dequantise, take

pytestmark = pytest.mark.slow

TEXT = MODEL.parent.parent / "conformance" / "data" / "demo-gemma3" / "held-out.txt"
SMALL = 1 << 20

# Runs a command, and changes the file just before the n-th read of a file or the n-th pass of the cpu device.
CHILD = """
import os, runpy, sys
from hybrid.kernels.host import device
change, path, when, nth, memory, command, *arguments = sys.argv[1:]
seen = 0
def watched(function):
    def call(*given, **more):
        global seen
        seen += 1
        if seen == int(nth):
            os.truncate(path, 1000) if change == "cut" else os.unlink(path)
            os.write(2, b"changed\\n")  # whole: other threads print too
        return function(*given, **more)
    return call
if when == "read":
    os.pread, os.preadv = watched(os.pread), watched(os.preadv)
else:
    device.HostProgram._pass = watched(device.HostProgram._pass)
if int(memory):
    device.usable_bytes = lambda: int(memory)
sys.argv[1:] = arguments
runpy.run_module(command, run_name="__main__")
"""
GENERATE = ("hybrid.generate", "{path}", "--prompt", "def f(", "-n", "6", "--device", "cpu", "--json")
PERPLEXITY = ("hybrid.perplexity", "{path}", str(TEXT), "--chunk", "64", "--limit", "2", "--device", "cpu", "--json")
CONVERT = ("hybrid.convert", "{path}", "{folder}/out.gguf", "--type", "q4_0", "--requantize", "--jobs", "1")
INSPECT = ("hybrid.inspect", "{path}", "--json")
ONLY_LONG = pytest.mark.skipif(not LONG, reason="the long profile's: a process for what other commands show here")


def command(
    folder: Path, arguments: tuple[str, ...], change: str, when: str, nth: int, memory: int = 0
) -> tuple[int, str, str]:
    """Exit code, output and errors; the file was changed."""
    path = folder / "model.gguf"
    shutil.copy(MODEL, path)
    filled = [a.format(path=path, folder=folder) for a in arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, change, str(path), when, str(nth), str(memory), *filled],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=MODEL.parent.parent,
        timeout=120,
    )
    assert "changed\n" in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr.replace("changed\n", "")


def expected_text() -> str:
    with hybrid.load(MODEL, "cpu") as model:
        return "".join(model.generate("def f(", max_tokens=6))


def test_a_generation_on_cpu_does_not_need_its_files_name_any_more(tmp_path: Path) -> None:
    code, out, err = command(tmp_path, GENERATE, "unlink", "pass", 3)
    assert code == 0, err
    report = json.loads(out)
    assert report["text"] == expected_text()
    made = report["memory"]["dequantised"] + report["memory"]["codes"]
    assert report["memory"]["left_in_files"] == 0 and report["memory"]["weights"] < 2e6 and made > 11e6


def test_weights_that_stay_in_a_file_that_vanishes_are_still_read(tmp_path: Path) -> None:
    code, out, err = command(tmp_path, GENERATE, "unlink", "pass", 3, SMALL)
    assert code == 0, err
    report = json.loads(out)
    assert report["text"] == expected_text()
    assert report["memory"]["left_in_files"] > 9e6 and report["memory"]["weights"] < 2 * SMALL


@pytest.mark.parametrize(
    ("arguments", "when", "nth", "memory"),
    [
        (GENERATE, "pass", 3, 0),  # rows of the embedding, between two tokens
        (GENERATE, "pass", 3, SMALL),  # and all weights
        (GENERATE, "read", 300, SMALL),  # and in the middle of a pass
        (GENERATE, "read", 60, 0),  # while weights are read into memory
        pytest.param(PERPLEXITY, "read", 60, 0, marks=ONLY_LONG),
        pytest.param(PERPLEXITY, "read", 200, SMALL, marks=ONLY_LONG),
        (CONVERT, "read", 40, 0),
        (INSPECT, "read", 1, 0),
    ],
    ids=["pass", "pass-all", "within-a-pass", "load", "perplexity", "perplexity-in-file", "convert", "inspect"],
)
def test_a_file_that_is_cut_under_a_command_is_one_error(
    tmp_path: Path, arguments: tuple[str, ...], when: str, nth: int, memory: int
) -> None:
    code, out, err = command(tmp_path, arguments, "cut", when, nth, memory)
    assert code == 1, (code, err)
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "model.gguf" in lines[0], err
    assert not out and sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf"]


@pytest.mark.parametrize(
    ("arguments", "nth"),
    [(PERPLEXITY, 40), (CONVERT, 1), pytest.param(INSPECT, 1, marks=ONLY_LONG)],
    ids=["perplexity", "convert", "inspect"],
)
def test_a_file_that_vanishes_under_a_command_changes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], nth: int
) -> None:
    code, _, err = command(tmp_path, arguments, "unlink", "read", nth)
    assert code == 0, err


# ------------------------------------------------------------------------------------------- weights left in their
# files
@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_rows_of_a_file_are_those_of_memory(tmp_path: Path, dtype: str) -> None:
    file = stored(tmp_path / "f", dtype, (37, 512), raw_tensor(dtype, (37, 512)), before=b"x" * 5)
    whole, packed = file.load(), file.packed()
    assert same(packed.load(), whole)
    part = packed.rows(3, 30).rows(2, 9)
    assert same(part.load(), whole.rows(5, 12)) and part.shape == (7, 512)
    raw = np.empty(part.nbytes, np.uint8)
    part.read_into(0, raw)
    row = part.nbytes // 7
    assert raw.tobytes() == file.raw()[5 * row : 12 * row].tobytes()
    index = np.array([[30, 2], [2, 0]])
    assert same(take(packed, index), take(whole, index))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantise(part), dequantise(whole.rows(5, 12)))


def test_weights_that_fit_are_kept_and_others_read_at_every_use(tmp_path: Path) -> None:
    """Two matrices of 64 KiB and memory for one; a third is joined from two files."""
    files = [stored(tmp_path / str(i), "f32", (32, 512), raw_tensor("f32", (32, 512), i)) for i in range(4)]
    device = CpuDevice(memory=100_000)
    for i in range(2):
        device.store(TensorDecl(f"w{i}", "f32", (32, 512), "weight"), parts=[files[i].packed])
    device.store(TensorDecl("joined", "f32", (64, 512), "weight"), parts=[files[2].packed, files[3].packed])
    held = device.memory()
    assert (held["weights"], held["left_in_files"]) == (1 << 16, 3 << 16)
    assert same(device.read("w1"), files[1].load()) and same(
        device.read("joined", 20, 40).rows(12, 20), files[3].load().rows(0, 8)
    )
    with pytest.raises(ValueError, match=r"w is declared f32 \(31, 512\), got f32 \(32, 512\)"):
        device.store(TensorDecl("w", "f32", (31, 512), "weight"), parts=[files[0].packed])


def test_logits_do_not_depend_on_where_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows are summed in another order than BLAS sums a whole matrix: int8 codes may flip."""
    found: list[Any] = []
    for memory in (None, SMALL):
        if memory is not None:
            monkeypatch.setattr("hybrid.kernels.host.device.usable_bytes", lambda m=memory: m)
        with hybrid.load(MODEL, "cpu", precision="exact") as model:
            found.append(model.logits([2, 10, 20, 30]))
            left = model.engine.device.memory()["left_in_files"]  # type: ignore[index]
        assert bool(left) == (memory is not None)
    assert np.abs(found[0] - found[1]).max() < 1e-3
