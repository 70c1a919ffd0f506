"""Plan, act, settle: the three steps of every call that changes anything.

*Plan* fires events on copies of state bytes and writes down what would change; an illegal pair
raises here, with nothing changed. *Act* lets the device carry out the actions that the fired rows
name, each registering its undo. *Settle* writes the states; it cannot fail. One function fires
events, one place undoes, one place counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from kvstate.device import Event, Stream
from kvstate.errors import IllegalTransition
from kvstate.spec.compiled import ILLEGAL, CellEvent, ObjectEvent, ObjectRow, row_key
from kvstate.spec.coupling import TABLES
from kvstate.spec.table import Row

STATE_NAMES = {name: tuple(state.name for state in table.states) for name, table in TABLES.items()}


class Cells:
    """A run of state bytes of one machine, and who owns them."""

    __slots__ = ("counts", "owner", "states")

    def __init__(self, owner: Any, states: bytearray, counts: list[int] | None = None) -> None:
        self.owner, self.states, self.counts = owner, states, counts


Run = tuple[Cells, int, int]
"""Cells from one ordinal up to another."""


class Frames(Cells):
    """State bytes with the physical frame that each one speaks of, in the order of addresses."""

    __slots__ = ("ids",)

    def __init__(self, owner: Any, counts: list[int]) -> None:
        super().__init__(owner, bytearray(), counts)
        self.ids: list[int] = []


Act = tuple[Row, Cells, int, int, Frames | None]
"""What the device is to do because a row fired: the row, its cells from one ordinal up to another,
and where they go if they leave their owner."""


class Coverage:
    """Which rows have fired, and so which states were reached, and which links."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.links: dict[str, int] = {}

    def cells(self, event: CellEvent, before: bytearray) -> None:
        """Count the rows that an event fires on these states."""
        for code in set(before):
            self._count(row_key(event.machine, event.rows[code]))

    def object(self, event: ObjectEvent, row: ObjectRow) -> None:
        """Count the row that an event fires."""
        self._count(row_key(event.machine, row.row))

    def link(self, key: str, over: Iterable[Any]) -> None:
        """Count a link that was fired over runs of cells, if any has some, or over objects."""
        if any(one[1] < one[2] if isinstance(one, tuple) else True for one in over):
            self.links[key] = self.links.get(key, 0) + 1

    def _count(self, key: str) -> None:
        self.rows[key] = self.rows.get(key, 0) + 1


class Plan:
    """What one call would change. `operands` names the runs that links are fired over."""

    # What only some plans have is kept on the class until they set it: plans are made often.
    operands: Mapping[str, Iterable[Any]] = {}
    taken = 0
    """Pooled frames that the plan has taken."""
    margin = 0
    """Pooled frames that are mapped besides what is needed, for the one that is planned."""
    token: int | None = None
    """The copy that was issued."""
    # A copy of this plan is between a range's base and these host slots, on this side of a stream.
    base = 0
    room: Sequence[Run] = ()
    size_bytes = 0
    pieces: Sequence[tuple[int, int, int]] = ()
    """(GPU address, host address, bytes), where the pages do not follow one another."""
    span: Any = None
    """Whose frames take the place of others."""
    scratch = 0
    """Free addresses, to overwrite those others at."""
    stream: Stream = None
    event: Event = None

    def __init__(self, coverage: Coverage | None, ignored: str | None) -> None:
        self.coverage = coverage
        self.ignored = ignored
        """An action that the configuration does not want."""
        self.acts: list[Act] = []
        self.splices: list[tuple[MutableSequence[int], int, int, Sequence[int]]] = []
        self.tallies: list[tuple[list[int], bytearray, bytearray]] = []
        self.moves: list[tuple[Any, ObjectRow]] = []
        self.holds: list[tuple[Any, tuple[str, ...]]] = []
        """Objects whose rows change named holds."""

    def fire(
        self, event: CellEvent, cells: Cells, low: int, high: int, into: Frames | None = None
    ) -> None:
        """Fire an event on a run of cells, which then go to another owner if `into` is given.

        Raises IllegalTransition for the first cell that has no row.
        """
        if low >= high:
            return
        before = cells.states[low:high]
        after = _translated(before, event.next)
        if ILLEGAL in after:
            at = after.index(ILLEGAL)
            raise illegal_cell(event, cells, low + at, before[at])
        if into is None:
            self.splices.append((cells.states, low, high, after))
        else:
            assert isinstance(cells, Frames)
            self._hand_over(cells, low, high, into, after)
        if cells.counts is not None:
            self.tallies.append((cells.counts, before, after))
        if event.action is not None and event.action != self.ignored:
            self._act_later(event, cells, low, before, into)
        if self.coverage is not None:
            self.coverage.cells(event, before)

    def _hand_over(
        self, cells: Frames, low: int, high: int, into: Frames, after: Sequence[int]
    ) -> None:
        whole = high - low == len(cells.ids)
        self.splices += (
            (cells.states, low, high, b""),
            (into.states, _END, _END, after),
            # By reference if it can be: frames that are only now created get numbers in `act`.
            (into.ids, _END, _END, cells.ids if whole else cells.ids[low:high]),
            (cells.ids, low, high, ()),
        )

    def _act_later(
        self, event: CellEvent, cells: Cells, low: int, before: bytearray, into: Frames | None
    ) -> None:
        """Note the actions that the fired rows name, one entry a run of equal source states."""
        if event.uniform:
            self.acts.append((event.rows[before[0]], cells, low, low + len(before), into))
            return
        for code, group in groupby(before):
            size = sum(1 for _ in group)
            if event.rows[code].action:
                self.acts.append((event.rows[code], cells, low, low + size, into))
            low += size

    def move(self, event: ObjectEvent, subject: Any, chosen: ObjectRow | None = None) -> None:
        """Fire an event on an object, and over the operands whatever the event moves with it.

        `chosen` is the enabled row, if it is known. Raises IllegalTransition if there is none.
        """
        chosen = chosen or event.decide(subject)
        if chosen is None:
            raise illegal_object(event, subject)
        self.moves.append((subject, chosen))
        if chosen.holds:
            self.holds.append((subject, chosen.holds))
        if self.coverage is not None:
            self.coverage.object(event, chosen)
        operands = self.operands
        for over, when, cells, other, key in event.links:
            if over in operands and (when is None or when(subject)):
                for target in operands[over]:
                    if cells is not None:
                        self.fire(cells, *target)
                    elif other is not None:
                        self.move(other, target)
                if self.coverage is not None:
                    self.coverage.link(key, operands[over])

    def settle(self) -> None:
        """Write down what the plan says. Cannot fail."""
        for target, low, high, value in self.splices:
            target[low:high] = value
        for counts, before, after in self.tallies:
            if len(before) == 1:  # a block that is full: each step of a batch has some
                counts[before[0]] -= 1
                counts[after[0]] += 1
            else:
                _tally(counts, before, after)
        for subject, chosen in self.moves:
            subject.enter(chosen.code)
            if chosen.apply is not None:
                chosen.apply(subject)


LONG_CELLS = 512
"""From here on a run of cells is worth a look at whether all are alike."""
_END = 1 << 62
"""A slice from here appends."""


def illegal_cell(event: CellEvent, cells: Cells, ordinal: int, code: int) -> IllegalTransition:
    """The error for an event that the cell's state has no row for."""
    subject = f"{event.machine} {ordinal} of {cells.owner}"
    return IllegalTransition(subject, event.name, STATE_NAMES[event.machine][code])


def illegal_object(event: ObjectEvent, subject: Any) -> IllegalTransition:
    """The error for an event that has no enabled row, and the guards that were in the way."""
    table = TABLES[event.machine]
    state = table.states[subject.state]
    guards = [f"needs {row.guard}" for row in table.on(event.name, state) if row.guard is not None]
    return IllegalTransition(str(subject), event.name, state.name, " or ".join(guards))


def _translated(before: bytearray, table: bytes) -> bytearray:
    """What the table makes of a run. Long runs are mostly alike, and comparing is faster."""
    if len(before) > LONG_CELLS and before == before[:1] * len(before):
        return before[:1].translate(table) * len(before)
    return before.translate(table)


def _tally(counts: list[int], before: bytearray, after: bytearray) -> None:
    """The one place that counts, but for cells by themselves."""
    size, first = len(before), before[0]
    if before == before[:1] * size:
        counts[first] -= size
        counts[after[0]] += size
    elif size > LONG_CELLS:
        for states, sign in ((before, -1), (after, 1)):
            for code, number in enumerate(np.bincount(np.frombuffer(states, np.uint8)).tolist()):
                counts[code] += sign * number
    else:
        for code in set(before):
            counts[code] -= before.count(code)
        for code in set(after):
            counts[code] += after.count(code)
