"""A table that contradicts itself is not built, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
from attrs import evolve

from kvstate.spec import compiled
from kvstate.spec.coupling import COUPLING, OVER, TABLES, Link, check_coupling
from kvstate.spec.expr import flag
from kvstate.spec.table import Row, State, Table, TableError
from kvstate.spec.words import ACTIONS, HOLDERS, ORDERINGS

A = State(0, "A", "begins", initial=True)
B = State(1, "B", "middle")
C = State(2, "C", "ends", terminal=True)
READY = flag("ready", "may go on")
GO, END = Row("go", A, B, "why"), Row("end", B, C, "why", guard=READY)


def table(**changes: Any) -> Table:
    fields: dict[str, Any] = {
        "name": "toy", "doc": "a toy", "states": (A, B, C), "rows": (GO, END),
        "variables": (READY,),
    }  # fmt: skip
    return Table(**(fields | changes))


def test_a_good_table_is_built() -> None:
    toy = table()
    assert toy.events == ("go", "end")
    assert [(str(state), event) for state, event in toy.missing()] == [
        ("A", "end"), ("B", "go"), ("C", "go"), ("C", "end"),
    ]  # fmt: skip
    assert nx.has_path(toy.graph(), "A", "C")
    with pytest.raises(TableError, match="no state X; it has A, B, C"):
        toy.state("X")


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "codes with a gap": (lambda: table(states=(A, B, evolve(C, code=5))), "not 0, 1, 2"),
    "two states of one name": (lambda: table(states=(A, B, evolve(C, name="A"))), "share a name"),
    "no initial state": (lambda: table(states=(evolve(A, initial=False), B, C)), "exactly one"),
    "a way past a terminal": (
        lambda: table(rows=(GO, END, Row("back", C, A, "why"))), "is terminal, but a row leaves"),
    "a state without rows": (lambda: table(rows=(GO,)), "B has no rows"),
    "a state of another table": (
        lambda: table(rows=(GO, END, Row("x", State(0, "A", "other"), B, "why"))),
        "not a state of this table"),
    "an unknown variable": (lambda: table(variables=()), "ready is not a variable"),
    "no why": (lambda: table(rows=(GO, evolve(END, why=""))), "says no why"),
    "an unknown action": (
        lambda: table(rows=(evolve(GO, action="fly", failure="falls"), END)), "fly is no action"),
    "an action without a failure": (
        lambda: table(rows=(evolve(GO, action="map"), END)), "does not say what then"),
    "an unknown ordering": (lambda: table(rows=(evolve(GO, after=("x",)), END)), "no ordering"),
    "an unknown holder": (lambda: table(rows=(evolve(GO, holds=("+x",)), END)), "no holder"),
    "a hold without a sign": (lambda: table(rows=(evolve(GO, holds=("steps",)), END)), "no holder"),
    "two rows for one pair": (
        lambda: table(rows=(GO, END, Row("end", B, A, "why"))), "are both enabled"),
    "guards that overlap": (
        lambda: table(rows=(GO, END, Row("end", B, A, "why", guard=READY | (READY == 1)))),
        "are both enabled at {'ready': 1}"),
    "a state that cannot be reached": (
        lambda: table(rows=(Row("go", A, C, "why"), END)), r"\['B'\] cannot be reached"),
    "a dead end": (
        lambda: table(rows=(GO, Row("spin", B, B, "why"), Row("end", A, C, "why"))),
        "from B no way leads to"),
    "a guard on runs": (lambda: table(runs=True), "state byte alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused(name: str) -> None:
    build, message = BAD[name]
    with pytest.raises(TableError, match=message):
        build()


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (Link("page.fly", "page.drop", "held", "why"), "no event page.fly"),
        (Link("sequence.drop", "page.fly", "held", "why"), "no event page.fly"),
        (Link("sequence.drop", "page.drop", "nothing", "why"), "not a known run"),
        (Link("sequence.drop", "page.drop", "held", "why", when=READY), "has only the variables"),
    ],
)
def test_a_bad_link_is_refused(link: Link, message: str) -> None:
    with pytest.raises(TableError, match=message):
        check_coupling((link,))


def test_rows_of_one_event_must_agree_on_their_action() -> None:
    rows = (
        Row("go", A, B, "why", action="map", failure="x"),
        Row("go", B, C, "why", action="unmap", failure="x"),
        Row("end", B, C, "why"),
    )
    toy = Table("toy", "a toy", (A, B, C), rows, runs=True)
    with pytest.raises(TableError, match="different actions"):
        compiled.compile_tables((toy,), ())


def test_every_word_is_used() -> None:
    """A word that no row or link uses has no meaning that anything could check."""
    rows = [row for each in TABLES.values() for row in each.rows]
    assert {row.action for row in rows} - {None} == set(ACTIONS)
    assert {word for row in rows for word in row.after + row.before} == set(ORDERINGS)
    assert {hold[1:] for row in rows for hold in row.holds} == set(HOLDERS)
    assert {link.over for link in COUPLING} == set(OVER)


def test_translate_tables_say_exactly_what_the_rows_say() -> None:
    for each in (each for each in TABLES.values() if each.runs):
        for name in each.events:
            event = compiled.MACHINES.cell(f"{each.name}.{name}")
            expected = {row.source.code: row.target.code for row in each.on(name)}
            assert {code: to for code, to in enumerate(event.next) if to != 0xFF} == expected
