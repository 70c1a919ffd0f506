"""Small expressions over named variables: the guards and effects of rows.

A row must be executed, explained, drawn, mutated, explored and proved without being written twice,
so a guard is a syntax tree and not a Python function. Operators build the tree; `compile_expr`
turns it into Python source.

Plain callables were rejected: `and`, `not` and chained comparisons evaluate at once and lose the
tree, silently. Here `__bool__` and `__contains__` raise, so these cannot be written by mistake;
use `&`, `|` and `~`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import field, frozen

_PYTHON = {"and": "and", "or": "or", "implies": "<=", "==": "==", "!=": "!=", "<": "<", "<=": "<="}
_PYTHON |= {">": ">", ">=": ">=", "+": "+", "-": "-"}
BINARY = tuple(_PYTHON)
"""Every binary operator that a node may have."""


class ExprError(TypeError):
    """An expression was built or used in a way that would lose its tree."""


@frozen(eq=False, repr=False)
class Expr:
    """One node: an operator and its operands. Leaves are `Var` and `Const`."""

    op: str
    args: tuple[Expr, ...] = ()

    def __and__(self, other: Operand) -> Expr:
        return Expr("and", (self, lift(other)))

    def __or__(self, other: Operand) -> Expr:
        return Expr("or", (self, lift(other)))

    def __invert__(self) -> Expr:
        return Expr("not", (self,))

    def __add__(self, other: Operand) -> Expr:
        return Expr("+", (self, lift(other)))

    def __sub__(self, other: Operand) -> Expr:
        return Expr("-", (self, lift(other)))

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return Expr("==", (self, lift(other)))

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return Expr("!=", (self, lift(other)))

    def __lt__(self, other: Operand) -> Expr:
        return Expr("<", (self, lift(other)))

    def __le__(self, other: Operand) -> Expr:
        return Expr("<=", (self, lift(other)))

    def __gt__(self, other: Operand) -> Expr:
        return Expr(">", (self, lift(other)))

    def __ge__(self, other: Operand) -> Expr:
        return Expr(">=", (self, lift(other)))

    def implies(self, other: Operand) -> Expr:
        """`self` is false, or `other` is true."""
        return Expr("implies", (self, lift(other)))

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ExprError(f"({self}) has no truth value yet: write & | ~ instead of and, or, not")

    def __contains__(self, item: object) -> bool:
        raise ExprError(f"({self}) is no container: write (x == a) | (x == b) instead of in")

    def __iter__(self) -> Iterator[Expr]:
        raise ExprError(f"({self}) cannot be iterated over")

    def __str__(self) -> str:
        if self.op == "not":
            return f"not {_bracketed(self.args[0])}"
        left, right = self.args
        return f"{_bracketed(left)} {self.op} {_bracketed(right)}"

    __repr__ = __str__

    def nodes(self) -> Iterator[Expr]:
        """This node and every node under it, parents first."""
        yield self
        for arg in self.args:
            yield from arg.nodes()


@frozen(eq=False, repr=False)
class Var(Expr):
    """A named variable of the object that owns the row: a count (0, 1, 2, ...) or a flag."""

    op: str = field(default="var", init=False)
    name: str = field(kw_only=True)
    doc: str = field(kw_only=True)
    flag: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__
    __hash__ = object.__hash__

    def domain(self) -> tuple[int, ...]:
        """The values to try when all of them are tried: none, one and many are enough for a
        count."""
        return (0, 1) if self.flag else (0, 1, 2)

    def set(self, value: Operand) -> Assign:
        """The effect that gives this variable the value."""
        return Assign(self, lift(value))


@frozen(eq=False, repr=False)
class Const(Expr):
    """A number; truth values are 0 and 1."""

    op: str = field(default="const", init=False)
    value: int = field(kw_only=True)

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__
    __hash__ = object.__hash__


@frozen(repr=False)
class Assign:
    """An effect: the variable becomes the value of the expression, read before any effect of the
    row."""

    var: Var
    value: Expr

    def __str__(self) -> str:
        return f"{self.var} := {self.value}"

    __repr__ = __str__


Operand = Expr | int


def count(name: str, doc: str) -> Var:
    """A variable that counts: 0, 1, 2 and so on."""
    return Var(name=name, doc=doc)


def flag(name: str, doc: str) -> Var:
    """A variable that is 0 or 1."""
    return Var(name=name, doc=doc, flag=True)


def lift(value: object) -> Expr:
    """The operand as a node; numbers become constants."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, int):
        return Const(value=int(value))
    raise ExprError(f"{value!r} is neither an expression nor a whole number")


def variables(expr: Expr) -> frozenset[str]:
    """The names of the variables that the expression reads."""
    return frozenset(node.name for node in expr.nodes() if isinstance(node, Var))


def source(expr: Expr, subject: str) -> str:
    """The expression as Python source; variable `x` is read as `{subject}.x`."""
    if isinstance(expr, Var):
        return f"{subject}.{expr.name}"
    if isinstance(expr, Const):
        return str(expr.value)
    parts = [source(arg, subject) for arg in expr.args]
    if expr.op == "not":
        return f"(not {parts[0]})"
    if expr.op == "implies":
        return f"((not {parts[0]}) or {parts[1]})"
    return f"({parts[0]} {_PYTHON[expr.op]} {parts[1]})"


def evaluate(expr: Expr, values: Mapping[str, int]) -> int:
    """The value of the expression where the variables have these values. For checks, not for hot
    paths."""
    subject = type("Values", (), dict(values))
    return int(build(f"lambda o: {source(expr, 'o')}")(subject))


def build(text: str, **names: object) -> Callable[..., Any]:
    """The function that this source text is; `names` are the names it may use."""
    scope: dict[str, Any] = {"__builtins__": {}, **names}
    result: Callable[..., Any] = eval(compile(text, "<kvstate table>", "eval"), scope)
    return result


def _bracketed(expr: Expr) -> str:
    return f"({expr})" if expr.args else str(expr)
