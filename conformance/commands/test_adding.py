"""docs/adding-an-operation.md, followed in a copy of the tree: an operation is added and proved, and the mistakes that
are easily made are caught, each by the step's command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.support.devices import need_compiler
from conformance.support.paths import DATA, ROOT
from conformance.support.profile import LONG
from hybrid.kernels.vulkan.kernel import kernels_digest

pytestmark = pytest.mark.slow

FILES = {
    "specs/ops/scale_add.toml": "spec.toml",
    "kernels/oracle/scale_add.py": "oracle.py",
    "kernels/vulkan/shaders/scale_add.slang": "shader.slang",
    "kernels/vulkan/shaders/scale_add.toml": "shader.toml",
    "kernels/vulkan/ops/scale_add.py": "binding.py",
    "conformance/mutation/mutants/scale_add.toml": "mutants.toml",
}
SPEC, ORACLE, SHADER, _, BINDING, _ = FILES
CHECK = ("hybrid.spec", "check")
SUITE = ("pytest", "-q", "-x", "-p", "no:cacheprovider", "conformance/ops/test_ops.py", "-k", "scale_add and not npu")
CAUGHT = ("pytest", "-q", "-p", "no:cacheprovider", "conformance/mutation", "-k", "scale_add or every_operation")


class Tree:
    """A copy of what the steps read (byte code too, or each command would compile it again), with the operation's files
    and modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("specs", "kernels", "hybrid", "conformance", "perf"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.restore()
        self.build()

    def restore(self) -> None:
        for path, source in FILES.items():
            shutil.copy(DATA / "scale_add" / source, self.folder / path)

    def run(self, *command: str) -> tuple[int, str]:
        """Exit code and output of python -m COMMAND."""
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "HYBRID_CONFORMANCE": "ci"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    def build(self) -> None:
        code, said = self.run("kernels.vulkan.build", "--only", "scale_add")
        assert code == 0, said


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    need_compiler()
    return Tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture
def tree(shared: Tree) -> Iterator[Tree]:
    """Without mistakes, before and after."""
    yield shared
    shared.restore()


def test_an_operation_is_added_and_proved(tree: Tree) -> None:
    for command in (CHECK, SUITE, CAUGHT):
        code, said = tree.run(*command)
        assert code == 0, said


MISTAKES = {
    "one value": (SPEC, ", draw = [0.0, 0.75]", "", CHECK, "attributes.b.draw: tests need two values"),
    "two keys": (SPEC, 'dtype = "f32"\n', 'dtype = "f33"\ncolour = 1\n', CHECK, "outputs.y.colour: unknown key"),
    "no tuple": (
        ORACLE,
        "(real(a) * x.astype(real) + real(b),)",
        "real(a) * x.astype(real) + real(b)",
        SUITE,
        "return a tuple of 1",
    ),
    "attributes ignored": (
        SHADER,
        "push.a * x[t * push.h / 4 + i] + push.b",
        "x[t * push.h / 4 + i]",
        SUITE,
        "Disagreement",
    ),
    "tile's edge": (BINDING, "-(-h // 256)", "max(1, h // 256)", SUITE, "Disagreement"),
    "not a write": (
        BINDING,
        '.parts, t["y"].parts',
        '.parts + t["y"].parts, []',
        SUITE,
        "scale_add writes its binding 2",
    ),
}
"""(file, find, replace, command, what it says). In the short profile one of those that take the whole suite, in turn with
the kernels' digest."""
LATE = [name for name, (*_, command, _) in MISTAKES.items() if command == SUITE]
TRIED = [name for name in MISTAKES if LONG or name not in LATE or name == LATE[int(kernels_digest(), 16) % len(LATE)]]


@pytest.mark.parametrize(
    ("path", "find", "replace", "command", "said"), [pytest.param(*MISTAKES[name], id=name) for name in TRIED]
)
def test_a_mistake_is_caught(
    tree: Tree, path: str, find: str, replace: str, command: tuple[str, ...], said: str
) -> None:
    file = tree.folder / path
    text = file.read_text()
    assert find in text
    file.write_text(text.replace(find, replace))
    if path == SHADER:
        tree.build()
    code, found = tree.run(*command)
    if path == SHADER:
        tree.restore()
        tree.build()
    assert code != 0 and said in found, found


def test_a_shader_that_was_not_built_again_ends_the_run(tree: Tree) -> None:
    file = tree.folder / SHADER
    file.write_text(file.read_text().replace("push.a *", "2 *"))
    code, said = tree.run(*SUITE)
    assert code == 4 and "kernels/vulkan/spirv: scale_add was built from other sources" in said, said
