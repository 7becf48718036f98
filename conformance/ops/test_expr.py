"""The expression language: it computes what Python computes, and refuses everything else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.spec.expr import MAX_DEPTH, MAX_TEXT, Expr, ExprError

AXES = ("T", "H", "HQ", "D")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs, names = st.sampled_from(["+", "-", "*", "/", "//", "%"]), st.sampled_from(["min", "max", "ceil_div"])
    binary = st.tuples(inner, signs, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    call = st.tuples(names, inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
    power = st.tuples(inner, st.integers(0, 3)).map(lambda t: f"({t[0]})**{t[1]}")
    return binary | call | power | inner.map(lambda a: f"-{a}")


LEAVES = st.sampled_from([*AXES, "0.5", "1e-3"]) | st.integers(0, 999).map(str)
NUMBERS = st.recursive(LEAVES, _extend, max_leaves=8)
COMPARISONS = st.tuples(NUMBERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS).map(" ".join)
JOIN = st.sampled_from(["and", "or"])
CONDITIONS = st.recursive(COMPARISONS, lambda c: st.tuples(c, JOIN, c).map(lambda t: f"({' '.join(t)})"), max_leaves=4)
VALUES = st.fixed_dictionaries({a: st.integers(1, 10**6) for a in AXES})


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=NUMBERS | CONDITIONS, env=VALUES)
def test_the_value_is_pythons(text: str, env: dict[str, int]) -> None:
    """Where Python has no value, as for a division by zero, the result is an ExprError that names the text."""
    if len(text) > MAX_TEXT:
        return
    functions = {"min": min, "max": max, "ceil_div": ceil_div}
    try:
        wanted = eval(text, {"__builtins__": {}, **functions}, env)  # the reference, on generated text
    except ArithmeticError:
        with pytest.raises(ExprError, match="with"):
            Expr(text).eval(env)
        return
    try:
        got = Expr(text).eval(env)
    except ExprError as e:
        assert "2**127" in str(e)
        return
    assert got == wanted and type(got) is type(wanted)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(alphabet="TK019+-*/%().,<>=! abemnix_[]'\"\\:;@&|^~{}é\n", max_size=40))
def test_any_text_is_an_expression_or_an_expr_error(text: str) -> None:
    try:
        expr = Expr(text)
    except ExprError as e:
        assert "\n" not in str(e).replace("\\n", "")
        return
    assert expr.names | expr.tensors <= {text[i:j] for i in range(len(text)) for j in range(i, len(text) + 1)}


def test_names_tensors_and_kind() -> None:
    e = Expr("3*F*H*bytes(w) + min(T, 4)")
    assert (e.names, e.tensors, e.truth) == ({"F", "H", "T"}, {"w"}, False)
    assert e.eval({"F": 2, "H": 3, "T": 9}, {"w": 0.5625}.__getitem__) == 3 * 2 * 3 * 0.5625 + 4
    assert Expr("HQ % HK == 0 and D >= 16").truth
    assert Expr(" T ") == Expr("T") and hash(Expr("T")) == hash(Expr("T")) and str(Expr(7)) == "7"
    assert Expr("select(W > 0, min(W, C), C)").eval({"W": 0, "C": 8}) == 8
    assert Expr("select(W > 0, C // W, C)").eval({"W": 0, "C": 8}) == 8  # the other branch is not computed
    assert Expr("1 < T < 4").eval({"T": 4}) is False
    assert Expr("sqrt(T) + log2(T)").eval({"T": 4}) == math.sqrt(4) + 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("T.real", "attribute access"),
        ("layer.a.b", "attribute access"),
        ("layers.window", "attribute access"),
        ("(layer).window()", "only the functions"),
        ("T.__class__.__mro__", "attribute access"),
        ("__import__('os')", 'character "\'"'),
        ("__import__(T)", "unknown function __import__()"),
        ("eval(T)", "unknown function eval()"),
        ("min(T)", "takes 2 to 8 arguments, not 1"),
        ("min(*T, 1)", "plain arguments"),
        ("min(T, key=T)", "plain arguments"),
        ("(min)(T, 1)(2)", "only the functions"),
        ("min", "is a function"),
        ("T[0]", "character '['"),
        ("[T for T in T]", "character '['"),
        ("lambda: T", "character ':'"),
        ("T if T else T", "if/else"),
        ("(T, T)", "list of values"),
        ("T := 1", "character ':'"),
        ("not T", "not part of the expression language"),
        ("T is T", "not part"),
        ("T in T", "not part"),
        ("True", "is not a number"),
        ("1j", "is not a number"),
        ("'a'", 'character "\'"'),
        ("T @ T", "character '@'"),
        ("T & 1", "character '&'"),
        ("2 ** T", "exponent"),
        ("2 ** 9", "exponent"),
        ("2 ** -1", "exponent"),
        ("9 ** 8.0", "exponent"),
        ("1e999", "2**127"),
        ("T and H", "a number stands where a condition is needed"),
        ("(T > 1) + 1", "a condition stands where a number is needed"),
        ("bytes(T + 1)", "takes one tensor name"),
        ("T +", "not a complete expression"),
        ("T\x00", "character '\\x00'"),
        ("T\n+1", "character '\\n'"),
        ("(" * (MAX_DEPTH + 2) + "T" + "+1)" * (MAX_DEPTH + 2), "nested deeper"),
        ("-" * (MAX_DEPTH + 2) + "T", "nested deeper"),
        ("+".join("T" * 120), "more than"),
        ("T" * (MAX_TEXT + 1), "characters; an expression has at most"),
    ],
)
def test_everything_else_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(ExprError) as caught:
        Expr(text)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_values_that_do_not_exist_name_the_text_and_the_values() -> None:
    with pytest.raises(ExprError, match=r"'T // H': .*zero \(with H = 0, T = 4\)"):
        Expr("T // H").eval({"T": 4, "H": 0})
    with pytest.raises(ExprError, match="no value for H"):
        Expr("T + H").eval({"T": 4})
    with pytest.raises(ExprError, match="below 2\\*\\*127"):
        Expr("((T**8)**8)**8").eval({"T": 10})
    with pytest.raises(ExprError, match="needs the tensors' dtypes"):
        Expr("bytes(w)").eval({})
    with pytest.raises(ExprError, match="with T = -1"):
        Expr("sqrt(T)").eval({"T": -1})
    with pytest.raises(ExprError):
        Expr("(0 - T)**1 / (T - T)").eval({"T": 1})


def test_an_expression_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Expr("T").text = "H"


def test_a_layers_numbers_are_names() -> None:
    condition = Expr("layer.window > 0 and l < n_layers - 1")
    assert condition.truth and condition.names == {"layer.window", "l", "n_layers"}
    assert condition.eval({"layer.window": 8, "l": 0, "n_layers": 2})
    assert not condition.eval({"layer.window": 0, "l": 0, "n_layers": 2})
    assert Expr("2*floor").names == {"floor"} and Expr("layer.head_dim // 2").eval({"layer.head_dim": 48}) == 24
    with pytest.raises(ExprError, match=r"no value for layer.head_dim"):
        Expr("layer.head_dim").eval({"head_dim": 48})
