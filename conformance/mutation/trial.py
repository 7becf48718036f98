"""Run tests in a separate process in which one module's text is replaced: mutants of host code without a changed file.

Python's import system gets the text, so a separate program started by a test still runs the shipped module. Trials are
forked from a process that has loaded the libraries but no module of the project: a trial costs its imports and its
tests.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "concurrent.futures.thread",
    "gguf",
    "hypothesis",
    "jinja2",
    "numpy",
    "pydantic.fields",
    "pydantic.functional_validators",
    "pydantic.main",
    "pytest",
    "safetensors",
    "sentencepiece",
    "subprocess",
    "tomli",
    "tqdm",
)
# Loading plugins would take pytest longer than most tests take.
SETTINGS = {"HYBRID_CONFORMANCE": "trial", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_RESULTS: dict[int, Result] = {
    0: "passed",
    1: "failed",
}  # pytest's exit codes; other codes: no test ran, or not to its end

Result = Literal["passed", "failed", "broken", "hung"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`broken`: no test ran, as where the module cannot be imported. `said`: the end of pytest's output."""

    result: Result
    said: str
    seconds: float


def prepare() -> None:
    """Import the libraries that every trial needs, once. NumPy gets one thread: more would not outlive a fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a trial do not scan them again


def trial(tests: Sequence[str], path: Path | None = None, text: str = "", limit: float = 60.0) -> Outcome:
    """The outcome of `tests` (pytest's names of them, from the root) with `text` in place of the file `path`, until the
    first failure. After `limit` seconds the trial and all that it started are killed. RuntimeError in a process that
    has imported some of the project already: the shipped module would be tested."""
    if early := sorted(m for m in sys.modules if m.partition(".")[0] == "hybrid"):
        raise RuntimeError(f"{early[0]} has been imported: run trials in a process of their own")
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(tests, path, text, out.fileno())
        code = _wait(pid, limit)
        out.seek(0)
        said = out.read().decode("utf-8", "replace").strip()[-2000:]
    result: Result = "hung" if code is None else _RESULTS.get(code, "broken")
    return Outcome(result, said, time.perf_counter() - begin)


def _child(tests: Sequence[str], path: Path | None, text: str, out: int) -> None:
    """Never returns: the process always ends here."""
    code = 70
    try:
        os.setsid()  # processes that the tests start end with this one
        os.environ.update(SETTINGS)
        sys.modules.pop("conformance.support.profile", None)  # it holds the profile of this program
        os.dup2(out, 1)
        os.dup2(out, 2)
        if path is not None:
            sys.meta_path.insert(0, _Replaced(path, text))
        import pytest

        # plain: with CI set in the environment, pytest takes minutes to explain a failed comparison of two files
        options = [
            "-x",
            "-q",
            "--assert=plain",
            "--tb=line",
            "--disable-warnings",
            "-p",
            "no:cacheprovider",
            f"--rootdir={ROOT}",
        ]
        code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(pid: int, limit: float) -> int | None:
    """The exit code, or None for a process that had to be killed."""
    end = time.monotonic() + limit
    pause = 0.005
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


class _Text(SourceFileLoader):
    """A module from text, under the name and the path of the replaced file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> Any:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Replaced(importlib.abc.MetaPathFinder):
    """Import finder that serves other text for one module of the project."""

    def __init__(self, path: Path, text: str) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        self._package = parts[-1] == "__init__"
        self._name = ".".join(parts[:-1] if self._package else parts)
        self._path, self._text = str(path), text

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Text(fullname, self._path, self._text)
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=loader, submodule_search_locations=_folder(self)
        )


def _folder(finder: _Replaced) -> list[str] | None:
    return [str(Path(finder._path).parent)] if finder._package else None
