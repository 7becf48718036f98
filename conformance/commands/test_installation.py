"""The wheel, installed outside the repository: every command starts, and commands write only to allowed places."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from conformance.support.devices import need_compiler, need_cxx
from conformance.support.profile import LONG
from hybrid.core.places import ROOT
from tools.help import COMMANDS
from tools.help import installed as module_of

pytestmark = pytest.mark.slow  # one wheel, built and installed once

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = PROJECT["project"]["scripts"]
LEFT_OUT = ("__pycache__", "*.egg-info", "data", "mutants", "*-q4_0.gguf", "*-bf16.gguf")  # large, and in no wheel
PARTS = ("pyproject.toml", "README.md", "LICENSE", "hybrid", "kernels", "specs", "perf", "conformance", "models")
# `python -m ...` in the pages that an installation lacks: other projects' modules, and those that only a clone has.
ELSEWHERE = {"pytest", "venv", "tarfile", "tools.load_bench", "tools.make_random_gguf", "tools.fuzz"}
# Runs each command in one process, as `python -m` would, and prints its result.
DRIVER = """
import contextlib, io, json, runpy, sys, warnings
warnings.filterwarnings("ignore", message=".*found in sys.modules")
for command in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    if command[0] == "hybrid.perf.report":  # its sections take a minute; where it goes does not depend on them
        import hybrid.perf.report
        hybrid.perf.report.load_records = lambda: ()
        for part in ("measured", "modelled", "targets", "cards"):
            setattr(hybrid.perf.report.Report, part, lambda self: "")
    sys.argv = ["python -m " + command[0], *command[1:]]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command[0] == "hybrid.perf.report":
                code = hybrid.perf.report.main(command[1:])
            else:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
                code = "no exit code"
        except SystemExit as e:
            code = e.code or 0
        except BaseException as e:
            code = repr(e)
    print(json.dumps([command, code, out.getvalue(), err.getvalue()]), flush=True)
"""


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel, an empty working folder, and the user's home."""

    root: Path
    work: Path
    home: Path

    @property
    def python(self) -> Path:
        return self.root / "env" / "bin" / "python"

    @property
    def wheel(self) -> Path:
        return next((self.root / "wheel").glob("*.whl"))

    @property
    def packages(self) -> Path:
        return next((self.root / "env" / "lib").glob("python3*")) / "site-packages"

    @property
    def env(self) -> dict[str, str]:
        own = {
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "HOME": str(self.home),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")} | own

    def untouched(self) -> bool:
        """True if no installed file changed."""
        return files(self.packages) == json.loads((self.root / "files.json").read_text())

    def run(self, commands: list[list[str]]) -> dict[str, tuple[object, str, str]]:
        """Command -> (exit code, standard output, standard error)."""
        done = subprocess.run(
            [self.python, "-c", DRIVER],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            cwd=self.work,
            env=self.env,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return {" ".join(c): (code, out, err) for c, code, out, err in map(json.loads, done.stdout.splitlines())}


def files(folder: Path) -> dict[str, int]:
    """Every file with its modification time."""
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def install(root: Path) -> None:
    """Build the wheel from a copy of the sources (building leaves files beside them) and install it."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, root / "source" / part, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT)
            )
        else:
            (root / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / part, root / "source" / part)
    pip = [sys.executable, "-m", "pip"]
    build = "from setuptools.build_meta import build_wheel; build_wheel('../wheel', {'--build-option': ['--compression=stored']})"
    (root / "wheel").mkdir()
    _quiet(sys.executable, "-c", build, cwd=root / "source")
    made = Installation(root, root, root)
    _quiet(sys.executable, "-m", "venv", "--without-pip", str(root / "env"))
    # Compiled once, as pip does: commands write no byte code (env), and without any each would compile its imports.
    _quiet(*pip, "--python", str(made.python), "install", "--no-deps", "--no-index", str(made.wheel))
    # The environment has the tests' dependencies, but no module of the project (it is installed by its path).
    (made.packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (root / "files.json").write_text(json.dumps(files(made.packages)))


def _quiet(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one installation of a test run, shared by its processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder = shared / "installation"
    with open(shared / "installation.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "files.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            install(folder)
    return folder


@pytest.fixture
def installed(root: Path, tmp_path: Path) -> Installation:
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    return Installation(root, tmp_path / "work", tmp_path / "home")


def test_a_wheel_has_what_commands_import_and_no_test(installed: Installation) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {n.partition("/")[0] for n in names if ".dist-info/" not in n} == {"hybrid"}
    assert not any("test_" in n or "conftest" in n for n in names) and "hybrid/models/demo-gemma3-q8_0.gguf" in names
    modules = {n for n in names if n.endswith(".py")}
    links = {folder: f"hybrid/{Path(folder).name}" for folder in ("kernels", "perf", "conformance/harness")}
    there = {p.relative_to(ROOT).as_posix() for folder in ("hybrid", *links) for p in (ROOT / folder).rglob("*.py")}
    assert modules == {next((to + n[len(a) :] for a, to in links.items() if n.startswith(f"{a}/")), n) for n in there}


def test_every_command_starts_from_an_empty_folder(installed: Installation) -> None:
    results = installed.run([[module_of(name), option] for name in COMMANDS for option in ("--help", "--version")])
    assert len(results) == 2 * len(COMMANDS)
    for command, (code, out, err) in results.items():
        assert code == 0 and not err, f"{command}: {code}\n{err}"
        assert (
            ("usage: python -m" in out)
            if command.endswith("--help")
            else re.fullmatch(r"hybrid-kernels \d+\.\d+\.\d+\n", out)
        )
    for script in SCRIPTS:
        done = subprocess.run(
            [installed.python.with_name(script), "--version"],
            capture_output=True,
            text=True,
            cwd=installed.work,
            env=installed.env,
        )
        assert done.returncode == 0 and done.stdout.startswith("hybrid-kernels "), done.stderr


def test_commands_of_the_pages_are_those_of_an_installation() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    said = {
        name
        for page in pages
        for name in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)*)", page.read_text(encoding="utf-8"))
    }
    ours = {name for name in said if name.startswith("conformance.")}  # of the repository only
    assert [name for name in ours if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()] == []
    assert said - ELSEWHERE - ours <= set(COMMANDS)


def test_commands_work_and_write_where_they_are_run(installed: Installation) -> None:
    """With tiny inputs, in order: later commands read earlier results."""
    (installed.work / "t.txt").write_text("def read(path):\n    return open(path)\n" * 3)
    demo = str(installed.packages / "hybrid" / "models" / "demo-gemma3-q8_0.gguf")
    tiny = ["--random", "gemma3-270m", "--layers", "1", "--vocab", "512", "--head", "q8_0", "--device", "cpu"]
    wanted: dict[str, tuple[int, str]] = {
        "hybrid.generate -n 2 --device cpu": (0, "generated 2"),
        f"hybrid.convert {demo} m.gguf --type-head q4_0 --requantize": (0, "m.gguf"),
        "hybrid.inspect m.gguf": (0, "needs, for 1 x"),
        "hybrid.inspect --find": (0, "m.gguf"),
        "hybrid.perplexity m.gguf t.txt --device cpu": (0, "nats per token"),
        "hybrid.schedule check gemma3 m.gguf": (0, ""),
        f"hybrid.bench {' '.join(tiny)} -p 4 -n 2 -r 1": (0, "decode 2 @ 0"),
        "hybrid.spec check": (0, "are sound"),
        "hybrid.spec docs": (0, "# Operations"),
        "hybrid.perf.op rmsnorm --workload demo.decode --device cpu --seconds 0.001": (0, "the host's clock"),
        "hybrid.perf.probe --device cpu": (0, "numpy copy"),
        f"hybrid.perf.profile {' '.join(tiny)} --context 4 -r 1": (0, "host, waiting"),
        "hybrid.perf.roofline gemma3-270m --context 16": (0, "modelled"),
        "hybrid.perf.targets --device lavapipe": (1, "no pass can be modelled on it"),
        "hybrid.perf.isa --kernels nope": (2, "no kernel is called 'nope'"),
        "hybrid.perf.mesa list": (0, "RADV" if not any(map(os.path.exists, _icds())) else "Mesa"),
        "hybrid.perf.gate --only spirv": (0, "gate spirv: holds"),
        "hybrid.perf.gate --only spirv --update": (1, "only in a clone of the repository"),
        "hybrid.perf.record p.xml f.json": (1, "only in a clone of the repository"),
        "hybrid.perf.report": (0, "build/report/index.html"),
        "hybrid.perf.report --markdown": (0, "Nothing is kept yet."),
        "hybrid.perf.campaign --list": (0, "python -m perf.ablate"),
        "hybrid.perf.campaign --only proof": (1, "only in a clone of the repository"),
        "hybrid.perf.npu": (0, "MAC/cycle"),
        "hybrid.kernels.vulkan.build": (2, "name another folder with --out"),
        "hybrid.kernels.npu.check 27b.qkv.i8": (0, "locks"),
        "hybrid.kernels.npu.emitter 27b.qkv.i8": (0, "aie"),
        "hybrid.kernels.npu.build --sim 27b.qkv.i8": (0, "xclbin"),
    }
    results = installed.run([command.split() for command in wanted])
    for command, (code, words) in wanted.items():
        got, out, err = results[command]
        assert got == code and words in out + err, f"{command}: {got}\n{out}\n{err}"
    assert {p.name for p in installed.work.iterdir()} == {"t.txt", "m.gguf", "build"}
    assert any(installed.home.rglob("*.xclbin")) and installed.untouched()


def stand_in(folder: Path) -> Path:
    """A wheel that installs the top-level package `kernels`, as the one of that name on PyPI does."""
    path = folder / "kernels-0.0.1-py3-none-any.whl"
    about = "kernels-0.0.1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("kernels/__init__.py", "whose = 'theirs'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


def test_the_wheel_works_beside_the_package_kernels(installed: Installation) -> None:
    """Even if it is found before ours: no file of the two wheels has the same path."""
    path = str(stand_in(installed.work))
    code = "import kernels, hybrid.kernels.vulkan.kernel as ours; print(kernels.whose, ours.SPIRV.is_dir())"
    env = {**installed.env, "PYTHONPATH": path}
    said = subprocess.check_output([installed.python, "-c", code], text=True, env=env, cwd=installed.work)
    assert said.split() == ["theirs", "True"]


@pytest.mark.skipif(not LONG, reason="installs it twice more: the long profile")
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_the_wheel_is_installed_beside_the_package_kernels(root: Path, tmp_path: Path, first: str) -> None:
    """Whichever is installed first, each keeps its files, also when the other is removed."""
    ours, theirs = Installation(root, root, root).wheel, stand_in(tmp_path)
    _quiet(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"))
    made = Installation(tmp_path, tmp_path, tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(made.python)]
    for wheel in (ours, theirs) if first == "ours" else (theirs, ours):
        _quiet(*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    (made.packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import kernels, hybrid.kernels.vulkan.kernel as ours; print(kernels.whose, ours.SPIRV.is_dir())"
    assert subprocess.check_output([made.python, "-c", code], text=True, env=made.env, cwd=tmp_path).split() == [
        "theirs",
        "True",
    ]
    _quiet(*pip, "uninstall", "--yes", "hybrid-kernels")
    code = "import importlib.util, kernels; print(kernels.whose, importlib.util.find_spec('hybrid'))"
    assert subprocess.check_output([made.python, "-c", code], text=True, env=made.env, cwd=tmp_path).split() == [
        "theirs",
        "None",
    ]


def _icds() -> tuple[str, ...]:
    from hybrid.perf.mesa import SYSTEM_ICDS

    return SYSTEM_ICDS


def test_kernels_are_proved_and_tuned_from_an_installation(installed: Installation, devices: object) -> None:
    need_compiler()
    devices.get("vulkan")  # type: ignore[attr-defined]  # skips where there is none
    results = installed.run(
        [
            ["hybrid.perf.tune", "sample", "--workload", "demo", "--seconds", "0.001", "--write", "--table", "mine"],
            ["hybrid.kernels.vulkan.build", "--check", "--only", "geglu"],
        ]
    )
    (tuned, checked) = results.values()
    assert tuned[0] == 0 and "wrote tuning/mine.toml" in tuned[2], tuned
    assert (installed.work / "tuning" / "mine.toml").is_file() and installed.untouched()
    assert checked[0] == 0 and "3 modules are up to date" in checked[1], checked


def test_an_npu_is_captured_from_an_installation(installed: Installation) -> None:
    need_cxx()
    results = installed.run(
        [
            ["hybrid.harness.npu_capture", "o.zip", "--npu", "sim", "--only", "rmsnorm/000"],
            ["hybrid.harness.npu_capture", "o.zip", "--compare"],
        ]
    )
    assert [code for code, _, _ in results.values()] == [0, 0], results
    assert (installed.work / "o.zip").is_file() and installed.untouched()


def test_the_package_says_its_version_and_names(installed: Installation) -> None:
    code = (
        "import hybrid, sys; print(hybrid.__file__, hybrid.__version__, 'load' in dir(hybrid), 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [installed.python, "-c", code], capture_output=True, text=True, cwd=installed.work, env=installed.env
    )
    file, version, named, heavy = done.stdout.split()
    assert file.startswith(str(installed.packages)) and (named, heavy) == ("True", "False")
    assert installed.wheel.name.startswith(f"hybrid_kernels-{version}-")
