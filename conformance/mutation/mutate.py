"""Mutants: the shipped kernels with one piece of source text replaced. Each must make a conformance case fail.

mutants/<op>.toml holds tables [[shader]], [[binding]] (Vulkan), [[oracle]] (the NumPy device), [[npu]] (the NPU's
operations) and [[aie]] (the NPU's tile kernels, run by test_npu_kernels.py; options.kernel names the source file to
run) with

    name     the fault
    file     in kernels/vulkan/shaders, kernels/vulkan/ops, kernels/oracle, kernels/npu or kernels/npu/aie
    find     text that occurs exactly once in the file; else the mutant is stale, which is an error
    replace  its replacement
    needs    a capability (Device.has) of devices that select the mutated kernel; others skip the mutant
    unseen   why no input that a plan can give shows the fault (test_proved.py)
    case     how the case differs from the operation's usual one: bind, dtypes, attrs, kinds, style, scale, mode, seed,
             rows, outs; options = options of the device
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.mutation.edits import StaleMutant, edited, tables
from conformance.support.paths import MUTANTS, ROOT
from conformance.support.profile import LONG
from hybrid.harness.cases import Case
from hybrid.harness.fixed import variant
from hybrid.harness.sizes import base_bind
from hybrid.spec import OpSpec

KERNELS = ROOT / "kernels"
FOLDERS = {
    "shader": KERNELS / "vulkan" / "shaders",
    "binding": KERNELS / "vulkan" / "ops",
    "oracle": KERNELS / "oracle",
    "aie": KERNELS / "npu" / "aie",
    "npu": KERNELS / "npu",
}
SHARE = 12
"""In the short profile one mutant of a shader in so many runs, at least one of an operation."""


@dataclass(frozen=True, slots=True)
class Mutant:
    op: str
    kind: str
    """shader, binding, oracle, npu or aie"""
    name: str
    file: str
    find: str
    replace: str
    case: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    unseen: str = ""

    @property
    def backend(self) -> str:
        return {"oracle": "cpu", "npu": "npu", "aie": "npu"}.get(self.kind, "vulkan")

    @property
    def path(self) -> Path:
        return FOLDERS[self.kind] / self.file

    def mutated(self) -> str:
        """The file's text with the replacement made. Raises StaleMutant."""
        return edited(self.path, self.find, self.replace, f"mutants/{self.op}.toml: {self.name}")


def load(folder: Path = MUTANTS) -> Iterator[Mutant]:
    """All mutants, by file and kind."""
    for path in sorted(folder.glob("*.toml")):
        found = tables(path)
        if unknown := found.keys() - FOLDERS.keys():
            raise StaleMutant(f"{path.name}: unknown tables {sorted(unknown)}; known: {', '.join(FOLDERS)}")
        for kind, entries in found.items():
            for entry in entries:
                yield Mutant(path.stem, kind, **entry)


def tried(mutants: Iterable[Mutant]) -> list[Mutant]:
    """All in the long profile; else of the shaders', each of which is compiled twice, every SHARE-th of every second
    operation, in an order that follows from the texts of the mutated files. Of matrix units', which a CPU driver skips,
    all."""
    mutants = list(mutants)
    if LONG:
        return mutants
    shaders: dict[str, list[Mutant]] = defaultdict(list)
    for m in mutants:
        if m.kind == "shader" and not m.needs:
            shaders[m.op].append(m)
    share = [m for of in shaders.values() for m in sorted(of, key=order)[::SHARE]]
    kept = {id(m) for m in sorted(share, key=order)[::2]}
    return [m for m in mutants if m.kind != "shader" or m.needs or id(m) in kept]


def order(mutant: Mutant) -> str:
    """An order that changes with the mutated file."""
    return hashlib.sha256(mutant.path.read_bytes() + mutant.name.encode()).hexdigest()


def case_of(mutant: Mutant, spec: OpSpec) -> Case:
    """The case that must fail."""
    given = dict(mutant.case)
    bind, dtypes, attrs = (given.pop(k, {}) for k in ("bind", "dtypes", "attrs"))
    given.pop("options", None)
    case = variant(spec, {**base_bind(spec), **bind}, spec.dtypes(dtypes), given.pop("seed", 0), frozenset(bind))
    return replace(case, attrs={**case.attrs, **attrs}, **given)


def mutated_function(mutant: Mutant, of: str) -> Callable[..., Any]:
    """`of` (an operation's function, or `record`) of a mutated Python file.

    A shared module (its name starts with _) stands in for the shipped one while the operation's own file is read."""
    module = _execute(mutant.path, mutant.mutated())
    if not mutant.file.startswith("_"):
        return getattr(module, of)
    own = mutant.path.with_name(f"{mutant.op}.py")
    if not own.exists():  # of a fused group
        return getattr(module, of)
    kept = sys.modules[module.__name__]
    sys.modules[module.__name__] = module
    try:
        return getattr(_execute(own, own.read_text()), of)
    finally:
        sys.modules[module.__name__] = kept


def mutated_spirv(mutant: Mutant, kernels: set[str], folder: Path) -> Path:
    """A folder of SPIR-V in which those of `kernels` that use the mutated shader are built from it."""
    from hybrid.kernels.vulkan import modules
    from hybrid.kernels.vulkan.build import compile_variant, digest, variants
    from hybrid.kernels.vulkan.kernel import SPIRV
    from hybrid.kernels.vulkan.lanes import KERNEL

    source, out = folder / "shaders", folder / "spirv"
    shutil.copytree(FOLDERS["shader"], source)
    (source / mutant.file).write_text(mutant.mutated())
    out.mkdir()
    for name in kernels | {"grid", KERNEL}:
        shutil.copy(modules.path_of(SPIRV, name), out)
    manifest = json.loads((SPIRV / "manifest.json").read_text())
    changed = [v for v in variants(source) if v.module in kernels and digest(v) != manifest[v.module]["digest"]]
    if not changed:
        raise StaleMutant(
            f"mutants/{mutant.op}.toml: {mutant.name}: none of {sorted(kernels)}, which the case runs, "
            f"uses {mutant.file}"
        )
    for v in changed:
        code, manifest[v.module] = compile_variant(v)
        modules.write(out, v.module, code)
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def _execute(path: Path, text: str) -> types.ModuleType:
    name = ".".join(("hybrid", *path.relative_to(ROOT).with_suffix("").parts))
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    # Data classes of the mutated module look it up by name.
    kept = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    finally:
        if kept is not None:
            sys.modules[name] = kept
        else:
            del sys.modules[name]
    return module
