"""Rewinds into memory that others map: the sequence goes on elsewhere, with a copy of its own, and
nobody else sees what it writes then."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvstate import Manager, Sequence
from kvstate.errors import IllegalTransition, OutOfFrames
from kvstate.gpu import HostDevice
from tests.conftest import Open
from tests.test_reuse import go_on, said, wrong
from tests.test_spans import LONG, more


def pair(open_manager: Open, **changes: object) -> tuple[Manager, Sequence, Sequence]:
    """The owner of 16 tokens, and who maps the first 12 of them."""
    kv = open_manager(**({"slots": 0, "frames": 16} | changes))
    first, second = said(kv, LONG), more(kv, LONG)
    kv.poll()
    go_on(kv, second, LONG)
    assert first.shared_tokens == second.shared_tokens == 12
    return kv, first, second


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("owner", [True, False], ids=["owner", "alias"])
def test_it_goes_on_in_another_range(open_manager: Open, owner: bool, length: int) -> None:
    kv, first, second = pair(open_manager)
    seq, other = (first, second) if owner else (second, first)
    base = seq.base
    seq.rewind(length)
    assert seq.base != base
    assert seq.length_tokens == seq.committed_tokens == length
    assert seq.shared_tokens == length // 4 * 4, "whole frames are still shared"
    mine = [*LONG[:length], *[1 - LONG[length] % 2] * 3]
    go_on(kv, seq, mine)
    kv.poll()
    assert wrong(kv, seq, mine) == 0
    assert wrong(kv, other, LONG) == 0
    assert kv.probe_reuse([*LONG, 0]) == 16


def test_both_may_go_and_everybody_can_leave_in_any_order(open_manager: Open) -> None:
    kv, first, second = pair(open_manager, frames=24)
    third = more(kv, LONG)
    go_on(kv, third, LONG)
    first.rewind(5)
    third.rewind(9)
    kv.poll()
    for seq, length in ((first, 5), (second, 16), (third, 9)):
        assert wrong(kv, seq, LONG[:length]) == 0
    second.close()
    for seq, length in ((first, 5), (third, 9)):
        assert wrong(kv, seq, LONG[:length]) == 0
    first.close()
    assert wrong(kv, third, LONG[:9]) == 0


def test_what_others_map_is_the_registrys_then(open_manager: Open) -> None:
    kv, first, second = pair(open_manager)
    assert kv.stats().frame_charges == {"sequence": 4 + 1}
    first.rewind(2)
    kv.poll()
    assert kv.stats().frame_charges == {"registry": 3, "parked": 1, "sequence": 1 + 1}
    second.close()
    kv.trim()
    assert kv.stats().frame_charges == {"sequence": 1}


def test_a_rewind_waits_for_nothing_if_nobody_reads_there(open_manager: Open) -> None:
    kv = open_manager(spans="off")
    seq = said(kv, LONG)
    seq.rewind(6)
    assert "quiesces" not in kv.stats().done


def test_without_room_for_the_copy_nothing_has_changed(open_manager: Open) -> None:
    kv, first, second = pair(open_manager, frames=5)
    before = (first.base, first.length_tokens, first.committed_tokens)
    with pytest.raises(OutOfFrames, match="needs 1 frames"):
        first.rewind(2)
    assert (first.base, first.length_tokens, first.committed_tokens) == before
    assert wrong(kv, first, LONG) == wrong(kv, second, LONG) == 0


def test_a_copy_that_fails_drops_it_and_nobody_else(open_manager: Open) -> None:
    device = HostDevice()
    kv, first, second = pair(open_manager, device=device)
    device.fail_next("complete")
    first.rewind(6)
    kv.poll()
    assert first.state_name == "DROPPED"
    assert wrong(kv, second, LONG) == 0
    first.resume()
    assert kv.stats().ranges["RESERVED"] == 2


def test_after_new_weights_it_still_has_what_it_had(open_manager: Open) -> None:
    """Its blocks are found no more, so all of them are copied."""
    kv, first, second = pair(open_manager)
    kv.clear_reuse()
    for seq, length in ((second, 7), (first, 10)):
        seq.rewind(length)
        kv.poll()
        assert (seq.length_tokens, seq.committed_tokens) == (length, length)
        assert wrong(kv, seq, LONG[:length]) == 0


def test_steps_in_flight_forbid_it(open_manager: Open) -> None:
    kv, first, _ = pair(open_manager)
    step = kv.step(kv.batch([first]), 0)
    with pytest.raises(IllegalTransition, match="steps == 0"):
        first.rewind(3)
    kv.settle(step)
    first.rewind(3)


def test_turns_can_be_taken_back_one_after_the_other(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=32, max_tokens=32)
    turns = [LONG[:8], LONG[:12], LONG]
    seqs = [said(kv, turns[0])]
    for tokens in turns[1:]:
        seqs.append(more(kv, [*tokens, 0]))
        go_on(kv, seqs[-1], tokens)
    for seq, (before, _) in zip(seqs[1:], pairwise(turns), strict=True):
        seq.rewind(len(before) - 3)
        kv.poll()
        assert wrong(kv, seq, before[:-3]) == 0
    assert wrong(kv, seqs[0], turns[0]) == 0
