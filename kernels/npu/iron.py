"""Check an IRON program against the signatures of its release (iron.toml), or of the installed one."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from hybrid.core.errors import nearest

MANIFEST = Path(__file__).with_name("iron.toml")
PLAIN = {"print", "np.ndarray", "np.dtype"}


class IronError(ValueError):
    """A program calls something that the release does not have, or in another way."""


@lru_cache(maxsize=1)
def manifest() -> dict[str, Any]:
    return tomli.loads(MANIFEST.read_text())


def installed() -> dict[str, Any]:
    """The manifest's table with the signatures of the installed package `aie`. IronError for what that does not
    have."""
    table = manifest()
    found: dict[str, Any] = {"release": "the installed package aie", "function": {}, "method": {}}
    for kind, at in (("function", "module"), ("method", "of")):
        for name, entry in table[kind].items():
            where, _, cls = entry[at].rpartition(".") if kind == "method" else (entry[at], "", "")
            try:
                owner = importlib.import_module(where)
                params = _params(getattr(getattr(owner, cls) if cls else owner, name), bound=kind == "method")
            except (ImportError, AttributeError, ValueError) as error:  # ValueError: a builtin without a signature
                raise IronError(
                    f"the installed package aie is not {table['release']}: {entry[at]}: {name}: {error}"
                ) from None
            found[kind][name] = {**entry, "params": params}
    return found


def _params(value: Any, bound: bool) -> list[str]:
    """A signature in the manifest's form; `bound`: without the first parameter, the object."""
    made: list[str] = []
    for p in list(inspect.signature(value).parameters.values())[1 if bound else 0 :]:
        if p.kind is p.KEYWORD_ONLY and not any(m.startswith("*") for m in made):
            made.append("*")
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        made.append(f"{stars}{p.name}{'' if stars or p.default is p.empty else '='}")
    return made


def signature(params: list[str]) -> inspect.Signature:
    """As Python writes it: `name` is required, `name=` may be left out, what follows `*` or `*name` is given by name,
    `**name` takes any other name."""
    made, kinds = [], inspect.Parameter
    plain: Any = kinds.POSITIONAL_OR_KEYWORD
    for p in params:
        stars = len(p) - len(p.lstrip("*"))
        if p != "*":
            own = (plain, kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)[stars]
            made.append(
                inspect.Parameter(p.strip("*="), own, default=None if p[-1] == "=" else inspect.Parameter.empty)
            )
        if stars == 1:
            plain = kinds.KEYWORD_ONLY
    return inspect.Signature(made)


def check_program(source: str, table: Mapping[str, Any] | None = None) -> int:
    """Number of calls bound. Raises IronError, with the line, for an import or a call that the release does not have.
    `table`: of another release than the manifest's (installed())."""
    tree, table = ast.parse(source), table or manifest()
    imported = _imports(tree, table)
    count = 0
    for function in [None, *(f for f in tree.body if isinstance(f, ast.FunctionDef))]:
        formal = {a.arg for a in function.args.args} if function else set()
        nodes = (
            ast.walk(function)
            if function
            else (n for s in tree.body if not isinstance(s, ast.FunctionDef) for n in ast.walk(s))
        )
        for call in (n for n in nodes if isinstance(n, ast.Call)):
            _bind(call, imported, formal, table)
            count += 1
    return count


def _imports(tree: ast.Module, table: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("aie")):
        for alias in node.names:
            known = {n for n, f in table["function"].items() if f["module"] == node.module}
            if alias.name not in known:
                raise IronError(
                    f"line {node.lineno}: {table['release']} has no {alias.name} in {node.module}{nearest(alias.name, known)}"
                )
            names.add(alias.name)
    return names


def _bind(call: ast.Call, imported: set[str], formal: set[str], table: Mapping[str, Any]) -> None:
    where = f"line {call.lineno}: {ast.unparse(call.func)}"
    if isinstance(call.func, ast.Name):
        if call.func.id in formal or call.func.id in PLAIN:
            return  # a kernel that was given to the core
        if call.func.id not in imported:
            raise IronError(f"{where}: is not imported")
        entry = table["function"][call.func.id]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in table["method"]:
        entry = table["method"][call.func.attr]
    else:
        raise IronError(
            f"{where}: {table['release']} has no such call{nearest(ast.unparse(call.func).split('.')[-1], table['method'])}"
        )
    try:
        signature(entry["params"]).bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
    except TypeError as error:
        raise IronError(
            f"{where}: {error}; {table['release']}: ({', '.join(entry['params'])}), {entry['path']}"
        ) from None
