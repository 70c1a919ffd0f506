"""The order check: each missing order is found without the unlucky timing, and no other is.

Histories by hand for each kind of pair, random ones against reachability over the whole graph, a
real manager whose engine is wrong, and planted faults of the manager that the device runs into only
in few schedules, if at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
from attrs import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstate import DeviceFault, LawViolation, Manager, Sequence, trace
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Look, Player
from kvstate.device import SEGMENT, CopyRun, Direction, FillRun, MapRun, UnmapRun
from kvstate.gpu import HostDevice, NullDevice
from kvstate.order import Agent, Clock, Operation, Order, later
from kvstate.order_device import Ordered
from kvstate.order_memory import Memory, Pieces, Runs, pieces
from tests.conftest import FRAME, ROW, small
from tests.corpus.apart import Apart
from tests.corpus.case import Case, How, said
from tests.corpus.cases import CASES
from tests.device.factories import segments
from tests.test_planted import patched

CELL: Final = 16
CELLS: Final = 4
LAW: Final = "law 17 (device order)"


def cells(names: tuple[int, ...]) -> Pieces:
    return pieces((0x1000 + name * CELL, CELL) for name in names)


def opened() -> Order:
    """An order over some cells of memory."""
    order = Order()
    order.memory.reserve_host(0x1000, CELLS * CELL)
    return order


def launch(
    order: Order, agent: Agent, name: str = "late", reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (), after: Clock | None = None,
) -> Operation:  # fmt: skip
    op = Operation(agent, name, cells(reads), cells(writes), after=after)
    order.check(op)
    order.enter(op)
    return op


# Each kind of pair.

PAIRS: Final = (
    ("RAW", {"writes": (1,)}, {"reads": (0, 1)}),
    ("WAR", {"reads": (1, 2)}, {"writes": (2,)}),
    ("WAW", {"writes": (0, 3)}, {"writes": (3,)}),
)
pairs = pytest.mark.parametrize(("kind", "first", "second"), PAIRS, ids=[one[0] for one in PAIRS])


@pairs
def test_a_pair_on_two_streams_is_found(kind: str, first: Any, second: Any) -> None:
    order = opened()
    one, other = order.stream("stream 1"), order.stream("stream 2")
    launch(order, one, "early", **first)
    with pytest.raises(LawViolation, match=rf"law 17 \(device order\): {kind}: late .* early"):
        launch(order, other, "late", **second)


@pairs
@pytest.mark.parametrize("how", ["event", "stream", "synchronised", "quiet", "copied", "settled"])
def test_a_pair_that_is_ordered_is_not(kind: str, first: Any, second: Any, how: str) -> None:
    order = opened()
    one, other = order.stream("stream 1"), order.stream("stream 2")
    early, after = launch(order, one, "early", **first), None
    if how == "event":
        after = order.mark(one)
    elif how == "stream":
        other = one
    elif how == "synchronised":
        order.synchronized(one)
    elif how == "quiet":
        order.quiet(order.streams)
    elif how == "copied":  # the host knows that a copy is done which came after it
        order.copied(7, Operation(Agent("copy"), "fence", after=order.mark(one)))
        order.ended([7])
    else:
        order.steps[3] = [early]
        order.settled(3)
    launch(order, other, "late", after=after, **second)


def test_reads_are_not_in_the_way_of_reads() -> None:
    order = opened()
    for name in ("stream 1", "stream 2"):
        launch(order, order.stream(name), reads=(0, 1, 2, 3))


def test_the_first_pair_is_kept_and_nothing_is_looked_at_after_it() -> None:
    order, told = opened(), list[str]()
    order.alarm = told.append
    one, other = order.stream("stream 1"), order.stream("stream 2")
    launch(order, one, "early", writes=(1,))
    with pytest.raises(LawViolation) as found:
        launch(order, other, writes=(1,))
    launch(order, other, writes=(1,))
    assert ([order.violation], told) == (found.value.violations, found.value.violations)


def test_an_event_is_behind_what_was_launched_when_it_was_recorded() -> None:
    order = opened()
    one, other = order.stream("stream 1"), order.stream("stream 2")
    launch(order, one, "early", writes=(1,))
    stale = order.mark(one)
    launch(order, one, "latest", writes=(2,))
    launch(order, other, reads=(1,), after=stale)
    with pytest.raises(LawViolation, match="latest"):
        launch(order, other, reads=(2,), after=stale)


def test_an_event_is_behind_what_its_stream_waits_for() -> None:
    order = opened()
    stream, load = order.stream("stream 1"), Operation(Agent("copy"), "load", writes=cells((1,)))
    order.copied(1, load)
    order.follow(stream, load)
    launch(order, Agent("copy"), reads=(1,), after=order.mark(stream))
    with pytest.raises(LawViolation, match="load"):
        launch(order, Agent("copy"), reads=(1,), after={stream: stream.last})


def test_a_staging_buffer_may_be_filled_when_the_device_says_so() -> None:
    order = opened()
    buffer = frozenset({"staging buffer 0"})
    stream = order.stream("stream 1")
    order.enter(Operation(stream, "publish", writes=cells((1,)), reads_names=buffer))
    order.free(buffer)
    order.at_once("a staging", writes_names=buffer)
    with pytest.raises(LawViolation, match="publish"):
        order.at_once("peek", cells((1,)))


def test_a_wait_of_a_stream_orders_that_stream_alone() -> None:
    for agent in ("stream 1", "stream 2", "remote", "host"):
        order = opened()
        streams = {name: order.stream(name) for name in ("stream 1", "stream 2", "remote")}
        op = Operation(Agent("copy"), "copy in", writes=cells((1,)))
        order.copied(1, op)
        order.follow(streams["stream 1"], op)
        if agent == "stream 1":
            launch(order, streams[agent], reads=(1,))
            continue
        with pytest.raises(LawViolation, match=f"{agent}:"):
            launch(order, streams.get(agent, order.host), reads=(1,))


def test_what_a_synchronised_stream_only_waits_for_is_not_done() -> None:
    order = opened()
    stream = order.stream("stream 1")
    op = Operation(Agent("copy"), "copy in", writes=cells((1,)))
    order.copied(1, op)
    order.follow(stream, op)
    order.synchronized(stream)
    assert order.flying == [op]
    launch(order, stream)
    order.synchronized(stream)
    assert order.flying == []


def test_what_has_a_name_is_ordered_too() -> None:
    order = opened()
    one, other = order.stream("stream 1"), order.stream("stream 2")
    entry = frozenset({"entry 3"})
    order.enter(Operation(one, "kernel", reads_names=entry))
    order.check(Operation(one, "publish", writes_names=entry))
    with pytest.raises(LawViolation, match=r"WAR: publish .* entry 3, which kernel"):
        order.check(Operation(other, "publish", writes_names=entry))


# Random histories.


@frozen
class Act:
    """Something that the host does: `launch`, `copy`, `record`, `wait`, `ended`, `sync`, `quiet`
    or `host`."""

    kind: str
    which: int = 0
    """A stream, or a number of things there are."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


few = st.lists(st.integers(0, CELLS - 1), max_size=2, unique=True).map(tuple)
numbers = st.lists(st.integers(0, 30), max_size=2, unique=True).map(tuple)
acts = st.builds(
    Act, st.sampled_from(["launch"] * 3 + ["copy"] * 2 + ["record", "ended", "sync", "host"]),
    st.integers(0, 30), few, few, numbers, numbers,
) | st.just(Act("quiet"))  # fmt: skip
STREAMS: Final = 3


class Checked:
    """Plays a history on the order check."""

    def __init__(self) -> None:
        self.order = opened()
        self.streams = [self.order.stream(f"stream {at}") for at in range(STREAMS)]
        self.marks: list[Clock] = []
        self.copies: list[int] = []

    def play(self, at: int, act: Act) -> None:
        getattr(self, act.kind)(at, act)

    def launch(self, at: int, act: Act) -> None:
        launch(self.order, self.streams[act.which % STREAMS], f"op {at}", act.reads, act.writes)

    def copy(self, at: int, act: Act) -> None:
        after: Clock = {}
        for name in act.after if self.marks else ():
            after = later(after, self.marks[name % len(self.marks)])
        op = Operation(Agent(""), f"op {at}", cells(act.reads), cells(act.writes), after=after)
        self.order.check(op)
        self.order.copied(at, op)
        self.copies.append(at)
        for name in act.before:
            self.order.follow(self.streams[name % STREAMS], op)

    def record(self, at: int, act: Act) -> None:
        self.marks.append(self.order.mark(self.streams[act.which % STREAMS]))

    def ended(self, at: int, act: Act) -> None:
        if self.copies:
            self.order.ended([self.copies[act.which % len(self.copies)]])

    def sync(self, at: int, act: Act) -> None:
        self.order.synchronized(self.streams[act.which % STREAMS])

    def quiet(self, at: int, act: Act) -> None:
        self.order.quiet(self.order.streams)

    def host(self, at: int, act: Act) -> None:
        self.order.at_once(f"op {at}", cells(act.reads), cells(act.writes))


class Reached:
    """Knows of each operation of a history all those that a path leads from."""

    def __init__(self, history: list[Act]) -> None:
        self.history = history
        self.behind: dict[int, set[int]] = {}
        self.known: set[int] = set()
        self.tails: list[set[int]] = [set() for _ in range(STREAMS)]
        self.last: list[set[int]] = [set() for _ in range(STREAMS)]
        self.marks: list[set[int]] = []
        self.copies: list[int] = []

    def play(self, at: int, act: Act) -> None:
        getattr(self, act.kind)(at, act)

    def with_theirs(self, ops: set[int]) -> set[int]:
        return ops.union(*(self.behind[op] for op in ops))

    def launch(self, at: int, act: Act) -> None:
        name = act.which % STREAMS
        self.behind[at] = self.known | self.with_theirs(self.tails[name])
        self.tails[name] = self.last[name] = {at}

    def copy(self, at: int, act: Act) -> None:
        behind = set(self.known)
        for name in act.after if self.marks else ():
            behind |= self.with_theirs(self.marks[name % len(self.marks)])
        self.behind[at] = behind
        self.copies.append(at)
        for name in act.before:
            self.tails[name % STREAMS] = self.tails[name % STREAMS] | {at}

    def record(self, at: int, act: Act) -> None:
        self.marks.append(set(self.tails[act.which % STREAMS]))

    def ended(self, at: int, act: Act) -> None:
        if self.copies:
            self.known |= self.with_theirs({self.copies[act.which % len(self.copies)]})

    def sync(self, at: int, act: Act) -> None:
        self.known |= self.with_theirs(self.last[act.which % STREAMS])

    def quiet(self, at: int, act: Act) -> None:
        self.known |= self.behind.keys()

    def host(self, at: int, act: Act) -> None:
        self.behind[at] = set(self.known)
        self.known = self.known | {at}


def checked(history: list[Act]) -> tuple[int, int] | None:
    """The pair that the order check reports, as places in the history."""
    player = Checked()
    try:
        for at, act in enumerate(history):
            player.play(at, act)
    except LawViolation as violation:
        late, early = re.findall(r"op (\d+) \[", str(violation))
        return int(early), int(late)
    return None


def reachable(history: list[Act]) -> tuple[int, int] | None:
    """The first pair that touches a cell, one writing, with no path from the one to the other."""
    player = Reached(history)
    for at, act in enumerate(history):
        player.play(at, act)
        if at in player.behind:
            for early in sorted(player.behind.keys() - player.behind[at] - {at}):
                if _touch(history[early], act):
                    return early, at
    return None


def _touch(one: Act, other: Act) -> bool:
    ours, theirs = set(one.writes), set(other.writes)
    return bool(ours & theirs or ours & set(other.reads) or set(one.reads) & theirs)


@settings(max_examples=400, deadline=None)
@given(st.lists(acts, max_size=30))
def test_it_finds_what_no_path_orders(history: list[Act]) -> None:
    assert checked(history) == reachable(history)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, STREAMS - 1), few, few), min_size=2, max_size=10),
    st.integers(0, 100),
)
def test_a_fence_that_is_left_out_is_found(
    ops: list[tuple[int, tuple[int, ...], tuple[int, ...]]], pick: int
) -> None:
    """Each operation waits for all before it, by events: silence, until one wait is left out."""
    history: list[Act] = []
    fences: list[int] = []
    for at, (stream, reads, writes) in enumerate(ops):
        fences.append(len(history))
        history.append(Act("copy", after=tuple(range(at)), before=(stream,)))
        history += [Act("launch", stream, reads, writes), Act("record", stream)]
    assert checked(history) is None
    left_out = fences[pick % len(fences)]
    history[left_out] = Act("copy")
    assert checked(history) == reachable(history)


# Memory.

AREA: Final = 40
runs = st.tuples(st.booleans(), st.integers(0, AREA), st.integers(0, 10))


@given(st.lists(runs, max_size=12), st.lists(runs, max_size=4))
def test_runs_are_a_set_of_addresses(changes: list[Any], asked: list[Any]) -> None:
    found, wanted = Runs(), set[int]()
    for adds, low, size in changes:
        if size:
            (found.add if adds else found.remove)(low, low + size)
        span = range(low, low + size)
        wanted = wanted | set(span) if adds else wanted - set(span)
    inside = [at for low, high in zip(found.lows, found.highs, strict=True)
              for at in range(low, high)]  # fmt: skip
    assert inside == sorted(wanted)
    assert all(high < low for high, low in zip(found.highs, found.lows[1:], strict=False))
    bad = [(low, low + n) for _, low, n in asked if not set(range(low, low + n)) <= wanted]
    assert found.missing(pieces((low, n) for _, low, n in asked)) == (bad[0] if bad else None)


@given(st.lists(runs, max_size=6), st.lists(runs, max_size=6))
@example([(True, 0, 10), (True, 1, 1)], [(True, 5, 1)])
def test_two_lists_of_pieces_meet_where_both_are(ours: list[Any], theirs: list[Any]) -> None:
    here = {at for _, low, n in ours for at in range(low, low + n)}
    there = {at for _, low, n in theirs for at in range(low, low + n)}
    one, other = (pieces((low, n) for _, low, n in runs) for runs in (ours, theirs))
    met = one.met(other)
    assert (met is None) == (not here & there)
    assert met is None or set(range(*met)) <= here & there


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=14))
def test_every_address_of_a_frame_has_one_home(changes: list[tuple[int, bool]]) -> None:
    memory, mapped = Memory(), dict[int, int]()
    memory.frame_bytes = 4
    for at, (frame, maps) in enumerate(changes):
        if maps:
            memory.map(4 * at, [frame], read_only=False)
            mapped[4 * at] = frame
        elif mapped:
            place = next(iter(mapped))
            memory.unmap(place, 1)
            del mapped[place]
        _homes_are_of_frames(memory, mapped)
    every = memory.home(pieces([(0, 4 * len(changes))]))
    assert sum(int(n) for n in every.highs - every.lows) == 4 * len(changes)


def _homes_are_of_frames(memory: Memory, mapped: dict[int, int]) -> None:
    homes: dict[int, set[int]] = {}
    for place, frame in mapped.items():
        found = memory.home(pieces([(place + 1, 2)]))
        home = int(found.lows[0]) - 1
        homes.setdefault(frame, set()).add(home)
        assert mapped[home] == frame
        assert memory.frame_at(place + 3) == frame
    assert all(len(places) == 1 for places in homes.values())


# A device.


def test_what_is_unmapped_is_unmapped_when_nothing_runs() -> None:
    device = Ordered(NullDevice())
    base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(FRAME)
    device.map([MapRun(base, device.create(4, FRAME))])

    def copy(frame: int) -> None:
        device.copy(Direction.IN, [CopyRun(base + frame * FRAME, host, 64)])

    copy(0)
    device.quiesce()
    device.unmap([UnmapRun(base + 3 * FRAME, 1)])
    copy(1)
    with pytest.raises(LawViolation, match=r"unmap beside running work: .* copy in \[copy 2:1\]"):
        device.unmap([UnmapRun(base + 2 * FRAME, 1)])
    assert base + 2 * FRAME in device.ledger().mappings, "the device was not asked"


@pytest.mark.parametrize("after", [1, 2])
def test_what_is_unmapped_under_a_copy_says_so(after: int) -> None:
    device = Ordered(NullDevice())
    base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(FRAME)
    device.map([MapRun(base, device.create(4, FRAME))])
    kind = ("reader", "writer")[after - 1]
    target, source = (host, base) if kind == "reader" else (base, host)
    device.copy(Direction.IN, [CopyRun(target, source, 64)])
    with pytest.raises(LawViolation, match=f"unmap under a {kind}: .* in frame 0"):
        device.unmap([UnmapRun(base, 2)])


def test_memory_that_is_not_there_is_not_used() -> None:
    for target, message in ((3, "write where nothing may be written"), (1, "not mapped")):
        device = Ordered(NullDevice())
        base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(FRAME)
        frames = device.create(4, FRAME)
        device.map([MapRun(base, frames[:2]), MapRun(base + 3 * FRAME, frames[:1], True)])
        run = CopyRun(base + target * FRAME, host, FRAME)
        device.copy(Direction.IN, [CopyRun(base + FRAME, host, FRAME)])
        device.quiesce()
        if target == 1:
            run = CopyRun(host, base + FRAME, 2 * FRAME)
        with pytest.raises(LawViolation, match=message):
            device.copy(Direction.IN, [run])


def test_a_frame_is_the_same_at_all_its_addresses() -> None:
    device = Ordered(NullDevice())
    base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(2 * FRAME)
    frames = device.create(2, FRAME)
    device.map([MapRun(base, frames), MapRun(base + 4 * FRAME, frames, True)])
    device.copy(Direction.IN, [CopyRun(base + FRAME, host, 64)])
    device.copy(Direction.OUT, [CopyRun(host + FRAME, base + 5 * FRAME + 64, 64)])
    with pytest.raises(LawViolation, match=r"RAW: copy out .* in frame 1, which copy in"):
        device.copy(Direction.OUT, [CopyRun(host + FRAME + 64, base + 5 * FRAME + 32, 64)])


def test_the_host_waits_for_copies_before_it_touches_their_bytes() -> None:
    for name, arguments in (
        ("fill", ([FillRun(0, 64)], 1)), ("poke", (0, b"12")), ("peek", (0, 2)),
        ("strays", ([FillRun(0, 16)], b"\0\1")), ("host_unreserve", (0,)),
    ):  # fmt: skip
        device = Ordered(NullDevice())
        base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(FRAME)
        device.map([MapRun(base, device.create(1, FRAME))])
        first: Any = arguments[0]
        moved = [FillRun(host, *run[1:]) for run in first] if isinstance(first, list) else host
        token = device.copy(Direction.OUT, [CopyRun(host, base, 64)], before=[None])
        with pytest.raises(LawViolation, match=name):
            getattr(device, name)(moved, *arguments[1:])
        device.order.violation = None
        assert [one.token for one in device.poll()] == [token]
        getattr(device, name)(moved, *arguments[1:])


def test_an_event_from_elsewhere_is_behind_all_that_was_issued() -> None:
    device = Ordered(NullDevice())
    base, host = device.device.reserve(8 * FRAME, FRAME), device.host_reserve(FRAME)
    device.map([MapRun(base, device.create(1, FRAME))])
    device.copy(Direction.IN, [CopyRun(base, host, 64)])
    device.copy(Direction.OUT, [CopyRun(host, base, 64)], after=[device.device.record(None)])
    with pytest.raises(LawViolation, match="WAW"):
        device.copy(Direction.IN, [CopyRun(base, host, 64)], after=[device.record(None)])


# A manager, and an engine that is wrong.


Run = Callable[..., tuple[Manager, Sequence, Any]]


@pytest.fixture
def running() -> Iterator[Run]:
    """Opens managers with a sequence of four tokens each; also gives the device under the check."""
    managers: list[Manager] = []

    def run(**how: bool) -> tuple[Manager, Sequence, Any]:
        kv = Manager(small(), HostDevice(), **how)  # type: ignore[arg-type]
        managers.append(kv)
        device: Any = kv.device
        device.set_rows(ROW)
        seq = kv.create(max_tokens=16)
        seq.resume()
        kv.settle(kv.step(kv.batch([seq]), 4))
        return kv, seq, device

    yield run
    for kv in managers:
        kv.close()
        assert kv.device.ledger().empty


def base_of(seq: Sequence) -> int:
    assert seq.base is not None
    return seq.base


def test_without_it_the_device_is_the_one_that_was_given() -> None:
    device = NullDevice()
    with Manager(small(), device) as kv:
        assert kv.device is device
    with Manager(small(), NullDevice(), order=True) as kv:
        assert isinstance(cast("object", kv.device), Ordered)
    assert kv.replayed is None, "no other law was asked for"


@pytest.mark.parametrize("how", ["order", "debug"])
def test_a_write_out_behind_a_stale_event_is_found(how: str, running: Run) -> None:
    kv, seq, device = running(**{how: True})
    base, stale = base_of(seq) + 4 * ROW, device.record(None)
    step = kv.step(kv.batch([seq]), 2)
    with pytest.raises(LawViolation) as found:
        seq.suspend(after=stale)
    text = str(found.value)
    assert text.startswith(f"{LAW}: RAW: copy out [this copy:1] of call 6, suspend(sequence 1)")
    assert f"reads {2 * ROW} bytes at {base:#x} in frame 1" in text
    assert "which step 2 [the default stream:2] of call 5, step writes" in text
    with pytest.raises(DeviceFault, match="device order"):
        kv.settle(step)


def test_a_write_out_behind_the_step_is_not(running: Run) -> None:
    kv, seq, device = running(debug=True)
    step = kv.step(kv.batch([seq]), 2)
    seq.suspend(after=device.record(None))
    kv.settle(step)
    kv.poll()
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 2))


def test_kernels_are_part_of_a_step_that_said_so(running: Run) -> None:
    kv, seq, device = running(order=True)
    kv.step(kv.batch([seq]), 2)
    base = base_of(seq)

    def rows(first: int, count: int) -> Any:
        return np.array([(base + first * ROW, first, count, 1, -1)], SEGMENT)

    device.verify(None, rows(0, 6))
    device.write(None, rows(4, 2))
    other = device.stream()
    with pytest.raises(LawViolation, match="WAW"):
        device.write(other, rows(5, 1))


def test_kernels_write_what_a_step_in_flight_said(running: Run) -> None:
    kv, seq, device = running(order=True)
    kv.step(kv.batch([seq]), 2)
    with pytest.raises(LawViolation, match=r"write outside of a step: write .* of the engine"):
        device.write(None, np.array([(base_of(seq) + 5 * ROW, 5, 2, 1, -1)], SEGMENT))


def test_kernels_write_nothing_after_their_step(running: Run) -> None:
    kv, seq, device = running(order=True)
    base, step = base_of(seq), kv.step(kv.batch([seq]), 2)
    rows = np.array([(base + 4 * ROW, 4, 2, 1, -1)], SEGMENT)
    device.write(None, rows)
    kv.settle(step)
    with pytest.raises(LawViolation, match=r"write outside of a step: write .* of the engine"):
        device.write(None, rows)


def test_a_settled_step_is_done_with_all_its_kernels(running: Run) -> None:
    kv, seq, device = running(order=True)
    step = kv.step(kv.batch([seq]), 2)
    device.write(None, np.array([(base_of(seq) + 4 * ROW, 4, 2, 1, -1)], SEGMENT))
    assert [op.name for op in device.order.flying] == ["step 2", "write"]
    kv.settle(step)
    assert device.order.flying == []


def test_a_quiet_device_has_nothing_in_flight(running: Run) -> None:
    kv, seq, device = running(order=True)
    kv.step(kv.batch([seq]), 2)
    seq.resize(16)
    device.quiesce()
    assert [op.agent.name for op in device.order.flying] == ["the default stream"]
    device.quiesce([None])
    assert device.order.flying == []
    device.unmap([UnmapRun(base_of(seq) + 3 * FRAME, 1)])


def test_a_quiesce_waits_for_what_is_read_outside_of_steps(running: Run) -> None:
    """On streams of sequences that have memory, whether a step of theirs is in flight or not."""
    kv, seq, device = running(order=True)
    stream = device.stream()
    other = kv.create(max_tokens=16)
    other.resume(stream)
    kv.settle(kv.step(kv.batch([other]), 4))
    seq.close()
    device.verify(stream, segments((base_of(other), 0, 4, 1)))
    assert [op.agent.name for op in device.order.flying] == ["stream 1"]
    kv.trim()
    assert device.order.flying == []


def test_a_step_is_on_the_stream_of_each_of_its_sequences(running: Run) -> None:
    kv, seq, device = running(order=True)
    other, stream = kv.create(max_tokens=16), device.stream()
    other.resume(stream)
    batch = kv.batch([seq, other])
    for _ in range(2):
        step = kv.step(batch, 2)
        assert [op.agent.name for op in device.order.flying] == ["the default stream", "stream 1"]
        rows = [(base_of(other) + int(step.start_tokens[1]) * ROW, 0, 2, 1, -1)]
        device.write(stream, np.array(rows, SEGMENT))
        kv.settle(step)
        assert device.order.flying == []
    other.drop()
    other.resume()  # elsewhere, and on another stream
    kv.step(batch, 2)
    (op,) = device.order.flying
    assert (op.agent.name, len(op.writes)) == ("the default stream", 2)
    assert base_of(other) in op.writes.lows


def test_a_step_waits_for_whoever_reads_where_it_writes(running: Run) -> None:
    kv, seq, device = running(order=True)
    seq.resize(8)
    device.copy(Direction.OUT, [CopyRun(kv.host.address, base_of(seq) + 5 * ROW, ROW)])
    kv.step(kv.batch([seq]), 1)
    with pytest.raises(LawViolation, match=r"WAR: step 3 .* which copy out .* reads"):
        kv.step(kv.batch([seq]), 1)


def test_a_load_is_awaited_by_the_stream_of_its_sequence_alone(running: Run) -> None:
    kv, seq, device = running(order=True)
    stream, other = device.stream(), device.stream()
    seq.suspend()
    kv.poll()
    seq.resume(stream)
    rows = np.array([(base_of(seq), 0, 4, 1, -1)], SEGMENT)
    device.verify(stream, rows)
    with pytest.raises(LawViolation, match=r"RAW: verify .* which copy in \[copy 2:1\] of call 7"):
        device.verify(other, rows)


def test_a_remote_agent_waits_for_no_stream(running: Run) -> None:
    """It begins when it is told to, whatever the stream of the load waits for."""
    kv, seq, device = running(order=True)
    seq.suspend()
    kv.poll()
    seq.resume()
    kv.poll()
    bytes_of = [(base_of(seq), 4 * ROW)]
    first, second = (device.remote("nic", reads=bytes_of) for _ in range(2))
    first.done()
    second.done()
    seq.suspend()
    kv.poll()
    seq.resume()
    device.synchronize(None)
    with pytest.raises(LawViolation, match=r"RAW: nic \[nic:1\] .* reads .* which copy in"):
        device.remote("nic", reads=[(base_of(seq), 4 * ROW)])


@pytest.mark.parametrize("ended", [False, True])
def test_no_quiesce_waits_for_a_remote_agent(running: Run, *, ended: bool) -> None:
    kv, seq, device = running(order=True)
    held = device.remote("nic", reads=[(base_of(seq), 4 * ROW)])
    seq.close()
    if ended:
        held.done()
        held.done()
        kv.trim()
    else:
        with pytest.raises(LawViolation, match=r"unmap under a reader: unmap .* which nic"):
            kv.trim()


def test_nobody_writes_what_a_remote_agent_is_at(running: Run) -> None:
    kv, seq, device = running(order=True)
    seq.resize(8)
    writing = device.remote("nic", writes=[(base_of(seq) + 4 * ROW, ROW)])
    with pytest.raises(LawViolation, match=r"WAW: step 2 .* which nic .* writes"):
        kv.step(kv.batch([seq]), 1)
    writing.done()


def test_a_table_is_not_written_over_while_a_kernel_may_read_it(running: Run) -> None:
    _, seq, device = running(order=True)
    for _ in range(2):
        device.publish(None, [3], [base_of(seq)], [4])
        device.synchronize(None)
        device.verify(None, np.array([(0, 0, 4, 1, 3)], SEGMENT))
    device.publish(device.stream(), [2], [0], [0])
    with pytest.raises(LawViolation, match=r"WAR: publish .* entry 3 of the table, which verify"):
        device.publish(device.stream(), [3], [0], [0])


def test_what_the_player_finds_by_itself_is_a_failure_like_any_other() -> None:
    header = trace.Header(kvstate_trace=trace.VERSION, config=small())
    player = Player(header, HostDevice())
    for call in said(1, [1, 2, 3, 4]):
        player.apply(call)
    device: Any = player.device
    rows = pieces([(base_of(player.known(1).seq), ROW)])
    device.order.enter(Operation(device.agent(player.streams[1]), "kernel", writes=rows))
    with pytest.raises(Broken, match="RAW: verify") as found:
        player.apply(trace.Resize(seq=1, tokens=8))
    assert found.value.kind == LAW
    player.abandon()


# Planted faults of the manager.

FOUND: Final = {
    "what a copy of a step's offsets reads is not written over before it has run": "fault",
    "the table of a step is not written over before it was read": "bytes",
    "nothing is unmapped while a step may read near it": "fault",
    "a write-out comes after the step that writes": "bytes",
    "memory is not free because the step that was scheduled last does not read it": "bytes",
}
"""S01 on the host and on the device, S03, S05 and B10, and what each does. Offsets written over
lead to where nothing is mapped; and of an unmap nobody reads wrong bytes, but faults."""
NUMBERED: Final = [(number, case) for number, case in enumerate(CASES) if case.name in FOUND]
planted = pytest.mark.parametrize(
    ("number", "case"), NUMBERED, ids=[case.fault.report for _, case in NUMBERED]
)
devices = pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with Apart() as processes:
        yield processes


@planted
@devices
def test_the_order_check_finds_it_in_one_eager_run(
    number: int, case: Case, device: str, apart: Apart, tmp_path: Path
) -> None:
    if device == "cuda" and case.fault.file.startswith("gpu/"):
        pytest.skip("a fault of the host device; the card's own are in tests/faults/card.py")
    how = How("eager", device=device)
    case.play_once(0, how)
    patched(case.fault, tmp_path)
    assert LAW in apart.kinds(number, tmp_path, how)


@planted
def test_without_any_law_some_schedules_show_what_it_does(
    number: int, case: Case, apart: Apart, tmp_path: Path
) -> None:
    patched(case.fault, tmp_path)
    found = apart.kinds(number, tmp_path, How("adversarial", Look.BYTES.value))
    assert FOUND[case.name] in found
    eager = apart.kinds(number, tmp_path, How("eager", Look.BYTES.value))
    assert set(eager) <= {"fault"}, "a device that runs at once shows what the driver refuses"
