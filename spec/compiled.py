"""Tables compiled to what a hot path can use.

A machine that owns runs of bytes (page, frame, host slot) compiles each event to a 256-byte
translate table in which 0xFF means illegal: firing it on a run of any length is one
`bytes.translate`, one scan and one write. A machine of single objects (sequence, range, transfer,
step) compiles each event to one function, generated as source from its rows and guards. Nothing is
interpreted, and there is no second copy of a table in `if`s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from attrs import frozen

from kvstate.spec.coupling import COUPLING, TABLES, Link
from kvstate.spec.expr import Assign, build, source
from kvstate.spec.table import Row, Table, TableError

ILLEGAL: Final = 0xFF


class Object(Protocol):
    """What an object of a machine without runs offers: its state byte and its variables by
    name."""

    state: int


@frozen(eq=False)
class CellEvent:
    """An event of a machine that owns runs of state bytes."""

    machine: str
    name: str
    next: bytes
    """256 bytes: the next state's code by the present one's, or 0xFF."""
    rows: dict[int, Row]
    """The row by the code of its source."""
    action: str | None
    """What the device does for those rows that have an action: one thing an event at most."""
    uniform: bool
    """Every row has it."""

    def __str__(self) -> str:
        return f"{self.machine}.{self.name}"


@frozen(eq=False)
class ObjectRow:
    """A row of a single-object machine."""

    row: Row
    code: int
    """The code of the target."""
    apply: Callable[[Any], None] | None
    """Carries out the effect on the object."""
    holds: tuple[str, ...]


@frozen(eq=False)
class ObjectEvent:
    """An event of a machine of single objects, and what it moves in other machines."""

    machine: str
    name: str
    decide: Callable[[Any], ObjectRow | None]
    """The enabled row for the object, or None: then the event is illegal now."""
    links: tuple[CompiledLink, ...]

    def __str__(self) -> str:
        return f"{self.machine}.{self.name}"


class CompiledLink(NamedTuple):
    """A coupling link with its event resolved and its condition compiled."""

    over: str
    when: Callable[[Any], bool] | None
    cells: CellEvent | None
    """What it fires, on a machine that owns runs."""
    object: ObjectEvent | None
    """What it fires, on a machine of single objects."""
    key: str
    """Its name in statistics and coverage."""


@frozen(eq=False)
class Machines:
    """Every event of every table, compiled: `machines["page.commit"]`."""

    events: dict[str, CellEvent | ObjectEvent]

    def cell(self, name: str) -> CellEvent:
        """The event of a machine that owns runs."""
        event = self.events[name]
        assert isinstance(event, CellEvent), name
        return event

    def object(self, name: str) -> ObjectEvent:
        """The event of a single-object machine."""
        event = self.events[name]
        assert isinstance(event, ObjectEvent), name
        return event


def row_key(machine: str, row: Row) -> str:
    """The name of a row in statistics and coverage: `frame.map: POOLED -> MAPPED`."""
    return f"{machine}.{row.event}: {row.source} -> {row.target}"


def compile_tables(
    tables: Sequence[Table] = tuple(TABLES.values()), coupling: Sequence[Link] = COUPLING
) -> Machines:
    """Compile tables and their coupling. Cost: milliseconds; done once at import."""
    by_name = {table.name: table for table in tables}
    events: dict[str, CellEvent | ObjectEvent] = {}
    for name in _fired_first(coupling, by_name):
        machine, _, event = name.partition(".")
        table = by_name[machine]
        if table.runs:
            events[name] = _cell_event(table, event)
        else:
            links = tuple(_link(link, events) for link in coupling if link.cause == name)
            events[name] = ObjectEvent(machine, event, _decider(table, event), links)
    return Machines(events)


def _fired_first(coupling: Sequence[Link], tables: dict[str, Table]) -> list[str]:
    """Every event name, those that links fire before those that cause them."""
    names = [f"{table.name}.{event}" for table in tables.values() for event in table.events]
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for link in coupling:
            depth[link.cause] = max(depth[link.cause], depth[link.fires] + 1)
    return sorted(names, key=lambda name: (depth[name], names.index(name)))


def _cell_event(table: Table, event: str) -> CellEvent:
    table_bytes = bytearray([ILLEGAL]) * 256
    found = {}
    for row in table.on(event):
        table_bytes[row.source.code] = row.target.code
        found[row.source.code] = row
    acts = {(row.action, row.after, row.before) for row in found.values() if row.action}
    if len(acts) > 1:
        raise TableError(f"{table.name}.{event}: its rows ask for different actions")
    action = next(iter(acts))[0] if acts else None
    uniform = all(row.action for row in found.values())
    return CellEvent(table.name, event, bytes(table_bytes), found, action, uniform)


def _decider(table: Table, event: str) -> Callable[[Any], ObjectRow | None]:
    """The function from an object to its enabled row: one conditional expression, built as
    source."""
    compiled: list[ObjectRow] = []
    text = "None"
    for row in reversed(table.on(event)):
        guard = "" if row.guard is None else f" and {source(row.guard, 'o')}"
        text = f"R[{len(compiled)}] if o.state == {row.source.code}{guard} else {text}"
        compiled.append(ObjectRow(row, row.target.code, _effect(row.effect), row.holds))
    return build(f"lambda o: {text}", R=tuple(compiled))


def _effect(effect: tuple[Assign, ...]) -> Callable[[Any], None] | None:
    if not effect:
        return None
    targets = ", ".join(f"o.{assign.var.name}" for assign in effect)
    values = ", ".join(source(assign.value, "o") for assign in effect)
    scope: dict[str, Any] = {"__builtins__": {}}
    exec(compile(f"def apply(o): {targets} = {values}", "<kvstate table>", "exec"), scope)
    applied: Callable[[Any], None] = scope["apply"]
    return applied


def _link(link: Link, events: dict[str, CellEvent | ObjectEvent]) -> CompiledLink:
    when = None if link.when is None else build(f"lambda o: {source(link.when, 'o')}")
    fires = events[link.fires]
    cells = fires if isinstance(fires, CellEvent) else None
    other = fires if isinstance(fires, ObjectEvent) else None
    return CompiledLink(link.over, when, cells, other, str(link))


MACHINES: Final = compile_tables()
"""The project's own tables, compiled."""
