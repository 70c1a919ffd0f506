"""A full device: others have the memory that the budget allows. That is a lack of frames like any
other: what is parked or in spans is taken, nothing is refused for a margin, and callers are
told."""

from __future__ import annotations

from typing import cast

import pytest

from kvstate import Manager, OutOfFrames, Sequence, trace
from kvstate.campaign.player import Player
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice
from kvstate.observe import observe
from kvstate.reclaim import Ladder
from tests.conftest import Open, small
from tests.mistakes import forgets, found
from tests.test_reuse import said

FOUR = [5, 6, 7, 8]
"""A frame of tokens."""


def limit(kv: Manager, frames: int | None) -> None:
    """The device has memory for that many more frames than it holds."""
    cast("ByteDevice", kv.device).limit(None if frames is None else kv.gpu.existing + frames)


def begun(kv: Manager, tokens: int) -> Sequence:
    """A running sequence with room for that many tokens."""
    seq = kv.create(max_tokens=16)
    seq.resume()
    seq.resize(tokens)
    return seq


def test_what_the_device_has_not_is_refused_and_said(open_manager: Open) -> None:
    kv = open_manager()
    first = begun(kv, 8)
    limit(kv, 1)
    with pytest.raises(OutOfFrames, match="no memory for 5 more of the budget") as caught:
        begun(kv, 16)
    assert (caught.value.place, caught.value.denied, caught.value.free) == ("budget", 5, 1)
    assert kv.stats().frames["DENIED"] == 5
    assert kv.stats().done["device_full"] >= 1
    assert (first.capacity_tokens, kv.admits(8), kv.fits(8)) == (8, False, 0)
    assert kv.admits(4), "there is a frame in the pool"


def test_who_gives_way_makes_room(open_manager: Open) -> None:
    kv = open_manager()
    first = begun(kv, 8)
    limit(kv, 0)
    second = kv.create(max_tokens=16)
    second.resume()
    with pytest.raises(OutOfFrames):
        second.resize(8)
    first.drop()
    second.resize(8)
    assert kv.stats().frames == {"MAPPED": 2, "DENIED": 6}


def test_parked_memory_and_spans_are_taken(open_manager: Open) -> None:
    kv = open_manager(slots=0, spans="all")
    said(kv, [*FOUR, 1, 2, 3, 4]).close()
    begun(kv, 4).close()
    kv.poll()
    limit(kv, 0)
    assert begun(kv, 12).capacity_tokens == 12
    assert kv.stats().done["spilled_spans"] == 1


def test_nothing_is_refused_for_a_margin(open_manager: Open) -> None:
    kv = open_manager(frames=64, map_ahead_frames=16, max_tokens=128)
    seq = kv.create(max_tokens=128)
    limit(kv, 3)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 12))
    assert seq.capacity_tokens >= 12
    with pytest.raises(OutOfFrames):
        kv.step(kv.batch([seq]), 1)


def test_a_margin_of_which_the_device_has_a_part_is_that_part(open_manager: Open) -> None:
    """Four frames are needed, six are there, and the margin would be 64."""
    kv = open_manager(frames=128, map_ahead_frames=64, max_tokens=512)
    seq = kv.create(max_tokens=512)
    seq.resume()
    batch = kv.batch([seq])
    limit(kv, 6)
    kv.settle(kv.step(batch, 15))
    assert kv.stats().frames == {"MAPPED": 4, "POOLED": 2, "DENIED": 122}
    for parked in (1, 2, 2):
        kv.settle(kv.step(batch, 0))
        assert kv.stats().frames.get("PARKED") == parked
    kv.settle(kv.step(batch, 9))
    assert kv.stats().frames == {"MAPPED": 6, "DENIED": 122}
    with pytest.raises(OutOfFrames):
        kv.step(batch, 1)


def test_what_others_give_back_counts_from_the_next_poll_on(open_manager: Open) -> None:
    kv = open_manager()
    limit(kv, 1)
    with pytest.raises(OutOfFrames):
        begun(kv, 16)
    for seq in tuple(kv.sequences.values()):
        seq.close()
    kv.poll()
    assert not kv.admits(8)
    limit(kv, 2)
    kv.poll()
    assert kv.admits(12)
    assert not kv.admits(16)
    limit(kv, None)
    kv.trim()
    assert kv.stats().frames == {"ABSENT": 8}


def test_a_call_that_is_short_asks_again(open_manager: Open) -> None:
    kv = open_manager()
    limit(kv, 0)
    seq = begun(kv, 0)
    with pytest.raises(OutOfFrames):
        seq.resize(4)
    limit(kv, None)
    seq.resize(4)
    assert seq.capacity_tokens == 4


def test_a_record_says_what_the_device_had() -> None:
    """Played on a device with as much memory as it likes, everything comes to the same."""
    lines = list[bytes]()
    with Manager(small(), HostDevice(), record=lines.append) as kv:
        first, second = begun(kv, 8), begun(kv, 4)
        limit(kv, 1)
        with pytest.raises(OutOfFrames):
            second.resize(16)
        limit(kv, None)
        kv.poll()
        second.resize(16)
        assert kv.stats().frames == {"ABSENT": 2, "MAPPED": 6}
        first.close()
    calls = [trace.decode_call(line, 0) for line in lines[1:]]
    assert [call.error for call in calls].count("OutOfFrames") == 1
    assert [call.memory for call in calls if call.memory is not None] == [4, 8]
    player = Player(trace.Header(kvstate_trace=trace.VERSION, config=small()), HostDevice())
    player.play(calls)


def test_a_ladder_that_asks_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 12: the device has the memory again, and the call is refused all the same."""

    def play(kv: Manager) -> None:
        limit(kv, 0)
        seq = begun(kv, 0)
        with pytest.raises(OutOfFrames):
            seq.resize(4)
        limit(kv, None)
        seq.resize(4)

    for plant in (False, True):
        kv = Manager(small(), HostDevice())
        observe(kv, debug=True)
        if not plant:
            play(kv)
        else:
            forgets(Ladder, "regain")(monkeypatch)
            with pytest.raises(AssertionError) as caught:
                play(kv)
            assert found(caught.value, "progress", "free, parked, coming or in spans")  # type: ignore[arg-type]
            kv.life.poison("its books are wrong")
        kv.close()
