"""Tests made from the tables: one a row, one a missing pair, and pairs of rows that follow each
other.

Each is made twice: on the compiled machine alone, where target, counts, actions and holds are
compared with the row, and on the real manager and device, where the fewest public calls that fire
the row are played with every law, the naive model and the bytes checked after each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvstate import trace
from kvstate.campaign.player import Player
from kvstate.device import Completion
from kvstate.errors import IllegalTransition
from kvstate.gpu import open_device
from kvstate.gpu.cuda import CudaDevice
from kvstate.plan import Cells, Plan
from kvstate.spec.compiled import MACHINES, CellEvent, ObjectEvent, row_key
from kvstate.spec.coupling import TABLES
from kvstate.spec.expr import evaluate
from kvstate.spec.sequence import SEQUENCE
from kvstate.spec.table import Row, State, Table
from kvstate.view import view
from tests.paths import ROWS, Program, header, search
from tests.stubs import Thing, enabling, points

pytestmark = pytest.mark.xdist_group("rows")

Case = tuple[Table, Row]
CASES: dict[str, Case] = {
    row_key(table.name, row): (table, row) for table in TABLES.values() for row in table.rows
}
MISSING = {
    f"{table.name}.{event} in {state}": (table, state, event)
    for table in TABLES.values()
    for state, event in table.missing()
}
RUNS = [key for key, (table, _) in CASES.items() if table.runs]
OBJECTS = [key for key, (table, _) in CASES.items() if not table.runs]


def cells(table: Table, state: State, count: int = 3) -> Cells:
    counts = [0] * len(table.states)
    counts[state.code] = count
    return Cells("a test", bytearray([state.code]) * count, counts)


# On the machine alone.


@pytest.mark.parametrize("key", RUNS)
def test_row_of_runs(key: str) -> None:
    table, row = CASES[key]
    event = MACHINES.cell(f"{table.name}.{row.event}")
    run, plan = cells(table, row.source), Plan(None, None)
    plan.fire(event, run, 0, 2)
    assert bytes(run.states) == bytes([row.source.code]) * 3, "planning must change nothing"
    assert [act[0].action for act in plan.acts] == ([row.action] if row.action else [])
    assert all(act[2:4] == (0, 2) for act in plan.acts)
    plan.settle()
    assert bytes(run.states) == bytes([row.target.code] * 2 + [row.source.code])
    assert run.counts == [run.states.count(code) for code in range(len(table.states))]


@pytest.mark.parametrize("key", OBJECTS)
def test_row_of_objects(key: str) -> None:
    table, row = CASES[key]
    event = MACHINES.object(f"{table.name}.{row.event}")
    values = enabling(table, row)
    thing, plan = Thing(table, row.source, **values), Plan(None, None)
    plan.move(event, thing)
    assert thing.snapshot() == Thing(table, row.source, **values).snapshot()
    assert plan.holds == ([(thing, row.holds)] if row.holds else [])
    plan.settle()
    expected = values | {a.var.name: evaluate(a.value, values) for a in row.effect}
    assert (thing.state, thing.values()) == (row.target.code, expected)


@pytest.mark.parametrize("key", [key for key in OBJECTS if CASES[key][1].guard is not None])
def test_guard_decides_for_every_small_value(key: str) -> None:
    table, row = CASES[key]
    event = MACHINES.object(f"{table.name}.{row.event}")
    assert row.guard is not None
    for values in points(table):
        chosen = event.decide(Thing(table, row.source, **values))
        assert (chosen is not None and chosen.row is row) == bool(evaluate(row.guard, values))


@pytest.mark.parametrize("key", MISSING)
def test_missing_pair_raises_and_changes_nothing(key: str) -> None:
    table, state, name = MISSING[key]
    event = MACHINES.events[f"{table.name}.{name}"]
    plan = Plan(None, None)
    if isinstance(event, CellEvent):
        run = cells(table, state)
        before = bytes(run.states), list(run.counts or ())
        refused = _refused(lambda: plan.fire(event, run, 0, 3))
        assert (bytes(run.states), run.counts) == before
    else:
        thing = Thing(table, state)
        before_thing = thing.snapshot()
        refused = _refused(lambda: plan.move(event, thing))
        assert thing.snapshot() == before_thing
    assert (refused.event, refused.state) == (name, state.name)
    assert table.name in refused.subject
    assert not plan.splices
    assert not plan.moves


def test_one_illegal_cell_refuses_the_whole_run_and_is_named() -> None:
    table = TABLES["page"]
    run = cells(table, table.state("ACTIVE"), 5)
    run.states[3] = table.state("PARKED").code
    refused = _refused(lambda: Plan(None, None).fire(MACHINES.cell("page.hold"), run, 1, 5))
    assert refused.subject == "page 3 of a test"
    assert refused.state == "PARKED"


@pytest.mark.parametrize("machine", TABLES)
def test_pairs_of_rows_on_the_machine(machine: str) -> None:
    """Every two rows of which the second begins where the first ends."""
    table = TABLES[machine]
    pairs = [(a, b) for a in table.rows for b in table.rows if a.target is b.source]
    assert pairs or machine == "transfer", "only a machine of one step has no pairs"
    for first, second in pairs:
        target = _fire_both(table, first, second)
        assert target == second.target.code, f"{first}, then {second}"


def _fire_both(table: Table, first: Row, second: Row) -> int:
    subject: Any = cells(table, first.source) if table.runs else None
    for row in (first, second):
        event, plan = MACHINES.events[f"{table.name}.{row.event}"], Plan(None, None)
        if isinstance(event, CellEvent):
            plan.fire(event, subject, 0, 3)
            plan.settle()
        else:
            subject = Thing(table, row.source, **enabling(table, row))
            plan.move(event, subject)
            plan.settle()
    return int(subject.states[0] if table.runs else subject.state)


# On the real manager and devices.

DEVICES = pytest.mark.parametrize(
    "device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
)  # fmt: skip


@pytest.mark.hunt
@DEVICES
@pytest.mark.parametrize("streams", ["eager", "adversarial"])
@pytest.mark.parametrize("key", ROWS)
def test_shortest_program_of_a_row(key: str, streams: str, device: str) -> None:
    """The row fires in the last call, and everything else holds after every call."""
    program = search().rows.get(key)
    assert program is not None, f"no program of public calls fires {key}"
    player = open_player(device, streams, retain=key in search().retaining)
    for call in program[:-1]:
        player.apply(call)
    before = player.coverage.rows.get(key, 0)
    player.apply(program[-1])
    if streams == "eager":
        assert player.coverage.rows[key] > before
    player.finish()


@pytest.mark.hunt
@DEVICES
@pytest.mark.parametrize("part", range(8))
def test_pairs_of_rows_in_a_program(part: int, device: str) -> None:
    """Rows of one machine that two calls fire one after the other, on real memory."""
    pairs = sorted(search().pairs.items())
    assert len(pairs) > 100
    for (first, second), program in pairs[part::8]:
        player = played(program, device)
        assert player.coverage.rows[first], first
        assert player.coverage.rows[second], second
        player.finish()


@pytest.mark.hunt
def test_every_row_and_every_state_of_a_sequence_has_a_program() -> None:
    found = search()
    assert set(found.rows) == set(ROWS)
    assert set(found.states) == {state.name for state in SEQUENCE.states if not state.terminal}


PUBLIC: dict[str, Callable[[Player, Any], object]] = {
    "resume": lambda player, seq: player.kv.resume(seq),
    "fork": lambda player, seq: player.kv.fork(seq),
    "grow": lambda player, seq: player.kv.resize(seq, seq.max_tokens),
    "rewind": lambda player, seq: player.kv.rewind(seq, 0),
    "step": lambda player, seq: player.kv.step(player.kv.batch([seq])),
    "commit": lambda player, seq: player.kv.commit(seq, []),
    "stop_committing": lambda player, seq: player.kv.stop_committing(seq),
    "suspend": lambda player, seq: player.kv.suspend(seq),
    "drop": lambda player, seq: player.kv.drop(seq),
    "close": lambda player, seq: player.kv.close_sequence(seq),
}
"""How a caller makes each event of the sequence table happen."""
INSIDE = {"shrink", "settle", "leave", "lose", "unload", "miss", "move", "remap"}
"""Events that come with a resize, a rewind, a step, from the device, or when memory is short."""


def test_every_event_of_a_sequence_is_public_or_known_not_to_be() -> None:
    assert set(SEQUENCE.events) == set(PUBLIC) | INSIDE


ILLEGAL = [
    (state, event) for state, event in SEQUENCE.missing() if event in PUBLIC and not state.terminal
]


@pytest.mark.hunt
@DEVICES
@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=str)
def test_illegal_call_changes_nothing(state: State, event: str, device: str) -> None:
    """Each public call in each state that has no row for it: refused, and deeply unchanged."""
    player = played(search().states[state.name], device)
    seq = next(iter(player.kv.sequences.values()))
    before, calls = view(player.kv), dict(player.device.calls)
    refused = _refused(lambda: PUBLIC[event](player, seq))
    assert refused.event == event
    assert refused.state == state.name
    assert str(seq) in refused.subject
    assert view(player.kv) == before
    assert dict(player.device.calls) == calls, "a refused call asks nothing of the device"
    player.finish()


@pytest.mark.parametrize("event", PUBLIC)
def test_closed_sequence_refuses_everything(event: str) -> None:
    player = played((trace.Create(seq=1, max_tokens=8),))
    seq = player.seqs[1].seq
    player.apply(trace.Close(seq=1))
    assert _refused(lambda: PUBLIC[event](player, seq)).state == "CLOSED"
    player.finish()


def open_player(name: str, streams: str, *, retain: bool = False) -> Player:
    device = open_device(name, streams=streams, seed=1)
    if isinstance(device, CudaDevice) and streams == "eager":
        _wait_for_all(device)
    return Player(header(device.granularity_bytes, retain=retain), device)


def _wait_for_all(device: CudaDevice) -> None:
    """On a card eager means only that nothing is delayed: here all that was issued has run before
    it is asked what has ended, as on the host."""
    poll, driver = device.poll, device.driver

    def waits() -> list[Completion]:
        with driver.here():
            if not device.hung:
                device.wait(partial(device.traffic.are_over, list(device.traffic.pending)))
        return poll()

    device.poll = waits  # type: ignore[method-assign]


def played(program: Program, device: str = "host") -> Player:
    player = open_player(device, "eager")
    for call in program:
        player.apply(call)
    return player


def _refused(call: Callable[[], object]) -> IllegalTransition:
    with pytest.raises(IllegalTransition) as caught:
        call()
    return caught.value


def test_events_are_compiled_to_one_form_each() -> None:
    for table in TABLES.values():
        for name in table.events:
            event = MACHINES.events[f"{table.name}.{name}"]
            assert isinstance(event, CellEvent if table.runs else ObjectEvent)
