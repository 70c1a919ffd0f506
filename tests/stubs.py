"""Stand-ins for the objects of the machines: a state, the variables that the table names, and no
more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from kvstate.spec.expr import evaluate
from kvstate.spec.table import Row, State, Table


class Thing:
    """An object of one machine, in a state and with values for its variables."""

    def __init__(self, table: Table, state: State, **values: int) -> None:
        self.table, self.state = table, state.code
        self.names = [var.name for var in table.variables]
        for name in self.names:
            setattr(self, name, values.get(name, 0))

    def __str__(self) -> str:
        return f"{self.table.name} stub"

    def enter(self, code: int) -> None:
        self.state = code

    def values(self) -> dict[str, int]:
        """The variables as they are."""
        return {name: int(getattr(self, name)) for name in self.names}

    def snapshot(self) -> tuple[Any, ...]:
        """Everything about it."""
        return self.state, tuple(self.values().items())


def points(table: Table) -> Iterator[dict[str, int]]:
    """Every combination of small values of the table's variables."""
    names = [var.name for var in table.variables]
    for values in product(*(var.domain() for var in table.variables)):
        yield dict(zip(names, values, strict=True))


def enabling(table: Table, row: Row) -> dict[str, int]:
    """Values of the variables for which the row's guard holds."""
    for point in points(table):
        if row.guard is None or evaluate(row.guard, point):
            return point
    raise AssertionError(f"no small values enable {row}")
