"""Declarations of the NPU's tile kernels: aie/*.toml, one beside each source.

    entry = find("gemm_i8")                       Entry: name, source file, macros, args in order
    entry.sizes({"DIM_M": 32})                    {'a': 2048, 'b': 4096, 'c': 2048}: elements of each array

An entry is an extern "C" function with plain pointers (as IRON's external kernels have) and int32 scalars. The types
here and in the source must agree: the wrapper that kernels.npu.compile makes does not compile otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hybrid.core.errors import FieldError, SpecError, nearest
from hybrid.spec.expr import Expr, ExprError
from hybrid.spec.load import Model, load_toml, shown_path

AIE = Path(__file__).resolve().parent / "aie"
Number = int | float

# dtype -> (C++ type, NumPy type). bf16 travels as its 16 bits; i4 as bytes of two codes, the first in the low half; u8
# are bytes of an object that holds several things.
TYPES: dict[str, tuple[str, np.dtype]] = {
    "i8": ("int8", np.dtype("i1")),
    "u8": ("uint8", np.dtype("u1")),
    "i4x2": ("uint8", np.dtype("u1")),
    "i16": ("int16", np.dtype("i2")),
    "i32": ("int32", np.dtype("i4")),
    "bf16": ("bfloat16", np.dtype("u2")),
    "f32": ("float", np.dtype("f4")),
}


class Macro(Model):
    """A size or constant fixed when the kernel is compiled."""

    default: Number
    multiple_of: int = Field(1, ge=1)
    summary: str


class Arg(Model):
    """An array of `size` elements, or (access = "scalar") an int32 by value."""

    dtype: Literal["i8", "u8", "i4x2", "i16", "i32", "bf16", "f32"]
    size: Expr = Expr(1)
    access: Literal["in", "out", "inout", "scalar"]
    layout: str = ""

    def model_post_init(self, context: object) -> None:
        if self.access == "scalar" and self.dtype != "i32":
            raise FieldError("dtype", f"a scalar is i32, not {self.dtype}")

    @property
    def scalar(self) -> bool:
        return self.access == "scalar"

    @property
    def numpy(self) -> np.dtype:
        return TYPES[self.dtype][1]

    @property
    def declaration(self) -> str:
        """The C++ type."""
        name = TYPES[self.dtype][0]
        return name if self.scalar else f"{'const ' if self.access == 'in' else ''}{name} *"


class EntryTable(Model):
    summary: str
    args: dict[str, Arg] = Field(min_length=1)


class KernelFile(Model):
    """One file aie/NAME.toml."""

    schema_version: Literal[1] = Field(alias="schema")
    source: str
    static_bytes: int = Field(0, ge=0)
    """Data of its own in the tile's memory: tables."""
    macros: dict[str, Macro]
    entry: dict[str, EntryTable] = Field(min_length=1)

    def model_post_init(self, context: object) -> None:
        for name, entry in self.entry.items():
            for arg, a in entry.args.items():
                if unknown := sorted(a.size.names - self.macros.keys()):
                    what = f"unknown macro {unknown[0]!r}{nearest(unknown[0], self.macros)}"
                    raise FieldError(f"entry.{name}.args.{arg}.size", what)


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    summary: str
    source: Path
    macros: Mapping[str, Macro]
    args: Mapping[str, Arg]
    static_bytes: int = 0

    def values(self, given: Mapping[str, Number]) -> dict[str, Number]:
        """All macros, defaults filled in. SpecError for one that does not exist or does not fit."""
        for name in given:
            if name not in self.macros:
                raise SpecError(f"{shown_path(self.source)}: no macro {name!r}{nearest(name, self.macros)}")
        values = {n: given.get(n, m.default) for n, m in self.macros.items()}
        for name, value in values.items():
            step = self.macros[name].multiple_of
            if isinstance(self.macros[name].default, int) and (not isinstance(value, int) or value < 1 or value % step):
                raise SpecError(f"{shown_path(self.source)}: {name} = {value} is not a positive multiple of {step}")
        return values

    def sizes(self, given: Mapping[str, Number] | None = None) -> dict[str, int]:
        """Elements of every array argument."""
        values = self.values(given or {})
        try:
            return {n: int(a.size.eval(values)) for n, a in self.args.items() if not a.scalar}
        except ExprError as e:
            raise SpecError(f"{shown_path(self.source)}: {self.name}: {e}") from None

    def nbytes(self, given: Mapping[str, Number] | None = None) -> dict[str, int]:
        """Bytes of every array argument."""
        return {n: size * self.args[n].numpy.itemsize for n, size in self.sizes(given).items()}


@lru_cache(maxsize=8)
def entries(folder: Path = AIE) -> dict[str, Entry]:
    """Every entry point declared in a folder, by name. SpecError for a wrong file or a name used twice."""
    found: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.toml")):
        file = load_toml(path, KernelFile)
        if not (folder / file.source).exists():
            raise SpecError(f"{shown_path(path)}: source: there is no {file.source!r} beside it")
        for name, e in file.entry.items():
            if name in found:
                raise SpecError(f"{shown_path(path)}: entry.{name}: {found[name].source.name} has it already")
            found[name] = Entry(name, e.summary, folder / file.source, file.macros, e.args, file.static_bytes)
    return found


def find(name: str, folder: Path = AIE) -> Entry:
    known = entries(folder)
    if name not in known:
        raise SpecError(f"no NPU kernel {name!r}{nearest(name, known)}")
    return known[name]
