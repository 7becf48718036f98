"""The simulator has the surface of pyxrt (pyxrt.toml), no more, and the host calls only functions of pyxrt."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import tomli

from hybrid.kernels.npu import xrt, xrt_sim

MANIFEST = tomli.loads((Path(xrt.__file__).with_name("pyxrt.toml")).read_text())


def _surface(cls: Any) -> dict[str, set[int]]:
    found = {}
    for name, member in inspect.getmembers(cls, inspect.isfunction):
        key = {"__init__": "init", "__call__": "call"}.get(name, name)
        if not key.startswith("_"):
            params = list(inspect.signature(member).parameters.values())[1:]
            if any(p.kind is p.VAR_POSITIONAL for p in params):
                found[key] = {-1}
            else:
                found[key] = set(range(sum(p.default is p.empty for p in params), len(params) + 1))
    return found


@pytest.mark.parametrize("name", sorted(MANIFEST["class"]))
def test_the_simulator_has_the_surface_of_pyxrt(name: str) -> None:
    wanted, found = MANIFEST["class"][name], _surface(getattr(xrt_sim, name))
    assert set(found) <= set(wanted), f"xrt_sim.{name} offers what pyxrt does not: {set(found) - set(wanted)}"
    for method, counts in wanted.items():
        if method in found and found[method] != {-1}:
            assert set(counts) & found[method], (name, method, counts, found[method])


def test_the_simulator_has_the_constants_of_pyxrt() -> None:
    for name, values in MANIFEST["enum"].items():
        at: Any = xrt_sim
        for part in name.split("."):
            at = getattr(at, part)
        assert {m.name for m in at} <= set(values)


def test_the_host_calls_nothing_that_pyxrt_lacks() -> None:
    """Attributes of the module and of its objects, read from the source."""
    tree = ast.parse(Path(xrt.__file__).read_text())
    known = set(MANIFEST["class"]) | {e.split(".")[0] for e in MANIFEST["enum"]}
    used = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self.xrt", "module")
    }
    assert used and used <= known, used - known
    methods = {m for c in MANIFEST["class"].values() for m in c}
    for attr in (
        "register_xclbin",
        "get_uuid",
        "get_kernels",
        "get_name",
        "group_id",
        "map",
        "sync",
        "set_arg",
        "wait",
        "state",
        "add",
        "execute",
        "get_info",
    ):
        assert attr in methods and any(isinstance(n, ast.Attribute) and n.attr == attr for n in ast.walk(tree)), attr
