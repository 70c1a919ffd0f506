"""Expressions keep their tree: what is written is what is compiled, printed and evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.spec.expr import (
    BINARY,
    Const,
    Expr,
    ExprError,
    count,
    evaluate,
    flag,
    lift,
    source,
    variables,
)

X, Y, F = count("x", "a count"), count("y", "another"), flag("f", "a flag")
POINT = {"x": 2, "y": 3, "f": 1}


@pytest.mark.parametrize(
    ("expr", "text", "value"),
    [
        (X == 2, "x == 2", True),
        (X != 2, "x != 2", False),
        (X < Y, "x < y", True),
        (X <= 1, "x <= 1", False),
        (X > Y, "x > y", False),
        (X >= 2, "x >= 2", True),
        (X + Y, "x + y", 5),
        (Y - X, "y - x", 1),
        (~F, "not f", False),
        ((X == 2) & ~F, "(x == 2) and (not f)", False),
        ((X == 1) | F, "(x == 1) or f", True),
        (F.implies(X > Y), "f implies (x > y)", False),
        ((~F).implies(X > Y), "(not f) implies (x > y)", True),
    ],
    ids=str,
)
def test_operators(expr: Expr, text: str, value: int) -> None:
    assert str(expr) == text
    assert evaluate(expr, POINT) == value


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: bool(X == 1),
        lambda: X == 1 and Y == 1,
        lambda: not X,
        lambda: 0 < X < 3,
        lambda: 1 in (X + 1),
        lambda: list(X + 1),
        lambda: X + "1",  # type: ignore[operator]
        lambda: lift(1.5),
    ],
)
def test_what_would_lose_the_tree_raises(misuse: Callable[[], Any]) -> None:
    with pytest.raises(ExprError):
        misuse()


def test_variables_and_effects() -> None:
    assert variables((X + 1 == Y) & F) == {"x", "y", "f"}
    effect = X.set(X + 1)
    assert str(effect) == "x := x + 1"
    assert evaluate(effect.value, POINT) == 3
    assert (X.domain(), F.domain()) == ((0, 1, 2), (0, 1))


LEAVES = st.one_of(st.sampled_from([X, Y, F]), st.integers(0, 3).map(lambda n: Const(value=n)))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a: Expr("not", (a,)), inner),
        st.builds(lambda op, a, b: Expr(op, (a, b)), st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=12,
)


def meaning(expr: Expr, point: dict[str, int]) -> int:
    """What an expression means, worked out by hand: an oracle for the compiler."""
    if expr.op == "var":
        return point[str(expr)]
    if expr.op == "const":
        return int(str(expr))
    if expr.op == "not":
        return not meaning(expr.args[0], point)
    left, right = (meaning(arg, point) for arg in expr.args)
    return {
        "and": left and right, "or": left or right, "implies": (not left) or right,
        "==": left == right, "!=": left != right, "<": left < right, "<=": left <= right,
        ">": left > right, ">=": left >= right, "+": left + right, "-": left - right,
    }[expr.op]  # fmt: skip


@given(
    TREES,
    st.fixed_dictionaries({"x": st.integers(0, 3), "y": st.integers(0, 3), "f": st.integers(0, 1)}),
)
def test_compiled_source_means_what_the_tree_means(expr: Expr, point: dict[str, int]) -> None:
    assert evaluate(expr, point) == int(meaning(expr, point))
    assert "lambda" not in source(expr, "o")
