"""What every device does with memory, copies and bytes, or it is not one.

The rules of kvstate/device.py, one by one; those of its books are in test_books.py.

A device may run work at once or late, simulated or on a GPU, so nothing is looked at before a
synchronize or a quiesce, and nothing is said about work that no stream and no event orders.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Final

import pytest

from kvstate.device import CopyRun, Direction, FillRun, MapRun, UnmapRun
from kvstate.errors import DeviceError, DeviceFull, StreamCaptured
from tests.device.factories import (
    CARDS,
    ROW_BYTES,
    Rig,
    refused,
    relative,
    segments,
    tokens,
    written,
)

OUT, IN = Direction.OUT, Direction.IN
SEEDS: Final = range(12)
"""Where work is simulated, an order is tried under this many schedules."""

# Memory.


def test_a_reservation_has_nothing_behind_it(rig: Rig) -> None:
    address = rig.reserve(2)
    for at in (0, rig.frame_bytes, 2 * rig.frame_bytes - 1):
        with refused(rig, "peek"):
            rig.device.peek(address + at, 1)
        with refused(rig, "poke"):
            rig.device.poke(address + at, b"x")


def test_mapping_makes_memory_readable_and_writable_and_leaves_its_neighbours(rig: Rig) -> None:
    before = rig.reserve(3)
    address, after = before + rig.frame_bytes, before + 2 * rig.frame_bytes
    rig.device.map([MapRun(address, rig.create(1))])
    rig.device.poke(address, b"first")
    rig.device.poke(after - 4, b"last")
    assert rig.device.peek(address, 5) == b"first"
    assert rig.device.peek(after - 4, 4) == b"last"
    assert not rig.is_mapped(before)
    assert not rig.is_mapped(after)


def test_a_full_device_says_how_many_frames_it_had_and_makes_none(any_rig: Rig) -> None:
    device, size = any_rig.device, any_rig.frame_bytes
    held = any_rig.create(1)
    device.limit(3)
    assert device.room(size) == 2
    with pytest.raises(DeviceFull, match="memory for 2 of 3 frames") as caught:
        device.create(3, size)
    assert (caught.value.needed, caught.value.had) == (3, 2)
    assert device.ledger().frames == frozenset(held)
    made = device.create(2, size)
    assert device.room(size) == 0
    device.release(made)
    assert device.room(size) == 2
    device.limit(None)
    device.release(device.create(3, size))


def test_memory_ends_where_the_last_frame_ends(rig: Rig) -> None:
    end = rig.reserve(2) + rig.frame_bytes
    rig.device.map([MapRun(end - rig.frame_bytes, rig.create(1))])
    with refused(rig, "peek"):
        rig.device.peek(end - 8, 16)
    rig.device.poke(end - 8, b"12345678")
    with refused(rig, "poke"):
        rig.device.poke(end - 8, bytes(16))
    assert rig.device.peek(end - 8, 8) == b"12345678"


def test_the_frames_of_a_run_follow_one_another_in_the_order_given(rig: Rig) -> None:
    frames = rig.create(4)
    singles = {frame: rig.map([frame]) for frame in frames}
    for frame, place in singles.items():
        rig.device.poke(place, b"frame %d" % frame)
    order = [frames[at] for at in (2, 0, 3, 1)]
    address = rig.map(order)
    for at, frame in enumerate(order):
        wanted = b"frame %d" % frame
        assert rig.device.peek(address + at * rig.frame_bytes, len(wanted)) == wanted


def test_bytes_go_on_across_the_border_of_two_frames(rig: Rig) -> None:
    frames = rig.create(3)
    border = rig.map([frames[2], frames[0]]) + rig.frame_bytes
    rig.device.poke(border - 3, b"across")
    assert rig.device.peek(border - 3, 6) == b"across"


def test_a_frame_at_two_addresses_shows_the_same_bytes_both_ways(rig: Rig) -> None:
    (frame,) = rig.create(1)
    left, right = rig.map([frame]), rig.map([frame])
    rig.device.poke(left + 100, b"from the left")
    assert rig.device.peek(right + 100, 13) == b"from the left"
    rig.device.poke(right + 100, b"from the right")
    assert rig.device.peek(left + 100, 14) == b"from the right"


def test_a_frame_twice_in_a_row_is_a_ring(rig: Rig) -> None:
    address = rig.map(rig.create(2) * 2)
    rig.write(segments((address, 0, 3, 7)))
    again = address + 2 * rig.frame_bytes
    assert list(rig.verify(segments((again, 0, 3, 7))).wrong) == [0]


def test_a_read_only_mapping_can_be_read_and_not_written(rig: Rig) -> None:
    (frame,) = rig.create(1)
    owner, alias = rig.map([frame]), rig.map([frame], read_only=True)
    rig.device.poke(owner, b"owner")
    assert rig.device.peek(alias, 5) == b"owner"
    with refused(rig, "poke"):
        rig.device.poke(alias, b"alias")
    assert rig.device.peek(owner, 5) == b"owner"


def test_a_copy_into_a_read_only_mapping_fails_and_leaves_the_frame(rig: Rig) -> None:
    (frame,) = rig.create(1)
    owner, alias = rig.map([frame]), rig.map([frame], read_only=True)
    host = rig.device.host_reserve(4096)
    rig.device.poke(owner, b"owner")
    assert not rig.copy(IN, [CopyRun(alias, host, 1000)])
    assert rig.device.peek(owner, 5) == b"owner"


def test_a_read_only_mapping_can_be_verified_and_copied_out(rig: Rig) -> None:
    (frame,) = rig.create(1)
    owner, alias = rig.map([frame]), rig.map([frame], read_only=True)
    host = rig.device.host_reserve(4096)
    rig.write(segments((owner, 5, 4, 77)))
    assert list(rig.verify(segments((alias, 5, 4, 77))).wrong) == [0]
    assert rig.copy(OUT, [CopyRun(host, alias, 4 * ROW_BYTES)])
    assert rig.device.peek(host, 4 * ROW_BYTES) == written(5, 4, 77)


def test_an_address_can_be_mapped_again_to_another_frame(rig: Rig) -> None:
    address, (old, new) = rig.reserve(1), rig.create(2)
    aside = rig.map([new])
    rig.device.poke(aside, b"new")
    rig.device.map([MapRun(address, [old])])
    rig.device.poke(address, b"old")
    rig.unmap(address, 1)
    rig.device.map([MapRun(address, [new])])
    assert rig.device.peek(address, 3) == b"new"


def test_the_bytes_of_a_frame_survive_being_mapped_elsewhere(rig: Rig) -> None:
    frames = rig.create(2)
    address = rig.map(frames)
    rig.write(segments((address, 3, 2, 11), (address + rig.frame_bytes, 9, 2, 12)))
    rig.unmap(address, 2)
    other = rig.map(frames[::-1])
    check = rig.verify(segments((other, 9, 2, 12), (other + rig.frame_bytes, 3, 2, 11)))
    assert list(check.wrong) == [0, 0]


# Copies.


def test_bytes_come_back_from_host_memory_unharmed(rig: Rig) -> None:
    sizes = (1, 7, 4096, 64, 1021, 3 * 333, rig.frame_bytes - 1)
    target, host, back = rig.mapped(3), rig.device.host_reserve(1 << 24), 1 << 23
    data = Random(1).randbytes(sum(sizes))
    rig.device.poke(host, data)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    gaps = [start + 11 * at for at, start in enumerate(starts)]
    runs = list(zip(starts, gaps, sizes, strict=True))
    assert rig.copy(IN, [CopyRun(target + gap, host + start, n) for start, gap, n in runs])
    for start, gap, size in runs:
        assert rig.device.peek(target + gap, size) == data[start : start + size]
    outs = [CopyRun(host + back + start, target + gap, n) for start, gap, n in reversed(runs)]
    assert rig.copy(OUT, outs)
    assert rig.device.peek(host + back, len(data)) == data
    assert not rig.device.faults


def test_a_copy_may_have_many_runs(rig: Rig) -> None:
    count, size, step = 2500, 3, 5
    address, host = (
        rig.mapped(count * step // rig.frame_bytes + 1),
        rig.device.host_reserve(1 << 16),
    )
    data = Random(2).randbytes(count * size)
    rig.device.poke(host, data)
    rig.device.poke(address, bytes(count * step))
    runs = [CopyRun(address + at * step, host + at * size, size) for at in range(count)]
    assert rig.copy(IN, runs)
    wanted = b"".join(data[at * size : at * size + size] + b"\0\0" for at in range(count))
    assert rig.device.peek(address, count * step) == wanted


def test_a_copy_touches_nothing_beside_its_runs(rig: Rig) -> None:
    address, host = rig.mapped(1), rig.device.host_reserve(4096)
    rig.device.poke(address, b"." * 64)
    rig.device.poke(host, b"o" * 64)
    assert rig.copy(IN, [CopyRun(address + 13, host, 5), CopyRun(address + 30, host + 9, 1)])
    assert rig.device.peek(address, 64) == b"." * 13 + b"ooooo" + b"." * 12 + b"o" + b"." * 33


def test_a_copy_waits_for_the_event_after_which_it_goes(rig: Rig) -> None:
    size = 16 * ROW_BYTES
    address, host, stream = rig.mapped(1), rig.device.host_reserve(size), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((address, seed, 16, seed)))
        assert rig.copy(OUT, [CopyRun(host, address, size)], (rig.device.record(stream),))
        assert rig.device.peek(host, size) == written(seed, 16, seed)


def test_a_copy_waits_for_every_event(rig: Rig) -> None:
    host, streams = rig.device.host_reserve(1024), [rig.device.stream() for _ in range(3)]
    places = [rig.mapped(1) for _ in streams]
    runs = [CopyRun(host + 256 * at, place, 256) for at, place in enumerate(places)]
    for seed in SEEDS:
        rig.device.schedule(seed)
        for stream, place in zip(streams, places, strict=True):
            rig.device.write(stream, segments((place, 0, 1, seed)))
        assert rig.copy(OUT, runs, tuple(rig.device.record(stream) for stream in streams))
        assert rig.device.peek(host, 768) == 3 * written(0, 1, seed)


def test_an_event_of_an_idle_stream_has_passed(any_rig: Rig) -> None:
    event = any_rig.device.record(any_rig.device.stream())
    assert any_rig.copy(OUT, [], (event, event))


def test_later_work_of_a_before_stream_sees_the_copied_bytes(rig: Rig) -> None:
    size = 16 * ROW_BYTES
    address, host, stream = rig.mapped(1), rig.device.host_reserve(size), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.poke(host, written(seed, 16, seed))
        token = rig.device.copy(IN, [CopyRun(address, host, size)], (), (stream,))
        check = rig.device.verify(stream, segments((address, seed, 16, seed)))
        rig.device.synchronize(stream)
        assert check.done
        assert list(check.wrong) == [0]
        assert tokens(rig.quiesce()) == [token]


def test_later_work_of_a_before_stream_does_not_overtake_the_copy(rig: Rig) -> None:
    size = 16 * ROW_BYTES
    address, host, stream = rig.mapped(1), rig.device.host_reserve(size), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.write(segments((address, 0, 16, seed)))
        rig.device.copy(OUT, [CopyRun(host, address, size)], (), (stream,))
        rig.device.write(stream, segments((address, 0, 16, seed + 1000)))
        rig.quiesce()
        assert rig.device.peek(host, size) == written(0, 16, seed)
        assert rig.device.peek(address, size) == written(0, 16, seed + 1000)


def test_a_stream_waits_for_every_copy_before_it(rig: Rig) -> None:
    address, back, stream = rig.mapped(1), rig.mapped(1), rig.device.stream()
    host = rig.device.host_reserve(8192)
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.poke(host, written(0, 16, seed))
        rig.write(segments((back, 0, 16, seed)))
        rig.device.copy(IN, [CopyRun(address, host, 4096)], (), (stream,))
        rig.device.copy(OUT, [CopyRun(host + 4096, back, 4096)], (), (stream,))
        parts = segments((address, 0, 16, seed), (host + 4096, 0, 16, seed))
        check = rig.device.verify(stream, parts)
        rig.quiesce()
        assert list(check.wrong) == [0, 0]


def test_a_copy_without_runs_only_hands_the_wait_on(rig: Rig) -> None:
    address, first, second = rig.mapped(1), rig.device.stream(), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(first, segments((address, 0, 16, seed)))
        token = rig.device.copy(OUT, [], (rig.device.record(first),), (second,))
        check = rig.device.verify(second, segments((address, 0, 16, seed)))
        (end,) = rig.quiesce()
        assert end == (token, True)
        assert list(check.wrong) == [0]


def test_copies_of_both_directions_can_be_chained(rig: Rig) -> None:
    source, target, size = rig.mapped(1), rig.mapped(1), 8 * ROW_BYTES
    host, stream = rig.device.host_reserve(size), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((source, 0, 8, seed)))
        event = rig.device.record(stream)
        rig.device.copy(OUT, [CopyRun(host, source, size)], (event,), (stream,))
        middle = rig.device.verify(stream, segments((host, 0, 8, seed)))
        event = rig.device.record(stream)
        rig.device.copy(IN, [CopyRun(target, host, size)], (event,), (stream,))
        last = rig.device.verify(stream, segments((target, 0, 8, seed)))
        rig.device.synchronize(stream)
        assert [*middle.wrong, *last.wrong] == [0, 0]
    rig.quiesce()


# Completions.


def test_quiesce_reports_in_issue_order(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        issued = any_rig.issue(12)
        ends = any_rig.quiesce()
        assert ends == [(token, True) for token in issued]


def test_after_quiesce_everything_has_run(rig: Rig) -> None:
    address, host, streams = rig.mapped(2), rig.device.host_reserve(4096), range(3)
    pairs = [(rig.device.stream(), (address + 1024 * at, at, 4, at)) for at in streams]
    for seed in SEEDS:
        rig.device.schedule(seed)
        for stream, part in pairs:
            rig.device.write(stream, segments(part))
        checks = [rig.device.verify(stream, segments(part)) for stream, part in pairs]
        rig.device.copy(IN, [CopyRun(address + rig.frame_bytes, host, 4096)])
        rig.quiesce()
        assert all(check.done for check in checks)
        assert [list(check.wrong) for check in checks] == [[0], [0], [0]]
        assert not rig.device.ledger().copies
        assert not rig.device.ledger().work


def test_every_completion_is_reported_once(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        issued, ends = [], []
        for _ in range(6):
            issued += any_rig.issue(2)
            ends += any_rig.device.poll()
        ends += any_rig.device.poll()
        ends += any_rig.quiesce()
        assert sorted(ends) == [(token, True) for token in issued]
        assert any_rig.device.poll() == any_rig.quiesce() == []


def test_a_copy_is_in_the_ledger_until_its_end_is_reported(any_rig: Rig) -> None:
    issued = any_rig.issue(3)
    assert any_rig.device.ledger().copies == set(issued)
    reported = tokens(any_rig.device.poll())
    assert any_rig.device.ledger().copies == set(issued).difference(reported)
    any_rig.quiesce()
    assert not any_rig.device.ledger().copies


def test_a_token_is_never_given_twice(any_rig: Rig) -> None:
    issued = any_rig.issue(3)
    any_rig.quiesce()
    issued += any_rig.issue(3)
    assert len(set(issued)) == 6


def test_a_script_says_which_copies_the_next_poll_reports(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        first, second, third = any_rig.issue(3)
        any_rig.device.script([(third, True), (first, False)])
        assert any_rig.device.poll() == [(third, True), (first, False)]
        assert any_rig.device.ledger().copies == {second}
        any_rig.device.script(None)
        assert [*any_rig.device.poll(), *any_rig.quiesce()] == [(second, True)]


def test_a_scripted_poll_waits_for_the_copy(rig: Rig) -> None:
    address, host, stream = rig.mapped(1), rig.device.host_reserve(4096), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((address, 0, 4, seed)))
        event = rig.device.record(stream)
        token = rig.device.copy(OUT, [CopyRun(host, address, 4 * ROW_BYTES)], (event,))
        rig.device.script([(token, True)])
        assert tokens(rig.device.poll()) == [token]
        assert rig.device.peek(host, 4 * ROW_BYTES) == written(0, 4, seed)
        rig.device.script(None)
    rig.quiesce()


def test_finish_reports_what_it_is_asked_for_in_that_order(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        first, second, third, fourth = any_rig.issue(4)
        assert any_rig.device.finish([third, first]) == [(third, True), (first, True)]
        assert any_rig.device.ledger().copies == {second, fourth}
        assert tokens(any_rig.quiesce()) == [second, fourth]


def test_finish_waits_for_what_comes_before(rig: Rig) -> None:
    address, host, stream = rig.mapped(1), rig.device.host_reserve(4096), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((address, 0, 4, seed)))
        event = rig.device.record(stream)
        token = rig.device.copy(OUT, [CopyRun(host, address, 4 * ROW_BYTES)], (event,))
        assert rig.device.finish([token]) == [(token, True)]
        assert rig.device.peek(host, 4 * ROW_BYTES) == written(0, 4, seed)
    rig.quiesce()


def test_a_failed_finish_reports_nothing_and_loses_nothing(any_rig: Rig) -> None:
    issued = any_rig.issue(3)
    any_rig.device.fail_next("finish")
    with refused(any_rig, "finish"):
        any_rig.device.finish(issued)
    assert tokens(any_rig.device.finish(issued)) == issued


def test_a_script_says_which_finished_copies_have_failed(any_rig: Rig) -> None:
    first, second = any_rig.issue(2)
    any_rig.device.script([], [first])
    assert any_rig.device.finish([first, second]) == [(first, False), (second, True)]


def test_what_has_ended_can_be_seen_before_it_is_reported(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        issued = any_rig.issue(4)
        ended = any_rig.device.ended()
        assert any_rig.device.ledger().copies == {*issued}
        assert {*ended} <= {*any_rig.device.ended()} <= {*issued}
        polled = tokens(any_rig.device.poll())
        assert {*ended} <= {*polled}
        assert not {*any_rig.device.ended()} & {*polled}
        any_rig.quiesce()


def test_quiesce_waits_for_the_streams_that_it_is_given(rig: Rig) -> None:
    address, stream = rig.mapped(1), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((address, 0, 4, seed)))
        check = rig.device.verify(stream, segments((address, 0, 4, seed)))
        rig.device.quiesce([None, stream])
        assert list(check.wrong) == [0]


def test_unmapping_beside_a_stream_that_was_not_waited_for_is_a_fault(any_rig: Rig) -> None:
    """Also if its work happens to be over: eager devices run it at once, and have none."""
    address, other = any_rig.mapped(1), any_rig.mapped(1)
    stream = any_rig.device.stream()
    any_rig.device.schedule(3)
    any_rig.device.write(stream, segments((address, 0, 4, 1)))
    late = any_rig.device.ledger().work or any_rig.factory in CARDS
    any_rig.device.quiesce()
    late = late and (any_rig.device.ledger().work or any_rig.factory in CARDS)
    any_rig.device.unmap([UnmapRun(other, 1)])
    assert bool(any_rig.device.faults) == bool(late)
    any_rig.device.faults.clear()


def test_a_captured_stream_is_refused_by_name(any_rig: Rig) -> None:
    device, stream, other = any_rig.device, any_rig.device.stream(), any_rig.device.stream()
    device.capture([stream])
    held = device.ledger()
    for call in (
        partial(device.check_stream, stream),
        partial(device.record, stream),
        partial(device.synchronize, stream),
        partial(device.quiesce, [other, stream]),
        partial(device.copy, IN, [], (), (stream,)),
        partial(device.write, stream, segments()),
        partial(device.verify, stream, segments()),
        partial(device.publish, stream, [], [], []),
    ):
        with pytest.raises(StreamCaptured, match="is being captured"):
            call()
    assert device.ledger() == held
    device.check_stream(other)
    device.quiesce([other])
    device.capture([other])
    device.record(stream)
    device.capture(())
    assert device.faults == []


def test_a_failed_quiesce_reports_nothing_and_loses_nothing(any_rig: Rig) -> None:
    issued = any_rig.issue(3)
    any_rig.device.fail_next("quiesce")
    with refused(any_rig, "quiesce"):
        any_rig.quiesce()
    assert tokens(any_rig.quiesce()) == issued


def test_a_copy_can_be_made_to_end_as_failed(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        any_rig.device.fail_next("complete")
        (failed,) = any_rig.issue(1)
        any_rig.device.cancel_failures()
        assert any_rig.quiesce() == [(failed, False)]
        (fine,) = any_rig.issue(1)
        assert any_rig.quiesce() == [(fine, True)]


def test_of_several_copies_one_is_made_to_fail(any_rig: Rig) -> None:
    for seed in SEEDS:
        any_rig.device.schedule(seed)
        any_rig.device.fail_next("complete", 2)
        issued = any_rig.issue(5)
        ends = any_rig.quiesce()
        assert tokens(ends) == issued
        assert sorted(end.ok for end in ends) == [False, True, True, True, True]


def test_a_failed_copy_still_lets_its_followers_go(rig: Rig) -> None:
    address, host, stream = rig.mapped(1), rig.device.host_reserve(4096), rig.device.stream()
    rig.device.fail_next("complete")
    token = rig.device.copy(IN, [CopyRun(address, host, 4096)], (), (stream,))
    rig.device.write(stream, segments((address, 0, 16, 8)))
    check = rig.device.verify(stream, segments((address, 0, 16, 8)))
    assert rig.quiesce() == [(token, False)]
    assert list(check.wrong) == [0]


def test_a_copy_with_two_reasons_to_fail_ends_once(rig: Rig) -> None:
    alias, host = rig.map(rig.create(1), read_only=True), rig.device.host_reserve(4096)
    rig.device.fail_next("complete")
    assert not rig.copy(IN, [CopyRun(alias, host, 64)])


# Bytes that are written and checked.


def test_a_fill_overwrites_exactly_its_bytes(rig: Rig) -> None:
    address = rig.mapped(2)
    border = address + rig.frame_bytes
    rig.device.poke(border - 50, b"." * 100)
    rig.device.fill([FillRun(border - 40, 7), FillRun(border - 3, 8), FillRun(border + 20, 1)], 219)
    body = b"." * 10 + b"\xdb" * 7 + b"." * 30 + b"\xdb" * 8 + b"." * 15 + b"\xdb" + b"." * 29
    assert rig.device.peek(border - 50, 100) == body


def test_a_fill_is_done_when_it_returns(rig: Rig) -> None:
    address, stream = rig.mapped(4), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        rig.device.write(stream, segments((address, 0, 2, seed)))
        rig.device.fill([FillRun(address + rig.frame_bytes, 3 * rig.frame_bytes)], seed)
        for at in (rig.frame_bytes, 4 * rig.frame_bytes - 1):
            assert rig.device.peek(address + at, 1) == bytes([seed])


def test_a_fill_of_memory_that_is_not_there_fills_nothing(rig: Rig) -> None:
    address = rig.reserve(2)
    rig.device.map([MapRun(address, rig.create(1))])
    rig.device.poke(address, bytes(rig.frame_bytes))
    gone = address + rig.frame_bytes
    for wrong in ([FillRun(address, 8), FillRun(gone, 8)], [FillRun(gone - 8, 16)]):
        with refused(rig, "fill"):
            rig.device.fill(wrong, 1)
    assert rig.device.peek(address, rig.frame_bytes) == bytes(rig.frame_bytes)


def test_what_was_written_verifies(rig: Rig) -> None:
    address = rig.mapped(2)
    rows = 2 * rig.frame_bytes // ROW_BYTES
    parts = segments((address, 0, 3, 1), (address + 3 * ROW_BYTES, 90, rows - 3, (1 << 64) - 1))
    rig.write(parts)
    check = rig.verify(parts)
    assert list(check.wrong) == [0, 0]
    assert check.size_bytes == rows * ROW_BYTES
    assert not rig.device.faults


def test_the_written_bytes_are_those_of_the_pattern(rig: Rig) -> None:
    address = rig.mapped(1)
    rig.device.poke(address, bytes(rig.frame_bytes))
    rig.write(segments((address + 2 * ROW_BYTES, 1234, 5, 0xFEDCBA9876543210)))
    body = written(1234, 5, 0xFEDCBA9876543210)
    rest = bytes(rig.frame_bytes - 7 * ROW_BYTES)
    assert rig.device.peek(address, rig.frame_bytes) == bytes(2 * ROW_BYTES) + body + rest


def test_a_row_may_lie_across_two_frames(rig: Rig) -> None:
    frames = rig.create(2)
    border = rig.map(frames[::-1]) + rig.frame_bytes
    rig.device.set_rows(3 * ROW_BYTES)
    part = segments((border - 4 * ROW_BYTES, 6, 3, 5))
    rig.write(part)
    assert list(rig.verify(part).wrong) == [0]
    rig.device.poke(border, bytes(3))
    assert [*rig.verify(part).wrong, *rig.verify(part).first] == [1, 7]


def test_verify_finds_one_flipped_byte_and_says_where(rig: Rig) -> None:
    address = rig.mapped(1)
    parts = [(address + 4 * ROW_BYTES * at, 100 * at, 4, at) for at in range(3)]
    rig.write(segments(*parts))
    for place in (0, ROW_BYTES // 2 + 1, ROW_BYTES - 1):
        where = address + 6 * ROW_BYTES + place
        (byte,) = rig.device.peek(where, 1)
        rig.device.poke(where, bytes([byte ^ 1]))
        check = rig.verify(segments(*parts))
        assert list(check.wrong) == [0, 1, 0]
        assert check.first[1] == 102
        rig.device.poke(where, bytes([byte]))
    assert list(rig.verify(segments(*parts)).wrong) == [0, 0, 0]


def test_verify_counts_the_wrong_rows_and_names_the_first(rig: Rig) -> None:
    address = rig.mapped(1)
    part = segments((address, 40, 10, 9))
    rig.write(part)
    for row in (3, 4, 8):
        rig.device.fill([FillRun(address + row * ROW_BYTES, 4)], 0)
    check = rig.verify(part)
    assert (list(check.wrong), list(check.first)) == ([3], [43])


@pytest.mark.parametrize(
    ("rows", "position", "key"), [(0, 21, 5), (0, 20, 6), (1, 20, 5), (0, 20, 5 + (1 << 32))],
    ids=["another position", "another writer", "shifted by a row", "another high word"],
)  # fmt: skip
def test_verify_knows_the_rows_of_another(rig: Rig, rows: int, position: int, key: int) -> None:
    address = rig.mapped(1)
    rig.write(segments((address, 20, 9, 5)))
    check = rig.verify(segments((address + rows * ROW_BYTES, position, 8, key)))
    assert (list(check.wrong), list(check.first)) == ([8], [position])


def test_verify_sees_what_its_stream_had_written_by_then(rig: Rig) -> None:
    address, stream = rig.mapped(1), rig.device.stream()
    for seed in SEEDS:
        rig.device.schedule(seed)
        checks = []
        for key in range(4):
            rig.device.write(stream, segments((address, 0, 16, key)))
            checks.append(rig.device.verify(stream, segments((address, 0, 16, key))))
        rig.device.synchronize(stream)
        assert [list(check.wrong) for check in checks] == [[0]] * 4
    rig.quiesce()


def test_verify_reports_every_row_of_unmapped_memory(rig: Rig) -> None:
    address, gone = rig.mapped(1), rig.reserve(1)
    rig.write(segments((address, 0, 2, 1)))
    check = rig.verify(segments((address, 0, 2, 1), (gone, 30, 5, 1), (address, 0, 2, 1)))
    assert list(check.wrong) == [0, 5, 0]
    assert check.first[1] == 30


def test_verify_of_no_rows_finds_nothing_wrong(rig: Rig) -> None:
    address = rig.mapped(1)
    parts = segments((address, 0, 0, 1), (address, 0, 2, 1), (address, 5, 0, 2))
    rig.write(parts)
    assert list(rig.verify(parts).wrong) == [0, 0, 0]
    nothing = rig.verify(segments())
    assert (list(nothing.wrong), nothing.size_bytes) == ([], 0)


def test_a_published_base_is_what_rows_are_relative_to(rig: Rig) -> None:
    address, stream, row = rig.mapped(2), rig.device.stream(), 7
    rig.write(segments((address, 0, 8, 3), (address + rig.frame_bytes, 0, 8, 4)))
    rig.device.publish(stream, [row], [address], [8])
    first = rig.device.verify(stream, relative(row, (0, 0, 8, 3)))
    rig.device.publish(stream, [row], [address + rig.frame_bytes], [8])
    second = rig.device.verify(stream, relative(row, (0, 0, 8, 4), (2 * ROW_BYTES, 2, 3, 4)))
    rig.device.synchronize(stream)
    assert (list(first.wrong), list(second.wrong)) == ([0], [0, 0])


def test_a_stale_base_shows_as_wrong_bytes(rig: Rig) -> None:
    """The host's books know the new base, the device's table has the old one."""
    address, stream, row = rig.mapped(2), rig.device.stream(), 7
    rig.write(segments((address, 0, 8, 3), (address + rig.frame_bytes, 0, 8, 4)))
    rig.device.publish(stream, [row], [address], [8])
    check = rig.device.verify(stream, relative(row, (0, 0, 8, 4)))
    rig.device.synchronize(stream)
    assert list(check.wrong) == [8]


def test_rows_beyond_the_published_length_are_not_there(rig: Rig) -> None:
    address, stream, row = rig.mapped(1), rig.device.stream(), 0
    rig.write(segments((address, 0, 8, 3)))
    rig.device.publish(stream, [row], [address], [5])
    check = rig.device.verify(stream, relative(row, (0, 0, 5, 3), (0, 0, 6, 3)))
    rig.device.synchronize(stream)
    assert list(check.wrong) == [0, 6]


def test_rows_are_written_where_the_table_says(rig: Rig) -> None:
    address, stream, row = rig.mapped(1), rig.device.stream(), 1
    rig.device.publish(stream, [row], [address], [4])
    rig.device.write(stream, relative(row, (ROW_BYTES, 1, 3, 6)))
    rig.device.synchronize(stream)
    assert rig.device.peek(address + ROW_BYTES, 3 * ROW_BYTES) == written(1, 3, 6)


@pytest.mark.parametrize("most_frames", [0, 1, 2])
def test_a_sample_is_smaller_and_finds_what_is_wrong_everywhere(rig: Rig, most_frames: int) -> None:
    address, count = rig.mapped(8), 8 * rig.frame_bytes // ROW_BYTES
    rig.write(segments((address, 0, count, 3)))
    most = most_frames * rig.frame_bytes
    stream = rig.device.stream()
    right = rig.device.verify(stream, segments((address, 0, count, 3)), most)
    wrong = rig.device.verify(stream, segments((address, 0, count, 4)), most)
    rig.device.synchronize(stream)
    assert list(right.wrong) == [0]
    assert 0 < wrong.wrong[0] <= max(most, rig.frame_bytes) // ROW_BYTES
    assert 0 < wrong.size_bytes <= max(most, rig.frame_bytes)


def test_strays_are_bytes_that_are_neither_value(rig: Rig) -> None:
    address, host = rig.mapped(1), rig.device.host_reserve(4096)
    runs = [FillRun(address, rig.frame_bytes), FillRun(host, 4096)]
    rig.device.fill(runs, 0xDB)
    rig.device.fill([FillRun(address + 3, 5)], 0)
    assert rig.device.strays(runs, b"\x00\xdb") == 0
    rig.device.poke(address + rig.frame_bytes - 2, b"ab")
    rig.device.poke(host + 17, b"c")
    assert rig.device.strays(runs, b"\x00\xdb") == 3
    assert rig.device.strays(runs[1:], b"\x00\xdb") == 1
    assert rig.device.strays([], b"\x00\xdb") == 0


def test_strays_in_memory_that_is_not_there_are_refused(rig: Rig) -> None:
    gone = rig.reserve(1)
    with pytest.raises(DeviceError):
        rig.device.strays([FillRun(gone, 16)], b"\x00\xdb")


def test_rows_in_host_memory_can_be_verified(rig: Rig) -> None:
    address, host = rig.mapped(1), rig.device.host_reserve(4096)
    rig.write(segments((address, 0, 8, 3)))
    assert rig.copy(OUT, [CopyRun(host, address, 8 * ROW_BYTES)])
    rig.device.poke(host + 5 * ROW_BYTES, b"?")
    check = rig.verify(segments((host, 0, 4, 3), (host + 4 * ROW_BYTES, 4, 4, 3)))
    assert list(check.wrong) == [0, 1]
    assert check.first[1] == 5
