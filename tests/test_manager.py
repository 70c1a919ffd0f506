"""What an embedding engine can rely on, call by call.

The generated tests say that every row does what the table says; these say what the calls add to
it: how much is mapped and when, who is reclaimed first, what an error names, and what a step costs
the device.
"""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import numpy as np
import pytest

import kvstate
from kvstate import (
    ArgumentError,
    DeviceError,
    DeviceFault,
    HostExhausted,
    IllegalTransition,
    LawViolation,
    Manager,
    OutOfFrames,
    OutOfRows,
    Sequence,
)
from kvstate.device import MAPPING_CALLS
from kvstate.gpu import HostDevice, NullDevice
from kvstate.view import view
from tests.conftest import FRAME, Open, small


def fill(kv: Manager, seq: Sequence, tokens: int) -> None:
    """Give a sequence that many more tokens."""
    kv.settle(kv.step(kv.batch([seq]), tokens))


def start(kv: Manager, tokens: int = 0, max_tokens: int = 16) -> Sequence:
    """An ACTIVE sequence with that many tokens."""
    seq = kv.create(max_tokens=max_tokens)
    seq.resume()
    if tokens:
        fill(kv, seq, tokens)
    return seq


def calls(kv: Manager) -> dict[str, int]:
    return dict(kv.device.calls)


def made(kv: Manager, before: dict[str, int]) -> dict[str, int]:
    """Device calls since `before`."""
    return {k: n - before.get(k, 0) for k, n in calls(kv).items() if n != before.get(k, 0)}


# Admission.


def test_create_holds_no_memory(open_manager: Open) -> None:
    kv = open_manager()
    seq = kv.create(max_tokens=16, salt=b"tenant")
    assert (seq.state_name, seq.capacity_tokens, seq.base) == ("CREATED", 0, None)
    assert kv.stats().frames == {"ABSENT": 8}


def test_what_can_never_fit_is_refused_at_once(open_manager: Open) -> None:
    """Report B140: a request larger than the pool must not block the queue."""
    kv = open_manager(frames=3, max_tokens=16)
    with pytest.raises(OutOfFrames, match=r"needs 4 frames: 3 are free.*refused by the limit"):
        kv.create(max_tokens=16)
    assert kv.create(max_tokens=12).max_tokens == 12


@pytest.mark.parametrize("tokens", [0, -1, 17])
def test_length_of_a_new_sequence(open_manager: Open, tokens: int) -> None:
    with pytest.raises(ArgumentError, match=f"max_tokens is {tokens}, an int: .* from 1 to 16 is"):
        open_manager().create(max_tokens=tokens)


def test_rows_run_out_and_come_back(open_manager: Open) -> None:
    kv = open_manager(max_sequences=2)
    first, _ = kv.create(), kv.create()
    with pytest.raises(OutOfRows, match="all 2 rows are in use"):
        kv.create()
    first.close()
    assert kv.create().state_name == "CREATED"
    assert kv.stats().refusals == {"OutOfRows": 1}


def test_gate_keeps_room_for_growth_but_never_stops_the_only_one(open_manager: Open) -> None:
    kv = open_manager(frames=8, max_utilization_for_resume=0.5, max_tokens=32)
    first = start(kv, 12, max_tokens=32)
    assert kv.admits(4)
    assert not kv.admits(5)
    second = start(kv, 4)
    third = kv.create()
    with pytest.raises(OutOfFrames) as caught:
        third.resume()
    assert caught.value.place == "gate"
    first.close()
    second.close()
    assert kv.admits(32)
    third.resume()


def test_capacity_questions_are_answered_in_frames(open_manager: Open) -> None:
    kv = open_manager(frames=7, max_tokens=28)
    assert [kv.largest_max_tokens(n) for n in (1, 2, 3, 7, 8)] == [28, 12, 8, 4, 0]


# Mapping.


def test_memory_is_mapped_as_it_is_needed(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv)
    assert kv.stats().frame_charges == {}
    fill(kv, seq, 1)
    assert (seq.capacity_tokens, kv.stats().frame_charges) == (4, {"sequence": 1})
    before = calls(kv)
    fill(kv, seq, 3)
    assert made(kv, before) == {}, "a step inside the capacity asks nothing of the device"
    fill(kv, seq, 1)
    assert made(kv, before) == {"create": 1, "map": 1}


def test_a_batch_grows_in_one_device_call(open_manager: Open) -> None:
    kv = open_manager()
    seqs = [start(kv) for _ in range(4)]
    before = calls(kv)
    step = kv.step(kv.batch(seqs), [1, 5, 0, 4])
    assert made(kv, before) == {"create": 1, "map": 1}
    assert [seq.capacity_tokens for seq in seqs] == [4, 8, 0, 4]
    kv.settle(step)


def test_a_batch_that_does_not_fit_changes_nothing(open_manager: Open) -> None:
    kv = open_manager(frames=4)
    one, other = start(kv, 8), start(kv, 4)
    before = view(kv)
    with pytest.raises(OutOfFrames, match=r"a step of 2 sequences needs 3 frames: 1 are free"):
        kv.step(kv.batch([one, other]), [4, 8])
    assert view(kv).sequences == before.sequences


def test_resize_grows_and_gives_back_in_place(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 4)
    seq.resize(16)
    assert kv.stats().frames == {"ABSENT": 4, "MAPPED": 4}
    seq.resize(4)
    assert kv.stats().frames == {"ABSENT": 4, "MAPPED": 1, "PARKED": 3}
    before = calls(kv)
    fill(kv, seq, 12)
    assert made(kv, before) == {}, "given-back frames are still mapped"
    with pytest.raises(ArgumentError, match="15 tokens is not from 16 to 16"):
        seq.resize(15)


def test_mapping_ahead_is_charged_to_nobody(open_manager: Open) -> None:
    """Report S11."""
    kv = open_manager(map_ahead_frames=2)
    seq = start(kv, 4)
    assert kv.stats().frame_charges == {"sequence": 1, "parked": 2}
    before = calls(kv)
    seq.resize(12)
    assert made(kv, before) == {}
    assert kv.stats().frame_charges == {"sequence": 3}


def test_mapping_ahead_gives_way_before_a_charge_fails(open_manager: Open) -> None:
    kv = open_manager(frames=4, map_ahead_frames=3)
    first = start(kv, 1)
    second = start(kv, 12)
    assert kv.stats().frames == {"MAPPED": 4}
    assert (first.capacity_tokens, second.capacity_tokens) == (4, 12)


# Parking and adoption.


def test_a_steady_state_makes_no_mapping_calls(open_manager: Open) -> None:
    kv = open_manager()
    before = calls(kv)
    for turn in range(20):
        one, other = start(kv, 16), start(kv, 16)
        one.close()
        other.close()
        mapping = [made(kv, before).get(kind, 0) for kind in MAPPING_CALLS]
        assert sum(mapping) == (4 if turn == 0 else 0)
        before = calls(kv)
    assert kv.stats().done["adoptions"] == 38


def test_adoption_can_be_switched_off(open_manager: Open) -> None:
    kv = open_manager(adopt=False)
    start(kv, 16).close()
    start(kv, 4)
    stats = kv.stats()
    assert stats.frames == {"ABSENT": 3, "MAPPED": 1, "PARKED": 4}
    assert "adoptions" not in stats.done


def test_a_longer_range_is_adopted_and_its_tail_stays_free(open_manager: Open) -> None:
    kv = open_manager()
    start(kv, 16).close()
    seq = start(kv, 4, max_tokens=4)
    assert kv.stats().frame_charges == {"sequence": 1, "parked": 3}
    assert seq.capacity_tokens == 4


# Reclaim.


def test_nothing_reclaimable_means_no_quiesce(open_manager: Open) -> None:
    kv = open_manager(frames=3)
    seq = start(kv, max_tokens=4)
    start(kv, 12, max_tokens=12)
    before = calls(kv)
    with pytest.raises(OutOfFrames, match="needs 1 frames: 0 are free, 0 can be reclaimed") as e:
        fill(kv, seq, 1)
    assert (e.value.needed, e.value.place) == (1, "budget")
    assert made(kv, before) == {}


def test_a_reclaim_quiesces_once_and_takes_only_what_is_missing(open_manager: Open) -> None:
    """Report B134."""
    kv = open_manager(frames=6, adopt=False)
    parked = [start(kv, 8, max_tokens=8), start(kv, 8, max_tokens=8)]
    one = start(kv, 8)
    for seq in parked:
        seq.close()
    before = calls(kv)
    fill(kv, one, 4)
    assert made(kv, before) == {"quiesce": 1, "unmap": 1, "map": 1}
    assert kv.stats().frames == {"MAPPED": 3, "PARKED": 3}


def test_a_reclaim_can_take_more_so_that_the_next_needs_no_quiesce(open_manager: Open) -> None:
    kv = open_manager(frames=6, adopt=False, reclaim_frames=3)
    parked = [start(kv, 8, max_tokens=8), start(kv, 8, max_tokens=8)]
    one = start(kv, 8)
    for seq in parked:
        seq.close()
    before = calls(kv)
    fill(kv, one, 8)
    assert kv.stats().frames == {"MAPPED": 4, "PARKED": 1, "POOLED": 1}
    start(kv, 4)
    assert made(kv, before)["quiesce"] == 1


def test_the_longest_parked_goes_first_and_tails_before_it(open_manager: Open) -> None:
    kv = open_manager(frames=8, max_tokens=32, adopt=False)
    old, young = start(kv, 8, max_tokens=8), start(kv, 8, max_tokens=8)
    holder = start(kv, 16)
    holder.rewind(12)
    holder.resize(12)
    old.close()
    young.close()
    before = calls(kv)
    start(kv, 4)
    tail_went = [range_.mapped for range_ in kv.arena.ranges.values()]
    assert tail_went == [2, 2, 3, 1]
    start(kv, 4)
    assert [range_.mapped for range_ in kv.arena.ranges.values()] == [1, 2, 3, 1, 1]
    assert made(kv, before)["quiesce"] == 2


def test_what_is_coming_is_waited_for_in_the_same_call(open_manager: Open) -> None:
    """Report S02: frames behind a fence are found by the pass that needs them."""
    kv = open_manager(HostDevice(streams="adversarial", seed=3), frames=4)
    first = start(kv, 16)
    step = kv.step(kv.batch([first]), 0)
    first.close()
    assert kv.stats().frames == {"COMING": 4}
    second = start(kv, 16)
    assert second.length_tokens == 16
    assert kv.stats().done["quiesces"] == 1
    kv.settle(step)


def test_addresses_come_from_parked_ranges(open_manager: Open) -> None:
    extent = (4 + 1) * FRAME
    kv = open_manager(arena_bytes=2 * extent, adopt=False)
    start(kv, 4).close()
    start(kv, 4).close()
    seq = start(kv, 4)
    assert seq.state_name == "ACTIVE"
    assert kv.stats().ranges == {"RESERVED": 1}
    start(kv)
    third = kv.create(max_tokens=4)
    with pytest.raises(OutOfFrames, match="refused by the addresses"):
        third.resume()


def test_trim_gives_memory_back_to_the_driver(open_manager: Open) -> None:
    """Report B133: after a burst nothing stays mapped."""
    kv = open_manager()
    start(kv, 16).close()
    kv.trim(keep_frames=1)
    assert kv.stats().frames == {"ABSENT": 7, "POOLED": 1}
    kv.trim()
    assert kv.stats().frames == {"ABSENT": 8}
    assert kv.device.ledger().frames == frozenset()


# The host tier.


def test_a_suspend_is_one_copy_where_the_host_has_one_run(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 15)
    before = calls(kv)
    seq.suspend()
    assert made(kv, before) == {"record": 1, "copy": 1}
    assert [(low, high) for _, low, high in seq.slots] == [(0, 8)]
    assert kv.stats().done["host_bytes_moved"] == 15 * 1024, "only what was written is copied"


def test_a_fragmented_host_is_used_in_the_longest_runs_first(open_manager: Open) -> None:
    kv = open_manager(frames=12, slots=8, max_sequences=8)
    parts = [start(kv, tokens) for tokens in (2, 4, 2, 4, 4)]
    for seq in parts:
        seq.suspend()
        kv.poll()
    parts[1].close()
    parts[3].close()
    seq = start(kv, 7)
    seq.suspend()
    assert [(low, high) for _, low, high in seq.slots] == [(1, 3), (4, 6)]


def test_a_full_host_leaves_the_sequence_intact(open_manager: Open) -> None:
    """Reports S04, B119: room is reserved before anything is touched."""
    kv = open_manager(slots=4)
    start(kv, 8).suspend()
    seq = start(kv, 3)
    before, called = view(kv), calls(kv)
    with pytest.raises(HostExhausted, match="needs 2 host slots: 0 of 4 are free, 0 are coming"):
        seq.suspend()
    assert view(kv) == before
    assert made(kv, called) == {}
    seq.drop()
    seq.resume()
    fill(kv, seq, 5)
    assert seq.length_tokens == 5


def test_without_a_host_tier_a_suspend_says_so(open_manager: Open) -> None:
    """Report B107."""
    kv = open_manager(slots=0)
    seq = start(kv, 1)
    with pytest.raises(HostExhausted, match="0 of 0 are free"):
        seq.suspend()


def test_host_slots_on_the_way_out_are_waited_for(open_manager: Open) -> None:
    kv = open_manager(HostDevice(streams="adversarial", seed=5), slots=4)
    first, second = start(kv, 8), start(kv, 8)
    first.suspend()
    first.drop()
    second.suspend()
    assert second.state_name == "SUSPENDED"
    assert kv.stats().host_slots["COMING"] == 4


def test_an_empty_sequence_is_suspended_without_a_copy(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv)
    seq.resize(4)
    before = calls(kv)
    seq.suspend(after=kv.device.record(None))
    assert made(kv, before) == {"record": 1, "copy": 1}, "only a wait for the caller's event"
    seq.resume()
    assert (seq.state_name, seq.length_tokens) == ("ACTIVE", 0)


# Steps.


def test_positions_and_lengths(open_manager: Open) -> None:
    kv = open_manager()
    one, other = start(kv, 3), start(kv)
    batch = kv.batch([other, one])
    step = kv.step(batch, [5, 2])
    assert step.start_tokens.tolist() == [0, 3]
    assert step.count_tokens.tolist() == [5, 2]
    assert (one.length_tokens, one.scheduled_tokens) == (3, 5)
    assert kv.settle(step) == ()
    assert (one.length_tokens, other.length_tokens) == (5, 5)


def test_overlapped_steps_settle_in_order(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv)
    batch = kv.batch([seq])
    first, second = kv.step(batch, 2), kv.step(batch, 2)
    with pytest.raises(IllegalTransition, match="settle the earlier step first"):
        kv.settle(second)
    kv.settle(first)
    kv.settle(second)
    assert seq.length_tokens == 4
    with pytest.raises(IllegalTransition, match="step 2: settle is illegal in state SETTLED"):
        kv.settle(second)


def test_rejected_tokens_void_what_continued_from_them(open_manager: Open) -> None:
    kv = open_manager()
    seq, other = start(kv, 2), start(kv, 2)
    draft = kv.step(kv.batch([seq, other]), 4)
    after = kv.step(kv.batch([other, seq]), 1)
    assert kv.settle(draft, [1, 4]) == ()
    assert (seq.length_tokens, seq.scheduled_tokens) == (3, 3)
    again = kv.step(kv.batch([seq]), 1)
    assert again.start_tokens.tolist() == [3]
    assert kv.settle(after) == (seq,)
    kv.settle(again)
    assert (seq.length_tokens, other.length_tokens) == (4, 7)


@pytest.mark.parametrize(
    ("accepted", "message"),
    [([1], r"accepted has the shape \(1,\): one number for each of 2 is wanted"),
     ([5, 1], r"accepted\[0\] is 5, an int: a whole number from 0 to 4"),
     ([1, -1], r"accepted\[1\] is -1"), ([[1, 1]], r"accepted has the shape \(1, 2\)"),
     (1, r"accepted has the shape \(\)")],
)  # fmt: skip
def test_accepted_must_fit_the_step(open_manager: Open, accepted: list[int], message: str) -> None:
    kv = open_manager()
    step = kv.step(kv.batch([start(kv), start(kv)]), 4)
    with pytest.raises(ArgumentError, match=message):
        kv.settle(step, accepted)
    kv.settle(step)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(-1, "tokens is -1, an int: a whole number from 0 to 16 is wanted"),
     ([1], "one number for all, or one for each of 2 is wanted"),
     ([1, 2, 3], r"tokens has the shape \(3,\)"), ([1, -1], r"tokens\[1\] is -1")],
)  # fmt: skip
def test_tokens_must_fit_the_batch(
    open_manager: Open, tokens: int | list[int], message: str
) -> None:
    kv = open_manager()
    with pytest.raises(ArgumentError, match=message):
        kv.step(kv.batch([start(kv), start(kv)]), tokens)


def test_a_step_beyond_max_tokens_is_refused_by_name(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 8, max_tokens=8)
    with pytest.raises(ArgumentError, match=r"sequence 1: step.*9 tokens is not from 0 to 8"):
        kv.step(kv.batch([seq]))


def test_a_batch_can_change(open_manager: Open) -> None:
    kv = open_manager()
    one, other = start(kv), start(kv)
    batch = kv.batch([one])
    kv.settle(kv.step(batch))
    batch.add(other)
    kv.settle(kv.step(batch, [2, 3]))
    batch.remove(one)
    kv.settle(kv.step(batch))
    assert (one.length_tokens, other.length_tokens) == (3, 4)
    assert (len(batch), other in batch, one in batch) == (1, True, False)


def test_a_suspended_sequence_takes_a_late_settle(open_manager: Open) -> None:
    """The write-out runs after the step, so the step's tokens are in it."""
    kv = open_manager()
    seq = start(kv, 3)
    step = kv.step(kv.batch([seq]), 2)
    seq.suspend()
    assert kv.settle(step) == ()
    assert (seq.state_name, seq.length_tokens) == ("SUSPENDED", 5)
    seq.commit([1, 2, 3, 4])
    seq.resume()
    assert kv.stats().pages["LOADING_COMMITTED"] == 2


def test_a_step_of_a_closed_sequence_is_void(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 1)
    step = kv.step(kv.batch([seq]))
    seq.close()
    assert (seq.state_name, kv.stats().sequences) == ("CLOSING", {"CLOSING": 1})
    assert kv.settle(step) == (seq,)
    assert (seq.state_name, kv.stats().sequences) == ("CLOSED", {})


# Commits and rewinds.


def test_full_blocks_are_committed_and_keep_their_tokens(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 7)
    seq.commit([10, 11, 12])
    seq.commit(np.array([13, 14], np.int64))
    assert kv.stats().pages == {"COMMITTED": 2, "ACTIVE": 2}
    assert [np.frombuffer(key, np.int32).tolist() for key in seq.keys] == [[10, 11], [12, 13]]
    with pytest.raises(ArgumentError, match="8 tokens is not from 5 to 7"):
        seq.commit([1, 2, 3])


def test_a_rewind_reopens_blocks_and_remembers_the_rest_of_one(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 7)
    seq.commit(range(7))
    seq.rewind(3)
    assert (seq.length_tokens, seq.committed_tokens) == (3, 3)
    assert kv.stats().pages == {"COMMITTED": 1, "ACTIVE": 3}
    fill(kv, seq, 1)
    seq.commit([99])
    assert [np.frombuffer(key, np.int32).tolist() for key in seq.keys] == [[0, 1], [2, 99]]


def test_a_rewind_waits_for_nobody(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 4)
    step = kv.step(kv.batch([seq]))
    with pytest.raises(IllegalTransition, match=r"needs \(steps == 0\) and \(not loading\)"):
        seq.rewind(1)
    kv.settle(step)
    with pytest.raises(ArgumentError, match="6 tokens is not from 0 to 5"):
        seq.rewind(6)


@pytest.mark.parametrize("how", ["never", "stopped"])
def test_some_sequences_never_commit(open_manager: Open, how: str) -> None:
    kv = open_manager()
    seq = kv.create(commit=how != "never")
    if how == "stopped":
        seq.stop_committing()
    seq.resume()
    fill(kv, seq, 4)
    with pytest.raises(IllegalTransition, match="needs committing"):
        seq.commit([1, 2])
    assert kv.stats().pages == {"ACTIVE": 2}


def test_a_dummy_has_a_length_and_no_meaning(open_manager: Open) -> None:
    kv = open_manager(frames=3)
    seq = kv.dummy(9)
    assert (seq.state_name, seq.length_tokens, seq.committing) == ("ACTIVE", 9, False)
    with pytest.raises(OutOfFrames):
        kv.dummy(5)
    assert list(kv.sequences.values()) == [seq]


# Failures.


def test_a_failed_map_is_undone_and_can_be_tried_again(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv)
    before = view(kv).sequences
    device.fail_next("map")
    with pytest.raises(DeviceError, match="device call map failed"):
        fill(kv, seq, 4)
    assert view(kv).sequences == before
    fill(kv, seq, 4)


def test_a_failed_copy_issue_unmaps_what_was_mapped_for_it(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv, 8)
    seq.suspend()
    kv.trim()
    device.fail_next("copy")
    with pytest.raises(DeviceError, match="copy"):
        seq.resume()
    assert kv.stats().frames == {"ABSENT": 6, "POOLED": 2}
    seq.resume()
    assert seq.state_name == "ACTIVE"


def test_a_failed_write_out_drops_the_sequence(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv, 8)
    device.fail_next("complete")
    seq.suspend()
    assert seq.state_name == "SUSPENDED"
    kv.poll()
    assert (seq.state_name, seq.length_tokens, kv.stats().host_slots) == (
        "DROPPED",
        0,
        {"FREE": 16},
    )


def test_a_failed_load_suspends_again_and_voids_its_steps(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv, 8)
    seq.suspend()
    kv.poll()
    device.fail_next("complete")
    seq.resume()
    step = kv.step(kv.batch([seq]))
    assert kv.settle(step) == (seq,)
    assert (seq.state_name, seq.length_tokens, seq.scheduled_tokens) == ("SUSPENDED", 8, 8)
    seq.resume()
    kv.poll()
    assert seq.state_name == "ACTIVE"


def test_an_undo_that_fails_poisons_by_name(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv, 8)
    seq.suspend()
    kv.trim()
    device.fail_next("copy")
    device.fail_next("unmap")
    with pytest.raises(DeviceFault, match="undo failed, the manager is poisoned"):
        seq.resume()
    for call in (kv.poll, seq.close, kv.create):
        with pytest.raises(DeviceFault, match="poisoned and refuses work: undo failed"):
            call()


def test_a_completion_that_nobody_waits_for_is_ignored(
    open_manager: Open, caplog: pytest.LogCaptureFixture
) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = start(kv, 4)
    seq.suspend()
    ended = kv.poll()
    before = view(kv)
    device._ended[ended[0].token] = ended[0]  # the device reports the same end again
    device._runs[ended[0].token] = (0, ())
    with caplog.at_level(logging.WARNING, "kvstate"):
        kv.poll()
    assert view(kv) == before
    assert kv.stats().done["late_completions"] == 1
    assert "names no transfer in flight" in caplog.text


# The manager itself.


def test_statistics_are_a_snapshot(open_manager: Open) -> None:
    kv = open_manager()
    seq = start(kv, 5)
    seq.commit([1, 2, 3])
    start(kv, 4).suspend()
    stats = kv.stats()
    assert stats.sequences == {"ACTIVE": 1, "SUSPENDED": 1}
    assert stats.pages["COMMITTED"] == 1
    assert stats.pages["HOST_HELD_ACTIVE"] == 2
    assert stats.frame_charges == {"sequence": 2, "fence": 1}
    assert stats.host_charges == {"suspended": 2}
    assert (stats.steps_in_flight, stats.transfers_in_flight) == (0, 1)
    assert stats.done["suspends"] == 1
    assert stats.as_dict()["frames"] == stats.frames
    seq.close()
    assert stats.sequences == {"ACTIVE": 1, "SUSPENDED": 1}, "it does not change afterwards"


def test_closing_gives_everything_back_twice(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    caplog.set_level(logging.WARNING, "kvstate")
    with Manager(small(), device, debug=True) as kv:
        step = kv.step(kv.batch([start(kv, 5)]), 1)
        start(kv, 4).suspend()
        kv.sequences[1].close()
        assert not device.ledger().empty
    assert device.ledger().empty
    assert "closing with 2 sequences open" in caplog.text
    kv.close()
    with pytest.raises(IllegalTransition, match="the manager: settle is illegal in state CLOSED"):
        kv.settle(step)


def test_what_cannot_be_given_back_goes_with_the_device(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    kv = Manager(small(), device)
    start(kv, 5)
    device.fail_next("unmap")
    kv.close()
    assert device.ledger().empty
    assert "closing failed" in caplog.text


def test_no_reservation_is_kept_when_opening_fails() -> None:
    device = HostDevice()
    device.fail_next("host_reserve")
    with pytest.raises(DeviceError, match="host_reserve"):
        Manager(small(), device)
    assert device.ledger().empty
    device.close()


def test_a_forgotten_manager_warns() -> None:
    kv = Manager(small(), NullDevice())
    with pytest.warns(ResourceWarning, match="was not closed"):
        kv.__del__()
    kv.close()
    del kv
    gc.collect()


def test_no_call_changes_what_a_step_in_flight_was_told(open_manager: Open) -> None:
    """Law 18: what steps remember is theirs, and never written into."""
    kv = open_manager()
    seq = kv.create(max_tokens=8)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 3))
    step = kv.step(kv.batch([seq]), 0)
    seq.resize(8)
    step.ends[step.place(seq)] = 1
    with pytest.raises(LawViolation, match=r"law 18 .*step 2 was issued as .*3, 3.*1, 1"):
        kv.poll()


def _spoiled(**options: Any) -> tuple[Manager, Sequence]:
    """A manager whose books are wrong from now on, and a sequence that runs."""
    kv = Manager(small(), HostDevice(), debug=True, **options)
    seq = start(kv, 4)
    kv.gpu.counts[0] += 1
    return kv, seq


def test_a_violation_poisons_unless_the_caller_says_otherwise() -> None:
    kv, seq = _spoiled()
    with pytest.raises(LawViolation, match=r"law 1 \(conservation\)"):
        seq.resize(8)
    kv.gpu.counts[0] -= 1
    with pytest.raises(DeviceFault, match=r"poisoned .*law 1 \(conservation\)"):
        seq.resize(4)
    kv.close()


def test_a_violation_may_be_logged_or_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[LawViolation] = []
    for asked in ("log", told.append):
        kv, seq = _spoiled(on_violation=asked)
        seq.resize(8)
        seq.resize(4)
        kv.gpu.counts[0] -= 1
        kv.close()
    assert len(told) == 2
    assert all("law 1 (conservation)" in str(one) for one in told)
    logged = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [line.partition(":")[0] for line in logged] == ["resize", "resize"]
    assert "law 1 (conservation)" in logged[0]


def test_what_a_callable_raises_is_raised_by_the_call() -> None:
    def strict(broken: LawViolation) -> None:
        raise ValueError(str(broken))

    kv, seq = _spoiled(on_violation=strict)
    with pytest.raises(ValueError, match="law 1"):
        seq.resize(8)
    kv.gpu.counts[0] -= 1
    kv.close()


@pytest.mark.parametrize(
    ("value", "debug", "said"),
    [
        ("ignore", True, 'on_violation is \'ignore\': "raise", "log" or a callable is wanted'),
        (7, True, "on_violation is 7, an int: an object with __call__ is wanted"),
        ("log", False, "on_violation is for debug=True: without it no law is checked"),
    ],
)
def test_on_violation_is_looked_at(value: Any, debug: bool, said: str) -> None:
    device = NullDevice()
    with pytest.raises(ArgumentError, match=re.escape(said)):
        Manager(small(), device, debug=debug, on_violation=value)
    Manager(small(), device).close()


def test_one_look_at_the_laws() -> None:
    with Manager(small(), HostDevice()) as kv:
        start(kv, 4)
        kvstate.check(kv)
        kv.gpu.counts[0] += 1
        with pytest.raises(LawViolation, match=r"law 1 \(conservation\)"):
            kvstate.check(kv)
        kv.gpu.counts[0] -= 1
        kvstate.check(kv)
    with pytest.raises(IllegalTransition):
        kvstate.check(kv)
    with pytest.raises(ArgumentError):
        kvstate.check(None)  # type: ignore[arg-type]


def test_debug_checks_the_laws_after_every_call(open_manager: Open) -> None:
    kv = open_manager()
    start(kv, 4)
    kv.gpu.counts[0] += 1
    with pytest.raises(LawViolation, match=r"law 1 \(conservation\)"):
        kv.poll()
    kv.gpu.counts[0] -= 1
