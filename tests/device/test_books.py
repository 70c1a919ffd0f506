"""The books that every device keeps, or it is not one: what is held, was called, or is to fail.

Nothing here needs bytes, so that the null device is held to all of it too. Where a device has
memory, `Rig.is_mapped` makes sure that it agrees with the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstate.device import CALLS, CopyRun, Direction, FillRun, MapRun, UnmapRun
from kvstate.errors import ArgumentError, ConfigError, DeviceError, IllegalTransition
from kvstate.gpu import KINDS, open_device, why_no_cuda
from kvstate.gpu.streams import MODES
from tests.device.factories import (
    EVERY,
    HOST,
    NULL,
    Factory,
    Rig,
    opened,
    refused,
    segments,
)

OUT = Direction.OUT


# What is held.


@pytest.mark.parametrize("align_frames", [1, 3, 8])
def test_a_reservation_is_aligned_and_overlaps_no_other(any_rig: Rig, align_frames: int) -> None:
    size, align = 2 * any_rig.frame_bytes, align_frames * any_rig.frame_bytes
    places = sorted(any_rig.device.reserve(size, align) for _ in range(4))
    assert [place % align for place in places] == [0, 0, 0, 0]
    assert all(low + size <= high for low, high in pairwise(places))
    assert any_rig.device.ledger().reservations == dict.fromkeys(places, size)


def test_a_frame_size_is_a_multiple_of_the_granularity(any_rig: Rig) -> None:
    assert any_rig.frame_bytes % any_rig.device.granularity_bytes == 0
    for wrong in (any_rig.frame_bytes + 1, any_rig.device.granularity_bytes // 2):
        with refused(any_rig, "create"):
            any_rig.device.create(1, wrong)


def test_a_frame_has_bytes(any_rig: Rig) -> None:
    with refused(any_rig, "create"):
        any_rig.device.create(1, 0)


def test_a_frame_size_is_not_negative(any_rig: Rig) -> None:
    with refused(any_rig, "create"):
        any_rig.device.create(1, -any_rig.frame_bytes)


def test_a_created_frame_has_a_number_of_its_own(any_rig: Rig) -> None:
    frames = any_rig.create(3) + any_rig.create(2)
    any_rig.device.release(frames[1:3])
    frames[1:3] = any_rig.create(2)
    assert len(set(frames)) == 5
    assert any_rig.device.ledger().frames == set(frames)


def test_a_map_call_that_meets_a_mapping_maps_nothing(any_rig: Rig) -> None:
    address = any_rig.reserve(4)
    first, second, third = (address + at * any_rig.frame_bytes for at in range(3))
    frames = any_rig.create(3)
    any_rig.device.map([MapRun(third, frames[:1])])
    with refused(any_rig, "map"):
        any_rig.device.map([MapRun(first, frames[:1]), MapRun(second, frames[1:])])
    assert not any_rig.is_mapped(first)
    assert not any_rig.is_mapped(second)
    assert any_rig.is_mapped(third)


def test_a_map_call_that_names_an_unknown_frame_maps_nothing(any_rig: Rig) -> None:
    address = any_rig.reserve(3)
    known, gone = any_rig.create(2)
    any_rig.device.release([gone])
    second = address + any_rig.frame_bytes
    with refused(any_rig, "map"):
        any_rig.device.map([MapRun(address, [known]), MapRun(second, [known, gone])])
    assert not any_rig.is_mapped(address)
    assert not any_rig.is_mapped(second)


def test_a_map_call_that_maps_an_address_twice_maps_nothing(any_rig: Rig) -> None:
    address, frames = any_rig.reserve(2), any_rig.create(2)
    second = address + any_rig.frame_bytes
    with refused(any_rig, "map"):
        any_rig.device.map([MapRun(address, frames), MapRun(second, frames[:1])])
    assert not any_rig.is_mapped(address)


def test_a_map_call_over_a_part_of_a_mapping_maps_nothing(any_rig: Rig) -> None:
    address, (low, high) = any_rig.reserve(4), any_rig.create(2)
    any_rig.device.map([MapRun(address, [low])])
    free = address + 2 * any_rig.frame_bytes
    with refused(any_rig, "map"):
        any_rig.device.map(
            [MapRun(free, [high]), MapRun(address + any_rig.frame_bytes // 2, [high])]
        )
    assert any_rig.is_mapped(address)
    assert not any_rig.is_mapped(free)


def test_a_map_call_at_an_odd_address_maps_nothing(any_rig: Rig) -> None:
    address, frames = any_rig.reserve(4), any_rig.create(2)
    odd = address + 2 * any_rig.frame_bytes + any_rig.device.granularity_bytes // 2
    with refused(any_rig, "map"):
        any_rig.device.map([MapRun(address, frames[:1]), MapRun(odd, frames[1:])])
    assert not any_rig.is_mapped(address)


def test_a_map_call_where_nothing_is_reserved_maps_nothing(any_rig: Rig) -> None:
    kept, gone = any_rig.reserve(1), any_rig.reserve(4096)
    any_rig.device.unreserve(gone)
    frames = any_rig.create(1)
    with refused(any_rig, "map"):
        any_rig.device.map([MapRun(kept, frames), MapRun(gone + any_rig.frame_bytes, frames)])
    assert not any_rig.is_mapped(kept)


def test_an_unmap_call_that_meets_a_hole_unmaps_nothing(any_rig: Rig) -> None:
    address, frames = any_rig.reserve(4), any_rig.create(2)
    last = address + 3 * any_rig.frame_bytes
    any_rig.device.map([MapRun(address, frames[:1]), MapRun(last, frames[1:])])
    with refused(any_rig, "unmap"):
        any_rig.device.unmap([UnmapRun(last, 1), UnmapRun(address, 2)])
    assert any_rig.is_mapped(address)
    assert any_rig.is_mapped(last)


def test_an_unmap_call_that_names_an_address_twice_unmaps_nothing(any_rig: Rig) -> None:
    address = any_rig.mapped(2)
    with refused(any_rig, "unmap"):
        any_rig.device.unmap([UnmapRun(address, 2), UnmapRun(address, 1)])
    assert any_rig.is_mapped(address)


def test_unmapped_memory_is_gone_again(any_rig: Rig) -> None:
    address = any_rig.mapped(3)
    any_rig.unmap(address + any_rig.frame_bytes, 1)
    found = [any_rig.is_mapped(address + at * any_rig.frame_bytes) for at in range(3)]
    assert found == [True, False, True]


def test_a_mapped_frame_is_not_released(any_rig: Rig) -> None:
    free, used = any_rig.create(2)
    address = any_rig.map([used])
    with refused(any_rig, "release"):
        any_rig.device.release([free, used])
    assert any_rig.is_mapped(address)


def test_a_frame_is_released_once(any_rig: Rig) -> None:
    gone, kept = any_rig.create(2)
    with refused(any_rig, "release"):
        any_rig.device.release([kept, kept])
    any_rig.device.release([gone])
    with refused(any_rig, "release"):
        any_rig.device.release([kept, gone])


def test_runs_of_nothing_do_nothing(any_rig: Rig) -> None:
    address = any_rig.mapped(1)
    before = any_rig.device.ledger()
    any_rig.device.map([])
    any_rig.device.map([MapRun(address, [])])
    any_rig.device.unmap([])
    any_rig.device.unmap([UnmapRun(address, 0)])
    any_rig.device.fill([], 1)
    any_rig.device.release([])
    assert any_rig.create(0) == []
    assert any_rig.device.ledger() == before


def test_a_range_with_mappings_is_not_unreserved(any_rig: Rig) -> None:
    address = any_rig.reserve(3)
    any_rig.device.map([MapRun(address + any_rig.frame_bytes, any_rig.create(1))])
    with refused(any_rig, "unreserve"):
        any_rig.device.unreserve(address)


def test_only_a_whole_reservation_is_unreserved(any_rig: Rig) -> None:
    address, host = any_rig.reserve(2), any_rig.device.host_reserve(4096)
    any_rig.device.unreserve(gone := any_rig.reserve(1))
    for wrong in (address + any_rig.frame_bytes, host, gone):
        with refused(any_rig, "unreserve"):
            any_rig.device.unreserve(wrong)


def test_only_whole_host_memory_is_unreserved(any_rig: Rig) -> None:
    address, host = any_rig.reserve(2), any_rig.device.host_reserve(8192)
    any_rig.device.host_unreserve(gone := any_rig.device.host_reserve(4096))
    for wrong in (host + 4096, address, gone):
        with refused(any_rig, "host_unreserve"):
            any_rig.device.host_unreserve(wrong)


def test_the_ledger_says_what_is_held(any_rig: Rig) -> None:
    frames = any_rig.create(2)
    address = any_rig.map(frames)
    host = any_rig.device.host_reserve(4096)
    held = any_rig.device.ledger()
    assert held.reservations == {address: 2 * any_rig.frame_bytes}
    assert held.mappings == {address: frames[0], address + any_rig.frame_bytes: frames[1]}
    assert held.host == {host: 4096}
    any_rig.unmap(address, 2)
    assert held.mappings
    assert not any_rig.device.ledger().mappings


# Calls that are counted, told to fail, or not ours.

Prepare = Callable[[Rig], Callable[[], object]]


def prepare_copy(rig: Rig) -> Callable[[], object]:
    run = CopyRun(rig.device.host_reserve(4096), rig.mapped(1), 64)
    return partial(rig.device.copy, OUT, [run])


PREPARE: Final[dict[str, Prepare]] = {
    "reserve": lambda rig: partial(rig.reserve, 1),
    "unreserve": lambda rig: partial(rig.device.unreserve, rig.reserve(1)),
    "create": lambda rig: partial(rig.create, 2),
    "release": lambda rig: partial(rig.device.release, rig.create(2)),
    "map": lambda rig: partial(rig.device.map, [MapRun(rig.reserve(1), rig.create(1))]),
    "unmap": lambda rig: partial(rig.device.unmap, [UnmapRun(rig.mapped(2), 2)]),
    "host_reserve": lambda rig: partial(rig.device.host_reserve, 4096),
    "host_unreserve": lambda rig: partial(rig.device.host_unreserve, rig.device.host_reserve(4096)),
    "copy": prepare_copy,
    "fill": lambda rig: partial(rig.device.fill, [FillRun(rig.mapped(1), 64)], 0),
    "record": lambda rig: partial(rig.device.record, rig.device.stream()),
    "finish": lambda rig: partial(rig.device.finish, rig.issue(1)),
    "quiesce": lambda rig: rig.device.quiesce,
}
"""What has to be done before one call of each kind can be made: the call itself is left."""


def test_there_is_a_call_of_every_kind() -> None:
    assert tuple(PREPARE) == CALLS


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_counted_once(any_rig: Rig, kind: str) -> None:
    call = PREPARE[kind](any_rig)
    before = dict(any_rig.device.calls)
    call()
    after = dict(any_rig.device.calls)
    assert after.pop(kind) == before.pop(kind, 0) + 1
    assert after == before


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("kind", CALLS)
def test_the_nth_call_fails_and_no_other(any_rig: Rig, kind: str, nth: int) -> None:
    calls = [PREPARE[kind](any_rig) for _ in range(nth)]
    again = PREPARE[kind](any_rig)
    any_rig.device.fail_next(kind, nth)
    for call in calls[:-1]:
        call()
    with refused(any_rig, kind):
        calls[-1]()
    calls[-1]()
    again()


@pytest.mark.parametrize("kind", CALLS)
def test_a_planned_failure_can_be_forgotten(any_rig: Rig, kind: str) -> None:
    calls = [PREPARE[kind](any_rig) for _ in range(2)]
    any_rig.device.fail_next(kind)
    any_rig.device.fail_next(kind, 2)
    any_rig.device.cancel_failures()
    for call in calls:
        call()


def test_several_failures_can_be_planned(any_rig: Rig) -> None:
    any_rig.device.fail_next("create", 1)
    any_rig.device.fail_next("create", 3)
    any_rig.device.fail_next("reserve", 2)
    found = []
    for call in (any_rig.create, any_rig.reserve) * 4:
        try:
            found.append(bool(call(1)))
        except DeviceError:
            found.append(False)
    assert found == [False, True, True, False, False, True, True, True]


def test_events_and_streams_of_another_device_are_refused(any_rig: Rig) -> None:
    device, other = any_rig.device, any_rig.factory.open()
    stream, event = other.stream(), other.record(other.stream())
    nothing = segments()
    for call in (
        partial(device.copy, OUT, [], (event,)),
        partial(device.copy, OUT, [], (), (device.stream(), stream)),
        partial(device.record, stream),
        partial(device.write, stream, nothing),
        partial(device.verify, stream, nothing),
        partial(device.synchronize, stream),
    ):
        with refused(any_rig):
            call()
    other.close()
    assert device.quiesce() == []


# The end.


def test_what_is_no_event_is_known_before_it_is_used(any_rig: Rig) -> None:
    calls = dict(any_rig.device.calls)
    with opened(any_rig.factory) as other:
        for wrong in (object(), "event", None, any_rig.device, other.device.record(None)):
            with pytest.raises(DeviceError, match="event"):
                any_rig.device.check_event(wrong)
    assert dict(any_rig.device.calls) == calls, "to check one asks nothing of the device"
    any_rig.device.check_event(any_rig.device.record(None))


def test_a_device_has_one_manager_for_good(any_rig: Rig) -> None:
    first, second = object(), object()
    any_rig.device.attach(first)
    for mark in (first, second):
        with pytest.raises(IllegalTransition, match="it has a manager, and can have only one"):
            any_rig.device.attach(mark)
    any_rig.device.detach(second)
    with pytest.raises(IllegalTransition, match="open another device"):
        any_rig.device.attach(second)
    any_rig.device.detach(first)
    any_rig.device.attach(second)
    any_rig.device.close()
    with pytest.raises(IllegalTransition, match="it was closed; open another device"):
        any_rig.device.attach(first)


def test_everything_can_be_given_back_in_order(any_rig: Rig) -> None:
    any_rig.issue(2)
    any_rig.map(any_rig.create(3), read_only=True)
    any_rig.give_back()
    assert any_rig.device.ledger().empty


def test_closing_gives_back_what_is_held_and_may_be_done_twice(any_rig: Rig) -> None:
    any_rig.issue(4)
    any_rig.reserve(2)
    any_rig.create(2)
    any_rig.device.close()
    assert any_rig.device.ledger().empty
    any_rig.device.close()
    assert any_rig.device.ledger().empty


# Any order of calls, against a model that two dicts can hold.

PLACES: Final = 8
MARK_BYTES: Final = 8


class Mappings(RuleBasedStateMachine):
    """Frames that are created, mapped anywhere, written through any mapping, and let go."""

    factory: ClassVar[Factory]

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.factory, self.factory.open())
        self.base = self.rig.reserve(PLACES)
        self.marks: dict[int, bytes | None] = {}
        """What each frame begins with; None before it was written."""
        self.mapped: dict[int, tuple[int, bool]] = {}
        """(frame, read only) by place."""

    def address(self, place: int) -> int:
        return self.base + place * self.rig.frame_bytes

    def attempt(self, allowed: bool, call: Callable[[], None]) -> bool:
        """Make the call, which works exactly if it is allowed."""
        if allowed:
            call()
        else:
            with refused(self.rig):
                call()
        return allowed

    @rule(count=st.integers(1, 3))
    def create(self, count: int) -> None:
        self.marks |= dict.fromkeys(self.rig.create(count))

    @precondition(lambda self: self.marks)
    @rule(pick=st.integers(0, 50))
    def release(self, pick: int) -> None:
        frame = sorted(self.marks)[pick % len(self.marks)]
        free = all(frame != used for used, _ in self.mapped.values())
        if self.attempt(free, partial(self.rig.device.release, [frame])):
            del self.marks[frame]

    @precondition(lambda self: self.marks)
    @rule(
        place=st.integers(0, PLACES - 1),
        picks=st.lists(st.integers(0, 50), min_size=1, max_size=3),
        read_only=st.booleans(),
    )
    def map(self, place: int, picks: list[int], read_only: bool) -> None:
        frames = [sorted(self.marks)[pick % len(self.marks)] for pick in picks]
        places = range(place, min(place + len(frames), PLACES))
        run = MapRun(self.address(place), frames[: len(places)], read_only)
        if self.attempt(self.mapped.keys().isdisjoint(places), partial(self.rig.device.map, [run])):
            self.mapped |= {at: (frames[at - place], read_only) for at in places}

    @rule(place=st.integers(0, PLACES - 1), count=st.integers(1, 3))
    def unmap(self, place: int, count: int) -> None:
        places = range(place, place + count)
        run = UnmapRun(self.address(place), count)
        if self.attempt(self.mapped.keys() >= set(places), partial(self.rig.device.unmap, [run])):
            for at in places:
                del self.mapped[at]

    @precondition(lambda self: self.rig.factory.moves_bytes)
    @rule(
        place=st.integers(0, PLACES - 1), mark=st.binary(min_size=MARK_BYTES, max_size=MARK_BYTES)
    )
    def write(self, place: int, mark: bytes) -> None:
        frame, read_only = self.mapped.get(place, (0, True))
        if self.attempt(not read_only, partial(self.rig.device.poke, self.address(place), mark)):
            self.marks[frame] = mark

    @invariant()
    def ledger_agrees(self) -> None:
        held = self.rig.device.ledger()
        assert held.frames == set(self.marks)
        assert held.mappings == {self.address(at): frame for at, (frame, _) in self.mapped.items()}

    @invariant()
    def bytes_agree(self) -> None:
        for place in range(PLACES) if self.rig.factory.moves_bytes else ():
            if place not in self.mapped:
                assert not self.rig.can_peek(self.address(place))
            elif (mark := self.marks[self.mapped[place][0]]) is not None:
                assert self.rig.device.peek(self.address(place), MARK_BYTES) == mark

    def teardown(self) -> None:
        try:
            self.rig.give_back()
        finally:
            self.rig.device.close()


@pytest.mark.parametrize("chosen", EVERY)
def test_any_order_of_mapping_calls_agrees_with_a_model(chosen: Factory) -> None:
    class Chosen(Mappings):
        """Of one device."""

        factory = chosen

    run_state_machine_as_test(
        Chosen,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, database=None, derandomize=True
        ),
    )


# What only simulated devices promise.

SIMULATED: Final = pytest.mark.parametrize("factory", [*HOST, *NULL], ids=lambda one: one.name)


@SIMULATED
def test_all_frames_have_one_size(factory: Factory) -> None:
    with opened(factory) as rig:
        frames = rig.create(1)
        with refused(rig, "create"):
            rig.device.create(1, 3 * rig.frame_bytes)
        rig.device.release(frames)
        assert len(rig.device.create(1, 3 * rig.frame_bytes)) == 1
        assert len(rig.device.create(1, 3 * rig.frame_bytes)) == 1


@SIMULATED
def test_only_calls_and_the_end_of_a_copy_can_be_told_to_fail(factory: Factory) -> None:
    with opened(factory) as rig, pytest.raises(ConfigError, match="'poll' cannot fail"):
        rig.device.fail_next("poll")


@SIMULATED
def test_unmapping_with_work_issued_since_the_quiesce_is_a_fault(factory: Factory) -> None:
    with opened(factory) as rig:
        address = rig.mapped(2)
        rig.issue(1)
        rig.unmap(address, 1)
        assert not rig.device.faults
        rig.issue(1)
        rig.device.unmap([UnmapRun(address + rig.frame_bytes, 1)])
        assert "1 frames are unmapped" in rig.device.faults[0]


@SIMULATED
def test_a_script_that_names_no_copy_reports_none(factory: Factory) -> None:
    with opened(factory) as rig:
        issued = rig.issue(2)
        rig.device.script([(issued[-1] + 1, True)])
        assert rig.device.poll() == []
        assert rig.device.ledger().copies == set(issued)


GPU: Final = ("cuda", "cuda:0")


@pytest.mark.parametrize(
    "kind", [*sorted({*KINDS} - {*GPU}), *(pytest.param(k, marks=pytest.mark.gpu) for k in GPU)]
)
@pytest.mark.parametrize("streams", MODES)
def test_a_device_is_opened_by_name(kind: str, streams: str) -> None:
    device = open_device(kind, streams=streams, seed=3)
    best = "host" if why_no_cuda() else "cuda"
    assert device.name == (best if kind == "auto" else kind.partition(":")[0])
    assert device.ledger().empty
    device.close()


def test_what_cannot_be_opened_is_refused_in_words() -> None:
    for name in ("tape", "host:1", "cuda:one"):
        with pytest.raises(ConfigError, match=f"no device '{name}'; choose one of auto, cuda, h"):
            open_device(name)
    with pytest.raises(ArgumentError, match="streams is 'lazy': one of eager, latest, pct, adv"):
        open_device("null", streams="lazy")


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given_in_words() -> None:
    with pytest.raises(ConfigError, match=r"CUDA (cannot be used here|needs cuda-python)"):
        open_device("cuda")
    device = open_device("auto")
    assert device.name == "host"
    device.close()


@pytest.mark.gpu
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no CUDA device 99"):
        open_device("cuda:99")


# The null device: addresses and numbers, and nothing behind them.


def test_the_null_device_gives_no_number_twice() -> None:
    with opened(NULL[0]) as rig:
        address, frames = rig.reserve(1), rig.create(2)
        rig.device.unreserve(address)
        rig.device.release(frames)
        assert rig.reserve(1) != address
        assert not set(rig.create(2)).intersection(frames)


def test_the_null_device_maps_only_inside_a_reservation() -> None:
    with opened(NULL[0]) as rig:
        address, frames = rig.reserve(2), rig.create(3)
        with refused(rig, "map"):
            rig.device.map([MapRun(address, frames)])


def test_the_null_device_compares_nothing() -> None:
    with opened(NULL[1]) as rig:
        address = rig.mapped(1)
        rig.device.poke(address, b"lost")
        assert rig.device.peek(address, 4) == bytes(4)
        rig.write(segments((address, 0, 4, 1)))
        check = rig.verify(segments((address, 0, 4, 2)))
        assert (check.size_bytes, list(check.wrong)) == (0, [])
