"""Emitted programs call existing IRON functions: the manifest's signatures, their sources, and those of an installed
package."""

from __future__ import annotations

import ast
import re
import sys
import types
from typing import Any

import pytest

from hybrid.kernels.npu import iron
from hybrid.kernels.npu.designs import gemm_i8, shipped
from hybrid.kernels.npu.designs.gemm import Gemm
from hybrid.kernels.npu.emitter import emit
from hybrid.kernels.npu.iron import IronError, check_program, manifest

G = Gemm(128, 64, 64, 16, 32, 16, 2)


@pytest.mark.parametrize(
    ("was", "becomes", "text"),
    [
        ("depth=2, name", "depths=2, name", "unexpected keyword"),
        ("Tile(0, 2)", "Tile(0, 2, 1, 1, 1)", "too many positional"),
        (".acquire(1)", ".take(1)", "no such call"),
        ("import Kernel, ", "import Kernal, ", "has no Kernal"),
        ("a_in0_prod.fill(A, ", "a_in0_prod.fill(", "missing a required argument"),
        ("tile=Tile(0, 0)", "placement=Tile(0, 0)", "unexpected keyword"),
        (".finish()", ".finish(1)", "too many positional"),
        ("range_(", "xrange_(", "not imported"),
    ],
)
def test_calls_that_the_release_does_not_have_are_refused(was: str, becomes: str, text: str) -> None:
    source = emit(gemm_i8(G))
    assert was in source
    with pytest.raises(IronError, match=text):
        check_program(source.replace(was, becomes))


def test_signatures_say_where_they_were_read() -> None:
    """One tagged release for all, and for each its file and the page; none that no emitted program calls."""
    table = manifest()
    assert re.fullmatch(r"v\d+\.\d+\.\d+", table["tag"]) and table["release"] == f"mlir-aie {table['tag'][1:]}"
    assert table["wheels"].endswith(table["tag"]) and re.fullmatch(r"[0-9a-f]{7,40}", table["commit"])
    called: set[str] = set()
    for name in (
        "small.attention",
        *(f"small.i8.c{n}" for n in (1, 2, 3, 4)),
    ):  # which make all calls that any design makes
        for node in ast.walk(ast.parse(emit(shipped()[name]()))):
            if isinstance(node, ast.Call):
                called.add(node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func).split(".")[-1])
    entries = {**table["function"], **table["method"]}
    assert set(entries) <= called, set(entries) - called
    for name, entry in entries.items():
        assert entry["path"].startswith("python/") and entry["path"].endswith(".py"), name
        guide = entry["page"].startswith(f"{table['tag'][1:]}/programming_guide/")
        assert guide or entry["page"].endswith("/references/python_api/"), f"{name}: no page of the reference"


def range_(*args: Any, iter_args: Any = None, insert_yield: bool = True, **kwargs: Any) -> None:
    """The signature of aie.iron.controlflow.range_ in 1.4.0."""


def test_signatures_keep_what_is_given_by_name_only() -> None:
    table = manifest()
    assert iron._params(range_, bound=False) == table["function"]["range_"]["params"]
    for params, calls in (
        (iron._params(range_, bound=False), ("f(4)", "f(0, 4, 2)", "f(4, iter_args=[1], wide=1)")),
        (["a", "*", "b", "c="], ("f(1, b=2)", "f(a=1, c=3, b=2)")),
    ):
        for call in calls:
            iron._bind(*_bound(call, params))
    for params, call, text in (
        (["a", "*", "b", "c="], "f(1, 2)", "too many positional"),
        (["a", "*", "b", "c="], "f(1)", "missing a required"),
        (["*args", "iter_args="], "f(4, wide=1)", "unexpected keyword"),
    ):
        with pytest.raises(IronError, match=text):
            iron._bind(*_bound(call, params))


def _bound(call: str, params: list[str]) -> tuple[ast.Call, set[str], set[str], dict[str, Any]]:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    return node, {"f"}, set(), {"release": "r", "function": {"f": {"params": params, "path": "p"}}, "method": {}}


def _package(monkeypatch: pytest.MonkeyPatch, **changed: list[str]) -> None:
    """A package `aie` of empty functions with the manifest's signatures, except for those in `changed`."""
    table = iron.manifest()
    modules: dict[str, Any] = {}

    def module(name: str) -> Any:
        return modules.setdefault(name, types.ModuleType(name))

    def made(name: str, params: list[str], first: str = "") -> Any:
        given = ", ".join([*([first] if first else []), *(p + "None" if p.endswith("=") else p for p in params)])
        scope: dict[str, Any] = {}
        exec(f"def {name}({given}): pass", scope)
        return scope[name]

    for name, entry in table["function"].items():
        function = made("__init__", changed.get(name, entry["params"]), "self")
        setattr(module(entry["module"]), name, type(name, (), {"__init__": function}))
    for name, entry in table["method"].items():
        where, cls = entry["of"].rsplit(".", 1)
        if not hasattr(module(where), cls):
            setattr(module(where), cls, type(cls, (), {}))
        setattr(getattr(module(where), cls), name, made(name, changed.get(name, entry["params"]), "self"))
    for name, value in modules.items():
        monkeypatch.setitem(sys.modules, name, value)
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:i]), modules.get(".".join(parts[:i]), types.ModuleType(parts[i - 1]))
            )


def test_programs_are_bound_to_the_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = emit(shipped()["small.attention"]())
    with pytest.raises(iron.IronError, match=r"is not mlir-aie .*No module named 'aie"):
        iron.installed()
    _package(monkeypatch)
    found = iron.installed()
    for kind in ("function", "method"):
        assert {n: e["params"] for n, e in found[kind].items()} == {
            n: e["params"] for n, e in iron.manifest()[kind].items()
        }
    assert iron.check_program(source, found) > 100
    _package(monkeypatch, Worker=["core_fn", "fn_args=", "placement="])  # as in earlier releases
    with pytest.raises(iron.IronError, match=r"Worker: .*tile.*the installed package aie"):
        iron.check_program(source, iron.installed())
