"""The expression language of specs: arithmetic over named integers. It is parsed against a whitelist, never run by
Python's eval.

    (HQ + 2*HK)*D              shapes
    HQ % HK == 0 and D >= 16   constraints
    2*T*N*K + bytes(w)*N*K     costs; bytes(NAME) is the bytes per element of tensor NAME

Operands are ints, floats, names and `layer.NAME` of a schedule's layer. Operators are + - * / // % and ** (a literal
exponent of at most 8), comparisons, `and`, `or`. Functions are min, max, ceil_div, sqrt, log2, select(condition, a, b).
Length, depth, size and results are bounded, so that an untrusted spec can neither run code nor hang the parser.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

MAX_TEXT, MAX_DEPTH, MAX_NODES, MAX_EXPONENT = 300, 24, 200, 8
LIMIT = 2**127  # of the magnitude of results

_ALLOWED = re.compile(r"[A-Za-z0-9_+\-*/%().,<>=! ]*")
_ARITHMETIC: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# name -> (fewest arguments, most arguments, function)
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "min": (2, 8, min),
    "max": (2, 8, max),
    "ceil_div": (2, 2, lambda a, b: -(-a // b)),
    "sqrt": (1, 1, math.sqrt),
    "log2": (1, 1, math.log2),
}
LAYER = "layer"
RESERVED = frozenset({*_FUNCTIONS, "select", "bytes", "and", "or"})


class ExprError(ValueError):
    """An invalid expression, or one without a value for the given names. The message has the text."""


class Expr:
    """A parsed expression. Immutable; equal when the text is equal.

    names: its variables; tensors: those inside bytes(...); truth: whether it is a condition rather than a number.
    """

    __slots__ = ("_value", "names", "tensors", "text", "truth")

    text: str
    names: frozenset[str]
    tensors: frozenset[str]
    truth: bool
    _value: _Value

    def __init__(self, text: str | int | float) -> None:
        text = str(text).strip()
        found, names, tensors, truth = _parse(text)
        for key, value in (("text", text), ("names", names), ("tensors", tensors), ("truth", truth), ("_value", found)):
            object.__setattr__(self, key, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Expr cannot be changed")

    def eval(self, env: Mapping[str, int | float], bytes: Callable[[str], float] | None = None) -> int | float | bool:
        """The value with names bound by `env`; `bytes` returns the bytes per element of a tensor.

        Raises ExprError for a missing name, a division by zero, a root or logarithm out of its domain, or a result
        beyond 2**127.
        """
        try:
            return self._value(env, bytes)
        except KeyError as e:
            raise ExprError(f"{self.text!r}: no value for {e.args[0]}") from None
        except ExprError as e:
            raise ExprError(f"{self.text!r}: {e}") from None
        except (ArithmeticError, ValueError, TypeError) as e:
            raise ExprError(f"{self.text!r}: {e} (with {_shown(env, self.names)})") from None

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # lazy: only pydantic calls this

        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": ["string", "number"], "maxLength": MAX_TEXT, "description": "an expression of hybrid.spec.expr"}

    @classmethod
    def _validate(cls, value: object) -> Expr:
        if isinstance(value, Expr):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ExprError(f"expected an expression (text or number), not {value!r}")
        return cls(value)


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[_Value, frozenset[str], frozenset[str], bool]:
    def refuse(reason: str) -> ExprError:
        return ExprError(f"{text if len(text) <= 60 else text[:57] + '...'!r}: {reason}")

    if not text:
        raise refuse("the expression is empty")
    if len(text) > MAX_TEXT:
        raise refuse(f"{len(text)} characters; an expression has at most {MAX_TEXT}")
    bad = _ALLOWED.sub("", text)
    if bad:
        raise refuse(f"character {bad[0]!r} is not part of the expression language")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise refuse("not a complete expression") from None
    names: set[str] = set()
    tensors: set[str] = set()
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise refuse(f"more than {MAX_NODES} terms")
    try:
        truth = _kind(tree, 0, names, tensors)
    except ExprError as e:
        raise refuse(str(e)) from None
    return _compiled(tree), frozenset(names), frozenset(tensors), truth


def _kind(node: ast.expr, depth: int, names: set[str], tensors: set[str]) -> bool:
    """Check a node against the whitelist and collect names. True for a condition, False for a number."""
    if depth > MAX_DEPTH:
        raise ExprError(f"nested deeper than {MAX_DEPTH}")

    def number(child: ast.expr) -> None:
        if _kind(child, depth + 1, names, tensors):
            raise ExprError("a condition stands where a number is needed; select(condition, a, b) makes one")

    def condition(child: ast.expr) -> None:
        if not _kind(child, depth + 1, names, tensors):
            raise ExprError("a number stands where a condition is needed; compare it with something")

    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise ExprError(f"{node.value!r} is not a number")
        if not abs(node.value) <= LIMIT:
            raise ExprError("a number beyond 2**127")
        return False
    if isinstance(node, ast.Name):
        if node.id in RESERVED:
            raise ExprError(f"{node.id} is a function: write {node.id}(...)")
        names.add(node.id)
        return False
    if (name := _of_layer(node)) is not None:
        names.add(name)
        return False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number(node.operand)
        return False
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if isinstance(node.op, ast.Pow):
            exponent = node.right.value if isinstance(node.right, ast.Constant) else None
            if type(exponent) is not int or exponent > MAX_EXPONENT:
                raise ExprError(f"the exponent of ** must be written as a whole number of at most {MAX_EXPONENT}")
        number(node.left)
        number(node.right)
        return False
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        for child in (node.left, *node.comparators):
            number(child)
        return True
    if isinstance(node, ast.BoolOp):
        for child in node.values:
            condition(child)
        return True
    if isinstance(node, ast.Call):
        _call(node, names, tensors, number, condition)
        return False
    what = {
        ast.Attribute: "attribute access (.)",
        ast.Subscript: "indexing",
        ast.Lambda: "lambda",
        ast.IfExp: "if/else (use select(condition, a, b))",
        ast.Tuple: "a list of values",
    }
    raise ExprError(f"{what.get(type(node), type(node).__name__)} is not part of the expression language")


def _of_layer(node: ast.expr) -> str | None:
    """The text of `layer.NAME`, the only dotted name; None for other nodes."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == LAYER:
        return f"{LAYER}.{node.attr}"
    return None


def _call(
    node: ast.Call,
    names: set[str],
    tensors: set[str],
    number: Callable[[ast.expr], None],
    condition: Callable[[ast.expr], None],
) -> None:
    known = ", ".join(sorted([*_FUNCTIONS, "select", "bytes"]))
    if not isinstance(node.func, ast.Name):
        raise ExprError(f"only the functions {known} can be called")
    name = node.func.id
    if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
        raise ExprError(f"{name}() takes plain arguments only")
    if name == "bytes":
        if len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
            raise ExprError("bytes() takes one tensor name: bytes(w)")
        tensors.add(node.args[0].id)
        return
    if name == "select":
        if len(node.args) != 3:
            raise ExprError("select() takes a condition and two numbers")
        condition(node.args[0])
        number(node.args[1])
        number(node.args[2])
        return
    if name not in _FUNCTIONS:
        raise ExprError(f"unknown function {name}(); known: {known}")
    fewest, most, _ = _FUNCTIONS[name]
    if not fewest <= len(node.args) <= most:
        raise ExprError(
            f"{name}() takes {fewest if fewest == most else f'{fewest} to {most}'} arguments, not {len(node.args)}"
        )
    for argument in node.args:
        number(argument)


_Value = Callable[[Mapping[str, Any], "Callable[[str], float] | None"], Any]
"""Evaluates an expression, given variables and the `bytes` function."""


def _compiled(node: ast.expr) -> _Value:
    """Compile a node that _kind has accepted into a closure."""
    if isinstance(node, ast.Constant):
        value = node.value
        return lambda env, bytes: value
    if (name := node.id if isinstance(node, ast.Name) else _of_layer(node)) is not None:
        return lambda env, bytes: env[name]
    if isinstance(node, ast.UnaryOp):
        operand = _compiled(node.operand)
        return (lambda env, bytes: -operand(env, bytes)) if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        function, left, right = _ARITHMETIC[type(node.op)][1], _compiled(node.left), _compiled(node.right)
        return lambda env, bytes: _bounded(function(left(env, bytes), right(env, bytes)))
    if isinstance(node, ast.Compare):
        terms, holds = [_compiled(v) for v in (node.left, *node.comparators)], [_COMPARE[type(op)] for op in node.ops]

        def compare(env: Mapping[str, Any], bytes: Callable[[str], float] | None) -> bool:
            values = [term(env, bytes) for term in terms]
            return all(hold(a, b) for hold, a, b in zip(holds, values, values[1:], strict=False))

        return compare
    if isinstance(node, ast.BoolOp):
        test, conditions = all if isinstance(node.op, ast.And) else any, [_compiled(v) for v in node.values]
        return lambda env, bytes: test(condition(env, bytes) for condition in conditions)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if node.func.id == "bytes":
        assert isinstance(node.args[0], ast.Name)
        tensor = node.args[0].id
        return lambda env, bytes: _bytes_of(tensor, bytes)
    arguments = [_compiled(a) for a in node.args]
    if node.func.id == "select":
        when, yes, no = arguments
        return lambda env, bytes: (yes if when(env, bytes) else no)(env, bytes)
    call = _FUNCTIONS[node.func.id][2]
    return lambda env, bytes: _bounded(call(*(a(env, bytes) for a in arguments)))


def _bytes_of(tensor: str, bytes: Callable[[str], float] | None) -> float:
    if bytes is None:
        raise ExprError(f"bytes({tensor}) needs the tensors' dtypes")
    return bytes(tensor)


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or not abs(value) <= LIMIT:
        raise ExprError("the result is not a number below 2**127")
    return value


def _shown(env: Mapping[str, Any], names: frozenset[str]) -> str:
    return ", ".join(f"{n} = {env[n]}" for n in sorted(names) if n in env) or "no names"
