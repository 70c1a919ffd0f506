"""What a transition table is, and what must be true of one before anybody may use it.

A table is data: states with their attributes, and rows. Everything else (the manager, the
generated tests, the diagrams, the documents) reads the same rows. An absent (state, event) pair is
illegal; there are no wildcards. `check` runs when a table is built, so a table that exists is well
formed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import networkx as nx
from attrs import field, frozen

from kvstate.spec.expr import Assign, Expr, Var, evaluate, variables
from kvstate.spec.words import ACTIONS, HOLDERS, ORDERINGS


class TableError(ValueError):
    """A table contradicts itself. Names the table, the row or state, and what is wrong."""


@frozen
class State:
    """One state of a machine. `code` is its byte in memory and in traces."""

    code: int
    name: str
    doc: str
    initial: bool = False
    terminal: bool = False
    readable: bool = False
    """Its bytes may be read by a step."""
    writable: bool = False
    """Its bytes may be written by a step."""
    place: str | None = None
    """Where the bytes are: `gpu`, `host`, or nowhere."""
    payer: str | None = None
    """Who is charged for it; nobody if None."""

    def __str__(self) -> str:
        return self.name


@frozen
class Row:
    """One legal transition: in `source`, on `event`, if `guard` holds, to `target`."""

    event: str
    source: State
    target: State
    why: str
    guard: Expr | None = None
    effect: tuple[Assign, ...] = ()
    """What happens to the variables of the object."""
    holds: tuple[str, ...] = ()
    """What happens to named holders: `+transfer` adds, `-transfer` releases."""
    action: str | None = None
    """What the device does, a word of `ACTIONS`."""
    after: tuple[str, ...] = ()
    """What the action waits for, words of `ORDERINGS`."""
    before: tuple[str, ...] = ()
    """What waits for the action, words of `ORDERINGS`."""
    failure: str = ""
    """What it means when the action fails."""

    def __str__(self) -> str:
        guard = "" if self.guard is None else f" [{self.guard}]"
        return f"{self.source} --{self.event}{guard}--> {self.target}"


@frozen
class Table:
    """A machine: its states, the variables its guards may read, and its rows. Checked when
    built."""

    name: str
    doc: str
    states: tuple[State, ...]
    rows: tuple[Row, ...]
    variables: tuple[Var, ...] = ()
    owner: str = field(default="", kw_only=True)
    """Who keeps the state bytes."""
    runs: bool = field(default=False, kw_only=True)
    """Objects come in runs of state bytes; then no row has a guard, an effect or a hold."""

    def __attrs_post_init__(self) -> None:
        check(self)

    @property
    def initial(self) -> State:
        """The state in which an object begins."""
        return next(state for state in self.states if state.initial)

    @property
    def events(self) -> tuple[str, ...]:
        """Every event, in the order in which the rows first name them."""
        return tuple(dict.fromkeys(row.event for row in self.rows))

    def on(self, event: str, source: State | None = None) -> tuple[Row, ...]:
        """The rows of an event, of one source if given."""
        return tuple(
            row for row in self.rows if row.event == event and source in (None, row.source)
        )

    def missing(self) -> Iterator[tuple[State, str]]:
        """Every (state, event) pair that has no row: the illegal ones."""
        for state, event in product(self.states, self.events):
            if not self.on(event, state):
                yield state, event

    def state(self, name: str) -> State:
        """The state of that name. Raises TableError if there is none."""
        for state in self.states:
            if state.name == name:
                return state
        raise TableError(f"{self.name} has no state {name}; it has {_names(self.states)}")

    def graph(self) -> nx.MultiDiGraph[str]:
        """The rows as a graph over state names, each edge carrying its row."""
        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        graph.add_nodes_from(state.name for state in self.states)
        for row in self.rows:
            graph.add_edge(row.source.name, row.target.name, row=row)
        return graph


def rows(
    event: str, *moves: tuple[State, State], why: str, action: str | None = None,
    after: tuple[str, ...] = (), before: tuple[str, ...] = (), failure: str = "",
) -> tuple[Row, ...]:  # fmt: skip
    """One row for each (source, target) of an event that means the same for all of them."""
    return tuple(
        Row(event, source, target, why, None, (), (), action, after, before, failure)
        for source, target in moves
    )


def check(table: Table) -> None:
    """Raise TableError unless the table is well formed. Cost: small; runs at import."""
    _check_states(table)
    for row in table.rows:
        _check_row(table, row)
    _check_choice(table)
    _check_paths(table)


def _check_states(table: Table) -> None:
    codes = [state.code for state in table.states]
    if codes != list(range(len(codes))):
        raise TableError(f"{table.name}: state codes are {codes}, not 0, 1, 2, ... in order")
    if len({state.name for state in table.states}) != len(codes):
        raise TableError(f"{table.name}: two states share a name")
    if sum(state.initial for state in table.states) != 1:
        raise TableError(f"{table.name}: exactly one state must be initial")
    for state in table.states:
        leaves = any(row.source is state for row in table.rows)
        if state.terminal and leaves:
            raise TableError(f"{table.name}: {state} is terminal, but a row leaves it")
        if not state.terminal and not leaves:
            raise TableError(f"{table.name}: {state} has no rows and is not terminal by name")


def _check_row(table: Table, row: Row) -> None:
    where = f"{table.name}: {row}"
    for state in (row.source, row.target):
        if not any(state is known for known in table.states):
            raise TableError(f"{where}: {state} is not a state of this table")
    if not row.why:
        raise TableError(f"{where}: says no why")
    known = {var.name for var in table.variables}
    exprs = [] if row.guard is None else [row.guard]
    exprs += [assign.value for assign in row.effect] + [assign.var for assign in row.effect]
    for unknown in frozenset().union(*map(variables, exprs)) - known:
        raise TableError(f"{where}: {unknown} is not a variable; known are {sorted(known)}")
    _check_words(where, "action", (row.action,) if row.action else (), ACTIONS)
    _check_words(where, "ordering", row.after + row.before, ORDERINGS)
    _check_words(where, "holder", tuple(hold[1:] for hold in row.holds), HOLDERS)
    if table.runs and (row.guard is not None or row.effect or row.holds):
        raise TableError(f"{where}: a row of runs depends on the state byte alone")
    if any(hold[0] not in "+-" for hold in row.holds):
        raise TableError(f"{where}: a hold begins with + or -, not {row.holds}")
    if row.action and not row.failure:
        raise TableError(f"{where}: {row.action} can fail, and the row does not say what then")


def _check_words(where: str, kind: str, used: tuple[str, ...], known: dict[str, str]) -> None:
    for word in used:
        if word not in known:
            raise TableError(f"{where}: {word} is no {kind}; known are {sorted(known)}")


def _check_choice(table: Table) -> None:
    """No two enabled rows for one (state, event): tried for every small value of the variables."""
    groups = defaultdict(list)
    for row in table.rows:
        groups[row.event, row.source.name].append(row)
    for group in groups.values():
        if len(group) > 1:
            _check_exclusive(table, group)


def _check_exclusive(table: Table, group: list[Row]) -> None:
    names = [var.name for var in table.variables]
    for values in product(*(var.domain() for var in table.variables)):
        point = dict(zip(names, values, strict=True))
        enabled = [row for row in group if row.guard is None or evaluate(row.guard, point)]
        if len(enabled) > 1:
            raise TableError(f"{table.name}: {_names(enabled)} are both enabled at {point}")


def _check_paths(table: Table) -> None:
    graph = table.graph()
    start = table.initial.name
    reached: set[str] = nx.descendants(graph, start)
    unreachable = set(graph) - reached - {start}
    if unreachable:
        raise TableError(f"{table.name}: {sorted(unreachable)} cannot be reached from {start}")
    rests = {state.name for state in table.states if state.terminal} or {start}
    for state in table.states:
        onward: set[str] = nx.descendants(graph, state.name) | {state.name}
        if not onward & rests:
            raise TableError(f"{table.name}: from {state} no way leads to {sorted(rests)}")


def _names(things: object) -> str:
    assert isinstance(things, tuple | list)
    return ", ".join(str(thing) for thing in things)
